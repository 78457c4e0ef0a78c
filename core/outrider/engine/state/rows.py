"""Device state per request row. Row 0 is reserved for padding and stays zero.

Two owners: :class:`RowTable` is written where the intake is unpacked, on schedule or forward (what the host decides),
:class:`FutureMap` on forward (what the device decides, and the host learns later).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from outrider.device import Backend, Fence, KernelSet, Stream
from outrider.engine.requests.batch import Batch
from outrider.engine.state.outgoing import Outgoing
from outrider.speculative.proposer import RelaySpec

View = Callable[[tuple[int, int]], Tensor]


class RowTable:
    """``tables`` int32 [R, P]: block table; ``temperature`` float32 [R]; ``seeds`` int64 [R]; ``mrope_position_deltas``
    int64 [R]: what a position on three axes is ahead of the index, behind the prompt.
    """

    def __init__(self, *, rows: int, pages: int, device: torch.device) -> None:
        self.tables = torch.zeros((rows, pages), dtype=torch.int32, device=device)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.mrope_position_deltas = torch.zeros(rows, dtype=torch.int64, device=device)

    def update(self, batch: Batch, view: View, segments: Mapping[str, tuple[int, int]]) -> None:
        """Write what the host decided: sampling parameters and empty tables of new requests, then new pages."""
        if batch.admitted:
            bits = view(segments["temperature"]).to(torch.int32)
            seeds, deltas = view(segments["seeds"]), view(segments["mrope_position_deltas"])
            self.admit(view(segments["admitted"]), bits.view(torch.float32), seeds, deltas)
        if batch.table_updates:
            self.append(view(segments["entries"]), view(segments["pages"]))

    def admit(self, rows: Tensor, temperature: Tensor, seeds: Tensor, deltas: Tensor) -> None:
        """Begin the rows of new requests: sampling parameters, mrope position deltas, and an empty table."""
        self.temperature[rows] = temperature
        self.seeds[rows] = seeds
        self.mrope_position_deltas[rows] = deltas
        self.tables.index_fill_(0, rows, 0)

    def append(self, entries: Tensor, pages: Tensor) -> None:
        """Write ``pages`` at flat ``entries`` (row * P + index)."""
        self.tables.view(-1)[entries] = pages.to(torch.int32)


class FutureMap:
    """What an iteration leaves for the next one, indexed by row.

    *Publish*: ``seq_lens`` int64 [R], tokens in the target's cache, which the schedule stream reads behind the fence
    *published*. *Stash*: ``last_tokens`` int64 [R] and the proposer's ``relay``, which only forward reads, in stream order.
    ``batch_seq_lens`` int64 [R]: those of a batch, in its order, written on schedule. Row 0 keeps zeros: padding
    resolves to it.
    """

    def __init__(self, kernels: KernelSet, *, rows: int, relay: tuple[RelaySpec, ...], device: torch.device) -> None:
        self._kernels = kernels
        self.seq_lens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.batch_seq_lens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.relay: Mapping[str, Tensor] = {
            spec.name: torch.zeros((rows, *spec.shape), dtype=spec.dtype, device=device) for spec in relay
        }

    def publish(self, rows: Tensor, seq_lens: Tensor) -> None:
        """New lengths; padding rows keep length 0."""
        self.seq_lens[rows] = torch.where(rows > 0, seq_lens, 0)

    def resolve_seq_lens(self, rows: Tensor) -> None:
        """What was published for a batch; on schedule."""
        self.batch_seq_lens[: rows.shape[0]] = self.seq_lens.index_select(0, rows)

    def stash(self, rows: Tensor, last_tokens: Tensor, relay: Mapping[str, Tensor]) -> None:
        """Last tokens and the proposer's relay."""
        self._kernels.scatter_rows(self.last_tokens, rows, last_tokens)
        self.stash_relay(rows, relay)

    def stash_relay(self, rows: Tensor, relay: Mapping[str, Tensor]) -> None:
        """The proposer's relay. A tensor that the proposer left out this time keeps its old value."""
        for name, value in relay.items():
            self._kernels.scatter_rows(self.relay[name], rows, value)

    def relayed(self, rows: Tensor) -> Mapping[str, Tensor]:
        """Gather what was relayed for some rows."""
        return {name: self._kernels.gather_rows(value, rows) for name, value in self.relay.items()}


class SeqLensRing:
    """Rings with what was published, ``seq_lens`` int64 [R], on the device and in pinned memory: where attention takes
    lengths as host integers.
    """

    def __init__(self, backend: Backend, seq_lens: Tensor, *, entries: int) -> None:
        self._out = Outgoing(backend, "lengths", seq_lens, entries=entries)
        self._generations = [0] * entries

    def keep(self, entry: int) -> None:
        """Copy every row's length within the device, in the caller's scope; on forward."""
        self._out.keep(entry)

    def copy_out(self, entry: int, stream: Stream) -> None:
        """Copy what was kept to the host on ``stream``, which the caller has ordered behind it."""
        self._generations[entry] = self._out.copy_out(entry, stream)

    def read(self, entry: int, copied: Fence) -> list[int]:
        """Host: wait for the copy of one entry, and read it."""
        copied.wait_host()
        found: list[int] = self._out.read(entry, self._generations[entry]).tolist()
        return found
