"""How matrix products are cut up on a device that nobody has measured: candidates that fit, and an estimate of their time.

Few tokens: the weight is read once, so bytes decide. A cut is good where every multiprocessor has as much of the weight as
any other and enough of it on its way all the time. With more tokens the matrix unit decides, and from :data:`MOST` on the
library takes over. Everything here is arithmetic on :class:`~outrider_triton.facts.DeviceFacts`; what the estimate was held
against is in ``tests/kernels/test_derive.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import replace

from outrider_triton.derive_quantized import (
    ALONE,
    CACHED,
    GAP,
    LATENCY,
    LAUNCH,
    OURS,
    PLAIN,
    PLANE_ROWS,
    REACHED,
    Stored,
    by_steps,
    by_units,
)
from outrider_triton.facts import DeviceFacts
from outrider_triton.launch import power_of_two
from outrider_triton.table import BUCKETS, STREAMED, TALL, MatmulConfig, bucket

MOST = 128
"""More tokens than this are a matrix product for the library. From 65 on they are but for gates and quantised weights, unless
something else was measured.
"""
OPERATORS = ("linear", "linear_parts", "linear_silu_mul", "linear_add", "linear_add_scaled", "scaled_silu_mul", "linear_rope")

_GATED = ("linear_silu_mul", "scaled_silu_mul")
_ADDED = ("linear_add", "linear_add_scaled")
_PAIRS = 32  # of a tile of a ring; outrider_triton.jit.ring says the same
_DIGITS = 4  # tokens that fill the least that the matrix unit takes, in two digits each
_PAIRED = 8  # low or high rows beside each other in one with pairs; likewise
_FEW = 16
"""To so many tokens four bits come through a ring."""
_GROUP = 64  # pairs of a group of four warps with a tall tile; outrider_triton.jit.tall says the same
_RING_COLUMNS = 64  # of a ring's tile at least: 128 bytes, as many as a row of shared memory has in one piece
_TALL_TOKENS = 80 << 10  # bytes of tokens on their way: fewer take longer, 9 % with 48 KB and 37 % with 32 of 128 tokens
_TALL_SCRATCH = 4608  # through which results change from the layout of the matrix unit, and barriers
_AGAIN = 1.2e-7  # for each of more than 32 tokens: a ring of gates reads them again for each tile
_TALL_TIMES = 1.05  # times a tile's bytes or products
_TALL_END = 3e-6  # seconds behind the last bytes: the last products, the activation, and its rows
_TALL_REACHED = 0.9  # share of the matrix units' rate that tall tiles reach
_LIBRARY = 1.12  # times the weight's bytes, and a launch and the activation: gates of 65 to 128 tokens by the library
_LIBRARY_END = 8e-6
_WIDE = 32  # tokens, to which units of 8 bits have 256 columns: what a program does between two units takes longer than those
_THREADS = 1536
_ROOMS = ((184 << 10, 208 << 10, 128 << 10), (208 << 10, 160 << 10, 112 << 10))
"""Bytes of a ring, the likeliest first. The second: of what adds to the residual, and can be filled during attention."""
_TILES = {16: 1.03, 32: 1.015, 64: 1.0, 128: 1.01}
_BOXES = {8: 1.015, 16: 1.005, 32: 1.0}  # small ones are more requests of the copy engine


def choose(
    facts: DeviceFacts, operator: str, *, m: int, n: int, k: int, half: int = 0, stored: Stored = PLAIN
) -> MatmulConfig | None:
    """The configuration for ``m`` tokens and a weight [n, k]; None where the library is the better choice.

    ``operator`` is one of :data:`OPERATORS`; ``half``: half a head's size, for ``linear_rope`` alone. Operands that aren't
    ``stored`` plain: ``linear`` and ``linear_parts``, and through rings alone ``linear_rope`` and ``linear_silu_mul``.
    """
    ranked = rank(facts, operator, m=m, n=n, k=k, half=half, stored=stored)
    if m > OURS and stored == PLAIN:
        ranked = [config for config in ranked if config.descriptor == TALL]
    return ranked[0] if ranked and _wins(facts, operator, ranked[0], m=m, n=n, k=k, stored=stored) else None


def rank(
    facts: DeviceFacts, operator: str, *, m: int, n: int, k: int, half: int = 0, stored: Stored = PLAIN
) -> list[MatmulConfig]:
    """Every candidate that fits, the one that is expected to be fastest first."""
    if not 0 < m <= MOST:
        return []
    size = size_of(m, stored)
    found = candidates(facts, operator, m=size, n=n, k=k, half=half, stored=stored)
    return sorted(found, key=lambda config: estimate(facts, operator, config, m=size, n=n, k=k, stored=stored))


def size_of(m: int, stored: Stored = PLAIN) -> int:
    """For how many tokens the configuration for ``m`` is made: :func:`bucket`'s; for a ring of four bits 4, too."""
    return _DIGITS if stored.ring and stored.made and m <= _DIGITS else bucket(m)


def _wins(facts: DeviceFacts, operator: str, best: MatmulConfig, *, m: int, n: int, k: int, stored: Stored) -> bool:
    """Whether a kernel of ours is expected to be faster than the library's and what comes around it."""
    if operator == "linear_add_scaled" and (k > 2 * n or m > 32):
        return False  # so long a row is better shared out in parts, and their sum normed; so are many
    if m <= OURS or stored != PLAIN:
        return True
    return _by_tiles(facts, best, n=n, k=k) < _LIBRARY * 2 * n * k / facts.bytes_per_second + _LIBRARY_END


# -- candidates ----------------------------------------------------------------------------------------------------


def candidates(
    facts: DeviceFacts, operator: str, *, m: int, n: int, k: int, half: int = 0, stored: Stored = PLAIN
) -> list[MatmulConfig]:
    """Configurations that are worth a try and fit; ``m`` is one of :func:`size_of`."""
    made = [] if stored != PLAIN and operator in _GATED else list(_plain(facts, operator, m, n, stored))
    if facts.rings and m <= OURS and (stored == PLAIN or (stored.ring and not stored.made)):
        made += _rings(facts, operator, m, n, k, half, stored)
    elif facts.rings and m <= _FEW and stored.ring:
        made += _plane_rings(facts, operator, m, n, k, half, stored)
    if facts.rings and m >= OURS and stored == PLAIN and operator == "linear_silu_mul":
        made += _tall(facts, m, n, k)
    return [config for config in dict.fromkeys(made) if shared_bytes(facts, operator, config, stored) <= facts.shared_bytes]


def _plain(facts: DeviceFacts, operator: str, m: int, n: int, stored: Stored) -> Iterator[MatmulConfig]:
    """Those of :mod:`outrider_triton.jit.matmul`, :mod:`outrider_triton.jit.fused`, :mod:`outrider_triton.jit.quantized`."""
    block_m = max(stored.least if facts.capability >= 80 else 16, m)  # NVIDIA's unit takes 8 since then
    if block_m > OURS and stored != PLAIN:
        yield from _many(facts, operator, block_m, n, stored)
        return
    few = block_m <= 32
    tiles = [(16, 256), (32, 128), (32, 256), (64, 64), (64, 128), (64, 256), (128, 64)]
    if not few:
        tiles = [(32, 64), (32, 128), (64, 64), (64, 128), (128, 64)]
    if operator == "linear_rope":
        if stored != PLAIN:
            return  # through rings alone
        tiles = [tile for tile in tiles if tile[0] in (32, 64, 128)]  # both rows of a pair
    elif operator in _ADDED:
        tiles = [tile for tile in tiles if tile[0] >= 32]  # each program leaves a share of the sum of squares
    if stored.weight_bits < 16:  # as many bytes of a row
        tiles = [(rows, columns * wider) for rows, columns in tiles for wider in (16 // stored.weight_bits, 2)]
        tiles += [(128, 256)]
        tiles = [(rows, columns) for rows, columns in tiles if columns >= 256 or not few]
        tiles = [(rows, columns) for rows, columns in dict.fromkeys(tiles) if columns % stored.at_once(columns) == 0]
    ahead = _ahead(facts, n, stored)
    rows = n // 2 if operator in (*_GATED, "linear_rope") else n
    for (block_n, block_k), split, stages in itertools.product(tiles, _splits(operator, stored), (4, 3, 5, 2)):
        most = block_n // 2 if operator == "linear_rope" else block_n
        even = {-(-rows * split // (facts.processors * waves)) for waves in (1, 2, 3, 4)}
        shared = {0} | {each for each in (-(-each // 8) * 8 for each in even) if most // 2 - (stored != PLAIN) < each < most}
        weight_rows = block_n * (2 if operator in _GATED else 1)
        warps = 8 if weight_rows * block_m > 4096 else 4
        if stored != PLAIN:  # each warp has rows of its own, 16 or more: as many as its matrix unit takes
            warps = min(warps, block_n // 16)
        for each in sorted(shared):
            yield MatmulConfig(block_m, block_n, block_k, split, warps, stages, ahead, 0, each)


def _many(facts: DeviceFacts, operator: str, m: int, n: int, stored: Stored) -> Iterator[MatmulConfig]:
    """Of 65 to 128 tokens and a quantised weight: tiles that were measured. Where scales of groups meet the sums, there are
    two sums of each number.
    """
    if operator not in ("linear", "linear_parts"):
        return
    cuts = [(64, 128, 4, (5, 4, 3, 2)), (64, 256, 4, (3, 2))]
    if stored.made or not stored.columns:
        cuts.insert(0, (128, 128, 8, (4, 3, 2)))
    ahead, splits, found = _ahead(facts, n, stored), _splits(operator, stored), []
    for (rows, columns, warps, depths), split in itertools.product(cuts, splits):
        deep = [MatmulConfig(m, rows, columns, split, warps, stages, ahead, 0, 0) for stages in depths]
        fit = [cut for cut in deep if shared_bytes(facts, operator, cut, stored) <= facts.shared_bytes]
        if columns % stored.at_once(columns) == 0:
            found += fit[:1]
    # A device may have too little shared memory for all of them.
    small = itertools.product((64, 32), splits)
    yield from found or (MatmulConfig(m, rows, 64, split, rows // 16, 2, ahead, 0, 0) for rows, split in small)


def _ahead(facts: DeviceFacts, n: int, stored: Stored) -> int:
    """Columns of a weight that are asked for ahead of the kernel before."""
    times = 1
    if stored != PLAIN:  # what comes while small kernels run ahead; a ring would hold as much
        times = max(1, round(min(GAP * facts.bytes_per_second, facts.l2_bytes / 2) / (512 * n)))
    return 256 * times if facts.pdl else 0


def _splits(operator: str, stored: Stored = PLAIN) -> tuple[int, ...]:
    most = 8 if stored == PLAIN else 4  # of fewer bytes, parts weigh more
    return tuple(split for split in (1, 2, 4, 8) if split <= most) if operator == "linear_parts" else (1,)


def _rings(facts: DeviceFacts, operator: str, m: int, n: int, k: int, half: int, stored: Stored) -> Iterator[MatmulConfig]:
    """Those of :mod:`outrider_triton.jit.streamed`: shares of the pairs of rows, in boxes that divide what they lie in.

    The unit adds e4m3 up with few bits, so that these have 128 columns at a time; and no parts.
    """
    folded = operator == "linear" or operator in _ADDED
    plain = stored == PLAIN
    for waves, box, split in itertools.product((1, 2), (32, 16, 8), _splits(operator) if plain else (1,)):
        if operator == "linear_parts" and split > 1:
            each, fold = _PAIRS, 1
        else:
            pairs = n if folded or operator == "linear_parts" else n // 2
            fold = 2 if folded or operator == "linear_parts" else 1
            each = -(-pairs // (facts.processors * waves * box)) * box
        inside = {"linear_rope": half, "linear_silu_mul": n // 2, "scaled_silu_mul": n // 2}.get(operator, _PAIRS)
        if inside % box or (plain and fold == 2 and each > _PAIRS):
            continue
        rooms = (facts.processor_shared // 2 - 1024,) if waves > 1 else _ROOMS[operator == "linear_add_scaled"]
        wide = 256 if m <= _WIDE and k % (256 * split * fold) == 0 else 128
        for room, block_k in itertools.product(rooms, (128, 256) if plain else (wide,)):
            width = fold * max(8, m)
            stage = (2 * _PAIRS + width) * block_k * stored.token_bytes + (0 if plain else 24)  # and its barriers
            stages = (min(room, facts.shared_bytes) - 8 * _PAIRS * width - 1024) // stage
            if stages > 1 and k % (split * block_k * fold) == 0:
                yield MatmulConfig(max(8, m), box, block_k, split, 4, stages, 0, STREAMED, each)


def _tall(facts: DeviceFacts, m: int, n: int, k: int) -> Iterator[MatmulConfig]:
    """Those of :mod:`outrider_triton.jit.tall`: a program a multiprocessor, of one group of warps or two."""
    pairs, row = n // 2, _RING_COLUMNS * 2
    if k % _RING_COLUMNS or pairs % 8:
        return
    each = -(-pairs // (facts.processors * 8)) * 8
    box = next(rows for rows in (64, 32, 16, 8) if each % rows == 0 and pairs % rows == 0)
    deep = _TALL_TOKENS // (m * row)
    for groups in (2, 1):
        stages = (facts.shared_bytes - _TALL_SCRATCH - deep * m * row) // (2 * groups * _GROUP * row)
        if stages > 1:
            yield MatmulConfig(m, box, _RING_COLUMNS, 1, 4 * groups, stages, deep, TALL, each)


def _plane_rings(
    facts: DeviceFacts, operator: str, m: int, n: int, k: int, half: int, stored: Stored
) -> Iterator[MatmulConfig]:
    """Those of :mod:`outrider_triton.jit.planes_ring`: so many programs a multiprocessor, one or two groups of warps each."""
    if operator in _GATED or (operator == "linear_rope" and half % _PAIRED):
        return
    rows_of = _rows_of(operator)
    cuts = itertools.product(
        (1, 2, 3), _splits(operator, stored), (16, 8) if rows_of == 1 else (_PAIRED,), (4, 8), (512, 256)
    )
    for waves, split, box, warps, wide in cuts:
        each = -(-n * split // (facts.processors * waves * box * rows_of)) * box
        steps, odd = divmod(k, split * wide)
        groups = warps // 4
        if odd or steps < groups or (steps % groups and rows_of * each > PLANE_ROWS):
            continue
        units = -(-rows_of * each // PLANE_ROWS) * steps
        bare = MatmulConfig(max(_DIGITS, m), box, steps * wide, split, warps, 0, wide, STREAMED, each)
        room = min(facts.shared_bytes, facts.processor_shared // waves - 1024) - shared_bytes(facts, operator, bare, stored)
        stages = min(max(units, 2), room // (PLANE_ROWS * wide // 2 + 32)) // groups * groups  # a place belongs to one group
        if stages >= min(4, units):
            yield replace(bare, stages=stages)


def _rows_of(operator: str) -> int:
    """Rows of four bits for each of what a program has: what is turned comes in pairs."""
    return 2 if operator == "linear_rope" else 1


def _plane_ring_bytes(operator: str, config: MatmulConfig) -> int:
    """Tiles, tokens, scales in float32, sums of groups of tokens, those of the second group of warps, barriers."""
    wide, tiles = config.ahead, -(-_rows_of(operator) * config.each // PLANE_ROWS)
    scales = power_of_two(tiles) * power_of_two(config.block_k // 128) * PLANE_ROWS * 4
    sums = PLANE_ROWS * config.block_m * 4 if config.warps > 4 else 0
    offsets = power_of_two(config.block_k // 128) * config.block_m * 4
    return (
        config.stages * (PLANE_ROWS * wide // 2 + 32)
        + config.block_k // wide * (config.block_m * wide * 2 + 16)
        + scales
        + offsets
        + sums
        + 512
    )


def fold(operator: str, config: MatmulConfig) -> int:
    """Rows of a ring that one row of the weight is multiplied as: the halves of its columns, where a product ends it."""
    return 2 if operator in ("linear", *_ADDED) or (operator == "linear_parts" and config.split == 1) else 1


def whole_boxes(config: MatmulConfig, *, k: int, folded: int, inside: int) -> bool:
    """Whether a ring of that cut brings whole tiles of ``k`` columns and whole boxes of rows alone, in two stages or more.

    ``folded``: as :func:`fold` says. ``inside``: rows that no box may straddle the end of, half a head or a gate.
    """
    box, tile = config.block_n, _GROUP if config.descriptor == TALL else _PAIRS
    rest = k % (config.split * config.block_k * folded), inside % box, tile % box, config.each % box
    return rest == (0, 0, 0, 0) and config.stages > 1


def brings(operator: str, config: MatmulConfig, *, n: int, k: int) -> bool:
    """Whether a ring of that cut brings a weight [n, k] for ``operator``, but for what half a head asks."""
    inside = n // 2 if operator in _GATED else _PAIRS
    able = whole_boxes(config, k=k, folded=fold(operator, config), inside=inside)
    able = able and config.block_n >= 8 and 8 <= config.block_m <= MOST and config.block_k >= _RING_COLUMNS
    if config.descriptor == TALL:
        return able and operator == "linear_silu_mul" and config.warps in (4, 8) and config.split == 1 and config.ahead > 1
    return able and config.warps == 4


def shared_bytes(facts: DeviceFacts, operator: str, config: MatmulConfig, stored: Stored = PLAIN) -> int:
    """Bytes of shared memory of a program, a few too many rather than too few."""
    tokens, columns = config.block_m, config.block_k
    if config.descriptor == TALL:
        return 2 * columns * (2 * _GROUP * config.warps // 4 * config.stages + tokens * config.ahead) + _TALL_SCRATCH
    if config.descriptor == STREAMED and stored.made:
        return _plane_ring_bytes(operator, config)
    if config.descriptor == STREAMED:
        width = tokens * fold(operator, config)
        # Barriers are padded, and the sums of squares that a scaled product reads are added up through shared memory.
        scratch = 1152 if operator in ("scaled_silu_mul", "linear_rope") else 640
        held = (2 * _PAIRS + width) * columns * stored.token_bytes
        return config.stages * (held + 24) + 2 * _PAIRS * width * 4 + scratch
    rows = config.block_n * (2 if operator in _GATED else 1)
    # Where the matrix unit reads shared memory itself, a tile is still being read when the next one is asked for. It doesn't
    # for so few tokens.
    reads = facts.warpgroups and config.block_n >= 64 and tokens > 8
    tiles = config.stages if reads else max(config.stages - 1, 1)
    result = config.block_n * tokens * 4 * (2 if operator in _GATED else 1)
    held = tiles * (rows * stored.weight_bits // 8 + tokens * stored.token_bytes) * columns
    if stored.made and (stored.again or tokens > 8):
        held += (rows + tokens) * stored.at_once(columns) * 2
    return max(held, result) + (512 if tokens <= OURS else 1024)


# -- the estimate --------------------------------------------------------------------------------------------------


def estimate(
    facts: DeviceFacts,
    operator: str,
    config: MatmulConfig,
    *,
    m: int,
    n: int,
    k: int,
    stored: Stored = PLAIN,
    gap: float = GAP,
) -> float:
    """Seconds that a product is expected to take, for ranking: bytes of the busiest multiprocessor, and what is in flight.

    ``gap``: seconds between the product before and this one, in which a ring of quantised weights fills; 0 where products are
    measured one behind the other.
    """
    if config.descriptor == TALL:
        return _by_tiles(facts, config, n=n, k=k)
    resident = _resident(facts, operator, config, stored)
    if not resident:
        return float("inf")
    if stored != PLAIN and config.descriptor != STREAMED:
        return by_steps(facts, config, resident, m=m, n=n, k=k, stored=stored)
    if stored.made:
        whole = replace(config, each=_rows_of(operator) * config.each)
        return by_units(facts, whole, resident, m=m, n=n, k=k, gap=gap)
    streamed = config.descriptor == STREAMED
    paired = operator in (*_GATED, "linear_rope")
    folded = streamed and not paired and config.split == 1
    rows_of = 2 if paired or (streamed and not folded) else 1  # rows of the weight for each of ``each``
    pairs = -(-n // rows_of)
    tall = config.block_n // 2 if operator == "linear_rope" and not streamed else config.block_n
    each = min(config.each or tall, pairs)
    programs = -(-pairs // each) * config.split * -(-m // config.block_m)
    columns = -(-k // config.split)
    if not streamed:
        columns = -(-columns // config.block_k) * config.block_k
    rounds = -(-programs // facts.processors)
    share = facts.bytes_per_second / facts.processors
    width = stored.weight_bits / 8
    own = each * rows_of * columns * width
    loaded = (config.block_n if not streamed else 2 * _PAIRS) * (2 if operator in _GATED and not streamed else 1)
    # All that a ring holds is on its way; otherwise one tile is being multiplied, and another half of the time waited for.
    flying = (
        min(resident, rounds) * (config.stages - (0 if streamed else 1.5)) * min(loaded, 2 * each) * config.block_k * width
    )
    hidden = min(1.0, flying / (1.4 * LATENCY * share))
    memory = max(programs * own / facts.bytes_per_second, rounds * own / (ALONE * share)) / hidden
    if stored != PLAIN:  # small kernels run ahead of it, and its ring fills meanwhile
        memory -= min(programs / rounds * flying / facts.bytes_per_second, gap, memory)
    tokens = programs * min(m, config.block_m) * columns * stored.token_bytes
    cache = (programs * own + tokens) / (CACHED * facts.bytes_per_second)
    waste = max(1.0, loaded / (each * rows_of)) if not streamed else 2.0 if folded else 1.0
    tile = 1.0 if streamed else 1 + 8 * (1 / loaded + 1 / config.block_m)  # what a small one reads again
    unit = 2.0 * config.block_m * n * k * waste * tile * -(-m // config.block_m) / (REACHED * facts.flops)
    behind = 0.0
    if config.split > 1:  # parts are written, and read by the norm
        behind = 8.0 * config.split * m * n / (CACHED * facts.bytes_per_second) + 0.7e-6 * config.split
    elif operator == "linear_parts":
        behind = 4.0 * m * n / (CACHED * facts.bytes_per_second)
    # A program that comes after another on the same multiprocessor begins with nothing on its way, unless two fit beside.
    starts = 0.1e-6 * (-(-rounds // resident) - 1) + (0.1e-6 if resident == 1 and rounds > 1 else 0.0)
    if streamed and operator in _GATED and m > 32:
        starts += _AGAIN * (m - 32)
    even = k % (config.split * config.block_k) == 0
    # Pointers to 128 bytes of a row are more requests than those to 256.
    plain = (1.03 if even else 1.08) * (1.02 if config.block_k * width < 256 else 1.0)
    slower = _BOXES[config.block_n] if streamed else plain * _TILES[config.block_n]
    return (max(memory, cache, unit) + starts + behind) * slower + LAUNCH


def _by_tiles(facts: DeviceFacts, config: MatmulConfig, *, n: int, k: int) -> float:
    """Seconds of gates in tall tiles: of each tile its bytes or its products, which are those of a full one, and an end."""
    tall = _GROUP * config.warps // 4
    programs, rest = -(-n // (2 * config.each)), config.each % tall
    rounds = -(-programs // facts.processors)
    unit = 4.0 * tall * config.block_m * k * facts.processors / (_TALL_REACHED * facts.flops)
    row = 4.0 * k * min(programs, facts.processors) / facts.bytes_per_second  # a pair of every program
    tiles = config.each // tall * max(tall * row, unit) + (max(rest * row, unit) if rest else 0.0)
    return _TALL_TIMES * rounds * tiles + _TALL_END + LAUNCH


def _resident(facts: DeviceFacts, operator: str, config: MatmulConfig, stored: Stored = PLAIN) -> int:
    """Programs that a multiprocessor has room for."""
    sums = config.block_n * config.block_m * (2 if operator in _GATED else 1)
    threads = config.warps * facts.warp + (facts.warp if config.descriptor == STREAMED else 0)
    registers = max(64 * threads, sums + 48 * threads)
    if config.descriptor == STREAMED and stored.made:  # the warp that brings has room for four
        threads = (config.warps + 4) * facts.warp
        registers = (96 if config.warps > 4 and config.ahead > 256 else 80) * threads
    return min(
        facts.processor_shared // (shared_bytes(facts, operator, config, stored) + 1024),
        _THREADS // threads,
        facts.registers // registers,
        8,
    )


def every(
    facts: DeviceFacts,
    operator: str,
    *,
    n: int,
    k: int,
    half: int = 0,
    but: Collection[int] = (),
    stored: Stored = PLAIN,
) -> tuple[MatmulConfig, ...]:
    """Each configuration that a weight has for some number of tokens; not those of the buckets in ``but``."""
    sizes = {size_of(size, stored) for size in (1, *BUCKETS)}
    found = (choose(facts, operator, m=m, n=n, k=k, half=half, stored=stored) for m in sorted(sizes) if m not in but)
    return tuple(dict.fromkeys(config for config in found if config is not None))
