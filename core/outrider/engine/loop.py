"""The loop of iterations, from the scheduler's batch to results on the host, and the iterations in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from outrider.device import Decision, DeviceFault
from outrider.engine.ranks.decision_log import DecisionLog
from outrider.engine.recovery import FailureRecovery, Watchdog
from outrider.engine.requests.batch import Batch
from outrider.engine.requests.groups import GroupScheduler
from outrider.engine.requests.request import FinishReason, OutputQueue, Request, RequestFailed, StepOutput
from outrider.engine.requests.scheduler import OutOfPages, Scheduler
from outrider.engine.state.parts import EngineParts
from outrider.engine.state.results import HostResults, PendingResult
from outrider.errors import RequestError


class IterationLauncher(Protocol):
    """A launcher of iterations: :class:`~outrider.engine.step.Step`, or a step that is wrapped for several ranks."""

    def launch(self, requested: Batch) -> PendingResult:
        """Enqueue one iteration of ``requested`` and return its pending result. The host waits for the device only as
        :mod:`~outrider.engine.step` lists.
        """

    def shape(self, batch: Batch | None) -> Mapping[str, Decision]:
        """Return the decisions about the launch of ``batch`` that other ranks must share."""


_MAX_CHANCE_OF_END = 0.1
"""Probability that all requests end, above which the loop waits for results before it launches.

An idle gap costs at most a tenth of an iteration; a wasted iteration costs a whole one.
"""


class Loop:
    """The loop that launches the batches of ``scheduler`` through ``step`` and handles their results.

    With ``runs_ahead``, the loop launches an iteration before it handles the results of the previous one. An iteration with a
    guided request runs alone: its masks depend on the tokens before it, and the next iteration depends on its own tokens.
    ``decision_log`` makes all ranks do the same.
    """

    def __init__(
        self,
        parts: EngineParts,
        step: IterationLauncher,
        scheduler: Scheduler | GroupScheduler,
        watchdog: Watchdog,
        decision_log: DecisionLog,
        *,
        runs_ahead: bool,
    ) -> None:
        self.decision_log = decision_log
        self._backend = parts.backend
        self._streams = parts.streams
        self._fences = parts.fences
        self.scheduler = scheduler
        self.step = step
        self._results, self._staging = parts.results, parts.staging
        self._runs_ahead = runs_ahead
        self.failure_recovery = FailureRecovery(
            parts.backend,
            watchdog,
            open_requests=lambda: self.open_requests,
            undo=self._undo,
            decision_log=decision_log,
        )
        self._in_flight: deque[PendingResult] = deque()
        self.requests: dict[int, Request] = {}
        """The requests that wait or run, by id."""
        self.output_queue = OutputQueue()
        """Outputs of requests, by receiver."""
        counted = ("iterations", "request_iterations", "drafted_tokens", "verified_tokens", "emitted_tokens")
        self.counts = dict.fromkeys(counted, 0)

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs, an iteration is in flight, or the shared queue has outputs."""
        return bool(self.output_queue.has_outputs or self._in_flight or self.scheduler.has_work)

    @property
    def open_requests(self) -> dict[int, tuple[int, ...]]:
        """Each waiting or running request's id with its output tokens, as far as the host has read results."""
        return {request.id: tuple(request.output) for request in self.requests.values()}

    def add(self, request: Request) -> None:
        """Queue ``request`` in the scheduler, to join a later batch."""
        self.requests[request.id] = request
        self.scheduler.groups[request.group].add(request)

    def end_request(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a waiting or running request at once, and queue the samples that waited for its prompt."""
        del self.requests[request.id]
        self.scheduler.groups[request.group].drop_waiting(request)
        self.output_queue.put(request.finish(reason, error))
        self.start_followers(request)

    def hand_over_request(self, request: Request) -> None:
        """Remove a request that continues in another engine, and queue its last output here."""
        del self.requests[request.id]
        request.finish_reason = FinishReason.HAND_OVER
        self.output_queue.put(StepOutput(request.id, (), FinishReason.HAND_OVER))

    def drop_requests(self, requests: Iterable[Request]) -> None:
        """Abort each of ``requests`` that has not ended, and drop its outputs."""
        for request in requests:
            if request.id in self.requests and self.failure_recovery.stopped is None:
                self.end_request(request, FinishReason.ABORT)
            self.output_queue.close(request.id)
        self.scheduler.retire()

    def iterate(self) -> None:
        """Launch one iteration, and handle the results of this iteration or of the previous one.

        A request that cannot join a batch, or whose media cannot be read, ends with an error; the other requests continue.
        """
        with self.failure_recovery.guard_device_work("running an iteration"):
            if self._in_flight and self.scheduler.chance_of_end > _MAX_CHANCE_OF_END:
                self._handle_all_but(0)
            batch = self._next_batch()
            self.decision_log.publish_batch(batch, self.step.shape)
            if batch is not None:
                try:
                    with self._undoing(batch):
                        self._in_flight.append(self.step.launch(batch))
                except RequestFailed as failed:
                    self.end_request(failed.request, FinishReason.ERROR, str(failed))
                else:
                    self.counts["iterations"] += 1
                    for each in batch.group_batches:
                        for chunk in each.prefill:
                            if chunk.is_final:
                                self.start_followers(chunk.request)
            # The masks of a guided request depend on the tokens of this iteration.
            self._handle_all_but(1 if self._runs_ahead and batch is not None and not batch.is_guided else 0)
            self.scheduler.retire()
            self._backend.release_finished()

    def drain(self) -> None:
        """Wait for every iteration in flight and handle its results, without launching another."""
        self.decision_log.publish_or_check("drain")
        self._drain()

    def _drain(self) -> None:
        with self.failure_recovery.guard_device_work("waiting for the iterations in flight"):
            while self._in_flight:
                self._handle_oldest()
        self.scheduler.retire()

    def handle_results_of(self, request: Request) -> None:
        """Handle the results of iterations in order, until no iteration in flight contains ``request``."""
        with self.failure_recovery.guard_device_work("waiting for a request's iterations"):
            while request.in_flight:
                self._handle_oldest()

    def request_to_hand_over(self, request_id: int) -> Request:
        """Return a decoding request without iterations in flight. Raises :class:`RequestError` if there is none with this
        id.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self.handle_results_of(request)
        if request is None or request.finished:
            raise RequestError(f"request {request_id} isn't running; it may have finished already")
        if not request.row or request.needs_prefill or not request.output:
            raise RequestError(f"request {request_id} is waiting or prefilling; hand it over after its first token")
        return request

    def start_followers(self, request: Request) -> None:
        """Queue the other samples of a prompt, which waited until the prompt of ``request`` was launched and its pages can be
        shared.
        """
        for follower in request.followers:
            if not follower.finished:
                self.scheduler.groups[follower.group].add(follower)
        request.followers = []

    # -- inside ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _undoing(self, batch: Batch) -> Generator[None]:
        """Guard the launch of ``batch``, which runs alone if it is guided. After an error or an interrupt, undo it."""
        try:
            while batch.is_guided and self._in_flight:
                self._handle_oldest()
            yield
        except BaseException as error:
            alone = isinstance(error, RequestFailed) and batch.global_batch is None  # tensor-parallel ranks fail alike
            if self.decision_log.can_repeat or alone:
                self._undo(batch, failed=isinstance(error, DeviceFault))
                raise
            stopped = self.failure_recovery.stop_with_ranks(error)  # other ranks have launched the batch, or wait inside it
            if isinstance(error, RequestFailed):
                raise stopped from error
            raise

    def _undo(self, *unlaunched: Batch, failed: bool = True) -> None:
        """Return ``unlaunched`` batches to the scheduler. If an operation ``failed``, also return the batches in flight: the
        failure may have corrupted any of their results.
        """
        well = self.failure_recovery.wait_until_idle(self._streams) and not failed
        try:
            while well and self._in_flight:
                self._handle_oldest()
        finally:
            batches = [*(pending.batch for pending in self._in_flight), *unlaunched]
            self._in_flight.clear()
            self._staging.invalidate()  # a copy of the inputs may have failed
            self.scheduler.undo_batches(batches, corrupted=not well)

    def _next_batch(self) -> Batch | None:
        """Return the scheduler's next batch, or None if there is no work. If a request must be preempted, handle all
        iterations in flight first.
        """
        try:
            return self.scheduler.next_batch()
        except OutOfPages:
            self._drain()
            return self._next_batch()

    def _handle_all_but(self, kept: int) -> None:
        """Wait for results and handle them, oldest first, until at most ``kept`` iterations are in flight."""
        while len(self._in_flight) > kept:
            self._handle_oldest()

    def _handle_oldest(self) -> None:
        """Wait for the results of the oldest iteration in flight and handle them. Results of finished requests are
        dropped.
        """
        pending = self._in_flight[0]
        outcomes = self._results.read_results(pending, self._fences.results_copied[pending.entry])
        self._in_flight.popleft()
        batches = pending.batch.group_batches
        accepted = [
            len(tokens) - 1
            for batch, outcome in zip(batches, outcomes, strict=True)
            for request, tokens in zip(batch.decode, outcome.decoded, strict=True)
            if not request.finished
        ]
        self.decision_log.decide_accepted(accepted)
        self.scheduler.handle_landed(pending.batch, accepted)
        for batch, outcome in zip(batches, outcomes, strict=True):
            self._handle_results(batch, outcome)

    def _handle_results(self, batch: Batch, outcome: HostResults) -> None:
        """Append the tokens of one iteration to the requests of ``batch``, and count them."""
        max_accepted = self.scheduler.groups[0].max_accepted(batch)  # equal in all groups
        for request, tokens, proposed in zip(batch.decode, outcome.decoded, max_accepted, strict=True):
            if not request.finished:
                request.iterations += 1
                request.verified_tokens += len(tokens)
                self.counts["request_iterations"] += 1
                self.counts["drafted_tokens"] += proposed
                self.counts["verified_tokens"] += len(tokens)
                self._emit(request, tokens, outcome, proposed)
        for chunk, first in zip(batch.prefill, outcome.first_tokens, strict=True):
            if (first is not None or chunk.request.id in outcome.bad_values) and not chunk.request.finished:
                self._emit(chunk.request, () if first is None else (first,), outcome)

    def _emit(self, request: Request, tokens: Sequence[int], outcome: HostResults, proposed: int = 0) -> None:
        """Queue new tokens for their receiver. If a probe found a bad value, end the request instead."""
        bad = outcome.bad_values.get(request.id, ())
        if bad:
            if any(each.may_corrupt_cache for each in bad):
                for group in self.scheduler.groups:  # no request may share a page whose keys and values may be bad as well
                    group.pages.unregister_all()
            found = "; ".join(str(each) for each in bad)
            self.end_request(request, FinishReason.ERROR, f"request {request.id}: {found}")
            return
        output = request.append_tokens(tokens, outcome.logprobs.get(request.id, ()), proposed)
        filled = len(request.prompt) + len(request.output) - 1
        self.scheduler.groups[request.group].register(request, filled)
        self.counts["emitted_tokens"] += len(output.tokens)
        self.output_queue.put(output)
        if request.finished:
            del self.requests[request.id]
            self.start_followers(request)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of iterations, tokens and cache look-ups since the engine was created.

    ``iterations`` counts launched batches, with those of prefill only. ``request_iterations`` counts verifications of single
    requests, ``verified_tokens`` their tokens, and ``drafted_tokens`` the draft tokens that could have been accepted: those
    of chains, and the longest paths of trees. ``blocked_s`` is the time in seconds that the host waited at fences for the
    device.

    ``preemptions`` counts requests that lost their pages and start again. ``prefix_looked_up`` counts context tokens that
    were looked up in the prefix cache, and ``prefix_hits`` those whose pages were cached.
    """

    iterations: int
    request_iterations: int
    verified_tokens: int
    emitted_tokens: int
    blocked_s: float = 0.0
    preemptions: int = 0
    prefix_looked_up: int = 0
    prefix_hits: int = 0
    drafted_tokens: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens that one verification of a request yields on average; 0 before the first verification."""
        return self.verified_tokens / self.request_iterations if self.request_iterations else 0.0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of an engine at this moment. ``running`` counts requests with a row, ``waiting`` requests without one. Of
    ``pages``, no request holds ``free_pages``; of these, ``cached_pages`` have contents that a prefix may hit.
    """

    running: int
    waiting: int
    pages: int
    free_pages: int
    cached_pages: int
    state_checkpoints: int = 0
    """Number of prefixes whose recurrent states the prefix cache holds."""
