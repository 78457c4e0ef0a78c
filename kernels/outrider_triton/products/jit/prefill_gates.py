"""Gate and up products of prefill: a persistent program per multiprocessor multiplies tile after tile, and applies SwiGLU.

A tile has TOKENS tokens for each of two warpgroups, and PAIRS gate rows and PAIRS up rows. One instruction of the matrix unit
multiplies the tokens of a warpgroup by all rows of the tile. A thread then has the sums of both rows of a pair, and computes
the activation in registers. A warp of its own requests both operands from the copy engine, also those of the next
tile while the activations of this one are computed. The first warpgroup is a few columns ahead of the second: while one of
them computes activations, the other one multiplies.

Programs multiply GROUP_M blocks of tokens by all rows before the next blocks, so that they share rows and tokens in the
second-level cache.
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

from outrider_triton.jit.dependent import allow_next_kernel, wait_for_previous_kernel
from outrider_triton.products.jit.matmul import swiglu

TOKENS = gl.constexpr(64)
"""Tokens per warpgroup: the matrix unit's height."""
PAIRS = gl.constexpr(128)
"""Pairs of rows per tile: half of the matrix unit's maximum width."""
LEAD = gl.constexpr(1)
"""Units that the first warpgroup multiplies before the second one begins a tile; fewer than a pipeline has stages."""
_REGISTERS = gl.constexpr(232)
"""Registers per multiplying thread: for 128 sums and the activation."""


@gluon.jit
def _tile(index, tiles, GROUP_M: gl.constexpr):
    """Return the block of tokens and the block of rows of the tile number ``index``."""
    token_tiles, row_tiles = tiles
    first = index // (GROUP_M * row_tiles) * GROUP_M
    height = gl.minimum(token_tiles - first, GROUP_M)
    inside = index - first * row_tiles
    return first + inside % height, inside // height


@gluon.jit
def _load(x, w, pipeline, tiles, n, steps, GROUP_M: gl.constexpr, PDL: gl.constexpr):
    """Request all units of the program's tiles. Begins late (:func:`outrider_triton.jit.dependent.begin_late`)."""
    tokens, weights, full, empty, _ = pipeline
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_K: gl.constexpr = weights.shape[2]
    BYTES: gl.constexpr = 2 * (TOKENS + PAIRS) * BLOCK_K * x.dtype.primitive_bitwidth // 8
    wait_for_previous_kernel(PDL)
    allow_next_kernel(PDL)
    unit = 0
    for index in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        token_tile, row_tile = _tile(index, tiles, GROUP_M)
        for step in range(steps):
            stage = unit % STAGES
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), (unit // STAGES + 1) & 1)
            mbarrier.expect(arrived, BYTES)
            rows = weights.index(stage)
            column = step * BLOCK_K
            for half in gl.static_range(2):
                token = (token_tile * 2 + half) * TOKENS
                tma.async_copy_global_to_shared(x, [token, column], arrived, tokens.index(stage * 2 + half))
                row = half * n + row_tile * PAIRS
                tma.async_copy_global_to_shared(w, [row, column], arrived, rows.slice(half * PAIRS, PAIRS, 0))
            unit += 1


@gluon.jit
def _multiply(out, buffer, pipeline, tiles, steps, WHICH: gl.constexpr, GROUP_M: gl.constexpr, PDL: gl.constexpr):
    """Multiply, apply SwiGLU and store, for the tokens of warpgroup WHICH in all tiles of the program."""
    tokens, weights, full, empty, led = pipeline
    STAGES: gl.constexpr = full.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * PAIRS, 16])
    sums = gl.zeros([TOKENS, 2 * PAIRS], gl.float32, layout)
    wait_for_previous_kernel(PDL)
    unit = 0
    for index in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        if WHICH == 1:
            mbarrier.wait(led, unit // steps & 1)
        for step in range(steps):
            stage = unit % STAGES
            mbarrier.wait(full.index(stage), unit // STAGES & 1)
            rows = weights.index(stage).permute((1, 0))
            sums = warpgroup_mma(tokens.index(stage * 2 + WHICH), rows, sums, use_acc=step > 0, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            mbarrier.arrive(empty.index(gl.maximum(unit - 1, 0) % STAGES), count=1, pred=step > 0)
            if WHICH == 0:
                mbarrier.arrive(led, count=1, pred=step == LEAD)
            unit += 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index((unit - 1) % STAGES), count=1)
        gate, up = gl.permute(gl.reshape(sums, [TOKENS, 2, PAIRS]), [0, 2, 1]).split()
        activations = swiglu(gate, up, out.dtype)
        tma.store_wait(0)
        buffer.store(activations)
        fence_async_shared()
        token_tile, row_tile = _tile(index, tiles, GROUP_M)
        tma.async_copy_shared_to_global(out, [(token_tile * 2 + WHICH) * TOKENS, row_tile * PAIRS], buffer)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n", "token_tiles", "row_tiles", "steps"])
def prefill_silu_mul(
    x, w, out, n, token_tiles, row_tiles, steps, STAGES: gl.constexpr, GROUP_M: gl.constexpr, PDL: gl.constexpr
):
    """Compute :func:`outrider_triton.products.jit.matmul.linear_silu_mul` of normalised rows ``x`` [m, k] and ``w`` [2 n, k],
    without a bias. A unit is one of the ``steps`` blocks of columns. There are more than LEAD, and at least STAGES - LEAD:
    the first warpgroup must not arrive twice before the second one has waited.

    The copy engine loads zeros beyond the last token, row and column, and stores no such results.
    """
    BLOCK_K: gl.constexpr = x.block_type.shape[1]
    tokens = gl.allocate_shared_memory(x.dtype, [STAGES * 2, TOKENS, BLOCK_K], x.layout)
    weights = gl.allocate_shared_memory(w.dtype, [STAGES, 2 * PAIRS, BLOCK_K], w.layout)
    buffers = gl.allocate_shared_memory(out.dtype, [2, TOKENS, PAIRS], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    led = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(led, count=1)
    pipeline = tokens, weights, full, empty, led
    tiles = token_tiles, row_tiles
    gl.warp_specialize(
        [
            (_multiply, (out, buffers.index(0), pipeline, tiles, steps, 0, GROUP_M, PDL)),
            (_multiply, (out, buffers.index(1), pipeline, tiles, steps, 1, GROUP_M, PDL)),
            (_load, (x, w, pipeline, tiles, n, steps, GROUP_M, PDL)),
        ],
        [4, 1],
        [_REGISTERS, 40],
    )
