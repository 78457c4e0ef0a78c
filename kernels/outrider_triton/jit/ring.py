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
PIECE = gl.constexpr(128)
"""Columns in 8 bits that the matrix unit adds up by itself: it does so with few bits."""
AT_ONCE = gl.constexpr(48 << 10)
"""Bytes that a program asks for at once while it fills its ring, or two units: as many as memory takes to answer at its full
rate.
"""


# -- any ring ------------------------------------------------------------------------------------------------------


@gluon.jit
def expect_boxes(come, left, BOX: gl.constexpr, BOXES: gl.constexpr, BYTES: gl.constexpr):
    """Of BOXES boxes of BOX rows and BYTES each, those that hold ``left`` rows, 1 or more, are to come."""
    for boxes in gl.static_range(1, BOXES):
        mbarrier.expect(come, boxes * BYTES, pred=(left > (boxes - 1) * BOX) & (left <= boxes * BOX))
    mbarrier.expect(come, BOXES * BYTES, pred=left > (BOXES - 1) * BOX)


@gluon.jit
def keep_pace(full, unit, BYTES: gl.constexpr):
    """Before ``unit`` of BYTES is asked for, while a ring fills for the first time: AT_ONCE are on their way at most, or two
    units.
    """
    SOME: gl.constexpr = AT_ONCE // BYTES if AT_ONCE // BYTES > 2 else 2
    mbarrier.wait(full.index(gl.maximum(unit - SOME, 0)), 0, pred=unit >= SOME)


# -- the ring ------------------------------------------------------------------------------------------------------


@gluon.jit
def make_ring(x, w, FOLD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Tiles of weights and of tokens, and for each place in the ring whether it's full, whether it's used up, and whether its
    tokens have come. A place has the pieces of BLOCK_K columns that descriptors bring: one, or two.
    """
    WIDTH: gl.constexpr = 2 * BLOCK_M if FOLD else BLOCK_M
    COLUMNS: gl.constexpr = w.block_type.shape[1]
    PIECES: gl.constexpr = BLOCK_K // COLUMNS
    wide = gl.allocate_shared_memory(w.dtype, [STAGES * PIECES, 2 * PAIRS, COLUMNS], w.layout)
    narrow = gl.allocate_shared_memory(x.dtype, [STAGES * PIECES, WIDTH, COLUMNS], x.layout)
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
    STAGES: gl.constexpr = full.shape[0]
    COLUMNS: gl.constexpr = wide.shape[2]
    PIECES: gl.constexpr = wide.shape[0] // STAGES
    BOX: gl.constexpr = w.block_type.shape[0]
    BOXES: gl.constexpr = PAIRS // BOX
    BYTES: gl.constexpr = PIECES * COLUMNS * w.dtype.primitive_bitwidth // 8  # of a row
    come = full.index(unit % STAGES)
    before = unit // STEPS * PAIRS
    column = (gl.program_id(1) * STEPS + unit % STEPS) * (PIECES * COLUMNS)
    left = each - before
    expect_boxes(come, left, BOX, BOXES, 2 * BOX * BYTES)
    for box in gl.static_range(BOXES):
        pair = gl.program_id(0) * each + before + box * BOX
        if FOLD:
            low = pair
            high = pair
            farther = column + STEPS * (PIECES * COLUMNS)
        else:
            low = pair // half * (2 * half) + pair % half
            high = low + half
            farther = column
        there = left > box * BOX
        for piece in gl.static_range(PIECES):
            tile = wide.index(unit % STAGES * PIECES + piece)
            more = piece * COLUMNS
            tma.async_copy_global_to_shared(w, [low, column + more], come, tile.slice(box * BOX, BOX, 0), pred=there)
            behind = tile.slice(PAIRS + box * BOX, BOX, 0)
            tma.async_copy_global_to_shared(w, [high, farther + more], come, behind, pred=there)


@gluon.jit
def _tokens_of(x, narrow, have, unit, FOLD: gl.constexpr, STEPS: gl.constexpr):
    STAGES: gl.constexpr = have.shape[0]
    WIDTH: gl.constexpr = narrow.shape[1]
    COLUMNS: gl.constexpr = narrow.shape[2]
    PIECES: gl.constexpr = narrow.shape[0] // STAGES
    BLOCK_K: gl.constexpr = PIECES * COLUMNS
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    come = have.index(unit % STAGES)
    mbarrier.expect(come, WIDTH * BLOCK_K * x.dtype.primitive_bitwidth // 8)
    token = gl.program_id(2) * BLOCK_M
    first = (gl.program_id(1) * STEPS + unit % STEPS) * BLOCK_K
    for piece in gl.static_range(PIECES):
        tile = narrow.index(unit % STAGES * PIECES + piece)
        column = first + piece * COLUMNS
        if FOLD:
            tma.async_copy_global_to_shared(x, [token, column], come, tile.slice(0, BLOCK_M, 0))
            tma.async_copy_global_to_shared(x, [token, column + STEPS * BLOCK_K], come, tile.slice(BLOCK_M, BLOCK_M, 0))
        else:
            tma.async_copy_global_to_shared(x, [token, column], come, tile)


@gluon.jit
def bring_weights(w, ring, each, half, FOLD: gl.constexpr, STEPS: gl.constexpr):
    """The warp that brings the weight, which no kernel writes."""
    wide, _, full, empty, _ = ring
    STAGES: gl.constexpr = full.shape[0]
    BYTES: gl.constexpr = 2 * PAIRS * (wide.shape[0] // STAGES * wide.shape[2]) * w.dtype.primitive_bitwidth // 8
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
    STAGES: gl.constexpr = have.shape[0]
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
def _begin_unit(ring, unit, zeros):
    """The products of a unit's pieces, one or two, under way once it has come: as many sums."""
    wide, narrow, full, _, have = ring
    STAGES: gl.constexpr = full.shape[0]
    PIECES: gl.constexpr = wide.shape[0] // STAGES
    place = unit % STAGES
    mbarrier.wait(have.index(place), unit // STAGES & 1)
    mbarrier.wait(full.index(place), unit // STAGES & 1)
    which = place * PIECES
    first = warpgroup_mma(wide.index(which), narrow.index(which).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if PIECES == 1:
        return (first,)
    else:
        which += 1
        second = warpgroup_mma(wide.index(which), narrow.index(which).permute((1, 0)), zeros, use_acc=False, is_async=True)
        return first, second


@gluon.jit
def _end_unit(ring, unit, sums, LATER: gl.constexpr):
    """What ``sums`` of a unit's pieces add up to; LATER others may still be under way."""
    STAGES: gl.constexpr = ring[2].shape[0]
    sums = warpgroup_mma_wait(LATER, deps=sums)
    mbarrier.arrive(ring[3].index(unit % STAGES), count=1)
    if ring[0].shape[0] == STAGES:
        return sums
    else:
        return sums[0] + sums[1]


@gluon.jit
def _sum_of_parts(ring, tile, total, STEPS: gl.constexpr):
    """:func:`_product` where the unit adds up with few bits: the columns of a piece by themselves, two units at a time.

    None is under way from one round of the loop to the next: the compiler would have each product wait for the one before.
    """
    PIECES: gl.constexpr = ring[0].shape[0] // ring[2].shape[0]
    for pair in range(STEPS // 2):
        unit = tile * STEPS + 2 * pair
        one = _begin_unit(ring, unit, total)
        two = _begin_unit(ring, unit + 1, total)
        first = _end_unit(ring, unit, one, PIECES)
        total += first + _end_unit(ring, unit + 1, two, 0)
    if STEPS % 2:
        last = tile * STEPS + STEPS - 1
        total += _end_unit(ring, last, _begin_unit(ring, last, total), 0)
    return total


@gluon.jit
def _product(ring, tile, STEPS: gl.constexpr):
    """The program's ``tile``, [2 PAIRS, tokens] in float32, low rows first. One product is under way while the next begins,
    so the ring has to have two places at least.
    """
    wide, narrow, full, empty, have = ring
    STAGES: gl.constexpr = full.shape[0]
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
