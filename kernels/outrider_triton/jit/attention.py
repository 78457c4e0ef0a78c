"""Paged attention: one kernel for decode, verify with or without a tree mask, and prefill; a second one joins splits.

Online softmax over blocks of the cache (Dao et al. 2022); for few queries the cached tokens are split among programs (Flash
decoding, Dao et al. 2023). A program holds the queries of one key head's group, so that keys are read once for the group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin, let_next_start, wait_for_last
from outrider_triton.jit.planes import keep_in_planes


@triton.jit
def _places(table, at, high, context, kv_head, cache_slot, cache_head, PAGE: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Positions from ``at`` below ``high``: their indices among the new tokens (negative in the context), which of them there
    are, and where their keys and values begin in the cache.
    """
    position = at + tl.arange(0, BLOCK_KV)
    inside = position < high
    page = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
    return position - context, inside, (page * PAGE + position % PAGE) * cache_slot + kv_head * cache_head


@triton.jit
def _keys_and_values(k_cache, v_cache, slot, lane, size, which, TYPE: tl.constexpr):
    """Keys [size, BLOCK_KV] and values [BLOCK_KV, size] of the slots that ``which`` says, zeros elsewhere; as TYPE."""
    keys = tl.load(k_cache + slot[None, :] + lane[:, None], mask=which[None, :] & (lane[:, None] < size), other=0.0)
    values = tl.load(v_cache + slot[:, None] + lane[None, :], mask=which[:, None] & (lane[None, :] < size), other=0.0)
    return keys.to(TYPE), values.to(TYPE)


@triton.jit
def _visible(new, inside, own, real, token, tree_mask, mask_width, WINDOW: tl.constexpr, TREE: tl.constexpr):
    """Which positions of a block each row sees, [BLOCK_ROWS, BLOCK_KV]; ``new``: see :func:`_places`."""
    if TREE:
        among = (new[None, :] >= 0) & real[:, None] & inside[None, :]
        bits = tl.load(tree_mask + token[:, None] * mask_width + new[None, :], mask=among, other=0)
        visible = (new[None, :] < 0) | (bits != 0)
    else:
        visible = new[None, :] <= own[:, None]
    visible = visible & inside[None, :]
    if WINDOW > 0:
        visible = visible & (new[None, :] > own[:, None] - WINDOW)
    return visible


@triton.jit
def _attend(queries, keys, values, visible, scale, best, total, made):
    """A block of keys [size, BLOCK_KV] and values [BLOCK_KV, size]: the new maximum, sum and weighed values of each row."""
    scores = tl.dot(queries, keys, input_precision="ieee") * (scale * 1.4426950408889634)
    scores = tl.where(visible, scores, -float("inf"))
    higher = tl.maximum(best, tl.max(scores, axis=1))
    # A row that has seen nothing yet keeps its maximum at -inf; 0 in its place keeps the exponents from NaN.
    floor = tl.where(higher == -float("inf"), 0.0, higher)
    weights = tl.exp2(scores - floor[:, None])
    shrink = tl.exp2(best - floor)
    total = total * shrink + tl.sum(weights, axis=1)
    made = tl.dot(weights.to(values.dtype), values, made * shrink[:, None], input_precision="ieee")
    return higher, total, made


@triton.jit(do_not_specialize=["tokens", "batch"])
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
    """Program (block of queries, sequence and key head, split). Row r of a block is query r // GROUP, head r % GROUP.

    With splits, what a program made goes to ``parts [token, head, split, size]`` and its maximum and sum to
    ``stats [token, head, split, 2]``, all float32. A share is a SPLITS-th of what there is of *this* sequence, in whole
    blocks: those for whom nothing is left write a maximum of -inf, and no part.

    SETTLED: whatever wrote the lengths, the block table and the cache up to the new tokens has ended (not only begun), so
    that a program reads its first block of that while the kernel before it, which makes the queries, still runs.
    """
    if SETTLED:
        let_next_start(PDL)
    else:
        begin(PDL)
    kv_heads = heads // GROUP
    sequence = tl.program_id(1) // kv_heads
    kv_head = tl.program_id(1) % kv_heads
    split = tl.program_id(2)
    first = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - first
    length = tl.load(seq_lens + sequence)
    context = length - count
    QUERIES: tl.constexpr = BLOCK_ROWS // GROUP
    begin_query = tl.program_id(0) * QUERIES
    lane = tl.arange(0, BLOCK_SIZE)
    low = 0
    high = length
    if not TREE:
        high = tl.minimum(length, context + begin_query + QUERIES)
    if WINDOW > 0:
        low = tl.maximum(0, context + begin_query - WINDOW + 1) // BLOCK_KV * BLOCK_KV
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(high - low, BLOCK_KV), SPLITS) * BLOCK_KV
        low = low + split * share
        high = tl.minimum(low + share, high)
    some = low < high
    table = block_table + sequence.to(tl.int64) * table_width
    if SETTLED:
        new, inside, slot = _places(table, low, high, context, kv_head, cache_slot, cache_head, PAGE, BLOCK_KV)
        old = inside & (new < 0)
        old_keys, old_values = _keys_and_values(k_cache, v_cache, slot, lane, size, old, q.dtype.element_ty)
        wait_for_last(PDL)

    if (sequence == batch - 1) & (tl.program_id(0) == 0):
        # Tokens past the last sequence are padding: zeros, so that nobody meets what was in this memory.
        for at in range(first + count + split, tokens, SPLITS):
            token = tl.zeros([], dtype=tl.int64) + at
            for head in tl.static_range(GROUP):
                there = (token.to(tl.int64) * heads + kv_head * GROUP + head) * size + lane
                tl.store(out + there, tl.zeros([BLOCK_SIZE], dtype=out.dtype.element_ty), mask=lane < size)

    if begin_query < count:
        row = tl.arange(0, BLOCK_ROWS)
        own = begin_query + row // GROUP  # index among the new tokens
        token = (first + own).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        real = (own < count) & (row < QUERIES * GROUP)
        queries = tl.load(
            q + token[:, None] * q_token + head[:, None] * q_head + lane[None, :],
            mask=real[:, None] & (lane[None, :] < size),
            other=0.0,
        )
        best = tl.full([BLOCK_ROWS], -float("inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
        made = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], dtype=tl.float32)
        if SETTLED:
            fresh = inside & (new >= 0)
            keys, values = _keys_and_values(k_cache, v_cache, slot, lane, size, fresh, q.dtype.element_ty)
            keys = tl.where(old[None, :], old_keys, keys)
            values = tl.where(old[:, None], old_values, values)
            visible = _visible(new, inside, own, real, token, tree_mask, mask_width, WINDOW, TREE)
            best, total, made = _attend(queries, keys, values, visible, scale, best, total, made)
            low += BLOCK_KV
        for at in range(low, high, BLOCK_KV):
            new, inside, slot = _places(table, at, high, context, kv_head, cache_slot, cache_head, PAGE, BLOCK_KV)
            keys, values = _keys_and_values(k_cache, v_cache, slot, lane, size, inside, q.dtype.element_ty)
            visible = _visible(new, inside, own, real, token, tree_mask, mask_width, WINDOW, TREE)
            best, total, made = _attend(queries, keys, values, visible, scale, best, total, made)

        place = token * heads + head
        if SPLITS == 1:
            made = made / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(
                out + place[:, None] * size + lane[None, :],
                made.to(out.dtype.element_ty),
                mask=real[:, None] & (lane[None, :] < size),
            )
        else:
            place = place * SPLITS + split
            tl.store(
                parts + place[:, None] * size + lane[None, :], made, mask=(real & some)[:, None] & (lane[None, :] < size)
            )
            tl.store(stats + place * 2, best, mask=real)
            tl.store(stats + place * 2 + 1, total, mask=real)


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
    """Program (token, head): the splits' sums, weighed by their maxima. Padding is left as it is.

    PLANES: rounded to the dtype of ``like``, heads of a token one behind the other, and kept as
    :func:`outrider_triton.jit.planes.keep_in_planes` does, with ``grains`` or without; of padding zeros.

    Nobody wrote the part of a split whose maximum is -inf, and anything may lie there. Few parts are loaded together with the
    maxima, one way to memory and back; of many, those that are needed alone, one way later.
    """
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    place = token * heads + tl.program_id(1)
    lane = tl.arange(0, BLOCK_SIZE)
    split = tl.arange(0, SPLITS)
    # What is padding is left out only once it's here: that takes a load of its own.
    real = token < tl.load(query_start + batch)
    best = tl.load(stats + (place * SPLITS + split) * 2)
    total = tl.load(stats + (place * SPLITS + split) * 2 + 1)
    wanted = lane[None, :] < size
    if SPLITS > 8:
        wanted = wanted & (best > -float("inf"))[:, None]
    made = tl.load(parts + (place * SPLITS + split)[:, None] * size + lane[None, :], mask=wanted, other=0.0)
    made = tl.where(real & (best > -float("inf"))[:, None], made, 0.0)
    best = tl.where(real, best, 0.0)
    total = tl.where(real, total, 1.0)
    highest = tl.max(best, axis=0)
    weight = tl.exp2(best - tl.where(highest == -float("inf"), 0.0, highest))
    total = tl.sum(weight * total, axis=0)
    made = tl.sum(made * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    if PLANES:
        made = made.to(like.dtype.element_ty)
        keep_in_planes(out, grains, token, tl.program_id(1) * size, made, heads * size, stride, BLOCK_SIZE)
    else:
        tl.store(out + place * size + lane, made.to(out.dtype.element_ty), mask=(lane < size) & real)
