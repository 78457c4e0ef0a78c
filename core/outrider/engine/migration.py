"""Migration of requests: handed over inside one process, or lent to another process (docs/disaggregation.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from outrider.engine.base import EngineBase
from outrider.engine.borrowed_rows import BorrowedRows
from outrider.engine.ranks.commands import (
    ExpectPagesCommand,
    HandOverCommand,
    PagesArrivedCommand,
    ReleasePagesCommand,
    ResumeCommand,
    TakeOverCommand,
)
from outrider.engine.ranks.records import RanksDiffer
from outrider.engine.requests.groups import GroupScheduler
from outrider.engine.requests.hand_over import HandOver
from outrider.engine.requests.lent_pages import ExpectedPages, LentPages
from outrider.engine.requests.request import FinishReason, Request, StepOutput
from outrider.engine.requests.request_state import RequestState
from outrider.errors import RequestError


class RequestMigration(EngineBase):
    """The part of the engine's interface through which requests leave and arrive in the middle of their output."""

    _borrowed_rows: BorrowedRows | None = None

    def hand_over(self, request_id: int) -> HandOver:
        """Take a decoding request out of this engine, with its caches and draft state, for another engine's
        :meth:`take_over`.

        The host waits for the iterations in flight of this request; other requests continue. The next :meth:`step` returns
        the tokens of these iterations, and the hand-over's output includes them. Raises :class:`RequestError` for a request
        that has finished or has no output yet.
        """
        with self._use():
            self._tell(HandOverCommand, request_id)
            self._decision_log.publish_or_check("go on")
            request = self._leaving(request_id)
            with self._failure_recovery.guard_device_work("handing a request over"):
                handed = self._decision_log.keep_handed_over(self._parts.transfer.copy_request_state(request))
            del self._requests[request_id]
            request.finish_reason = FinishReason.HAND_OVER
            self._loop.output_queue.put(StepOutput(request_id, (), FinishReason.HAND_OVER))
            self._scheduler.retire()
            return handed

    def take_over(self, handed: HandOver) -> int:
        """Continue a request from another engine of the same model and kind of proposer, and return its id here.

        The request decodes once it is scheduled, without a prefill. Its completion has the whole output; :meth:`step`
        yields only new tokens. State from another backend is copied at once, and the host waits for the copy.

        Raises :class:`ConfigError` if the engines do not match, and :class:`RequestError` for a request that the engine
        cannot serve.
        """
        handed.check_fits(self.model, self.proposer)
        self._decision_log.check_handed_over(handed)
        with self._use():
            request = self._admission.arrival(self._next_id, handed)
            self._tell(TakeOverCommand, handed.key)
            self._decision_log.drop_handed_over(handed)
            request.group = handed.group
            with self._failure_recovery.guard_device_work("taking a request over"):
                request.arrival = self._parts.transfer.copy_to_this_backend(handed)
            self._next_id += 1
            self._loop.add(request)
            return request.id

    def resume(self, state: RequestState, *, lend: bool = False) -> int:
        """Queue a request that another engine knows, with its output so far, and return its id here. Prompt and output are
        prefilled.

        With ``lend``, the request does not decode here: it rests after its next token until :meth:`lend` takes it out.

        Raises :class:`RequestError` for a request that the engine cannot serve.
        """
        with self._use():
            if lend:
                self._lends().lends()
            self._tell(ResumeCommand, state)
            request = self._admission.resumed(self._next_id, state)
            request.is_prefill_only = lend
            self._choose_group([request])
            self._next_id += 1
            self._loop.add(request)
            return request.id

    def lend(self, request_id: int) -> LentPages | None:
        """Take a decoding request out of this engine. The network card reads its pages until :meth:`returned`.

        Returns None if too many lent requests are still in transfer; try again after a step. The call does not wait for a
        resting request. For another request it waits for the iterations in flight, as :meth:`hand_over` does.
        """
        with self._use():
            request = self._leaving(request_id)
            with self._failure_recovery.guard_device_work("lending a request's pages"):
                return self._lends().lend(request)

    def returned(self, lent: LentPages) -> None:
        """Free the pages of a request that was lent. The caller has seen *pages read*, or no transfer began."""
        with self._use():
            self._lends().returned(lent)

    def expect(self, state: RequestState) -> ExpectedPages | None:
        """Reserve pages for a request that another engine of the same model and kind of proposer lends. Returns None if pages
        are short; try again after a step. Raises :class:`RequestError` for a request that the engine cannot serve.

        With data-parallel ranks the pages belong to one group, whose ranks learn of them with the next decision record.
        """
        with self._use():
            return self._expect(state, None)

    def arrived(self, expected: ExpectedPages, relay: Mapping[str, Tensor]) -> int:
        """Continue a lent request whose pages were written here, and return its id. The caller has seen *pages written*.

        ``relay`` are the host tensors that the other engine lent; other tensors raise :class:`ConfigError`.
        """
        with self._use():
            with self._failure_recovery.guard_device_work("taking a request over"):
                lending = self._lends()
                lending.check(relay)
                lending.arrived(expected, relay)
            self._tell(PagesArrivedCommand, expected.request, {} if lending.has_pages(expected) else dict(relay))
            return expected.request

    def forsake(self, expected: ExpectedPages) -> None:
        """Free the pages reserved for a request. The caller knows that no transfer writes them: no transfer began, or the
        transfer or its link has ended.
        """
        with self._use():
            self._lends().forsake(expected)
            self._tell(ReleasePagesCommand, expected.request)

    @property
    def expected(self) -> Mapping[int, ExpectedPages]:
        """Requests whose pages are not written yet, by id; the same on every rank."""
        return self._lends().expected

    def ask_ranks(self, said: str) -> tuple[str, ...]:
        """Request a vote from every other rank and return the answers in the order of ranks. Each rank answers with the
        ``answer`` that its :meth:`Engine.follow` received, after all earlier calls of this engine. The call waits for the
        answers.
        """
        with self._use(), self._failure_recovery.guard_device_work("asking the other ranks"):
            return self._decision_log.request_votes(said)

    @property
    def page_memory(self) -> tuple[Tensor, ...]:
        """All tensors that have pages, [pages, ...] each, for the life of the engine. A link registers them."""
        return self._parts.transfer.paged_caches

    def _expect(self, state: RequestState, group: int | None) -> ExpectedPages | None:
        with self._failure_recovery.guard_device_work("reserving pages for a request"):
            expected = self._lends().expect(self._next_id, state, group)
        if expected is not None:
            self._next_id += 1
            self._tell(ExpectPagesCommand, state, expected.group)
        return expected

    def _follow_expect(self, command: ExpectPagesCommand) -> None:
        if self._expect(command.state, command.group) is None:
            raise RanksDiffer(f"group {command.group} has no pages here for a request that the first rank expects in it")

    def _follow_arrive(self, command: PagesArrivedCommand) -> None:
        with self._failure_recovery.guard_device_work("taking a request over"):
            self._lends().arrived(self.expected[command.request], command.relay)

    def _choose_group(self, requests: Sequence[Request]) -> None:
        """Put the samples of a prompt into the data-parallel group with the least work."""
        if isinstance(self._scheduler, GroupScheduler):
            group = self._scheduler.least_busy(self._requests.values())
            for request in requests:
                request.group = group

    def _lends(self) -> BorrowedRows:
        """Return the borrowed rows of this engine, created at the first use."""
        if self._borrowed_rows is None:
            self._borrowed_rows = BorrowedRows(self._parts, self._loop, self._admission)
        return self._borrowed_rows

    def _leaving(self, request_id: int) -> Request:
        """Return a decoding request without iterations in flight. Raises :class:`RequestError` if there is none with this
        id.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._loop.settle(request)
        if request is None or request.finished:
            raise RequestError(f"request {request_id} isn't running; it may have finished already")
        if not request.row or request.needs_prefill or not request.output:
            raise RequestError(f"request {request_id} is waiting or prefilling; hand it over after its first token")
        return request
