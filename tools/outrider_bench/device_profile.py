"""What a device ran, from its own clock: how long it was idle, and the time of each kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outrider_bench.environment import quiet_profiler

if TYPE_CHECKING:
    from outrider.device import Backend
    from outrider_trace.timeline import Timeline

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Kernel:
    """All calls of one name: kernels, copies and fills of a device, or operators where the host itself is the device."""

    name: str
    calls: int
    us: float


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A stretch of work on one device, in microseconds of ``clock`` (``device``, ``host`` or ``virtual``).

    ``window_us``: from the first launch's begin, or from the end of those that were left out, to the last one's end.
    ``idle_us``: of that, while nothing that was launched was under way on any stream; a graph is under way from its first
    kernel to its last. ``gap_us``: between the kernels of what was under way. ``kernels``: the dearest first; those of
    several streams may overlap, so they may add up to more. ``share``: of all the work that was observed, what counts here.
    """

    clock: str
    window_us: float
    idle_us: float
    gap_us: float
    kernels: tuple[Kernel, ...]
    share: float = 1.0

    @property
    def idle_fraction(self) -> float:
        """Share of the window in which nothing ran."""
        return self.idle_us / self.window_us

    def by_kernel(self, iterations: float) -> list[dict[str, object]]:
        """For each kernel its calls and microseconds an iteration, and its share of the window; then the rest."""
        rows: list[dict[str, object]] = [
            self._row(each.name, each.calls / iterations, each.us, iterations) for each in self.kernels
        ]
        rows.append(self._row("(between the kernels of one launch)", None, self.gap_us, iterations))
        rows.append(self._row("(idle: nothing is under way)", None, self.idle_us, iterations))
        return rows

    def _row(self, name: str, calls: float | None, us: float, iterations: float) -> dict[str, object]:
        return {"kernel": name, "calls": calls, "us": us / iterations, "share": us / self.window_us}


def profiled(
    backend: Backend, steps: Callable[[], object], *, warm_up: Callable[[], object], lead: float = 0.0
) -> DeviceProfile | None:
    """Run ``warm_up``, then ``steps`` to their end on the device, and tell what it did; None where it can't say.

    A device that works beside the host is asked through torch's profiler, for whatever activities this build of torch can
    observe. Tracing costs each kernel a little, so time iterations without it. ``lead``: the share of its launches, the first
    ones, that is left out; what comes before the host is ahead of the device says nothing about the work.
    """
    import torch

    quiet_profiler()
    supported = torch.profiler.supported_activities()
    host = torch.profiler.ProfilerActivity.CPU
    beside = backend.capabilities.asynchronous
    activities = supported - {host} if beside else {host}
    if not activities:
        return None
    # The first tracing of a process sets its machinery up in the middle of the work: it is thrown away.
    for work in (warm_up, steps):
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            work()
            backend.synchronize()
    events = list(profiler.events() or ())
    return _of_device(events, lead) if beside else _of_host(events)


def of_timeline(timeline: Timeline) -> DeviceProfile | None:
    """The same from a timeline, whose operations have virtual times."""
    spans = [span for lane in timeline.spans.values() for span in lane]
    whole = [(span.start, span.end) for span in spans]
    return _profile("virtual", whole, whole, ((span.name, span.end - span.start) for span in spans))


def _of_device(events: list[Any], lead: float = 0.0) -> DeviceProfile | None:
    ran = [each for each in events if each.device_type.name != "CPU" and not getattr(each, "is_user_annotation", False)]
    # What one launch enqueued, a graph's kernels among it, has one number; 0 says that it isn't known.
    numbers = [event.id or -1 - place for place, event in enumerate(ran)]
    launches: dict[int, Interval] = {}
    for launch, event in zip(numbers, ran, strict=True):
        start, end = launches.get(launch, (event.time_range.start, event.time_range.end))
        launches[launch] = min(start, event.time_range.start), max(end, event.time_range.end)
    in_order = sorted(launches, key=lambda launch: launches[launch])
    skipped = in_order[: int(lead * len(in_order))]
    # Idle time ahead of the first launch that counts does count: it comes behind one that ran at full speed. Of what ran
    # beside that one counts what is left at its end.
    begin = max((launches[launch][1] for launch in skipped), default=float("-inf"))
    left = set(in_order).difference(skipped)
    whole = [(max(launches[launch][0], begin), launches[launch][1]) for launch in left if launches[launch][1] > begin]
    counted = [
        (event.name, (max(event.time_range.start, begin), event.time_range.end))
        for launch, event in zip(numbers, ran, strict=True)
        if launch in left and event.time_range.end > begin
    ]
    times = [(name, end - start) for name, (start, end) in counted]
    profile = _profile("device", [each for _, each in counted], whole, times, begin=begin if skipped else None)
    if profile is None:
        return None
    return replace(profile, share=sum(us for _, us in times) / sum(event.time_range.elapsed_us() for event in ran))


def _of_host(events: list[Any]) -> DeviceProfile | None:
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
    under_way = _covered(launches)
    sums: dict[str, tuple[int, float]] = {}
    for name, us in times:
        calls, before = sums.get(name, (0, 0.0))
        sums[name] = calls + 1, before + us
    dearest = sorted((Kernel(name, *each) for name, each in sums.items()), key=lambda kernel: (-kernel.us, kernel.name))
    return DeviceProfile(clock, window, window - under_way, under_way - _covered(kernels), tuple(dearest))


def _covered(intervals: list[Interval]) -> float:
    """How much of the time at least one of the intervals holds."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
