"""From the scheduler's batch to device tensors: one pinned buffer, one copy an iteration."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, Backend, Stream
from outrider.engine.requests.batch import Batch, PrefillChunk
from outrider.model import RopeConfig
from outrider.speculative.seq_lens import HostSeqLens


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """Device views of a ragged prefill batch: T tokens of S sequences.

    ``tokens``, ``following`` (the token after each; unknown after a final chunk, where it's 0), ``positions``, ``slots``
    int64 [T]; ``rows``, ``last`` (index into T), ``ends`` (position after the last) int64 [S]; ``final`` and
    ``continues`` (the request's earlier tokens came in a chunk before, in no other way) bool [S].

    ``rope_positions``: ``positions`` as the model's rope takes them, [3, T] with axes. ``prompt_lens`` int64 [T] of each
    token's prompt, for a rope that depends on it.

    Where a graph is replayed, T and S are those of a :class:`PrefillBucket`. Padding sequences have row 0, no tokens and no
    context; ``last`` and ``final`` are those of the first sequence, so that nothing is scattered to a token of its own.
    ``owner`` int64 [S] is each sequence's own number, and 0 for padding; None without a graph. ``host_query_start`` is None
    with one: the host knows bounds alone.
    """

    tokens: Tensor
    following: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    last: Tensor
    ends: Tensor
    final: Tensor
    continues: Tensor
    query_start: Tensor
    host_query_start: tuple[int, ...] | None
    max_query: int
    max_kv: int
    rope_positions: Tensor
    prompt_lens: Tensor | None
    owner: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PrefillBucket:
    """What chunks of prompts are padded to, where their forward is replayed from a graph: tokens and sequences in all."""

    tokens: int
    sequences: int


def float_bits(value: float) -> int:
    """The bits of ``value`` as float32, as a whole number."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


_COPIED = 1 << 14
"""Numbers of one copy on the host: torch spreads larger ones over threads, whose wake-up takes longer than the copy."""


class Staging:
    """A pinned ring on the host, a ring of the same size on the device, and one buffer there that everything reads, all
    int64. So a copy from the host comes while the iteration before still reads that buffer, and only what lies on the device
    is left to be moved when that is over.

    ``entries``: of each ring. One is filled again only after the host has read the results of the iteration that it was
    filled for, so that nothing reads it any more.
    """

    def __init__(self, backend: Backend, *, entries: int, capacity: int, max_requests: int) -> None:
        self._backend = backend
        self.max_requests = max_requests
        self._ring = [backend.empty_pinned(f"staging[{entry}]", (capacity,), torch.int64) for entry in range(entries)]
        self._uploaded = [torch.zeros(capacity, dtype=torch.int64, device=backend.device) for _ in range(entries)]
        self._device = torch.zeros(capacity, dtype=torch.int64, device=backend.device)
        self._there: Packer | None = None

    def holds(self, packer: Packer) -> bool:
        """Host: whether what everything reads is what was packed already, once the work that was enqueued is done. Then there
        is nothing to upload or to move.
        """
        return self._there is not None and self._there.same(packer)

    def forget(self) -> None:
        """Host: what everything reads may be anything. What was enqueued may have failed, of which only the device knows."""
        self._there = None

    def upload(self, entry: int, values: Tensor, stream: Stream) -> None:
        """Host: fill the entry, whose last iteration's results have been read; then copy it to the device on ``stream``."""
        pinned = self._ring[entry]
        pinned.renew()
        count = values.shape[0]
        for start in range(0, count, _COPIED):
            pinned.tensor[start : min(start + _COPIED, count)].copy_(values[start : start + _COPIED])
        self._backend.copy_async(self._uploaded[entry][:count], pinned.tensor[:count], stream=stream)

    def unpack(self, entry: int, packer: Packer) -> None:
        """Move what was packed, and uploaded to an entry, to where it's read, in the caller's scope, which comes behind the
        upload and the last reader.
        """
        count = packer.packed.shape[0]
        self._there = None
        self._device[:count].copy_(self._uploaded[entry][:count])
        self._there = packer

    def place(self, packer: Packer) -> None:
        """Write what was packed where everything reads it, in the caller's scope."""
        self._there = None
        self._device[: packer.packed.shape[0]].copy_(packer.packed)

    def clear(self, stream: Stream) -> None:
        """No request: every row is 0, so that what graphs do when they're captured concerns none. On ``stream``; waits for
        it, since uploads come on others.
        """
        self._there = None
        with self._backend.on(stream):
            self._device.zero_()
        stream.synchronize()

    def decode_rows(self, count: int) -> Tensor:
        """Rows of the first ``count`` decoding requests, int64 [count], at an address that never changes; behind the last
        request they're 0.
        """
        return self._device[:count]

    def view(self, segment: tuple[int, int]) -> Tensor:
        """The device view of one segment."""
        start, end = segment
        return self._device[start:end]


_SEGMENTS = 40
"""More than one batch packs."""


class Packer:
    """Concatenates named segments of whole numbers. Each begins at an even index, so at an address that is a multiple of 16
    bytes: kernels are compiled for such addresses apart, and would be again for others.
    """

    def __init__(self) -> None:
        self._values = array("q")
        self._segments: dict[str, tuple[int, int]] = {}

    def add(self, name: str, values: Iterable[int]) -> None:
        """Append a segment. Raises OverflowError for a number beyond 64 bits."""
        if len(self._values) % 2:
            self._values.append(0)
        start = len(self._values)
        self._values.extend(values)
        self._segments[name] = (start, len(self._values))

    @property
    def packed(self) -> Tensor:
        """All values, int64 on the host. It shares their memory, so nothing can be added while it exists."""
        return torch.frombuffer(self._values, dtype=torch.int64)

    def same(self, other: Packer) -> bool:
        """Whether both have the same values, whatever their segments are called."""
        return self._values == other._values

    @property
    def segments(self) -> Mapping[str, tuple[int, int]]:
        """Start and end of each segment."""
        return self._segments


def staging_capacity(*, requests: int, pages: int, prefill_chunk: int) -> int:
    """The most values that one batch packs."""
    return 8 * prefill_chunk + 12 * requests + 1 + 2 * requests * pages + _SEGMENTS


def pack(
    batch: Batch,
    *,
    page_size: int,
    table_width: int,
    max_requests: int,
    rope: RopeConfig,
    bucket: PrefillBucket | None = None,
) -> Packer:
    """Everything that the device must know of a batch. The decoding rows come first, as many as there can be, padded with
    the reserved row 0, and then the chunks of prompts, padded to their ``bucket`` if they have one: what a graph reads lies
    at addresses that never change.
    """
    packer = Packer()
    packer.add("decode_rows", [*(r.row for r in batch.decode), *[0] * (max_requests - len(batch.decode))])
    _pack_prefill(packer, batch, page_size, rope, bucket)
    packer.add("admitted", [r.row for r in batch.admitted])
    packer.add("temperature", [float_bits(r.params.temperature) for r in batch.admitted])
    packer.add("seeds", [r.params.seed for r in batch.admitted])
    packer.add("mrope_position_deltas", [r.mrope_position_delta for r in batch.admitted])
    packer.add("entries", [row * table_width + index for row, index, _ in batch.table_updates])
    packer.add("pages", [page for _, _, page in batch.table_updates])
    return packer


def _pack_prefill(packer: Packer, batch: Batch, page_size: int, rope: RopeConfig, bucket: PrefillBucket | None) -> None:
    """The chunks of ``batch``; each segment of sequences, then each of tokens."""
    chunks = batch.prefill
    starts = list(accumulate((chunk.end - chunk.start for chunk in chunks), initial=0))
    more = 0 if bucket is None else bucket.sequences - len(chunks)
    last, final = [start - 1 for start in starts[1:]], [int(chunk.final) for chunk in chunks]
    packer.add("query_start", [*starts, *[starts[-1]] * more])
    packer.add("prefill_rows", [*(chunk.request.row for chunk in chunks), *[0] * more])
    packer.add("last", [*last, *(last[:1] or [0]) * more])
    packer.add("ends", [*(chunk.end for chunk in chunks), *[0] * more])
    packer.add("final", [*final, *(final[:1] or [0]) * more])
    packer.add("continues", [*(int(chunk.start > chunk.request.prefill_start) for chunk in chunks), *[0] * more])
    if bucket is not None:
        packer.add("owner", [*range(len(chunks)), *[0] * more])
    padding = 0 if bucket is None else bucket.tokens - starts[-1]
    tokens, following, positions, slots = (array("q") for _ in range(4))
    for chunk in chunks:
        context = array("q", chunk.request.context[chunk.start : chunk.end + 1])
        tokens.extend(context[: chunk.end - chunk.start])
        following.extend(context[1:])
        if len(following) < len(tokens):
            following.append(0)
        positions.extend(_counted(chunk.start, chunk.end))
        slots.extend(_slots(chunk, page_size))
    for name, values in (("tokens", tokens), ("following", following), ("positions", positions), ("slots", slots)):
        values.extend([0] * padding)
        packer.add(name, values)
    if rope.sections:
        packer.add("rope_positions", [place for axis in range(3) for chunk in chunks for place in _places(chunk, axis)])
    if rope.kind == "dynamic":
        lens = [[len(chunk.request.prompt)] * (chunk.end - chunk.start) for chunk in chunks]
        packer.add("prompt_lens", [length for each in lens for length in each])


def _counted(start: int, end: int) -> array[int]:
    """The numbers from ``start`` to before ``end``."""
    counted = array("q", bytes(8 * (end - start)))
    places = torch.frombuffer(counted, dtype=torch.int64)
    torch.arange(start, end, out=places, device=places.device)  # whatever a caller's default is
    return counted


def _slots(chunk: PrefillChunk, page_size: int) -> array[int]:
    """The cache slots of its tokens."""
    first, behind = chunk.start // page_size, -(-chunk.end // page_size)
    slots = array("q", bytes(8 * (behind - first) * page_size))
    places = torch.frombuffer(slots, dtype=torch.int64).view(-1, page_size)
    pages = places.new_tensor(chunk.request.pages[first:behind]).unsqueeze(1)
    torch.add(torch.arange(page_size, device=places.device), pages, alpha=page_size, out=places)
    return slots[chunk.start - first * page_size : chunk.end - first * page_size]


def _places(chunk: PrefillChunk, axis: int) -> Sequence[int]:
    media = chunk.request.media
    return range(chunk.start, chunk.end) if media is None else media.positions(axis, chunk.start, chunk.end)


def prefill_inputs(
    chunks: Sequence[PrefillChunk], staging: Staging, segments: Mapping[str, tuple[int, int]], *, most: int | None = None
) -> PrefillInputs:
    """Views of the staged prefill; the casts run in the caller's scope. ``most``: cached tokens that a sequence may have,
    where the views are those of a bucket for a graph, which serves other chunks than these.
    """
    axes, prompt_lens = segments.get("rope_positions"), segments.get("prompt_lens")
    tokens, positions = staging.view(segments["tokens"]), staging.view(segments["positions"])
    host = tuple(accumulate((chunk.end - chunk.start for chunk in chunks), initial=0))
    return PrefillInputs(
        tokens=tokens,
        following=staging.view(segments["following"]),
        positions=positions,
        slots=staging.view(segments["slots"]),
        rows=staging.view(segments["prefill_rows"]),
        last=staging.view(segments["last"]),
        ends=staging.view(segments["ends"]),
        final=staging.view(segments["final"]) > 0,
        continues=staging.view(segments["continues"]) > 0,
        query_start=staging.view(segments["query_start"]).to(torch.int32),
        host_query_start=host if most is None else None,
        max_query=max(chunk.end - chunk.start for chunk in chunks) if most is None else tokens.shape[0],
        max_kv=max(chunk.end for chunk in chunks) if most is None else most,
        rope_positions=positions if axes is None else staging.view(axes).view(3, -1),
        prompt_lens=None if prompt_lens is None else staging.view(prompt_lens),
        owner=None if most is None else staging.view(segments["owner"]),
    )


def prefill_attention(inputs: PrefillInputs, tables: Tensor, seq_lens_host: HostSeqLens | None) -> AttentionMetadata:
    """Metadata of the ragged prefill; ``tables`` are the block-table rows of its sequences."""
    return AttentionMetadata(
        query_start=inputs.query_start,
        seq_lens=inputs.ends.to(torch.int32),
        block_table=tables,
        max_query=inputs.max_query,
        max_kv=inputs.max_kv,
        seq_lens_host=None if seq_lens_host is None else seq_lens_host.param("prefill", 0),
        host_query_start=inputs.host_query_start,
    )
