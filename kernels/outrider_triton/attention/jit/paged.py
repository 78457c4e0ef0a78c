"""Paged attention for decode, verify with or without a tree mask, and prefill; a second kernel joins the splits.

Online softmax over blocks of the cache (Dao et al. 2022). For few queries, programs share the cached tokens (Flash decoding,
Dao et al. 2023). A program holds the queries of one key head's group, so it reads keys once for the whole group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import allow_next_kernel, begin, wait_for_previous_kernel
from outrider_triton.quantized.jit.nibble_planes import store_in_planes


@triton.jit
def program_share(
    query_start,
    seq_lens,
    kv_heads,
    TREE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Return this program's sequence and share of its positions: the first new token, the number of new tokens, the context
    length, and the range of positions to attend to.
    """
    sequence = tl.program_id(1) // kv_heads
    first = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - first
    length = tl.load(seq_lens + sequence)
    context = length - count
    begin_query = tl.program_id(0) * QUERIES
    low = 0
    high = length
    if not TREE:
        high = tl.minimum(length, context + begin_query + QUERIES)
    if WINDOW > 0:
        low = tl.maximum(0, context + begin_query - WINDOW + 1) // BLOCK_KV * BLOCK_KV
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(high - low, BLOCK_KV), SPLITS) * BLOCK_KV
        low = low + tl.program_id(2) * share
        high = tl.minimum(low + share, high)
    if begin_query >= count:
        high = low
    return first, count, context, low, high


@triton.jit
def cache_positions(table, at, high, context, kv_head, cache_slot, cache_head, PAGE: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Return, for positions from ``at`` to ``high``, their indices among the new tokens, a mask, and their cache offsets.

    Indices are negative in the context. The mask is False from ``high`` on.
    """
    position = at + tl.arange(0, BLOCK_KV)
    inside = position < high
    page = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
    return position - context, inside, (page * PAGE + position % PAGE) * cache_slot + kv_head * cache_head


@triton.jit
def keys_and_values(k_cache, v_cache, slot, lane, size, which, TYPE: tl.constexpr):
    """Load keys [size, BLOCK_KV] and values [BLOCK_KV, size] of the cache slots ``slot`` where ``which``, zeros elsewhere,
    converted to TYPE.
    """
    keys = tl.load(k_cache + slot[None, :] + lane[:, None], mask=which[None, :] & (lane[:, None] < size), other=0.0)
    values = tl.load(v_cache + slot[:, None] + lane[None, :], mask=which[:, None] & (lane[None, :] < size), other=0.0)
    return keys.to(TYPE), values.to(TYPE)


@triton.jit
def _add_new(old_keys, old_values, k_cache, v_cache, slot, lane, size, new, inside):
    """Load the keys and values of a block's new tokens, and return them with those of the context, loaded before."""
    is_old = inside & (new < 0)
    keys, values = keys_and_values(k_cache, v_cache, slot, lane, size, inside & (new >= 0), old_keys.dtype)
    return tl.where(is_old[None, :], old_keys, keys), tl.where(is_old[:, None], old_values, values)


@triton.jit
def visible_positions(
    new, inside, query_index, row_mask, token, tree_mask, mask_width, WINDOW: tl.constexpr, TREE: tl.constexpr
):
    """Return the mask [BLOCK_ROWS, BLOCK_KV] of positions that each query row attends to. ``new`` is the result of
    :func:`cache_positions`.
    """
    if TREE:
        mask_bits = (new[None, :] >= 0) & row_mask[:, None] & inside[None, :]
        bits = tl.load(tree_mask + token[:, None] * mask_width + new[None, :], mask=mask_bits, other=0)
        visible = (new[None, :] < 0) | (bits != 0)
    else:
        visible = new[None, :] <= query_index[:, None]
    visible = visible & inside[None, :]
    if WINDOW > 0:
        visible = visible & (new[None, :] > query_index[:, None] - WINDOW)
    return visible


@triton.jit
def zero_padding(out, token, tokens, step, heads, kv_head, size, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Store zeros to ``out`` [tokens, heads, size] for padding tokens after the last sequence, so that no later kernel reads
    uninitialised memory.

    The program stores the heads of one group for every ``step``-th token from ``token`` on.
    """
    lane = tl.arange(0, BLOCK_SIZE)
    for at in range(token, tokens, step):
        heads_before = (tl.zeros([], dtype=tl.int64) + at) * heads + kv_head * GROUP
        for head in tl.static_range(GROUP):
            offset = (heads_before + head) * size + lane
            tl.store(out + offset, tl.zeros([BLOCK_SIZE], dtype=out.dtype.element_ty), mask=lane < size)


@triton.jit
def load_queries(
    q,
    first,
    count,
    begin_query,
    kv_head,
    q_token,
    q_head,
    size,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Load a block of query rows. Return each row's index among the new tokens, its token, its head, the mask of valid rows,
    and the queries [BLOCK_ROWS, BLOCK_SIZE].
    """
    row = tl.arange(0, BLOCK_ROWS)
    lane = tl.arange(0, BLOCK_SIZE)
    query_index = begin_query + row // GROUP
    token = (first + query_index).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    row_mask = (query_index < count) & (row < BLOCK_ROWS // GROUP * GROUP)
    queries = tl.load(
        q + token[:, None] * q_token + head[:, None] * q_head + lane[None, :],
        mask=row_mask[:, None] & (lane[None, :] < size),
        other=0.0,
    )
    return query_index, token, head, row_mask, queries


@triton.jit
def attend(queries, keys, values, visible, scale, best, total, acc):
    """Attend to a block of keys [size, BLOCK_KV] and values [BLOCK_KV, size].

    Return the updated maximum, sum and weighted values of each row.
    """
    return add_block(tl.dot(queries, keys, input_precision="ieee"), values, visible, scale, best, total, acc)


@triton.jit
def add_block(scores, values, visible, scale, best, total, acc):
    """Add values [BLOCK_KV, size], weighted by the exponentials of their ``scores`` [BLOCK_ROWS, BLOCK_KV] times ``scale``.

    Return the updated maximum, sum and weighted values of each row.
    """
    scores *= scale * 1.4426950408889634
    scores = tl.where(visible, scores, -float("inf"))
    higher = tl.maximum(best, tl.max(scores, axis=1))
    # A row without a visible position keeps its maximum at -inf; 0 in its place keeps the exponents from NaN.
    floor = tl.where(higher == -float("inf"), 0.0, higher)
    weights = tl.exp2(scores - floor[:, None])
    shrink = tl.exp2(best - floor)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def empty_sums(ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return the maximum, sum and weighted values of ROWS rows that have attended to no position."""
    best = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    return best, tl.zeros([ROWS], dtype=tl.float32), tl.zeros([ROWS, SIZE], dtype=tl.float32)


@triton.jit
def sink_sums(sinks, head, mask):
    """Return the maximum and sum of rows that have attended to the sink of their ``head`` alone; where not ``mask``, to
    nothing.
    """
    best = tl.load(sinks + head, mask=mask, other=-float("inf")).to(tl.float32) * 1.4426950408889634
    return best, tl.where(best == -float("inf"), 0.0, 1.0)


@triton.jit
def store_rows(out, place, lane, size, result, mask):
    """Store ``result`` [BLOCK_ROWS, BLOCK_SIZE] to the rows ``place`` of ``out`` [rows, size] where ``mask``."""
    own = out + place[:, None] * size + lane[None, :]
    tl.store(own, result.to(out.dtype.element_ty), mask=mask[:, None] & (lane[None, :] < size))


@triton.jit
def store_sums(stats, place, best, total, mask):
    """Store maxima and sums of the rows ``place`` to ``stats`` [rows, 2] where ``mask``."""
    tl.store(stats + place * 2, best, mask=mask)
    tl.store(stats + place * 2 + 1, total, mask=mask)


@triton.jit(do_not_specialize=["tokens", "batch"], do_not_specialize_on_alignment=["seq_lens"])
def paged_attention(
    q,
    k_cache,
    v_cache,
    query_start,
    seq_lens,
    block_table,
    tree_mask,
    out,
    parts,
    stats,
    sinks,
    tokens,
    batch,
    heads,
    scale,
    size,
    q_token,
    q_head,
    table_width,
    mask_width,
    cache_slot,
    cache_head,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    SETTLED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute attention; one program per (block of queries, sequence and key head, split).

    Row r of a block is query r // GROUP, head r % GROUP. A split has one SPLITS-th of *this* sequence's blocks, stores its
    result to ``parts [token, head, split, size]`` and its maximum and sum to ``stats [token, head, split, 2]``, all float32;
    without a block, it stores a maximum of -inf and no part. The first split, which has a block, begins with ``sinks``
    [heads] unless they are None.

    SETTLED: the kernels that wrote lengths, block table and the cache up to the new tokens have ended (not only begun). A
    program then reads its first block while the preceding kernel, which computes the queries, still runs.
    """
    allow_next_kernel(PDL)
    if not SETTLED:
        wait_for_previous_kernel(PDL)
    kv_heads = heads // GROUP
    sequence, kv_head, split = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads, tl.program_id(2)
    QUERIES: tl.constexpr = BLOCK_ROWS // GROUP
    first, count, context, low, high = program_share(query_start, seq_lens, kv_heads, TREE, WINDOW, SPLITS, QUERIES, BLOCK_KV)
    lane, begin_query, has_tokens = tl.arange(0, BLOCK_SIZE), tl.program_id(0) * QUERIES, low < high
    table = block_table + sequence.to(tl.int64) * table_width
    if SETTLED:
        new, inside, slot = cache_positions(table, low, high, context, kv_head, cache_slot, cache_head, PAGE, BLOCK_KV)
        old_keys, old_values = keys_and_values(k_cache, v_cache, slot, lane, size, inside & (new < 0), q.dtype.element_ty)
        wait_for_previous_kernel(PDL)
    if (sequence == batch - 1) & (tl.program_id(0) == 0):
        zero_padding(out, first + count + split, tokens, SPLITS, heads, kv_head, size, GROUP, BLOCK_SIZE)
    if begin_query < count:
        query_index, token, head, row_mask, queries = load_queries(
            q, first, count, begin_query, kv_head, q_token, q_head, size, GROUP, BLOCK_ROWS, BLOCK_SIZE
        )
        best, total, acc = empty_sums(BLOCK_ROWS, BLOCK_SIZE)
        if sinks is not None:
            best, total = sink_sums(sinks, head, row_mask & (split == 0))
        if SETTLED:
            keys, values = _add_new(old_keys, old_values, k_cache, v_cache, slot, lane, size, new, inside)
            visible = visible_positions(new, inside, query_index, row_mask, token, tree_mask, mask_width, WINDOW, TREE)
            best, total, acc = attend(queries, keys, values, visible, scale, best, total, acc)
            low += BLOCK_KV
        for at in range(low, high, BLOCK_KV):
            new, inside, slot = cache_positions(table, at, high, context, kv_head, cache_slot, cache_head, PAGE, BLOCK_KV)
            keys, values = keys_and_values(k_cache, v_cache, slot, lane, size, inside, q.dtype.element_ty)
            visible = visible_positions(new, inside, query_index, row_mask, token, tree_mask, mask_width, WINDOW, TREE)
            best, total, acc = attend(queries, keys, values, visible, scale, best, total, acc)
        place = token * heads + head
        if SPLITS == 1:
            store_rows(out, place, lane, size, acc / tl.where(total == 0.0, 1.0, total)[:, None], row_mask)
        else:
            place = place * SPLITS + split
            mask = (row_mask & has_tokens)[:, None] & (lane[None, :] < size)
            tl.store(parts + place[:, None] * size + lane[None, :], acc, mask=mask)
            store_sums(stats, place, best, total, row_mask)


@triton.jit(do_not_specialize=["batch"])
def join_splits(
    parts,
    stats,
    query_start,
    like,
    out,
    grains,
    batch,
    heads,
    size,
    stride,
    SPLITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PLANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the splits of a token and head into ``out`` [T, heads, size]: sum the parts, weighted by their maxima. Padding
    rows are not written.

    PLANES: round to the dtype of ``like``, concatenate the heads of a token, and store them like
    :func:`outrider_triton.quantized.jit.nibble_planes.store_in_planes`, with or without ``grains``; padding rows get zeros.

    The part of a split with a maximum of -inf is uninitialised. Up to 8 parts are loaded together with the maxima, in one
    memory round trip. With more, only the required parts are loaded, in a second round trip.
    """
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    place = token * heads + tl.program_id(1)
    lane = tl.arange(0, BLOCK_SIZE)
    split = tl.arange(0, SPLITS)
    # The padding test needs a load, so it masks the values afterwards instead of delaying their loads.
    is_token = token < tl.load(query_start + batch)
    maxima = tl.load(stats + (place * SPLITS + split) * 2)
    total = tl.load(stats + (place * SPLITS + split) * 2 + 1)
    mask = lane[None, :] < size
    if SPLITS > 8:
        mask = mask & (maxima > -float("inf"))[:, None]
    acc = tl.load(parts + (place * SPLITS + split)[:, None] * size + lane[None, :], mask=mask, other=0.0)
    acc = tl.where(is_token & (maxima > -float("inf"))[:, None], acc, 0.0)
    maxima = tl.where(is_token, maxima, 0.0)
    total = tl.where(is_token, total, 1.0)
    highest = tl.max(maxima, axis=0)
    weight = tl.exp2(maxima - tl.where(highest == -float("inf"), 0.0, highest))
    total = tl.sum(weight * total, axis=0)
    acc = tl.sum(acc * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    if PLANES:
        acc = acc.to(like.dtype.element_ty)
        store_in_planes(out, grains, token, tl.program_id(1) * size, acc, heads * size, stride, BLOCK_SIZE)
    else:
        tl.store(out + place * size + lane, acc.to(out.dtype.element_ty), mask=(lane < size) & is_token)
