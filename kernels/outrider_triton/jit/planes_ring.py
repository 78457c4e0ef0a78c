"""Products with weights of four bits, in planes as :mod:`outrider_triton.jit.planes`, whose weight comes through a ring.

One warp has the copy engine fill a ring of tiles of the weight before the wait for the kernel ahead: some tiles at a time,
since what that kernel reads would come behind all that was asked for. Others have it bring the tokens after the wait, which
stay. One or two groups of four warps take units by turns: a unit is 64 rows and some groups of 128 columns with a scale
each. Bytes go from the tile to registers, become numbers there, and the matrix unit takes them from
there, with the tokens from shared memory. So a place in the ring is free again as soon as its bytes are in registers. While
one group of columns is multiplied, the next one's numbers are made.

The matrix unit takes 64 rows and 32 bytes of columns at a time, however few tokens there are: with numbers of 16 bits that is
too slow for the bytes. So a number of the weight is one byte, 16 times what it is, and three instructions make eight of them;
a token is a whole multiple of a grain, in two digits of a byte each, which are two tokens to the matrix unit
(:func:`outrider_triton.jit.planes.keep_in_planes`). Sums of 128 products are exact.

Scales are read before the wait, too, and lie in shared memory with the rows of a column beside each other.

Rows of queries and keys are turned in pairs, which lie half a head apart. A tile has eight low rows and the eight high ones
of the same pairs by turns: a thread has both of a pair, as the matrix unit leaves its rows.
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
from outrider_triton.jit.fused import angles_of, write_rotated
from outrider_triton.jit.planes import bytes_of_half
from outrider_triton.jit.planes_gated import lay_gated
from outrider_triton.jit.ring import expect_boxes, keep_pace

ROWS = gl.constexpr(64)
"""Of a tile: as tall as the matrix unit takes it."""
_GROUP = gl.constexpr(128)
"""Columns that may have a scale of their own: those that are laid out in planes together."""
_HELD = gl.constexpr(64)
"""Bytes that they are in a row of a tile."""
PAIRED = gl.constexpr(8)
"""Low rows, and then high ones, that lie beside each other in a tile of pairs."""


# -- what comes ----------------------------------------------------------------------------------------------------


@gluon.jit
def _bring_weights(w, wide, full, unit, each, steps, HALF: gl.constexpr):
    """Unit u is columns u % steps of tile u // steps."""
    STAGES: gl.constexpr = wide.shape[0]
    BOX: gl.constexpr = w.block_type.shape[0]
    WIDE: gl.constexpr = w.block_type.shape[1]
    TALL: gl.constexpr = ROWS // 2 if HALF > 0 else ROWS
    come = full.index(unit % STAGES)
    tile = wide.index(unit % STAGES)
    before = unit // steps * TALL
    left = each - before
    column = (gl.program_id(1) * steps + unit % steps) * WIDE
    expect_boxes(come, left, BOX, TALL // BOX, ROWS // TALL * BOX * WIDE)
    for box in gl.static_range(TALL // BOX):
        there = left > box * BOX
        row = gl.program_id(0) * each + before + box * BOX
        if HALF > 0:
            row += row // HALF * HALF
            tma.async_copy_global_to_shared(w, [row, column], come, tile.slice(2 * box * BOX, BOX, 0), pred=there)
            high = tile.slice((2 * box + 1) * BOX, BOX, 0)
            tma.async_copy_global_to_shared(w, [row + HALF, column], come, high, pred=there)
        else:
            tma.async_copy_global_to_shared(w, [row, column], come, tile.slice(box * BOX, BOX, 0), pred=there)


@gluon.jit
def _bring(w, ring, each, steps, TILES: gl.constexpr, HALF: gl.constexpr):
    """The warp that brings the weight, which no kernel writes."""
    wide, _, full, empty, _ = ring
    STAGES: gl.constexpr = wide.shape[0]
    units = TILES * steps
    for unit in range(gl.minimum(units, STAGES)):
        keep_pace(full, unit, ROWS * w.block_type.shape[1])
        _bring_weights(w, wide, full, unit, each, steps, HALF)
    for unit in range(STAGES, units):
        mbarrier.wait(empty.index(unit % STAGES), (unit // STAGES - 1) & 1)
        _bring_weights(w, wide, full, unit, each, steps, HALF)


@gluon.jit
def _bring_tokens(x, ring, STEPS: gl.constexpr):
    """All of the program's columns; behind the wait."""
    _, tokens, _, _, have = ring
    WIDE: gl.constexpr = x.block_type.shape[1]
    for step in range(STEPS):
        mbarrier.expect(have.index(step), x.block_type.shape[0] * WIDE)
        column = (gl.program_id(1) * STEPS + step) * WIDE
        tma.async_copy_global_to_shared(x, [0, column], have.index(step), tokens.index(step))


# -- products ------------------------------------------------------------------------------------------------------


@gluon.jit
def _row_of(place, tile, each, HALF: gl.constexpr):
    """Of ``place`` in the program's ``tile``: the row of the weight, and whether it is the program's."""
    if HALF > 0:
        own = tile * (ROWS // 2) + place // (2 * PAIRED) * PAIRED + place % PAIRED
        pair = gl.program_id(0) * each + own
        return pair + pair // HALF * HALF + place // PAIRED % 2 * HALF, own < each
    else:
        own = tile * ROWS + place
        return gl.program_id(0) * each + own, own < each


@gluon.jit
def _beside(left, right):
    """[rows, 2 columns]: the columns of ``right`` behind those of ``left``."""
    return gl.join(left, right).permute((0, 2, 1)).reshape((left.shape[0], 2 * left.shape[1]))


@gluon.jit
def _part(packed, tokens, GROUP: gl.constexpr, layout: gl.constexpr):
    """The product of 128 columns, under way, int32 [64, digits]. ``packed`` int8 [64, 64]; ``tokens`` int8 [digits, columns
    of a unit].
    """
    DIGITS: gl.constexpr = tokens.shape[0]
    held: gl.constexpr = packed.type.layout
    numbers = gl.convert_layout(_beside(bytes_of_half(packed, 0), bytes_of_half(packed, 1)), held, assert_trivial=True)
    own = tokens.slice(GROUP * _GROUP, _GROUP, 1).permute((1, 0))
    part = gl.zeros([ROWS, DIGITS], gl.int32, layout)
    return warpgroup_mma(numbers, own, part, use_acc=False, is_async=True)


@gluon.jit
def _digits(done):
    """The low and the high ones of [64, digits], each [64, tokens]: a thread has both of a token."""
    TOKENS: gl.constexpr = done.shape[1] // 2
    return gl.split(done.reshape((ROWS, TOKENS, 2)))


@gluon.jit
def _added(total, done, factor, grain):
    """``total [64, tokens]`` and a product of a group: both digits of a token, by its grain and the row's scale."""
    low, high = _digits(done)
    return total + (high * 256 + low).to(gl.float32) * (factor.to(gl.float32)[:, None] * grain[None, :])


@gluon.jit
def _product(
    ring,
    scales,
    grains,
    tile,
    WHICH: gl.constexpr,
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
    GATED: gl.constexpr,
):
    """Of the program's ``tile`` the units that are this group's, [64, tokens] in float32. GATED: its tokens are there."""
    wide, tokens, full, empty, have = ring
    STAGES: gl.constexpr = wide.shape[0]
    COUNT: gl.constexpr = tokens.shape[2] // _GROUP
    DIGITS: gl.constexpr = tokens.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIGITS, 32])
    held: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    total, _ = _digits(gl.zeros([ROWS, DIGITS], gl.float32, layout))
    row: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    column: gl.constexpr = gl.SliceLayout(0, total.type.layout)
    straight: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales = scales._reinterpret(scales.dtype, scales.shape, straight)  # a column at a time
    grains = grains._reinterpret(grains.dtype, grains.shape, straight)
    first = tile * (scales.shape[0] // next_power_of_2(TILES))
    for step in range(WHICH, STEPS, GROUPS):
        unit = tile * STEPS + step
        place = unit % STAGES
        if not GATED:
            mbarrier.wait(have.index(step), 0)
        mbarrier.wait(full.index(place), unit // STAGES & 1)
        packed = wide.index(place).slice(0, _HELD, 1).load(held)
        following = wide.index(place).slice(_HELD, _HELD, 1).load(held)
        factor = scales.index(first + COUNT * step).load(row)
        grain = grains.index(COUNT * step).load(column)
        last = _part(packed, tokens.index(step), 0, layout)
        for group in gl.static_range(1, COUNT):
            packed = following
            next_factor = scales.index(first + COUNT * step + group).load(row)
            next_grain = grains.index(COUNT * step + group).load(column)
            if group + 1 < COUNT:
                following = wide.index(place).slice((group + 1) * _HELD, _HELD, 1).load(held)
            else:  # all that the tile holds is in registers
                mbarrier.arrive(empty.index(place), count=1, pred=unit + STAGES < TILES * STEPS)
            part = _part(packed, tokens.index(step), group, layout)
            done = warpgroup_mma_wait(1, deps=[last])
            total = _added(total, done, factor, grain)
            last = part
            factor = next_factor
            grain = next_grain
        done = warpgroup_mma_wait(0, deps=[last])
        total = _added(total, done, factor, grain)
    return total


@gluon.jit
def _read_scales(scales, to, n, groups, each, OWN: gl.constexpr, TILES: gl.constexpr, HALF: gl.constexpr):
    """Scales of all the program's tiles, turned, to shared memory."""
    COUNT: gl.constexpr = to.shape[0] // next_power_of_2(TILES)
    BESIDE: gl.constexpr = 8 if COUNT > 8 else COUNT
    ACROSS: gl.constexpr = 8 if COUNT // BESIDE > 8 else COUNT // BESIDE
    layout: gl.constexpr = gl.BlockedLayout([BESIDE, 1], [ACROSS, 32 // ACROSS], [1, 4], [0, 1])
    place = gl.arange(0, to.shape[0], gl.SliceLayout(1, layout))[:, None]
    inside = gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :]
    group = place % COUNT
    row, own = _row_of(inside, place // COUNT, each, HALF)
    mine = own & (row < n) & (group < OWN)
    to.store(gl.load(scales + row * groups + gl.program_id(1) * OWN + group, mask=mine, other=0.0))


@gluon.jit
def _read_grains(grains, to, m, stride, OWN: gl.constexpr):
    """Those of the program's groups, [groups, tokens]; behind the wait."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    group = gl.arange(0, to.shape[0], gl.SliceLayout(1, layout))[:, None]
    token = gl.arange(0, to.shape[1], gl.SliceLayout(0, layout))[None, :]
    place = grains + token * stride + gl.program_id(1) * OWN + group
    to.store(gl.load(place, mask=(token < m) & (group < OWN), other=0.0))


@gluon.jit
def _halves(total):
    """The low and the high rows of a tile of pairs, each [32, tokens]."""
    TOKENS: gl.constexpr = total.shape[1]
    low, high = gl.split(total.reshape((ROWS // (2 * PAIRED), 2, PAIRED, TOKENS)).permute((0, 2, 3, 1)))
    return low.reshape((ROWS // 2, TOKENS)), high.reshape((ROWS // 2, TOKENS))


@gluon.jit
def _store(
    own,
    rotary,
    shared,
    HAS_BIAS: gl.constexpr,
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
    HALF: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """The first group of warps: it adds the second one's sums to its own, and stores them, turned or not. It begins late
    (:func:`outrider_triton.jit.dependent.begin_late`).
    """
    x, grains, scales, bias, out, m, n, groups, stride, each = own
    ring, factors, held_grains, known, others = shared
    OWN: gl.constexpr = STEPS * ring[1].shape[2] // _GROUP
    _read_scales(scales, factors, n, groups, each, OWN, TILES, HALF)
    if GROUPS > 1:
        other, come, taken = others
    wait_for_last(PDL)
    let_next_start(PDL)
    if GATED:
        lay_gated(x, ring[1], held_grains, ring[4], 0, GROUPS, STEPS)
    else:
        _bring_tokens(x, ring, STEPS)
        _read_grains(grains, held_grains, m, stride, OWN)
        if GROUPS > 1:
            mbarrier.arrive(known, count=1)
    # Where the matrix unit leaves rows and tokens, and pairs of rows.
    DIGITS: gl.constexpr = ring[1].shape[1]
    TOKENS: gl.constexpr = DIGITS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIGITS, 32])
    like, _ = _digits(gl.zeros([ROWS, DIGITS], gl.float32, layout))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, like.type.layout))
    place = gl.arange(0, ROWS, gl.SliceLayout(1, like.type.layout))
    if HALF > 0:
        cos, sin, k_cache, v_cache, slots, heads, kv_heads, angles_token, cache_slot, cache_head = rotary
        half, _ = _halves(like)
        pairs: gl.constexpr = half.type.layout
        turned = gl.arange(0, TOKENS, gl.SliceLayout(0, pairs))
        slot = gl.load(slots + turned, mask=turned < m, other=0)
    for tile in range(TILES):
        if HALF > 0:  # what is needed behind the product, on its way before it
            inside = tile * (ROWS // 2) + gl.arange(0, ROWS // 2, gl.SliceLayout(1, pairs))
            pair = gl.program_id(0) * each + inside
            head = pair // HALF
            lane = pair % HALF
            mine = (inside < each) & (head < heads + 2 * kv_heads)
            real = (turned < m)[None, :] & mine[:, None]
            turns = real & (head < heads + kv_heads)[:, None]
            cos_low, sin_low, cos_high, sin_high = angles_of(cos, sin, turned, lane, turns, angles_token, HALF)
        total = _product(ring, factors, held_grains, tile, 0, GROUPS, STEPS, TILES, GATED)
        row, is_own = _row_of(place, tile, each, HALF)
        is_own = is_own & (row < n)
        if GROUPS > 1:
            mbarrier.wait(come, tile & 1)
            total += other.load(total.type.layout)
            mbarrier.arrive(taken, count=1)
        if HAS_BIAS:
            total += gl.load(bias + row, mask=is_own, other=0.0).to(gl.float32)[:, None]
        if HALF > 0:
            # Rounded where the reference rounds: after the product and after the turn.
            low, high = _halves(total.to(out.dtype.element_ty))
            write_rotated(
                low,
                high,
                cos_low,
                sin_low,
                cos_high,
                sin_high,
                out,
                k_cache,
                v_cache,
                slot,
                turned,
                head,
                lane,
                heads,
                kv_heads,
                cache_slot,
                cache_head,
                real,
                HALF,
            )
        else:
            there = out + gl.program_id(1).to(gl.int64) * m * n + token.to(gl.int64)[None, :] * n + row[:, None]
            gl.store(there, total.to(out.dtype.element_ty), mask=(token < m)[None, :] & is_own[:, None])


@gluon.jit
def _help(
    x,
    shared,
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """The second group of warps, which leaves its sums to the first."""
    ring, factors, held_grains, known, others = shared
    other, come, taken = others
    if GATED:
        wait_for_last(PDL)
        lay_gated(x, ring[1], held_grains, ring[4], 1, GROUPS, STEPS)
    else:
        mbarrier.wait(known, 0)
    for tile in range(TILES):
        total = _product(ring, factors, held_grains, tile, 1, GROUPS, STEPS, TILES, GATED)
        mbarrier.wait(taken, (tile - 1) & 1, pred=tile > 0)
        other.store(total)
        mbarrier.arrive(come, count=1)


@gluon.jit(do_not_specialize=["m", "stride", "each", "steps"])
def streamed_planes(
    x,
    w,
    grains,
    scales,
    bias,
    out,
    m,
    n,
    groups,
    stride,
    each,
    steps,
    cos,
    sin,
    k_cache,
    v_cache,
    slots,
    heads,
    kv_heads,
    angles_token,
    cache_slot,
    cache_head,
    HAS_BIAS: gl.constexpr,
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
    HALF: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    MOST: gl.constexpr,
    PDL: gl.constexpr,
):
    """:func:`outrider_triton.jit.planes.linear_planes` for scales of 128 columns without zero points, and BLOCK_M tokens at
    most; program (share of rows, part of the columns).

    A program has ``each`` rows, TILES tiles of them, and STEPS units of columns. ``w``: int8 [n, k / 2], in boxes of rows;
    ``x``: int8 [2 m, k], tokens in two digits; ``grains``: theirs, in rows ``stride`` apart.
    GROUPS: groups of four warps that multiply, the second with MOST registers.
    HALF: of a head, 0: rows are stored as they are. Else ``each`` counts pairs of rows HALF apart, in boxes of PAIRED; the
    product isn't split; queries go to ``out``, keys and values to the slots, as
    :func:`outrider_triton.jit.fused.linear_rope_write_cache` has them.
    GATED: ``x`` is the gate and up of one token, [2 k] in 16 bits, and each program gates its columns
    (:mod:`outrider_triton.jit.planes_gated`); there are no ``grains``.
    """
    WIDE: gl.constexpr = 2 * w.block_type.shape[1]
    digits: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * BLOCK_M, WIDE], gl.int8)
    wide = gl.allocate_shared_memory(w.dtype, [STAGES, ROWS, w.block_type.shape[1]], w.layout)
    tokens = gl.allocate_shared_memory(gl.int8, [STEPS, 2 * BLOCK_M, WIDE], digits)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ARRIVALS: gl.constexpr = GROUPS if GATED else STEPS
    have = gl.allocate_shared_memory(gl.int64, [ARRIVALS, 1], mbarrier.MBarrierLayout())
    # By turns: between two of one array the compiler has all warps wait for each other.
    for place in gl.static_range(max(STAGES, ARRIVALS)):
        if place < STAGES:
            mbarrier.init(full.index(place), count=1)
            mbarrier.init(empty.index(place), count=1)
        if place < ARRIVALS:
            mbarrier.init(have.index(place), count=1)
    ring = wide, tokens, full, empty, have
    COUNT: gl.constexpr = next_power_of_2(STEPS * WIDE // _GROUP)
    TALL: gl.constexpr = next_power_of_2(TILES)
    factors = gl.allocate_shared_memory(
        scales.dtype.element_ty, [TALL * COUNT, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    held_grains = gl.allocate_shared_memory(gl.float32, [COUNT, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
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
    own = x, grains, scales, bias, out, m, n, groups, stride, each
    shared = ring, factors, held_grains, known, others
    rotary = cos, sin, k_cache, v_cache, slots, heads, kv_heads, angles_token, cache_slot, cache_head
    if GROUPS > 1:
        gl.warp_specialize(
            [
                (_store, (own, rotary, shared, HAS_BIAS, GROUPS, STEPS, TILES, HALF, GATED, PDL)),
                (_help, (x, shared, GROUPS, STEPS, TILES, GATED, PDL)),
                (_bring, (w, ring, each, steps, TILES, HALF)),
            ],
            [4, 1],
            [MOST, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_store, (own, rotary, shared, HAS_BIAS, GROUPS, STEPS, TILES, HALF, GATED, PDL)),
                (_bring, (w, ring, each, steps, TILES, HALF)),
            ],
            [1],
            [24],
        )
