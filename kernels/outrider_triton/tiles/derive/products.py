"""Tile configurations of matrix products on an unmeasured device: candidates that fit, ranked by estimated time.

With few tokens the weight is read once, so memory bandwidth decides. A good tile configuration gives every multiprocessor
the same share of the weight and keeps enough loads in flight. With more tokens the matrix unit decides, and above
:data:`MAX_TOKENS_TUNED` tokens the library's product is used. All estimates are computed from
:class:`~outrider_triton.tiles.facts.DeviceFacts`; ``tests/kernels/test_derive.py`` compares them with measurements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from outrider_triton.launch import power_of_two
from outrider_triton.tiles.configs import LARGE_M, SCALED_BLOCKS, STREAMED, MatmulConfig, bucket
from outrider_triton.tiles.derive.quantized import (
    ACHIEVED_FLOPS_FRACTION,
    BLOCK_ROWS,
    CACHE_SPEEDUP,
    LAUNCH_OVERHEAD_S,
    LONE_PROCESSOR_SPEEDUP,
    MAX_TOKENS_TRITON_GEMM,
    MEMORY_LATENCY_S,
    NIBBLE_TILE_ROWS,
    PRODUCT_GAP_S,
    UNQUANTIZED,
    OperandStorage,
    estimate_library,
    estimate_shares,
    estimate_streamed_nibbles,
    estimate_unstreamed,
)
from outrider_triton.tiles.facts import DeviceFacts

MAX_TOKENS_TUNED = 128
"""Maximum number of tokens with Triton products; the library multiplies larger batches.

Above 64 tokens only gates and quantised weights use Triton, unless a measurement says otherwise.
"""
OPERATORS = ("linear", "linear_parts", "linear_silu_mul", "linear_add", "linear_add_scaled", "scaled_silu_mul", "linear_rope")

_GATED = ("linear_silu_mul", "scaled_silu_mul")
_ADDED = ("linear_add", "linear_add_scaled")
_PAIRS = 32  # pairs of rows per streamed tile; equals outrider_triton.jit.tma_pipeline.PAIRS
MIN_STREAMED_TOKENS = 4  # tokens that fill the matrix unit's minimum width, at two int8 components per token
# Low or high rows next to each other in a tile of pairs; equals PAIRED in
# outrider_triton.quantized.jit.nibble_planes_streamed.
_PAIRED = 8
_MAX_STREAMED_NIBBLE_TOKENS = 16
"""Maximum number of tokens for which four-bit weights are streamed."""
_LARGE_M_PAIRS = (
    64  # pairs of rows per warpgroup in a tile for large M; equals outrider_triton.products.jit.large_m_gates.GROUP
)
_MIN_STREAMED_COLUMNS = 64  # minimum columns of a streamed tile: 128 bytes, one row of swizzled shared memory
_LARGE_M_TOKEN_BYTES = 80 << 10  # bytes of tokens in flight; of 128 tokens, 48 KB is 9 % slower and 32 KB 37 % slower
_LARGE_M_SCRATCH_BYTES = 4608  # shared memory of layout conversions and barriers
_REREAD_S_PER_TOKEN = 1.2e-7  # seconds per token above 32: streamed gates read the tokens again for each tile
_LARGE_M_FACTOR = 1.05  # measured factor on a tile's bytes or products
_LARGE_M_EPILOGUE_S = 3e-6  # seconds after the last bytes arrive: last products, activation, stores
_LARGE_M_FLOPS_FRACTION = 0.9  # achieved fraction of the matrix units' rate with tiles for large M
_LIBRARY_BYTES_FACTOR = 1.12  # measured factor on the weight's bytes when the library multiplies gates of 65 to 128 tokens
_LIBRARY_EXTRA_S = 8e-6
# Tokens up to which 8-bit units have 256 columns: above, the time between two units exceeds their products.
_MAX_WIDE_TOKENS = 32
MAX_FOLDED_TOKENS = 16
"""Maximum number of tokens for which streamed rows of 8 bits are folded: above, the tokens' bytes would take as long as the
weight's.
"""
_MAX_THREADS_PER_PROCESSOR = 1536
_PIPELINE_BYTES = ((184 << 10, 208 << 10, 128 << 10), (208 << 10, 160 << 10, 112 << 10))
"""Shared memory of a multi-stage pipeline in bytes, the likeliest first.

The second row is for products that add to the residual, whose pipeline can fill during attention.
"""
_SHARED_BYTES_PER_S = 225e9  # of one multiprocessor's shared memory
# Seconds of a unit of 8-bit elements on an H200: per column while no other program runs on the multiprocessor, and per column
# and token of the tile if pieces of columns have scales of their own.
_LONE_UNIT_S_PER_COLUMN = 0.3e-9
_SCALE_S_PER_SUM = 1e-11
_LATER_WAVE_S = 6e-6  # until 8-bit programs that didn't fit at first have filled their pipelines
_TILE_FACTORS = {16: 1.03, 32: 1.015, 64: 1.0, 128: 1.01}
_LONE_TILE_FACTORS = {64: 1.25, 128: 1.25, 256: 1.1}
"""Measured factors on unstreamed tiles of up to 16 tokens, by columns, if each multiprocessor has one program: the next tile
is requested late.
"""
_BOX_FACTORS = {8: 1.015, 16: 1.005, 32: 1.0}  # smaller boxes are more copy-engine requests
_BOX_FACTORS_8_BIT = {8: 1.06, 16: 1.01, 32: 1.0}


def choose_config(
    facts: DeviceFacts, operator: str, *, m: int, n: int, k: int, half: int = 0, stored: OperandStorage = UNQUANTIZED
) -> MatmulConfig | None:
    """Return the configuration for ``m`` tokens and a weight [n, k]; None if the library is expected to be faster.

    ``operator`` is one of :data:`OPERATORS`. ``half`` is half a head's size, for ``linear_rope`` only. Quantised operands
    (``stored``) support ``linear`` and ``linear_parts``, and streamed ``linear_rope`` and ``linear_silu_mul``.
    """
    ranked = rank_configs(facts, operator, m=m, n=n, k=k, half=half, stored=stored)
    if m > MAX_TOKENS_TRITON_GEMM and (stored == UNQUANTIZED or stored.library):
        kinds = (STREAMED, SCALED_BLOCKS) if stored.library else (LARGE_M,)
        ranked = [config for config in ranked if config.descriptor in kinds]
    return ranked[0] if ranked and _beats_library(facts, operator, ranked[0], m=m, n=n, k=k, stored=stored) else None


def rank_configs(
    facts: DeviceFacts, operator: str, *, m: int, n: int, k: int, half: int = 0, stored: OperandStorage = UNQUANTIZED
) -> list[MatmulConfig]:
    """Return every candidate that fits, sorted by estimated time."""
    if not 0 < m <= MAX_TOKENS_TUNED:
        return []
    size = config_tokens(m, stored)
    found = candidate_configs(facts, operator, m=size, n=n, k=k, half=half, stored=stored)
    return sorted(found, key=lambda config: estimate_seconds(facts, operator, config, m=size, n=n, k=k, stored=stored))


def config_tokens(m: int, stored: OperandStorage = UNQUANTIZED) -> int:
    """Return the number of tokens that a configuration for ``m`` is built for: 4 with streamed nibbles and ``m`` up to 4,
    else its :func:`bucket`.
    """
    return (
        MIN_STREAMED_TOKENS if stored.can_stream and stored.convert_instructions and m <= MIN_STREAMED_TOKENS else bucket(m)
    )


def _beats_library(
    facts: DeviceFacts, operator: str, best: MatmulConfig, *, m: int, n: int, k: int, stored: OperandStorage
) -> bool:
    """Return True if Triton's kernel in configuration ``best`` is expected to be faster than the library's product plus the
    kernels around it.
    """
    if operator == "linear_add_scaled" and (k > 2 * n or m > 32):
        return False  # long rows, and many of them, are faster in parts that the norm adds up
    if stored.library and m > MAX_TOKENS_TRITON_GEMM:
        return estimate_seconds(facts, operator, best, m=m, n=n, k=k, stored=stored) < estimate_library(facts, n=n, k=k)
    if m <= MAX_TOKENS_TRITON_GEMM or stored != UNQUANTIZED:
        return True
    library = _LIBRARY_BYTES_FACTOR * 2 * n * k / facts.bytes_per_second + _LIBRARY_EXTRA_S
    return _estimate_large_m(facts, best, n=n, k=k) < library


# -- candidates ----------------------------------------------------------------------------------------------------


def candidate_configs(
    facts: DeviceFacts, operator: str, *, m: int, n: int, k: int, half: int = 0, stored: OperandStorage = UNQUANTIZED
) -> list[MatmulConfig]:
    """Return configurations worth trying that fit into shared memory; ``m`` is a value of :func:`config_tokens`."""
    if m >= MAX_TOKENS_TRITON_GEMM and stored.shares_units and operator in ("linear", "linear_parts"):
        shares = list(_shares(facts, m, n, k))
        if shares:  # faster than other kernels wherever it was measured, or 8 % slower
            return shares
    found = [] if stored != UNQUANTIZED and operator in _GATED else list(_unstreamed(facts, operator, m, n, stored))
    is_few = m <= MAX_TOKENS_TRITON_GEMM
    streams_8_bit = stored.can_stream and not stored.convert_instructions
    streams_8_bit = streams_8_bit and (is_few or operator in ("linear", "linear_parts"))
    if facts.streams_products and (streams_8_bit or (is_few and stored == UNQUANTIZED)):
        found += _streamed(facts, operator, m, n, k, half, stored)
    elif facts.streams_products and m <= _MAX_STREAMED_NIBBLE_TOKENS and stored.can_stream:
        found += _streamed_nibbles(facts, operator, m, n, k, half, stored)
    if facts.streams_products and m >= MAX_TOKENS_TRITON_GEMM and stored == UNQUANTIZED and operator == "linear_silu_mul":
        found += _streamed_large_m(facts, m, n, k)
    return [config for config in dict.fromkeys(found) if shared_bytes(facts, operator, config, stored) <= facts.shared_bytes]


def _unstreamed(facts: DeviceFacts, operator: str, m: int, n: int, stored: OperandStorage) -> Iterator[MatmulConfig]:
    """Yield unstreamed configurations, for the kernels of :mod:`outrider_triton.products.jit.matmul`,
    :mod:`outrider_triton.products.jit.fused` and :mod:`outrider_triton.quantized.jit.products`.
    """
    # NVIDIA's matrix unit takes 8 tokens from compute capability 8.0 on
    block_m = max(stored.min_tokens if facts.capability >= 80 else 16, m)
    if block_m > MAX_TOKENS_TRITON_GEMM and stored != UNQUANTIZED:
        yield from _large_m_quantized(facts, operator, block_m, n, stored)
        return
    is_few = block_m <= 32
    tiles = [(16, 256), (32, 128), (32, 256), (64, 64), (64, 128), (64, 256), (128, 64)]
    if not is_few:
        tiles = [(32, 64), (32, 128), (64, 64), (64, 128), (128, 64)]
    if operator == "linear_rope":
        if stored != UNQUANTIZED:
            return  # only streamed kernels rotate quantised products
        tiles = [tile for tile in tiles if tile[0] in (32, 64, 128)]  # a tile holds both rows of each rotated pair
    elif operator in _ADDED:
        tiles = [tile for tile in tiles if tile[0] >= 32]  # each program writes a partial sum of squares
    if stored.weight_bits < 16:  # keep the number of bytes per row
        tiles = [(rows, columns * factor) for rows, columns in tiles for factor in (16 // stored.weight_bits, 2)]
        tiles += [(128, 256)]
        tiles = [(rows, columns) for rows, columns in tiles if columns >= 256 or not is_few]
        tiles = [(rows, columns) for rows, columns in dict.fromkeys(tiles) if columns % stored.at_once(columns) == 0]
    prefetched = _prefetched_columns(facts, n, stored)
    rows = n // 2 if operator in (*_GATED, "linear_rope") else n
    for (block_n, block_k), split, stages in itertools.product(tiles, _splits(operator, stored), (4, 3, 5, 2)):
        largest = block_n // 2 if operator == "linear_rope" else block_n
        even = {-(-rows * split // (facts.processors * waves)) for waves in (1, 2, 3, 4)}
        shares = {0} | {
            each for each in (-(-each // 8) * 8 for each in even) if largest // 2 - (stored != UNQUANTIZED) < each < largest
        }
        weight_rows = block_n * (2 if operator in _GATED else 1)
        warps = 8 if weight_rows * block_m > 4096 else 4
        if stored != UNQUANTIZED:  # each warp has 16 rows or more, the matrix unit's minimum
            warps = min(warps, block_n // 16)
        for each in sorted(shares):
            yield MatmulConfig(block_m, block_n, block_k, split, warps, stages, prefetched, 0, each)


def _large_m_quantized(facts: DeviceFacts, operator: str, m: int, n: int, stored: OperandStorage) -> Iterator[MatmulConfig]:
    """Yield measured tile configurations for 65 to 128 tokens and a quantised weight.

    Group scales multiply the sums, which needs a second accumulator per result.
    """
    if operator not in ("linear", "linear_parts"):
        return
    tiles = [(64, 128, 4, (5, 4, 3, 2)), (64, 256, 4, (3, 2))]
    if stored.convert_instructions or not stored.columns:
        tiles.insert(0, (128, 128, 8, (4, 3, 2)))
    prefetched, splits, found = _prefetched_columns(facts, n, stored), _splits(operator, stored), []
    for (rows, columns, warps, depths), split in itertools.product(tiles, splits):
        deep = [MatmulConfig(m, rows, columns, split, warps, stages, prefetched, 0, 0) for stages in depths]
        fit = [config for config in deep if shared_bytes(facts, operator, config, stored) <= facts.shared_bytes]
        if columns % stored.at_once(columns) == 0:
            found += fit[:1]
    # A device may have too little shared memory for all of these.
    small = itertools.product((64, 32), splits)
    yield from found or (MatmulConfig(m, rows, 64, split, rows // 16, 2, prefetched, 0, 0) for rows, split in small)


def _prefetched_columns(facts: DeviceFacts, n: int, stored: OperandStorage) -> int:
    """Return the columns of a weight that a kernel prefetches before the preceding kernel has ended."""
    times = 1
    if stored != UNQUANTIZED:  # small kernels run before it, and a pipeline would hold as much
        times = max(1, round(min(PRODUCT_GAP_S * facts.bytes_per_second, facts.l2_bytes / 2) / (512 * n)))
    return 256 * times if facts.pdl else 0


def _splits(operator: str, stored: OperandStorage = UNQUANTIZED) -> tuple[int, ...]:
    most = 8 if stored == UNQUANTIZED else 4  # the weight has fewer bytes, so writing parts costs relatively more
    return tuple(split for split in (1, 2, 4, 8) if split <= most) if operator == "linear_parts" else (1,)


def _streamed(
    facts: DeviceFacts, operator: str, m: int, n: int, k: int, half: int, stored: OperandStorage
) -> Iterator[MatmulConfig]:
    """Yield streamed configurations (:mod:`outrider_triton.products.jit.streamed`): shares of the pairs of rows, in boxes
    that divide them.

    The matrix unit accumulates e4m3 with few bits, so these use 128 columns at a time.
    """
    m = min(m, MAX_TOKENS_TRITON_GEMM)
    if stored.columns and operator not in ("linear", "linear_parts"):
        return  # groups of columns have their own scales, which only this kernel knows
    is_unquantized = stored == UNQUANTIZED
    is_folded = is_unquantized or m <= MAX_FOLDED_TOKENS
    folded = operator == "linear" or operator in _ADDED
    splits = (1,) if is_folded and not is_unquantized else _splits(operator, stored)
    for waves, box, split in itertools.product((1, 2), (32, 16, 8), splits):
        if operator == "linear_parts" and split > 1:
            each, fold_factor = _PAIRS, 1
        else:
            fold_factor = 2 if is_folded and (folded or operator == "linear_parts") else 1
            pairs = n if fold_factor == 2 else -(-n // 2)
            each = -(-pairs // (facts.processors * waves * box)) * box
        inside = {"linear_rope": half, "linear_silu_mul": n // 2, "scaled_silu_mul": n // 2}.get(operator, _PAIRS)
        # The tokens are loaded again for each tile.
        has_tiles = operator == "linear" and m <= 16 and 2 * _PAIRS <= each <= 4 * _PAIRS
        if inside % box or (is_unquantized and fold_factor == 2 and each > _PAIRS and not has_tiles):
            continue
        budgets = (facts.processor_shared // 2 - 1024,) if waves > 1 else _PIPELINE_BYTES[operator == "linear_add_scaled"]
        # Two units of two pieces with scales of their own, and more tokens, need more registers than a thread has.
        most = _MAX_WIDE_TOKENS // fold_factor if stored.columns else _MAX_WIDE_TOKENS
        columns = 256 if m <= most and k % (256 * split * fold_factor) == 0 else 128
        for budget, block_k in itertools.product(budgets, (128, 256) if is_unquantized else (columns,)):
            width = fold_factor * max(8, m)
            barriers = 0 if is_unquantized else 24
            stage = (2 * _PAIRS + width) * block_k * stored.token_bytes + barriers
            stages = (min(budget, facts.shared_bytes) - 8 * _PAIRS * width - 1024) // stage
            if stages > 1 and k % (split * block_k * fold_factor) == 0:
                yield MatmulConfig(max(8, m), box, block_k, split, 4, stages, 0, STREAMED, each)


def _streamed_large_m(facts: DeviceFacts, m: int, n: int, k: int) -> Iterator[MatmulConfig]:
    """Yield configurations of :mod:`outrider_triton.products.jit.large_m_gates`: one program per multiprocessor, with one or
    two warpgroups.
    """
    pairs, row = n // 2, _MIN_STREAMED_COLUMNS * 2
    if k % _MIN_STREAMED_COLUMNS or pairs % 8:
        return
    each = -(-pairs // (facts.processors * 8)) * 8
    box = next(rows for rows in (64, 32, 16, 8) if each % rows == 0 and pairs % rows == 0)
    token_stages = _LARGE_M_TOKEN_BYTES // (m * row)
    for groups in (2, 1):
        stages = (facts.shared_bytes - _LARGE_M_SCRATCH_BYTES - token_stages * m * row) // (2 * groups * _LARGE_M_PAIRS * row)
        if stages > 1:
            yield MatmulConfig(m, box, _MIN_STREAMED_COLUMNS, 1, 4 * groups, stages, token_stages, LARGE_M, each)


def _shares(facts: DeviceFacts, m: int, n: int, k: int) -> Iterator[MatmulConfig]:
    """Yield configurations of :mod:`outrider_triton.quantized.jit.scaled_blocks`: a program for each multiprocessor, or for
    each tile, or as many as share each tile equally.
    """
    tiles, unit = n // BLOCK_ROWS, 2 * BLOCK_ROWS
    if k % unit or n % BLOCK_ROWS:
        return
    equal = tiles * min(max(facts.processors // tiles, 1), k // unit)
    whole = MatmulConfig(m, BLOCK_ROWS, unit, 1, 8, 0, 0, SCALED_BLOCKS, equal)
    room = facts.shared_bytes - shared_bytes(facts, "linear", whole)
    stages = room // (shared_bytes(facts, "linear", replace(whole, stages=1)) - shared_bytes(facts, "linear", whole))
    for programs in (equal, min(facts.processors, tiles * (k // unit))):
        if stages > 1:
            yield replace(whole, stages=stages, rows_per_program=programs)


def large_m_experts_config(facts: DeviceFacts, m: int, *, k: int) -> MatmulConfig | None:
    """Return the configuration of :mod:`outrider_triton.experts.jit.large_m` for blocks of ``m`` token-expert pairs and ``k``
    columns, or None if other kernels are expected to be at least as fast.

    Below :data:`MAX_TOKENS_TUNED` pairs the weight's bytes decide, which other kernels load as fast without sorted rows.
    """
    if not facts.streams_products or m < MAX_TOKENS_TUNED or k % 8:  # rows of 16 bytes
        return None
    groups, row = 2, 2 * _MIN_STREAMED_COLUMNS
    token_stages = _LARGE_M_TOKEN_BYTES // (m * row)
    budget = facts.shared_bytes - _LARGE_M_SCRATCH_BYTES - token_stages * m * row
    stages = budget // (2 * groups * _LARGE_M_PAIRS * row)
    box = groups * _LARGE_M_PAIRS
    return MatmulConfig(m, box, _MIN_STREAMED_COLUMNS, 1, 4 * groups, stages, token_stages, LARGE_M)


def _streamed_nibbles(
    facts: DeviceFacts, operator: str, m: int, n: int, k: int, half: int, stored: OperandStorage
) -> Iterator[MatmulConfig]:
    """Yield configurations of :mod:`outrider_triton.quantized.jit.nibble_planes_streamed`: 1 to 3 programs per
    multiprocessor, 1 or 2 warpgroups each.
    """
    if operator in _GATED or (operator == "linear_rope" and half % _PAIRED):
        return
    row_factor = _rows_per_unit(operator)
    choices = itertools.product(
        (1, 2, 3), _splits(operator, stored), (16, 8) if row_factor == 1 else (_PAIRED,), (4, 8), (512, 256)
    )
    for waves, split, box, warps, tile_columns in choices:
        each = -(-n * split // (facts.processors * waves * box * row_factor)) * box
        steps, remainder = divmod(k, split * tile_columns)
        groups = warps // 4
        if remainder or steps < groups or (steps % groups and row_factor * each > NIBBLE_TILE_ROWS):
            continue
        units = -(-row_factor * each // NIBBLE_TILE_ROWS) * steps
        without_stages = MatmulConfig(
            max(MIN_STREAMED_TOKENS, m), box, steps * tile_columns, split, warps, 0, tile_columns, STREAMED, each
        )
        budget = min(facts.shared_bytes, facts.processor_shared // waves - 1024) - shared_bytes(
            facts, operator, without_stages, stored
        )
        # a pipeline stage belongs to one warpgroup
        stages = min(max(units, 2), budget // (NIBBLE_TILE_ROWS * tile_columns // 2 + 32)) // groups * groups
        if stages >= min(4, units):
            yield replace(without_stages, stages=stages)


def _rows_per_unit(operator: str) -> int:
    """Return the number of weight rows that one unit of ``rows_per_program`` counts: 2 for rotated rows, which
    come in pairs.
    """
    return 2 if operator == "linear_rope" else 1


def _nibble_pipeline_bytes(operator: str, config: MatmulConfig) -> int:
    """Return shared memory of a streamed nibble-plane program in bytes.

    It holds tiles, tokens, float32 scales, sums of token groups, the second warpgroup's sums, and barriers.
    """
    tile_columns, tiles = config.prefetch_columns, -(-_rows_per_unit(operator) * config.rows_per_program // NIBBLE_TILE_ROWS)
    scales = power_of_two(tiles) * power_of_two(config.block_k // 128) * NIBBLE_TILE_ROWS * 4
    sums = NIBBLE_TILE_ROWS * config.block_m * 4 if config.warps > 4 else 0
    offsets = power_of_two(config.block_k // 128) * config.block_m * 4
    return (
        config.stages * (NIBBLE_TILE_ROWS * tile_columns // 2 + 32)
        + config.block_k // tile_columns * (config.block_m * tile_columns * 2 + 16)
        + scales
        + offsets
        + sums
        + 512
    )


def fold_factor(operator: str, config: MatmulConfig, stored: OperandStorage = UNQUANTIZED) -> int:
    """Return 2 if a streamed product multiplies the two halves of a weight row as two rows, else 1."""
    if stored != UNQUANTIZED and config.block_m > MAX_FOLDED_TOKENS:
        return 1
    return 2 if operator in ("linear", *_ADDED) or (operator == "linear_parts" and config.split == 1) else 1


def has_whole_boxes(config: MatmulConfig, *, k: int, folded: int, inside: int) -> bool:
    """Return True if a streamed configuration has two or more stages and its tiles divide the weight's ``k`` columns, and
    its boxes of ``block_n`` rows the rows of a tile and of a program.

    ``folded`` is the result of :func:`fold_factor`. No box may straddle a multiple of ``inside`` rows: half a head, or a
    gate.
    """
    box, tile = config.block_n, _LARGE_M_PAIRS if config.descriptor == LARGE_M else _PAIRS
    rest = k % (config.split * config.block_k * folded), inside % box, tile % box, config.rows_per_program % box
    return rest == (0, 0, 0, 0) and config.stages > 1


def can_stream(operator: str, config: MatmulConfig, *, n: int, k: int) -> bool:
    """Return True if a streamed kernel can load a weight [n, k] for ``operator``, half-head boundaries not considered."""
    inside = n // 2 if operator in _GATED else _PAIRS
    fits = has_whole_boxes(config, k=k, folded=fold_factor(operator, config), inside=inside)
    fits = (
        fits and config.block_n >= 8 and 8 <= config.block_m <= MAX_TOKENS_TUNED and config.block_k >= _MIN_STREAMED_COLUMNS
    )
    if config.descriptor == LARGE_M:
        return (
            fits
            and operator == "linear_silu_mul"
            and config.warps in (4, 8)
            and config.split == 1
            and config.prefetch_columns > 1
        )
    return fits and config.warps == 4


def shared_bytes(facts: DeviceFacts, operator: str, config: MatmulConfig, stored: OperandStorage = UNQUANTIZED) -> int:
    """Return an upper bound of one program's shared memory in bytes."""
    tokens, columns = config.block_m, config.block_k
    if config.descriptor == SCALED_BLOCKS:
        return config.stages * (BLOCK_ROWS + tokens) * columns + tokens * 2 * BLOCK_ROWS + 512
    if config.descriptor == LARGE_M:
        return (
            2 * columns * (2 * _LARGE_M_PAIRS * config.warps // 4 * config.stages + tokens * config.prefetch_columns)
            + _LARGE_M_SCRATCH_BYTES
        )
    if config.descriptor == STREAMED and stored.convert_instructions:
        return _nibble_pipeline_bytes(operator, config)
    if config.descriptor == STREAMED:
        width = tokens * fold_factor(operator, config, stored)
        # Barriers are padded. A scaled product also adds partial sums of squares through shared memory.
        scratch = 1152 if operator in ("scaled_silu_mul", "linear_rope") else 640
        tile_bytes = (2 * _PAIRS + width) * columns * stored.token_bytes
        return config.stages * (tile_bytes + 24) + 2 * _PAIRS * width * 4 + scratch
    weight_rows = config.block_n * (2 if operator in _GATED else 1)
    # If the matrix unit reads shared memory itself, a tile is still in use when the next one is requested. With at most 8
    # tokens it reads registers.
    reads_shared = facts.warpgroups and config.block_n >= 64 and tokens > 8
    tiles = config.stages if reads_shared else max(config.stages - 1, 1)
    result_bytes = config.block_n * tokens * 4 * (2 if operator in _GATED else 1)
    tile_bytes = tiles * (weight_rows * stored.weight_bits // 8 + tokens * stored.token_bytes) * columns
    if stored.convert_instructions and (stored.stores_converted or tokens > 8):
        tile_bytes += (weight_rows + tokens) * stored.at_once(columns) * 2
    return max(tile_bytes, result_bytes) + (512 if tokens <= MAX_TOKENS_TRITON_GEMM else 1024)


# -- the estimate --------------------------------------------------------------------------------------------------


def estimate_seconds(
    facts: DeviceFacts,
    operator: str,
    config: MatmulConfig,
    *,
    m: int,
    n: int,
    k: int,
    stored: OperandStorage = UNQUANTIZED,
    gap: float = PRODUCT_GAP_S,
) -> float:
    """Estimate the seconds of a product, to rank candidates: bytes of the busiest multiprocessor and bytes in flight.

    ``gap`` is the time between the preceding product and this one, during which a pipeline of quantised weights fills. It is
    0 for products timed one after the other.
    """
    if config.descriptor == LARGE_M:
        return _estimate_large_m(facts, config, n=n, k=k)
    if config.descriptor == SCALED_BLOCKS:
        return estimate_shares(facts, config, n=n, k=k)
    resident = _resident_programs(facts, operator, config, stored)
    if not resident:
        return float("inf")
    if stored != UNQUANTIZED and config.descriptor != STREAMED:
        return estimate_unstreamed(facts, config, resident, m=m, n=n, k=k, stored=stored)
    if stored.convert_instructions:
        whole = replace(config, rows_per_program=_rows_per_unit(operator) * config.rows_per_program)
        return estimate_streamed_nibbles(facts, whole, resident, m=m, n=n, k=k, gap=gap)
    streamed = config.descriptor == STREAMED
    paired = operator in (*_GATED, "linear_rope")
    folded = streamed and fold_factor(operator, config, stored) == 2
    row_factor = 2 if paired or (streamed and not folded) else 1  # weight rows per counted row
    pairs = -(-n // row_factor)
    rows = config.block_n // 2 if operator == "linear_rope" and not streamed else config.block_n
    each = min(config.rows_per_program or rows, pairs)
    programs = -(-pairs // each) * config.split * -(-m // config.block_m)
    columns = -(-k // config.split)
    if not streamed:
        columns = -(-columns // config.block_k) * config.block_k
    rounds = -(-programs // facts.processors)
    share = facts.bytes_per_second / facts.processors
    width = stored.weight_bits / 8
    program_bytes = each * row_factor * columns * width
    loaded_rows = (config.block_n if not streamed else 2 * _PAIRS) * (2 if operator in _GATED and not streamed else 1)
    # A full pipeline is in flight. Without one, one tile is being multiplied and the next one is half waited for.
    tiles_in_flight = min(resident, rounds) * (config.stages - (0 if streamed else 1.5))
    bytes_in_flight = tiles_in_flight * min(loaded_rows, 2 * each) * config.block_k * width
    latency_hiding = min(1.0, bytes_in_flight / (1.4 * MEMORY_LATENCY_S * share))
    memory = (
        max(programs * program_bytes / facts.bytes_per_second, rounds * program_bytes / (LONE_PROCESSOR_SPEEDUP * share))
        / latency_hiding
    )
    if stored != UNQUANTIZED:  # small kernels run before this one, and its pipeline fills meanwhile
        memory -= min(programs / rounds * bytes_in_flight / facts.bytes_per_second, gap, memory)
    tokens = programs * min(m, config.block_m) * columns * stored.token_bytes
    cache = (programs * program_bytes + tokens) / (CACHE_SPEEDUP * facts.bytes_per_second)
    padding = max(1.0, loaded_rows / (each * row_factor)) if not streamed else 2.0 if folded else 1.0
    reread = 1.0 if streamed else 1 + 8 * (1 / loaded_rows + 1 / config.block_m)  # small tiles read tokens again
    matmul = (
        2.0 * config.block_m * n * k * padding * reread * -(-m // config.block_m) / (ACHIEVED_FLOPS_FRACTION * facts.flops)
    )
    streams_8_bit, units_time, wave_time = streamed and stored != UNQUANTIZED, 0.0, 0.1e-6
    if streams_8_bit:
        is_lone, wave_time = min(resident, rounds) == 1, _LATER_WAVE_S
        units_time = rounds * _units_seconds(config, each, columns, stored, folded=folded, is_lone=is_lone)
    parts_time = 0.0
    if config.split > 1:  # the norm reads the parts that the product writes
        parts_time = 8.0 * config.split * m * n / (CACHE_SPEEDUP * facts.bytes_per_second) + 0.7e-6 * config.split
    elif operator == "linear_parts":
        parts_time = 4.0 * m * n / (CACHE_SPEEDUP * facts.bytes_per_second)
    # A second program on a multiprocessor starts with nothing in flight, unless two programs fit at once.
    start_time = wave_time * (-(-rounds // resident) - 1) + (0.1e-6 if resident == 1 and rounds > 1 else 0.0)
    if streamed and operator in _GATED and m > 32:
        start_time += _REREAD_S_PER_TOKEN * (m - 32)
    factor = _row_factor(config, width, k, streams_8_bit=streams_8_bit, is_lone=min(resident, rounds) == 1)
    return (max(memory, cache, matmul, units_time) + start_time + parts_time) * factor + LAUNCH_OVERHEAD_S


def _row_factor(config: MatmulConfig, width: float, k: int, *, streams_8_bit: bool, is_lone: bool) -> float:
    """Return the measured factor on the seconds of a tile by its rows and columns of ``width`` bytes an element."""
    if config.descriptor == STREAMED:
        return (_BOX_FACTORS_8_BIT if streams_8_bit else _BOX_FACTORS)[config.block_n]
    # 128-byte rows are more load requests than 256-byte rows.
    factor = (1.03 if k % (config.split * config.block_k) == 0 else 1.08) * (1.02 if config.block_k * width < 256 else 1.0)
    if config.block_m <= 16 and is_lone:
        factor *= _LONE_TILE_FACTORS[config.block_k]
    return factor * _TILE_FACTORS[config.block_n]


def _units_seconds(
    config: MatmulConfig, each: int, columns: int, stored: OperandStorage, *, folded: bool, is_lone: bool
) -> float:
    """Estimate the seconds of the units of a program with ``each`` rows or pairs of rows and ``columns``, both operands in 8
    bits: the copy engine writes both to shared memory, and the matrix unit reads them.
    """
    width, units = config.block_m, -(-each // _PAIRS) * columns // config.block_k
    if folded:
        width, units = 2 * width, units // 2
    shared = 2.0 * (2 * _PAIRS + width) * config.block_k / _SHARED_BYTES_PER_S
    scaling = width * config.block_k * _SCALE_S_PER_SUM if stored.columns else 0.0
    return units * (shared + scaling + (config.block_k * _LONE_UNIT_S_PER_COLUMN if is_lone else 0.0))


def _estimate_large_m(facts: DeviceFacts, config: MatmulConfig, *, n: int, k: int) -> float:
    """Estimate the seconds of gates with tiles for large M: each tile takes its bytes or its products, then an epilogue."""
    tile_pairs = _LARGE_M_PAIRS * config.warps // 4
    programs, rest = -(-n // (2 * config.rows_per_program)), config.rows_per_program % tile_pairs
    rounds = -(-programs // facts.processors)
    matmul = 4.0 * tile_pairs * config.block_m * k * facts.processors / (_LARGE_M_FLOPS_FRACTION * facts.flops)
    pair_time = 4.0 * k * min(programs, facts.processors) / facts.bytes_per_second  # one pair of rows of every program
    last_tile = max(rest * pair_time, matmul) if rest else 0.0
    tile_time = config.rows_per_program // tile_pairs * max(tile_pairs * pair_time, matmul) + last_tile
    return _LARGE_M_FACTOR * rounds * tile_time + _LARGE_M_EPILOGUE_S + LAUNCH_OVERHEAD_S


def _resident_programs(facts: DeviceFacts, operator: str, config: MatmulConfig, stored: OperandStorage = UNQUANTIZED) -> int:
    """Return the number of programs that fit on a multiprocessor at once."""
    sums = config.block_n * config.block_m * (2 if operator in _GATED else 1)
    threads = config.warps * facts.warp + (facts.warp if config.descriptor == STREAMED else 0)
    registers = max(64 * threads, sums + 48 * threads)
    if (
        config.descriptor == STREAMED and stored.convert_instructions
    ):  # the loading warp is allocated the registers of a whole warpgroup
        threads = (config.warps + 4) * facts.warp
        registers = (96 if config.warps > 4 and config.prefetch_columns > 256 else 80) * threads
    return min(
        facts.processor_shared // (shared_bytes(facts, operator, config, stored) + 1024),
        _MAX_THREADS_PER_PROCESSOR // threads,
        facts.registers // registers,
        8,
    )
