"""Paged attention of a few queries with keys and values loaded by a multi-stage TMA pipeline (Hopper).

Like :mod:`outrider_triton.attention.jit.paged`, a program has the queries of one key head's group and a share of the cached
tokens. A loading warp has the copy engine fill the pipeline with pages of keys and values. It loads settled positions before
the wait for the preceding kernel, which computes the queries and the newest keys, and the others after the wait. Four warps
attend. The matrix unit takes 64 rows or more and queries are few, so keys and values are its wide operand: scores are [keys,
queries], and results are [size, queries].
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from outrider_triton.attention.jit.paged import program_share
from outrider_triton.jit.dependent import allow_next_kernel, wait_for_previous_kernel
from outrider_triton.jit.tma_pipeline import expect_boxes


@gluon.jit
def _load_block(k_cache, v_cache, table, at, high, column, stage, pipeline, PAGE: gl.constexpr):
    """Have the copy engine load keys and values of the positions ``at`` to ``high`` into pipeline stage ``stage``, one box of
    a page at a time.
    """
    keys, values, full_keys, full_values, _ = pipeline
    BOX: gl.constexpr = k_cache.block_type.shape[0]
    BLOCK_KV: gl.constexpr = keys.shape[1]
    BYTES: gl.constexpr = BOX * k_cache.block_type.shape[1] * k_cache.dtype.primitive_bitwidth // 8
    BOXES: gl.constexpr = BLOCK_KV // BOX
    keys_arrived = full_keys.index(stage)
    values_arrived = full_values.index(stage)
    left = high - at
    expect_boxes(keys_arrived, left, BOX, BOXES, BYTES)
    expect_boxes(values_arrived, left, BOX, BOXES, BYTES)
    for box in gl.static_range(BOXES):
        is_needed = left > box * BOX
        position = at + box * BOX
        page = gl.load(table + position // PAGE, mask=is_needed, other=0)
        row = page * PAGE + position % PAGE
        tile = keys.index(stage).slice(box * BOX, BOX, 0)
        tma.async_copy_global_to_shared(k_cache, [row, column], keys_arrived, tile, pred=is_needed)
        tile = values.index(stage).slice(box * BOX, BOX, 0)
        tma.async_copy_global_to_shared(v_cache, [row, column], values_arrived, tile, pred=is_needed)


@gluon.jit
def _load_blocks(
    k_cache,
    v_cache,
    addressing,
    sizes,
    pipeline,
    PAGE: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOW: gl.constexpr,
    TREE: gl.constexpr,
    SETTLED: gl.constexpr,
    SPLITS: gl.constexpr,
    QUERIES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Load all blocks of keys and values of the program's share into the pipeline, in order. Runs in the loading warp."""
    query_start, seq_lens, block_table, _ = addressing
    _, _, heads, _, size, _, _, table_width, _ = sizes
    kv_heads = heads // GROUP
    keys, _, _, _, empty = pipeline
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_KV: gl.constexpr = keys.shape[1]
    if not SETTLED:
        wait_for_previous_kernel(PDL)
    _, _, context, low, high = program_share(query_start, seq_lens, kv_heads, TREE, WINDOW, SPLITS, QUERIES, BLOCK_KV)
    table = block_table + (gl.program_id(1) // kv_heads).to(gl.int64) * table_width
    column = gl.program_id(1) % kv_heads * size
    blocks = gl.cdiv(gl.maximum(high - low, 0), BLOCK_KV)
    # Every position of the first ``old`` blocks is settled.
    settled = 0
    if SETTLED:
        settled = gl.minimum(gl.maximum(gl.minimum(high, context) - low, 0) // BLOCK_KV, gl.minimum(blocks, STAGES))
        for block in range(settled):
            _load_block(k_cache, v_cache, table, low + block * BLOCK_KV, high, column, block, pipeline, PAGE)
        wait_for_previous_kernel(PDL)
    for block in range(settled, blocks):
        stage = block % STAGES
        mbarrier.wait(empty.index(stage), (block // STAGES + 1) & 1, pred=block >= STAGES)
        _load_block(k_cache, v_cache, table, low + block * BLOCK_KV, high, column, stage, pipeline, PAGE)


@gluon.jit
def _zero_padding(
    out, start, tokens, step, heads, kv_head, size, lane, flat: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr
):
    """Store zeros for padding tokens after the last sequence, so that no later kernel reads uninitialised memory.

    The program stores the heads of one group for every ``step``-th token from ``start`` on.
    """
    group = gl.arange(0, ROWS, gl.SliceLayout(1, flat))
    for at in range(start, tokens, step):
        place = (gl.zeros([ROWS], gl.int64, gl.SliceLayout(1, flat)) + at) * heads + kv_head * GROUP + group
        address = out + place[:, None] * size + lane[None, :]
        zeros = gl.zeros([ROWS, lane.shape[0]], out.dtype.element_ty, flat)
        gl.store(address, zeros, mask=(group < GROUP)[:, None] & (lane < size)[None, :])


@gluon.jit
def _stage_queries(q, queries, first, count, begin_query, kv_head, sizes, lane, flat: gl.constexpr, GROUP: gl.constexpr):
    """Copy this program's rows of ``q`` to shared memory ``queries``, zeros for rows without a query."""
    _, _, _, _, size, q_token, q_head, _, _ = sizes
    ROWS: gl.constexpr = queries.shape[0]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, flat))
    row_query = begin_query + row // GROUP
    row_mask = (row_query < count) & (row < ROWS // GROUP * GROUP)
    head = kv_head * GROUP + row % GROUP
    token = (first + row_query).to(gl.int64)
    loaded = gl.load(
        q + token[:, None] * q_token + head[:, None] * q_head + lane[None, :],
        mask=row_mask[:, None] & (lane < size)[None, :],
        other=0.0,
    )
    queries.store(loaded)
    fence_async_shared()


@gluon.jit
def _visible_positions(
    new, in_range, query_index, query_mask, first, tree_mask, mask_width, WINDOW: gl.constexpr, TREE: gl.constexpr
):
    """Return the mask [BLOCK_KV, ROWS] of positions that each query attends to. ``new`` are the positions' indices among the
    new tokens, negative in the context.
    """
    if TREE:
        mask_bits = (new >= 0)[:, None] & in_range[:, None] & query_mask[None, :]
        place = tree_mask + (first + query_index).to(gl.int64)[None, :] * mask_width + new[:, None]
        bits = gl.load(place, mask=mask_bits, other=0)
        visible = (new < 0)[:, None] | (bits != 0)
    else:
        visible = new[:, None] <= query_index[None, :]
    visible = visible & in_range[:, None]
    if WINDOW > 0:
        visible = visible & (new[:, None] > query_index[None, :] - WINDOW)
    return visible


@gluon.jit
def _softmax_step(scores, best, total):
    """Return the exponentials of a block's ``scores`` [BLOCK_KV, ROWS], the factor by which earlier values shrink, and the
    updated maximum and sum of each row.
    """
    new_best = gl.maximum(best, gl.max(scores, axis=0))
    # A row without a visible position keeps its maximum at -inf; 0 in its place keeps the exponents from NaN.
    floor = gl.where(new_best == -float("inf"), 0.0, new_best)
    exponentials = gl.exp2(scores - floor[None, :])
    shrink = gl.exp2(best - floor)
    return exponentials, shrink, new_best, total * shrink + gl.sum(exponentials, axis=0)


@gluon.jit
def _zero_values_past_end(tile, at, high, flat: gl.constexpr):
    """Replace the values of ``tile`` [BLOCK_KV, SIZE] from position ``high`` on by 0; ``at`` is the first row's position."""
    is_past_end = at + gl.arange(0, tile.shape[0], gl.SliceLayout(1, flat)) >= high
    tile.store(gl.where(is_past_end[:, None], 0.0, tile.load(flat)).to(tile.dtype))


@gluon.jit
def _store_result(results, row, element, size, best, total, acc, query_mask, mask, low, high, split, SPLITS: gl.constexpr):
    """Store the attention ``acc`` [SIZE, ROWS] of the rows ``row``; with splits, this split's part, maximum and sum."""
    out, parts, stats = results
    if SPLITS == 1:
        acc = acc / gl.where(total == 0.0, 1.0, total)[None, :]
        gl.store(out + row[None, :] * size + element[:, None], acc.to(out.dtype.element_ty), mask=mask)
    else:
        row = row * SPLITS + split
        gl.store(parts + row[None, :] * size + element[:, None], acc, mask=mask & (low < high))
        gl.store(stats + row * 2, best, mask=query_mask)
        gl.store(stats + row * 2 + 1, total, mask=query_mask)


@gluon.jit
def _attend(
    q,
    addressing,
    sinks,
    results,
    sizes,
    queries,
    weights,
    pipeline,
    GROUP: gl.constexpr,
    WINDOW: gl.constexpr,
    TREE: gl.constexpr,
    SETTLED: gl.constexpr,
    SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Attend to the blocks in the pipeline and store the result. Runs in the four multiplying warps."""
    query_start, seq_lens, _, tree_mask = addressing
    tokens, batch, heads, scale, size, _, _, _, mask_width = sizes
    keys, values, full_keys, full_values, empty = pipeline
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_KV: gl.constexpr = keys.shape[1]
    SIZE: gl.constexpr = keys.shape[2]
    ROWS: gl.constexpr = queries.shape[0]
    QUERIES: gl.constexpr = ROWS // GROUP
    kv_heads = heads // GROUP
    sequence, kv_head, split = gl.program_id(1) // kv_heads, gl.program_id(1) % kv_heads, gl.program_id(2)
    allow_next_kernel(PDL)
    if not SETTLED:
        wait_for_previous_kernel(PDL)
    first, count, context, low, high = program_share(query_start, seq_lens, kv_heads, TREE, WINDOW, SPLITS, QUERIES, BLOCK_KV)
    if SETTLED:
        wait_for_previous_kernel(PDL)

    flat: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // SIZE, SIZE // 8], [4, 1], [1, 0])
    lane = gl.arange(0, SIZE, gl.SliceLayout(0, flat))
    if (sequence == batch - 1) & (gl.program_id(0) == 0):
        _zero_padding(results[0], first + count + split, tokens, SPLITS, heads, kv_head, size, lane, flat, ROWS, GROUP)

    begin_query = gl.program_id(0) * QUERIES
    if begin_query < count:
        _stage_queries(q, queries, first, count, begin_query, kv_head, sizes, lane, flat, GROUP)
        wide_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
        across: gl.constexpr = gl.SliceLayout(0, wide_layout)
        down: gl.constexpr = gl.SliceLayout(1, wide_layout)
        column = gl.arange(0, ROWS, across)
        query_index = begin_query + column // GROUP  # index among the new tokens
        query_mask = (query_index < count) & (column < QUERIES * GROUP)
        best = gl.full([ROWS], -float("inf"), gl.float32, across)
        total = gl.zeros([ROWS], gl.float32, across)
        if sinks is not None:
            own = gl.load(sinks + kv_head * GROUP + column % GROUP, mask=query_mask & (split == 0), other=-float("inf"))
            best = own.to(gl.float32) * 1.4426950408889634
            total = gl.where(best == -float("inf"), 0.0, 1.0)
        acc = gl.zeros([SIZE, ROWS], gl.float32, wide_layout)
        blocks = gl.cdiv(gl.maximum(high - low, 0), BLOCK_KV)
        inside = gl.arange(0, BLOCK_KV, down)
        for block in range(blocks):
            stage = block % STAGES
            at = low + block * BLOCK_KV
            new = at + inside - context
            mbarrier.wait(full_keys.index(stage), block // STAGES & 1)
            scores = gl.zeros([BLOCK_KV, ROWS], gl.float32, wide_layout)
            scores = warpgroup_mma(keys.index(stage), queries.permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            in_range = at + inside < high
            visible = _visible_positions(new, in_range, query_index, query_mask, first, tree_mask, mask_width, WINDOW, TREE)
            scores = gl.where(visible, scores * (scale * 1.4426950408889634), -float("inf"))
            exponentials, shrink, best, total = _softmax_step(scores, best, total)
            weights.store(exponentials.to(weights.dtype))
            mbarrier.wait(full_values.index(stage), block // STAGES & 1)
            if at + BLOCK_KV > high:  # values after the last position are uninitialised: times 0 they could give NaN
                _zero_values_past_end(values.index(stage), at, high, flat)
            fence_async_shared()
            acc = acc * shrink[None, :]
            acc = warpgroup_mma(values.index(stage).permute((1, 0)), weights, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(stage), count=1)

        element = gl.arange(0, SIZE, down)
        row_index = (first + query_index).to(gl.int64) * heads + kv_head * GROUP + column % GROUP
        mask = (element < size)[:, None] & query_mask[None, :]
        _store_result(results, row_index, element, size, best, total, acc, query_mask, mask, low, high, split, SPLITS)


@gluon.jit(do_not_specialize=["tokens", "batch"], do_not_specialize_on_alignment=["seq_lens"])
def paged_attention_ring(
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
    PAGE: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOW: gl.constexpr,
    TREE: gl.constexpr,
    SETTLED: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute attention as :func:`outrider_triton.attention.jit.paged.paged_attention` does, with keys and values loaded by a
    TMA pipeline.

    Descriptors see caches as [slots, key heads times size], in boxes of rows of one page and the columns of one head. Both
    box sizes and the page size are powers of two.
    """
    SIZE: gl.constexpr = k_cache.block_type.shape[1]
    keys = gl.allocate_shared_memory(k_cache.dtype, [STAGES, BLOCK_KV, SIZE], k_cache.layout)
    values = gl.allocate_shared_memory(v_cache.dtype, [STAGES, BLOCK_KV, SIZE], v_cache.layout)
    full_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_keys.index(stage), count=1)
        mbarrier.init(full_values.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    KIND: gl.constexpr = k_cache.dtype
    queries_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_ROWS, SIZE], KIND)
    queries = gl.allocate_shared_memory(KIND, [BLOCK_ROWS, SIZE], queries_layout)
    weights_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_KV, BLOCK_ROWS], KIND)
    weights = gl.allocate_shared_memory(KIND, [BLOCK_KV, BLOCK_ROWS], weights_layout)
    pipeline = keys, values, full_keys, full_values, empty
    QUERIES: gl.constexpr = BLOCK_ROWS // GROUP
    addressing = query_start, seq_lens, block_table, tree_mask
    results = out, parts, stats
    sizes = tokens, batch, heads, scale, size, q_token, q_head, table_width, mask_width
    gl.warp_specialize(
        [
            (
                _attend,
                (q, addressing, sinks, results, sizes, queries, weights, pipeline, GROUP, WINDOW, TREE, SETTLED, SPLITS, PDL),
            ),
            (
                _load_blocks,
                (k_cache, v_cache, addressing, sizes, pipeline, PAGE, GROUP, WINDOW, TREE, SETTLED, SPLITS, QUERIES, PDL),
            ),
        ],
        [1],
        [48],
    )
