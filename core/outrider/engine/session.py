"""Session: the checks of a caller's thread and of the engine's state, and the repetition of each call on follower ranks."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

from outrider.device import ConfigError, OutriderError
from outrider.engine.loop import Loop
from outrider.engine.ranks.decision_log import RankedDecisionLog
from outrider.engine.ranks.records import RanksDiffer
from outrider.engine.requests.groups import groups_by_load
from outrider.engine.requests.request import Request
from outrider.errors import RequestError


class WrongThread(OutriderError):
    """A thread or a forked process called an engine that it doesn't own."""


def _current_thread() -> tuple[int, str, int]:
    return threading.get_ident(), threading.current_thread().name, os.getpid()


class Session:
    """The guarded use of an engine through its loop: calls of one thread, which the ranks that follow repeat.

    The thread that owns the engine is its creator, or the last caller of :meth:`adopt`.
    """

    def __init__(self, loop: Loop) -> None:
        self._thread, self._thread_name, self._process = _current_thread()
        self._loop = loop
        self._decision_log = loop.decision_log
        self._failure_recovery = loop.failure_recovery
        self._used = False
        self._abandoned: deque[Request] = deque()
        self.next_id = 0
        """The id of the next request, unique within the engine."""

    @property
    def has_abandoned(self) -> bool:
        """True if a stream was dropped whose request has not ended."""
        return bool(self._abandoned)

    @property
    def is_owned_here(self) -> bool:
        """True if the calling thread owns the engine."""
        return threading.get_ident() == self._thread and os.getpid() == self._process

    def check_owner(self) -> None:
        """Raise :class:`WrongThread` unless the calling thread owns the engine."""
        if threading.get_ident() != self._thread:
            raise WrongThread(
                f"this engine belongs to thread {self._thread_name!r} and was called from "
                f"{threading.current_thread().name!r}: an engine is used by one thread; use outrider.AsyncEngine for "
                "several, or call Engine.adopt() in the new one once the old one is done with it"
            )
        if os.getpid() != self._process:
            raise WrongThread(
                f"this engine was made in process {self._process} and was called in {os.getpid()}, a fork of it; devices "
                "don't survive a fork: make the backend and the engine in the new process"
            )

    def adopt(self) -> None:
        """Make the calling thread the owner. Raises :class:`WrongThread` in a forked process."""
        if os.getpid() != self._process:
            self._thread = threading.get_ident()
            self.check_owner()
        self._thread, self._thread_name, _ = _current_thread()

    @contextmanager
    def use(self) -> Generator[None]:
        """Guard each call that changes the engine. Raises if this thread may not use the engine, or if the engine has
        stopped. Before and after the call, it ends the requests of streams that were dropped meanwhile.
        """
        self.check_owner()
        self._failure_recovery.check()
        self._decision_log.check_leads_or_replays()
        outermost, self._used = not self._used, True
        try:
            if outermost:
                self._end_abandoned()
            yield
            if outermost:
                self._end_abandoned()
        finally:
            self._used = not outermost

    def _end_abandoned(self) -> None:
        while self._abandoned:
            self.drop([self._abandoned.popleft()])

    def drop(self, requests: Sequence[Request]) -> None:
        """Abort each request that has not ended, and drop its outputs."""
        self._decision_log.append_call("drop", [request.id for request in requests])
        self._loop.drop_requests(requests)

    def submit(self, samples: Sequence[Request]) -> int:
        """Queue the checked samples of one prompt and return the id of the first.

        With a prefix cache, the other samples start once the first was launched, and share its pages.
        """
        first = samples[0]
        self.choose_group(samples)
        self.next_id = samples[-1].id + 1
        self._loop.requests.update({request.id: request for request in samples})
        self._loop.scheduler.groups[first.group].add(first)
        if not self._loop.scheduler.pages.shares_prefixes:
            self._loop.start_followers(first)
        return first.id

    def add(self, request: Request) -> int:
        """Queue a request that another engine has started, and return its id."""
        self.next_id = request.id + 1
        self._loop.add(request)
        return request.id

    def choose_group(self, requests: Sequence[Request]) -> None:
        """Assign all samples of a prompt to the data-parallel group that has the fewest requests."""
        groups = groups_by_load(len(self._loop.scheduler.groups), self._loop.requests.values())
        for request in requests:
            request.group = groups[0]

    def close_stream(self, request: Request) -> None:
        """End a request whose stream was closed or dropped. In another thread or inside an iteration, as in garbage
        collection, the request is noted and ends with the next call.
        """
        if self._used or not self.is_owned_here:
            self._abandoned.append(request)
        elif self._failure_recovery.stopped is not None:
            self._loop.output_queue.close(request.id)
        else:
            with self.use():
                self.drop([request])
                self._loop.drain()


Calls = Mapping[str, Callable[..., object]]
"""The function for each call of :data:`~outrider.engine.ranks.records.CALLS` with which a follower rank repeats it."""


VoteAnswer = Callable[[str], str]
"""The function of a rank that answers a vote request of the first rank; it belongs to the engine's caller."""


def vote_handler(decision_log: RankedDecisionLog, answer: VoteAnswer | None) -> Callable[[int, str], None]:
    """Return the handler of vote requests; it publishes the answer of this rank."""

    def answer_request(number: int, said: str) -> None:
        if answer is None:
            raise ConfigError(
                "the first rank asks every rank's caller for a vote, and this one gives none: use follow(answer=...)"
            )
        decision_log.publish_vote(number, answer(said))

    return answer_request


def follow(decision_log: RankedDecisionLog, calls: Calls, loop: Loop) -> None:
    """Replay decision records until the first rank's engine is closed. The first rank delivers the outputs; here they are
    dropped.

    Raises :class:`RanksDiffer` if this rank refuses a call that the first rank accepted.
    """
    try:
        while True:
            record = decision_log.next()
            for name, arguments in decision_log.calls:
                try:
                    calls[name](*arguments)
                except RequestError as error:
                    # Every rank rejects an invalid call; the first rank raises the error to its caller.
                    if name not in ("hand_over", "resume"):
                        raise RanksDiffer(
                            f"rank {decision_log.ranks.rank} refuses a call {name!r} that rank 0 took: {error}; "
                            "start all ranks with the same options, files and software"
                        ) from error
            if record.act == "iterate":
                loop.iterate()
            elif record.act == "drain":
                loop.drain()
            elif record.act == "end":
                return
            loop.output_queue.pop_outputs()
    except BaseException as error:
        stopped = loop.failure_recovery.stop_with_ranks(error)
        if isinstance(error, Exception) and stopped is not error:
            raise stopped from error
        raise
