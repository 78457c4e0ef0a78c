"""Gates of some 100 tokens whose weight comes through a ring (:mod:`outrider_triton.jit.ring`) in tall tiles.

So many tokens are as many bytes as the weight's tile, and each program reads all of their columns, out of the second-level
cache. So a program has as many rows of the weight at a time as its sums leave room for, and reads tokens once for them: 64
pairs of a gate's row and up's row for each group of four warps. A group has the sums of both rows of a pair alike in its
registers, and makes the activation of them there.

What is asked for of the tokens comes behind all that others ask memory for, so tokens have a ring of their own, with as many
places as there is room for. What comes out is written 16 bytes a thread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from outrider_triton.jit.dependent import let_next_start, wait_for_last
from outrider_triton.jit.matmul import gated
from outrider_triton.jit.ring import expect_boxes, keep_pace

GROUP = gl.constexpr(64)
"""Pairs of rows of a group of four warps: as many gates' rows as the matrix unit takes, and as many of up's."""
UNIT = gl.constexpr(8)
"""Shares of programs, and rows of a gate, are multiples of it."""
_REGISTERS = gl.constexpr(168)
"""Of a thread that multiplies: 128 sums, and what they're made from."""


@gluon.jit
def _make_rings(
    x,
    w,
    GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    DEEP: gl.constexpr,
):
    """That of the weight, STAGES tiles with gates' rows first, and that of the tokens, DEEP tiles: each with barriers that
    say of a place whether it's full, and whether all groups are done with it.
    """
    wide = gl.allocate_shared_memory(w.dtype, [STAGES, 2 * GROUPS * GROUP, BLOCK_K], w.layout)
    narrow = gl.allocate_shared_memory(x.dtype, [DEEP, BLOCK_M, BLOCK_K], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    have = gl.allocate_shared_memory(gl.int64, [DEEP, 1], mbarrier.MBarrierLayout())
    gone = gl.allocate_shared_memory(gl.int64, [DEEP, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=GROUPS)
    for place in gl.static_range(DEEP):
        mbarrier.init(have.index(place), count=1)
        mbarrier.init(gone.index(place), count=GROUPS)
    return (wide, full, empty), (narrow, have, gone)


# -- what comes ----------------------------------------------------------------------------------------------------


@gluon.jit
def _weights_of(w, ring, unit, each, n, STEPS: gl.constexpr):
    """Unit u is columns u % STEPS of tile u // STEPS."""
    wide, full, _ = ring
    STAGES: gl.constexpr = wide.shape[0]
    TALL: gl.constexpr = wide.shape[1] // 2
    BLOCK_K: gl.constexpr = wide.shape[2]
    BOX: gl.constexpr = w.block_type.shape[0]
    come = full.index(unit % STAGES)
    tile = wide.index(unit % STAGES)
    before = unit // STEPS * TALL
    column = unit % STEPS * BLOCK_K
    left = each - before
    expect_boxes(come, left, BOX, TALL // BOX, 2 * BOX * BLOCK_K * w.dtype.primitive_bitwidth // 8)
    for box in gl.static_range(TALL // BOX):
        row = gl.program_id(0) * each + before + box * BOX
        there = left > box * BOX
        tma.async_copy_global_to_shared(w, [row, column], come, tile.slice(box * BOX, BOX, 0), pred=there)
        tma.async_copy_global_to_shared(w, [n + row, column], come, tile.slice(TALL + box * BOX, BOX, 0), pred=there)


@gluon.jit
def _bring_weights(w, ring, each, n, STEPS: gl.constexpr):
    """The warp that brings the weight, which no kernel writes."""
    wide, full, empty = ring
    STAGES: gl.constexpr = wide.shape[0]
    TALL: gl.constexpr = wide.shape[1] // 2
    units = gl.cdiv(each, TALL) * STEPS
    for unit in range(gl.minimum(units, STAGES)):
        keep_pace(full, unit, 2 * TALL * wide.shape[2] * w.dtype.primitive_bitwidth // 8)
        _weights_of(w, ring, unit, each, n, STEPS)
    for unit in range(STAGES, units):
        mbarrier.wait(empty.index(unit % STAGES), (unit // STAGES - 1) & 1)
        _weights_of(w, ring, unit, each, n, STEPS)


@gluon.jit
def _bring_tokens(x, ring, tiles, STEPS: gl.constexpr, PDL: gl.constexpr):
    """The warp that brings tokens, once for each tile; :func:`outrider_triton.jit.dependent.begin_late` says why so late."""
    narrow, have, gone = ring
    DEEP: gl.constexpr = narrow.shape[0]
    BLOCK_M: gl.constexpr = narrow.shape[1]
    BLOCK_K: gl.constexpr = narrow.shape[2]
    wait_for_last(PDL)
    let_next_start(PDL)
    for unit in range(tiles * STEPS):
        mbarrier.wait(gone.index(unit % DEEP), (unit // DEEP + 1) & 1, pred=unit >= DEEP)
        come = have.index(unit % DEEP)
        mbarrier.expect(come, BLOCK_M * BLOCK_K * x.dtype.primitive_bitwidth // 8)
        token = gl.program_id(1) * BLOCK_M
        tma.async_copy_global_to_shared(x, [token, unit % STEPS * BLOCK_K], come, narrow.index(unit % DEEP))


# -- what is made of it --------------------------------------------------------------------------------------------


@gluon.jit
def _give_back(rings, unit, pred):
    """The group is done with both places of ``unit``."""
    wide, _, empty = rings[0]
    narrow, _, gone = rings[1]
    mbarrier.arrive(empty.index(unit % wide.shape[0]), count=1, pred=pred)
    mbarrier.arrive(gone.index(unit % narrow.shape[0]), count=1, pred=pred)


@gluon.jit
def _sums(rings, tile, WHICH: gl.constexpr, STEPS: gl.constexpr, layout: gl.constexpr):
    """Gates and ups of group WHICH in the program's ``tile``, [GROUP, tokens] each in float32. The products of one place are
    under way while the next ones begin.
    """
    wide, full, _ = rings[0]
    narrow, have, _ = rings[1]
    STAGES: gl.constexpr = wide.shape[0]
    TALL: gl.constexpr = wide.shape[1] // 2
    DEEP: gl.constexpr = narrow.shape[0]
    BLOCK_M: gl.constexpr = narrow.shape[1]
    gate = gl.zeros([GROUP, BLOCK_M], gl.float32, layout)
    up = gl.zeros([GROUP, BLOCK_M], gl.float32, layout)
    begins = tile * STEPS
    for unit in range(begins, begins + STEPS):
        mbarrier.wait(have.index(unit % DEEP), unit // DEEP & 1)
        mbarrier.wait(full.index(unit % STAGES), unit // STAGES & 1)
        rows = wide.index(unit % STAGES)
        tokens = narrow.index(unit % DEEP).permute((1, 0))
        gate = warpgroup_mma(rows.slice(WHICH * GROUP, GROUP, 0), tokens, gate, is_async=True)
        up = warpgroup_mma(rows.slice(TALL + WHICH * GROUP, GROUP, 0), tokens, up, is_async=True)
        gate, up = warpgroup_mma_wait(2, deps=[gate, up])
        _give_back(rings, gl.maximum(unit - 1, 0), unit > begins)
    gate, up = warpgroup_mma_wait(0, deps=[gate, up])
    _give_back(rings, begins + STEPS - 1, True)
    return gate, up


@gluon.jit
def _with_bias(sums, bias, first, left, HAS_BIAS: gl.constexpr, layout: gl.constexpr):
    """``sums`` of rows from ``first`` on, of which ``left`` are there."""
    if HAS_BIAS:
        lane = gl.arange(0, GROUP, gl.SliceLayout(1, layout))
        sums += gl.load(bias + first + lane, mask=lane < left, other=0.0).to(gl.float32)[:, None]
    return sums


@gluon.jit
def _read_here(number):
    """``number``, a whole one, in a way that what is computed of it isn't kept in registers while others are multiplied."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _store(made, out, first, left, n, m):
    """What was ``made`` [GROUP, tokens] of rows from ``first`` on, of which ``left`` are there."""
    BLOCK_M: gl.constexpr = made.shape[1]
    stored: gl.constexpr = gl.BlockedLayout([UNIT, 1], [GROUP // UNIT, 32 * UNIT // GROUP], [1, 4], [0, 1])
    made = gl.convert_layout(made, stored)
    n = _read_here(n // UNIT) * UNIT
    m = _read_here(m)
    lane = gl.arange(0, GROUP, gl.SliceLayout(1, stored))
    token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, stored))
    begins = gl.program_id(1) * BLOCK_M
    real = (begins + token < m)[None, :] & (lane // UNIT * UNIT < left)[:, None]
    own = out + begins.to(gl.int64) * n + first
    gl.store(own + (token[None, :] * n + lane[:, None]), made, mask=real)


@gluon.jit
def _gate(
    own,
    rings,
    WHICH: gl.constexpr,
    GROUPS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    STEPS: gl.constexpr,
    layout: gl.constexpr,
    PDL: gl.constexpr,
):
    """Group WHICH of four warps."""
    bias, out, m, n, each = own
    wait_for_last(PDL)
    for tile in range(gl.cdiv(each, GROUPS * GROUP)):
        before = (tile * GROUPS + WHICH) * (GROUP // UNIT)
        first = (gl.program_id(0) * (each // UNIT) + before) * UNIT  # in a way that shows that it's a multiple
        left = gl.minimum(each - before * UNIT, n - first)
        gate, up = _sums(rings, tile, WHICH, STEPS, layout)
        gate = _with_bias(gate, bias, first, left, HAS_BIAS, layout)
        up = _with_bias(up, bias, n + first, left, HAS_BIAS, layout)
        _store(gated(gate, up, out.dtype.element_ty), out, first, left, n, m)


@gluon.jit(do_not_specialize=["m", "each"])
def tall_silu_mul(
    x,
    w,
    bias,
    out,
    m,
    n,
    each,
    HAS_BIAS: gl.constexpr,
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    DEEP: gl.constexpr,
    PDL: gl.constexpr,
):
    """:func:`outrider_triton.jit.matmul.linear_silu_mul`, by one or two GROUPS of four warps."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    rings = _make_rings(x, w, GROUPS, BLOCK_M, BLOCK_K, STAGES, DEEP)
    own = bias, out, m, n, each
    tiles = gl.cdiv(each, GROUPS * GROUP)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_gate, (own, rings, 0, GROUPS, HAS_BIAS, STEPS, layout, PDL)),
                (_bring_weights, (w, rings[0], each, n, STEPS)),
                (_bring_tokens, (x, rings[1], tiles, STEPS, PDL)),
            ],
            [1, 1],
            [40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_gate, (own, rings, 0, GROUPS, HAS_BIAS, STEPS, layout, PDL)),
                (_gate, (own, rings, 1, GROUPS, HAS_BIAS, STEPS, layout, PDL)),
                (_bring_weights, (w, rings[0], each, n, STEPS)),
                (_bring_tokens, (x, rings[1], tiles, STEPS, PDL)),
            ],
            [4, 1, 1],
            [_REGISTERS, 40, 40],
        )
