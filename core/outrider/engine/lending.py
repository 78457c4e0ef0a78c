"""PageLending: requests that move between engines through the network card (docs/disaggregation.md).

Apart from :meth:`PageLending.lend`, no function here waits. Each precondition has a fence, which the caller polls between two
iterations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from outrider.device import ConfigError
from outrider.engine.loop import Loop
from outrider.engine.ranks.records import RanksDiffer
from outrider.engine.requests.admission import Admission
from outrider.engine.requests.groups import groups_by_load
from outrider.engine.requests.hand_over import ExpectedPages, LentPages, RequestState
from outrider.engine.requests.pages import FreeList
from outrider.engine.requests.request import Request
from outrider.engine.requests.scheduler import Scheduler
from outrider.engine.session import Session
from outrider.engine.state.parts import EngineParts
from outrider.engine.state.transfer import StateTransfer
from outrider.errors import RequestError


class PageLending:
    """The requests that move to or from other engines while a network card reads or writes their KV pages.

    The recurrent states of a request move with its pages: the card reads and writes the request's row of states, which is
    reserved like its pages.
    """

    def __init__(self, parts: EngineParts, loop: Loop, admission: Admission, session: Session) -> None:
        self._parts, self._loop, self._admission, self._session = parts, loop, admission, session
        self._transfer = StateTransfer(parts)
        self._guard = loop.failure_recovery.guard_device_work
        self._scheduler = loop.scheduler
        self._has_states = bool(parts.states)
        self._decision_log = decision_log = loop.decision_log
        self._group, self._has_page_parts = decision_log.own_group, decision_log.has_page_parts
        transfers = len(parts.fences.pages_ready) + 1
        self._leaving = FreeList("slot for a request that leaves", transfers)
        self._coming = FreeList("slot for a request that comes", transfers)
        self._lent: dict[LentPages, tuple[int, list[int]]] = {}
        """Row, 0 if the row was freed, and pages of each request that was lent."""
        self._returned: list[LentPages] = []
        """Requests whose relay may still be being copied to the host: they were cancelled before *pages ready*."""
        self._expected: dict[ExpectedPages, Request] = {}
        self.expected: dict[int, ExpectedPages] = {}
        """Requests whose pages the network card still has to write, by id. The same on every rank."""

    def check_lends(self) -> Scheduler:
        """Return the scheduler that lent requests leave. Raises :class:`ConfigError` for an engine of data-parallel ranks,
        which can only receive requests.
        """
        if not isinstance(self._scheduler, Scheduler) or self._has_page_parts:
            raise ConfigError("an engine of several ranks takes requests, and lends none; prefill on one rank")
        return self._scheduler

    def lend(self, request_id: int) -> LentPages | None:
        """Take a decoding request out of this engine. The network card reads its pages until :meth:`returned`.

        Returns None if too many lent requests are still in transfer; try again after a step. The call does not wait for a
        resting request. For another request it waits for the iterations in flight, as :meth:`Engine.hand_over` does.
        """
        with self._session.use():
            request = self._loop.request_to_hand_over(request_id)
            with self._guard("lending a request's pages"):
                return self._lend(request)

    def _lend(self, request: Request) -> LentPages | None:
        scheduler = self.check_lends()
        self._returned = [lent for lent in self._returned if not lent.ready.done()]
        if not self._leaving.available:
            return None
        slot = self._leaving.allocate()
        fences = self._parts.fences
        ready, read = fences.pages_ready[slot - 1], fences.pages_read[slot - 1]
        state = RequestState(**request.state_fields())
        try:
            relay = self._transfer.copy_relay_to_host(request, ready)
        except BaseException:
            self._leaving.give_back(slot)
            raise
        self._loop.hand_over_request(request)
        row, held = scheduler.detach(request)
        if not self._has_states:
            scheduler.rows.give_back(row)
            row = 0
        lent = LentPages(state=state, pages=self._blocks(state, row, held), relay=relay, ready=ready, read=read, slot=slot)
        self._lent[lent] = row, held
        return lent

    def _blocks(self, state: RequestState, row: int, pages: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of the blocks that move: the one of the state ``row``, if any, and the filled ones of
        ``pages``.
        """
        filled = pages[: -(-(state.length + 1) // self._parts.config.page_size)]
        return (*([self._parts.config.num_pages + row] if row else []), *filled)

    def returned(self, lent: LentPages) -> None:
        """Free pages and row of a request that was lent. The caller has seen *pages read*, or no transfer began.

        Raises :class:`RequestError` if the pages were freed before, or belong to another engine.
        """
        with self._session.use():
            if lent not in self._lent:
                raise RequestError("these pages were given back before, or belong to another engine")
            row, pages = self._lent.pop(lent)
            self.check_lends().pages.give_back(pages)
            if row:
                self.check_lends().rows.give_back(row)
            self._leaving.give_back(lent.slot)
            self._returned.append(lent)

    def expect(self, state: RequestState, group: int | None = None) -> ExpectedPages | None:
        """Reserve pages for a request that another engine of the same model and kind of proposer lends, and a row with
        recurrent layers. Returns None if they are short; try again after a step. Raises :class:`RequestError` for a request
        that the engine cannot serve.

        With data-parallel ranks the pages belong to one group, whose ranks learn of them with the next decision record.
        Follower ranks pass its number.
        """
        with self._session.use():
            with self._guard("reserving pages for a request"):
                expected = self._expect(self._session.next_id, state, group)
            if expected is not None:
                self._session.next_id += 1
                self._decision_log.append_call("expect_pages", state, expected.group)
            return expected

    def _expect(self, request_id: int, state: RequestState, group: int | None) -> ExpectedPages | None:
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
        blocks = self._blocks(state, request.row, request.pages)
        expected = ExpectedPages(request=request_id, pages=blocks, free=free, written=written, slot=slot, group=request.group)
        self._expected[expected] = request
        self.expected[request_id] = expected
        if self.has_pages(expected):
            self._transfer.signal_pages_free(free)
        return expected

    def has_pages(self, expected: ExpectedPages) -> bool:
        """True if the pages of the request, or this rank's heads of them, are on this rank."""
        return expected.group == self._group

    def arrived(self, expected: ExpectedPages, relay: Mapping[str, Tensor]) -> int:
        """Continue a lent request whose pages were written here, and return its id. The caller has seen *pages written*.

        ``relay`` are the host tensors that the other engine lent; other tensors raise :class:`ConfigError`.
        """
        with self._session.use():
            with self._guard("taking a request over"):
                self.check(relay)
                self._queue_arrived(expected, relay)
            needs_relay = self._has_page_parts or not self.has_pages(expected)
            relayed = dict(relay) if needs_relay else {}
            self._decision_log.append_call("pages_arrived", expected.request, relayed)
            return expected.request

    def follow_arrived(self, request: int, relay: Mapping[str, Tensor]) -> None:
        """Repeat :meth:`arrived` on a follower rank, which receives the relay only if it has the pages."""
        with self._session.use(), self._guard("taking a request over"):
            self._queue_arrived(self.expected[request], relay)

    def follow_expect(self, state: RequestState, group: int) -> None:
        """Repeat :meth:`expect` on a follower rank.

        Raises :class:`RanksDiffer` if this rank has no pages for the request.
        """
        if self.expect(state, group) is None:
            raise RanksDiffer(f"group {group} has no pages here for a request that the first rank expects in it")

    def _queue_arrived(self, expected: ExpectedPages, relay: Mapping[str, Tensor]) -> None:
        request = self._taken(expected)
        try:
            pinned: Mapping[str, Tensor] = {}
            if self.has_pages(expected):
                self.check(relay)
                pinned = self._transfer.copy_relay_to_pinned(relay)
        except BaseException:
            self._expected[expected] = request
            self.expected[request.id] = expected
            raise
        request.arrival = pinned
        self._coming.give_back(expected.slot)
        self._loop.add(request)

    def abandon(self, expected: ExpectedPages) -> None:
        """Free what is reserved for a request that will not arrive. The caller knows that the network card writes none of
        them: no transfer began, or the transfer or its link has ended.
        """
        with self._session.use():
            request = self._taken(expected)
            self._scheduler.groups[request.group].free_reserved(request)
            self._coming.give_back(expected.slot)
            self._decision_log.append_call("release_pages", expected.request)

    def _reserve(self, request: Request, group: int | None) -> bool:
        schedulers = self._scheduler.groups
        known = (*self._loop.requests.values(), *self._expected.values())
        for chosen in groups_by_load(len(schedulers), known) if group is None else (group,):
            request.group = chosen
            if schedulers[chosen].reserve(request, needs_row=self._has_states):
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
