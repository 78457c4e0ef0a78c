"""Products with weights of four bits, in planes as :mod:`outrider_triton.jit.planes`, whose weight comes through a ring.

One warp has the copy engine fill a ring of tiles of the weight before the wait for the kernel ahead, and bring the tokens
behind it, which stay. One or two groups of four warps take units by turns: a unit is 64 rows and some groups of 128
columns with a scale each. Bytes go from the tile to registers, become numbers there, and the matrix unit takes them from
there, with the tokens from shared memory. So a place in the ring is free again as soon as its bytes are in registers. While
one group of columns is multiplied, the next one's numbers are made.

A number is made by masking alone: in 16 bits whose exponent is 0 or, in bfloat16, 1, four bits stand for as many times the
smallest number as they say, and for 16 times as many where they lie four higher. Tokens make up for that, and for how small
these are (:func:`outrider_triton.jit.planes.keep_in_planes`). Bits say 0 to 15 and mean 8 less: what the 8 add is 8 times the
sum of the tokens of a group, and those sums come with the tokens.

Scales are read before the wait, too, and lie in shared memory with the rows of a column beside each other.
"""

from __future__ import annotations

from triton import next_power_of_2
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from outrider_triton.jit.dependent import let_next_start, wait_for_last
from outrider_triton.jit.planes import RAISED, bits_of_plane

ROWS = gl.constexpr(64)
"""Of a tile: as tall as the matrix unit takes it."""
_GROUP = gl.constexpr(128)
"""Columns that may have a scale of their own: those that are laid out in planes together."""
_HELD = gl.constexpr(32)
"""Numbers of 16 bits that they are in a row of a tile."""
_MADE_BF16 = gl.constexpr(2.0**133 / RAISED.value)
"""What a product of numbers as they are made is multiplied by: the smallest bfloat16 is 2**-133."""
_MADE_FP16 = gl.constexpr(2.0**24)


# -- what comes ----------------------------------------------------------------------------------------------------


@gluon.jit
def _expect_weights(come, left, BOX: gl.constexpr, WIDE: gl.constexpr):
    for boxes in gl.static_range(1, ROWS // BOX):
        mbarrier.expect(come, boxes * BOX * WIDE * 2, pred=(left > (boxes - 1) * BOX) & (left <= boxes * BOX))
    mbarrier.expect(come, ROWS * WIDE * 2, pred=left > ROWS - BOX)


@gluon.jit
def _bring_weights(w, wide, full, unit, each, steps):
    """Unit u is columns u % steps of tile u // steps."""
    STAGES: gl.constexpr = wide.shape[0]
    BOX: gl.constexpr = w.block_type.shape[0]
    WIDE: gl.constexpr = w.block_type.shape[1]
    come = full.index(unit % STAGES)
    tile = wide.index(unit % STAGES)
    before = unit // steps * ROWS
    left = each - before
    column = (gl.program_id(1) * steps + unit % steps) * WIDE
    _expect_weights(come, left, BOX, WIDE)
    for box in gl.static_range(ROWS // BOX):
        row = gl.program_id(0) * each + before + box * BOX
        tma.async_copy_global_to_shared(w, [row, column], come, tile.slice(box * BOX, BOX, 0), pred=left > box * BOX)


@gluon.jit
def _bring(x, w, ring, each, steps, PDL: gl.constexpr):
    """The warp that brings everything; it begins late (:func:`outrider_triton.jit.dependent.begin_late`)."""
    wide, tokens, full, empty, have = ring
    STAGES: gl.constexpr = wide.shape[0]
    units = gl.cdiv(each, ROWS) * steps
    first = gl.minimum(units, STAGES)
    for unit in range(first):
        _bring_weights(w, wide, full, unit, each, steps)
    wait_for_last(PDL)
    let_next_start(PDL)
    for step in range(steps):
        mbarrier.expect(have.index(step), x.block_type.shape[0] * x.block_type.shape[1] * 2)
        column = (gl.program_id(1) * steps + step) * x.block_type.shape[1]
        tma.async_copy_global_to_shared(x, [0, column], have.index(step), tokens.index(step))
    for unit in range(STAGES, units):
        mbarrier.wait(empty.index(unit % STAGES), (unit // STAGES - 1) & 1)
        _bring_weights(w, wide, full, unit, each, steps)


# -- products ------------------------------------------------------------------------------------------------------


@gluon.jit
def _beside(left, right):
    """[rows, 2 columns]: the columns of ``right`` behind those of ``left``."""
    return gl.join(left, right).permute((0, 2, 1)).reshape((left.shape[0], 2 * left.shape[1]))


@gluon.jit
def _part(packed, tokens, GROUP: gl.constexpr, layout: gl.constexpr):
    """The product of 128 columns, under way. ``packed`` int16 [64, 32]; ``tokens`` [tokens, columns of a unit]."""
    BLOCK_M: gl.constexpr = tokens.shape[0]
    held: gl.constexpr = packed.type.layout
    first = _beside(bits_of_plane(packed, 0, tokens.dtype), bits_of_plane(packed, 1, tokens.dtype))
    second = _beside(bits_of_plane(packed, 2, tokens.dtype), bits_of_plane(packed, 3, tokens.dtype))
    numbers = gl.convert_layout(_beside(first, second), held, assert_trivial=True)
    own = tokens.slice(GROUP * _GROUP, _GROUP, 1).permute((1, 0))
    part = gl.zeros([ROWS, BLOCK_M], gl.float32, layout)
    return warpgroup_mma(numbers, own, part, use_acc=False, is_async=True)


@gluon.jit
def _product(
    ring,
    scales,
    offsets,
    tile,
    WHICH: gl.constexpr,
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
    layout: gl.constexpr,
):
    """Of the program's ``tile`` the units that are this group's, [64, tokens] in float32, of numbers as they are made."""
    wide, tokens, full, empty, have = ring
    STAGES: gl.constexpr = wide.shape[0]
    BLOCK_M: gl.constexpr = tokens.shape[1]
    COUNT: gl.constexpr = tokens.shape[2] // _GROUP
    held: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    row: gl.constexpr = gl.SliceLayout(1, layout)
    column: gl.constexpr = gl.SliceLayout(0, layout)
    scales = scales._reinterpret(scales.dtype, scales.shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))  # a column at a time
    offsets = offsets._reinterpret(offsets.dtype, offsets.shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))
    first = tile * (scales.shape[0] // next_power_of_2(TILES))
    total = gl.zeros([ROWS, BLOCK_M], gl.float32, layout)
    for step in range(WHICH, STEPS, GROUPS):
        unit = tile * STEPS + step
        place = unit % STAGES
        mbarrier.wait(have.index(step), 0)
        mbarrier.wait(full.index(place), unit // STAGES & 1)
        packed = wide.index(place).slice(0, _HELD, 1).load(held)
        following = wide.index(place).slice(_HELD, _HELD, 1).load(held)
        before = scales.index(first + COUNT * step).load(row)
        offset = offsets.index(COUNT * step).load(column)
        last = _part(packed, tokens.index(step), 0, layout)
        for group in gl.static_range(1, COUNT):
            packed = following
            factor = scales.index(first + COUNT * step + group).load(row)
            next_offset = offsets.index(COUNT * step + group).load(column)
            if group + 1 < COUNT:
                following = wide.index(place).slice((group + 1) * _HELD, _HELD, 1).load(held)
            else:  # all that the tile holds is in registers
                mbarrier.arrive(empty.index(place), count=1, pred=unit + STAGES < TILES * STEPS)
            part = _part(packed, tokens.index(step), group, layout)
            done = warpgroup_mma_wait(1, deps=[last])
            total += (done + offset[None, :]) * before.to(gl.float32)[:, None]
            last = part
            before = factor
            offset = next_offset
        done = warpgroup_mma_wait(0, deps=[last])
        total += (done + offset[None, :]) * before.to(gl.float32)[:, None]
    return total


@gluon.jit
def _read_scales(scales, to, n, groups, each, OWN: gl.constexpr, TILES: gl.constexpr):
    """Scales of all the program's tiles, turned, to shared memory."""
    COUNT: gl.constexpr = to.shape[0] // next_power_of_2(TILES)
    BESIDE: gl.constexpr = 8 if COUNT > 8 else COUNT
    ACROSS: gl.constexpr = 8 if COUNT // BESIDE > 8 else COUNT // BESIDE
    layout: gl.constexpr = gl.BlockedLayout([BESIDE, 1], [ACROSS, 32 // ACROSS], [1, 4], [0, 1])
    place = gl.arange(0, to.shape[0], gl.SliceLayout(1, layout))[:, None]
    own = place // COUNT * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :]
    group = place % COUNT
    row = gl.program_id(0) * each + own
    mine = (own < each) & (row < n) & (group < OWN)
    to.store(gl.load(scales + row * groups + gl.program_id(1) * OWN + group, mask=mine, other=0.0))


@gluon.jit
def _read_sums(sums, to, m, stride, OWN: gl.constexpr, SCALE: gl.constexpr):
    """What 8 added to each number of a group adds to its product, as numbers are made, [groups, tokens]; behind the wait."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    group = gl.arange(0, to.shape[0], gl.SliceLayout(1, layout))[:, None]
    token = gl.arange(0, to.shape[1], gl.SliceLayout(0, layout))[None, :]
    place = sums + token * stride + gl.program_id(1) * OWN + group
    whole = gl.load(place, mask=(token < m) & (group < OWN), other=0.0)
    to.store(whole * SCALE)


@gluon.jit
def _store(
    own,
    ring,
    factors,
    offsets,
    known,
    others,
    HAS_BIAS: gl.constexpr,
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
    PDL: gl.constexpr,
):
    """The first group of warps: it adds the second one's sums to its own, and stores them."""
    sums, scales, bias, out, m, n, groups, sum_stride, each = own
    BLOCK_M: gl.constexpr = ring[1].shape[1]
    OWN: gl.constexpr = STEPS * ring[1].shape[2] // _GROUP
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    _read_scales(scales, factors, n, groups, each, OWN, TILES)
    if GROUPS > 1:
        other, come, taken = others
    token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    place = out + gl.program_id(1).to(gl.int64) * m * n + token.to(gl.int64)[None, :] * n
    wait_for_last(PDL)
    made: gl.constexpr = _MADE_BF16 if ring[1].dtype == gl.bfloat16 else _MADE_FP16
    _read_sums(sums, offsets, m, sum_stride, OWN, -8 / made)
    if GROUPS > 1:
        mbarrier.arrive(known, count=1)
    for tile in range(TILES):
        total = _product(ring, factors, offsets, tile, 0, GROUPS, STEPS, TILES, layout)
        inside = tile * ROWS + lane
        row = gl.program_id(0) * each + inside
        mine = (inside < each) & (row < n)
        if GROUPS > 1:
            mbarrier.wait(come, tile & 1)
            total += other.load(layout)
            mbarrier.arrive(taken, count=1)
        total *= made
        if HAS_BIAS:
            total += gl.load(bias + row, mask=mine, other=0.0).to(gl.float32)[:, None]
        gl.store(place + row[:, None], total.to(out.dtype.element_ty), mask=(token < m)[None, :] & mine[:, None])


@gluon.jit
def _help(ring, factors, offsets, known, others, GROUPS: gl.constexpr, STEPS: gl.constexpr, TILES: gl.constexpr):
    """The second group of warps, which leaves its sums to the first."""
    BLOCK_M: gl.constexpr = ring[1].shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    other, come, taken = others
    mbarrier.wait(known, 0)
    for tile in range(TILES):
        total = _product(ring, factors, offsets, tile, 1, GROUPS, STEPS, TILES, layout)
        mbarrier.wait(taken, (tile - 1) & 1, pred=tile > 0)
        other.store(total)
        mbarrier.arrive(come, count=1)


@gluon.jit(do_not_specialize=["m", "sum_stride", "each", "steps"])
def streamed_planes(
    x,
    w,
    sums,
    scales,
    bias,
    out,
    m,
    n,
    groups,
    sum_stride,
    each,
    steps,
    HAS_BIAS: gl.constexpr,
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    MOST: gl.constexpr,
    PDL: gl.constexpr,
):
    """:func:`outrider_triton.jit.planes.linear_planes` for scales of 128 columns without zero points, and BLOCK_M tokens at
    most; program (share of rows, part of the columns).

    A program has ``each`` rows, TILES tiles of them, and STEPS units of columns. ``w``: int16 [n, k / 4], in boxes of rows;
    ``x``: [m, k], in planes, for a ring; ``sums``: of its units, rows ``sum_stride`` apart.
    GROUPS: groups of four warps that multiply, the second with MOST registers.
    """
    wide = gl.allocate_shared_memory(w.dtype, [STAGES, ROWS, w.block_type.shape[1]], w.layout)
    tokens = gl.allocate_shared_memory(x.dtype, [STEPS, BLOCK_M, x.block_type.shape[1]], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    have = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=1)
    for step in gl.static_range(STEPS):
        mbarrier.init(have.index(step), count=1)
    ring = wide, tokens, full, empty, have
    COUNT: gl.constexpr = next_power_of_2(STEPS * x.block_type.shape[1] // _GROUP)
    TALL: gl.constexpr = next_power_of_2(TILES)
    factors = gl.allocate_shared_memory(
        scales.dtype.element_ty, [TALL * COUNT, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    offsets = gl.allocate_shared_memory(gl.float32, [COUNT, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    known = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(known, count=1)
    if GROUPS > 1:
        other = gl.allocate_shared_memory(gl.float32, [ROWS, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
        come = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(come, count=1)
        mbarrier.init(taken, count=1)
        others = other, come, taken
    else:
        others = known  # of no use
    own = sums, scales, bias, out, m, n, groups, sum_stride, each
    if GROUPS > 1:
        gl.warp_specialize(
            [
                (_store, (own, ring, factors, offsets, known, others, HAS_BIAS, GROUPS, STEPS, TILES, PDL)),
                (_help, (ring, factors, offsets, known, others, GROUPS, STEPS, TILES)),
                (_bring, (x, w, ring, each, steps, PDL)),
            ],
            [4, 1],
            [MOST, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_store, (own, ring, factors, offsets, known, others, HAS_BIAS, GROUPS, STEPS, TILES, PDL)),
                (_bring, (x, w, ring, each, steps, PDL)),
            ],
            [1],
            [24],
        )
