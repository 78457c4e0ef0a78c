"""The base of the engine's interface: ownership by a thread, and read-only properties."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from outrider.device import Backend, ConfigError
from outrider.engine.admission import Admission
from outrider.engine.config import Choice, DecidedConfig
from outrider.engine.loop import Loop
from outrider.engine.parts import EngineParts
from outrider.engine.ranks.commands import Command, DropCommand
from outrider.engine.ranks.decision_log import DecisionLog
from outrider.engine.recovery.failure_recovery import FailureRecovery
from outrider.engine.requests.groups import GroupScheduler
from outrider.engine.requests.owner import Owner
from outrider.engine.requests.request import Request
from outrider.engine.requests.scheduler import Scheduler
from outrider.engine.stats import EngineLoad, EngineStats
from outrider.engine.streams import Streams
from outrider.model import LanguageModel, Tokenizer
from outrider.speculative.proposer import Proposer


class EngineBase:
    """Attributes of an engine, set by :class:`~outrider.engine.engine.Engine`, and properties that read them."""

    backend: Backend
    model: LanguageModel
    proposer: Proposer
    config: DecidedConfig
    _owner: Owner
    _used: bool
    _abandoned: deque[Request]
    _decision_log: DecisionLog
    _tokenizer: Tokenizer | None
    _parts: EngineParts
    _loop: Loop
    _failure_recovery: FailureRecovery
    _scheduler: Scheduler | GroupScheduler
    _requests: dict[int, Request]
    _admission: Admission
    _next_id: int

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises :class:`ConfigError` when the engine was built without one."""
        if self._tokenizer is None:
            raise ConfigError("this engine was built without a tokenizer; use Engine.from_checkpoint, or pass token ids")
        return self._tokenizer

    @property
    def chosen(self) -> tuple[Choice, ...]:
        """The settings of :attr:`config` that the engine chose when it was created, with the reasons."""
        return self.config.chosen

    @property
    def has_tokenizer(self) -> bool:
        """True if the engine was built with a tokenizer."""
        return self._tokenizer is not None

    @property
    def stats(self) -> EngineStats:
        """Counts of requests, iterations and tokens since the engine was created."""
        loop, scheduler = self._loop, self._scheduler
        return EngineStats(
            **loop.counts,
            blocked_s=self._failure_recovery.blocked_s,
            preemptions=scheduler.preemptions,
            prefix_looked_up=scheduler.prefix_looked_up,
            prefix_hits=scheduler.prefix_hits,
        )

    @property
    def load(self) -> EngineLoad:
        """The number of requests and pages that the engine holds now."""
        pages = self._scheduler.pages
        running = sum(not request.finished for request in self._scheduler.running)
        every = (pages.count - 1) * self.groups
        waiting = len(self._requests) - running
        return EngineLoad(running, waiting, every, pages.available, pages.cached, pages.state_checkpoints)

    @property
    def longest_request(self) -> int:
        """Maximum number of tokens of prompt and output of one request, limited by the context and by the cache."""
        return self._admission.longest

    @property
    def has_unfinished(self) -> bool:
        """True if :meth:`step` has work to do."""
        return bool(self._abandoned) or self._loop.has_work

    @property
    def groups(self) -> int:
        """Number of data-parallel groups of ranks, each with requests, rows and pages of its own; 1 without data
        parallelism.
        """
        return self._decision_log.groups

    @property
    def free_pages(self) -> int:
        """Number of KV pages that no request holds. Some of them may hold cached prefixes."""
        return self._scheduler.pages.available

    @property
    def streams(self) -> Streams:
        """The device streams of the engine, for tools."""
        return self._parts.streams

    @property
    def free_rows(self) -> int:
        """Number of rows that no request holds."""
        return self._scheduler.rows.available

    @property
    def open_requests(self) -> dict[int, tuple[int, ...]]:
        """The requests that wait or run, by id, with the output that the host knows. An engine that stopped still has
        them.
        """
        return self._loop.open_requests

    # -- inside ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _use(self) -> Generator[None]:
        """Guard each call that changes the engine. Raises if this thread may not use the engine, or if the engine has
        stopped. Before and after the call, it ends the requests of streams that were dropped meanwhile.
        """
        self._owner.check()
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
            self._forget([self._abandoned.popleft()])

    def _tell(self, command: Callable[..., Command], *arguments: object) -> None:
        """Publish a call that changes this engine to the other ranks, in the decision log."""
        self._decision_log.append_command(command(*arguments))

    def _forget(self, requests: Sequence[Request]) -> None:
        self._tell(DropCommand, [request.id for request in requests])
        self._loop.drop_requests(requests)
