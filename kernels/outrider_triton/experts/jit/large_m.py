"""Products of experts with many tokens, with tiles for large M loaded by a TMA pipeline
(:mod:`outrider_triton.products.jit.large_m_gates`).

A kernel first copies rows of tokens to the sorted order of :func:`outrider_triton.experts.jit.products.lay_out_pairs`, in
blocks with one expert each, so that the copy engine loads both operands. A program per multiprocessor then goes through
(block of pairs, tile of rows) in turn. Tiles of a block are next to each other, so that programs share its rows in the cache.
The number of blocks is read on the device.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from outrider_triton.jit.dependent import allow_next_kernel, wait_for_previous_kernel
from outrider_triton.jit.tma_pipeline import limit_in_flight
from outrider_triton.products.jit.large_m_gates import (
    GROUP,
    REGISTERS,
    UNIT,
    load_token_unit,
    make_pipelines,
    store_tile,
    tile_sums,
)
from outrider_triton.products.jit.matmul import swiglu

_GROUPS = gl.constexpr(2)
"""Number of multiplying warpgroups."""


@gluon.jit
def _items(used, tiles):
    """Return the number of (block, tile) items of this program: every ``num_programs``-th, from its own index on."""
    return gl.cdiv(gl.maximum(gl.load(used) * tiles - gl.program_id(0), 0), gl.num_programs(0)).to(gl.int32)


@gluon.jit
def _item(local, tiles):
    """Return the block of pairs and the tile of rows of the program's item number ``local``."""
    item = gl.program_id(0) + local * gl.num_programs(0)
    return item // tiles, item % tiles


@gluon.jit
def _load_unit(w, pipeline, unit, low, high, column):
    """Have the copy engine load columns of the two halves of a tile: rows from ``low`` and from ``high`` on."""
    weights, full, _ = pipeline
    STAGES: gl.constexpr = weights.shape[0]
    HALF: gl.constexpr = weights.shape[1] // 2
    arrived = full.index(unit % STAGES)
    tile = weights.index(unit % STAGES)
    mbarrier.expect(arrived, 2 * HALF * weights.shape[2] * w.dtype.primitive_bitwidth // 8)
    tma.async_copy_global_to_shared(w, [low, column], arrived, tile.slice(0, HALF, 0))
    tma.async_copy_global_to_shared(w, [high, column], arrived, tile.slice(HALF, HALF, 0))


@gluon.jit
def _load_weights(w, pipeline, routing, n, STEPS: gl.constexpr, GATED: gl.constexpr):
    """Load the weight tiles of all items. Runs in a warp of its own, also before the wait: no kernel writes the weight, and
    the kernel that laid the pairs out has ended, since the preceding one begins late.
    """
    expert_of, used, tiles = routing
    weights, full, empty = pipeline
    STAGES: gl.constexpr = weights.shape[0]
    HALF: gl.constexpr = weights.shape[1] // 2
    BLOCK_K: gl.constexpr = weights.shape[2]
    BYTES: gl.constexpr = 2 * HALF * BLOCK_K * w.dtype.primitive_bitwidth // 8
    for local in range(_items(used, tiles)):
        block, tile = _item(local, tiles)
        expert = gl.load(expert_of + block).to(gl.int32)
        if GATED:
            low = expert * (2 * n) + tile * HALF
            high = low + n
        else:
            low = expert * n + tile * (2 * HALF)
            high = low + HALF
        for step in range(STEPS):
            unit = local * STEPS + step
            if unit < STAGES:
                limit_in_flight(full, unit, BYTES)
            else:
                mbarrier.wait(empty.index(unit % STAGES), (unit // STAGES - 1) & 1)
            _load_unit(w, pipeline, unit, low, high, step * BLOCK_K)


@gluon.jit
def _load_tokens(x, pipeline, routing, STEPS: gl.constexpr, PDL: gl.constexpr):
    """Load the rows of all items. Runs in a warp of its own, which begins late
    (:func:`outrider_triton.jit.dependent.begin_late`).
    """
    _expert_of, used, tiles = routing
    tokens, _, _ = pipeline
    wait_for_previous_kernel(PDL)
    allow_next_kernel(PDL)
    for local in range(_items(used, tiles)):
        block, _tile = _item(local, tiles)
        for step in range(STEPS):
            load_token_unit(x, pipeline, local * STEPS + step, block * tokens.shape[1], step * tokens.shape[2])


@gluon.jit
def _multiply(
    out,
    pipelines,
    routing,
    n,
    WHICH: gl.constexpr,
    STEPS: gl.constexpr,
    GATED: gl.constexpr,
    layout: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply all items, and store the rows or, if GATED, SwiGLU of gate and up rows. Runs in warpgroup WHICH."""
    _expert_of, used, tiles = routing
    BLOCK_M: gl.constexpr = pipelines[1][0].shape[1]
    LOW: gl.constexpr = WHICH * GROUP if GATED else 2 * WHICH * GROUP
    HIGH: gl.constexpr = (_GROUPS + WHICH) * GROUP if GATED else LOW + GROUP
    wait_for_previous_kernel(PDL)
    for local in range(_items(used, tiles)):
        block, tile = _item(local, tiles)
        begins = block * BLOCK_M
        low, high = tile_sums(pipelines, local, LOW, HIGH, STEPS, layout)
        if GATED:
            first = (tile * _GROUPS + WHICH) * (GROUP // UNIT) * UNIT
            activations = swiglu(low, high, out.dtype.element_ty)
            store_tile(activations, out, first, n - first, n, begins + BLOCK_M, begins)
        else:
            first = (tile * _GROUPS + WHICH) * (2 * GROUP // UNIT) * UNIT
            store_tile(low.to(out.dtype.element_ty), out, first, n - first, n, begins + BLOCK_M, begins)
            first += GROUP
            store_tile(high.to(out.dtype.element_ty), out, first, n - first, n, begins + BLOCK_M, begins)


@gluon.jit
def tall_experts(
    x,
    w,
    expert_of,
    used,
    out,
    n,
    tiles,
    STEPS: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    TOKEN_STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply sorted rows ``x`` [places, k] by their block's expert into ``out`` [places, n], in blocks of BLOCK_M places.

    GATED: ``w`` is ``[experts * 2 n, k]``, and the result is SwiGLU; else ``w`` is ``[experts * n, k]``. ``expert_of`` int64
    [blocks] is each block's expert, and ``used`` int64 [1] the number of blocks. A tile has 256 rows. Both n and
    k are multiples of 8.

    The kernel begins late (:func:`outrider_triton.jit.dependent.begin_late`), and so does the kernel before it: the next one
    may read the blocks' experts at once.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    pipelines = make_pipelines(x, w, _GROUPS, BLOCK_M, BLOCK_K, STAGES, TOKEN_STAGES)
    routing = expert_of, used, tiles
    gl.warp_specialize(
        [
            (_multiply, (out, pipelines, routing, n, 0, STEPS, GATED, layout, PDL)),
            (_multiply, (out, pipelines, routing, n, 1, STEPS, GATED, layout, PDL)),
            (_load_weights, (w, pipelines[0], routing, n, STEPS, GATED)),
            (_load_tokens, (x, pipelines[1], routing, STEPS, PDL)),
        ],
        [4, 1, 1],
        [REGISTERS, 40, 40],
    )
