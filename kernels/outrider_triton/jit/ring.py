"""Rings of tiles for skinny matrix products, where a copy engine fills shared memory and the matrix unit reads it (Hopper).

One warp does nothing but have the copy engine fill a ring with tiles of the weight, before the wait for the kernel ahead as
well; another one does so with tokens, behind it; four others multiply what has come. So a program that waits has its ring
full when it may begin, and none of its loads takes a thread's time. Before the wait it asks for some tiles at a time: what
the kernels ahead read would come behind all that was asked for.

A program has ``each`` *pairs* of rows of the weight, which lie ``half`` rows apart: a tile is 32 pairs, all low rows and then
all high ones, which is as tall as the matrix unit takes it. Pairs are gate and up, or what turns together, or just two
halves of 64 rows. FOLD: a pair is one row, the first and the second half of its columns, with the tokens' first and second
half beside each other as well; of what comes out, the low rows count with the first half and the high ones with the second.
So 32 rows fill a tile. Rows come in boxes, the block of the weight's descriptor, so that a program's share needn't be whole
tiles; what isn't loaded is multiplied as it lies there and not stored.

In Gluon, Triton's language for what Triton itself decides otherwise: layouts, copies, and who waits for whom.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from outrider_triton.jit.dependent import let_next_start, wait_for_last

PAIRS = gl.constexpr(32)
"""Pairs of rows of a tile."""
AT_ONCE = gl.constexpr(64 << 10)
"""Bytes that a program asks for at once while it fills its ring: as many as memory takes to answer at its full rate."""


# -- any ring ------------------------------------------------------------------------------------------------------


@gluon.jit
def expect_boxes(come, left, BOX: gl.constexpr, BOXES: gl.constexpr, BYTES: gl.constexpr):
    """Of BOXES boxes of BOX rows and BYTES each, those that hold ``left`` rows, 1 or more, are to come."""
    for boxes in gl.static_range(1, BOXES):
        mbarrier.expect(come, boxes * BYTES, pred=(left > (boxes - 1) * BOX) & (left <= boxes * BOX))
    mbarrier.expect(come, BOXES * BYTES, pred=left > (BOXES - 1) * BOX)


@gluon.jit
def keep_pace(full, unit, BYTES: gl.constexpr):
    """Before ``unit`` of BYTES is asked for, while a ring fills for the first time: AT_ONCE are on their way at most."""
    SOME: gl.constexpr = AT_ONCE // BYTES
    mbarrier.wait(full.index(gl.maximum(unit - SOME, 0)), 0, pred=unit >= SOME)


# -- the ring ------------------------------------------------------------------------------------------------------


@gluon.jit
def make_ring(x, w, FOLD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Tiles of weights and of tokens, and for each place in the ring whether it's full, whether it's used up, and whether its
    tokens have come.
    """
    WIDTH: gl.constexpr = 2 * BLOCK_M if FOLD else BLOCK_M
    wide = gl.allocate_shared_memory(w.dtype, [STAGES, 2 * PAIRS, BLOCK_K], w.layout)
    narrow = gl.allocate_shared_memory(x.dtype, [STAGES, WIDTH, BLOCK_K], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    have = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=1)
        mbarrier.init(have.index(place), count=1)
    return wide, narrow, full, empty, have


@gluon.jit
def _weights_of(w, wide, full, unit, each, half, FOLD: gl.constexpr, STEPS: gl.constexpr):
    """Unit u is columns u % STEPS of tile u // STEPS."""
    STAGES: gl.constexpr = wide.shape[0]
    BLOCK_K: gl.constexpr = wide.shape[2]
    BOX: gl.constexpr = w.block_type.shape[0]
    BOXES: gl.constexpr = PAIRS // BOX
    BYTES: gl.constexpr = BLOCK_K * w.dtype.primitive_bitwidth // 8  # of a row
    come = full.index(unit % STAGES)
    tile = wide.index(unit % STAGES)
    before = unit // STEPS * PAIRS
    column = (gl.program_id(1) * STEPS + unit % STEPS) * BLOCK_K
    left = each - before
    expect_boxes(come, left, BOX, BOXES, 2 * BOX * BYTES)
    for box in gl.static_range(BOXES):
        pair = gl.program_id(0) * each + before + box * BOX
        if FOLD:
            low = pair
            high = pair
            farther = column + STEPS * BLOCK_K
        else:
            low = pair // half * (2 * half) + pair % half
            high = low + half
            farther = column
        there = left > box * BOX
        tma.async_copy_global_to_shared(w, [low, column], come, tile.slice(box * BOX, BOX, 0), pred=there)
        tma.async_copy_global_to_shared(w, [high, farther], come, tile.slice(PAIRS + box * BOX, BOX, 0), pred=there)


@gluon.jit
def _tokens_of(x, narrow, have, unit, FOLD: gl.constexpr, STEPS: gl.constexpr):
    STAGES: gl.constexpr = narrow.shape[0]
    WIDTH: gl.constexpr = narrow.shape[1]
    BLOCK_K: gl.constexpr = narrow.shape[2]
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    come = have.index(unit % STAGES)
    tile = narrow.index(unit % STAGES)
    mbarrier.expect(come, WIDTH * BLOCK_K * x.dtype.primitive_bitwidth // 8)
    token = gl.program_id(2) * BLOCK_M
    column = (gl.program_id(1) * STEPS + unit % STEPS) * BLOCK_K
    if FOLD:
        tma.async_copy_global_to_shared(x, [token, column], come, tile.slice(0, BLOCK_M, 0))
        tma.async_copy_global_to_shared(x, [token, column + STEPS * BLOCK_K], come, tile.slice(BLOCK_M, BLOCK_M, 0))
    else:
        tma.async_copy_global_to_shared(x, [token, column], come, tile)


@gluon.jit
def bring_weights(w, ring, each, half, FOLD: gl.constexpr, STEPS: gl.constexpr):
    """The warp that brings the weight, which no kernel writes."""
    wide, _, full, empty, _ = ring
    STAGES: gl.constexpr = wide.shape[0]
    BYTES: gl.constexpr = 2 * PAIRS * wide.shape[2] * w.dtype.primitive_bitwidth // 8
    units = gl.cdiv(each, PAIRS) * STEPS
    for unit in range(gl.minimum(units, STAGES)):
        keep_pace(full, unit, BYTES)
        _weights_of(w, wide, full, unit, each, half, FOLD, STEPS)
    for unit in range(STAGES, units):
        mbarrier.wait(empty.index(unit % STAGES), (unit // STAGES - 1) & 1)
        _weights_of(w, wide, full, unit, each, half, FOLD, STEPS)


@gluon.jit
def bring_tokens(x, ring, each, FOLD: gl.constexpr, STEPS: gl.constexpr, LATE: gl.constexpr, PDL: gl.constexpr):
    """The warp that brings tokens. LATE: see :func:`outrider_triton.jit.dependent.begin_late`."""
    _, narrow, _, empty, have = ring
    STAGES: gl.constexpr = narrow.shape[0]
    units = gl.cdiv(each, PAIRS) * STEPS
    if not LATE:
        let_next_start(PDL)
    wait_for_last(PDL)
    if LATE:
        let_next_start(PDL)
    for unit in range(units):
        mbarrier.wait(empty.index(unit % STAGES), (unit // STAGES + 1) & 1, pred=unit >= STAGES)
        _tokens_of(x, narrow, have, unit, FOLD, STEPS)


@gluon.jit
def _sum_of_parts(ring, tile, total, STEPS: gl.constexpr):
    """:func:`_product` where the unit adds up with few bits: the columns of a place by themselves, two places at a time."""
    wide, narrow, full, empty, have = ring
    STAGES: gl.constexpr = narrow.shape[0]
    begins = tile * STEPS
    for pair in range(STEPS // 2):
        unit = begins + 2 * pair
        one = unit % STAGES
        two = (unit + 1) % STAGES
        mbarrier.wait(have.index(one), unit // STAGES & 1)
        mbarrier.wait(full.index(one), unit // STAGES & 1)
        first = warpgroup_mma(wide.index(one), narrow.index(one).permute((1, 0)), total, use_acc=False, is_async=True)
        mbarrier.wait(have.index(two), (unit + 1) // STAGES & 1)
        mbarrier.wait(full.index(two), (unit + 1) // STAGES & 1)
        second = warpgroup_mma(wide.index(two), narrow.index(two).permute((1, 0)), total, use_acc=False, is_async=True)
        first = warpgroup_mma_wait(1, deps=[first])
        mbarrier.arrive(empty.index(one), count=1)
        second = warpgroup_mma_wait(0, deps=[second])
        mbarrier.arrive(empty.index(two), count=1)
        total += first + second
    if STEPS % 2:
        unit = begins + STEPS - 1
        last = unit % STAGES
        mbarrier.wait(have.index(last), unit // STAGES & 1)
        mbarrier.wait(full.index(last), unit // STAGES & 1)
        rest = warpgroup_mma(wide.index(last), narrow.index(last).permute((1, 0)), total, use_acc=False, is_async=True)
        total += warpgroup_mma_wait(0, deps=[rest])
        mbarrier.arrive(empty.index(last), count=1)
    return total


@gluon.jit
def _product(ring, tile, STEPS: gl.constexpr):
    """The program's ``tile``, [2 PAIRS, tokens] in float32, low rows first. One product is under way while the next begins,
    so the ring has to have two places at least.
    """
    wide, narrow, full, empty, have = ring
    STAGES: gl.constexpr = narrow.shape[0]
    WIDTH: gl.constexpr = narrow.shape[1]
    BITS: gl.constexpr = wide.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 256 // BITS])
    total = gl.zeros([2 * PAIRS, WIDTH], gl.float32, layout)
    if BITS == 8:
        total = _sum_of_parts(ring, tile, total, STEPS)
    else:
        for unit in range(tile * STEPS, (tile + 1) * STEPS):
            place = unit % STAGES
            mbarrier.wait(have.index(place), unit // STAGES & 1)
            mbarrier.wait(full.index(place), unit // STAGES & 1)
            total = warpgroup_mma(wide.index(place), narrow.index(place).permute((1, 0)), total, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(empty.index((unit + STAGES - 1) % STAGES), count=1, pred=unit > tile * STEPS)
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index(((tile + 1) * STEPS - 1) % STAGES), count=1)
    return total


# -- what all of them do with rows ---------------------------------------------------------------------------------


@gluon.jit
def halves_of(ring, tile, buffer, FOLD: gl.constexpr, STEPS: gl.constexpr, layout: gl.constexpr):
    """The product of the program's ``tile``, low rows and high rows, [PAIRS, BLOCK_M] each. FOLD: of each what counts."""
    buffer.store(_product(ring, tile, STEPS))
    low = buffer.slice(0, PAIRS, 0)
    high = buffer.slice(PAIRS, PAIRS, 0)
    if FOLD:
        BLOCK_M: gl.constexpr = buffer.shape[1] // 2
        return low.slice(0, BLOCK_M, 1).load(layout), high.slice(BLOCK_M, BLOCK_M, 1).load(layout)
    else:
        return low.load(layout), high.load(layout)


@gluon.jit
def make_buffer(ring):
    """Where a tile changes from the layout of the matrix unit to that of memory."""
    return gl.allocate_shared_memory(gl.float32, [2 * PAIRS, ring[1].shape[1]], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))


@gluon.jit
def squares_of(squares, shares, m, SHARES: gl.constexpr, BLOCK_M: gl.constexpr):
    """Shares of each token's sum of squares, [SHARES, BLOCK_M]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1])
    share = gl.arange(0, SHARES, gl.SliceLayout(1, layout))
    token = gl.program_id(2) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    there = (share < shares)[:, None] & (token < m)[None, :]
    return gl.load(squares + share[:, None] * m + token[None, :], mask=there, other=0.0)


@gluon.jit
def scale_of(parts, width, eps, layout: gl.constexpr):
    """One over the root mean square of each token's row of ``width`` numbers, as a row of a tile with ``layout``."""
    scale = gl.rsqrt(gl.sum(parts, axis=0) / width + eps)
    return gl.convert_layout(scale, gl.SliceLayout(0, layout))[None, :]
