"""Estimates for products with operands that aren't stored in 16 bits: their storage, and expected seconds.

Few bytes take so little time that the work between two tiles decides. The constants are compared with measurements in
``docs/evidence``: 2026-11-23-quantized-kernels.md, and 2026-11-28-many-tokens.md for more than 64 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider_triton.tiles.configs import MatmulConfig
from outrider_triton.tiles.facts import DeviceFacts

MEMORY_LATENCY_S = 1.0e-6  # seconds until a byte arrives while memory is busy
LAUNCH_OVERHEAD_S = 2.0e-6  # seconds of a kernel in addition to its bytes
LONE_PROCESSOR_SPEEDUP = 1.15  # bandwidth of a multiprocessor relative to its share while the others are idle
CACHE_SPEEDUP = 2.2  # bandwidth of the second-level cache relative to memory
ACHIEVED_FLOPS_FRACTION = 0.52  # achieved fraction of the matrix units' rate with large tiles
PRODUCT_GAP_S = 4e-6  # approximate seconds between two products in a layer
MAX_TOKENS_TRITON_GEMM = 64
"""Maximum number of tokens up to which Triton's products win wherever they were measured.

Up to twice as many tokens, unquantised products win occasionally, by 5 %. Quantised products win nearly everywhere, by far
where the library needs the weight in 16 bits.
"""
NIBBLE_TILE_ROWS = 64  # rows of a tile of nibbles; equals outrider_triton.quantized.jit.nibble_planes_streamed.ROWS
_LIBRARY_BANDWIDTH_FRACTION = 0.6  # achieved by the library with 8-bit operands and 128 tokens
# Seconds on an H200.
_LIBRARY_S_PER_COLUMN = 3.5e-9  # of the library's product with 8-bit operands, which isn't split
_FIRST_TILE_S = 0.65e-6  # until a program's first tile arrives
_TILE_GAP_S = 0.1e-6  # between two tiles
_BARRIER_S_PER_WARP = 0.13e-6  # per warp: all warps of a program synchronise between two tiles
_SCALED_SUMS_FACTOR = 1.3  # between two tiles of native operands whose columns have scales in groups
_TILE_LATENCY_S = 4.5e-6  # from the request of a tile to its arrival, with all multiprocessors loading
# Bytes per second that a multiprocessor's threads load of both operands, with as many tokens as rows.
_COPY_BYTES_PER_S = 50e9
_CONVERT_S = 1.6e-10  # per warp: for each conversion instruction of each weight element
_ISSUE_S_PER_ELEMENT = 7e-12  # per multiprocessor: for each weight element that any warp multiplies
_ISSUE_S_PER_COLUMN = 0.6e-9  # per multiprocessor and 64 streamed rows: about one instruction in each of four warps, counted
_WARPGROUP_S_PER_COLUMN = 0.8e-9  # for a warpgroup and 64 streamed rows, until it begins a unit: estimated
_UNIT_BEGIN_S = 0.1e-6
_UNIT_S_PER_TOKEN = 8e-9  # per multiprocessor: for each unit and token, one grain and two added components
_ADD_PARTS_S = 1.0e-6  # until the parts are added up
# Seconds of products in shares on an H200.
_SHARES_S = 3.5e-6  # until the first unit arrives, and after the last one
_LONE_SHARE_UNIT_S = 0.25e-6  # of a unit, and per token, while few other multiprocessors load
_LONE_SHARE_UNIT_S_PER_TOKEN = 2.4e-9
_SHARES_SPEEDUP = 1.15  # factor on the bandwidth of memory, of units of which _TOKEN_BYTES_FACTOR of the tokens count
_TOKEN_BYTES_FACTOR = 0.32
_ADD_SHARED_S = 1.5e-6  # until the parts of shared tiles are added up, and per token of a part
_ADD_SHARED_S_PER_TOKEN = 1.3e-10
BLOCK_ROWS = 128  # rows and columns of a block of the weight with a scale, and of a tile in shares


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


def estimate_unstreamed(
    facts: DeviceFacts, config: MatmulConfig, resident: int, *, m: int, n: int, k: int, stored: OperandStorage
) -> float:
    """Estimate the seconds of an unstreamed product with a quantised weight.

    The time between two tiles decides. A multiprocessor runs as many programs as it has room for, tile by tile, then the
    next.
    """
    rows, width = min(config.rows_per_program or config.block_n, n), stored.weight_bits / 8
    programs = -(-n // rows) * config.split * -(-m // config.block_m)
    steps = -(-k // (config.split * config.block_k))
    elements = config.block_n * config.block_k
    tile = rows * config.block_k * width
    bandwidth = facts.bytes_per_second / facts.processors
    matmul = 2.0 * config.block_m * elements * facts.processors / (ACHIEVED_FLOPS_FRACTION * facts.flops)
    if config.block_m > MAX_TOKENS_TRITON_GEMM and not stored.convert_instructions:
        matmul /= 2  # the 8-bit rate is twice as high; with fewer tokens no effect was measured
        copy_time = config.block_k * (config.block_n * width + config.block_m * stored.token_bytes) / _COPY_BYTES_PER_S
        serial = max(_TILE_GAP_S, 1.4 * MEMORY_LATENCY_S / max(config.stages - 1, 1))
    else:
        copy_time = 0.0
        serial_work = (
            _TILE_GAP_S
            + config.warps * _BARRIER_S_PER_WARP
            + _CONVERT_S * stored.convert_instructions * elements / config.warps
        )
        serial = max(serial_work, _TILE_LATENCY_S / max(config.stages - 1, 1))
        if stored.columns and not stored.convert_instructions:
            serial *= _SCALED_SUMS_FACTOR

    def wave(count: int) -> float:
        return _FIRST_TILE_S + steps * max(
            serial, count * max(_ISSUE_S_PER_ELEMENT * elements, matmul, copy_time, tile / bandwidth)
        )

    full, rest = divmod(-(-programs // facts.processors), resident)
    waves = max(full * wave(resident) + (wave(rest) if rest else 0.0), n * k * width / facts.bytes_per_second)
    parts_time = 0.0
    if config.split > 1:  # the norm reads the parts that the product writes
        parts_time = _ADD_PARTS_S + 8.0 * config.split * m * n / (CACHE_SPEEDUP * facts.bytes_per_second)
    return waves + parts_time + LAUNCH_OVERHEAD_S


def estimate_library(facts: DeviceFacts, *, n: int, k: int) -> float:
    """Estimate the seconds of the library's product of 65 to 128 tokens with a weight of 8 bits: its bytes, or the columns
    of a tile one after the other.
    """
    return max(n * k / (_LIBRARY_BANDWIDTH_FRACTION * facts.bytes_per_second), k * _LIBRARY_S_PER_COLUMN) + LAUNCH_OVERHEAD_S


def estimate_shares(facts: DeviceFacts, config: MatmulConfig, *, n: int, k: int) -> float:
    """Estimate the seconds of a product in shares of units (:mod:`outrider_triton.quantized.jit.scaled_blocks`)."""
    tiles, steps, programs, m = n // BLOCK_ROWS, k // config.block_k, config.rows_per_program, config.block_m
    unit_bytes = (BLOCK_ROWS + _TOKEN_BYTES_FACTOR * m) * config.block_k

    def unit(active: int) -> float:
        loads = active * unit_bytes / (_SHARES_SPEEDUP * facts.bytes_per_second)
        return max(_LONE_SHARE_UNIT_S + _LONE_SHARE_UNIT_S_PER_TOKEN * m, loads) if active else 0.0

    full, rest = divmod(programs, facts.processors)
    units_time = -(-tiles * steps // programs) * (full * unit(facts.processors) + unit(rest))
    shared_time = 0.0
    if programs != tiles:  # a program's share begins and ends inside of tiles, or is a part of one
        parts = programs * (2 if programs % tiles else 1)
        shared_time = _ADD_SHARED_S + _ADD_SHARED_S_PER_TOKEN * parts * m
    return LAUNCH_OVERHEAD_S + _SHARES_S + units_time + shared_time


def estimate_streamed_nibbles(
    facts: DeviceFacts, config: MatmulConfig, resident: int, *, m: int, n: int, k: int, gap: float
) -> float:
    """Estimate the seconds of a streamed product with nibbles.

    It is the largest of three times: the busiest multiprocessor's bytes, its instructions, and a warpgroup's serial units.
    """
    programs = -(-n // config.rows_per_program) * config.split
    rounds = -(-programs // facts.processors)
    units = -(-config.rows_per_program // NIBBLE_TILE_ROWS) * (config.block_k // config.prefetch_columns)
    program_bytes = rounds * config.rows_per_program * config.block_k / 2
    memory = max(
        n * k / 2 / facts.bytes_per_second,
        program_bytes * facts.processors / (LONE_PROCESSOR_SPEEDUP * facts.bytes_per_second),
    )
    # Pipelines fill while the preceding small kernels run. A tile that isn't full holds fewer bytes.
    pipeline_bytes = (
        min(rounds, resident) * config.stages * min(config.rows_per_program, NIBBLE_TILE_ROWS) * config.prefetch_columns / 2
    )
    memory -= min(pipeline_bytes * facts.processors / facts.bytes_per_second, gap, memory)
    groups = config.warps // 4
    issue_time = rounds * units * (config.prefetch_columns * _ISSUE_S_PER_COLUMN + config.block_m * _UNIT_S_PER_TOKEN)
    serial = (
        -(-rounds // resident) * -(-units // groups) * (_UNIT_BEGIN_S + config.prefetch_columns * _WARPGROUP_S_PER_COLUMN)
    )
    parts_time = 0.0
    if config.split > 1:  # the norm reads the parts that the product writes
        parts_time = _ADD_PARTS_S * (config.split - 1) / 4 + 8.0 * config.split * m * n / (
            CACHE_SPEEDUP * facts.bytes_per_second
        )
    start_time = _FIRST_TILE_S * -(-rounds // resident)
    return max(memory, issue_time, serial) + start_time + parts_time + LAUNCH_OVERHEAD_S
