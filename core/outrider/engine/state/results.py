"""Results: the tokens and probe results of an iteration, and their way from the device to the host.

A probe checks values on the device before a copy to a static buffer. It writes the index and value of the first bad element
of each request. The host reads them with the results of the iteration and ends the request with an error that names the
value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.device import Backend, Fence, Group, KernelSet, PinnedBuffer, Stream
from outrider.engine.guides.grammars import MASK_TIME_LIMIT_S
from outrider.engine.ranks.records import RanksDiffer
from outrider.engine.requests.batch import Batch, logprobs_of
from outrider.engine.requests.sampling import TokenLogprobs
from outrider.speculative.proposer import Proposer

HOST = "host"
"""The name of host failures, which aren't a buffer. A rank publishes its failure so that all ranks end the request."""
GUIDE_LATE, MEDIA_FAILED = range(2)
_HOST_FAILURES = {
    GUIDE_LATE: f"finding what its guide allows took more than {MASK_TIME_LIMIT_S:g} s; write the guide with fewer ways to "
    "read a text",
    MEDIA_FAILED: "its media can't be read by the rank that does so",
}


@dataclass(frozen=True, slots=True)
class BadValue:
    """The first bad value that a probe found in one request."""

    buffer: str
    index: int
    """The flat index in the request's part of ``buffer``. For :data:`HOST`: the reason of the host failure."""
    value: int | None
    bounds: tuple[int, int] | None
    text: str = ""
    """The message of a host failure, on the rank that published it."""

    @property
    def may_corrupt_cache(self) -> bool:
        """Return True if the request's keys and values may be bad too."""
        return (self.buffer, self.index) != (HOST, GUIDE_LATE)

    def __str__(self) -> str:
        if self.buffer == HOST:
            return self.text or _HOST_FAILURES[self.index]
        if self.bounds is None:
            return f"{self.buffer} holds NaN at index {self.index}"
        return f"{self.buffer} holds {self.value} at index {self.index}, expected {self.bounds[0]} to {self.bounds[1] - 1}"


class Probes:
    """All probes of an engine in a fixed order. Each probe has two columns in the results: index and value."""

    def __init__(self, kernels: KernelSet, proposer: Proposer, *, vocabulary: int, ranks: bool = False) -> None:
        """Create the probes of an engine. ``ranks``: the engine has several ranks, which publish host failures
        (:data:`HOST`).
        """
        self._kernels = kernels
        token_bounds = (0, vocabulary)
        self.bounds: dict[str, tuple[int, int] | None] = {
            f"relay.{spec.name}": None if spec.dtype.is_floating_point else spec.bounds or token_bounds
            for spec in proposer.relay
        }
        """Inclusive lower and exclusive upper bound of each probed buffer's integers; None: floats that must not be NaN."""
        if proposer.nodes:
            self.bounds["draft.tokens"] = token_bounds
            if not proposer.is_tree:
                self.bounds["draft.probs"] = None
        self.bounds["target.logits"] = None
        if ranks:
            self.bounds[HOST] = None
        self._index = {buffer: i for i, buffer in enumerate(self.bounds)}

    def columns(self, buffer: str) -> slice:
        """Return the two columns of one probe in a request's probe results."""
        start = 2 * self._index[buffer]
        return slice(start, start + 2)

    @property
    def width(self) -> int:
        """The number of columns of a request's probe results: two for each probe."""
        return 2 * len(self.bounds)

    def check_for_nan(self, name: str, value: Tensor, found: Tensor) -> None:
        """Check the floats ``value`` [B, ...] for NaN. Writes the columns of probe ``name`` in ``found`` int64 [B, width]."""
        self._kernels.find_nan(value.reshape(value.shape[0], -1), self.result_columns(name, found))

    def result_columns(self, name: str, found: Tensor) -> Tensor:
        """Return the columns of probe ``name`` in ``found``, int64 [B, 2]."""
        return found[:, self.columns(name)]

    def copy_checked(self, name: str, source: Tensor, rows: Tensor | None, out: Tensor, found: Tensor) -> None:
        """Copy ``rows`` int64 [B] of ``source`` (None: all rows) to ``out`` [B, ...] and check them with probe ``name``.

        If a request has an integer out of bounds, all its integers in ``out`` become the lower bound, so that later kernels
        can use them as indices.
        """
        columns = self.result_columns(name, found)
        self._kernels.gather_checked(source, rows, out, columns, bounds=self.bounds[name])

    def findings_of_row(self, row: Sequence[int], text: str = "") -> tuple[BadValue, ...]:
        """Return the bad values in one request's probe results. ``text``: this host's message about the request."""
        bad_values = []
        for i, (buffer, bounds) in enumerate(self.bounds.items()):
            index, value = row[2 * i], row[2 * i + 1]
            if index >= 0:
                message = text if buffer == HOST else ""
                bad_values.append(BadValue(buffer, index, None if bounds is None else value, bounds, message))
        return tuple(bad_values)


class HostCopyRing:
    """Copies of ``source`` for the host, one for each iteration in flight.

    A copy within the device lets the next iteration overwrite ``source`` during the copy to pinned memory. A ring entry is
    free once the host has read the results of its iteration. With data-parallel groups, an entry has the sources of all.
    """

    def __init__(self, backend: Backend, name: str, source: Tensor, *, entries: int, data: Group | None = None) -> None:
        """Allocate the device ring, on the current stream, and the pinned ring.

        ``name`` is the prefix of the pinned buffers' names in errors. ``entries`` is the size of both rings. ``data`` is the
        collective group with one rank of each data-parallel group; None: one group only.
        """
        self._backend = backend
        self._source, self._data = source, data
        self._all_groups = source if data is None else source.new_empty((data.size, *source.shape))
        self._device_ring = [torch.empty_like(self._all_groups) for _ in range(entries)]
        self._pinned_ring: list[PinnedBuffer] = [
            backend.empty_pinned(f"{name}[{entry}]", self._all_groups.shape, source.dtype) for entry in range(entries)
        ]
        self._generations = [0] * entries

    def copy_on_device(self, entry: int, forward: Stream) -> None:
        """Copy the sources of all groups to device ring entry ``entry``, on the current stream ``forward``."""
        if self._data is not None:
            self._data.all_gather(self._all_groups, self._source, stream=forward)
        self._device_ring[entry].copy_(self._all_groups)

    def copy_out(self, entry: int, stream: Stream) -> int:
        """Copy device ring entry ``entry`` to pinned memory on ``stream``, and return the pinned entry's generation.

        The caller orders ``stream`` after the copy within the device.
        """
        buffer = self._pinned_ring[entry]
        generation = self._generations[entry] = buffer.renew()
        self._backend.copy_async(buffer.tensor, self._device_ring[entry], stream=stream)
        return generation

    def read_entry(self, entry: int, generation: int | None = None, *, group: int = 0) -> Tensor:
        """Return the source of ``group`` in generation ``generation`` of a pinned entry, by default the newest one, after the
        fence of its copy.
        """
        sources = self._pinned_ring[entry].read_generation(self._generations[entry] if generation is None else generation)
        return sources if self._data is None else sources[group]


@dataclass(frozen=True, slots=True)
class PendingResult:
    """The result of one launched iteration that the host has not read. :meth:`Results.read_results` reads it once."""

    batch: Batch
    entry: int
    """The ring entry of the results."""
    generation: int
    """The generation of the pinned entry."""
    logprobs: int | None = None
    """The generation of the pinned entry with log-probabilities; None without log-probabilities."""
    host_failures: Mapping[int, str] = field(default_factory=dict)
    """This host's failure messages about requests, by row in the results."""


@dataclass(frozen=True, slots=True)
class HostResults:
    """The results of one iteration on the host, in the order of the batch."""

    decoded: tuple[tuple[int, ...], ...]
    """New tokens of each decoding request."""
    first_tokens: tuple[int | None, ...]
    """The token after each prefill chunk; None if the prompt has further chunks."""
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]]
    """Log-probabilities of the new tokens, by request id, for the requests that ask for them."""
    bad_values: Mapping[int, tuple[BadValue, ...]]
    """Bad values that probes found, by request id."""


class Results:
    """The result buffer of M requests on the device, and its copies for the host.

    Rows 0 to M-1 are decoding requests, rows M to 2M-1 prefill chunks. The columns are the number of accepted tokens, D+1
    tokens padded with -1 (D: length of the longest path), and the probe results.

    Log-probabilities have the same rows, in one int32 tensor [2M, D+1, 1 + 2n], so that one copy moves all of them: the
    float32 bits of the token's value, the float32 bits of n values, and n token ids.

    Each iteration copies its results to a ring entry on the device, so that the next iteration can overwrite the buffer. A
    ring entry is free once the host has read it.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        entries: int,
        max_requests: int,
        depth: int,
        probes: Probes,
        max_logprobs: int = 0,
        data: Group | None = None,
    ) -> None:
        """Allocate the results of ``depth`` iterations in flight.

        ``data`` is that of :class:`HostCopyRing`.
        """
        self.is_shared = data is not None
        """True if all data-parallel groups exchange their results."""
        self._own_group = 0 if data is None else data.rank
        self._max_requests = max_requests
        self._probes = probes
        self._first_probe_column = depth + 2
        self._host_failures: dict[int, str] = {}
        shape = (2 * max_requests, self._first_probe_column + probes.width)
        self._device = torch.full(shape, -1, dtype=torch.int64, device=backend.device)
        self._zeros = torch.zeros(max_requests, dtype=torch.int64, device=backend.device)
        self._ring = HostCopyRing(backend, "results", self._device, entries=entries, data=data)
        self._max_logprobs = max_logprobs
        logprobs_shape = (2 * max_requests, depth + 1, 1 + 2 * max_logprobs)
        self._logprobs = torch.zeros(logprobs_shape, dtype=torch.int32, device=backend.device)
        self._logprobs_ring = HostCopyRing(backend, "logprobs", self._logprobs, entries=entries, data=data)

    def decode_rows(self, count: int, path: int) -> Tensor:
        """Return the view for accepted counts and ``path`` tokens of decoding requests, int64 [count, 1 + path].

        The forward stream writes it.
        """
        return self._device[:count, : 1 + path]

    def zero_accepted(self, count: int) -> Tensor:
        """Return the accepted counts of ``count`` requests without a draft: constant zeros, int64 [count]."""
        return self._zeros[:count]

    def probe_results(self, count: int) -> Tensor:
        """Return the view for probe results of ``count`` decoding requests, int64 [count, width]."""
        return self._device[:count, self._first_probe_column :]

    def prefill_probe_results(self, count: int) -> Tensor:
        """Return the view for probe results of ``count`` prefill chunks, int64 [count, width]."""
        return self._device[self._max_requests : self._max_requests + count, self._first_probe_column :]

    def write_host_failures(self, reason: int, requests: Mapping[int, str], *, prefill: bool = False) -> None:
        """Write a host failure of this rank to the probe results, so that all ranks end the requests.

        ``reason``: the index of the failure. ``requests``: a message for each request, by its index in the batch, or among
        the prefill chunks if ``prefill``. Call on the forward stream, before the ranks agree on probe results.
        """
        for index, text in requests.items():
            row = index + self._max_requests * prefill
            self._device[row, self._host_column] = reason
            self._host_failures[row] = text

    def clear_host_failures(self) -> None:
        """Clear the host failures of the previous iteration, on the forward stream."""
        for row in self._host_failures:
            self._device[row, self._host_column] = -1
        self._host_failures = {}

    @property
    def _host_column(self) -> int:
        first: int = self._probes.columns(HOST).start
        return self._first_probe_column + first

    def write_prefill(self, tokens: Tensor) -> None:
        """Write the first tokens of S prefill chunks, int64 [S], on the forward stream."""
        start = self._max_requests
        self._device[start : start + tokens.shape[0], 1] = tokens

    def write_logprobs(self, values: Tensor, ids: Tensor, *, prefill: bool = False) -> None:
        """Write ``values`` float32 [B, N, 1+c] and ``ids`` int64 [B, N, c], c at most n, on the forward stream.

        They are those of B decoding requests with N nodes, or of the first tokens of B chunks (N = 1) if ``prefill``.
        """
        batch, nodes, count = ids.shape
        first, most = self._max_requests if prefill else 0, self._max_logprobs
        rows = self._logprobs[first : first + batch, :nodes]
        rows[..., : 1 + count] = values.contiguous().view(torch.int32)
        rows[..., 1 + most : 1 + most + count] = ids.to(torch.int32)

    def copy_on_device(self, batch: Batch, entry: int, forward: Stream) -> None:
        """Copy the results of all data-parallel groups to device ring entry ``entry``, on the current stream ``forward``."""
        self._ring.copy_on_device(entry, forward)
        if _wants_logprobs(batch):
            self._logprobs_ring.copy_on_device(entry, forward)

    def copy_out(self, batch: Batch, entry: int, stream: Stream) -> PendingResult:
        """Copy device ring entry ``entry`` to pinned memory on ``stream``, and return the pending result."""
        generation = self._ring.copy_out(entry, stream)
        logprobs = self._logprobs_ring.copy_out(entry, stream) if _wants_logprobs(batch) else None
        return PendingResult(batch, entry, generation, logprobs, dict(self._host_failures))

    def read_results(self, pending: PendingResult, copied: Fence) -> tuple[HostResults, ...]:
        """Wait on the host for the fence of a copy, and return the results of each data-parallel group."""
        copied.wait_host()
        batches = pending.batch.group_batches
        groups = range(len(batches)) if pending.batch.global_batch is not None else (self._own_group,)
        return tuple(self._host_results(pending, batch, group) for group, batch in zip(groups, batches, strict=True))

    def _host_results(self, pending: PendingResult, batch: Batch, group: int) -> HostResults:
        rows = self._ring.read_entry(pending.entry, pending.generation, group=group).tolist()
        failures = pending.host_failures if group == self._own_group else {}
        request_rows = [(i, request.id) for i, request in enumerate(batch.decode)]
        request_rows += [(self._max_requests + i, chunk.request.id) for i, chunk in enumerate(batch.prefill)]
        bad = {
            request: self._probes.findings_of_row(rows[row][self._first_probe_column :], failures.get(row, ""))
            for row, request in request_rows
        }
        for row, request in request_rows:
            if row in failures and not any(each.buffer == HOST for each in bad[request]):
                raise RanksDiffer(
                    f"request {request} failed on this rank, and not on the first of its group: {failures[row]}"
                )
        decoded = tuple(tuple(rows[i][1 : rows[i][0] + 2]) for i in range(len(batch.decode)))
        firsts = tuple(rows[self._max_requests + i][1] if chunk.is_final else None for i, chunk in enumerate(batch.prefill))
        logprobs = self._read_logprobs(pending, batch, group, decoded, firsts)
        return HostResults(decoded, firsts, logprobs, {request: values for request, values in bad.items() if values})

    def _read_logprobs(
        self,
        pending: PendingResult,
        batch: Batch,
        group: int,
        decoded: tuple[tuple[int, ...], ...],
        firsts: tuple[int | None, ...],
    ) -> Mapping[int, tuple[TokenLogprobs, ...]]:
        if pending.logprobs is None:
            return {}
        emitted = [(row, request, decoded[row]) for row, request in enumerate(batch.decode)]
        for index, (chunk, first) in enumerate(zip(batch.prefill, firsts, strict=True)):
            if first is not None:
                emitted.append((self._max_requests + index, chunk.request, (first,)))
        entries = self._logprobs_ring.read_entry(pending.entry, pending.logprobs, group=group)
        return {
            request.id: self._token_logprobs(entries[row, : len(tokens)], tokens, request.params.logprobs)
            for row, request, tokens in emitted
            if request.params.logprobs is not None
        }

    def _token_logprobs(self, bits: Tensor, tokens: tuple[int, ...], count: int) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities of ``tokens`` in ``bits``, with ``count`` likeliest tokens each."""
        values: list[list[float]] = bits[:, : 1 + count].contiguous().view(torch.float32).tolist()
        ids: list[list[int]] = bits[:, 1 + self._max_logprobs : 1 + self._max_logprobs + count].tolist()
        return tuple(
            TokenLogprobs(token, value[0], tuple(zip(best, value[1:], strict=True)))
            for token, value, best in zip(tokens, values, ids, strict=True)
        )


def _wants_logprobs(batch: Batch) -> bool:
    """Return True if a request of any group asks for log-probabilities."""
    return any(logprobs_of(each.requests) is not None for each in batch.group_batches)
