"""Products with weights in nibble planes (:mod:`outrider_triton.quantized.jit.nibble_planes`), loaded by a TMA pipeline.

A loading warp has the copy engine fill the pipeline with tiles of the weight before the wait for the preceding kernel. It
limits the tiles in flight, since that kernel's reads would queue after them. The multiplying warps load the tokens after the
wait, and keep them. One or two warpgroups take units in turn: a unit is 64 rows and some groups of 128 columns with a scale
each. Bytes go from the tile to registers and are dequantised there. The matrix unit takes them from registers, and the
tokens from shared memory. So a stage is free as soon as its bytes are in registers. While one group of columns is
multiplied, the next one is dequantised.

The matrix unit takes 64 rows and 32 bytes of columns at a time, however few tokens there are. With 16-bit elements it is
slower than memory. So a weight element is one byte, 16 times its value, and three instructions convert eight of them. A
token element is an integer multiple of a grain, in two int8 components, which are two tokens to the matrix unit
(:func:`outrider_triton.quantized.jit.nibble_planes.store_in_planes`). Sums of 128 products are exact.

Scales are also read before the wait, and stored to shared memory with the rows of a column next to each other.

Rows of queries and keys are rotated in pairs, which are half a head apart. A tile alternates eight low rows and the eight
high rows of the same pairs, so that a thread holds both rows of a pair in the matrix unit's output layout.
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

from outrider_triton.jit.dependent import allow_next_kernel, wait_for_previous_kernel
from outrider_triton.jit.tma_pipeline import expect_boxes, limit_in_flight
from outrider_triton.products.jit.fused import load_angles, write_rotated
from outrider_triton.quantized.jit.nibble_planes import bytes_of_half
from outrider_triton.quantized.jit.nibble_planes_gated import lay_gated

ROWS = gl.constexpr(64)
"""Weight rows per tile, the matrix unit's height."""
_GROUP = gl.constexpr(128)
"""Number of columns that may have a scale of their own, and are permuted together."""
_GROUP_BYTES = gl.constexpr(64)
"""Number of bytes of a group of columns in a row of a tile."""
PAIRED = gl.constexpr(8)
"""Number of consecutive low rows, and then of high rows, in a tile of row pairs."""


# -- loads ----------------------------------------------------------------------------------------------------


@gluon.jit
def _load_unit(w, weights, full, unit, each, steps, HALF: gl.constexpr):
    """Have the copy engine load unit ``unit`` of the weight: columns unit % steps of tile unit // steps."""
    STAGES: gl.constexpr = weights.shape[0]
    BOX: gl.constexpr = w.block_type.shape[0]
    TILE_BYTES: gl.constexpr = w.block_type.shape[1]
    TILE_ROWS: gl.constexpr = ROWS // 2 if HALF > 0 else ROWS
    arrived = full.index(unit % STAGES)
    tile = weights.index(unit % STAGES)
    first_row = unit // steps * TILE_ROWS
    remaining = each - first_row
    column = (gl.program_id(1) * steps + unit % steps) * TILE_BYTES
    expect_boxes(arrived, remaining, BOX, TILE_ROWS // BOX, ROWS // TILE_ROWS * BOX * TILE_BYTES)
    for box in gl.static_range(TILE_ROWS // BOX):
        is_needed = remaining > box * BOX
        row = gl.program_id(0) * each + first_row + box * BOX
        if HALF > 0:
            row += row // HALF * HALF
            tma.async_copy_global_to_shared(w, [row, column], arrived, tile.slice(2 * box * BOX, BOX, 0), pred=is_needed)
            high = tile.slice((2 * box + 1) * BOX, BOX, 0)
            tma.async_copy_global_to_shared(w, [row + HALF, column], arrived, high, pred=is_needed)
        else:
            tma.async_copy_global_to_shared(w, [row, column], arrived, tile.slice(box * BOX, BOX, 0), pred=is_needed)


@gluon.jit
def _load_weights(w, pipeline, each, steps, TILES: gl.constexpr, HALF: gl.constexpr):
    """Load all units of the program's weight rows into the pipeline. Runs in a warp of its own, also before the wait, since
    no kernel writes the weight.
    """
    weights, _, full, empty, _ = pipeline
    STAGES: gl.constexpr = weights.shape[0]
    units = TILES * steps
    for unit in range(gl.minimum(units, STAGES)):
        limit_in_flight(full, unit, ROWS * w.block_type.shape[1])
        _load_unit(w, weights, full, unit, each, steps, HALF)
    for unit in range(STAGES, units):
        mbarrier.wait(empty.index(unit % STAGES), (unit // STAGES - 1) & 1)
        _load_unit(w, weights, full, unit, each, steps, HALF)


@gluon.jit
def _load_tokens(x, pipeline, STEPS: gl.constexpr):
    """Load all token columns of the program to shared memory, after the wait."""
    _, tokens, _, _, arrived = pipeline
    COLUMNS: gl.constexpr = x.block_type.shape[1]
    for step in range(STEPS):
        mbarrier.expect(arrived.index(step), x.block_type.shape[0] * COLUMNS)
        column = (gl.program_id(1) * STEPS + step) * COLUMNS
        tma.async_copy_global_to_shared(x, [0, column], arrived.index(step), tokens.index(step))


# -- products ------------------------------------------------------------------------------------------------------


@gluon.jit
def _row_of(place, tile, each, HALF: gl.constexpr):
    """Return the weight row at position ``place`` of the program's ``tile``, and True if the row belongs to the program."""
    if HALF > 0:
        index = tile * (ROWS // 2) + place // (2 * PAIRED) * PAIRED + place % PAIRED
        pair = gl.program_id(0) * each + index
        return pair + pair // HALF * HALF + place // PAIRED % 2 * HALF, index < each
    else:
        index = tile * ROWS + place
        return gl.program_id(0) * each + index, index < each


@gluon.jit
def _concatenate(left, right):
    """Return ``left`` and ``right`` side by side: [rows, 2 columns]."""
    return gl.join(left, right).permute((0, 2, 1)).reshape((left.shape[0], 2 * left.shape[1]))


@gluon.jit
def _part(packed, tokens, GROUP: gl.constexpr, layout: gl.constexpr):
    """Start the product of 128 columns, and return its sums, int32 [64, components].

    ``packed`` is int8 [64, 64], and ``tokens`` int8 [components, columns of a unit].
    """
    COMPONENTS: gl.constexpr = tokens.shape[0]
    operand_layout: gl.constexpr = packed.type.layout
    numbers = gl.convert_layout(
        _concatenate(bytes_of_half(packed, 0), bytes_of_half(packed, 1)), operand_layout, assert_trivial=True
    )
    token_columns = tokens.slice(GROUP * _GROUP, _GROUP, 1).permute((1, 0))
    part = gl.zeros([ROWS, COMPONENTS], gl.int32, layout)
    return warpgroup_mma(numbers, token_columns, part, use_acc=False, is_async=True)


@gluon.jit
def _split_components(values):
    """Return the low and the high components of ``values`` [64, components], [64, tokens] each. A thread has both components
    of a token.
    """
    TOKENS: gl.constexpr = values.shape[1] // 2
    return gl.split(values.reshape((ROWS, TOKENS, 2)))


@gluon.jit
def _add_product(total, product, factor, grain):
    """Return ``total [64, tokens]`` plus a group's product: both components of a token, times its grain and the
    row's scale.
    """
    low, high = _split_components(product)
    return total + (high * 256 + low).to(gl.float32) * (factor.to(gl.float32)[:, None] * grain[None, :])


@gluon.jit
def _product(
    pipeline,
    scales,
    grains,
    tile,
    WHICH: gl.constexpr,
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
    GATED: gl.constexpr,
):
    """Multiply this warpgroup's units of the program's ``tile``; return [64, tokens] in float32.

    GATED: the tokens are in shared memory already.
    """
    weights, tokens, full, empty, arrived = pipeline
    STAGES: gl.constexpr = weights.shape[0]
    COUNT: gl.constexpr = tokens.shape[2] // _GROUP
    COMPONENTS: gl.constexpr = tokens.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COMPONENTS, 32])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    total, _ = _split_components(gl.zeros([ROWS, COMPONENTS], gl.float32, layout))
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
            mbarrier.wait(arrived.index(step), 0)
        mbarrier.wait(full.index(place), unit // STAGES & 1)
        packed = weights.index(place).slice(0, _GROUP_BYTES, 1).load(operand_layout)
        following = weights.index(place).slice(_GROUP_BYTES, _GROUP_BYTES, 1).load(operand_layout)
        factor = scales.index(first + COUNT * step).load(row)
        grain = grains.index(COUNT * step).load(column)
        last = _part(packed, tokens.index(step), 0, layout)
        for group in gl.static_range(1, COUNT):
            packed = following
            next_factor = scales.index(first + COUNT * step + group).load(row)
            next_grain = grains.index(COUNT * step + group).load(column)
            if group + 1 < COUNT:
                following = weights.index(place).slice((group + 1) * _GROUP_BYTES, _GROUP_BYTES, 1).load(operand_layout)
            else:  # the whole tile is in registers
                mbarrier.arrive(empty.index(place), count=1, pred=unit + STAGES < TILES * STEPS)
            part = _part(packed, tokens.index(step), group, layout)
            finished = warpgroup_mma_wait(1, deps=[last])
            total = _add_product(total, finished, factor, grain)
            last = part
            factor = next_factor
            grain = next_grain
        finished = warpgroup_mma_wait(0, deps=[last])
        total = _add_product(total, finished, factor, grain)
    return total


@gluon.jit
def _read_scales(
    scales, destination, n, groups, each, GROUPS_PER_PROGRAM: gl.constexpr, TILES: gl.constexpr, HALF: gl.constexpr
):
    """Load the transposed scales of all tiles of the program into shared memory."""
    COUNT: gl.constexpr = destination.shape[0] // next_power_of_2(TILES)
    PER_THREAD: gl.constexpr = 8 if COUNT > 8 else COUNT
    ACROSS: gl.constexpr = 8 if COUNT // PER_THREAD > 8 else COUNT // PER_THREAD
    layout: gl.constexpr = gl.BlockedLayout([PER_THREAD, 1], [ACROSS, 32 // ACROSS], [1, 4], [0, 1])
    place = gl.arange(0, destination.shape[0], gl.SliceLayout(1, layout))[:, None]
    inside = gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :]
    group = place % COUNT
    row, is_own = _row_of(inside, place // COUNT, each, HALF)
    mask = is_own & (row < n) & (group < GROUPS_PER_PROGRAM)
    destination.store(gl.load(scales + row * groups + gl.program_id(1) * GROUPS_PER_PROGRAM + group, mask=mask, other=0.0))


@gluon.jit
def _read_grains(grains, destination, m, stride, GROUPS_PER_PROGRAM: gl.constexpr):
    """Load the tokens' grains of the program's column groups into ``destination`` [groups, tokens], after the wait."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    group = gl.arange(0, destination.shape[0], gl.SliceLayout(1, layout))[:, None]
    token = gl.arange(0, destination.shape[1], gl.SliceLayout(0, layout))[None, :]
    place = grains + token * stride + gl.program_id(1) * GROUPS_PER_PROGRAM + group
    destination.store(gl.load(place, mask=(token < m) & (group < GROUPS_PER_PROGRAM), other=0.0))


@gluon.jit
def _halves(total):
    """Return the low and the high rows of a tile of row pairs, [32, tokens] each."""
    TOKENS: gl.constexpr = total.shape[1]
    low, high = gl.split(total.reshape((ROWS // (2 * PAIRED), 2, PAIRED, TOKENS)).permute((0, 2, 3, 1)))
    return low.reshape((ROWS // 2, TOKENS)), high.reshape((ROWS // 2, TOKENS))


@gluon.jit
def _store(
    operands,
    rotary,
    shared,
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
    HALF: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute the program's tiles: add the second warpgroup's sums to this one's, rotate them if required, and store them.
    Runs in the first warpgroup.

    It begins late (:func:`outrider_triton.jit.dependent.begin_late`).
    """
    x, grains, scales, bias, out, m, n, groups, stride, rows_per_program = operands
    pipeline, factors, held_grains, grains_ready, second_group = shared
    GROUPS_PER_PROGRAM: gl.constexpr = STEPS * pipeline[1].shape[2] // _GROUP
    _read_scales(scales, factors, n, groups, rows_per_program, GROUPS_PER_PROGRAM, TILES, HALF)
    if GROUPS > 1:
        second_sums, sums_ready, sums_taken = second_group
    wait_for_previous_kernel(PDL)
    allow_next_kernel(PDL)
    if GATED:
        lay_gated(x, pipeline[1], held_grains, pipeline[4], 0, GROUPS, STEPS)
    else:
        _load_tokens(x, pipeline, STEPS)
        _read_grains(grains, held_grains, m, stride, GROUPS_PER_PROGRAM)
        if GROUPS > 1:
            mbarrier.arrive(grains_ready, count=1)
    # The matrix unit's output layout of rows, tokens and pairs.
    COMPONENTS: gl.constexpr = pipeline[1].shape[1]
    TOKENS: gl.constexpr = COMPONENTS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COMPONENTS, 32])
    sample, _ = _split_components(gl.zeros([ROWS, COMPONENTS], gl.float32, layout))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, sample.type.layout))
    place = gl.arange(0, ROWS, gl.SliceLayout(1, sample.type.layout))
    if HALF > 0:
        _, _, _, _, slots, heads, kv_heads, _, _, _ = rotary
        sample_half, _ = _halves(sample)
        pairs: gl.constexpr = sample_half.type.layout
        pair_token = gl.arange(0, TOKENS, gl.SliceLayout(0, pairs))
        slot = gl.load(slots + pair_token, mask=pair_token < m, other=0)
    for tile in range(TILES):
        if HALF > 0:  # loads that the epilogue needs overlap with the product
            inside = tile * (ROWS // 2) + gl.arange(0, ROWS // 2, gl.SliceLayout(1, pairs))
            pair = gl.program_id(0) * rows_per_program + inside
            head = pair // HALF
            lane = pair % HALF
            is_own_pair = (inside < rows_per_program) & (head < heads + 2 * kv_heads)
            pair_mask = (pair_token < m)[None, :] & is_own_pair[:, None]
            rotates = pair_mask & (head < heads + kv_heads)[:, None]
            angles = load_angles(rotary, pair_token, lane, rotates, HALF)
        total = _product(pipeline, factors, held_grains, tile, 0, GROUPS, STEPS, TILES, GATED)
        row, is_own = _row_of(place, tile, rows_per_program, HALF)
        is_own = is_own & (row < n)
        if GROUPS > 1:
            mbarrier.wait(sums_ready, tile & 1)
            total += second_sums.load(total.type.layout)
            mbarrier.arrive(sums_taken, count=1)
        if bias is not None:
            total += gl.load(bias + row, mask=is_own, other=0.0).to(gl.float32)[:, None]
        if HALF > 0:
            # Rounded where the reference rounds: after the product and after the rotation.
            low, high = _halves(total.to(out.dtype.element_ty))
            write_rotated(low, high, angles, out, rotary, slot, pair_token, head, lane, pair_mask, HALF)
        else:
            address = out + gl.program_id(1).to(gl.int64) * m * n + token.to(gl.int64)[None, :] * n + row[:, None]
            gl.store(address, total.to(out.dtype.element_ty), mask=(token < m)[None, :] & is_own[:, None])


@gluon.jit
def _run_second_group(
    x,
    shared,
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute the second warpgroup's part of the program's tiles, and pass the sums to the first warpgroup through shared
    memory.
    """
    pipeline, factors, held_grains, grains_ready, second_group = shared
    second_sums, sums_ready, sums_taken = second_group
    if GATED:
        wait_for_previous_kernel(PDL)
        lay_gated(x, pipeline[1], held_grains, pipeline[4], 1, GROUPS, STEPS)
    else:
        mbarrier.wait(grains_ready, 0)
    for tile in range(TILES):
        total = _product(pipeline, factors, held_grains, tile, 1, GROUPS, STEPS, TILES, GATED)
        mbarrier.wait(sums_taken, (tile - 1) & 1, pred=tile > 0)
        second_sums.store(total)
        mbarrier.arrive(sums_ready, count=1)


@gluon.jit(do_not_specialize=["m", "stride", "rows_per_program", "steps"])
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
    rows_per_program,
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
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
    HALF: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    MAX_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute :func:`~outrider_triton.quantized.jit.nibble_planes.linear_planes` with a TMA pipeline, for scales of 128
    columns without zero points and up to BLOCK_M tokens.

    One program per (share of rows, part of the columns). A program has ``rows_per_program`` rows in TILES tiles, and STEPS
    units of columns. ``w``: int8 [n, k / 2], in boxes of rows. ``x``: int8 [2 m, k], tokens in two components. ``grains``:
    the tokens' grains, one row of ``stride`` elements per token. GROUPS: multiplying warpgroups, the second with
    MAX_REGISTERS per thread.

    HALF: half a head's size, or 0 to store rows without rotation. With HALF, ``rows_per_program`` counts pairs of rows HALF
    apart, in boxes of PAIRED, and the product isn't split. Queries go to ``out``, keys and values to the slots, as in
    :func:`outrider_triton.products.jit.fused.linear_rope_write_cache`.

    GATED: ``x`` is one token's gate and up, [2 k] in 16 bits, and each program computes SwiGLU of its columns
    (:mod:`outrider_triton.quantized.jit.nibble_planes_gated`); ``grains`` is None.
    """
    COLUMNS: gl.constexpr = 2 * w.block_type.shape[1]
    component_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * BLOCK_M, COLUMNS], gl.int8)
    weights = gl.allocate_shared_memory(w.dtype, [STAGES, ROWS, w.block_type.shape[1]], w.layout)
    tokens = gl.allocate_shared_memory(gl.int8, [STEPS, 2 * BLOCK_M, COLUMNS], component_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ARRIVALS: gl.constexpr = GROUPS if GATED else STEPS
    arrived = gl.allocate_shared_memory(gl.int64, [ARRIVALS, 1], mbarrier.MBarrierLayout())
    # Alternate both arrays: between two inits of one array the compiler synchronises all warps.
    for place in gl.static_range(max(STAGES, ARRIVALS)):
        if place < STAGES:
            mbarrier.init(full.index(place), count=1)
            mbarrier.init(empty.index(place), count=1)
        if place < ARRIVALS:
            mbarrier.init(arrived.index(place), count=1)
    pipeline = weights, tokens, full, empty, arrived
    COUNT: gl.constexpr = next_power_of_2(STEPS * COLUMNS // _GROUP)
    PADDED_TILES: gl.constexpr = next_power_of_2(TILES)
    factors = gl.allocate_shared_memory(
        scales.dtype.element_ty, [PADDED_TILES * COUNT, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    held_grains = gl.allocate_shared_memory(gl.float32, [COUNT, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    grains_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(grains_ready, count=1)
    if GROUPS > 1:
        second_sums = gl.allocate_shared_memory(gl.float32, [ROWS, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
        sums_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        sums_taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(sums_ready, count=1)
        mbarrier.init(sums_taken, count=1)
        second_group = second_sums, sums_ready, sums_taken
    else:
        second_group = grains_ready  # unused
    operands = x, grains, scales, bias, out, m, n, groups, stride, rows_per_program
    shared = pipeline, factors, held_grains, grains_ready, second_group
    rotary = cos, sin, k_cache, v_cache, slots, heads, kv_heads, angles_token, cache_slot, cache_head
    if GROUPS > 1:
        gl.warp_specialize(
            [
                (_store, (operands, rotary, shared, GROUPS, STEPS, TILES, HALF, GATED, PDL)),
                (_run_second_group, (x, shared, GROUPS, STEPS, TILES, GATED, PDL)),
                (_load_weights, (w, pipeline, rows_per_program, steps, TILES, HALF)),
            ],
            [4, 1],
            [MAX_REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_store, (operands, rotary, shared, GROUPS, STEPS, TILES, HALF, GATED, PDL)),
                (_load_weights, (w, pipeline, rows_per_program, steps, TILES, HALF)),
            ],
            [1],
            [24],
        )
