"""Attention over prompts: many new tokens of each sequence, all causal.

Against :mod:`outrider_triton.jit.attention`, which serves decode and verify: a program holds many queries of one head, and
only the blocks on the diagonal are masked. Programs with the most to do are launched first. Keys and values are read from
their pages, or by the copy engine from a copy without pages, which a kernel of its own makes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin

SPACE = tl.constexpr(128)
"""A sequence's rows in the copy begin at a multiple of this, and so many rows behind its last block of them are zeros."""


@triton.jit
def _spaces(seq_lens, batch, sequence, BATCH: tl.constexpr):
    """Where the rows of ``sequence`` begin in the copy."""
    lane = tl.arange(0, BATCH)
    lens = tl.load(seq_lens + lane, mask=(lane < batch) & (lane < sequence), other=0)
    return tl.sum(tl.where(lane < sequence, tl.cdiv(lens, SPACE) * SPACE + SPACE, 0), axis=0)


@triton.jit(do_not_specialize=["batch"])
def copy_context(
    k_cache,
    v_cache,
    seq_lens,
    block_table,
    keys,
    values,
    kv_start,
    batch,
    size,
    table_width,
    cache_slot,
    cache_head,
    columns,
    PAGE: tl.constexpr,
    PADDED: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of rows, block of columns, sequence): keys and values of a sequence out of its pages, row by row into
    ``keys`` and ``values`` [rows, columns] in their dtype, whose heads are PADDED wide. Zeros behind the sequence, for as
    many rows as a block of the attention may read there, and beside a head. ``kv_start [batch + 1]``: where each sequence
    begins.
    """
    begin(PDL)
    sequence = tl.program_id(2)
    start = _spaces(seq_lens, batch, sequence, BATCH)
    length = tl.load(seq_lens + sequence)
    space = tl.cdiv(length, SPACE) * SPACE + SPACE
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(kv_start + sequence, start)
        if sequence == batch - 1:
            tl.store(kv_start + batch, start + space)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = row < length
    page = tl.load(block_table + sequence.to(tl.int64) * table_width + row // PAGE, mask=inside, other=0).to(tl.int64)
    source = (page * PAGE + row % PAGE) * cache_slot
    there = source[:, None] + ((column // PADDED) * cache_head + column % PADDED)[None, :]
    which = inside[:, None] & ((column < columns) & (column % PADDED < size))[None, :]
    target = (start + row).to(tl.int64)[:, None] * columns + column[None, :]
    written = (row < space)[:, None] & (column < columns)[None, :]
    key = tl.load(k_cache + there, mask=which, other=0.0)
    value = tl.load(v_cache + there, mask=which, other=0.0)
    tl.store(keys + target, key.to(keys.dtype.element_ty), mask=written)
    tl.store(values + target, value.to(values.dtype.element_ty), mask=written)


@triton.jit
def _blocks(
    queries,
    best,
    total,
    made,
    keys,
    values,
    table,
    first_row,
    column,
    low,
    high,
    own,
    lane,
    size,
    scale,
    cache_slot,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Positions from ``low`` below ``high``, which is a multiple of BLOCK_KV behind it unless MASKED."""
    for at in range(low, high, BLOCK_KV):
        position = at + tl.arange(0, BLOCK_KV)
        inside = position < high
        if DESCRIPTOR:
            key = keys.load([first_row + at, column]).T
        else:
            if MASKED:
                page = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
            else:
                page = tl.load(table + position // PAGE).to(tl.int64)
            slot = (page * PAGE + position % PAGE) * cache_slot + column
            if EVEN and not MASKED:
                key = tl.load(keys + slot[None, :] + lane[:, None])
            else:
                key = tl.load(keys + slot[None, :] + lane[:, None], mask=inside[None, :] & (lane[:, None] < size), other=0.0)
        scores = tl.dot(queries, key.to(queries.dtype), input_precision="ieee")
        if MASKED:
            visible = (position[None, :] <= own[:, None]) & inside[None, :]
            if WINDOW > 0:
                visible = visible & (position[None, :] > own[:, None] - WINDOW)
            scores = tl.where(visible, scores, -float("inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1) * scale)
        floor = higher
        if MASKED:
            # A row that has seen nothing yet keeps its maximum at -inf; 0 in its place keeps the exponents from NaN.
            floor = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores * scale - floor[:, None])
        shrink = tl.exp2(best - floor)
        total = total * shrink + tl.sum(weights, axis=1)
        made = made * shrink[:, None]
        if DESCRIPTOR:
            value = values.load([first_row + at, column])
        elif EVEN and not MASKED:
            value = tl.load(values + slot[:, None] + lane[None, :])
        else:
            value = tl.load(values + slot[:, None] + lane[None, :], mask=inside[:, None] & (lane[None, :] < size), other=0.0)
        made = tl.dot(weights.to(queries.dtype), value.to(queries.dtype), made, input_precision="ieee")
        best = higher
    return best, total, made


@triton.jit(do_not_specialize=["tokens", "batch"])
def prompt_attention(
    q,
    keys,
    values,
    query_start,
    seq_lens,
    block_table,
    kv_start,
    out,
    tokens,
    batch,
    heads,
    scale,
    size,
    q_token,
    q_head,
    table_width,
    cache_slot,
    cache_head,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    EVEN: tl.constexpr,
    BATCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of queries and head of a group, key head), the last block first: the blocks of a sequence have the more
    to do the later they are. Blocks are counted through all sequences, and a sequence begins with a block of its own; what
    is launched too many ends at once.

    DESCRIPTOR: ``keys`` and ``values`` describe copies [rows, key heads * BLOCK_SIZE] without pages, whose sequences begin
    at ``kv_start``; else they're the caches. EVEN: ``size`` is BLOCK_SIZE. Padding tokens get zeros.
    """
    begin(PDL)
    kv_head = tl.program_id(1)
    blocks = tl.num_programs(0) // GROUP
    number = blocks - 1 - tl.program_id(0) // GROUP
    head = kv_head * GROUP + tl.program_id(0) % GROUP
    lane = tl.arange(0, BLOCK_SIZE)
    row = tl.arange(0, BLOCK_ROWS)
    each = tl.arange(0, BATCH)
    starts = tl.load(query_start + each, mask=each < batch, other=0)
    ends = tl.load(query_start + each + 1, mask=each < batch, other=0)
    own_blocks = tl.cdiv(ends - starts, BLOCK_ROWS)
    sequence = tl.sum((tl.cumsum(own_blocks, axis=0) <= number).to(tl.int32), axis=0)
    block = number - tl.sum(tl.where(each < sequence, own_blocks, 0), axis=0)
    # Tokens past the last sequence are padding: zeros, so that nobody meets what was in this memory.
    for at in range(tl.load(query_start + batch) + number * BLOCK_ROWS, tokens, blocks * BLOCK_ROWS):
        token = (at + row).to(tl.int64)
        there = (token[:, None] * heads + head) * size + lane[None, :]
        zeros = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], dtype=out.dtype.element_ty)
        tl.store(out + there, zeros, mask=(token < tokens)[:, None] & (lane < size)[None, :])
    if sequence < batch:
        first = tl.load(query_start + sequence)
        count = tl.load(query_start + sequence + 1) - first
        length = tl.load(seq_lens + sequence)
        context = length - count
        index = block * BLOCK_ROWS + row
        token = (first + index).to(tl.int64)
        which = (index < count)[:, None] & (lane < size)[None, :]
        queries = tl.load(q + token[:, None] * q_token + head * q_head + lane[None, :], mask=which, other=0.0)
        best = tl.full([BLOCK_ROWS], -float("inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
        made = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], dtype=tl.float32)
        own = context + index
        high = tl.minimum(length, context + (block + 1) * BLOCK_ROWS)
        # Every query of the block sees all positions up to the first one's own.
        even = (context + block * BLOCK_ROWS + 1) // BLOCK_KV * BLOCK_KV
        low = 0
        if WINDOW > 0:
            low = tl.maximum(0, context + block * BLOCK_ROWS - WINDOW + 1) // BLOCK_KV * BLOCK_KV
        table = block_table + sequence.to(tl.int64) * table_width
        factor = scale * 1.4426950408889634
        first_row, column = 0, kv_head * cache_head
        if DESCRIPTOR:
            first_row, column = tl.load(kv_start + sequence), kv_head * BLOCK_SIZE
        if WINDOW == 0:
            best, total, made = _blocks(
                queries, best, total, made, keys, values, table, first_row, column, low, even, own, lane, size, factor,
                cache_slot, PAGE, WINDOW, False, DESCRIPTOR, EVEN, BLOCK_KV,
            )  # fmt: skip
            low = even
        best, total, made = _blocks(
            queries, best, total, made, keys, values, table, first_row, column, low, high, own, lane, size, factor,
            cache_slot, PAGE, WINDOW, True, DESCRIPTOR, EVEN, BLOCK_KV,
        )  # fmt: skip
        made = made / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + (token[:, None] * heads + head) * size + lane[None, :], made.to(out.dtype.element_ty), mask=which)
