"""Watchdog: host waits at fences with a time limit. A stuck device raises an error with the progress of each stream.

The waiting thread polls the fence itself, so that no other thread touches the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from outrider.device import Backend, DeadlockError, DeviceError, DeviceStuck, Fence, Stream

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
