"""A multi-stage TMA pipeline of tiles for skinny matrix products: the copy engine fills shared memory, and the matrix unit
reads it (Hopper).

One warp only requests tiles of the weight from the copy engine, also before the wait for the preceding kernel. Another warp
requests tokens, after the wait. Four warps multiply arrived tiles. So a program that waits has a full pipeline when it may
begin, and no thread that multiplies spends time on loads. Before the wait, the first warp limits the tiles in flight, since
reads of the preceding kernels would queue after them.

A program has ``pairs_per_program`` *pairs* of weight rows. The two rows of a pair are ``half`` rows apart. A tile is 32
pairs, all low rows and then all high ones, which is the matrix unit's height. A pair is a gate row and an up row, or two rows
that rotate together, or a row in each half of 64 rows. FOLD: a pair is the first and the second half of the columns of one
row, and both halves of the tokens' columns are next to each other as well. Low rows of the result count with the first half
of the tokens, high rows with the second, so 32 weight rows fill a tile. Rows are loaded in boxes, the block of the weight's
descriptor, so that a program's share needn't be whole tiles. Rows that aren't loaded are multiplied uninitialised, and not
stored.

The code is Gluon, Triton's language for explicit layouts, copies and synchronisation.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from outrider_triton.jit.dependent import allow_next_kernel, wait_for_previous_kernel

PAIRS = gl.constexpr(32)
"""Pairs of weight rows per tile."""
PIECE_COLUMNS = gl.constexpr(128)
"""Columns of 8-bit elements that the matrix unit accumulates at a time: its sums have few bits."""
UNITS_AT_ONCE = gl.constexpr(2)
"""Units of 8-bit elements whose products and sums overlap: three need more registers than a thread has, and gain nothing."""
MAX_BYTES_IN_FLIGHT = gl.constexpr(48 << 10)
"""Maximum bytes in flight per program while its pipeline fills, or two units: enough to load at memory's full rate."""


# -- any pipeline ----------------------------------------------------------------------------------------------


@gluon.jit
def expect_boxes(barrier, remaining, BOX: gl.constexpr, BOXES: gl.constexpr, BYTES: gl.constexpr):
    """Tell ``barrier`` the number of bytes that will arrive: BYTES for each box of BOX rows that the ``remaining`` rows (1 or
    more) fill at least in part, for at most BOXES boxes.
    """
    for boxes in gl.static_range(1, BOXES):
        mbarrier.expect(barrier, boxes * BYTES, pred=(remaining > (boxes - 1) * BOX) & (remaining <= boxes * BOX))
    mbarrier.expect(barrier, BOXES * BYTES, pred=remaining > (BOXES - 1) * BOX)


@gluon.jit
def limit_in_flight(full, unit, BYTES: gl.constexpr):
    """Wait until the copy engine may load ``unit``, of BYTES bytes. During the first filling of the pipeline at most
    MAX_BYTES_IN_FLIGHT bytes, or two units, are in flight.
    """
    UNITS: gl.constexpr = MAX_BYTES_IN_FLIGHT // BYTES if MAX_BYTES_IN_FLIGHT // BYTES > 2 else 2
    mbarrier.wait(full.index(gl.maximum(unit - UNITS, 0)), 0, pred=unit >= UNITS)


# -- the product pipeline --------------------------------------------------------------------------------------


@gluon.jit
def make_pipeline(x, w, FOLD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Allocate stages of weight and token tiles, and three barriers per stage: weights arrived, stage free, tokens arrived.

    A stage has BLOCK_K columns, in the one or two pieces that descriptors load.
    """
    WIDTH: gl.constexpr = 2 * BLOCK_M if FOLD else BLOCK_M
    COLUMNS: gl.constexpr = w.block_type.shape[1]
    PIECES: gl.constexpr = BLOCK_K // COLUMNS
    weights = gl.allocate_shared_memory(w.dtype, [STAGES * PIECES, 2 * PAIRS, COLUMNS], w.layout)
    tokens = gl.allocate_shared_memory(x.dtype, [STAGES * PIECES, WIDTH, COLUMNS], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tokens_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=1)
        mbarrier.init(tokens_arrived.index(place), count=1)
    return weights, tokens, full, empty, tokens_arrived


@gluon.jit
def _load_weight_unit(w, weights, full, unit, pairs_per_program, half, FOLD: gl.constexpr, STEPS: gl.constexpr):
    """Have the copy engine load unit ``unit`` of the weight: columns unit % STEPS of tile unit // STEPS."""
    STAGES: gl.constexpr = full.shape[0]
    COLUMNS: gl.constexpr = weights.shape[2]
    PIECES: gl.constexpr = weights.shape[0] // STAGES
    BOX: gl.constexpr = w.block_type.shape[0]
    BOXES: gl.constexpr = PAIRS // BOX
    BYTES: gl.constexpr = PIECES * COLUMNS * w.dtype.primitive_bitwidth // 8  # of a row
    barrier = full.index(unit % STAGES)
    first_pair = unit // STEPS * PAIRS
    column = (gl.program_id(1) * STEPS + unit % STEPS) * (PIECES * COLUMNS)
    remaining = pairs_per_program - first_pair
    expect_boxes(barrier, remaining, BOX, BOXES, 2 * BOX * BYTES)
    for box in gl.static_range(BOXES):
        pair = gl.program_id(0) * pairs_per_program + first_pair + box * BOX
        if FOLD:
            low = pair
            high = pair
            high_column = column + STEPS * (PIECES * COLUMNS)
        else:
            low = pair // half * (2 * half) + pair % half
            high = low + half
            high_column = column
        is_needed = remaining > box * BOX
        for piece in gl.static_range(PIECES):
            tile = weights.index(unit % STAGES * PIECES + piece)
            offset = piece * COLUMNS
            tma.async_copy_global_to_shared(w, [low, column + offset], barrier, tile.slice(box * BOX, BOX, 0), pred=is_needed)
            high_rows = tile.slice(PAIRS + box * BOX, BOX, 0)
            tma.async_copy_global_to_shared(w, [high, high_column + offset], barrier, high_rows, pred=is_needed)


@gluon.jit
def _load_token_unit(x, tokens, tokens_arrived, unit, FOLD: gl.constexpr, STEPS: gl.constexpr):
    STAGES: gl.constexpr = tokens_arrived.shape[0]
    WIDTH: gl.constexpr = tokens.shape[1]
    COLUMNS: gl.constexpr = tokens.shape[2]
    PIECES: gl.constexpr = tokens.shape[0] // STAGES
    BLOCK_K: gl.constexpr = PIECES * COLUMNS
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    barrier = tokens_arrived.index(unit % STAGES)
    mbarrier.expect(barrier, WIDTH * BLOCK_K * x.dtype.primitive_bitwidth // 8)
    token = gl.program_id(2) * BLOCK_M
    first = (gl.program_id(1) * STEPS + unit % STEPS) * BLOCK_K
    for piece in gl.static_range(PIECES):
        tile = tokens.index(unit % STAGES * PIECES + piece)
        column = first + piece * COLUMNS
        if FOLD:
            tma.async_copy_global_to_shared(x, [token, column], barrier, tile.slice(0, BLOCK_M, 0))
            tma.async_copy_global_to_shared(x, [token, column + STEPS * BLOCK_K], barrier, tile.slice(BLOCK_M, BLOCK_M, 0))
        else:
            tma.async_copy_global_to_shared(x, [token, column], barrier, tile)


@gluon.jit
def load_weights(w, pipeline, pairs_per_program, half, FOLD: gl.constexpr, STEPS: gl.constexpr):
    """Load all units of the program's weight rows into the pipeline. Runs in a warp of its own, also before the wait, since
    no kernel writes the weight.
    """
    weights, _, full, empty, _ = pipeline
    STAGES: gl.constexpr = full.shape[0]
    BYTES: gl.constexpr = 2 * PAIRS * (weights.shape[0] // STAGES * weights.shape[2]) * w.dtype.primitive_bitwidth // 8
    units = gl.cdiv(pairs_per_program, PAIRS) * STEPS
    for unit in range(gl.minimum(units, STAGES)):
        limit_in_flight(full, unit, BYTES)
        _load_weight_unit(w, weights, full, unit, pairs_per_program, half, FOLD, STEPS)
    for unit in range(STAGES, units):
        mbarrier.wait(empty.index(unit % STAGES), (unit // STAGES - 1) & 1)
        _load_weight_unit(w, weights, full, unit, pairs_per_program, half, FOLD, STEPS)


@gluon.jit
def load_tokens(
    x, pipeline, pairs_per_program, FOLD: gl.constexpr, STEPS: gl.constexpr, LATE: gl.constexpr, PDL: gl.constexpr
):
    """Load the tokens of all units into the pipeline, after the wait. Runs in a warp of its own. LATE: see
    :func:`outrider_triton.jit.dependent.begin_late`.
    """
    _, tokens, _, empty, tokens_arrived = pipeline
    STAGES: gl.constexpr = tokens_arrived.shape[0]
    units = gl.cdiv(pairs_per_program, PAIRS) * STEPS
    if not LATE:
        allow_next_kernel(PDL)
    wait_for_previous_kernel(PDL)
    if LATE:
        allow_next_kernel(PDL)
    for unit in range(units):
        mbarrier.wait(empty.index(unit % STAGES), (unit // STAGES + 1) & 1, pred=unit >= STAGES)
        _load_token_unit(x, tokens, tokens_arrived, unit, FOLD, STEPS)


@gluon.jit
def _begin_unit(pipeline, unit, zeros):
    """Wait for unit ``unit`` and start the products of its one or two pieces of columns; return a sum for each piece."""
    weights, tokens, full, _, tokens_arrived = pipeline
    STAGES: gl.constexpr = full.shape[0]
    PIECES: gl.constexpr = weights.shape[0] // STAGES
    stage = unit % STAGES
    mbarrier.wait(tokens_arrived.index(stage), unit // STAGES & 1)
    mbarrier.wait(full.index(stage), unit // STAGES & 1)
    piece = stage * PIECES
    first = warpgroup_mma(weights.index(piece), tokens.index(piece).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if PIECES == 1:
        return (first,)
    else:
        piece += 1
        second = warpgroup_mma(weights.index(piece), tokens.index(piece).permute((1, 0)), zeros, use_acc=False, is_async=True)
        return first, second


@gluon.jit
def _load_scales(pointers, step, PIECES: gl.constexpr):
    """Load the scales of a step's one or two pieces: for each piece those of the rows and those of the tokens."""
    rows, tokens = pointers
    place = step * PIECES
    first = gl.load(rows + place).to(gl.float32), gl.load(tokens + place)
    if PIECES == 1:
        return (first,)
    else:
        return first, (gl.load(rows + place + 1).to(gl.float32), gl.load(tokens + place + 1))


@gluon.jit
def _scaled(sums, scales, SCALES: gl.constexpr):
    """Return the sums of a piece, times its scales if it has SCALES."""
    if SCALES:
        rows, tokens = scales
        return sums * rows[:, None] * tokens[None, :]
    else:
        return sums


@gluon.jit
def _end_unit(pipeline, unit, begun, LATER: gl.constexpr, SCALES: gl.constexpr):
    """Wait for a unit that has ``begun``, release its stage and return the scaled sum of its pieces; LATER products of the
    next unit may still run.
    """
    STAGES: gl.constexpr = pipeline[2].shape[0]
    sums, scales = begun
    sums = warpgroup_mma_wait(LATER, deps=sums)
    mbarrier.arrive(pipeline[3].index(unit % STAGES), count=1)
    if pipeline[0].shape[0] == STAGES:
        return _scaled(sums, scales[0], SCALES)
    else:
        return _scaled(sums[0], scales[0], SCALES) + _scaled(sums[1], scales[1], SCALES)


@gluon.jit
def _begin_scaled_unit(pipeline, unit, step, zeros, pointers, PIECES: gl.constexpr):
    """Begin a unit and load its scales, if it has some; the loads overlap with the copies that are awaited."""
    if pointers is None:
        return _begin_unit(pipeline, unit, zeros), (0, 0)
    else:
        scales = _load_scales(pointers, step, PIECES)
        return _begin_unit(pipeline, unit, zeros), scales


@gluon.jit
def _add_units(pipeline, tile, step, total, pointers, COUNT: gl.constexpr, STEPS: gl.constexpr):
    """Add the products of COUNT steps of a tile, from ``step`` on, to ``total``. One unit is added while the next runs."""
    PIECES: gl.constexpr = pipeline[0].shape[0] // pipeline[2].shape[0]
    unit = tile * STEPS + step
    begun = _begin_scaled_unit(pipeline, unit, step, total, pointers, PIECES)
    for later in gl.static_range(1, COUNT):
        following = _begin_scaled_unit(pipeline, unit + later, step + later, total, pointers, PIECES)
        total += _end_unit(pipeline, unit + later - 1, begun, PIECES, pointers is not None)
        begun = following
    return total + _end_unit(pipeline, unit + COUNT - 1, begun, 0, pointers is not None)


@gluon.jit
def _sum_of_parts(pipeline, tile, total, pointers, STEPS: gl.constexpr):
    """Compute :func:`_product` for operands that the matrix unit accumulates in few bits: the columns of each piece
    separately. ``pointers``: to the scales of the tile's rows and tokens, one for each piece; None: pieces aren't scaled.

    No product crosses iterations of the loop: the compiler would serialise the products.
    """
    for group in range(STEPS // UNITS_AT_ONCE):
        total = _add_units(pipeline, tile, group * UNITS_AT_ONCE, total, pointers, UNITS_AT_ONCE, STEPS)
    if STEPS % UNITS_AT_ONCE:
        rest: gl.constexpr = STEPS % UNITS_AT_ONCE
        total = _add_units(pipeline, tile, STEPS - rest, total, pointers, rest, STEPS)
    return total


@gluon.jit
def _scale_pointers(
    tile, blocks, layout: gl.constexpr, WIDTH: gl.constexpr, FOLD: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr
):
    """Return the addresses of the first scales of the rows and of the tokens of a tile. ``blocks``, ROWS: see
    :func:`multiply_halves`. COLUMNS: scales of a row in the program's part of the columns, or in half of a folded row.
    """
    x_scales, x_groups, scales, scale_columns, m, n, pairs_per_program = blocks
    BLOCK_M: gl.constexpr = WIDTH // 2 if FOLD else WIDTH
    index = gl.arange(0, 2 * PAIRS, gl.SliceLayout(1, layout))
    row = gl.program_id(0) * pairs_per_program + tile * PAIRS + index % PAIRS
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    token_scales = x_scales + gl.minimum(gl.program_id(2) * BLOCK_M + column % BLOCK_M, m - 1) * x_groups
    if FOLD:
        row_scales = scales + gl.minimum(row, n - 1) // ROWS * scale_columns + index // PAIRS * COLUMNS
        return row_scales, token_scales + column // BLOCK_M * COLUMNS
    else:
        row += (row // PAIRS + index // PAIRS) * PAIRS
        first = gl.program_id(1) * COLUMNS
        return scales + gl.minimum(row, n - 1) // ROWS * scale_columns + first, token_scales + first


@gluon.jit
def _product(pipeline, tile, blocks, FOLD: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr):
    """Multiply the program's ``tile`` by the tokens; return [2 PAIRS, tokens] in float32, low rows first.

    One product runs while the next begins, so the pipeline needs two stages or more. ``blocks``, ROWS: see
    :func:`multiply_halves`.
    """
    weights, tokens, full, empty, tokens_arrived = pipeline
    STAGES: gl.constexpr = full.shape[0]
    WIDTH: gl.constexpr = tokens.shape[1]
    BITS: gl.constexpr = weights.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 256 // BITS])
    total = gl.zeros([2 * PAIRS, WIDTH], gl.float32, layout)
    if blocks is not None:
        pointers = _scale_pointers(tile, blocks, layout, WIDTH, FOLD, ROWS, STEPS * (weights.shape[0] // STAGES))
        total = _sum_of_parts(pipeline, tile, total, pointers, STEPS)
    elif BITS == 8:
        total = _sum_of_parts(pipeline, tile, total, None, STEPS)
    else:
        for unit in range(tile * STEPS, (tile + 1) * STEPS):
            stage = unit % STAGES
            mbarrier.wait(tokens_arrived.index(stage), unit // STAGES & 1)
            mbarrier.wait(full.index(stage), unit // STAGES & 1)
            total = warpgroup_mma(weights.index(stage), tokens.index(stage).permute((1, 0)), total, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(empty.index((unit + STAGES - 1) % STAGES), count=1, pred=unit > tile * STEPS)
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index(((tile + 1) * STEPS - 1) % STAGES), count=1)
    return total


# -- rows of every product ------------------------------------------------------------------------------------


@gluon.jit
def multiply_halves(
    pipeline,
    tile,
    buffer,
    FOLD: gl.constexpr,
    STEPS: gl.constexpr,
    layout: gl.constexpr,
    blocks=None,
    ROWS: gl.constexpr = 0,
):
    """Multiply the program's ``tile`` by the tokens; return its low and its high rows, [PAIRS, BLOCK_M] each in ``layout``.
    FOLD: only the valid half of each.

    ``blocks``: the scales of a product whose operands have one for each piece of columns, and the weight for each ROWS
    rows of it: (x_scales [m, x_groups], x_groups, scales [.., scale_columns], scale_columns, m, n, pairs_per_program). The
    result is scaled. None: the sums are returned unscaled.
    """
    buffer.store(_product(pipeline, tile, blocks, FOLD, ROWS, STEPS))
    low = buffer.slice(0, PAIRS, 0)
    high = buffer.slice(PAIRS, PAIRS, 0)
    if FOLD:
        BLOCK_M: gl.constexpr = buffer.shape[1] // 2
        return low.slice(0, BLOCK_M, 1).load(layout), high.slice(BLOCK_M, BLOCK_M, 1).load(layout)
    else:
        return low.load(layout), high.load(layout)


@gluon.jit
def make_buffer(pipeline):
    """Allocate shared memory to convert a tile from the matrix unit's layout to the layout of global memory."""
    return gl.allocate_shared_memory(gl.float32, [2 * PAIRS, pipeline[1].shape[1]], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))


@gluon.jit
def squares_of(squares, shares, m, SHARES: gl.constexpr, BLOCK_M: gl.constexpr):
    """Load the partial sums of squares of the program's tokens, [SHARES, BLOCK_M]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1])
    share = gl.arange(0, SHARES, gl.SliceLayout(1, layout))
    token = gl.program_id(2) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    mask = (share < shares)[:, None] & (token < m)[None, :]
    return gl.load(squares + share[:, None] * m + token[None, :], mask=mask, other=0.0)


@gluon.jit
def inverse_rms(parts, width, eps, layout: gl.constexpr):
    """Return one over the root mean square of each token's row of ``width`` elements, as a row of a tile with ``layout``."""
    scale = gl.rsqrt(gl.sum(parts, axis=0) / width + eps)
    return gl.convert_layout(scale, gl.SliceLayout(0, layout))[None, :]
