"""Failure recovery: undo failed iterations so that the engine can repeat them, or stop the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager

from outrider.device import Backend, DeadlockError, DeviceError, DeviceFault, DeviceStuck, EngineStopped, Fence, Stream
from outrider.engine.fences import Streams
from outrider.engine.ranks.decision_log import DecisionLog

FenceWrapper = Callable[[Fence], Fence]


class Watchdog:
    """A time limit for every host wait at an engine's fences.

    A simulated device has no clock: it ignores the limit and raises :class:`DeadlockError` if no signal can come any more.
    """

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        """Maximum duration of one wait, in seconds; None: no limit."""
        self.signals = 0
        """Number of signals of all fences."""
        self.passed = ""
        """The last fence that a host wait reached."""
        self.blocked_s = 0.0
        """Total duration of all host waits, in seconds."""
        self._fences: list[WatchedFence] = []

    def wrapping(self, wrap: FenceWrapper | None) -> FenceWrapper:
        """Return a function that applies ``wrap`` to a new fence and then this watchdog."""

        def watched(fence: Fence) -> Fence:
            inner = WatchedFence(fence if wrap is None else wrap(fence), self)
            self._fences.append(inner)
            return inner

        return watched

    def wait_until_idle(self, backend: Backend, streams: Iterable[Stream]) -> None:
        """Wait on the host until all operations on ``streams`` have finished."""
        for stream in streams:
            fence = WatchedFence(backend.speculative_sync.create_fence("quiet"), self)
            fence.signal(stream)
            fence.wait_host()

    def stuck_error(self, fence: WatchedFence, reason: str) -> DeviceStuck:
        """Return the error for a host wait at ``fence`` that failed because of ``reason``."""
        lines = [
            f"the device is stuck: the host waits for fence {fence.name!r}, generation {fence.generation}, which was "
            f"enqueued on stream {fence.stream!r}; {reason}"
        ]
        lines += [
            f"  {self._progress(stream)}" for stream in dict.fromkeys(each.stream for each in self._fences if each.stream)
        ]
        lines.append(f"  the host: came past {self.passed or 'no fence yet'}")
        lines.append(
            "Generations count the signals of a fence; an iteration that was launched ahead has signalled some again. The "
            "device counts as lost: make a new backend, or end the process"
        )
        return DeviceStuck("\n".join(lines))

    def _progress(self, stream: str) -> str:
        """Describe the progress of a stream by the latest generation of each fence that was enqueued on it."""
        fences = sorted((fence for fence in self._fences if fence.stream == stream), key=lambda fence: fence.order)
        last = fences[-1]
        try:
            pending = [fence for fence in fences if not fence.done()]
        except DeviceError as error:
            return f"stream {stream!r}: enqueued last {last}; how far it is the device doesn't say: {error}"
        if not pending:
            return f"stream {stream!r}: reached {last}, the last that was enqueued"
        reached = [fence for fence in fences if fence.order < pending[0].order]
        progress = f"reached {reached[-1]}, " if reached else ""
        return f"stream {stream!r}: {progress}hasn't reached {pending[0]}; enqueued last {last}"


class WatchedFence(Fence):
    """A fence that counts its signals and limits host waits."""

    def __init__(self, inner: Fence, watchdog: Watchdog) -> None:
        super().__init__(inner.name)
        self._inner = inner
        self._watchdog = watchdog
        self.generation = 0
        """Number of signals of this fence."""
        self.stream = ""
        """The name of the stream of the last signal."""
        self.order = 0
        """The position of the last signal among all signals of the engine."""

    @property
    def mechanism(self) -> str:
        """The mechanism of the wrapped fence."""
        return self._inner.mechanism

    def signal(self, stream: Stream) -> None:
        """Signal the wrapped fence and count the signal."""
        self._inner.signal(stream)
        self.generation += 1
        self.stream = stream.name
        self._watchdog.signals += 1
        self.order = self._watchdog.signals

    def wait(self, stream: Stream) -> None:
        """Let ``stream`` wait without a limit: a stream's wait doesn't block the host."""
        self._inner.wait(stream)

    def wait_host(self) -> None:
        """Wait within the watchdog's limit. Raises :class:`DeviceStuck` after the limit or for a deadlock."""
        limit = self._watchdog.limit_s
        began = time.perf_counter()
        try:
            if limit is None:
                self._inner.wait_host()
            elif not self._inner.wait_host_within(limit):
                raise self._watchdog.stuck_error(self, f"it hasn't come within {limit:g} s")
        except DeadlockError as error:
            raise self._watchdog.stuck_error(self, f"it can't come any more: {error}") from error
        finally:
            self._watchdog.blocked_s += time.perf_counter() - began
        self._watchdog.passed = str(self)

    def wait_host_within(self, seconds: float) -> bool:
        """Wait at the wrapped fence, without the watchdog's limit."""
        return self._inner.wait_host_within(seconds)

    def done(self) -> bool:
        """Return True if the last signal of the wrapped fence is complete."""
        return self._inner.done()

    def __str__(self) -> str:
        return f"{self.name} (generation {self.generation})"


_MAX_FAILURES = 8
"""Number of consecutive recoverable failures, while the engine waits for its streams, that make a device count as stuck."""


class FailureRecovery:
    """The guard around an engine's device work. It converts errors, undoes failed work and stops the engine after a loss.

    With several ranks no rank can repeat work alone, so each failure stops all ranks.
    """

    def __init__(
        self,
        backend: Backend,
        watchdog: Watchdog,
        *,
        open_requests: Callable[[], Mapping[int, tuple[int, ...]]],
        undo: Callable[[], None],
        decision_log: DecisionLog,
    ) -> None:
        """Create the recovery of an engine.

        ``open_requests`` returns the outputs that :class:`EngineStopped` lists. ``undo`` undoes the iterations in flight
        after an operation has failed on a working device. ``decision_log`` reports failures to other ranks.
        """
        self._decision_log = decision_log
        self._backend = backend
        self._watchdog = watchdog
        self._open_requests = open_requests
        self._undo = undo
        self.stopped: DeviceError | None = None
        """The error that stopped the engine; None while the engine works."""

    @property
    def blocked_s(self) -> float:
        """Total host wait at fences, in seconds."""
        return self._watchdog.blocked_s

    def check(self) -> None:
        """Raise :class:`EngineStopped` if an earlier error has stopped the engine."""
        if self.stopped is not None:
            outputs = self._open_requests()
            raise EngineStopped(
                f"this engine stopped, with {len(outputs)} requests open ({', '.join(map(str, outputs)) or 'none'}): "
                f"{self.stopped}\nMake a new backend and a new engine; open_requests has the output of each request",
                outputs,
            )

    @contextmanager
    def guard_device_work(self, activity: str) -> Generator[None]:
        """Guard device work: convert errors, undo the iterations in flight after a fault, stop the engine after a loss.

        ``activity``: the description for error messages. Raises :class:`EngineStopped` if the engine has stopped.
        """
        self.check()
        with self._stopping_after_loss(activity):
            try:
                with self._backend.guard(activity):
                    yield
            except DeviceFault:
                if self._decision_log.can_repeat:
                    self._undo()
                raise

    @contextmanager
    def _stopping_after_loss(self, activity: str) -> Generator[None]:
        try:
            yield
        except DeadlockError as error:
            self.stopped = DeviceStuck(f"the device is stuck: {activity}, {error}")
            raise self.stopped from error
        except DeviceError as error:
            if not self._decision_log.can_repeat:
                raise self.stop_with_ranks(error) from error
            if error.device_lost:
                self.stopped = error
            raise

    def stop_with_ranks(self, error: BaseException) -> DeviceError:
        """Stop this rank, report ``error`` to the other ranks once, and return the error that stopped this rank.

        The returned error names the rank that failed first.
        """
        if self.stopped is None:
            self.stopped = self._decision_log.report_failure(error)
            self._decision_log.end_followers()
        return self.stopped

    def wait_until_idle(self, streams: Streams) -> bool:
        """Wait until all streams are idle, so that rows and pages can be reused. Return True if no operation failed.

        Raises :class:`DeviceStuck` after :data:`_MAX_FAILURES` failures in a row.
        """
        no_failure = True
        for _ in range(_MAX_FAILURES):
            try:
                self._watchdog.wait_until_idle(self._backend, streams.all)
                return no_failure
            except DeviceError as error:
                if error.device_lost:
                    raise
                no_failure = False
        raise DeviceStuck(f"the device is stuck: it failed {_MAX_FAILURES} times in a row while the engine waited for it")
