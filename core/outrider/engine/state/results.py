"""What an iteration tells the host: one device buffer, a ring of copies there, a pinned ring, a ticket for each iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.device import Backend, Fence, Group, Stream
from outrider.engine.ranks.records import RanksDiffer
from outrider.engine.requests.batch import Batch
from outrider.engine.requests.features import logprobs_of
from outrider.engine.requests.logprobs import TokenLogprobs
from outrider.engine.state.logprobs import LogprobBuffers
from outrider.engine.state.outgoing import Outgoing
from outrider.engine.state.probes import HOST, BadValue, Probes


@dataclass(frozen=True, slots=True)
class Ticket:
    """Redeems the results of one launched iteration, once. ``logprobs``: their generation, if the iteration has some.
    ``said``: what this host said of requests, by their row in the results.
    """

    batch: Batch
    entry: int
    generation: int
    logprobs: int | None = None
    said: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results on the host, in the order of the batch. ``decoded``: new tokens of each decoding request.
    ``first_tokens``: the token after each prefill chunk, None where the prompt goes on. ``logprobs``: by request id, of
    those that asked. ``bad``: by request id, what probes found.
    """

    decoded: tuple[tuple[int, ...], ...]
    first_tokens: tuple[int | None, ...]
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]]
    bad: Mapping[int, tuple[BadValue, ...]]


class Results:
    """Rows 0..M-1 hold decoding requests, M..2M-1 prefill chunks: accepted, then D+1 tokens padded with -1,
    where D is the longest path that a draft can have, then what the probes found.

    An iteration keeps its results in an entry of the device's ring, so that the next one writes its own while those are
    copied to the host. An entry is filled again only after the host has read what it held.
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
        """``data``: one rank of each data-parallel group, whose results are shared; None: there is one group."""
        self._data = data
        self._max_requests = max_requests
        self._probes = probes
        self._tokens = depth + 2
        self._said: dict[int, str] = {}
        shape = (2 * max_requests, self._tokens + probes.width)
        self._device = torch.full(shape, -1, dtype=torch.int64, device=backend.device)
        self._everyone = None if data is None else self._device.new_empty((data.size, *shape))
        whole = self._device if self._everyone is None else self._everyone
        self._none = torch.zeros(max_requests, dtype=torch.int64, device=backend.device)
        self._out = Outgoing(backend, "results", whole, entries=entries)
        self._logprobs = LogprobBuffers(
            backend, entries=entries, max_requests=max_requests, width=depth + 1, most=max_logprobs, data=data
        )

    @property
    def shared(self) -> bool:
        """Whether other data-parallel groups get them."""
        return self._data is not None

    def decided(self, count: int, path: int) -> Tensor:
        """Where accepted and ``path`` tokens of ``count`` decoding requests go, int64 [count, 1 + path]; on forward."""
        return self._device[:count, : 1 + path]

    def none_accepted(self, count: int) -> Tensor:
        """What ``count`` requests accept for which nothing was drafted, int64 [count]: a constant."""
        return self._none[:count]

    def found(self, count: int) -> Tensor:
        """Where probes of ``count`` decoding requests write, int64 [count, width]; on forward."""
        return self._device[:count, self._tokens :]

    def found_in_prefill(self, count: int) -> Tensor:
        """The same for ``count`` prefill chunks."""
        return self._device[self._max_requests : self._max_requests + count, self._tokens :]

    def say(self, reason: int, requests: Mapping[int, str], *, prefill: bool = False) -> None:
        """End requests of this iteration on all ranks, for a ``reason`` that this host alone knows of; on forward, before the
        ranks agree on what was found. ``requests``: a text for each, by its place in the batch.
        """
        for place, text in requests.items():
            row = place + self._max_requests * prefill
            self._device[row, self._host] = reason
            self._said[row] = text

    def say_nothing(self) -> None:
        """An iteration begins; on forward."""
        for row in self._said:
            self._device[row, self._host] = -1
        self._said = {}

    @property
    def _host(self) -> int:
        first: int = self._probes.columns(HOST).start
        return self._tokens + first

    def write_prefill(self, tokens: Tensor) -> None:
        """First tokens [S]; on forward."""
        start = self._max_requests
        self._device[start : start + tokens.shape[0], 1] = tokens

    def write_decode_logprobs(self, values: Tensor, ids: Tensor) -> None:
        """``values`` [B, D+1, 1+c], ``ids`` [B, D+1, c] of the decoding requests' new tokens; on forward."""
        self._logprobs.write(0, values, ids)

    def write_prefill_logprobs(self, values: Tensor, ids: Tensor) -> None:
        """``values`` [S, 1, 1+c], ``ids`` [S, 1, c] of the first tokens; on forward."""
        self._logprobs.write(self._max_requests, values, ids)

    def share(self, batch: Batch, forward: Stream) -> None:
        """Give the other data-parallel groups this one's results, and take theirs; on forward."""
        if self._data is not None and self._everyone is not None:
            self._data.all_gather(self._everyone, self._device, stream=forward)
            if _wants_logprobs(batch):
                self._logprobs.share(forward)

    def keep(self, batch: Batch, entry: int) -> None:
        """Copy them within the device, out of the way of the next iteration; on forward, in the caller's scope."""
        self._out.keep(entry)
        if _wants_logprobs(batch):
            self._logprobs.keep(entry)

    def copy_out(self, batch: Batch, entry: int, stream: Stream) -> Ticket:
        """Copy what was kept into the pinned entry on ``stream``."""
        generation = self._out.copy_out(entry, stream)
        logprobs = self._logprobs.copy_out(entry, stream) if _wants_logprobs(batch) else None
        return Ticket(batch, entry, generation, logprobs, dict(self._said))

    def redeem(self, ticket: Ticket, copied: Fence) -> tuple[Outcome, ...]:
        """Host: wait until the copy has landed, then read it: what came of the batch of each data-parallel group."""
        copied.wait_host()
        landed = self._out.read(ticket.entry, ticket.generation)
        if self._data is None:
            return (self._outcome(ticket, ticket.batch, 0, landed.tolist()),)
        groups = range(self._data.size) if ticket.batch.together is not None else (self._data.rank,)
        return tuple(
            self._outcome(ticket, batch, group, landed[group].tolist())
            for group, batch in zip(groups, ticket.batch.everyone, strict=True)
        )

    def _outcome(self, ticket: Ticket, batch: Batch, group: int, rows: list[list[int]]) -> Outcome:
        own = self._data is None or group == self._data.rank
        said = ticket.said if own else {}
        places = [(i, request.id) for i, request in enumerate(batch.decode)]
        places += [(self._max_requests + i, chunk.request.id) for i, chunk in enumerate(batch.prefill)]
        bad = {request: self._probes.read(rows[row][self._tokens :], said.get(row, "")) for row, request in places}
        for row, request in places:
            if row in said and not any(each.buffer == HOST for each in bad[request]):
                raise RanksDiffer(f"request {request} failed on this rank, and not on the first of its group: {said[row]}")
        decoded = tuple(tuple(rows[i][1 : rows[i][0] + 2]) for i in range(len(batch.decode)))
        firsts = tuple(rows[self._max_requests + i][1] if chunk.final else None for i, chunk in enumerate(batch.prefill))
        logprobs = self._read_logprobs(ticket, batch, group, decoded, firsts)
        return Outcome(decoded, firsts, logprobs, {request: found for request, found in bad.items() if found})

    def _read_logprobs(
        self,
        ticket: Ticket,
        batch: Batch,
        group: int,
        decoded: tuple[tuple[int, ...], ...],
        firsts: tuple[int | None, ...],
    ) -> Mapping[int, tuple[TokenLogprobs, ...]]:
        if ticket.logprobs is None:
            return {}
        emitted = [(row, request, decoded[row]) for row, request in enumerate(batch.decode)]
        for index, (chunk, first) in enumerate(zip(batch.prefill, firsts, strict=True)):
            if first is not None:
                emitted.append((self._max_requests + index, chunk.request, (first,)))
        return {
            request.id: self._logprobs.read(ticket.entry, ticket.logprobs, row, tokens, request.params.logprobs, group)
            for row, request, tokens in emitted
            if request.params.logprobs is not None
        }


def _wants_logprobs(batch: Batch) -> bool:
    """Whether a request of some group asked for them."""
    return any(logprobs_of(each.requests) is not None for each in batch.everyone)
