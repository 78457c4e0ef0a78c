"""Estimated seconds of matrix products: of unquantised operands, of quantised ones, and of the library.

Few bytes take so little time that the work between two tiles decides. The constants of quantised operands are compared with
measurements in ``docs/evidence``: 2026-11-23-quantized-kernels.md, and 2026-11-28-many-tokens.md for more than 64 tokens.
"""

from __future__ import annotations

from dataclasses import replace

from outrider_triton.tiles.configs import LARGE_M, SCALED_BLOCKS, STREAMED, MatmulConfig
from outrider_triton.tiles.derive.fits import (
    BLOCK_ROWS,
    GATED,
    LARGE_M_PAIRS,
    MAX_TOKENS_TRITON_GEMM,
    NIBBLE_TILE_ROWS,
    PAIRS,
    UNQUANTIZED,
    OperandStorage,
    fold_factor,
    has_few_bytes,
    rows_per_unit,
    shared_bytes,
)
from outrider_triton.tiles.facts import DeviceFacts

_MEMORY_LATENCY_S = 1.0e-6  # seconds until a byte arrives while memory is busy
_LAUNCH_OVERHEAD_S = 2.0e-6  # seconds of a kernel in addition to its bytes
_LONE_PROCESSOR_SPEEDUP = 1.15  # bandwidth of a multiprocessor relative to its share while the others are idle
_CACHE_SPEEDUP = 2.2  # bandwidth of the second-level cache relative to memory
_ACHIEVED_FLOPS_FRACTION = 0.52  # achieved fraction of the matrix units' rate with large tiles
PRODUCT_GAP_S = 4e-6  # approximate seconds between two products in a layer
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
# Seconds of a product of few bytes on an H200: of each step of a program through the columns, and until its first tile
# arrives if that isn't loaded before the wait.
_STEP_S = 0.08e-6
_STEP_S_PER_COLUMN = 0.6e-9
_UNSTREAMED_START_S = 1e-6
_ADD_PARTS_S = 1.0e-6  # until the parts are added up
# Seconds of products in shares on an H200.
_SHARES_S = 3.5e-6  # until the first unit arrives, and after the last one
_LONE_SHARE_UNIT_S = 0.25e-6  # of a unit, and per token, while few other multiprocessors load
_LONE_SHARE_UNIT_S_PER_TOKEN = 2.4e-9
_SHARES_SPEEDUP = 1.15  # factor on the bandwidth of memory, of units of which _TOKEN_BYTES_FACTOR of the tokens count
_TOKEN_BYTES_FACTOR = 0.32
_ADD_SHARED_S = 1.5e-6  # until the parts of shared tiles are added up, and per token of a part
_ADD_SHARED_S_PER_TOKEN = 1.3e-10
_REREAD_S_PER_TOKEN = 1.2e-7  # seconds per token above 32: streamed gates read the tokens again for each tile
_LARGE_M_FACTOR = 1.05  # measured factor on a tile's bytes or products
_LARGE_M_EPILOGUE_S = 3e-6  # seconds after the last bytes arrive: last products, activation, stores
_LARGE_M_FLOPS_FRACTION = 0.9  # achieved fraction of the matrix units' rate with tiles for large M
# Achieved fractions of the matrix units' rate with thousands of tokens, on an H200 at its power limit.
_PREFILL_FLOPS_FRACTION = 0.81
_LIBRARY_FLOPS_FRACTION = 0.78
_LIBRARY_BYTES_FACTOR = 1.12  # measured factor on the weight's bytes when the library multiplies gates of 65 to 128 tokens
_LIBRARY_EXTRA_S = 8e-6
_MAX_THREADS_PER_PROCESSOR = 1536
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
        return _estimate_shares(facts, config, n=n, k=k)
    resident = _resident_programs(facts, operator, config, stored)
    if not resident:
        return float("inf")
    if stored != UNQUANTIZED and config.descriptor != STREAMED:
        return _estimate_unstreamed(facts, config, resident, m=m, n=n, k=k, stored=stored)
    if stored.convert_instructions:
        whole = replace(config, rows_per_program=rows_per_unit(operator) * config.rows_per_program)
        return _estimate_streamed_nibbles(facts, whole, resident, m=m, n=n, k=k, gap=gap)
    streamed = config.descriptor == STREAMED
    paired = operator in (*GATED, "linear_rope")
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
    loaded_rows = (config.block_n if not streamed else 2 * PAIRS) * (2 if operator in GATED and not streamed else 1)
    # A full pipeline is in flight. Without one, one tile is being multiplied and the next one is half waited for.
    tiles_in_flight = min(resident, rounds) * (config.stages - (0 if streamed else 1.5))
    bytes_in_flight = tiles_in_flight * min(loaded_rows, 2 * each) * config.block_k * width
    latency_hiding = min(1.0, bytes_in_flight / (1.4 * _MEMORY_LATENCY_S * share))
    memory = (
        max(programs * program_bytes / facts.bytes_per_second, rounds * program_bytes / (_LONE_PROCESSOR_SPEEDUP * share))
        / latency_hiding
    )
    if stored != UNQUANTIZED:  # small kernels run before this one, and its pipeline fills meanwhile
        memory -= min(programs / rounds * bytes_in_flight / facts.bytes_per_second, gap, memory)
    tokens = programs * min(m, config.block_m) * columns * stored.token_bytes
    cache = (programs * program_bytes + tokens) / (_CACHE_SPEEDUP * facts.bytes_per_second)
    padding = max(1.0, loaded_rows / (each * row_factor)) if not streamed else 2.0 if folded else 1.0
    reread = 1.0 if streamed else 1 + 8 * (1 / loaded_rows + 1 / config.block_m)  # small tiles read tokens again
    matmul = (
        2.0 * config.block_m * n * k * padding * reread * -(-m // config.block_m) / (_ACHIEVED_FLOPS_FRACTION * facts.flops)
    )
    streams_8_bit, units_time, wave_time = streamed and stored != UNQUANTIZED, 0.0, 0.1e-6
    if streams_8_bit:
        is_lone, wave_time = min(resident, rounds) == 1, _LATER_WAVE_S
        units_time = rounds * _units_seconds(config, each, columns, stored, folded=folded, is_lone=is_lone)
    steps_time = _steps_seconds(config, each, columns, folded=folded) if has_few_bytes(n, k, operator, stored) else 0.0
    parts_time = 0.0
    if config.split > 1:  # the norm reads the parts that the product writes
        parts_time = 8.0 * config.split * m * n / (_CACHE_SPEEDUP * facts.bytes_per_second) + 0.7e-6 * config.split
    elif operator == "linear_parts":
        parts_time = 4.0 * m * n / (_CACHE_SPEEDUP * facts.bytes_per_second)
    # A second program on a multiprocessor starts with nothing in flight, unless two programs fit at once.
    start_time = wave_time * (-(-rounds // resident) - 1) + (0.1e-6 if resident == 1 and rounds > 1 else 0.0)
    if streamed and operator in GATED and m > 32:
        start_time += _REREAD_S_PER_TOKEN * (m - 32)
    factor = _row_factor(config, width, k, streams_8_bit=streams_8_bit, is_lone=min(resident, rounds) == 1)
    return (max(memory, cache, matmul, units_time, steps_time) + start_time + parts_time) * factor + _LAUNCH_OVERHEAD_S


def _steps_seconds(config: MatmulConfig, each: int, columns: int, *, folded: bool) -> float:
    """Estimate the seconds of a program's steps through ``columns`` of ``each`` rows or pairs, without their bytes."""
    streamed = config.descriptor == STREAMED
    steps = (-(-each // PAIRS) if streamed else 1) * -(-columns // (config.block_k * (2 if folded else 1)))
    return (0.0 if streamed else _UNSTREAMED_START_S) + steps * (_STEP_S + _STEP_S_PER_COLUMN * config.block_k)


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
    width, units = config.block_m, -(-each // PAIRS) * columns // config.block_k
    if folded:
        width, units = 2 * width, units // 2
    shared = 2.0 * (2 * PAIRS + width) * config.block_k / _SHARED_BYTES_PER_S
    scaling = width * config.block_k * _SCALE_S_PER_SUM if stored.columns else 0.0
    return units * (shared + scaling + (config.block_k * _LONE_UNIT_S_PER_COLUMN if is_lone else 0.0))


def _estimate_large_m(facts: DeviceFacts, config: MatmulConfig, *, n: int, k: int) -> float:
    """Estimate the seconds of gates with tiles for large M: each tile takes its bytes or its products, then an epilogue."""
    tile_pairs = LARGE_M_PAIRS * config.warps // 4
    programs, rest = -(-n // (2 * config.rows_per_program)), config.rows_per_program % tile_pairs
    rounds = -(-programs // facts.processors)
    matmul = 4.0 * tile_pairs * config.block_m * k * facts.processors / (_LARGE_M_FLOPS_FRACTION * facts.flops)
    pair_time = 4.0 * k * min(programs, facts.processors) / facts.bytes_per_second  # one pair of rows of every program
    last_tile = max(rest * pair_time, matmul) if rest else 0.0
    tile_time = config.rows_per_program // tile_pairs * max(tile_pairs * pair_time, matmul) + last_tile
    return _LARGE_M_FACTOR * rounds * tile_time + _LARGE_M_EPILOGUE_S + _LAUNCH_OVERHEAD_S


def estimate_prefill_gates(facts: DeviceFacts, config: MatmulConfig, *, m: int, n: int, k: int) -> float:
    """Estimate the seconds of gates of prefill (:mod:`outrider_triton.products.jit.prefill_gates`). On average, the last
    tiles leave half of the multiprocessors idle.
    """
    sums = m * n + facts.processors * config.block_m * config.block_n
    return 2.0 * sums * k / (_PREFILL_FLOPS_FRACTION * facts.flops)


def estimate_library_gates(facts: DeviceFacts, *, m: int, n: int, k: int) -> float:
    """Estimate the seconds of the library's product of many tokens and a weight of gate and up rows [n, k], and of the
    activation.
    """
    activation_bytes = 2.0 * m * n * 3 / 2  # reads gate and up, writes as much as one of them
    return 2.0 * m * n * k / (_LIBRARY_FLOPS_FRACTION * facts.flops) + activation_bytes / facts.bytes_per_second


def _resident_programs(facts: DeviceFacts, operator: str, config: MatmulConfig, stored: OperandStorage = UNQUANTIZED) -> int:
    """Return the number of programs that fit on a multiprocessor at once."""
    sums = config.block_n * config.block_m * (2 if operator in GATED else 1)
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


def _estimate_unstreamed(
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
    matmul = 2.0 * config.block_m * elements * facts.processors / (_ACHIEVED_FLOPS_FRACTION * facts.flops)
    if config.block_m > MAX_TOKENS_TRITON_GEMM and not stored.convert_instructions:
        matmul /= 2  # the 8-bit rate is twice as high; with fewer tokens no effect was measured
        copy_time = config.block_k * (config.block_n * width + config.block_m * stored.token_bytes) / _COPY_BYTES_PER_S
        serial = max(_TILE_GAP_S, 1.4 * _MEMORY_LATENCY_S / max(config.stages - 1, 1))
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
        parts_time = _ADD_PARTS_S + 8.0 * config.split * m * n / (_CACHE_SPEEDUP * facts.bytes_per_second)
    return waves + parts_time + _LAUNCH_OVERHEAD_S


def estimate_library(facts: DeviceFacts, stored: OperandStorage, *, n: int, k: int) -> float:
    """Estimate the seconds of the library's product of 65 to 128 tokens: gates in 16 bits, or a weight of 8 bits, whose time
    is its bytes, or the columns of a tile one after the other.
    """
    if stored == UNQUANTIZED:
        return _LIBRARY_BYTES_FACTOR * 2 * n * k / facts.bytes_per_second + _LIBRARY_EXTRA_S
    return max(n * k / (_LIBRARY_BANDWIDTH_FRACTION * facts.bytes_per_second), k * _LIBRARY_S_PER_COLUMN) + _LAUNCH_OVERHEAD_S


def _estimate_shares(facts: DeviceFacts, config: MatmulConfig, *, n: int, k: int) -> float:
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
    return _LAUNCH_OVERHEAD_S + _SHARES_S + units_time + shared_time


def _estimate_streamed_nibbles(
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
        program_bytes * facts.processors / (_LONE_PROCESSOR_SPEEDUP * facts.bytes_per_second),
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
            _CACHE_SPEEDUP * facts.bytes_per_second
        )
    start_time = _FIRST_TILE_S * -(-rounds // resident)
    return max(memory, issue_time, serial) + start_time + parts_time + _LAUNCH_OVERHEAD_S
