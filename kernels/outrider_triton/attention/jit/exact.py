"""Attention whose sums have one order for each row, whatever the batch, the other new tokens and the launch.

The positions of a sequence are divided into chunks at fixed boundaries. Each chunk is attended to by itself, with tiles of
one size, and the results are merged in the order of positions. A program does so for all chunks, or programs share the
chunks and a second kernel merges: both compute the same bits. A block of positions that a row doesn't see changes nothing in
the row's result, so other rows of a tile don't matter either.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.attention.jit.paged import (
    attend,
    cache_positions,
    empty_sums,
    keys_and_values,
    load_queries,
    program_share,
    sink_sums,
    store_rows,
    store_sums,
    visible_positions,
    zero_padding,
)
from outrider_triton.jit.dependent import begin

CHUNKS_PER_DOUBLING = tl.constexpr(8)
"""Number of consecutive chunks of one length. The following chunks are twice as long, so that a long context has
few chunks.
"""
_LOADED_AT_ONCE = tl.constexpr(8)
"""Number of chunks whose results a program loads in one memory round trip."""


@triton.jit
def chunk_start(chunk, CHUNK: tl.constexpr):
    """Return the first position of chunk ``chunk``; the first 16 chunks have CHUNK positions each."""
    doublings = tl.maximum(chunk // CHUNKS_PER_DOUBLING - 1, 0)
    return (chunk - CHUNKS_PER_DOUBLING * doublings) * CHUNK << doublings


@triton.jit
def merge(best, total, acc, chunk_best, chunk_total, chunk_acc):
    """Merge the maxima, sums and weighted values of rows [R], [R], [R, size] with those of a later chunk.

    Each sum is one explicit FMA: the compiler has no choice of what to contract.
    """
    higher = tl.maximum(best, chunk_best)
    floor = tl.where(higher == -float("inf"), 0.0, higher)
    shrink = tl.exp2(best - floor)
    grow = tl.exp2(chunk_best - floor)
    total = tl.fma(chunk_total, grow, total * shrink)
    acc = tl.fma(chunk_acc, tl.broadcast_to(grow[:, None], chunk_acc.shape), acc * shrink[:, None])
    return higher, total, acc


@triton.jit
def quotient(acc, total):
    """Return the weighted values divided by their sums, rounded correctly."""
    return tl.div_rn(acc, tl.broadcast_to(tl.where(total == 0.0, 1.0, total)[:, None], acc.shape))


@triton.jit(do_not_specialize=["tokens", "batch", "chunks"])
def exact_attention(
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
    counts,
    sinks,
    tokens,
    batch,
    heads,
    scale,
    size,
    chunks,
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
    SHARED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute attention; one program per (block of queries, sequence and key head, chunk). Rows and operands: see
    :func:`outrider_triton.attention.jit.paged.paged_attention`.

    SHARED: each program has one chunk. It stores its result to ``parts [token, head, chunks, size]`` and its maximum and sum
    to ``stats [token, head, chunks, 2]``, all float32; the last one stores the number of chunks to ``counts [token, head]``.
    ``sinks`` [heads], unless they are None, come before the first chunk; if SHARED, :func:`merge_chunks` puts them there.
    """
    begin(PDL)
    kv_heads = heads // GROUP
    sequence, kv_head, own_chunk = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads, tl.program_id(2)
    QUERIES: tl.constexpr = BLOCK_ROWS // GROUP
    first, count, context, low, high = program_share(query_start, seq_lens, kv_heads, TREE, WINDOW, 1, QUERIES, BLOCK_KV)
    begin_query = tl.program_id(0) * QUERIES
    lane = tl.arange(0, BLOCK_SIZE)
    table = block_table + sequence.to(tl.int64) * table_width
    if (sequence == batch - 1) & (tl.program_id(0) == 0) & (own_chunk == 0):
        zero_padding(out, first + count, tokens, 1, heads, kv_head, size, GROUP, BLOCK_SIZE)

    if (begin_query < count) & (chunk_start(own_chunk, CHUNK) < high):
        query_index, token, head, row_mask, queries = load_queries(
            q, first, count, begin_query, kv_head, q_token, q_head, size, GROUP, BLOCK_ROWS, BLOCK_SIZE
        )
        best, total, acc = empty_sums(BLOCK_ROWS, BLOCK_SIZE)
        if sinks is not None and not SHARED:
            best, total = sink_sums(sinks, head, row_mask)
        chunk, start = own_chunk, chunk_start(own_chunk, CHUNK)
        end = tl.minimum(chunk_start(chunk + 1, CHUNK), high) if SHARED else high
        while start < end:
            chunk += 1
            next_start = chunk_start(chunk, CHUNK)
            sums = empty_sums(BLOCK_ROWS, BLOCK_SIZE)
            for at in range(tl.maximum(start, low), tl.minimum(next_start, end), BLOCK_KV):
                new, inside, slot = cache_positions(table, at, high, context, kv_head, cache_slot, cache_head, PAGE, BLOCK_KV)
                keys, values = keys_and_values(k_cache, v_cache, slot, lane, size, inside, q.dtype.element_ty)
                visible = visible_positions(new, inside, query_index, row_mask, token, tree_mask, mask_width, WINDOW, TREE)
                sums = attend(queries, keys, values, visible, scale, *sums)
            best, total, acc = merge(best, total, acc, *sums)
            start = next_start

        place = token * heads + head
        if SHARED:
            if end == high:
                tl.store(counts + place, tl.zeros([BLOCK_ROWS], dtype=tl.int32) + chunk, mask=row_mask)
            place = place * chunks + own_chunk
            store_rows(parts, place, lane, size, acc, row_mask)
            store_sums(stats, place, best, total, row_mask)
        else:
            store_rows(out, place, lane, size, quotient(acc, total).to(out.dtype.element_ty), row_mask)


@triton.jit(do_not_specialize=["batch", "chunks"])
def merge_chunks(
    parts, stats, counts, query_start, out, sinks, batch, heads, chunks, size, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr
):
    """Merge the results of all chunks of a token and head into ``out`` [T, heads, size]; one program per (token, head).
    Padding rows are not written.
    """
    begin(PDL)
    place = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    lane = tl.arange(0, BLOCK_SIZE)[None, :]
    one = tl.arange(0, 1)
    if tl.program_id(0) < tl.load(query_start + batch):
        count = tl.load(counts + place)
        best, total, acc = empty_sums(1, BLOCK_SIZE)
        if sinks is not None:
            best, total = sink_sums(sinks, tl.program_id(1) + one, one == 0)
        for first in range(0, count, _LOADED_AT_ONCE):
            for index in tl.static_range(_LOADED_AT_ONCE):
                part = place * chunks + first + index
                used = first + index < count
                chunk_best = tl.load(stats + part * 2 + one, mask=used, other=-float("inf"))
                chunk_total = tl.load(stats + part * 2 + 1 + one, mask=used, other=0.0)
                chunk_acc = tl.load(parts + part * size + lane, mask=used & (lane < size), other=0.0)
                best, total, acc = merge(best, total, acc, chunk_best, chunk_total, chunk_acc)
        tl.store(out + place * size + lane, quotient(acc, total).to(out.dtype.element_ty), mask=lane < size)
