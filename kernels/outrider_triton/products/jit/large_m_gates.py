"""Gate and up products of about 100 tokens, with tiles for large M loaded by a TMA pipeline
(:mod:`outrider_triton.jit.tma_pipeline`).

This many tokens have as many bytes as the weight's tile, and each program reads all of their columns from the second-level
cache. So a program multiplies as many weight rows at a time as its accumulators allow, and reads the tokens once for them: 64
pairs of a gate row and an up row per warpgroup. A warpgroup has the sums of both rows of a pair in the same register layout,
and computes the activation in registers.

Token loads queue after all other memory requests, so tokens have a pipeline of their own with as many stages as fit. Results
are stored 16 bytes per thread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from outrider_triton.jit.dependent import allow_next_kernel, wait_for_previous_kernel
from outrider_triton.jit.tma_pipeline import expect_boxes, limit_in_flight
from outrider_triton.products.jit.matmul import swiglu

GROUP = gl.constexpr(64)
"""Pairs of rows per warpgroup: 64 gate rows, the matrix unit's height, and 64 up rows."""
UNIT = gl.constexpr(8)
"""The number of gate rows, and each program's share of them, are multiples of this."""
REGISTERS = gl.constexpr(168)
"""Registers per multiplying thread: for 128 sums and their operands."""


@gluon.jit
def make_pipelines(
    x,
    w,
    GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    TOKEN_STAGES: gl.constexpr,
):
    """Allocate the pipelines of the weight, STAGES tiles with gate rows first, and of the tokens, TOKEN_STAGES tiles.

    Each stage has a barrier for its arrival, and one for its release by all warpgroups.
    """
    weights = gl.allocate_shared_memory(w.dtype, [STAGES, 2 * GROUPS * GROUP, BLOCK_K], w.layout)
    tokens = gl.allocate_shared_memory(x.dtype, [TOKEN_STAGES, BLOCK_M, BLOCK_K], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    arrived = gl.allocate_shared_memory(gl.int64, [TOKEN_STAGES, 1], mbarrier.MBarrierLayout())
    released = gl.allocate_shared_memory(gl.int64, [TOKEN_STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=GROUPS)
    for place in gl.static_range(TOKEN_STAGES):
        mbarrier.init(arrived.index(place), count=1)
        mbarrier.init(released.index(place), count=GROUPS)
    return (weights, full, empty), (tokens, arrived, released)


# -- loads ----------------------------------------------------------------------------------------------------


@gluon.jit
def _load_unit(w, pipeline, unit, pairs_per_program, n, STEPS: gl.constexpr):
    """Have the copy engine load unit ``unit`` of gate and up rows: columns unit % STEPS of tile unit // STEPS."""
    weights, full, _ = pipeline
    STAGES: gl.constexpr = weights.shape[0]
    TILE_PAIRS: gl.constexpr = weights.shape[1] // 2
    BLOCK_K: gl.constexpr = weights.shape[2]
    BOX: gl.constexpr = w.block_type.shape[0]
    arrived = full.index(unit % STAGES)
    tile = weights.index(unit % STAGES)
    first_pair = unit // STEPS * TILE_PAIRS
    column = unit % STEPS * BLOCK_K
    remaining = pairs_per_program - first_pair
    expect_boxes(arrived, remaining, BOX, TILE_PAIRS // BOX, 2 * BOX * BLOCK_K * w.dtype.primitive_bitwidth // 8)
    for box in gl.static_range(TILE_PAIRS // BOX):
        row = gl.program_id(0) * pairs_per_program + first_pair + box * BOX
        is_needed = remaining > box * BOX
        tma.async_copy_global_to_shared(w, [row, column], arrived, tile.slice(box * BOX, BOX, 0), pred=is_needed)
        tma.async_copy_global_to_shared(
            w, [n + row, column], arrived, tile.slice(TILE_PAIRS + box * BOX, BOX, 0), pred=is_needed
        )


@gluon.jit
def _load_weights(w, pipeline, pairs_per_program, n, STEPS: gl.constexpr):
    """Load all units of the program's gate and up rows into the pipeline. Runs in a warp of its own, also before the wait,
    since no kernel writes the weight.
    """
    weights, full, empty = pipeline
    STAGES: gl.constexpr = weights.shape[0]
    TILE_PAIRS: gl.constexpr = weights.shape[1] // 2
    units = gl.cdiv(pairs_per_program, TILE_PAIRS) * STEPS
    for unit in range(gl.minimum(units, STAGES)):
        limit_in_flight(full, unit, 2 * TILE_PAIRS * weights.shape[2] * w.dtype.primitive_bitwidth // 8)
        _load_unit(w, pipeline, unit, pairs_per_program, n, STEPS)
    for unit in range(STAGES, units):
        mbarrier.wait(empty.index(unit % STAGES), (unit // STAGES - 1) & 1)
        _load_unit(w, pipeline, unit, pairs_per_program, n, STEPS)


@gluon.jit
def load_token_unit(x, pipeline, unit, row, column):
    """Have the copy engine load tokens from ``row`` on, columns from ``column`` on, once the stage of ``unit`` is free."""
    tokens, arrived, released = pipeline
    TOKEN_STAGES: gl.constexpr = tokens.shape[0]
    BYTES: gl.constexpr = tokens.shape[1] * tokens.shape[2] * x.dtype.primitive_bitwidth // 8
    place = unit % TOKEN_STAGES
    mbarrier.wait(released.index(place), (unit // TOKEN_STAGES + 1) & 1, pred=unit >= TOKEN_STAGES)
    mbarrier.expect(arrived.index(place), BYTES)
    tma.async_copy_global_to_shared(x, [row, column], arrived.index(place), tokens.index(place))


@gluon.jit
def _load_tokens(x, pipeline, tiles, STEPS: gl.constexpr, PDL: gl.constexpr):
    """Load the tokens into their pipeline once per tile. Runs in a warp of its own, which begins late
    (:func:`outrider_triton.jit.dependent.begin_late`).
    """
    tokens, _, _ = pipeline
    wait_for_previous_kernel(PDL)
    allow_next_kernel(PDL)
    for unit in range(tiles * STEPS):
        load_token_unit(x, pipeline, unit, gl.program_id(1) * tokens.shape[1], unit % STEPS * tokens.shape[2])


# -- products -------------------------------------------------------------------------------------------------


@gluon.jit
def _release(pipelines, unit, pred):
    """Release the weight stage and the token stage of ``unit`` for this warpgroup, if ``pred``."""
    weights, _, empty = pipelines[0]
    tokens, _, released = pipelines[1]
    mbarrier.arrive(empty.index(unit % weights.shape[0]), count=1, pred=pred)
    mbarrier.arrive(released.index(unit % tokens.shape[0]), count=1, pred=pred)


@gluon.jit
def tile_sums(pipelines, tile, LOW: gl.constexpr, HIGH: gl.constexpr, STEPS: gl.constexpr, layout: gl.constexpr):
    """Multiply the rows from LOW and from HIGH on in the program's ``tile`` by the tokens; return both sums, [GROUP, tokens]
    each in float32.

    Products of one stage run while those of the next begin.
    """
    weights, full, _ = pipelines[0]
    tokens_buffer, tokens_arrived, _ = pipelines[1]
    STAGES: gl.constexpr = weights.shape[0]
    TOKEN_STAGES: gl.constexpr = tokens_buffer.shape[0]
    BLOCK_M: gl.constexpr = tokens_buffer.shape[1]
    low = gl.zeros([GROUP, BLOCK_M], gl.float32, layout)
    high = gl.zeros([GROUP, BLOCK_M], gl.float32, layout)
    begins = tile * STEPS
    for unit in range(begins, begins + STEPS):
        mbarrier.wait(tokens_arrived.index(unit % TOKEN_STAGES), unit // TOKEN_STAGES & 1)
        mbarrier.wait(full.index(unit % STAGES), unit // STAGES & 1)
        rows = weights.index(unit % STAGES)
        tokens = tokens_buffer.index(unit % TOKEN_STAGES).permute((1, 0))
        low = warpgroup_mma(rows.slice(LOW, GROUP, 0), tokens, low, is_async=True)
        high = warpgroup_mma(rows.slice(HIGH, GROUP, 0), tokens, high, is_async=True)
        low, high = warpgroup_mma_wait(2, deps=[low, high])
        _release(pipelines, gl.maximum(unit - 1, 0), unit > begins)
    low, high = warpgroup_mma_wait(0, deps=[low, high])
    _release(pipelines, begins + STEPS - 1, True)
    return low, high


@gluon.jit
def _with_bias(sums, bias, first, remaining, layout: gl.constexpr):
    """Return ``sums`` with the bias of the ``remaining`` rows from row ``first`` on added."""
    if bias is not None:
        lane = gl.arange(0, GROUP, gl.SliceLayout(1, layout))
        sums += gl.load(bias + first + lane, mask=lane < remaining, other=0.0).to(gl.float32)[:, None]
    return sums


@gluon.jit
def _opaque(number):
    """Return integer ``number`` through inline assembly, so that the compiler doesn't keep values derived from it in
    registers during the products.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def store_tile(sums, out, first, remaining, n, m, begins):
    """Store ``sums`` [GROUP, tokens] of the ``remaining`` rows from row ``first`` on, and of the tokens from ``begins`` on,
    to ``out [m, n]``.
    """
    BLOCK_M: gl.constexpr = sums.shape[1]
    store_layout: gl.constexpr = gl.BlockedLayout([UNIT, 1], [GROUP // UNIT, 32 * UNIT // GROUP], [1, 4], [0, 1])
    sums = gl.convert_layout(sums, store_layout)
    n = _opaque(n // UNIT) * UNIT
    m = _opaque(m)
    lane = gl.arange(0, GROUP, gl.SliceLayout(1, store_layout))
    token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, store_layout))
    mask = (begins + token < m)[None, :] & (lane // UNIT * UNIT < remaining)[:, None]
    destination = out + begins.to(gl.int64) * n + first
    gl.store(destination + (token[None, :] * n + lane[:, None]), sums, mask=mask)


@gluon.jit
def _gate(
    operands,
    pipelines,
    WHICH: gl.constexpr,
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    layout: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply, add the bias, apply SwiGLU and store, for all tiles of the program. Runs in warpgroup WHICH."""
    bias, out, m, n, pairs_per_program = operands
    begins = gl.program_id(1) * pipelines[1][0].shape[1]
    wait_for_previous_kernel(PDL)
    for tile in range(gl.cdiv(pairs_per_program, GROUPS * GROUP)):
        units_before = (tile * GROUPS + WHICH) * (GROUP // UNIT)
        first = (
            gl.program_id(0) * (pairs_per_program // UNIT) + units_before
        ) * UNIT  # written so that the compiler sees a multiple of UNIT
        remaining = gl.minimum(pairs_per_program - units_before * UNIT, n - first)
        gate, up = tile_sums(pipelines, tile, WHICH * GROUP, (GROUPS + WHICH) * GROUP, STEPS, layout)
        gate = _with_bias(gate, bias, first, remaining, layout)
        up = _with_bias(up, bias, n + first, remaining, layout)
        store_tile(swiglu(gate, up, out.dtype.element_ty), out, first, remaining, n, m, begins)


@gluon.jit(do_not_specialize=["m", "pairs_per_program"])
def tall_silu_mul(
    x,
    w,
    bias,
    out,
    m,
    n,
    pairs_per_program,
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    TOKEN_STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute :func:`outrider_triton.products.jit.matmul.linear_silu_mul` of normalised rows with one or two warpgroups
    (GROUPS).
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    pipelines = make_pipelines(x, w, GROUPS, BLOCK_M, BLOCK_K, STAGES, TOKEN_STAGES)
    operands = bias, out, m, n, pairs_per_program
    tiles = gl.cdiv(pairs_per_program, GROUPS * GROUP)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_gate, (operands, pipelines, 0, GROUPS, STEPS, layout, PDL)),
                (_load_weights, (w, pipelines[0], pairs_per_program, n, STEPS)),
                (_load_tokens, (x, pipelines[1], tiles, STEPS, PDL)),
            ],
            [1, 1],
            [40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_gate, (operands, pipelines, 0, GROUPS, STEPS, layout, PDL)),
                (_gate, (operands, pipelines, 1, GROUPS, STEPS, layout, PDL)),
                (_load_weights, (w, pipelines[0], pairs_per_program, n, STEPS)),
                (_load_tokens, (x, pipelines[1], tiles, STEPS, PDL)),
            ],
            [4, 1, 1],
            [REGISTERS, 40, 40],
        )
