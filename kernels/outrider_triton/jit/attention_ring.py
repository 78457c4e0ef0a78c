"""Paged attention of a few queries whose keys and values come through a ring (Hopper).

As in :mod:`outrider_triton.jit.attention`, whose twin this is, a program has the queries of one key head's group, and a share
of the cached tokens. One warp has the copy engine fill a ring with pages of keys and values: what was written long ago before
the wait for the kernel ahead, which makes the queries and the newest keys, and those behind it. Four warps attend. The matrix
unit takes 64 rows at least, and queries are few, so keys and values are its tall operand: scores lie as [keys, queries], and
what is made as [size, queries].
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

from outrider_triton.jit.dependent import let_next_start, wait_for_last
from outrider_triton.jit.ring import expect_boxes


@gluon.jit
def _share(
    query_start,
    seq_lens,
    kv_heads,
    TREE: gl.constexpr,
    WINDOW: gl.constexpr,
    SPLITS: gl.constexpr,
    QUERIES: gl.constexpr,
    BLOCK_KV: gl.constexpr,
):
    """Of the program: its sequence's first new token, how many there are, its context, and its share of the positions."""
    sequence = gl.program_id(1) // kv_heads
    first = gl.load(query_start + sequence)
    count = gl.load(query_start + sequence + 1) - first
    length = gl.load(seq_lens + sequence)
    context = length - count
    begin_query = gl.program_id(0) * QUERIES
    low = 0
    high = length
    if not TREE:
        high = gl.minimum(length, context + begin_query + QUERIES)
    if WINDOW > 0:
        low = gl.maximum(0, context + begin_query - WINDOW + 1) // BLOCK_KV * BLOCK_KV
    if SPLITS > 1:
        share = gl.cdiv(gl.cdiv(high - low, BLOCK_KV), SPLITS) * BLOCK_KV
        low = low + gl.program_id(2) * share
        high = gl.minimum(low + share, high)
    if begin_query >= count:
        high = low
    return first, count, context, low, high


@gluon.jit
def _bring_block(k_cache, v_cache, table, at, high, column, place, ring, PAGE: gl.constexpr):
    """Keys and values from position ``at`` on, below ``high``, in boxes."""
    keys, values, full_keys, full_values, _ = ring
    BOX: gl.constexpr = k_cache.block_type.shape[0]
    BLOCK_KV: gl.constexpr = keys.shape[1]
    BYTES: gl.constexpr = BOX * k_cache.block_type.shape[1] * k_cache.dtype.primitive_bitwidth // 8
    BOXES: gl.constexpr = BLOCK_KV // BOX
    come_keys = full_keys.index(place)
    come_values = full_values.index(place)
    left = high - at
    expect_boxes(come_keys, left, BOX, BOXES, BYTES)
    expect_boxes(come_values, left, BOX, BOXES, BYTES)
    for box in gl.static_range(BOXES):
        there = left > box * BOX
        position = at + box * BOX
        page = gl.load(table + position // PAGE, mask=there, other=0)
        row = page * PAGE + position % PAGE
        tile = keys.index(place).slice(box * BOX, BOX, 0)
        tma.async_copy_global_to_shared(k_cache, [row, column], come_keys, tile, pred=there)
        tile = values.index(place).slice(box * BOX, BOX, 0)
        tma.async_copy_global_to_shared(v_cache, [row, column], come_values, tile, pred=there)


@gluon.jit
def _bring(
    k_cache,
    v_cache,
    read,
    sizes,
    ring,
    PAGE: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOW: gl.constexpr,
    TREE: gl.constexpr,
    SETTLED: gl.constexpr,
    SPLITS: gl.constexpr,
    QUERIES: gl.constexpr,
    PDL: gl.constexpr,
):
    """The warp that brings keys and values."""
    query_start, seq_lens, block_table, _ = read
    _, _, heads, _, size, _, _, table_width, _ = sizes
    kv_heads = heads // GROUP
    keys, _, _, _, empty = ring
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_KV: gl.constexpr = keys.shape[1]
    if not SETTLED:
        wait_for_last(PDL)
    _, _, context, low, high = _share(query_start, seq_lens, kv_heads, TREE, WINDOW, SPLITS, QUERIES, BLOCK_KV)
    table = block_table + (gl.program_id(1) // kv_heads).to(gl.int64) * table_width
    column = gl.program_id(1) % kv_heads * size
    blocks = gl.cdiv(gl.maximum(high - low, 0), BLOCK_KV)
    # Of these blocks every position was written long ago.
    old = 0
    if SETTLED:
        old = gl.minimum(gl.maximum(gl.minimum(high, context) - low, 0) // BLOCK_KV, gl.minimum(blocks, STAGES))
        for block in range(old):
            _bring_block(k_cache, v_cache, table, low + block * BLOCK_KV, high, column, block, ring, PAGE)
        wait_for_last(PDL)
    for block in range(old, blocks):
        place = block % STAGES
        mbarrier.wait(empty.index(place), (block // STAGES + 1) & 1, pred=block >= STAGES)
        _bring_block(k_cache, v_cache, table, low + block * BLOCK_KV, high, column, place, ring, PAGE)


@gluon.jit
def _attend(
    q,
    read,
    made_at,
    sizes,
    queries,
    weights,
    ring,
    GROUP: gl.constexpr,
    WINDOW: gl.constexpr,
    TREE: gl.constexpr,
    SETTLED: gl.constexpr,
    SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The four warps that attend."""
    query_start, seq_lens, _, tree_mask = read
    out, parts, stats = made_at
    tokens, batch, heads, scale, size, q_token, q_head, _, mask_width = sizes
    keys, values, full_keys, full_values, empty = ring
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_KV: gl.constexpr = keys.shape[1]
    SIZE: gl.constexpr = keys.shape[2]
    ROWS: gl.constexpr = queries.shape[0]
    QUERIES: gl.constexpr = ROWS // GROUP
    kv_heads = heads // GROUP
    sequence = gl.program_id(1) // kv_heads
    kv_head = gl.program_id(1) % kv_heads
    split = gl.program_id(2)
    let_next_start(PDL)
    if not SETTLED:
        wait_for_last(PDL)
    first, count, context, low, high = _share(query_start, seq_lens, kv_heads, TREE, WINDOW, SPLITS, QUERIES, BLOCK_KV)
    if SETTLED:
        wait_for_last(PDL)

    flat: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // SIZE, SIZE // 8], [4, 1], [1, 0])
    lane = gl.arange(0, SIZE, gl.SliceLayout(0, flat))
    if (sequence == batch - 1) & (gl.program_id(0) == 0):
        # Tokens past the last sequence are padding: zeros, so that nobody meets what was in this memory.
        group = gl.arange(0, ROWS, gl.SliceLayout(1, flat))
        for at in range(first + count + split, tokens, SPLITS):
            place = (gl.zeros([ROWS], gl.int64, gl.SliceLayout(1, flat)) + at) * heads + kv_head * GROUP + group
            there = out + place[:, None] * size + lane[None, :]
            nothing = gl.zeros([ROWS, SIZE], out.dtype.element_ty, flat)
            gl.store(there, nothing, mask=(group < GROUP)[:, None] & (lane < size)[None, :])

    begin_query = gl.program_id(0) * QUERIES
    if begin_query < count:
        row = gl.arange(0, ROWS, gl.SliceLayout(1, flat))
        own = begin_query + row // GROUP
        real = (own < count) & (row < QUERIES * GROUP)
        head = kv_head * GROUP + row % GROUP
        token = (first + own).to(gl.int64)
        held = gl.load(
            q + token[:, None] * q_token + head[:, None] * q_head + lane[None, :],
            mask=real[:, None] & (lane < size)[None, :],
            other=0.0,
        )
        queries.store(held)
        fence_async_shared()

        tall: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
        across: gl.constexpr = gl.SliceLayout(0, tall)
        down: gl.constexpr = gl.SliceLayout(1, tall)
        column = gl.arange(0, ROWS, across)
        mine = begin_query + column // GROUP  # index among the new tokens
        known = (mine < count) & (column < QUERIES * GROUP)
        best = gl.full([ROWS], -float("inf"), gl.float32, across)
        total = gl.zeros([ROWS], gl.float32, across)
        made = gl.zeros([SIZE, ROWS], gl.float32, tall)
        blocks = gl.cdiv(gl.maximum(high - low, 0), BLOCK_KV)
        inside = gl.arange(0, BLOCK_KV, down)
        for block in range(blocks):
            stage = block % STAGES
            at = low + block * BLOCK_KV
            new = at + inside - context
            mbarrier.wait(full_keys.index(stage), block // STAGES & 1)
            scores = gl.zeros([BLOCK_KV, ROWS], gl.float32, tall)
            scores = warpgroup_mma(keys.index(stage), queries.permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            there = at + inside < high
            if TREE:
                among = (new >= 0)[:, None] & there[:, None] & known[None, :]
                place = tree_mask + (first + mine).to(gl.int64)[None, :] * mask_width + new[:, None]
                bits = gl.load(place, mask=among, other=0)
                visible = (new < 0)[:, None] | (bits != 0)
            else:
                visible = new[:, None] <= mine[None, :]
            visible = visible & there[:, None]
            if WINDOW > 0:
                visible = visible & (new[:, None] > mine[None, :] - WINDOW)
            scores = gl.where(visible, scores * (scale * 1.4426950408889634), -float("inf"))
            higher = gl.maximum(best, gl.max(scores, axis=0))
            # A row that has seen nothing yet keeps its maximum at -inf; 0 in its place keeps the exponents from NaN.
            floor = gl.where(higher == -float("inf"), 0.0, higher)
            weighed = gl.exp2(scores - floor[None, :])
            shrink = gl.exp2(best - floor)
            best = higher
            total = total * shrink + gl.sum(weighed, axis=0)
            weights.store(weighed.to(weights.dtype))
            mbarrier.wait(full_values.index(stage), block // STAGES & 1)
            if at + BLOCK_KV > high:
                # What lies behind the last position may be anything, and times 0 it would be NaN.
                behind = at + gl.arange(0, BLOCK_KV, gl.SliceLayout(1, flat)) >= high
                tile = values.index(stage)
                tile.store(gl.where(behind[:, None], 0.0, tile.load(flat)).to(values.dtype))
            fence_async_shared()
            made = made * shrink[None, :]
            made = warpgroup_mma(values.index(stage).permute((1, 0)), weights, made, is_async=True)
            made = warpgroup_mma_wait(0, deps=[made])
            mbarrier.arrive(empty.index(stage), count=1)

        deep = gl.arange(0, SIZE, down)
        spot = (first + mine).to(gl.int64) * heads + kv_head * GROUP + column % GROUP
        wanted = (deep < size)[:, None] & known[None, :]
        if SPLITS == 1:
            made = made / gl.where(total == 0.0, 1.0, total)[None, :]
            gl.store(out + spot[None, :] * size + deep[:, None], made.to(out.dtype.element_ty), mask=wanted)
        else:
            spot = spot * SPLITS + split
            gl.store(parts + spot[None, :] * size + deep[:, None], made, mask=wanted & (low < high))
            gl.store(stats + spot * 2, best, mask=known)
            gl.store(stats + spot * 2 + 1, total, mask=known)


@gluon.jit(do_not_specialize=["tokens", "batch"])
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
    """:func:`outrider_triton.jit.attention.paged_attention`; caches are described as [slots, key heads times size], in boxes
    of rows of one page and the columns of one head. Both are a power of two, and so is a page.
    """
    SIZE: gl.constexpr = k_cache.block_type.shape[1]
    keys = gl.allocate_shared_memory(k_cache.dtype, [STAGES, BLOCK_KV, SIZE], k_cache.layout)
    values = gl.allocate_shared_memory(v_cache.dtype, [STAGES, BLOCK_KV, SIZE], v_cache.layout)
    full_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full_keys.index(place), count=1)
        mbarrier.init(full_values.index(place), count=1)
        mbarrier.init(empty.index(place), count=1)
    KIND: gl.constexpr = k_cache.dtype
    like: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_ROWS, SIZE], KIND)
    queries = gl.allocate_shared_memory(KIND, [BLOCK_ROWS, SIZE], like)
    held: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_KV, BLOCK_ROWS], KIND)
    weights = gl.allocate_shared_memory(KIND, [BLOCK_KV, BLOCK_ROWS], held)
    ring = keys, values, full_keys, full_values, empty
    QUERIES: gl.constexpr = BLOCK_ROWS // GROUP
    read = query_start, seq_lens, block_table, tree_mask
    made_at = out, parts, stats
    sizes = tokens, batch, heads, scale, size, q_token, q_head, table_width, mask_width
    gl.warp_specialize(
        [
            (_attend, (q, read, made_at, sizes, queries, weights, ring, GROUP, WINDOW, TREE, SETTLED, SPLITS, PDL)),
            (
                _bring,
                (k_cache, v_cache, read, sizes, ring, PAGE, GROUP, WINDOW, TREE, SETTLED, SPLITS, QUERIES, PDL),
            ),
        ],
        [1],
        [48],
    )
