"""Launches of attention over the cache on an unmeasured device: block sizes that fit, and the number of splits.

A captured graph knows the capacity of the context, not the length of a sequence at replay. The number of splits is a launch
constant, so it is the most that the device can use, and each program takes its share of the actual length: see
:func:`outrider_triton.attention.jit.paged.paged_attention`. A short context in a large capacity leaves programs without work,
which exit at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from outrider.device import ConfigError
from outrider_triton.launch import power_of_two
from outrider_triton.tiles.configs import AttentionConfig
from outrider_triton.tiles.facts import DeviceFacts

_MAX_SPLITS = 16
_PIPELINE_BYTES, _SMALL_PIPELINE_BYTES, _SMALL_PIPELINE_MIN_SPLITS = 96 << 10, 64 << 10, 8
"""Bytes of keys and values in a program's pipeline, so that two programs fit on a multiprocessor.

With 8 or more splits a share is usually one or two blocks, and the smaller pipeline leaves shared memory for that of the
following product.
"""
_MAX_STREAMED_ROWS = 32
"""Maximum rows of a block (new tokens times query heads per key head) for which streaming was measured."""
_MIN_LATENT_BLOCK = 16
_LONG_CONTEXT_TOKENS = 16384
"""Capacity in tokens above which twice as many splits are allowed. Each split costs some time even if it has no tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionHeads:
    """Head shapes of an attention."""

    group: int
    """Number of query heads per key head."""
    kv_heads: int
    size: int
    """Number of elements per head."""
    bytes: int
    """Number of bytes per element."""
    page: int = 0
    """Number of tokens per page; 0 if a copy engine can't read the cache (other dtype than queries, or unaligned)."""


class AttentionLaunch(NamedTuple):
    """A launch of attention: block sizes, splits, warps and pipeline stages; the operand ``config`` of its operators."""

    block_rows: int
    """Number of query rows per block: new tokens times query heads per key head."""
    block_kv: int
    """Number of cached tokens per block."""
    split: int
    warps: int
    stages: int
    streamed: bool = False
    """True if keys and values come through the TMA pipeline, to which ``stages`` then refers."""

    @property
    def can_read_before_wait(self) -> bool:
        """True if the launch reads the settled part of the cache before it waits for the preceding kernel.

        An unsplit, unstreamed launch has many blocks, of which only the first would come earlier.
        """
        return self.split > 1 or self.streamed


_FEW_LATENT_ROWS, _MANY_LATENT_ROWS = AttentionLaunch(16, 32, 1, 4, 3), AttentionLaunch(64, 64, 1, 8, 3)
"""Tiles of attention to latent vectors: measured on one H200 for 20 and 128 heads."""


def attention_bytes(facts: DeviceFacts, heads: AttentionHeads, rows: int, block_kv: int) -> int:
    """Return an upper bound of one program's shared memory in bytes."""
    size = max(power_of_two(heads.size), 16)
    tile, queries = 2 * block_kv * size * heads.bytes, rows * size * heads.bytes
    if facts.warpgroups and rows >= 64 and heads.bytes == 2:
        return 3 * tile + queries + 1024
    return tile + queries + rows * block_kv * heads.bytes + 1024


def fit_attention_tile(facts: DeviceFacts, heads: AttentionHeads, rows: int, block_kv: int) -> tuple[int, int]:
    """Return the largest tile of at most ``rows`` rows and ``block_kv`` cached tokens that fits into shared memory.

    Raises :class:`ConfigError` if the smallest tile of these heads doesn't fit.
    """
    fewest = max(16, power_of_two(heads.group))
    while attention_bytes(facts, heads, rows, block_kv) > facts.shared_bytes and block_kv > 16:
        block_kv //= 2
    while attention_bytes(facts, heads, rows, block_kv) > facts.shared_bytes and rows > fewest:
        rows //= 2
    needed = attention_bytes(facts, heads, rows, block_kv)
    if facts.capability == 0:  # there the queries leave shared memory before the first tile
        queries = rows * max(power_of_two(heads.size), 16) * heads.bytes
        needed = max(needed - queries - 1024, queries)
    if needed > facts.shared_bytes:
        raise ConfigError(
            f"attention of {heads.group} query heads per key head, {heads.size} elements of {heads.bytes} bytes each, needs "
            f"{needed} bytes of shared memory per program; {facts.name or facts.architecture} has {facts.shared_bytes}: "
            "use a dtype of 16 bits, or the backend's option kernels=torch"
        )
    return rows, block_kv


def streamed_attention_bytes(heads: AttentionHeads, rows: int, block_kv: int, stages: int) -> int:
    """Return an upper bound of shared memory in bytes of one program of streamed attention."""
    tiles = stages * (2 * block_kv * heads.size * heads.bytes + 24)
    return tiles + rows * heads.size * heads.bytes + block_kv * rows * heads.bytes + 1536


def can_stream_attention(facts: DeviceFacts, heads: AttentionHeads, rows: int) -> bool:
    """Return True if the copy engine can load keys and values: boxes of one head and 8 or more rows of a page."""
    pages = heads.page >= 8 and power_of_two(heads.page) == heads.page
    return (
        facts.streams_products and pages and heads.bytes == 2 and heads.size in (64, 128, 256) and rows <= _MAX_STREAMED_ROWS
    )


def unsplit_programs(heads: AttentionHeads, rows: int, batch: int, max_query: int) -> int:
    """Return the number of programs of a launch without splits, for the batch's power-of-two bucket."""
    return power_of_two(batch) * heads.kv_heads * -(-max_query // (rows // heads.group))


def derive_attention_launch(
    facts: DeviceFacts, heads: AttentionHeads, *, batch: int, max_query: int, max_kv: int, tuned: AttentionConfig | None
) -> AttentionLaunch:
    """Return the launch for ``batch`` sequences of ``max_query`` new and at most ``max_kv`` cached tokens.

    ``tuned`` is the measured configuration for this number of programs: its blocks are used, and at least its splits.
    """
    rows = max(16, power_of_two(heads.group), min(64, power_of_two(max_query * heads.group)))
    if can_stream_attention(facts, heads, rows) and (tuned is None or tuned.streamed):
        return _streamed_launch(facts, heads, rows, batch=batch, max_query=max_query, max_kv=max_kv, tuned=tuned)
    if tuned and tuned.streamed:
        tuned = None  # measured on a cache with another layout
    block = tuned.block_kv if tuned else 32 if heads.bytes > 2 else 64
    rows, block = fit_attention_tile(facts, heads, rows, block)
    # Two programs per multiprocessor; enough sequences aren't split at all.
    split = _split_count(2 * facts.processors // unsplit_programs(heads, rows, batch, max_query), max_kv, block, tuned)
    stages = tuned.stages if tuned else 2 if heads.bytes > 2 or facts.capability == 0 else 3
    return AttentionLaunch(rows, block, split, tuned.warps if tuned else 4, stages)


def derive_latent_launch(
    facts: DeviceFacts, heads: AttentionHeads, rotated: int, *, batch: int, max_query: int, max_kv: int
) -> AttentionLaunch:
    """Return the launch of attention to latent vectors of ``heads.size`` elements, with keys of ``rotated`` more.

    Each vector is loaded once, for scores and values. A tile has few rows while such tiles leave processors without work.
    """
    launch, busy = _FEW_LATENT_ROWS, 3  # programs of such tiles that share a multiprocessor
    if heads.bytes == 2 and 2 * power_of_two(batch) * -(-max_query * heads.group // launch.block_rows) > facts.processors:
        launch, busy = _MANY_LATENT_ROWS, 1
    programs = power_of_two(batch) * -(-max_query * heads.group // launch.block_rows)
    launch = fit_latent_tile(facts, heads, rotated, launch)
    return launch._replace(split=_split_count(busy * facts.processors // programs, max_kv, launch.block_kv, None))


def exact_latent_launch(facts: DeviceFacts, heads: AttentionHeads, rotated: int) -> AttentionLaunch:
    """Return the launch for all batches of attention in which the sums of each row have one order."""
    largest = _MANY_LATENT_ROWS if heads.bytes == 2 else _FEW_LATENT_ROWS
    return fit_latent_tile(facts, heads, rotated, largest)


def fits_latents(facts: DeviceFacts, heads: AttentionHeads, rotated: int) -> bool:
    """Return True if the smallest tile of attention to latent vectors fits into shared memory."""
    smallest = _FEW_LATENT_ROWS._replace(block_kv=_MIN_LATENT_BLOCK)
    return _latent_bytes(heads, rotated, smallest) <= facts.shared_bytes


def fit_latent_tile(facts: DeviceFacts, heads: AttentionHeads, rotated: int, launch: AttentionLaunch) -> AttentionLaunch:
    """Return ``launch`` with so many cached tokens in a tile that it fits into shared memory, or with few rows."""
    while _latent_bytes(heads, rotated, launch) > facts.shared_bytes and launch.block_kv > _MIN_LATENT_BLOCK:
        launch = launch._replace(block_kv=launch.block_kv // 2)
    if _latent_bytes(heads, rotated, launch) > facts.shared_bytes and launch.block_rows > _FEW_LATENT_ROWS.block_rows:
        return fit_latent_tile(facts, heads, rotated, _FEW_LATENT_ROWS)
    return launch


def _latent_bytes(heads: AttentionHeads, rotated: int, launch: AttentionLaunch) -> int:
    """Return the bytes of shared memory of one program: tiles of vectors but for the one in use, queries, and weights."""
    width = (power_of_two(heads.size) + power_of_two(rotated)) * heads.bytes
    rows, block = launch.block_rows, launch.block_kv
    return ((launch.stages - 1) * block + rows) * width + rows * block * heads.bytes


def _streamed_launch(
    facts: DeviceFacts,
    heads: AttentionHeads,
    rows: int,
    *,
    batch: int,
    max_query: int,
    max_kv: int,
    tuned: AttentionConfig | None,
) -> AttentionLaunch:
    """Return a streamed launch: one program per multiprocessor, whose pipeline keeps all available bytes in flight."""
    block = tuned.block_kv if tuned else 64
    split = _split_count(facts.processors // unsplit_programs(heads, rows, batch, max_query), max_kv, block, tuned)
    budget = _PIPELINE_BYTES if split < _SMALL_PIPELINE_MIN_SPLITS else _SMALL_PIPELINE_BYTES
    stages = tuned.stages if tuned else max(2, budget // (2 * block * heads.size * heads.bytes))
    while streamed_attention_bytes(heads, rows, block, stages) > facts.shared_bytes and stages > 1:
        stages -= 1
    return AttentionLaunch(rows, block, split, 4, stages, streamed=True)


def _split_count(wanted: int, max_kv: int, block: int, tuned: AttentionConfig | None) -> int:
    """Return the larger of ``wanted`` and the measured number of splits, limited by the number of blocks."""
    limit = _MAX_SPLITS if max_kv <= _LONG_CONTEXT_TOKENS else 2 * _MAX_SPLITS
    count = max(min(limit, wanted), tuned.split if tuned else 1)
    return _power_of_two_below(max(1, min(count, max_kv // block)))


def _power_of_two_below(value: int) -> int:
    """Return the largest power of two that isn't above ``value``."""
    return 1 << (value.bit_length() - 1)
