"""Skinny matrix products with their neighbours: the sum with the residual, the norm, the rotation and the cache's write.

A norm needs a whole row, and a program of a product has a few columns of it. So the product that ends a row leaves what
the next one needs: the row times the norm's weight, not yet divided by its root mean square, and each program's share of the
sum of squares. A factor of a row may as well come behind the next product as before it, so that one divides at its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import ask_for_rows, begin


@triton.jit
def _scale(squares, tokens, shares, m, width, eps, SHARES: tl.constexpr):
    """What each of ``tokens`` is multiplied with: one over the root mean square of its row of ``width`` numbers."""
    share = tl.arange(0, SHARES)
    mask = (share[:, None] < shares) & (tokens[None, :] < m)
    parts = tl.load(squares + share[:, None] * m + tokens[None, :], mask=mask, other=0.0)
    return tl.rsqrt(tl.sum(parts, axis=0) / width + eps)


@triton.jit(do_not_specialize=["m", "each", "ahead"])
def linear_add(
    x,
    weight,
    descriptor,
    bias,
    residual,
    norm,
    scaled,
    squares,
    m,
    n,
    k,
    x_stride,
    each,
    ahead,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """``residual [m, n] += x [m, k] @ weight [n, k].T`` (+ bias). Program (share of the rows of the weight, block of tokens).

    NORM: also ``scaled [m, n]``, the new residual times ``norm``, and ``squares [shares, m]``, sums of its squares.
    """
    lane_n = tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * each + lane_n
    mine = (lane_n < each) & (rows < n)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    if PDL:
        ask_for_rows(weight + tl.minimum(rows, n - 1).to(tl.int64) * k, ahead)
    begin(PDL)

    real = (tokens[None, :] < m) & mine[:, None]
    place = tokens.to(tl.int64)[None, :] * n + rows[:, None]
    old = tl.load(residual + place, mask=real, other=0.0)
    lane = tl.arange(0, BLOCK_K)
    tile = weight + rows.to(tl.int64)[:, None] * k + lane[None, :]
    column = x + tokens.to(tl.int64)[None, :] * x_stride + lane[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for at in range(0, k, BLOCK_K):
        if DESCRIPTOR:
            w = descriptor.load([tl.program_id(0) * each, at])
        elif EVEN:
            w = tl.load(tile + at, mask=mine[:, None], other=0.0, eviction_policy="evict_first")
        else:
            w = tl.load(tile + at, mask=mine[:, None] & (lane[None, :] + at < k), other=0.0, eviction_policy="evict_first")
        if EVEN:
            t = tl.load(column + at, mask=tokens[None, :] < m, other=0.0)
        else:
            t = tl.load(column + at, mask=(tokens[None, :] < m) & (lane[:, None] + at < k), other=0.0)
        total = tl.dot(w, t, total)
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=mine, other=0.0).to(tl.float32)[:, None]
    kept = (total + old.to(tl.float32)).to(residual.dtype.element_ty)
    tl.store(residual + place, kept, mask=real)
    if NORM:
        wide = tl.where(real, kept.to(tl.float32), 0.0)
        factor = tl.load(norm + rows, mask=mine, other=0.0).to(tl.float32)
        tl.store(scaled + place, (wide * factor[:, None]).to(scaled.dtype.element_ty), mask=real)
        tl.store(squares + tl.program_id(0) * m + tokens, tl.sum(wide * wide, axis=0), mask=tokens < m)


@triton.jit
def _pair_of_products(
    x,
    low,
    high,
    tokens,
    mine,
    m,
    k,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """``x`` with the rows of the weight at ``low`` and at ``high``, [BLOCK_N, BLOCK_M] in float32 each."""
    lane = tl.arange(0, BLOCK_K)
    lows = low[:, None] + lane[None, :]
    highs = high[:, None] + lane[None, :]
    column = x + tokens.to(tl.int64)[None, :] * x_stride + lane[:, None]
    first = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    second = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for at in range(0, k, BLOCK_K):
        if EVEN:
            mask = mine[:, None]
            t = tl.load(column + at, mask=tokens[None, :] < m, other=0.0)
        else:
            mask = mine[:, None] & (lane[None, :] + at < k)
            t = tl.load(column + at, mask=(tokens[None, :] < m) & (lane[:, None] + at < k), other=0.0)
        a = tl.load(lows + at, mask=mask, other=0.0, eviction_policy="evict_first")
        b = tl.load(highs + at, mask=mask, other=0.0, eviction_policy="evict_first")
        first = tl.dot(a, t, first)
        second = tl.dot(b, t, second)
    return first, second


@triton.jit(do_not_specialize=["m", "each", "ahead", "shares"])
def scaled_silu_mul(
    x,
    squares,
    weight,
    bias,
    out,
    eps,
    m,
    n,
    k,
    x_stride,
    shares,
    each,
    ahead,
    HAS_BIAS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """``silu(y @ gate.T) * (y @ up.T)``, y being ``x [m, k]`` divided by the root mean square that ``squares`` say."""
    lane_n = tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * each + lane_n
    mine = (lane_n < each) & (rows < n)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    if PDL:
        asked = weight + tl.minimum(rows, n - 1).to(tl.int64) * k
        ask_for_rows(asked, ahead)
        ask_for_rows(asked + n.to(tl.int64) * k, ahead)
    begin(PDL)

    gates = weight + rows.to(tl.int64) * k
    gate, up = _pair_of_products(
        x, gates, gates + n.to(tl.int64) * k, tokens, mine, m, k, x_stride, BLOCK_M, BLOCK_N, BLOCK_K, EVEN
    )
    scale = _scale(squares, tokens, shares, m, k, eps, SHARES)[None, :]
    gate *= scale
    up *= scale
    if HAS_BIAS:
        gate += tl.load(bias + rows, mask=mine, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + n + rows, mask=mine, other=0.0).to(tl.float32)[:, None]
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    up = up.to(out.dtype.element_ty).to(tl.float32)
    there = out + tokens.to(tl.int64)[None, :] * n + rows[:, None]
    tl.store(there, (gate * up).to(out.dtype.element_ty), mask=(tokens[None, :] < m) & mine[:, None])


@triton.jit(do_not_specialize=["m", "each", "ahead", "shares"])
def linear_rope_write_cache(
    x,
    squares,
    weight,
    bias,
    cos,
    sin,
    q,
    k_cache,
    v_cache,
    slots,
    eps,
    m,
    k,
    x_stride,
    shares,
    heads,
    kv_heads,
    angles_token,
    cache_slot,
    cache_head,
    each,
    ahead,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    SHARES: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Queries, keys and values of ``x [m, k]`` (SCALED: divided as in :func:`scaled_silu_mul`), turned and put away.

    A program has ``each`` of the pairs of numbers that turn together, HALF of them a head: ``weight`` has the rows of
    queries, keys and values, heads of 2 HALF rows each. Queries go to ``q [m, heads, 2 HALF]``, the others to their slots.
    """
    lane_n = tl.arange(0, BLOCK_N)
    pairs = tl.program_id(0) * each + lane_n
    mine = (lane_n < each) & (pairs < (heads + 2 * kv_heads) * HALF)
    head = pairs // HALF
    lane = pairs % HALF
    rows = tl.where(mine, head * 2 * HALF + lane, 0)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    low = weight + rows.to(tl.int64) * k
    high = low + HALF * k
    if PDL:
        ask_for_rows(low, ahead)
        ask_for_rows(high, ahead)
    begin(PDL)

    known = tokens < m
    slot = tl.load(slots + tokens, mask=known, other=0)
    first, second = _pair_of_products(x, low, high, tokens, mine, m, k, x_stride, BLOCK_M, BLOCK_N, BLOCK_K, EVEN)
    if SCALED:
        scale = _scale(squares, tokens, shares, m, k, eps, SHARES)[None, :]
        first *= scale
        second *= scale
    if HAS_BIAS:
        first += tl.load(bias + rows, mask=mine, other=0.0).to(tl.float32)[:, None]
        second += tl.load(bias + rows + HALF, mask=mine, other=0.0).to(tl.float32)[:, None]
    # Rounded where the reference rounds: after the product and after the turn.
    first = first.to(q.dtype.element_ty).to(tl.float32)
    second = second.to(q.dtype.element_ty).to(tl.float32)
    real = known[None, :] & mine[:, None]
    angle = tokens.to(tl.int64)[None, :] * angles_token + lane[:, None]
    turns = real & (head < heads + kv_heads)[:, None]
    cos_low = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + HALF, mask=turns, other=1.0).to(tl.float32)
    sin_high = tl.load(sin + angle + HALF, mask=turns, other=0.0).to(tl.float32)
    turned_low = (first * cos_low - second * sin_low).to(q.dtype.element_ty)
    turned_high = (second * cos_high + first * sin_high).to(q.dtype.element_ty)

    there = (tokens.to(tl.int64)[None, :] * heads + head[:, None]) * (2 * HALF) + lane[:, None]
    queries = real & (head < heads)[:, None]
    tl.store(q + there, turned_low, mask=queries)
    tl.store(q + there + HALF, turned_high, mask=queries)
    key = head - heads
    there = slot[None, :] * cache_slot + key[:, None] * cache_head + lane[:, None]
    keys = real & ((key >= 0) & (key < kv_heads))[:, None]
    tl.store(k_cache + there, turned_low, mask=keys)
    tl.store(k_cache + there + HALF, turned_high, mask=keys)
    there -= kv_heads * cache_head
    values = real & (key >= kv_heads)[:, None]
    tl.store(v_cache + there, turned_low, mask=values)
    tl.store(v_cache + there + HALF, turned_high, mask=values)
