"""From the scheduler's batch to device tensors: one pinned buffer, one copy an iteration."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
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
    host_query_start: tuple[int, ...]
    max_query: int
    max_kv: int
    rope_positions: Tensor
    prompt_lens: Tensor | None


def float_bits(value: float) -> int:
    """The bits of ``value`` as float32, as a whole number."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


class Staging:
    """A pinned ring on the host and one buffer on the device, both int64.

    ``entries``: how many iterations may be staged before the oldest copy must have finished.
    """

    def __init__(self, backend: Backend, *, entries: int, capacity: int, max_requests: int) -> None:
        self._backend = backend
        self.max_requests = max_requests
        self._ring = [backend.empty_pinned(f"staging[{entry}]", (capacity,), torch.int64) for entry in range(entries)]
        self._device = torch.zeros(capacity, dtype=torch.int64, device=backend.device)

    def upload(self, entry: int, values: Tensor, stream: Stream) -> None:
        """Host: fill the entry, whose last iteration's results have been read; then copy on ``stream``, which the caller
        has ordered after the last reader of the device buffer.
        """
        pinned = self._ring[entry]
        pinned.renew()
        count = values.shape[0]
        pinned.tensor[:count].copy_(values)
        self._backend.copy_async(self._device[:count], pinned.tensor[:count], stream=stream)

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
        self.values: list[int] = []
        self.packed = torch.empty(0, dtype=torch.int64)
        """All values, int64 on the host, once :meth:`close` was called."""
        self._segments: dict[str, tuple[int, int]] = {}

    def add(self, name: str, values: list[int]) -> None:
        """Append a segment."""
        if len(self.values) % 2:
            self.values.append(0)
        start = len(self.values)
        self.values.extend(values)
        self._segments[name] = (start, len(self.values))

    def close(self) -> None:
        """Make the tensor of everything that was added. Raises OverflowError for a number beyond 64 bits."""
        self.packed = torch.tensor(self.values, dtype=torch.int64)

    @property
    def segments(self) -> Mapping[str, tuple[int, int]]:
        """Start and end of each segment."""
        return self._segments


def staging_capacity(*, requests: int, pages: int, prefill_chunk: int) -> int:
    """The most values that one batch packs."""
    return 8 * prefill_chunk + 11 * requests + 1 + 2 * requests * pages + _SEGMENTS


def pack(batch: Batch, *, page_size: int, table_width: int, max_requests: int, rope: RopeConfig) -> Packer:
    """Everything that the device must know of a batch. The decoding rows come first, as many as there can be, padded with
    the reserved row 0: a captured iteration reads them at an address that never changes.
    """
    packer = Packer()
    packer.add("decode_rows", [*(r.row for r in batch.decode), *[0] * (max_requests - len(batch.decode))])
    packer.add("admitted", [r.row for r in batch.admitted])
    packer.add("temperature", [float_bits(r.params.temperature) for r in batch.admitted])
    packer.add("seeds", [r.params.seed for r in batch.admitted])
    packer.add("mrope_position_deltas", [r.mrope_position_delta for r in batch.admitted])
    packer.add("entries", [row * table_width + index for row, index, _ in batch.table_updates])
    packer.add("pages", [page for _, _, page in batch.table_updates])
    tokens: list[int] = []
    following: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for chunk in batch.prefill:
        context = chunk.request.context
        tokens.extend(context[chunk.start : chunk.end])
        shifted = list(context[chunk.start + 1 : chunk.end + 1])
        following.extend(shifted if len(shifted) == chunk.end - chunk.start else [*shifted, 0])
        for position in range(chunk.start, chunk.end):
            positions.append(position)
            slots.append(chunk.request.pages[position // page_size] * page_size + position % page_size)
        starts.append(len(tokens))
    packer.add("tokens", tokens)
    packer.add("following", following)
    packer.add("positions", positions)
    packer.add("slots", slots)
    if rope.sections:
        packer.add(
            "rope_positions", [place for axis in range(3) for chunk in batch.prefill for place in _places(chunk, axis)]
        )
    if rope.kind == "dynamic":
        lens = [[len(chunk.request.prompt)] * (chunk.end - chunk.start) for chunk in batch.prefill]
        packer.add("prompt_lens", [length for each in lens for length in each])
    packer.add("query_start", starts)
    packer.add("prefill_rows", [chunk.request.row for chunk in batch.prefill])
    packer.add("last", [start - 1 for start in starts[1:]])
    packer.add("ends", [chunk.end for chunk in batch.prefill])
    packer.add("final", [int(chunk.final) for chunk in batch.prefill])
    packer.add("continues", [int(chunk.start > chunk.request.prefill_start) for chunk in batch.prefill])
    return packer


def _places(chunk: PrefillChunk, axis: int) -> Sequence[int]:
    media = chunk.request.media
    return range(chunk.start, chunk.end) if media is None else media.positions(axis, chunk.start, chunk.end)


def prefill_inputs(batch: Batch, staging: Staging, segments: Mapping[str, tuple[int, int]]) -> PrefillInputs:
    """Views of the staged prefill; the casts run in the caller's scope."""
    axes, prompt_lens = segments.get("rope_positions"), segments.get("prompt_lens")
    positions = staging.view(segments["positions"])
    return PrefillInputs(
        tokens=staging.view(segments["tokens"]),
        following=staging.view(segments["following"]),
        positions=positions,
        slots=staging.view(segments["slots"]),
        rows=staging.view(segments["prefill_rows"]),
        last=staging.view(segments["last"]),
        ends=staging.view(segments["ends"]),
        final=staging.view(segments["final"]) > 0,
        continues=staging.view(segments["continues"]) > 0,
        query_start=staging.view(segments["query_start"]).to(torch.int32),
        host_query_start=tuple(accumulate((chunk.end - chunk.start for chunk in batch.prefill), initial=0)),
        max_query=max(chunk.end - chunk.start for chunk in batch.prefill),
        max_kv=max(chunk.end for chunk in batch.prefill),
        rope_positions=positions if axes is None else staging.view(axes).view(3, -1),
        prompt_lens=None if prompt_lens is None else staging.view(prompt_lens),
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
