"""How attention over the cache is cut up: blocks that fit, and among how many programs a sequence's tokens are shared out.

A capture knows the capacity of the context and not how long a sequence is when the graph runs. So the number of splits, which
is a constant of the launch, is what the device can use at most, and each program takes its share of what there really is: see
:func:`outrider_triton.jit.attention.paged_attention`. A short context in a large capacity leaves programs without work, which
end at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider_triton.facts import DeviceFacts
from outrider_triton.launch import power_of_two
from outrider_triton.table import AttentionConfig

_MOST_SPLITS = 16
_RING, _SMALL_RING, _SMALL_SHARES = 96 << 10, 64 << 10, 8
"""Bytes of keys and values that a ring holds: two programs fit beside each other. Of so many splits, a share is a block or
two as a rule; what the ring leaves then is there for the one of the product behind.
"""
_RING_ROWS = 32
"""Rows of a block, new tokens by query heads of a key head, up to which the ring was measured and compared."""
_LONG = 16384
"""A capacity beyond which there may be twice as many splits: each costs a little, also where nothing is left for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """What attention computes with: ``group`` query heads a key head, ``size`` numbers a head of ``bytes`` each; ``page``: so
    many tokens, 0 where keys and values don't lie as a copy engine reads them, in the dtype of queries.
    """

    group: int
    kv_heads: int
    size: int
    bytes: int
    page: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCut:
    """A launch: rows and cached tokens of a block, splits, warps, stages, and whether these are of a ring."""

    block_rows: int
    block_kv: int
    split: int
    warps: int
    stages: int
    ring: bool = False

    def as_list(self) -> list[int]:
        """As the operator takes it."""
        return [self.block_rows, self.block_kv, self.split, self.warps, self.stages, int(self.ring)]


def reads_early(config: Sequence[int]) -> bool:
    """Whether a launch that is cut up so reads before its wait what was settled long ago. What isn't split has many blocks,
    of which only the first would come earlier; a ring has room for more.
    """
    return config[2] > 1 or bool(config[5])


def attention_bytes(facts: DeviceFacts, heads: Heads, rows: int, block_kv: int) -> int:
    """Bytes of shared memory of a program, a few too many rather than too few."""
    size = max(power_of_two(heads.size), 16)
    tile, queries = 2 * block_kv * size * heads.bytes, rows * size * heads.bytes
    if facts.warpgroups and rows >= 64 and heads.bytes == 2:
        return 3 * tile + queries + 1024
    return tile + queries + rows * block_kv * heads.bytes + 1024


def ring_bytes(heads: Heads, rows: int, block_kv: int, stages: int) -> int:
    """Bytes of shared memory of a program of :mod:`outrider_triton.jit.attention_ring`, a few too many."""
    tiles = stages * (2 * block_kv * heads.size * heads.bytes + 24)
    return tiles + rows * heads.size * heads.bytes + block_kv * rows * heads.bytes + 1536


def through_ring(facts: DeviceFacts, heads: Heads, rows: int) -> bool:
    """Whether keys and values can come through a ring: boxes of eight rows of a page, or more, and of one head."""
    pages = heads.page >= 8 and power_of_two(heads.page) == heads.page
    return facts.rings and pages and heads.bytes == 2 and heads.size in (64, 128, 256) and rows <= _RING_ROWS


def programs(heads: Heads, rows: int, batch: int, max_query: int) -> int:
    """Of a launch without splits; ``batch`` as its bucket."""
    return power_of_two(batch) * heads.kv_heads * -(-max_query // (rows // heads.group))


def cut(
    facts: DeviceFacts, heads: Heads, *, batch: int, max_query: int, max_kv: int, tuned: AttentionConfig | None
) -> AttentionCut:
    """The launch for ``batch`` sequences of ``max_query`` new and at most ``max_kv`` cached tokens.

    ``tuned``: what was measured for so many programs, whose blocks are taken, and whose splits at least.
    """
    fewest = max(16, power_of_two(heads.group))
    rows = max(fewest, min(64, power_of_two(max_query * heads.group)))
    if through_ring(facts, heads, rows) and (tuned is None or tuned.ring):
        return _ring_cut(facts, heads, rows, batch=batch, max_query=max_query, max_kv=max_kv, tuned=tuned)
    if tuned and tuned.ring:
        tuned = None  # of another cache
    block = tuned.block_kv if tuned else 32 if heads.bytes > 2 else 64
    while attention_bytes(facts, heads, rows, block) > facts.shared_bytes and block > 16:
        block //= 2
    while attention_bytes(facts, heads, rows, block) > facts.shared_bytes and rows > fewest:
        rows //= 2
    # Twice as many programs as there are multiprocessors; where sequences alone are as many, none is split.
    split = _split(2 * facts.processors // programs(heads, rows, batch, max_query), max_kv, block, tuned)
    stages = tuned.stages if tuned else 2 if heads.bytes > 2 or facts.capability == 0 else 3
    return AttentionCut(block_rows=rows, block_kv=block, split=split, warps=tuned.warps if tuned else 4, stages=stages)


def _ring_cut(
    facts: DeviceFacts,
    heads: Heads,
    rows: int,
    *,
    batch: int,
    max_query: int,
    max_kv: int,
    tuned: AttentionConfig | None,
) -> AttentionCut:
    """A program a multiprocessor, where a sequence can be split: its ring keeps as much on its way as there is to be had."""
    block = tuned.block_kv if tuned else 64
    split = _split(facts.processors // programs(heads, rows, batch, max_query), max_kv, block, tuned)
    room = _RING if split < _SMALL_SHARES else _SMALL_RING
    stages = tuned.stages if tuned else max(2, room // (2 * block * heads.size * heads.bytes))
    while ring_bytes(heads, rows, block, stages) > facts.shared_bytes and stages > 1:
        stages -= 1
    return AttentionCut(block_rows=rows, block_kv=block, split=split, warps=4, stages=stages, ring=True)


def _split(wanted: int, max_kv: int, block: int, tuned: AttentionConfig | None) -> int:
    """So many splits as are ``wanted``, or as were measured if these are more, where there are blocks for them."""
    most = _MOST_SPLITS if max_kv <= _LONG else 2 * _MOST_SPLITS
    count = max(min(most, wanted), tuned.split if tuned else 1)
    return _floor(max(1, min(count, max_kv // block)))


def _floor(value: int) -> int:
    """The largest power of two that isn't above ``value``."""
    return 1 << (value.bit_length() - 1)
