"""Skinny matrix products fused with the residual sum, the norm, the rotation and the cache write.

A norm needs a whole row, and a program of a product has only a few columns of it. So the product that ends a row stores the
row times the norm's weight, not yet divided by its root mean square, and each program's partial sum of squares. A row's
factor commutes with the next product, which divides at its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin, prefetch_rows
from outrider_triton.jit.rows import as_cached
from outrider_triton.products.jit.matmul import inverse_rms, load_squares, rows_and_tokens, sum_of_tiles


@triton.jit(do_not_specialize=["m", "rows_per_program", "prefetch_columns"])
def linear_add(
    x,
    weight,
    bias,
    residual,
    norm,
    scaled,
    squares,
    m,
    n,
    k,
    x_stride,
    rows_per_program,
    prefetch_columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ``residual [m, n] += x [m, k] @ weight [n, k].T`` (+ bias); one program per (share of weight rows, block of
    tokens).

    With ``norm``, also store ``scaled [m, n]``, the new residual times ``norm``, and ``squares [shares, m]``, partial sums of
    squares.
    """
    rows, row_mask, tokens = rows_and_tokens(rows_per_program, n, 1, BLOCK_N, BLOCK_M)
    if PDL:
        prefetch_rows(weight + tl.minimum(rows, n - 1).to(tl.int64) * k, prefetch_columns)
    # Bias and norm weights are far away, so their loads come first.
    bias_values = tl.zeros([BLOCK_N], dtype=tl.float32)
    if bias is not None:
        bias_values = tl.load(bias + rows, mask=row_mask, other=0.0).to(tl.float32)
    factor = tl.zeros([BLOCK_N], dtype=tl.float32)
    if norm is not None:
        factor = tl.load(norm + rows, mask=row_mask, other=0.0).to(tl.float32)
    begin(PDL)

    mask = (tokens[None, :] < m) & row_mask[:, None]
    offset = tokens.to(tl.int64)[None, :] * n + rows[:, None]
    residual_values = tl.load(residual + offset, mask=mask, other=0.0)
    lane = tl.arange(0, BLOCK_K)
    tile = weight + rows.to(tl.int64)[:, None] * k + lane[None, :]
    column = x + tokens.to(tl.int64)[None, :] * x_stride + lane[:, None]
    total = sum_of_tiles(tile, column, None, row_mask, tokens < m, 0, 0, k, BLOCK_N, BLOCK_M, BLOCK_K, EVEN)
    updated = (total + bias_values[:, None] + residual_values.to(tl.float32)).to(residual.dtype.element_ty)
    tl.store(residual + offset, updated, mask=mask)
    if norm is not None:
        updated_wide = tl.where(mask, updated.to(tl.float32), 0.0)
        tl.store(scaled + offset, (updated_wide * factor[:, None]).to(scaled.dtype.element_ty), mask=mask)
        tl.store(squares + tl.program_id(0) * m + tokens, tl.sum(updated_wide * updated_wide, axis=0), mask=tokens < m)


@triton.jit
def load_angles(rotary, tokens, lane, rotates, HALF: tl.constexpr):
    """Load cosines and sines of the low and high elements of pairs, [pairs, tokens]; 1 and 0 where ``rotates`` is False.

    ``rotary`` is the tuple that :func:`write_rotated` takes.
    """
    cos, sin, _, _, _, _, _, angles_token, _, _ = rotary
    angle = tokens.to(tl.int64)[None, :] * angles_token + lane[:, None]
    cos_low = tl.load(cos + angle, mask=rotates, other=1.0)
    sin_low = tl.load(sin + angle, mask=rotates, other=0.0)
    cos_high = tl.load(cos + angle + HALF, mask=rotates, other=1.0)
    sin_high = tl.load(sin + angle + HALF, mask=rotates, other=0.0)
    return cos_low, sin_low, cos_high, sin_high


@triton.jit
def write_rotated(first, second, angles, q, rotary, slot, tokens, head, lane, mask, HALF: tl.constexpr):
    """Rotate pairs ``first`` and ``second`` [pairs, tokens] in q's dtype, and store queries, keys and values.

    ``angles`` is the result of :func:`load_angles`. ``rotary`` is (cos, sin, k_cache, v_cache, slots, heads, kv_heads,
    angles_token, cache_slot, cache_head), as in :func:`linear_rope_write_cache`.
    """
    cos_low, sin_low, cos_high, sin_high = angles
    _, _, k_cache, v_cache, _, heads, kv_heads, _, cache_slot, cache_head = rotary
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    rotated_low = (first * cos_low.to(tl.float32) - second * sin_low.to(tl.float32)).to(q.dtype.element_ty)
    rotated_high = (second * cos_high.to(tl.float32) + first * sin_high.to(tl.float32)).to(q.dtype.element_ty)

    offset = (tokens.to(tl.int64)[None, :] * heads + head[:, None]) * (2 * HALF) + lane[:, None]
    queries = mask & (head < heads)[:, None]
    tl.store(q + offset, rotated_low, mask=queries)
    tl.store(q + offset + HALF, rotated_high, mask=queries)
    key = head - heads
    offset = slot[None, :] * cache_slot + key[:, None] * cache_head + lane[:, None]
    keys = mask & ((key >= 0) & (key < kv_heads))[:, None]
    tl.store(k_cache + offset, as_cached(rotated_low, k_cache), mask=keys)
    tl.store(k_cache + offset + HALF, as_cached(rotated_high, k_cache), mask=keys)
    offset -= kv_heads * cache_head
    values = mask & (key >= kv_heads)[:, None]
    tl.store(v_cache + offset, as_cached(rotated_low, v_cache), mask=values)
    tl.store(v_cache + offset + HALF, as_cached(rotated_high, v_cache), mask=values)


@triton.jit(do_not_specialize=["m", "pairs_per_program", "prefetch_columns", "shares"])
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
    pairs_per_program,
    prefetch_columns,
    SHARES: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ``x [m, k]`` into queries, keys and values, rotate queries and keys, and write keys and values to the cache.

    A program has ``pairs_per_program`` of the pairs of elements that rotate together, HALF of them per head. ``weight`` has
    the rows of queries, keys and values, 2 HALF rows per head. Queries go to ``q [m, heads, 2 HALF]``, keys and values to
    their slots. With ``squares``, ``x`` is divided as in :func:`outrider_triton.products.jit.matmul.linear_silu_mul`.
    """
    # One tile holds both halves of each pair, low rows before high ones, so that it fills the matrix unit.
    PAIRS: tl.constexpr = BLOCK_N // 2
    lane_n = tl.arange(0, BLOCK_N)
    pair_of_row = tl.program_id(0) * pairs_per_program + lane_n % PAIRS
    count = (heads + 2 * kv_heads) * HALF
    row_mask = (lane_n % PAIRS < pairs_per_program) & (pair_of_row < count)
    rows = tl.where(row_mask, pair_of_row // HALF * (2 * HALF) + pair_of_row % HALF + lane_n // PAIRS * HALF, 0)
    tile = weight + rows.to(tl.int64) * k
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    if PDL:
        prefetch_rows(tile, prefetch_columns)
    bias_values = tl.zeros([BLOCK_N], dtype=tl.float32)
    if bias is not None:
        bias_values = tl.load(bias + rows, mask=row_mask, other=0.0).to(tl.float32)
    begin(PDL)

    # Loads that the epilogue needs overlap with the product.
    pair = tl.arange(0, PAIRS)
    pairs = tl.program_id(0) * pairs_per_program + pair
    head = pairs // HALF
    lane = pairs % HALF
    token_mask = tokens < m
    mask = token_mask[None, :] & ((pair < pairs_per_program) & (pairs < count))[:, None]
    slot = tl.load(slots + tokens, mask=token_mask, other=0)
    rotates = mask & (head < heads + kv_heads)[:, None]
    rotary = cos, sin, k_cache, v_cache, slots, heads, kv_heads, angles_token, cache_slot, cache_head
    angles = load_angles(rotary, tokens, lane, rotates, HALF)
    if squares is not None:
        parts = load_squares(squares, tokens, shares, m, SHARES)

    column = tl.arange(0, BLOCK_K)
    x_tile = x + tokens.to(tl.int64)[None, :] * x_stride + column[:, None]
    w_tile = tile[:, None] + column[None, :]
    total = sum_of_tiles(w_tile, x_tile, None, row_mask, token_mask, 0, 0, k, BLOCK_N, BLOCK_M, BLOCK_K, EVEN)
    if squares is not None:
        total *= inverse_rms(parts, k, eps)
    # Rounded where the reference rounds: after the product and after the rotation.
    total = (total + bias_values[:, None]).to(q.dtype.element_ty)
    first, second = tl.split(tl.permute(tl.reshape(total, [2, PAIRS, BLOCK_M]), (1, 2, 0)))
    write_rotated(first, second, angles, q, rotary, slot, tokens, head, lane, mask, HALF)
