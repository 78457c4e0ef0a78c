"""How products are expected to go whose operands aren't stored in 16 bits: what they're stored as, and seconds.

Few bytes take so little time that what a program does between two tiles decides. ``docs/evidence`` has what the constants
are held against: 2026-11-23-quantized-kernels.md, and of more than 64 tokens 2026-11-28-many-tokens.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider_triton.facts import DeviceFacts
from outrider_triton.table import MatmulConfig

LATENCY = 1.0e-6  # seconds until a byte comes while memory is busy
LAUNCH = 2.0e-6  # seconds of a kernel beside its bytes
ALONE = 1.15  # how much more than its share of the bandwidth a multiprocessor can have while others have nothing to do
CACHED = 2.2  # how much faster than memory the second-level cache is
REACHED = 0.52  # share of the matrix units' rate that products reach whose tile is large
GAP = 4e-6  # seconds between two products in a layer, about
OURS = 64
"""To so many tokens our products win wherever they were measured. To twice as many plain ones do here and there, by a
twentieth; quantised ones do nearly everywhere, and by far where the library would have the weight in 16 bits.
"""
PLANE_ROWS = 64  # rows of a tile of four bits; outrider_triton.jit.planes_ring says the same
# Seconds on an H200.
_BEGIN = 0.65e-6  # until a program's first tile is there
_STEP = 0.1e-6  # between two tiles
_MEET = 0.13e-6  # for each warp: all of a program wait for each other between two tiles
_FLIGHT = 4.5e-6  # from asking for a tile to its being there, while all ask
_COPIED = 50e9  # bytes a second that a multiprocessor's threads bring of both operands, where tokens are as many as rows
_MADE = 1.6e-10  # of one warp: for each instruction that each number takes
_ISSUE = 7e-12  # of a multiprocessor: for each number, whoever multiplies it
_ISSUE_COLUMN = 0.6e-9  # of a multiprocessor, for 64 rows of a ring: about an instruction of each of four warps, counted
_ALONE_COLUMN = 0.8e-9  # of a group of four warps for them, and until it begins with a unit: reasoned
_UNIT_BEGIN = 0.1e-6
_UNIT_TOKEN = 8e-9  # of a multiprocessor: for each unit and token, a grain, and digits that are added up
_PARTS = 1.0e-6  # until parts are added up


@dataclass(frozen=True, slots=True)
class Stored:
    """How operands of a product are stored: bits of a number of the weight, bytes of one of the tokens.

    ``columns``: so many are multiplied at a time at most, since each so many have a scale of their own; 0: as many as a tile
    has. ``made``: instructions for each number of the weight, of what makes it one that the matrix unit takes; 0: the unit
    takes what is stored. ``again``: whether what was made lies in shared memory, too. ``least``: tokens of the smallest tile.
    """

    weight_bits: int = 16
    token_bytes: int = 2
    columns: int = 0
    made: float = 0.0
    again: bool = False
    least: int = 16
    ring: bool = False

    def at_once(self, columns: int) -> int:
        """Of a tile of so many columns, those that are multiplied at a time."""
        return min(self.columns, columns) if self.columns else columns


PLAIN = Stored()


def by_steps(facts: DeviceFacts, config: MatmulConfig, resident: int, *, m: int, n: int, k: int, stored: Stored) -> float:
    """Seconds of a product whose weight isn't stored plain. Few bytes take so little time that what a program does between
    two tiles decides: as many programs as a multiprocessor has room for go through their tiles at a time, then the next ones.
    """
    rows, width = min(config.each or config.block_n, n), stored.weight_bits / 8
    programs = -(-n // rows) * config.split * -(-m // config.block_m)
    steps = -(-k // (config.split * config.block_k))
    numbers = config.block_n * config.block_k
    tile = rows * config.block_k * width
    bandwidth = facts.bytes_per_second / facts.processors
    unit = 2.0 * config.block_m * numbers * facts.processors / (REACHED * facts.flops)
    if config.block_m > OURS and not stored.made:
        unit /= 2  # of 8 bits the unit takes twice as many; among fewer tokens nobody has seen that matter
        copied = config.block_k * (config.block_n * width + config.block_m * stored.token_bytes) / _COPIED
        alone = max(_STEP, 1.4 * LATENCY / max(config.stages - 1, 1))
    else:
        copied = 0.0
        made = _STEP + config.warps * _MEET + _MADE * stored.made * numbers / config.warps
        alone = max(made, _FLIGHT / max(config.stages - 1, 1))

    def wave(count: int) -> float:
        return _BEGIN + steps * max(alone, count * max(_ISSUE * numbers, unit, copied, tile / bandwidth))

    full, rest = divmod(-(-programs // facts.processors), resident)
    passed = max(full * wave(resident) + (wave(rest) if rest else 0.0), n * k * width / facts.bytes_per_second)
    behind = 0.0
    if config.split > 1:  # parts are written, and read by the norm
        behind = _PARTS + 8.0 * config.split * m * n / (CACHED * facts.bytes_per_second)
    return passed + behind + LAUNCH


def by_units(facts: DeviceFacts, config: MatmulConfig, resident: int, *, m: int, n: int, k: int, gap: float) -> float:
    """Seconds of a product whose four bits come through a ring: the busiest multiprocessor's bytes, or its instructions, or
    what a group of four warps takes for one unit after the other.
    """
    programs = -(-n // config.each) * config.split
    rounds = -(-programs // facts.processors)
    units = -(-config.each // PLANE_ROWS) * (config.block_k // config.ahead)
    own = rounds * config.each * config.block_k / 2
    memory = max(n * k / 2 / facts.bytes_per_second, own * facts.processors / (ALONE * facts.bytes_per_second))
    # What rings hold comes while the small kernels ahead run: a tile that isn't full holds less of it.
    held = min(rounds, resident) * config.stages * min(config.each, PLANE_ROWS) * config.ahead / 2
    memory -= min(held * facts.processors / facts.bytes_per_second, gap, memory)
    groups = config.warps // 4
    issue = rounds * units * (config.ahead * _ISSUE_COLUMN + config.block_m * _UNIT_TOKEN)
    alone = -(-rounds // resident) * -(-units // groups) * (_UNIT_BEGIN + config.ahead * _ALONE_COLUMN)
    behind = 0.0
    if config.split > 1:  # parts are written, and read by the norm
        behind = _PARTS * (config.split - 1) / 4 + 8.0 * config.split * m * n / (CACHED * facts.bytes_per_second)
    begins = _BEGIN * -(-rounds // resident)
    return max(memory, issue, alone) + begins + behind + LAUNCH
