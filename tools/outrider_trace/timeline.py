"""A timeline of a run: when each operation ran, on which stream, and for which fences the streams waited.

A simulated device reports exact virtual times. On another device, the recorder puts each dispatched operator and each graph
replay between two timed events. On a device that runs operations synchronously, it reads the host's clock instead. Times are
microseconds from the start of the recording.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.utils._python_dispatch import TorchDispatchMode

from outrider.device import Graph, Operation, TimedObserver
from outrider_sanitizer.report import caller_location

if TYPE_CHECKING:
    from outrider.device import Backend, Event, Stream

_MAX_GENERATIONS = 16
"""Number of latest records of an event that a recorder remembers."""


@dataclass
class OperationSpan:
    """One operation on a stream: its name, and its start and end in microseconds."""

    stream: str
    name: str
    start: float
    end: float
    location: str = ""
    """File and line of the source that launched the operation."""


@dataclass
class WaitArrow:
    """One wait of ``stream`` for an event that was recorded on the stream ``source``; a picture shows it as an arrow."""

    event: str
    generation: int
    source: str
    at: int
    """Number of spans of ``source`` before the record."""
    stream: str
    to: int
    """Number of spans of ``stream`` before the wait: the index of the first span after it."""
    location: str
    """File and line of the source that waits."""


@dataclass(frozen=True, slots=True)
class FenceMark:
    """One record of a fence on a stream, or one wait of a stream for a fence."""

    fence: str
    """Name of the fence, without the index of its slot."""
    stream: str
    at: int
    """Number of spans of the stream before the record or wait."""
    waited: bool
    """True for a wait, False for a record."""


@dataclass(frozen=True, slots=True)
class WaitCost:
    """The cost of all waits of one source line for one event."""

    stream: str
    event: str
    location: str
    count: int
    stall_us: float
    """Microseconds in which the stream stood still because of the waits."""
    critical_us: float
    """Microseconds of ``stall_us`` on the critical path, which determines the end of the run."""


@dataclass
class Timeline:
    """The operations of a run by stream, and the waits by which fences order the streams."""

    spans: dict[str, list[OperationSpan]] = field(default_factory=dict)
    """Operations by stream, in the order of the stream."""
    waits: list[WaitArrow] = field(default_factory=list)
    """All waits of one stream for another stream, in the order of the host's calls."""
    marks: list[FenceMark] = field(default_factory=list)
    """All records and waits of all streams, in the order of the host's calls."""

    def spans_of(self, stream: str) -> list[OperationSpan]:
        """Return the list of a stream's spans, to which the caller may append."""
        return self.spans.setdefault(stream, [])

    @property
    def num_operations(self) -> int:
        """Number of operations of all streams in the timeline."""
        return sum(map(len, self.spans.values()))

    @property
    def end_time(self) -> float:
        """End of the timeline's last operation, in microseconds."""
        return max((span.end for lane in self.spans.values() for span in lane), default=0.0)

    def part_between(self, start: float, end: float) -> Timeline:
        """Return the part of the timeline from ``start`` to ``end``, in microseconds. Its times count from ``start``."""
        part = Timeline()
        first: dict[str, int] = {}
        for stream, lane in self.spans.items():
            numbers = [number for number, span in enumerate(lane) if span.end >= start and span.start <= end]
            if numbers:
                first[stream] = numbers[0]
                part.spans[stream] = [
                    replace(
                        lane[number], start=max(lane[number].start, start) - start, end=min(lane[number].end, end) - start
                    )
                    for number in numbers
                ]
        for wait in self.waits:
            if wait.source in first and wait.stream in first:
                shifted = replace(wait, at=wait.at - first[wait.source], to=wait.to - first[wait.stream])
                if 0 < shifted.at <= len(part.spans[wait.source]) and 0 <= shifted.to < len(part.spans[wait.stream]):
                    part.waits.append(shifted)
        for mark in self.marks:
            if mark.stream in first:
                at = min(max(mark.at - first[mark.stream], 0), len(part.spans[mark.stream]))
                part.marks.append(replace(mark, at=at))
        return part

    def wait_times(self, wait: WaitArrow) -> tuple[float, float] | None:
        """Return when the record of ``wait`` was reached, and when the first operation after the wait started.

        The result is None if no operation follows the wait.
        """
        source, target = self.spans.get(wait.source, []), self.spans.get(wait.stream, [])
        if wait.to >= len(target):
            return None
        begin = source[wait.at - 1].end if 0 < wait.at <= len(source) else 0.0
        return begin, target[wait.to].start

    def costs(self) -> list[WaitCost]:
        """Return the cost of each source line that waits. The line with the most critical time comes first."""
        critical = self._critical_waits()
        sums: dict[tuple[str, str, str], list[float]] = {}
        for number, wait in enumerate(self.waits):
            entry = sums.setdefault((wait.stream, wait.event, wait.location), [0.0, 0.0, 0.0])
            stall = self._stall(wait)
            entry[0] += 1
            entry[1] += stall
            entry[2] += stall if number in critical else 0.0
        costs = [WaitCost(*key, int(count), stall, critical_us) for key, (count, stall, critical_us) in sums.items()]
        return sorted(costs, key=lambda cost: (-cost.critical_us, -cost.stall_us))

    def _stall(self, wait: WaitArrow) -> float:
        ends = self.wait_times(wait)
        if ends is None:
            return 0.0
        reached, start = ends
        previous_end = self.spans[wait.stream][wait.to - 1].end if wait.to > 0 else 0.0
        # The stall ends when the record is reached. The host causes any further gap before the next operation.
        return max(0.0, min(reached, start) - previous_end)

    def _critical_waits(self) -> set[int]:
        """Return the indices of the waits on the critical path.

        The path is followed backwards from the operation that ends last. At each operation it continues with the predecessor
        that ended last: the previous operation of the stream, or the record for which the stream waited.
        """
        waits_before: dict[tuple[str, int], list[int]] = {}
        for number, wait in enumerate(self.waits):
            waits_before.setdefault((wait.stream, wait.to), []).append(number)
        critical: set[int] = set()
        stream = max(self.spans, key=lambda name: max((s.end for s in self.spans[name]), default=0.0), default=None)
        if stream is None or not self.spans[stream]:
            return critical
        at = len(self.spans[stream]) - 1
        while at >= 0:
            latest_end = self.spans[stream][at - 1].end if at > 0 else 0.0
            latest_wait: int | None = None
            for number in waits_before.get((stream, at), ()):
                ends = self.wait_times(self.waits[number])
                if ends is not None and ends[0] > latest_end:
                    latest_end, latest_wait = ends[0], number
            if latest_wait is None:
                at -= 1
                continue
            critical.add(latest_wait)
            stream, at = self.waits[latest_wait].source, self.waits[latest_wait].at - 1
        return critical

    def to_perfetto(self) -> dict[str, Any]:
        """Return the timeline in the trace-event format, which Perfetto and the tracing pages of browsers read."""
        events: list[dict[str, Any]] = []
        threads = {name: number for number, name in enumerate(self.spans, 1)}
        for name, thread in threads.items():
            events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": thread, "args": {"name": f"stream {name}"}})
            events.extend(
                {
                    "ph": "X",
                    "cat": "operation",
                    "name": span.name,
                    "pid": 1,
                    "tid": thread,
                    "ts": span.start,
                    "dur": max(span.end - span.start, 0.001),
                    "args": {"location": span.location},
                }
                for span in self.spans[name]
            )
        for number, wait in enumerate(self.waits, 1):
            ends = self.wait_times(wait)
            if ends is None or wait.source not in threads:
                continue
            common = {"cat": "fence", "name": f"{wait.event} generation {wait.generation}", "id": number, "pid": 1}
            # Perfetto binds an arrow to the span at its time, so the arrow starts just before the end of the recorded span.
            events.append({**common, "ph": "s", "tid": threads[wait.source], "ts": max(0.0, ends[0] - 0.0005)})
            events.append({**common, "ph": "f", "bp": "e", "tid": threads[wait.stream], "ts": ends[1]})
        return {"displayTimeUnit": "ns", "traceEvents": events}


class _Recorder(TimedObserver):
    """An observer that adds records and waits to a timeline, each with the number of spans launched before it. Subclasses add
    the spans.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.timeline = Timeline()
        self.num_launched: dict[str, int] = {}
        """Number of operations that the host has launched so far, by stream."""
        self.lock = threading.RLock()
        self._records: WeakKeyDictionary[Event, dict[int, tuple[str, int]]] = WeakKeyDictionary()

    def recorded(self, stream: Stream, event: Event, generation: int) -> None:
        with self.lock:
            records = self._records.setdefault(event, {})
            records[generation] = (stream.name, self.num_launched.get(stream.name, 0))
            self._add_mark(stream, event, waited=False)
            if len(records) > _MAX_GENERATIONS:
                del records[min(records)]

    def waited(self, stream: Stream, event: Event, generation: int) -> None:
        with self.lock:
            self._add_mark(stream, event, waited=True)
            source = self._records.get(event, {}).get(generation)
            if generation and source is not None and source[0] != stream.name:
                at = self.num_launched.get(stream.name, 0)
                self.timeline.waits.append(WaitArrow(event.name, generation, *source, stream.name, at, caller_location()))

    def _add_mark(self, stream: Stream, event: Event, *, waited: bool) -> None:
        fence = event.name.partition("[")[0]
        self.timeline.marks.append(FenceMark(fence, stream.name, self.num_launched.get(stream.name, 0), waited))


class _SimulatedRecorder(_Recorder):
    """The recorder for simulated devices, which report when each operation ran."""

    def launched(self, operation: Operation) -> None:
        if self.backend.active_capture is None:
            with self.lock:
                self.num_launched[operation.stream] = self.num_launched.get(operation.stream, 0) + 1

    def ran(self, operation: Operation | None, name: str, stream: str, index: int, start_us: float, end_us: float) -> None:
        del index
        if operation is None:
            return
        with self.lock:
            lane = self.timeline.spans_of(stream)
            lane.append(OperationSpan(stream, name, start_us, end_us, operation.location))
            self.num_launched[stream] = max(self.num_launched.get(stream, 0), len(lane))


class _MeasuringRecorder(_Recorder):
    """The recorder for other devices. It puts operators and replays between timed events, or reads the host's clock."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._scopes = threading.local()
        self._pending: list[tuple[OperationSpan, Event, Event]] = []
        self._has_event_timing = backend.capabilities.event_timing
        self._is_recording_own_event = False
        self._start_time = time.perf_counter()
        self._first_event: Event | None = None

    def recorded(self, stream: Stream, event: Event, generation: int) -> None:
        if not self._is_recording_own_event:
            super().recorded(stream, event, generation)

    def scope_entered(self, stream: Stream) -> None:
        self._streams.append(stream)

    def scope_left(self, stream: Stream) -> None:
        del stream
        self._streams.pop()

    @property
    def _streams(self) -> list[Stream]:
        """The streams of the open scopes of the calling thread, the innermost last."""
        streams: list[Stream] | None = getattr(self._scopes, "streams", None)
        if streams is None:
            streams = self._scopes.streams = []
        return streams

    @contextmanager
    def timing(self, name: str, stream: Stream | None = None) -> Generator[None]:
        """Add a span with the duration of the work that the body enqueues on ``stream``, or on the current stream."""
        stream = stream or (self._streams[-1] if self._streams else None)
        if stream is None or self.backend.active_capture is not None:
            yield
            return
        with self.lock:
            span = OperationSpan(stream.name, name, 0.0, 0.0, caller_location())
            self.timeline.spans_of(stream.name).append(span)
            self.num_launched[stream.name] = self.num_launched.get(stream.name, 0) + 1
        if not self._has_event_timing:
            span.start = (time.perf_counter() - self._start_time) * 1e6
            yield
            span.end = (time.perf_counter() - self._start_time) * 1e6
            return
        start = self._record_timed_event(stream)
        yield
        self._pending.append((span, start, self._record_timed_event(stream)))

    def _record_timed_event(self, stream: Stream) -> Event:
        event = self.backend.create_event("timing", timing=True)
        self._is_recording_own_event = True
        try:
            stream.record(event)
        finally:
            self._is_recording_own_event = False
        if self._first_event is None:
            self._first_event = event
        return event

    def finish(self) -> None:
        """Synchronize the device, and read the timed events into the start and end of each span."""
        if not self._has_event_timing or self._first_event is None:
            return
        self.backend.synchronize()
        for span, start, end in self._pending:
            span.start, span.end = self._first_event.elapsed_ms(start) * 1e3, self._first_event.elapsed_ms(end) * 1e3


class _TimelineMode(TorchDispatchMode):
    def __init__(self, recorder: _MeasuringRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.is_view:
            return func(*args, **(kwargs or {}))
        with self._recorder.timing(func._schema.name):
            return func(*args, **(kwargs or {}))


@contextmanager
def record_timeline(backend: Backend) -> Generator[Timeline]:
    """Record the operations that the body enqueues on ``backend``. At its end the device is synchronized.

    The timeline is complete when the context has ended.
    """
    with ExitStack() as stack:
        recorder: _SimulatedRecorder | _MeasuringRecorder
        if backend.control is not None:
            recorder = _SimulatedRecorder(backend)
        else:
            recorder = measuring = _MeasuringRecorder(backend)
            stack.callback(measuring.finish)
            stack.enter_context(_timed_replays(measuring))
            stack.enter_context(_TimelineMode(measuring))
        backend.attach(recorder)
        stack.callback(backend.detach)
        yield recorder.timeline
        backend.synchronize()


@contextmanager
def _timed_replays(recorder: _MeasuringRecorder) -> Generator[None]:
    """Replace ``Graph.replay`` for the duration of the context, so that ``recorder`` times each replay."""
    original = Graph.replay

    def replay(self: Graph, stream: Stream) -> int:
        if not self.backend.capabilities.captures_graphs:
            return original(self, stream)  # the replay runs operator by operator, and each operator is timed
        with recorder.timing(f"replay {self.name}", stream):
            return original(self, stream)

    Graph.replay = replay  # type: ignore[method-assign]
    try:
        yield
    finally:
        Graph.replay = original  # type: ignore[method-assign]
