"""Device state of each request row. Row 0 is reserved for padding and stays zero.

The input upload writes :class:`RowTable`, which the host decides. The forward stream writes :class:`FutureMap`, which the
device decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from outrider.device import Backend, Fence, KernelSet, Stream
from outrider.engine.requests.batch import Batch
from outrider.engine.requests.request import RequestFailed
from outrider.engine.state.options import OptionTable
from outrider.engine.state.results import Outgoing
from outrider.engine.state.staging import Packer, PrefillBucket, Staging, pack
from outrider.model import RopeConfig
from outrider.speculative.proposer import RelaySpec

View = Callable[[tuple[int, int]], Tensor]


class RowTable:
    """Block tables and sampling parameters of all R request rows."""

    def __init__(self, *, rows: int, pages: int, device: torch.device) -> None:
        self.tables = torch.zeros((rows, pages), dtype=torch.int32, device=device)
        """Block tables, int32 [R, P]."""
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        """Sampling temperatures, float32 [R]."""
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        """Random seeds, int64 [R]."""
        self.mrope_position_deltas = torch.zeros(rows, dtype=torch.int64, device=device)
        """Rope position minus sequence index of tokens after a prompt with media, int64 [R]."""

    def update(self, batch: Batch, view: View, segments: Mapping[str, tuple[int, int]]) -> None:
        """Write the rows of the batch's admitted requests, then the new block-table entries of all its requests. ``segments``
        locates the values in the staging ``view``.
        """
        if batch.admitted:
            bits = view(segments["temperature"]).to(torch.int32)
            seeds, deltas = view(segments["seeds"]), view(segments["mrope_position_deltas"])
            self.admit(view(segments["admitted"]), bits.view(torch.float32), seeds, deltas)
        if batch.table_updates:
            self.append(view(segments["entries"]), view(segments["pages"]))

    def admit(self, rows: Tensor, temperature: Tensor, seeds: Tensor, deltas: Tensor) -> None:
        """Write sampling parameters, rope position deltas and an empty block table to the request ``rows`` int64 [B], on the
        current stream.
        """
        self.temperature[rows] = temperature
        self.seeds[rows] = seeds
        self.mrope_position_deltas[rows] = deltas
        self.tables.index_fill_(0, rows, 0)

    def append(self, entries: Tensor, pages: Tensor) -> None:
        """Write the page numbers ``pages`` to the flat block-table indices ``entries`` (row * P + index), int64 [n] each."""
        self.tables.view(-1)[entries] = pages.to(torch.int32)


class FutureMap:
    """The next-iteration state of all R request rows. Padding uses row 0, which stays zero.

    The schedule stream reads published lengths after the fence *published*. Only the forward stream reads the stashed last
    tokens and relay, in stream order.
    """

    def __init__(self, kernels: KernelSet, *, rows: int, relay: tuple[RelaySpec, ...], device: torch.device) -> None:
        self._kernels = kernels
        self.seq_lens = torch.zeros(rows, dtype=torch.int64, device=device)
        """Published lengths: tokens in the target's KV cache, int64 [R]."""
        self.batch_seq_lens = torch.zeros(rows, dtype=torch.int64, device=device)
        """The lengths of a batch in its order, int64 [R], which the schedule stream writes."""
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        """Stashed last tokens, int64 [R]."""
        self.relay: Mapping[str, Tensor] = {
            spec.name: torch.zeros((rows, *spec.shape), dtype=spec.dtype, device=device) for spec in relay
        }
        """The stashed tensors that the proposer relays between iterations, by name, [R, ...]."""

    def publish(self, rows: Tensor, seq_lens: Tensor) -> None:
        """Write the new lengths ``seq_lens`` of ``rows``, int64 [B] each, on forward. Row 0 keeps length 0."""
        self.seq_lens[rows] = torch.where(rows > 0, seq_lens, 0)

    def resolve_seq_lens(self, rows: Tensor) -> None:
        """Gather the published lengths of ``rows`` int64 [B] into ``batch_seq_lens``, on the schedule stream."""
        self.batch_seq_lens[: rows.shape[0]] = self.seq_lens.index_select(0, rows)

    def stash(self, rows: Tensor, last_tokens: Tensor, relay: Mapping[str, Tensor]) -> None:
        """Write last tokens int64 [B] and the proposer's relay to ``rows`` int64 [B]."""
        self._kernels.scatter_rows(self.last_tokens, rows, last_tokens)
        self.stash_relay(rows, relay)

    def stash_relay(self, rows: Tensor, relay: Mapping[str, Tensor]) -> None:
        """Write the proposer's relay tensors [B, ...] to ``rows`` int64 [B], on forward. Tensors that ``relay`` lacks keep
        their value.
        """
        for name, value in relay.items():
            self._kernels.scatter_rows(self.relay[name], rows, value)

    def gather_relay(self, rows: Tensor) -> Mapping[str, Tensor]:
        """Return copies of the relayed tensors of ``rows`` int64 [B], by name, [B, ...] each."""
        return {name: self._kernels.gather_rows(value, rows) for name, value in self.relay.items()}


class SeqLensRing:
    """Copies of the published lengths int64 [R] for the host, for attention that needs lengths as host integers."""

    def __init__(self, backend: Backend, seq_lens: Tensor, *, entries: int) -> None:
        self._outgoing = Outgoing(backend, "lengths", seq_lens, entries=entries)
        self._generations = [0] * entries

    def copy_on_device(self, entry: int) -> None:
        """Copy the lengths of all rows to device ring entry ``entry``, on the current stream (forward)."""
        self._outgoing.copy_on_device(entry)

    def copy_out(self, entry: int, stream: Stream) -> None:
        """Copy device ring entry ``entry`` to pinned memory on ``stream``, after the copy within the device."""
        self._generations[entry] = self._outgoing.copy_out(entry, stream)

    def read_entry(self, entry: int, copied: Fence) -> list[int]:
        """Wait on the host for the fence of a copy, and return the lengths of all rows."""
        copied.wait_host()
        lengths: list[int] = self._outgoing.read_entry(entry, self._generations[entry]).tolist()
        return lengths


class InputUpload:
    """The steps of an input upload. Each step enqueues work on the current stream; the caller orders the streams."""

    def __init__(
        self,
        *,
        staging: Staging,
        rows: RowTable,
        options: OptionTable,
        future: FutureMap,
        page_size: int,
        rope: RopeConfig,
    ) -> None:
        self._staging = staging
        self._rows = rows
        self._options = options
        self._future = future
        self._page_size = page_size
        self._rope = rope

    def pack(self, batch: Batch, bucket: PrefillBucket | None = None) -> Packer:
        """Pack the inputs of ``batch`` on the host, with prefill chunks padded to ``bucket``.

        Raises :class:`RequestFailed` for a request that can't be packed.
        """
        try:
            return self._packed(batch, bucket)
        except Exception as error:
            for request in dict.fromkeys((*batch.requests, *batch.admitted)):
                try:
                    self._packed(batch.part_of_request(request))
                except Exception as request_error:
                    raise RequestFailed(request, request_error) from error
            raise

    def _packed(self, batch: Batch, bucket: PrefillBucket | None = None) -> Packer:
        packer = pack(
            batch,
            page_size=self._page_size,
            table_width=self._rows.tables.shape[1],
            max_requests=self._staging.max_requests,
            rope=self._rope,
            bucket=bucket,
        )
        self._options.pack(batch.admitted, packer)
        return packer

    def stage_padding(self, bucket: PrefillBucket) -> Mapping[str, tuple[int, int]]:
        """Write an empty batch, padded to ``bucket``, to the staging buffer. Return the segments."""
        packer = self._packed(Batch((), (), (), ()), bucket)
        self._staging.write_from_host(packer)
        return packer.segments

    def unpack(self, batch: Batch, packer: Packer, entry: int | None) -> None:
        """Copy ring entry ``entry`` to the staging buffer, and write parameters and pages of ``batch`` to request rows.

        ``entry`` None: the staging buffer already has these values.
        """
        if entry is not None:
            self._staging.unpack(entry, packer)
        self._rows.update(batch, self._staging.view, packer.segments)
        if batch.admitted:
            self._options.admit(self._staging.view, packer.segments)

    def resolve_seq_lens(self, batch: Batch) -> None:
        """Gather the published lengths of the decoding requests, on the schedule stream."""
        self._future.resolve_seq_lens(self._staging.decode_rows(len(batch.decode)))

    def write_token_counts(self, packer: Packer) -> None:
        """Write the token counts of new requests with penalties, on the forward stream, before the first count."""
        self._options.write_token_counts(self._staging.view, packer.segments)
