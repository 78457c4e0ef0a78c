"""Prefill attention: many new tokens of each sequence, all causal.

In contrast to :mod:`outrider_triton.attention.jit.paged`, which serves decode and verify, a program holds many queries of one
head, and only the blocks on the diagonal are masked. Programs with the most work are launched first. Keys and values are
read from their pages, or by the copy engine from a contiguous copy that a separate kernel makes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.attention.jit.paged import empty_sums, sink_sums
from outrider_triton.jit.dependent import begin

SPACE = tl.constexpr(128)
"""Row alignment of a sequence in the copy, and number of zero rows after its last aligned block."""


@triton.jit
def _first_copy_row(seq_lens, batch, sequence, BATCH: tl.constexpr):
    """Return the first row of ``sequence`` in the contiguous copy of all sequences' keys and values."""
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
    """Copy keys and values of a sequence from its pages to ``keys`` and ``values``; one program per (block of rows, block of
    columns, sequence).

    ``keys`` and ``values`` are [rows, columns] in their own dtype, with heads PADDED wide. Rows after the sequence, as many
    as an attention block may read, and columns after a head are zeros. ``kv_start [batch + 1]`` receives each sequence's
    first row.
    """
    begin(PDL)
    sequence = tl.program_id(2)
    start = _first_copy_row(seq_lens, batch, sequence, BATCH)
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
    slot_offset = (page * PAGE + row % PAGE) * cache_slot
    source_offset = slot_offset[:, None] + ((column // PADDED) * cache_head + column % PADDED)[None, :]
    source_mask = inside[:, None] & ((column < columns) & (column % PADDED < size))[None, :]
    target = (start + row).to(tl.int64)[:, None] * columns + column[None, :]
    target_mask = (row < space)[:, None] & (column < columns)[None, :]
    key = tl.load(k_cache + source_offset, mask=source_mask, other=0.0)
    value = tl.load(v_cache + source_offset, mask=source_mask, other=0.0)
    tl.store(keys + target, key.to(keys.dtype.element_ty), mask=target_mask)
    tl.store(values + target, value.to(values.dtype.element_ty), mask=target_mask)


@triton.jit
def _attend_blocks(
    queries,
    best,
    total,
    acc,
    keys,
    values,
    table,
    first_row,
    column,
    low,
    high,
    query_position,
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
    """Attend to the positions ``low`` to ``high`` and return the updated maximum, sum and weighted values of each row.
    Without MASKED, ``high - low`` is a multiple of BLOCK_KV.
    """
    for at in range(low, high, BLOCK_KV):
        position = at + tl.arange(0, BLOCK_KV)
        in_range = position < high
        if DESCRIPTOR:
            key = keys.load([first_row + at, column]).T
        else:
            if MASKED:
                page = tl.load(table + position // PAGE, mask=in_range, other=0).to(tl.int64)
            else:
                page = tl.load(table + position // PAGE).to(tl.int64)
            slot = (page * PAGE + position % PAGE) * cache_slot + column
            if EVEN and not MASKED:
                key = tl.load(keys + slot[None, :] + lane[:, None])
            else:
                key = tl.load(
                    keys + slot[None, :] + lane[:, None], mask=in_range[None, :] & (lane[:, None] < size), other=0.0
                )
        scores = tl.dot(queries, key.to(queries.dtype), input_precision="ieee")
        if MASKED:
            visible = (position[None, :] <= query_position[:, None]) & in_range[None, :]
            if WINDOW > 0:
                visible = visible & (position[None, :] > query_position[:, None] - WINDOW)
            scores = tl.where(visible, scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1) * scale)
        floor = new_best
        if MASKED:
            # A row without a visible position keeps its maximum at -inf; 0 in its place keeps the exponents from NaN.
            floor = tl.where(new_best == -float("inf"), 0.0, new_best)
        weights = tl.exp2(scores * scale - floor[:, None])
        shrink = tl.exp2(best - floor)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        if DESCRIPTOR:
            value = values.load([first_row + at, column])
        elif EVEN and not MASKED:
            value = tl.load(values + slot[:, None] + lane[None, :])
        else:
            value = tl.load(
                values + slot[:, None] + lane[None, :], mask=in_range[:, None] & (lane[None, :] < size), other=0.0
            )
        acc = tl.dot(weights.to(queries.dtype), value.to(queries.dtype), acc, input_precision="ieee")
        best = new_best
    return best, total, acc


@triton.jit
def _find_block(query_start, batch, number, BLOCK_ROWS: tl.constexpr, BATCH: tl.constexpr):
    """Return the sequence of query block ``number``, and the block's index in it. Blocks are counted over all sequences."""
    lane = tl.arange(0, BATCH)
    starts = tl.load(query_start + lane, mask=lane < batch, other=0)
    ends = tl.load(query_start + lane + 1, mask=lane < batch, other=0)
    own_blocks = tl.cdiv(ends - starts, BLOCK_ROWS)
    sequence = tl.sum((tl.cumsum(own_blocks, axis=0) <= number).to(tl.int32), axis=0)
    return sequence, number - tl.sum(tl.where(lane < sequence, own_blocks, 0), axis=0)


@triton.jit
def _zero_padding(out, start, tokens, step, heads, head, size, row, lane):
    """Store zeros for padding tokens after the last sequence, so that no later kernel reads uninitialised memory. The program
    stores one block of rows for every ``step`` tokens from ``start`` on.
    """
    for at in range(start, tokens, step):
        token = (at + row).to(tl.int64)
        offset = (token[:, None] * heads + head) * size + lane[None, :]
        zeros = tl.zeros([row.shape[0], lane.shape[0]], dtype=out.dtype.element_ty)
        tl.store(out + offset, zeros, mask=(token < tokens)[:, None] & (lane < size)[None, :])


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
    sinks,
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
    """Compute attention of prompts; one program per (block of queries and head of a group, key head), the last block first.

    Later blocks of a sequence have more work. Each sequence begins a new block. Surplus programs exit at once.

    DESCRIPTOR: ``keys`` and ``values`` describe contiguous copies [rows, key heads * BLOCK_SIZE], whose sequences begin at
    ``kv_start``; else they are the caches. EVEN: ``size`` is BLOCK_SIZE. ``sinks`` [heads]: None, or logits of one more
    column of each row. Padding tokens get zeros.
    """
    begin(PDL)
    kv_head = tl.program_id(1)
    blocks = tl.num_programs(0) // GROUP
    number = blocks - 1 - tl.program_id(0) // GROUP
    head = kv_head * GROUP + tl.program_id(0) % GROUP
    lane, row = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_ROWS)
    sequence, block = _find_block(query_start, batch, number, BLOCK_ROWS, BATCH)
    end = tl.load(query_start + batch)
    _zero_padding(out, end + number * BLOCK_ROWS, tokens, blocks * BLOCK_ROWS, heads, head, size, row, lane)
    if sequence < batch:
        first = tl.load(query_start + sequence)
        count = tl.load(query_start + sequence + 1) - first
        length = tl.load(seq_lens + sequence)
        context = length - count
        index = block * BLOCK_ROWS + row
        token = (first + index).to(tl.int64)
        query_mask = (index < count)[:, None] & (lane < size)[None, :]
        queries = tl.load(q + token[:, None] * q_token + head * q_head + lane[None, :], mask=query_mask, other=0.0)
        best, total, acc = empty_sums(BLOCK_ROWS, BLOCK_SIZE)
        if sinks is not None:
            best, total = sink_sums(sinks, head + tl.zeros_like(row), index < count)
        query_position = context + index
        high = tl.minimum(length, context + (block + 1) * BLOCK_ROWS)
        # Every query of the block attends to all positions up to the first query's own.
        unmasked_end = (context + block * BLOCK_ROWS + 1) // BLOCK_KV * BLOCK_KV
        low = 0
        if WINDOW > 0:
            low = tl.maximum(0, context + block * BLOCK_ROWS - WINDOW + 1) // BLOCK_KV * BLOCK_KV
        table = block_table + sequence.to(tl.int64) * table_width
        factor = scale * 1.4426950408889634
        first_row, column = 0, kv_head * cache_head
        if DESCRIPTOR:
            first_row, column = tl.load(kv_start + sequence), kv_head * BLOCK_SIZE
        if WINDOW == 0:
            best, total, acc = _attend_blocks(
                queries, best, total, acc, keys, values, table, first_row, column, low, unmasked_end,
                query_position, lane, size, factor, cache_slot, PAGE, WINDOW, False, DESCRIPTOR, EVEN, BLOCK_KV,
            )  # fmt: skip
            low = unmasked_end
        best, total, acc = _attend_blocks(
            queries, best, total, acc, keys, values, table, first_row, column, low, high, query_position, lane, size, factor,
            cache_slot, PAGE, WINDOW, True, DESCRIPTOR, EVEN, BLOCK_KV,
        )  # fmt: skip
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + (token[:, None] * heads + head) * size + lane[None, :], acc.to(out.dtype.element_ty), mask=query_mask)


@triton.jit
def merge_context(
    own,
    own_lse,
    context,
    context_lse,
    out,
    heads,
    size,
    own_token,
    own_head,
    context_token,
    context_head,
    lse_token,
    lse_head,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge attention to a chunk's own tokens with attention to the cached tokens before them; one program per token.

    ``own`` and ``context`` [T, heads, size] are results of two attentions, and the arrays ``*_lse`` [T, heads] the natural
    logarithms of their sums of exponentials, float32, both with the strides ``lse_token`` and ``lse_head``. ``out``
    [T, heads, size] is contiguous.
    """
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)
    lane = tl.arange(0, BLOCK_SIZE)
    place = token * lse_token + head * lse_head
    first = tl.load(own_lse + place, mask=head < heads, other=0.0)
    second = tl.load(context_lse + place, mask=head < heads, other=0.0)
    largest = tl.maximum(first, second)
    first = tl.exp(first - largest)
    second = tl.exp(second - largest)
    mask = (head < heads)[:, None] & (lane < size)[None, :]
    own_place = token * own_token + head[:, None] * own_head + lane[None, :]
    context_place = token * context_token + head[:, None] * context_head + lane[None, :]
    total = tl.load(own + own_place, mask=mask, other=0.0).to(tl.float32) * first[:, None]
    total += tl.load(context + context_place, mask=mask, other=0.0).to(tl.float32) * second[:, None]
    total = total / (first + second)[:, None]
    tl.store(out + (token * heads + head[:, None]) * size + lane[None, :], total.to(out.dtype.element_ty), mask=mask)
