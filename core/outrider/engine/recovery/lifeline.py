"""Device failures: those after which an engine repeats its work, and those that stop it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from outrider.device import Backend, DeadlockError, DeviceError, DeviceFault, DeviceStuck, EngineStopped
from outrider.engine.ranks.course import Course
from outrider.engine.ranks.records import RanksFailed
from outrider.engine.recovery.watchdog import Watchdog
from outrider.engine.streams import Streams

_PATIENCE = 8
"""Recoverable failures in a row after which a device counts as stuck, while the engine waits for it to come to rest."""


class Lifeline:
    """Wraps an engine's calls to the device: types their errors, and stops the engine once the device is lost.

    ``open_requests``: the requests that :class:`EngineStopped` lists. ``undo``: takes back what was in flight; called after
    an operation failed on a device that still works. ``course``: of the ranks that do the same work; none can repeat it
    alone, so that any failure of one stops them all.
    """

    def __init__(
        self,
        backend: Backend,
        watchdog: Watchdog,
        *,
        open_requests: Callable[[], Mapping[int, tuple[int, ...]]],
        undo: Callable[[], None],
        course: Course | None = None,
    ) -> None:
        self._course = course
        self._backend = backend
        self._watchdog = watchdog
        self._open_requests = open_requests
        self._undo = undo
        self.stopped: DeviceError | None = None
        """Why the engine can't go on."""

    @property
    def blocked_s(self) -> float:
        """Seconds that the host has waited at fences."""
        return self._watchdog.blocked_s

    def check(self) -> None:
        """Raise :class:`EngineStopped` once the device is gone."""
        if self.stopped is not None:
            left = self._open_requests()
            raise EngineStopped(
                f"this engine stopped, with {len(left)} requests open ({', '.join(map(str, left)) or 'none'}): "
                f"{self.stopped}\nMake a new backend and a new engine; open_requests has the output of each request",
                left,
            )

    @contextmanager
    def working(self, doing: str) -> Generator[None]:
        """Around device work: types errors, takes back what was in flight after a fault, stops the engine after a loss."""
        self.check()
        with self._noting_loss(doing):
            try:
                with self._backend.guard(doing):
                    yield
            except DeviceFault:
                if self._course is None:
                    self._undo()
                raise

    @contextmanager
    def _noting_loss(self, doing: str) -> Generator[None]:
        try:
            yield
        except DeadlockError as error:
            self.stopped = DeviceStuck(f"the device is stuck: {doing}, {error}")
            raise self.stopped from error
        except DeviceError as error:
            if self._course is not None:
                raise self.part(error) from error
            if error.device_lost:
                self.stopped = error
            raise

    def part(self, error: BaseException) -> DeviceError:
        """Part with the other ranks, and tell them, once. Returns what stopped this one, which names who failed first."""
        assert self._course is not None
        ranks = self._course.ranks
        if self.stopped is None:
            said = ranks.fail(error)
            own = error if isinstance(error, DeviceError) else RanksFailed(f"{type(error).__name__}: {error}")
            self.stopped = own if said.startswith(f"rank {ranks.rank} ") else RanksFailed(said)
            self._course.end()
        return self.stopped

    def quiet(self, streams: Streams) -> bool:
        """Wait until nothing of the engine runs, so that rows and pages can be reused. Returns whether nothing failed."""
        well = True
        for _ in range(_PATIENCE):
            try:
                self._watchdog.quiet(self._backend, streams.all)
                return well
            except DeviceError as error:
                if error.device_lost:
                    raise
                well = False
        raise DeviceStuck(f"the device is stuck: it failed {_PATIENCE} times in a row while the engine waited for it")
