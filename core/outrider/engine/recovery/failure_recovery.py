"""Failure recovery: undo failed iterations so that the engine can repeat them, or stop the engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from outrider.device import Backend, DeadlockError, DeviceError, DeviceFault, DeviceStuck, EngineStopped
from outrider.engine.fences import Streams
from outrider.engine.ranks.decision_log import DecisionLog
from outrider.engine.recovery.watchdog import Watchdog

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
        """Wait until all streams are idle, so that rows and pages can be reused. Return True if no operation failed."""
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
