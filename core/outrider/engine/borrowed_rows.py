"""The pages of requests that move to or from other engines through the network card, and their owners.

No function here waits. Each precondition has a fence, which the caller polls between two iterations.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from outrider.device import ConfigError
from outrider.engine.admission import Admission
from outrider.engine.loop import Loop
from outrider.engine.parts import EngineParts
from outrider.engine.requests.lent_pages import ArrivedPages, ExpectedPages, LentPages
from outrider.engine.requests.pages import FreeList
from outrider.engine.requests.request import FinishReason, Request, StepOutput
from outrider.engine.requests.request_state import RequestState
from outrider.engine.requests.scheduler import Scheduler
from outrider.errors import RequestError


class BorrowedRows:
    """The pages of an engine that belong to no running request, because the network card reads or writes them."""

    def __init__(self, parts: EngineParts, loop: Loop, admission: Admission) -> None:
        self._parts, self._loop, self._admission = parts, loop, admission
        if parts.model.config.recurrent is not None:
            raise ConfigError(
                "the model has recurrent layers, and a network card moves pages alone, not the states of these layers: the "
                "engine can't lend requests or borrow them; use hand_over in one process, or prefill and decode on one engine"
            )
        if loop.decision_log.has_page_parts:
            raise ConfigError(
                "the engine's heads are shared out among tensor-parallel ranks, which have a part of every page each: "
                "it can't lend requests or borrow them; use data-parallel ranks, or hand_over in one process"
            )
        self._scheduler = loop.scheduler
        self._group = loop.decision_log.own_group
        transfers = len(parts.fences.pages_ready) + 1
        self._leaving = FreeList("slot for a request that leaves", transfers)
        self._coming = FreeList("slot for a request that comes", transfers)
        self._lent: dict[LentPages, list[int]] = {}
        self._expected: dict[ExpectedPages, Request] = {}
        self.expected: dict[int, ExpectedPages] = {}
        """Requests whose pages aren't written, by id."""

    def lends(self) -> Scheduler:
        """The scheduler of an engine of one rank, from which requests are lent. Raises :class:`ConfigError` for several
        ranks.
        """
        if not isinstance(self._scheduler, Scheduler):
            raise ConfigError("an engine of data-parallel ranks takes requests, and lends none; prefill on one rank")
        return self._scheduler

    def lend(self, request: Request) -> LentPages | None:
        """Take a request out of the engine and lend its pages. The request must have no iteration in flight.

        Returns None if too many lent requests are still in transfer.
        """
        scheduler = self.lends()
        if not self._leaving.available:
            return None
        slot = self._leaving.allocate()
        fences = self._parts.fences
        ready, read = fences.pages_ready[slot - 1], fences.pages_read[slot - 1]
        state = RequestState(
            prompt=request.prompt,
            params=request.params,
            output=tuple(request.output),
            priority=request.priority,
            media=request.media.media if request.media is not None else (),
            logprobs=tuple(request.logprobs),
            iterations=request.iterations,
            verified_tokens=request.verified_tokens,
        )
        try:
            relay = self._parts.transfer.copy_relay_to_host(request, ready)
        except BaseException:
            self._leaving.give_back(slot)
            raise
        del self._loop.requests[request.id]
        request.finish_reason = FinishReason.HAND_OVER
        self._loop.output_queue.put(StepOutput(request.id, (), FinishReason.HAND_OVER))
        held = scheduler.detach_pages(request)
        filled = tuple(held[: -(-(state.length + 1) // scheduler.pages.page_size)])
        lent = LentPages(state=state, pages=filled, relay=relay, ready=ready, read=read, slot=slot)
        self._lent[lent] = held
        return lent

    def returned(self, lent: LentPages) -> None:
        """Return the lent pages of a request to the pool. The caller knows that no transfer reads them. May be
        called once.
        """
        if lent not in self._lent:
            raise RequestError("these pages were given back before, or belong to another engine")
        self.lends().pages.give_back(self._lent.pop(lent))
        self._leaving.give_back(lent.slot)

    def expect(self, request_id: int, state: RequestState, group: int | None = None) -> ExpectedPages | None:
        """Reserve pages and a row for a request that another engine lends, in ``group`` if given.

        Returns None if no pages, row or slot for arriving requests is free.
        """
        if not self._coming.available:
            return None
        if not state.output:
            raise RequestError("a request that comes from another engine has a token of output at least; this one has none")
        state = self._admission.checked(state)
        request = self._admission.arrival(request_id, state)
        if not self._reserve(request, group):
            return None
        slot = self._coming.allocate()
        fences = self._parts.fences
        free, written = fences.pages_free[slot - 1], fences.pages_written[slot - 1]
        filled = tuple(request.pages[: -(-(state.length + 1) // self._scheduler.pages.page_size)])
        expected = ExpectedPages(request=request_id, pages=filled, free=free, written=written, slot=slot, group=request.group)
        self._expected[expected] = request
        self.expected[request_id] = expected
        if self.has_pages(expected):
            self._parts.transfer.signal_pages_free(free)
        return expected

    def has_pages(self, expected: ExpectedPages) -> bool:
        """True if the pages of the request are on this rank."""
        return expected.group == self._group

    def arrived(self, expected: ExpectedPages, relay: Mapping[str, Tensor]) -> None:
        """Queue the request whose pages another engine has written. It decodes once it is scheduled."""
        request = self._taken(expected)
        try:
            pinned: Mapping[str, Tensor] = {}
            if self.has_pages(expected):
                self.check(relay)
                pinned = self._parts.transfer.copy_relay_to_pinned(relay)
        except BaseException:
            self._expected[expected] = request
            self.expected[request.id] = expected
            raise
        request.arrival = ArrivedPages(len(request.context), request.output[-1], pinned)
        self._coming.give_back(expected.slot)
        self._loop.add(request)

    def forsake(self, expected: ExpectedPages) -> None:
        """Free the pages reserved for a request. The caller knows that no transfer writes them. May be called once."""
        self._scheduler.free_reserved(self._taken(expected))
        self._coming.give_back(expected.slot)

    def _reserve(self, request: Request, group: int | None) -> bool:
        scheduler = self._scheduler
        if isinstance(scheduler, Scheduler):
            return scheduler.reserve(request)
        known = [*self._loop.requests.values(), *self._expected.values()]
        for chosen in scheduler.by_load(known) if group is None else (group,):
            request.group = chosen
            if scheduler.reserve(request):
                return True
        return False

    def _taken(self, expected: ExpectedPages) -> Request:
        request = self._expected.pop(expected, None)
        if request is None:
            raise RequestError("this request has arrived or was given up before, or belongs to another engine")
        del self.expected[expected.request]
        return request

    def check(self, relay: Mapping[str, Tensor]) -> None:
        """Raise :class:`ConfigError` unless the relay has the names, shapes and dtypes of this engine's proposer."""
        ours = {spec.name: ((1, *spec.shape), spec.dtype) for spec in self._parts.proposer.relay}
        theirs = {name: (tuple(value.shape), value.dtype) for name, value in relay.items()}
        if ours != theirs:
            raise ConfigError(f"the proposer relays {theirs}, this engine's {ours}: the engines have different draft options")
