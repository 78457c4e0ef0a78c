"""Device state of each request row. Row 0 is reserved for padding and stays zero.

The input upload writes :class:`RowTable`, which the host decides. The forward stream writes :class:`FutureMap`, which the
device decides.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.device import KernelSet
from outrider.engine.requests.batch import Batch
from outrider.engine.state.staging import Staged, floats_of_bits
from outrider.speculative.proposer import RelaySpec


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

    def update(self, batch: Batch, staged: Staged) -> None:
        """Write sampling parameters, rope position deltas and an empty block table to the rows of the batch's admitted
        requests, then the new block-table entries of all its requests, on the current stream.
        """
        if batch.admitted:
            rows = staged("admitted")
            self.temperature[rows] = floats_of_bits(staged("temperature"))
            self.seeds[rows] = staged("seeds")
            self.mrope_position_deltas[rows] = staged("mrope_position_deltas")
            self.tables.index_fill_(0, rows, 0)
        if batch.table_updates:
            self.tables.view(-1)[staged("entries")] = staged("pages").to(torch.int32)


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
