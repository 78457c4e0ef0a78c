"""Limits of tile configurations of matrix products: by the storage of operands, tiles and boxes, and shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_triton.launch import power_of_two
from outrider_triton.tiles.configs import LARGE_M, PREFILL_GATES, SCALED_BLOCKS, STREAMED, MatmulConfig
from outrider_triton.tiles.facts import DeviceFacts

MAX_TOKENS_TUNED = 128
"""Maximum number of tokens with Triton products; the library multiplies larger batches.

Above 64 tokens only gates and quantised weights use Triton, unless a measurement says otherwise.
"""
MAX_TOKENS_TRITON_GEMM = 64
"""Maximum number of tokens up to which Triton's products win wherever they were measured.

Up to twice as many tokens, unquantised products win occasionally, by 5 %. Quantised products win nearly everywhere, by far
where the library needs the weight in 16 bits.
"""
PREFILL_SAMPLE_TOKENS = 4096
"""Number of tokens from which on the choice of gates of prefill doesn't depend on their number, so that their kernel is
compiled for so many.
"""
MAX_FOLDED_TOKENS = 16
"""Maximum number of tokens for which streamed rows of 8 bits are folded: above, the tokens' bytes would take as long as the
weight's.
"""
OPERATORS = ("linear", "linear_parts", "linear_silu_mul", "linear_add", "linear_add_scaled", "scaled_silu_mul", "linear_rope")
GATED = ("linear_silu_mul", "scaled_silu_mul")
ADDED = ("linear_add", "linear_add_scaled")
_SMALL_WEIGHT_ROWS, _SMALL_WEIGHT_BYTES = 512, 2 << 20
"""Maximum number of rows and of bytes of a weight that has few (:func:`has_few_bytes`)."""
_SMALL_WEIGHT_TOKENS = 32
"""Maximum number of tokens of a tile for such a weight."""
PAIRS = 32  # pairs of rows per streamed tile; equals outrider_triton.jit.tma_pipeline.PAIRS
LARGE_M_PAIRS = 64  # pairs of rows per warpgroup; equals outrider_triton.products.jit.large_m_gates.GROUP
NIBBLE_TILE_ROWS = 64  # rows of a tile of nibbles; equals outrider_triton.quantized.jit.nibble_planes_streamed.ROWS
BLOCK_ROWS = 128  # rows and columns of a block of the weight with a scale, and of a tile in shares
MIN_STREAMED_COLUMNS = 64  # minimum columns of a streamed tile: 128 bytes, one row of swizzled shared memory
PREFILL_TOKENS, PREFILL_PAIRS = 128, 128  # of a tile; equal those of outrider_triton.products.jit.prefill_gates
LARGE_M_SCRATCH_BYTES = 4608  # shared memory of layout conversions and barriers


@dataclass(frozen=True, slots=True)
class OperandStorage:
    """The storage of a product's operands, from which its time is estimated."""

    weight_bits: int = 16
    """Number of bits per weight element."""
    token_bytes: int = 2
    """Number of bytes per token element."""
    columns: int = 0
    """Maximum number of columns per multiplication, because each group of columns has its own scale; 0: a whole tile."""
    convert_instructions: float = 0.0
    """Number of instructions per weight element to dequantise it for the matrix unit; 0: the unit takes the stored format."""
    stores_converted: bool = False
    """True if dequantised elements are also written to shared memory."""
    min_tokens: int = 16
    """Number of tokens of the smallest tile."""
    can_stream: bool = False
    """True if a streamed kernel exists for this storage."""
    shares_units: bool = False
    """True if :mod:`outrider_triton.quantized.jit.scaled_blocks` multiplies this storage."""
    library: bool = False
    """True if the library multiplies the operands as stored, which is preferred to unstreamed products of more than
    :data:`MAX_TOKENS_TRITON_GEMM` tokens.
    """

    def at_once(self, columns: int) -> int:
        """Return the number of a tile's ``columns`` that one multiplication takes."""
        return min(self.columns, columns) if self.columns else columns


UNQUANTIZED = OperandStorage()


def has_few_bytes(n: int, k: int, operator: str, stored: OperandStorage) -> bool:
    """Return True if a weight [n, k] has so few rows and bytes that a program's steps through the columns take longer than
    the bytes. Small tiles of rows and tokens are then faster than few reads of the weight, and the library isn't.
    """
    is_small = n <= _SMALL_WEIGHT_ROWS and 2 * n * k <= _SMALL_WEIGHT_BYTES
    return is_small and operator == "linear" and stored == UNQUANTIZED


def tile_tokens(m: int, n: int, k: int, operator: str, stored: OperandStorage) -> int:
    """Return the number of tokens for which tiles are derived that multiply ``m`` tokens, in several tiles if it is less."""
    return min(m, _SMALL_WEIGHT_TOKENS) if has_few_bytes(n, k, operator, stored) else m


def fold_factor(operator: str, config: MatmulConfig, stored: OperandStorage = UNQUANTIZED) -> int:
    """Return 2 if a streamed product multiplies the two halves of a weight row as two rows, else 1."""
    if stored != UNQUANTIZED and config.block_m > MAX_FOLDED_TOKENS:
        return 1
    return 2 if operator in ("linear", *ADDED) or (operator == "linear_parts" and config.split == 1) else 1


def rows_per_unit(operator: str) -> int:
    """Return the number of weight rows that one unit of ``rows_per_program`` counts: 2 for rotated rows, which
    come in pairs.
    """
    return 2 if operator == "linear_rope" else 1


def has_whole_boxes(config: MatmulConfig, *, k: int, folded: int, inside: int) -> bool:
    """Return True if a streamed configuration has two or more stages and its tiles divide the weight's ``k`` columns, and
    its boxes of ``block_n`` rows the rows of a tile and of a program.

    ``folded`` is the result of :func:`fold_factor`. No box may straddle a multiple of ``inside`` rows: half a head, or a
    gate.
    """
    box, tile = config.block_n, LARGE_M_PAIRS if config.descriptor == LARGE_M else PAIRS
    rest = k % (config.split * config.block_k * folded), inside % box, tile % box, config.rows_per_program % box
    return rest == (0, 0, 0, 0) and config.stages > 1


def can_stream(operator: str, config: MatmulConfig, *, n: int, k: int) -> bool:
    """Return True if a streamed kernel can load a weight [n, k] for ``operator``, half-head boundaries not considered."""
    inside = n // 2 if operator in GATED else PAIRS
    fits = has_whole_boxes(config, k=k, folded=fold_factor(operator, config), inside=inside)
    fits = fits and config.block_n >= 8 and 8 <= config.block_m <= MAX_TOKENS_TUNED and config.block_k >= MIN_STREAMED_COLUMNS
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
    if config.descriptor == PREFILL_GATES:
        return 2 * (config.stages * (tokens + 2 * config.block_n) * columns + tokens * config.block_n) + 512
    if config.descriptor == LARGE_M:
        return (
            2 * columns * (2 * LARGE_M_PAIRS * config.warps // 4 * config.stages + tokens * config.prefetch_columns)
            + LARGE_M_SCRATCH_BYTES
        )
    if config.descriptor == STREAMED and stored.convert_instructions:
        return _nibble_pipeline_bytes(operator, config)
    if config.descriptor == STREAMED:
        width = tokens * fold_factor(operator, config, stored)
        # Barriers are padded. A scaled product also adds partial sums of squares through shared memory.
        scratch = 1152 if operator in ("scaled_silu_mul", "linear_rope") else 640
        tile_bytes = (2 * PAIRS + width) * columns * stored.token_bytes
        return config.stages * (tile_bytes + 24) + 2 * PAIRS * width * 4 + scratch
    weight_rows = config.block_n * (2 if operator in GATED else 1)
    # If the matrix unit reads shared memory itself, a tile is still in use when the next one is requested. With at most 8
    # tokens it reads registers.
    reads_shared = facts.warpgroups and config.block_n >= 64 and tokens > 8
    tiles = config.stages if reads_shared else max(config.stages - 1, 1)
    result_bytes = config.block_n * tokens * 4 * (2 if operator in GATED else 1)
    tile_bytes = tiles * (weight_rows * stored.weight_bits // 8 + tokens * stored.token_bytes) * columns
    if stored.convert_instructions and (stored.stores_converted or tokens > 8):
        tile_bytes += (weight_rows + tokens) * stored.at_once(columns) * 2
    return max(tile_bytes, result_bytes) + (512 if tokens <= MAX_TOKENS_TRITON_GEMM else 1024)


def _nibble_pipeline_bytes(operator: str, config: MatmulConfig) -> int:
    """Return shared memory of a streamed nibble-plane program in bytes.

    It holds tiles, tokens, float32 scales, sums of token groups, the second warpgroup's sums, and barriers.
    """
    tile_columns, tiles = config.prefetch_columns, -(-rows_per_unit(operator) * config.rows_per_program // NIBBLE_TILE_ROWS)
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
