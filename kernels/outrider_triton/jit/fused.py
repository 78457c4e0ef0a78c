"""Skinny matrix products with their neighbours: the sum with the residual, the norm, the rotation and the cache's write.

A norm needs a whole row, and a program of a product has a few columns of it. So the product that ends a row leaves what
the next one needs: the row times the norm's weight, not yet divided by its root mean square, and each program's share of the
sum of squares. A factor of a row may as well come behind the next product as before it, so that one divides at its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import ask_for_rows, begin, begin_late
from outrider_triton.jit.matmul import ask_for_gates, gated, rows_and_tokens
from outrider_triton.jit.rows import as_cached


@triton.jit
def _squares(squares, tokens, shares, m, SHARES: tl.constexpr):
    """Shares of each token's sum of squares, loaded before a product and needed behind it."""
    share = tl.arange(0, SHARES)
    mask = (share[:, None] < shares) & (tokens[None, :] < m)
    return tl.load(squares + share[:, None] * m + tokens[None, :], mask=mask, other=0.0)


@triton.jit
def _scale(parts, width, eps):
    """What each token is multiplied with: one over the root mean square of its row of ``width`` numbers."""
    return tl.rsqrt(tl.sum(parts, axis=0) / width + eps)[None, :]


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
    rows, mine, tokens = rows_and_tokens(each, n, 1, BLOCK_N, BLOCK_M)
    if PDL:
        ask_for_rows(weight + tl.minimum(rows, n - 1).to(tl.int64) * k, ahead)
    # Weights too, which are far away: on their way before anything else.
    extra = tl.zeros([BLOCK_N], dtype=tl.float32)
    if HAS_BIAS:
        extra = tl.load(bias + rows, mask=mine, other=0.0).to(tl.float32)
    factor = tl.zeros([BLOCK_N], dtype=tl.float32)
    if NORM:
        factor = tl.load(norm + rows, mask=mine, other=0.0).to(tl.float32)
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
    kept = (total + extra[:, None] + old.to(tl.float32)).to(residual.dtype.element_ty)
    tl.store(residual + place, kept, mask=real)
    if NORM:
        wide = tl.where(real, kept.to(tl.float32), 0.0)
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
    rows, mine, tokens = rows_and_tokens(each, n, 1, BLOCK_N, BLOCK_M)
    if PDL:
        ask_for_gates(weight, rows, n, k, ahead)
    begin_late(PDL)

    parts = _squares(squares, tokens, shares, m, SHARES)
    gates = weight + rows.to(tl.int64) * k
    gate, up = _pair_of_products(
        x, gates, gates + tl.cast(n, tl.int64) * k, tokens, mine, m, k, x_stride, BLOCK_M, BLOCK_N, BLOCK_K, EVEN
    )
    scale = _scale(parts, k, eps)
    gate *= scale
    up *= scale
    if HAS_BIAS:
        gate += tl.load(bias + rows, mask=mine, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + n + rows, mask=mine, other=0.0).to(tl.float32)[:, None]
    made = gated(gate, up, out.dtype.element_ty)
    there = out + tokens.to(tl.int64)[None, :] * n + rows[:, None]
    tl.store(there, made, mask=(tokens[None, :] < m) & mine[:, None])


@triton.jit
def angles_of(cos, sin, tokens, lane, turns, angles_token, HALF: tl.constexpr):
    """Cosines and sines of pairs, of the low and of the high number [pairs, tokens]; of what doesn't turn 1 and 0."""
    angle = tokens.to(tl.int64)[None, :] * angles_token + lane[:, None]
    cos_low = tl.load(cos + angle, mask=turns, other=1.0)
    sin_low = tl.load(sin + angle, mask=turns, other=0.0)
    cos_high = tl.load(cos + angle + HALF, mask=turns, other=1.0)
    sin_high = tl.load(sin + angle + HALF, mask=turns, other=0.0)
    return cos_low, sin_low, cos_high, sin_high


@triton.jit
def write_rotated(
    first,
    second,
    cos_low,
    sin_low,
    cos_high,
    sin_high,
    q,
    k_cache,
    v_cache,
    slot,
    tokens,
    head,
    lane,
    heads,
    kv_heads,
    cache_slot,
    cache_head,
    real,
    HALF: tl.constexpr,
):
    """Turns pairs, ``first`` and ``second`` [pairs, tokens] in q's dtype, and stores queries, keys and values."""
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    turned_low = (first * cos_low.to(tl.float32) - second * sin_low.to(tl.float32)).to(q.dtype.element_ty)
    turned_high = (second * cos_high.to(tl.float32) + first * sin_high.to(tl.float32)).to(q.dtype.element_ty)

    place = (tokens.to(tl.int64)[None, :] * heads + head[:, None]) * (2 * HALF) + lane[:, None]
    queries = real & (head < heads)[:, None]
    tl.store(q + place, turned_low, mask=queries)
    tl.store(q + place + HALF, turned_high, mask=queries)
    key = head - heads
    place = slot[None, :] * cache_slot + key[:, None] * cache_head + lane[:, None]
    keys = real & ((key >= 0) & (key < kv_heads))[:, None]
    tl.store(k_cache + place, as_cached(turned_low, k_cache), mask=keys)
    tl.store(k_cache + place + HALF, as_cached(turned_high, k_cache), mask=keys)
    place -= kv_heads * cache_head
    values = real & (key >= kv_heads)[:, None]
    tl.store(v_cache + place, as_cached(turned_low, v_cache), mask=values)
    tl.store(v_cache + place + HALF, as_cached(turned_high, v_cache), mask=values)


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
    """Queries, keys and values of ``x [m, k]`` (SCALED: divided as in :func:`scaled_silu_mul`), rotated and written.

    A program has ``each`` of the pairs of numbers that turn together, HALF of them a head: ``weight`` has the rows of
    queries, keys and values, heads of 2 HALF rows each. Queries go to ``q [m, heads, 2 HALF]``, the others to their slots.
    """
    # One tile for both halves of a turn, so that it's as tall as the matrix unit takes it: lows first, then highs.
    PAIRS: tl.constexpr = BLOCK_N // 2
    lane_n = tl.arange(0, BLOCK_N)
    of_row = tl.program_id(0) * each + lane_n % PAIRS
    count = (heads + 2 * kv_heads) * HALF
    there = (lane_n % PAIRS < each) & (of_row < count)
    rows = tl.where(there, of_row // HALF * (2 * HALF) + of_row % HALF + lane_n // PAIRS * HALF, 0)
    tile = weight + rows.to(tl.int64) * k
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    if PDL:
        ask_for_rows(tile, ahead)
    extra = tl.zeros([BLOCK_N], dtype=tl.float32)
    if HAS_BIAS:
        extra = tl.load(bias + rows, mask=there, other=0.0).to(tl.float32)
    begin(PDL)

    # What is needed behind the product, on its way before it.
    pair = tl.arange(0, PAIRS)
    pairs = tl.program_id(0) * each + pair
    head = pairs // HALF
    lane = pairs % HALF
    known = tokens < m
    real = known[None, :] & ((pair < each) & (pairs < count))[:, None]
    slot = tl.load(slots + tokens, mask=known, other=0)
    turns = real & (head < heads + kv_heads)[:, None]
    cos_low, sin_low, cos_high, sin_high = angles_of(cos, sin, tokens, lane, turns, angles_token, HALF)
    if SCALED:
        parts = _squares(squares, tokens, shares, m, SHARES)

    column = tl.arange(0, BLOCK_K)
    own = x + tokens.to(tl.int64)[None, :] * x_stride + column[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for at in range(0, k, BLOCK_K):
        if EVEN:
            mask = there[:, None]
            t = tl.load(own + at, mask=known[None, :], other=0.0)
        else:
            mask = there[:, None] & (column[None, :] + at < k)
            t = tl.load(own + at, mask=known[None, :] & (column[:, None] + at < k), other=0.0)
        w = tl.load(tile[:, None] + column[None, :] + at, mask=mask, other=0.0, eviction_policy="evict_first")
        total = tl.dot(w, t, total)
    if SCALED:
        total *= _scale(parts, k, eps)
    # Rounded where the reference rounds: after the product and after the turn.
    total = (total + extra[:, None]).to(q.dtype.element_ty)
    first, second = tl.split(tl.permute(tl.reshape(total, [2, PAIRS, BLOCK_M]), (1, 2, 0)))
    write_rotated(
        first,
        second,
        cos_low,
        sin_low,
        cos_high,
        sin_high,
        q,
        k_cache,
        v_cache,
        slot,
        tokens,
        head,
        lane,
        heads,
        kv_heads,
        cache_slot,
        cache_head,
        real,
        HALF,
    )
