"""Tile configurations of matrix products on an unmeasured device: candidates that fit, ranked by estimated time.

With few tokens the weight is read once, so memory bandwidth decides. A good tile configuration gives every multiprocessor
the same share of the weight and keeps enough loads in flight. With more tokens the matrix unit decides, and above
:data:`MAX_TOKENS_TUNED` tokens only gates of prefill don't use the library. All estimates are computed from
:class:`~outrider_triton.tiles.facts.DeviceFacts`; ``tests/kernels/test_derive.py`` compares them with measurements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from outrider_triton.tiles.configs import LARGE_M, PREFILL_GATES, SCALED_BLOCKS, STREAMED, MatmulConfig, bucket
from outrider_triton.tiles.derive.estimates import (
    PRODUCT_GAP_S,
    estimate_library,
    estimate_library_gates,
    estimate_prefill_gates,
    estimate_seconds,
)
from outrider_triton.tiles.derive.fits import (
    ADDED,
    BLOCK_ROWS,
    GATED,
    LARGE_M_PAIRS,
    LARGE_M_SCRATCH_BYTES,
    MAX_FOLDED_TOKENS,
    MAX_TOKENS_TRITON_GEMM,
    MAX_TOKENS_TUNED,
    MIN_STREAMED_COLUMNS,
    NIBBLE_TILE_ROWS,
    PAIRS,
    PREFILL_PAIRS,
    PREFILL_SAMPLE_TOKENS,
    PREFILL_TOKENS,
    UNQUANTIZED,
    OperandStorage,
    rows_per_unit,
    shared_bytes,
)
from outrider_triton.tiles.facts import DeviceFacts

MIN_STREAMED_TOKENS = 4  # tokens that fill the matrix unit's minimum width, at two int8 components per token
# Low or high rows next to each other in a tile of pairs; equals PAIRED in
# outrider_triton.quantized.jit.nibble_planes_streamed.
_PAIRED = 8
_MAX_STREAMED_NIBBLE_TOKENS = 16
"""Maximum number of tokens for which four-bit weights are streamed."""
_LARGE_M_TOKEN_BYTES = 80 << 10  # bytes of tokens in flight; of 128 tokens, 48 KB is 9 % slower and 32 KB 37 % slower
# Tokens up to which 8-bit units have 256 columns: above, the time between two units exceeds their products.
_MAX_WIDE_TOKENS = 32
_PIPELINE_BYTES = ((184 << 10, 208 << 10, 128 << 10), (208 << 10, 160 << 10, 112 << 10))
"""Shared memory of a multi-stage pipeline in bytes, the likeliest first.

The second row is for products that add to the residual, whose pipeline can fill during attention.
"""


def choose_config(
    facts: DeviceFacts, operator: str, *, m: int, n: int, k: int, half: int = 0, stored: OperandStorage = UNQUANTIZED
) -> MatmulConfig | None:
    """Return the configuration for ``m`` tokens and a weight [n, k]; None if the library is expected to be faster.

    ``operator`` is an operator of :mod:`outrider_triton.tiles.derive.fits`. ``half`` is half a head's size, for
    ``linear_rope`` only. Quantised operands (``stored``) support ``linear`` and ``linear_parts``, and streamed
    ``linear_rope`` and ``linear_silu_mul``.
    """
    if m > MAX_TOKENS_TUNED:
        return _choose_prefill_config(facts, operator, m=m, n=n, k=k, stored=stored)
    if operator == "linear_add_scaled" and (k > 2 * n or m > 32):
        return None  # long rows, and many of them, are faster in parts that the norm adds up
    ranked = rank_configs(facts, operator, m=m, n=n, k=k, half=half, stored=stored)
    if m <= MAX_TOKENS_TRITON_GEMM or not (stored == UNQUANTIZED or stored.library):
        return ranked[0] if ranked else None
    kinds = (STREAMED, SCALED_BLOCKS) if stored.library else (LARGE_M,)
    best = next((config for config in ranked if config.descriptor in kinds), None)
    if best is None:
        return None
    seconds = estimate_seconds(facts, operator, best, m=m, n=n, k=k, stored=stored)
    return best if seconds < estimate_library(facts, stored, n=n, k=k) else None


def _choose_prefill_config(
    facts: DeviceFacts, operator: str, *, m: int, n: int, k: int, stored: OperandStorage
) -> MatmulConfig | None:
    """Return the configuration of gates of prefill; None if the library's product and the activation's kernel are expected
    to be faster together.
    """
    is_gates = operator == "linear_silu_mul" and stored == UNQUANTIZED and facts.streams_products
    # The copy engine loads rows of 16 bytes or more, at such addresses.
    if not is_gates or k % 8 or n % 16 or k <= 2 * MIN_STREAMED_COLUMNS:
        return None
    # Programs share the fewest rows and tokens at a time. On an H200, 12 blocks are up to 1 % faster than 16, and up to 3 %
    # faster than 24.
    group = min(
        (blocks for blocks in range(1, facts.processors + 1) if facts.processors % blocks == 0),
        key=lambda blocks: blocks * PREFILL_TOKENS + facts.processors // blocks * 2 * PREFILL_PAIRS,
    )
    without_stages = MatmulConfig(
        PREFILL_TOKENS, PREFILL_PAIRS, MIN_STREAMED_COLUMNS, 1, 8, 0, group, PREFILL_GATES, facts.processors
    )
    stage = 2 * (PREFILL_TOKENS + 2 * PREFILL_PAIRS) * MIN_STREAMED_COLUMNS
    stages = (facts.shared_bytes - shared_bytes(facts, operator, without_stages)) // stage
    size = {"m": config_tokens(m), "n": n, "k": k}
    is_faster = estimate_prefill_gates(facts, without_stages, **size) < estimate_library_gates(facts, **size)
    return replace(without_stages, stages=stages) if is_faster and stages > 2 else None


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
    else its :func:`bucket`; of prefill, whole tiles up to :data:`PREFILL_SAMPLE_TOKENS`.
    """
    if m > MAX_TOKENS_TUNED:
        return min(-(-m // PREFILL_TOKENS) * PREFILL_TOKENS, PREFILL_SAMPLE_TOKENS)
    return (
        MIN_STREAMED_TOKENS if stored.can_stream and stored.convert_instructions and m <= MIN_STREAMED_TOKENS else bucket(m)
    )


# -- candidates ----------------------------------------------------------------------------------------------------


def candidate_configs(
    facts: DeviceFacts, operator: str, *, m: int, n: int, k: int, half: int = 0, stored: OperandStorage = UNQUANTIZED
) -> list[MatmulConfig]:
    """Return configurations worth trying that fit into shared memory; ``m`` is a value of :func:`config_tokens`."""
    if m >= MAX_TOKENS_TRITON_GEMM and stored.shares_units and operator in ("linear", "linear_parts"):
        shares = list(_shares(facts, m, n, k))
        if shares:  # faster than other kernels wherever it was measured, or 8 % slower
            return shares
    found = [] if stored != UNQUANTIZED and operator in GATED else list(_unstreamed(facts, operator, m, n, stored))
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
    elif operator in ADDED:
        tiles = [tile for tile in tiles if tile[0] >= 32]  # each program writes a partial sum of squares
    if stored.weight_bits < 16:  # keep the number of bytes per row
        tiles = [(rows, columns * factor) for rows, columns in tiles for factor in (16 // stored.weight_bits, 2)]
        tiles += [(128, 256)]
        tiles = [(rows, columns) for rows, columns in tiles if columns >= 256 or not is_few]
        tiles = [(rows, columns) for rows, columns in dict.fromkeys(tiles) if columns % stored.at_once(columns) == 0]
    prefetched = _prefetched_columns(facts, n, stored)
    rows = n // 2 if operator in (*GATED, "linear_rope") else n
    for (block_n, block_k), split, stages in itertools.product(tiles, _splits(operator, stored), (4, 3, 5, 2)):
        largest = block_n // 2 if operator == "linear_rope" else block_n
        even = {-(-rows * split // (facts.processors * waves)) for waves in (1, 2, 3, 4)}
        shares = {0} | {
            each for each in (-(-each // 8) * 8 for each in even) if largest // 2 - (stored != UNQUANTIZED) < each < largest
        }
        weight_rows = block_n * (2 if operator in GATED else 1)
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
    folded = operator == "linear" or operator in ADDED
    splits = (1,) if is_folded and not is_unquantized else _splits(operator, stored)
    for waves, box, split in itertools.product((1, 2), (32, 16, 8), splits):
        if operator == "linear_parts" and split > 1:
            each, fold_factor = PAIRS, 1
        else:
            fold_factor = 2 if is_folded and (folded or operator == "linear_parts") else 1
            pairs = n if fold_factor == 2 else -(-n // 2)
            each = -(-pairs // (facts.processors * waves * box)) * box
        inside = {"linear_rope": half, "linear_silu_mul": n // 2, "scaled_silu_mul": n // 2}.get(operator, PAIRS)
        # The tokens are loaded again for each tile.
        has_tiles = operator == "linear" and m <= 16 and 2 * PAIRS <= each <= 4 * PAIRS
        if inside % box or (is_unquantized and fold_factor == 2 and each > PAIRS and not has_tiles):
            continue
        budgets = (facts.processor_shared // 2 - 1024,) if waves > 1 else _PIPELINE_BYTES[operator == "linear_add_scaled"]
        # Two units of two pieces with scales of their own, and more tokens, need more registers than a thread has.
        most = _MAX_WIDE_TOKENS // fold_factor if stored.columns else _MAX_WIDE_TOKENS
        columns = 256 if m <= most and k % (256 * split * fold_factor) == 0 else 128
        for budget, block_k in itertools.product(budgets, (128, 256) if is_unquantized else (columns,)):
            width = fold_factor * max(8, m)
            barriers = 0 if is_unquantized else 24
            stage = (2 * PAIRS + width) * block_k * stored.token_bytes + barriers
            stages = (min(budget, facts.shared_bytes) - 8 * PAIRS * width - 1024) // stage
            if stages > 1 and k % (split * block_k * fold_factor) == 0:
                yield MatmulConfig(max(8, m), box, block_k, split, 4, stages, 0, STREAMED, each)


def _streamed_large_m(facts: DeviceFacts, m: int, n: int, k: int) -> Iterator[MatmulConfig]:
    """Yield configurations of :mod:`outrider_triton.products.jit.large_m_gates`: one program per multiprocessor, with one or
    two warpgroups.
    """
    pairs, row = n // 2, MIN_STREAMED_COLUMNS * 2
    if k % MIN_STREAMED_COLUMNS or pairs % 8:
        return
    each = -(-pairs // (facts.processors * 8)) * 8
    box = next(rows for rows in (64, 32, 16, 8) if each % rows == 0 and pairs % rows == 0)
    token_stages = _LARGE_M_TOKEN_BYTES // (m * row)
    for groups in (2, 1):
        stages = (facts.shared_bytes - LARGE_M_SCRATCH_BYTES - token_stages * m * row) // (2 * groups * LARGE_M_PAIRS * row)
        if stages > 1:
            yield MatmulConfig(m, box, MIN_STREAMED_COLUMNS, 1, 4 * groups, stages, token_stages, LARGE_M, each)


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
    groups, row = 2, 2 * MIN_STREAMED_COLUMNS
    token_stages = _LARGE_M_TOKEN_BYTES // (m * row)
    budget = facts.shared_bytes - LARGE_M_SCRATCH_BYTES - token_stages * m * row
    stages = budget // (2 * groups * LARGE_M_PAIRS * row)
    box = groups * LARGE_M_PAIRS
    return MatmulConfig(m, box, MIN_STREAMED_COLUMNS, 1, 4 * groups, stages, token_stages, LARGE_M)


def _streamed_nibbles(
    facts: DeviceFacts, operator: str, m: int, n: int, k: int, half: int, stored: OperandStorage
) -> Iterator[MatmulConfig]:
    """Yield configurations of :mod:`outrider_triton.quantized.jit.nibble_planes_streamed`: 1 to 3 programs per
    multiprocessor, 1 or 2 warpgroups each.
    """
    if operator in GATED or (operator == "linear_rope" and half % _PAIRED):
        return
    row_factor = rows_per_unit(operator)
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
