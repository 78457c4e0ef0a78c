"""Kernels of latent attention: the product of each head, the cache write, and attention to latent vectors.

All heads share one latent vector for each cached token, which is the larger part of its key and its whole value. A program
therefore holds rows of several heads, and loads a latent vector once for scores and values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.attention.jit.exact import chunk_start, merge, quotient
from outrider_triton.attention.jit.paged import (
    add_block,
    cache_positions,
    empty_sums,
    store_rows,
    store_sums,
    visible_positions,
)
from outrider_triton.jit.dependent import begin
from outrider_triton.jit.rows import as_cached


@triton.jit(do_not_specialize=["tokens"])
def head_linear(
    x,
    weight,
    out,
    tokens,
    outer,
    inner,
    x_token,
    x_head,
    w_head,
    w_row,
    w_column,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTER: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ``x [tokens, heads, inner]`` by the transposed ``weight [heads, outer, inner]`` of each head; one program per
    (block of ``outer``, head, block of tokens). Columns are added in order. Strides are in elements. The first weights are
    loaded before the wait.
    """
    head = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(2) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)[:, None]
    row = tl.program_id(0) * BLOCK_OUTER + tl.arange(0, BLOCK_OUTER)[None, :]
    column = tl.arange(0, BLOCK_INNER)
    rows_of_x = x + token * x_token + head * x_head
    rows_of_weight = weight + head * w_head + row * w_row
    factors = tl.load(rows_of_weight + column[:, None] * w_column, mask=(row < outer) & (column < inner)[:, None], other=0.0)
    begin(PDL)
    values = tl.load(rows_of_x + column[None, :], mask=(token < tokens) & (column < inner)[None, :], other=0.0)
    acc = tl.dot(values, factors, input_precision="ieee")
    for start in range(BLOCK_INNER, inner, BLOCK_INNER):
        own = start + column
        values = tl.load(rows_of_x + own[None, :], mask=(token < tokens) & (own < inner)[None, :], other=0.0)
        factors = tl.load(rows_of_weight + own[:, None] * w_column, mask=(row < outer) & (own < inner)[:, None], other=0.0)
        acc = tl.dot(values, factors, acc, input_precision="ieee")
    place = (token * tl.num_programs(1) + head) * outer + row
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=(token < tokens) & (row < outer))


@triton.jit
def _rotate_rows(rows, pair, half, cos_low, sin_low, cos_high, sin_high, mask):
    """Rotate the rows at the pointers ``rows`` in place. Return both halves."""
    low = tl.load(rows + pair, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(rows + pair + half, mask=mask, other=0.0).to(tl.float32)
    turned_low = (low * cos_low - high * sin_low).to(rows.dtype.element_ty)
    turned_high = (high * cos_high + low * sin_high).to(rows.dtype.element_ty)
    tl.store(rows + pair, turned_low, mask=mask)
    tl.store(rows + pair + half, turned_high, mask=mask)
    return turned_low, turned_high


@triton.jit
def norm_rope_write_cache(
    latent,
    norm,
    eps,
    q,
    k,
    cos,
    sin,
    k_cache,
    v_cache,
    slots,
    heads,
    size,
    half,
    latent_token,
    q_token,
    q_head,
    k_token,
    angles_token,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate a token's queries ``q`` of all heads and its key ``k`` in place, and write the key and the norm of its latent
    vector to its cache slot; one program per token. Strides are in elements.
    """
    lane = tl.arange(0, BLOCK_SIZE)
    factors = tl.load(norm + lane, mask=lane < size, other=0.0)  # a weight: its load may precede the wait
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    inside = pair < half
    low = token * angles_token + pair
    cos_low = tl.load(cos + low, mask=inside, other=1.0).to(tl.float32)
    sin_low = tl.load(sin + low, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + low + half, mask=inside, other=1.0).to(tl.float32)
    sin_high = tl.load(sin + low + half, mask=inside, other=0.0).to(tl.float32)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    queries = q + token * q_token + head * q_head
    _rotate_rows(queries, pair, half, cos_low, sin_low, cos_high, sin_high, inside & (head < heads))
    key_low, key_high = _rotate_rows(k + token * k_token, pair, half, cos_low, sin_low, cos_high, sin_high, inside)
    keys = k_cache + slot * (2 * half) + pair
    tl.store(keys, as_cached(key_low, k_cache), mask=inside)
    tl.store(keys + half, as_cached(key_high, k_cache), mask=inside)
    values = tl.load(latent + token * latent_token + lane, mask=lane < size, other=0.0)
    wide = values.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    if norm.dtype.element_ty == values.dtype:  # a weight of a wider type multiplies what isn't rounded yet
        normed = normed.to(values.dtype).to(tl.float32)
    normed = (normed * factors.to(tl.float32)).to(values.dtype)
    tl.store(v_cache + slot * size + lane, as_cached(normed, v_cache), mask=lane < size)


@triton.jit
def _load_rows(x, token, head, x_token, x_head, size, row_mask, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)[None, :]
    place = x + token[:, None] * x_token + head[:, None] * x_head + lane
    return tl.load(place, mask=row_mask[:, None] & (lane < size), other=0.0)


@triton.jit
def _attend_to(
    at,
    high,
    queries,
    rotated_queries,
    k_cache,
    v_cache,
    table,
    context,
    query_index,
    row_mask,
    token,
    tree_mask,
    mask_width,
    scale,
    size,
    rotated,
    best,
    total,
    acc,
    PAGE: tl.constexpr,
    TREE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr,
):
    """Attend to the positions from ``at`` on, up to ``high``. Return the updated maximum, sum and weighted values."""
    lane, rotated_lane = tl.arange(0, BLOCK_SIZE)[None, :], tl.arange(0, BLOCK_ROTATED)[:, None]
    new, inside, slot = cache_positions(table, at, high, context, 0, 1, 0, PAGE, BLOCK_KV)
    values = tl.load(v_cache + slot[:, None] * size + lane, mask=inside[:, None] & (lane < size), other=0.0)
    keys = k_cache + slot[None, :] * rotated + rotated_lane
    keys = tl.load(keys, mask=inside[None, :] & (rotated_lane < rotated), other=0.0)
    values, keys = values.to(queries.dtype), keys.to(queries.dtype)
    scores = tl.dot(rotated_queries, keys, input_precision="ieee")
    scores = tl.dot(queries, tl.trans(values), scores, input_precision="ieee")
    visible = visible_positions(new, inside, query_index, row_mask, token, tree_mask, mask_width, 0, TREE)
    return add_block(scores, values, visible, scale, best, total, acc)


@triton.jit(do_not_specialize=["tokens", "batch", "shares"])
def latent_attention(
    q,
    q_rotated,
    k_cache,
    v_cache,
    query_start,
    seq_lens,
    block_table,
    tree_mask,
    out,
    parts,
    stats,
    counts,
    tokens,
    batch,
    scale,
    size,
    rotated,
    shares,
    q_token,
    q_head,
    r_token,
    r_head,
    table_width,
    mask_width,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    TREE: tl.constexpr,
    SHARED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute attention; one program per (block of rows, sequence, share of its positions). Row r of a sequence is query
    r // HEADS, head r % HEADS.

    SHARED: each program has one of ``shares`` shares. It stores its result to ``parts [token, head, shares, size]`` and its
    maximum and sum to ``stats [token, head, shares, 2]``, all float32; without a block, it stores a maximum of -inf and no
    part.

    CHUNK > 0: positions are divided at the fixed boundaries of :func:`outrider_triton.attention.jit.exact.chunk_start`, and
    merged in their order, so that the order of a row's sums is fixed. The last share stores the number of chunks to ``counts
    [token, head]``.
    """
    begin(PDL)
    sequence, share = tl.program_id(1), tl.program_id(2)
    first = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - first
    length = tl.load(seq_lens + sequence)
    context = length - count
    begin_row = tl.program_id(0) * BLOCK_ROWS
    row = begin_row + tl.arange(0, BLOCK_ROWS)
    query_index, head = row // HEADS, row % HEADS
    token, row_mask = (first + query_index).to(tl.int64), query_index < count
    table = block_table + sequence.to(tl.int64) * table_width
    lane = tl.arange(0, BLOCK_SIZE)[None, :]
    if (sequence == batch - 1) & (tl.program_id(0) == 0):  # padding, so that no later kernel reads uninitialised memory
        for place in range((first + count) * HEADS + share, tokens * HEADS, tl.num_programs(2)):
            padding = out + (tl.zeros([], dtype=tl.int64) + place) * size + lane
            tl.store(padding, tl.zeros([1, BLOCK_SIZE], dtype=out.dtype.element_ty), mask=lane < size)
    low, high = 0, length
    if not TREE:
        high = tl.minimum(length, context + (begin_row + BLOCK_ROWS - 1) // HEADS + 1)
    if SHARED and CHUNK == 0:
        each = tl.cdiv(tl.cdiv(high, BLOCK_KV), shares) * BLOCK_KV
        low = share * each
        high = tl.minimum(low + each, high)
    if begin_row < count * HEADS:
        queries = _load_rows(q, token, head, q_token, q_head, size, row_mask, BLOCK_SIZE)
        turned = _load_rows(q_rotated, token, head, r_token, r_head, rotated, row_mask, BLOCK_ROTATED)
        best, total, acc = empty_sums(BLOCK_ROWS, BLOCK_SIZE)
        place = token * HEADS + head
        if CHUNK > 0:
            chunk, end = share, high
            if SHARED:
                end = tl.minimum(chunk_start(share + 1, CHUNK), high)
            low = chunk_start(share, CHUNK)
            start = low
            while start < end:
                chunk += 1
                next_start = chunk_start(chunk, CHUNK)
                sums = empty_sums(BLOCK_ROWS, BLOCK_SIZE)
                for at in range(start, tl.minimum(next_start, end), BLOCK_KV):
                    sums = _attend_to(
                        at,
                        high,
                        queries,
                        turned,
                        k_cache,
                        v_cache,
                        table,
                        context,
                        query_index,
                        row_mask,
                        token,
                        tree_mask,
                        mask_width,
                        scale,
                        size,
                        rotated,
                        *sums,
                        PAGE=PAGE,
                        TREE=TREE,
                        BLOCK_KV=BLOCK_KV,
                        BLOCK_SIZE=BLOCK_SIZE,
                        BLOCK_ROTATED=BLOCK_ROTATED,
                    )
                best, total, acc = merge(best, total, acc, *sums)
                start = next_start
            result = quotient(acc, total)
            if SHARED:
                is_last = (low < high) & (end == high)
                tl.store(counts + place, tl.zeros([BLOCK_ROWS], dtype=tl.int32) + chunk, mask=row_mask & is_last)
        else:
            for at in range(low, high, BLOCK_KV):
                best, total, acc = _attend_to(
                    at,
                    high,
                    queries,
                    turned,
                    k_cache,
                    v_cache,
                    table,
                    context,
                    query_index,
                    row_mask,
                    token,
                    tree_mask,
                    mask_width,
                    scale,
                    size,
                    rotated,
                    best,
                    total,
                    acc,
                    PAGE=PAGE,
                    TREE=TREE,
                    BLOCK_KV=BLOCK_KV,
                    BLOCK_SIZE=BLOCK_SIZE,
                    BLOCK_ROTATED=BLOCK_ROTATED,
                )
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if SHARED:
            place = place * shares + share
            store_rows(parts, place, tl.arange(0, BLOCK_SIZE), size, acc, row_mask & (low < high))
            store_sums(stats, place, best, total, row_mask)
        else:
            store_rows(out, place, tl.arange(0, BLOCK_SIZE), size, result.to(out.dtype.element_ty), row_mask)
