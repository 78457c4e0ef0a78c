"""Staging: pack the scheduler's batch into one pinned buffer and copy it to the device once an iteration."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, Backend, Stream
from outrider.engine.requests.batch import Batch, PrefillChunk
from outrider.model import RopeConfig
from outrider.speculative.proposer import HostSeqLens


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """Device views of a ragged prefill batch of T tokens in S sequences.

    For a captured graph, T and S are those of a :class:`PrefillBucket`. Padding sequences have row 0, no tokens and no
    context. Their ``last`` and ``final`` are those of the first sequence, so that they write nothing of their own.
    """

    tokens: Tensor
    """Token ids, int64 [T]."""
    following: Tensor
    """The token after each token, int64 [T]; 0 after the last token of a final chunk, where it's unknown."""
    positions: Tensor
    """Sequence indices, int64 [T]."""
    slots: Tensor
    """Cache slots, int64 [T]."""
    rows: Tensor
    """Request rows, int64 [S]."""
    last: Tensor
    """The index of each sequence's last token, int64 [S]."""
    ends: Tensor
    """The position after each sequence's last token, int64 [S]."""
    final: Tensor
    """True if the chunk ends the request's context, bool [S]."""
    continues: Tensor
    """True if an earlier prefill chunk computed the request's previous tokens, bool [S]. False after a prefix hit."""
    query_start: Tensor
    """The index of each sequence's first token, and at the end the number of tokens: int32 [S+1]."""
    host_query_start: tuple[int, ...] | None
    """The first token of each sequence as host integers, S+1 of them; None for a captured graph, whose host code knows only
    the bounds.
    """
    host_context: tuple[int, ...] | None
    """The number of cached tokens of each sequence before its first token, as host integers; None for a captured graph whose
    chunks may have context.
    """
    max_query: int
    """Upper bound of the tokens of one sequence."""
    max_kv: int
    """Upper bound of the KV length of one sequence."""
    rope_positions: Tensor
    """Positions for the model's rope, int64 [3, T]; ``positions`` itself if the model's positions have one axis."""
    prompt_lens: Tensor | None
    """The length of each token's prompt, int64 [T], for a rope that depends on it."""
    owner: Tensor | None = None
    """The number of each sequence, int64 [S], 0 for padding sequences; None without a graph."""


@dataclass(frozen=True, slots=True)
class PrefillBucket:
    """The padded size of a prefill that is replayed from a graph."""

    tokens: int
    sequences: int
    has_context: bool = True
    """False if no chunk has cached tokens before it."""
    decoding: int = 0
    """Number of decoding requests, padding included, whose iteration the graph holds as well; 0: none."""


Staged = Callable[[str], Tensor]
"""The function that returns the staged values of a segment on the device, int64, by the segment's name."""


def float_bits(value: float) -> int:
    """Return the float32 bits of ``value`` as an integer."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def floats_of_bits(bits: Tensor) -> Tensor:
    """Return the float32 values whose bits :func:`float_bits` returned; the cast runs on the current stream."""
    return bits.to(torch.int32).view(torch.float32)


_MAX_VALUES_PER_HOST_COPY = 1 << 14
"""Torch splits larger host copies over threads, whose wake-up takes longer than the copy."""


class Staging:
    """The staging buffer on the device, with a pinned ring and a device ring for uploads; all int64.

    An upload to the device ring runs concurrently with the previous iteration, which still reads the staging buffer. A copy
    within the device then fills the staging buffer. A ring entry is free once the host has read the results of its
    iteration.
    """

    def __init__(self, backend: Backend, *, entries: int, capacity: int, max_requests: int) -> None:
        """Allocate the staging buffer and rings. ``entries``: size of both rings. ``capacity``: maximum number of values of a
        batch.
        """
        self._backend = backend
        self.max_requests = max_requests
        self._pinned_ring = [backend.empty_pinned(f"staging[{entry}]", (capacity,), torch.int64) for entry in range(entries)]
        self._device_ring = [torch.zeros(capacity, dtype=torch.int64, device=backend.device) for _ in range(entries)]
        self._device = torch.zeros(capacity, dtype=torch.int64, device=backend.device)
        self._current: Packer | None = None
        """The contents of the staging buffer after the enqueued work; None if unknown."""

    def matches_previous(self, packer: Packer) -> bool:
        """Return True if the staging buffer has the values of ``packer`` after the enqueued work."""
        return self._current is not None and self._current.has_same_values(packer)

    def invalidate(self) -> None:
        """Count the contents of the staging buffer as unknown, because enqueued copies may have failed."""
        self._current = None

    def upload(self, entry: int, values: Tensor, stream: Stream) -> None:
        """Copy ``values`` to pinned ring entry ``entry`` on the host, and then to the device ring on ``stream``."""
        pinned = self._pinned_ring[entry]
        pinned.renew()
        count = values.shape[0]
        for start in range(0, count, _MAX_VALUES_PER_HOST_COPY):
            end = min(start + _MAX_VALUES_PER_HOST_COPY, count)
            pinned.tensor[start:end].copy_(values[start:end])
        self._backend.copy_async(self._device_ring[entry][:count], pinned.tensor[:count], stream=stream)

    def unpack(self, entry: int, packer: Packer) -> None:
        """Copy the values of ``packer`` from device ring entry ``entry`` to the staging buffer, on the current stream.

        The caller orders the current stream after the upload and after the last reader of the staging buffer.
        """
        count = packer.packed.shape[0]
        self._current = None
        self._device[:count].copy_(self._device_ring[entry][:count])
        self._current = packer

    def write_from_host(self, packer: Packer) -> None:
        """Copy the values of ``packer`` from the host directly to the staging buffer, on the current stream."""
        self._current = None
        self._device[: packer.packed.shape[0]].copy_(packer.packed)

    def clear(self, stream: Stream) -> None:
        """Write zeros to the staging buffer on ``stream`` and wait on the host, because uploads use other streams.

        Graph captures then access only the reserved row 0.
        """
        self._current = None
        with self._backend.on(stream):
            self._device.zero_()
        stream.synchronize()

    def decode_rows(self, count: int) -> Tensor:
        """Return the rows of the first ``count`` decoding requests, int64 [count], padded with row 0.

        The address never changes.
        """
        return self._device[:count]

    def draft_lengths(self, count: int) -> Tensor:
        """Return the draft lengths of the first ``count`` decoding requests, int64 [count]; they follow the rows, if requests
        can have different ones.

        The address never changes.
        """
        start = self.max_requests + self.max_requests % 2  # each segment starts at an even index
        return self._device[start : start + count]

    def view(self, segment: tuple[int, int]) -> Tensor:
        """Return the device view of one segment, int64."""
        start, end = segment
        return self._device[start:end]


RESTORED_STATES, SAVED_STATES = "restored_states", "saved_states"
"""Segments of pairs of rows: source and target of each copy. A batch without copies lacks the segment."""
_MAX_SEGMENTS = 40
"""Upper bound of the number of segments of a batch; each can need one value for alignment."""


class Packer:
    """A concatenation of named integer segments. Each segment starts at an even index, so at a multiple of 16 bytes.

    Kernels are compiled for 16-byte alignment; other addresses would need another compilation.
    """

    def __init__(self) -> None:
        self._values = array("q")
        self._segments: dict[str, tuple[int, int]] = {}

    def add(self, name: str, values: Iterable[int]) -> None:
        """Append a segment. Raises OverflowError for an integer of more than 64 bits."""
        if len(self._values) % 2:
            self._values.append(0)
        start = len(self._values)
        self._values.extend(values)
        self._segments[name] = (start, len(self._values))

    @property
    def packed(self) -> Tensor:
        """The packed values as an int64 host tensor. The tensor shares memory: while it exists, :meth:`add` raises
        BufferError.
        """
        return torch.frombuffer(self._values, dtype=torch.int64)

    def has_same_values(self, other: Packer) -> bool:
        """Return True if both have equal values, independent of segment names."""
        return self._values == other._values

    @property
    def segments(self) -> Mapping[str, tuple[int, int]]:
        """Start and end index of each segment in :attr:`packed`, in int64 values, by name."""
        return self._segments


def staging_capacity(*, requests: int, pages: int, prefill_chunk: int) -> int:
    """Return the maximum number of int64 values of a batch that :meth:`InputUpload.pack` packs, without sampling options."""
    return 8 * prefill_chunk + 17 * requests + 1 + 2 * requests * pages + _MAX_SEGMENTS


def pack_prefill(packer: Packer, batch: Batch, page_size: int, rope: RopeConfig, bucket: PrefillBucket | None) -> None:
    """Add the prefill chunks of ``batch``: first the segments with one value for each sequence, then those for each token."""
    chunks = batch.prefill
    starts = list(accumulate((chunk.end - chunk.start for chunk in chunks), initial=0))
    num_padding = 0 if bucket is None else bucket.sequences - len(chunks)
    last, final = [start - 1 for start in starts[1:]], [int(chunk.is_final) for chunk in chunks]
    packer.add("query_start", [*starts, *[starts[-1]] * num_padding])
    packer.add("prefill_rows", [*(chunk.request.row for chunk in chunks), *[0] * num_padding])
    packer.add("last", [*last, *(last[:1] or [0]) * num_padding])
    packer.add("ends", [*(chunk.end for chunk in chunks), *[0] * num_padding])
    packer.add("final", [*final, *(final[:1] or [0]) * num_padding])
    packer.add("continues", [*(int(chunk.start > chunk.request.prefill_start) for chunk in chunks), *[0] * num_padding])
    if bucket is not None:
        packer.add("owner", [*range(len(chunks)), *[0] * num_padding])
    padding = 0 if bucket is None else bucket.tokens - starts[-1]
    tokens, following, positions, slots = (array("q") for _ in range(4))
    for chunk in chunks:
        context = array("q", chunk.request.context[chunk.start : chunk.end + 1])
        tokens.extend(context[: chunk.end - chunk.start])
        following.extend(context[1:])
        if len(following) < len(tokens):
            following.append(0)
        positions.extend(_range_array(chunk.start, chunk.end))
        slots.extend(_slots(chunk, page_size))
    for name, values in (("tokens", tokens), ("following", following), ("positions", positions), ("slots", slots)):
        values.extend([0] * padding)
        packer.add(name, values)
    if rope.sections:
        axes = (
            values
            for axis in range(3)
            for values in (*(_rope_axis_positions(chunk, axis) for chunk in chunks), [0] * padding)
        )
        packer.add("rope_positions", chain.from_iterable(axes))
    if rope.depends_on_length:
        lens = ([len(chunk.request.prompt)] * (chunk.end - chunk.start) for chunk in chunks)
        packer.add("prompt_lens", chain.from_iterable(lens))


def _range_array(start: int, end: int) -> array[int]:
    """Return the integers ``start`` to ``end`` - 1. torch fills the array faster than Python."""
    values = array("q", bytes(8 * (end - start)))
    tensor = torch.frombuffer(values, dtype=torch.int64)
    torch.arange(start, end, out=tensor, device=tensor.device)  # explicit: the caller may have set a default device
    return values


def _slots(chunk: PrefillChunk, page_size: int) -> array[int]:
    """Return the cache slots of the chunk's tokens: page number times ``page_size`` plus the index in the page."""
    first_page, end_page = chunk.start // page_size, -(-chunk.end // page_size)
    slots = array("q", bytes(8 * (end_page - first_page) * page_size))
    tensor = torch.frombuffer(slots, dtype=torch.int64).view(-1, page_size)
    pages = tensor.new_tensor(chunk.request.pages[first_page:end_page]).unsqueeze(1)
    torch.add(torch.arange(page_size, device=tensor.device), pages, alpha=page_size, out=tensor)
    return slots[chunk.start - first_page * page_size : chunk.end - first_page * page_size]


def _rope_axis_positions(chunk: PrefillChunk, axis: int) -> Sequence[int]:
    media = chunk.request.media
    return range(chunk.start, chunk.end) if media is None else media.positions(axis, chunk.start, chunk.end)


def prefill_inputs(
    chunks: Sequence[PrefillChunk],
    staging: Staging,
    segments: Mapping[str, tuple[int, int]],
    *,
    most: int | None = None,
    has_context: bool = True,
) -> PrefillInputs:
    """Return views of the staged prefill; casts run on the current stream.

    ``most``: the maximum KV length of a sequence, for a captured graph, which later serves other chunks. None: no graph.
    ``has_context``: chunks of this graph may have cached tokens before them.
    """

    def staged(name: str) -> Tensor:
        return staging.view(segments[name])

    tokens, positions, rows = staged("tokens"), staged("positions"), staged("prefill_rows")
    starts: tuple[int, ...] | None
    context: tuple[int, ...] | None
    if most is None:
        counts = [chunk.end - chunk.start for chunk in chunks]
        starts, context = tuple(accumulate(counts, initial=0)), tuple(chunk.start for chunk in chunks)
        max_query, max_kv = max(counts), max(chunk.end for chunk in chunks)
    else:
        starts, context = None, None if has_context else (0,) * rows.shape[0]
        max_query = tokens.shape[0]
        max_kv = most if has_context else min(most, max_query)
    return PrefillInputs(
        tokens=tokens,
        following=staged("following"),
        positions=positions,
        slots=staged("slots"),
        rows=rows,
        last=staged("last"),
        ends=staged("ends"),
        final=staged("final") > 0,
        continues=staged("continues") > 0,
        query_start=staged("query_start").to(torch.int32),
        host_query_start=starts,
        host_context=context,
        max_query=max_query,
        max_kv=max_kv,
        rope_positions=staged("rope_positions").view(3, -1) if "rope_positions" in segments else positions,
        prompt_lens=staged("prompt_lens") if "prompt_lens" in segments else None,
        owner=None if most is None else staged("owner"),
    )


def prefill_attention(inputs: PrefillInputs, tables: Tensor, seq_lens_host: HostSeqLens | None) -> AttentionMetadata:
    """Return the attention metadata of a ragged prefill. ``tables``: the block tables of its sequences, int32 [S, P]."""
    return AttentionMetadata(
        query_start=inputs.query_start,
        seq_lens=inputs.ends.to(torch.int32),
        block_table=tables,
        max_query=inputs.max_query,
        max_kv=inputs.max_kv,
        seq_lens_host=None if seq_lens_host is None else seq_lens_host.host_param("prefill", 0),
        host_query_start=inputs.host_query_start,
        host_context=inputs.host_context,
    )
