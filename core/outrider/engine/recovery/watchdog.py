"""Host waits with a time limit: a stuck device is an error that says how far each stream has come.

There is no watching thread. The host polls where it would have blocked, so no other thread touches the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from outrider.device import Backend, DeadlockError, DeviceError, DeviceStuck, Fence, Stream

Wrap = Callable[[Fence], Fence]


class Watchdog:
    """Puts a limit on every wait of the host at an engine's fences.

    ``limit_s``: seconds that one wait may take; None: for ever. A device without a clock of its own knows no limit, and
    says at once when what is waited for can't come.
    """

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self.signals = 0
        self.passed = ""
        """The fence that the host waited for last, and which came."""
        self.blocked_s = 0.0
        """Seconds that the host has waited in all."""
        self._fences: list[Watched] = []

    def around(self, wrap: Wrap | None) -> Wrap:
        """``wrap``, and the watch around it; to be given to the engine's fences as they are made."""

        def watched(fence: Fence) -> Fence:
            inner = Watched(fence if wrap is None else wrap(fence), self)
            self._fences.append(inner)
            return inner

        return watched

    def quiet(self, backend: Backend, streams: Iterable[Stream]) -> None:
        """Wait until everything that is enqueued on the streams is over."""
        for stream in streams:
            fence = Watched(backend.speculative_sync.create_fence("quiet"), self)
            fence.signal(stream)
            fence.wait_host()

    def stuck(self, fence: Watched, why: str) -> DeviceStuck:
        """The error for a wait that timed out."""
        lines = [
            f"the device is stuck: the host waits for fence {fence.name!r}, generation {fence.generation}, which was "
            f"enqueued on stream {fence.stream!r}; {why}"
        ]
        lines += [
            f"  {self._stands(stream)}" for stream in dict.fromkeys(each.stream for each in self._fences if each.stream)
        ]
        lines.append(f"  the host: came past {self.passed or 'no fence yet'}")
        lines.append(
            "Generations count the signals of a fence; an iteration that was launched ahead has signalled some again. The "
            "device counts as lost: make a new backend, or end the process"
        )
        return DeviceStuck("\n".join(lines))

    def _stands(self, stream: str) -> str:
        """How far a stream has come, by the latest generation of each fence that was enqueued on it."""
        signalled = sorted((each for each in self._fences if each.stream == stream), key=lambda each: each.order)
        last = signalled[-1]
        try:
            ahead = [each for each in signalled if not each.done()]
        except DeviceError as error:
            return f"stream {stream!r}: enqueued last {last}; how far it is the device doesn't say: {error}"
        if not ahead:
            return f"stream {stream!r}: reached {last}, the last that was enqueued"
        reached = [each for each in signalled if each.order < ahead[0].order]
        come = f"reached {reached[-1]}, " if reached else ""
        return f"stream {stream!r}: {come}hasn't reached {ahead[0]}; enqueued last {last}"


class Watched(Fence):
    """A fence that knows its generation, and at which the host waits with a limit."""

    def __init__(self, inner: Fence, watchdog: Watchdog) -> None:
        super().__init__(inner.name)
        self._inner = inner
        self._watchdog = watchdog
        self.generation = 0
        self.stream = ""
        """Where it was signalled last."""
        self.order = 0
        """Its place among all signals of the engine."""

    @property
    def mechanism(self) -> str:
        """That of the fence itself."""
        return self._inner.mechanism

    def signal(self, stream: Stream) -> None:
        """Count it."""
        self._inner.signal(stream)
        self.generation += 1
        self.stream = stream.name
        self._watchdog.signals += 1
        self.order = self._watchdog.signals

    def wait(self, stream: Stream) -> None:
        """As it is: a stream's wait isn't the host's."""
        self._inner.wait(stream)

    def wait_host(self) -> None:
        """Wait within the watchdog's limit. Raises :class:`DeviceStuck`."""
        limit = self._watchdog.limit_s
        began = time.perf_counter()
        try:
            if limit is None:
                self._inner.wait_host()
            elif not self._inner.wait_host_within(limit):
                raise self._watchdog.stuck(self, f"it hasn't come within {limit:g} s")
        except DeadlockError as error:
            raise self._watchdog.stuck(self, f"it can't come any more: {error}") from error
        finally:
            self._watchdog.blocked_s += time.perf_counter() - began
        self._watchdog.passed = str(self)

    def wait_host_within(self, seconds: float) -> bool:
        """As it is."""
        return self._inner.wait_host_within(seconds)

    def done(self) -> bool:
        """That of the fence itself."""
        return self._inner.done()

    def __str__(self) -> str:
        return f"{self.name} (generation {self.generation})"
