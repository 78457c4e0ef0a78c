"""Products of 33 to 128 tokens and an e4m3 weight, whose blocks of 128 rows and 128 columns have a scale each (Hopper).

A tile is 128 weight rows and all tokens. A *unit* is a tile's products of two *pieces* of 128 columns. Programs get equal
shares of the units of all tiles, in the order of tiles and columns (Stream-K), so that every multiprocessor works until the
end. A program stores a whole tile to the result, and the sums of a part of a tile to ``parts``. :func:`add_shared_tiles` adds
those in the order of the columns. The bits of a row depend on the number of programs alone, not on other rows.

Two warps request weights and tokens from the copy engine, the former also before the wait for the preceding kernel. Two
warpgroups multiply: half of the tokens each if there are more than 64, else half of the tile's rows each. The matrix unit
sums each piece from zero. One warpgroup adds the sums in float32, times their two scales, while the other one multiplies.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from outrider_triton.jit.dependent import allow_next_kernel, begin, wait_for_previous_kernel
from outrider_triton.jit.tma_pipeline import PIECE_COLUMNS

ROWS = gl.constexpr(128)
"""Weight rows per tile, which share a scale."""
GROUP = gl.constexpr(64)
"""Tokens per warpgroup: the matrix unit's height."""
PIECES = gl.constexpr(2)
"""Pieces of columns per unit."""
_REGISTERS = gl.constexpr(168)
"""Registers per multiplying thread."""


@gluon.jit
def _load(operand, row, buffer, full, empty, count, step):
    """Request the unit of ``step`` from the copy engine, once both warpgroups have released its stage."""
    STAGES: gl.constexpr = full.shape[0]
    stage = count % STAGES
    mbarrier.wait(empty.index(stage), (count // STAGES + 1) & 1, pred=count >= STAGES)
    mbarrier.expect(full.index(stage), PIECES * buffer.shape[1] * PIECE_COLUMNS)
    for piece in gl.static_range(PIECES):
        place = [row, (step * PIECES + piece) * PIECE_COLUMNS]
        tma.async_copy_global_to_shared(operand, place, full.index(stage), buffer.index(stage * PIECES + piece))


@gluon.jit
def _load_weights(w, pipeline, units, STEPS: gl.constexpr):
    weights, _, full, empty = pipeline
    first, last = units
    for unit in range(first, last):
        _load(w, unit // STEPS * ROWS, weights, full, empty, unit - first, unit % STEPS)


@gluon.jit
def _load_tokens(x, pipeline, units, STEPS: gl.constexpr, PDL: gl.constexpr):
    """Load the tokens of all units. Begins late (:func:`outrider_triton.jit.dependent.begin_late`)."""
    _, tokens, full, empty = pipeline
    first, last = units
    wait_for_previous_kernel(PDL)
    allow_next_kernel(PDL)
    for unit in range(first, last):
        _load(x, 0, tokens, full, empty, unit - first, unit % STEPS)


@gluon.jit
def _multiply_piece(pipeline, place, zeros, TOKEN: gl.constexpr, ROW: gl.constexpr):
    tokens = pipeline[1].index(place).slice(TOKEN, GROUP, 0)
    rows = pipeline[0].index(place).slice(ROW, zeros.shape[1], 0)
    sums = warpgroup_mma(tokens, rows.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[sums])


@gluon.jit
def _load_scales(x_scales, x_step, scales, step):
    """Load the scales of the tokens and of the weight for both pieces of a step."""
    piece = step * PIECES
    first = gl.load(x_scales + piece * x_step), gl.load(scales + piece)
    return first, (gl.load(x_scales + (piece + 1) * x_step), gl.load(scales + piece + 1))


@gluon.jit
def _factor(scales):
    of_tokens, of_rows = scales
    return (of_tokens * of_rows.to(gl.float32))[:, None]


@gluon.jit
def _multiply(
    operands, pipeline, buffer, units, WHICH: gl.constexpr, STEPS: gl.constexpr, layout: gl.constexpr, PDL: gl.constexpr
):
    """Multiply the program's units, and store its tiles and its parts of tiles. Runs in warpgroup WHICH."""
    x_scales, x_row, x_step, scales, out, parts, m = operands
    _, tokens, full, empty = pipeline
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_M: gl.constexpr = tokens.shape[1]
    WIDTH: gl.constexpr = buffer.shape[1]
    TOKEN: gl.constexpr = WHICH * GROUP if BLOCK_M > GROUP else 0
    ROW: gl.constexpr = 0 if BLOCK_M > GROUP else WHICH * WIDTH
    first, last = units
    token = TOKEN + gl.arange(0, GROUP, gl.SliceLayout(1, layout))
    row = ROW + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    token_scales = x_scales + gl.minimum(token, m - 1) * x_row
    wait_for_previous_kernel(PDL)
    for tile in range(first // STEPS, (last - 1) // STEPS + 1):
        begins = gl.maximum(first, tile * STEPS)
        ends = gl.minimum(last, (tile + 1) * STEPS)
        row_scales = scales + tile * (STEPS * PIECES)
        total = gl.zeros([GROUP, WIDTH], gl.float32, layout)
        low, high = _load_scales(token_scales, x_step, row_scales, begins - tile * STEPS)
        for unit in range(begins, ends):
            stage = (unit - first) % STAGES
            low_factor = _factor(low)
            high_factor = _factor(high)
            following = gl.minimum(unit + 1, ends - 1) - tile * STEPS
            low, high = _load_scales(token_scales, x_step, row_scales, following)  # while this unit is multiplied
            mbarrier.wait(full.index(stage), (unit - first) // STAGES & 1)
            total += _multiply_piece(pipeline, stage * PIECES, total, TOKEN, ROW) * low_factor
            sums = _multiply_piece(pipeline, stage * PIECES + 1, total, TOKEN, ROW)
            mbarrier.arrive(empty.index(stage), count=1)
            total += sums * high_factor
        if ends - begins == STEPS:
            tma.store_wait(0)
            buffer.store(total.to(out.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [TOKEN, tile * ROWS + ROW], buffer)
        else:
            part = gl.program_id(0) * 2 + gl.where(begins == tile * STEPS, 1, 0)
            place = parts + part * (BLOCK_M * ROWS) + token[:, None] * ROWS + row[None, :]
            gl.store(place, total)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["m", "x_row", "x_step", "units"])
def multiply_scaled_blocks(
    x, w, x_scales, x_row, x_step, scales, out, parts, m, units, STEPS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr
):
    """Multiply ``x [m, k]`` by a weight ``w [n, k]`` with ``scales [n / ROWS, k / PIECE_COLUMNS]`` into ``out [m, n]``; the
    scale of token t for piece p is ``x_scales[t * x_row + p * x_step]``.

    A tile has STEPS of the ``units``. ``parts`` [programs, 2, tokens, ROWS], float32, receives each program's sums of a tile
    that another program begins, and of one that another ends.
    """
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    WIDTH: gl.constexpr = out.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    weights = gl.allocate_shared_memory(w.dtype, [STAGES * PIECES, ROWS, PIECE_COLUMNS], w.layout)
    tokens = gl.allocate_shared_memory(x.dtype, [STAGES * PIECES, BLOCK_M, PIECE_COLUMNS], x.layout)
    buffers = gl.allocate_shared_memory(out.dtype, [2, GROUP, WIDTH], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=2)
    pipeline = weights, tokens, full, empty
    operands = x_scales, x_row, x_step, scales, out, parts, m
    program = gl.program_id(0)
    share = program * units // gl.num_programs(0), (program + 1) * units // gl.num_programs(0)
    gl.warp_specialize(
        [
            (_multiply, (operands, pipeline, buffers.index(0), share, 0, STEPS, layout, PDL)),
            (_multiply, (operands, pipeline, buffers.index(1), share, 1, STEPS, layout, PDL)),
            (_load_weights, (w, pipeline, share, STEPS)),
            (_load_tokens, (x, pipeline, share, STEPS, PDL)),
        ],
        [4, 1, 1],
        [_REGISTERS, 40, 40],
    )


@triton.jit(do_not_specialize=["m", "units", "programs"])
def add_shared_tiles(
    parts, out, m, n, units, programs, STEPS: tl.constexpr, BLOCK_M: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr
):
    """Add the ``parts`` of each tile that programs of :func:`multiply_scaled_blocks` shared, for TOKENS tokens per program,
    and store them to ``out [m, n]``.
    """
    tile = tl.program_id(0)
    first = ((tile * STEPS + 1) * programs - 1) // units  # the program with the tile's first unit
    last = ((tile + 1) * STEPS * programs - 1) // units
    begin(PDL)
    if first < last:
        token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
        row = tl.arange(0, 128)
        inside = token[:, None] * 128 + row[None, :]
        total = tl.load(parts + (first * 2 + 1) * (BLOCK_M * 128) + inside)
        for program in range(first + 1, last + 1):
            total += tl.load(parts + program * (2 * BLOCK_M * 128) + inside)
        place = out + token.to(tl.int64)[:, None] * n + (tile * 128 + row)[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=(token < m)[:, None])
