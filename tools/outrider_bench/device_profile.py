"""A profile of a device by its own clock: idle time, and the time of each kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.device import Backend
    from outrider_trace.timeline import Timeline

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The number of calls and the time of one kernel, copy or fill on a device, or of one operator on the host."""

    name: str
    calls: int
    us: float


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The kernels and the idle time of a device during some work, in microseconds of its own clock."""

    clock: str
    """Name of the clock: ``device``, ``host`` or ``virtual``."""
    window_us: float
    """Microseconds of the observed window, from the start of the first launch (after the launches that are left out) to the
    end of the last one.
    """
    idle_us: float
    """Microseconds of the window in which no launch runs on any stream; a graph runs from its first kernel to its last."""
    gap_us: float
    """Microseconds between the kernels of running launches."""
    kernels: tuple[KernelTime, ...]
    """Time of each kernel, the most expensive first. Kernels of several streams may overlap, so their sum may exceed the
    window.
    """
    share: float = 1.0
    """Fraction of the observed work that the window contains."""

    @property
    def idle_fraction(self) -> float:
        """Fraction of the window in which nothing runs."""
        return self.idle_us / self.window_us

    def by_kernel(self, iterations: float) -> list[dict[str, object]]:
        """Return each kernel's calls and microseconds per iteration and its share, then those of gaps and idle time."""
        rows: list[dict[str, object]] = [
            self._row(each.name, each.calls / iterations, each.us, iterations) for each in self.kernels
        ]
        rows.append(self._row("(between the kernels of one launch)", None, self.gap_us, iterations))
        rows.append(self._row("(idle: nothing is running)", None, self.idle_us, iterations))
        return rows

    def _row(self, name: str, calls: float | None, us: float, iterations: float) -> dict[str, object]:
        return {"kernel": name, "calls": calls, "us": us / iterations, "share": us / self.window_us}


def profiled(
    backend: Backend, steps: Callable[[], object], *, warm_up: Callable[[], object], lead: float = 0.0
) -> DeviceProfile | None:
    """Run ``warm_up``, then ``steps`` to their end on the device, and return a profile; None if the device has none.

    An asynchronous device is observed through torch's profiler, by all activities that this build of torch supports. Tracing
    slows each kernel a little, so iterations are timed without a profile. ``lead``: fraction of the first launches that is
    left out, because the host isn't ahead of the device yet.
    """
    import torch

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no lines about starts and stops on standard error
    asynchronous = backend.capabilities.asynchronous
    activities = torch.profiler.supported_activities() - {torch.profiler.ProfilerActivity.CPU}
    if asynchronous and not activities:
        return None
    # The first trace of a process includes the setup of the profiler, so its result is dropped.
    for work in (warm_up, steps):
        # `torch.profiler.profile` imports torch's compiler, which takes seconds; a profile of the host needs none of it.
        profiler: Any = (
            torch.profiler.profile(activities=activities, acc_events=True)
            if asynchronous
            else torch.autograd.profiler.profile(use_kineto=True)
        )
        with profiler:
            work()
            backend.synchronize()
    if asynchronous:
        return profile_device(list(profiler.events() or ()), lead)
    return _profile_host(list(profiler.function_events or ()))


def profile_timeline(timeline: Timeline) -> DeviceProfile | None:
    """Return the profile of a timeline, whose operations have virtual times; None for a timeline without operations."""
    spans = [span for lane in timeline.spans.values() for span in lane]
    whole = [(span.start, span.end) for span in spans]
    return _profile("virtual", whole, whole, ((span.name, span.end - span.start) for span in spans))


def profile_device(events: list[Any], lead: float = 0.0) -> DeviceProfile | None:
    """Return the profile of the events of torch's profiler, without the ``lead`` of the first launches, or None without
    kernels.
    """
    ran = [each for each in events if each.device_type.name != "CPU" and not getattr(each, "is_user_annotation", False)]
    # The kernels of one launch, also those of a graph, share one number; 0 is unknown.
    numbers = [event.id or -1 - index for index, event in enumerate(ran)]
    launches: dict[int, Interval] = {}
    for launch, event in zip(numbers, ran, strict=True):
        start, end = launches.get(launch, (event.time_range.start, event.time_range.end))
        launches[launch] = min(start, event.time_range.start), max(end, event.time_range.end)
    in_order = sorted(launches, key=lambda launch: launches[launch])
    skipped = in_order[: int(lead * len(in_order))]
    # Idle time before the first counted launch counts: it follows a launch that ran at full speed. Work that ran
    # concurrently with that launch counts from its end on.
    begin = max((launches[launch][1] for launch in skipped), default=float("-inf"))
    counted_launches = set(in_order).difference(skipped)
    whole = [
        (max(launches[launch][0], begin), launches[launch][1]) for launch in counted_launches if launches[launch][1] > begin
    ]
    counted = [
        (event.name, (max(event.time_range.start, begin), event.time_range.end))
        for launch, event in zip(numbers, ran, strict=True)
        if launch in counted_launches and event.time_range.end > begin
    ]
    times = [(name, end - start) for name, (start, end) in counted]
    profile = _profile("device", [each for _, each in counted], whole, times, begin=begin if skipped else None)
    if profile is None:
        return None
    return replace(profile, share=sum(us for _, us in times) / sum(event.time_range.elapsed_us() for event in ran))


def _profile_host(events: list[Any]) -> DeviceProfile | None:
    outermost = [(event.time_range.start, event.time_range.end) for event in events if event.cpu_parent is None]
    return _profile("host", outermost, outermost, ((event.name, event.self_cpu_time_total) for event in events))


def _profile(
    clock: str,
    kernels: list[Interval],
    launches: list[Interval],
    times: Iterable[tuple[str, float]],
    *,
    begin: float | None = None,
) -> DeviceProfile | None:
    if not launches:
        return None
    first = min(start for start, _ in launches)
    window = max(end for _, end in launches) - (first if begin is None else min(begin, first))
    if window <= 0:
        return None
    running = _covered(launches)
    sums: dict[str, tuple[int, float]] = {}
    for name, us in times:
        calls, before = sums.get(name, (0, 0.0))
        sums[name] = calls + 1, before + us
    most_expensive = sorted(
        (KernelTime(name, *each) for name, each in sums.items()), key=lambda kernel: (-kernel.us, kernel.name)
    )
    return DeviceProfile(clock, window, window - running, running - _covered(kernels), tuple(most_expensive))


def _covered(intervals: list[Interval]) -> float:
    """Return the time that at least one of the intervals covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
