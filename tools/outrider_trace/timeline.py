"""A timeline: when each operation ran, on which stream, and which fences held it.

Where the device tells (virtual time of a simulated one) the times are exact. Elsewhere each operator that passes the
dispatcher, and each graph replay, is put between two timed events, or timed on the host where a device runs everything at
once. Times are microseconds from the start.
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
from outrider_sanitizer.places import here

if TYPE_CHECKING:
    from outrider.device import Backend, Event, Stream

_AMBIENT = "default"


@dataclass
class Span:
    """One operation on a stream."""

    stream: str
    name: str
    start: float
    end: float
    location: str = ""


@dataclass
class Wait:
    """One wait: from the record on ``source`` to what follows on ``stream``. ``at`` and ``to`` count spans there."""

    event: str
    generation: int
    source: str
    at: int
    stream: str
    to: int
    location: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A record or a wait of a fence on its stream, before the span numbered ``at``. ``fence``: without the ring's slot."""

    fence: str
    stream: str
    at: int
    waited: bool


@dataclass(frozen=True, slots=True)
class WaitCost:
    """What the waits of one line cost: ``stall_us`` in which the stream stood still for them, ``critical_us`` of that on
    the path that decides when everything is over.
    """

    stream: str
    event: str
    location: str
    count: int
    stall_us: float
    critical_us: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: getattr(self, name) for name in WaitCost.__slots__}


@dataclass
class Timeline:
    """What ran, by stream in the order of each stream, the waits between streams, and every record and wait in order."""

    spans: dict[str, list[Span]] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def lane(self, stream: str) -> list[Span]:
        """The spans of a stream."""
        return self.spans.setdefault(stream, [])

    @property
    def end(self) -> float:
        """When the last operation was over."""
        return max((span.end for lane in self.spans.values() for span in lane), default=0.0)

    def between(self, start: float, end: float) -> Timeline:
        """What ran from ``start`` to ``end``, in microseconds that count from ``start``."""
        part = Timeline()
        first: dict[str, int] = {}
        for stream, lane in self.spans.items():
            kept = [number for number, span in enumerate(lane) if span.end >= start and span.start <= end]
            if kept:
                first[stream] = kept[0]
                part.spans[stream] = [
                    replace(
                        lane[number], start=max(lane[number].start, start) - start, end=min(lane[number].end, end) - start
                    )
                    for number in kept
                ]
        for wait in self.waits:
            if wait.source in first and wait.stream in first:
                moved = replace(wait, at=wait.at - first[wait.source], to=wait.to - first[wait.stream])
                if 0 < moved.at <= len(part.spans[wait.source]) and 0 <= moved.to < len(part.spans[wait.stream]):
                    part.waits.append(moved)
        for mark in self.marks:
            if mark.stream in first:
                at = min(max(mark.at - first[mark.stream], 0), len(part.spans[mark.stream]))
                part.marks.append(replace(mark, at=at))
        return part

    def hidden(self, stream: str, behind: str) -> tuple[float, float]:
        """How long ``stream`` was busy, and how much of that while ``behind`` was busy too, in microseconds."""
        others = self.spans.get(behind, [])
        busy = shared = 0.0
        at = 0
        for span in self.spans.get(stream, []):
            busy += span.end - span.start
            while at < len(others) and others[at].end <= span.start:
                at += 1
            number = at
            while number < len(others) and others[number].start < span.end:
                shared += max(0.0, min(others[number].end, span.end) - max(others[number].start, span.start))
                number += 1
        return busy, shared

    def ends(self, wait: Wait) -> tuple[float, float] | None:
        """When the record of a wait was reached, and when what follows the wait began."""
        source, target = self.spans.get(wait.source, []), self.spans.get(wait.stream, [])
        if wait.to >= len(target):
            return None
        begin = source[wait.at - 1].end if 0 < wait.at <= len(source) else 0.0
        return begin, target[wait.to].start

    def costs(self) -> list[WaitCost]:
        """Each line that waits, the dearest first."""
        critical = self._critical()
        sums: dict[tuple[str, str, str], list[float]] = {}
        for number, wait in enumerate(self.waits):
            entry = sums.setdefault((wait.stream, wait.event, wait.location), [0.0, 0.0, 0.0])
            stall = self._stall(wait)
            entry[0] += 1
            entry[1] += stall
            entry[2] += stall if number in critical else 0.0
        costs = [WaitCost(*key, int(count), stall, crit) for key, (count, stall, crit) in sums.items()]
        return sorted(costs, key=lambda cost: (-cost.critical_us, -cost.stall_us))

    def _stall(self, wait: Wait) -> float:
        ends = self.ends(wait)
        if ends is None:
            return 0.0
        reached, start = ends
        before = self.spans[wait.stream][wait.to - 1].end if wait.to > 0 else 0.0
        # What follows began no earlier than the record; the rest of the gap is the host's.
        return max(0.0, min(reached, start) - before)

    def _critical(self) -> set[int]:
        """The waits on the path that ends last: walk back from its end, at each step along what was reached last."""
        into: dict[tuple[str, int], list[int]] = {}
        for number, wait in enumerate(self.waits):
            into.setdefault((wait.stream, wait.to), []).append(number)
        found: set[int] = set()
        stream = max(self.spans, key=lambda name: max((s.end for s in self.spans[name]), default=0.0), default=None)
        if stream is None or not self.spans[stream]:
            return found
        at = len(self.spans[stream]) - 1
        while at >= 0:
            before = self.spans[stream][at - 1].end if at > 0 else 0.0
            best: int | None = None
            for number in into.get((stream, at), ()):
                ends = self.ends(self.waits[number])
                if ends is not None and ends[0] > before:
                    before, best = ends[0], number
            if best is None:
                at -= 1
                continue
            found.add(best)
            stream, at = self.waits[best].source, self.waits[best].at - 1
        return found

    def perfetto(self) -> dict[str, Any]:
        """The trace-event format that Perfetto and browsers' tracing pages read."""
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
            ends = self.ends(wait)
            if ends is None or wait.source not in threads:
                continue
            common = {"cat": "fence", "name": f"{wait.event} generation {wait.generation}", "id": number, "pid": 1}
            # An arrow is bound to the span around its end, so it starts just inside the one before the record.
            events.append({**common, "ph": "s", "tid": threads[wait.source], "ts": max(0.0, ends[0] - 0.0005)})
            events.append({**common, "ph": "f", "bp": "e", "tid": threads[wait.stream], "ts": ends[1]})
        return {"displayTimeUnit": "ns", "traceEvents": events}


class _Recorder(TimedObserver):
    """Notes fences by how many spans their streams had at that time."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.timeline = Timeline()
        self.issued: dict[str, int] = {}
        self.lock = threading.RLock()
        self._records: WeakKeyDictionary[Event, dict[int, tuple[str, int]]] = WeakKeyDictionary()

    def recorded(self, stream: Stream, event: Event, generation: int) -> None:
        with self.lock:
            known = self._records.setdefault(event, {})
            known[generation] = (stream.name, self.issued.get(stream.name, 0))
            self._note(stream, event, waited=False)
            if len(known) > 16:
                del known[min(known)]

    def waited(self, stream: Stream, event: Event, generation: int) -> None:
        with self.lock:
            self._note(stream, event, waited=True)
            source = self._records.get(event, {}).get(generation)
            if generation and source is not None and source[0] != stream.name:
                at = self.issued.get(stream.name, 0)
                self.timeline.waits.append(Wait(event.name, generation, *source, stream.name, at, here()))

    def _note(self, stream: Stream, event: Event, *, waited: bool) -> None:
        fence = event.name.partition("[")[0]
        self.timeline.marks.append(Mark(fence, stream.name, self.issued.get(stream.name, 0), waited))


class _Told(_Recorder):
    """For devices that say when operations ran."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._graph = 0

    def launched(self, operation: Operation) -> None:
        if self.backend.active_capture is None:
            with self.lock:
                self.issued[operation.stream] = self.issued.get(operation.stream, 0) + 1

    def capture_ended(self, graph: Graph, failed: bool) -> None:
        del graph, failed

    def ran(self, operation: Operation | None, name: str, stream: str, index: int, start_us: float, end_us: float) -> None:
        del index
        if operation is None:
            return
        with self.lock:
            lane = self.timeline.lane(stream)
            lane.append(Span(stream, name, start_us, end_us, operation.location))
            self.issued[stream] = max(self.issued.get(stream, 0), len(lane))


class _Measured(_Recorder):
    """For devices that don't: timed events around operators and replays, or the host's clock."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._scopes = threading.local()
        self._pending: list[tuple[Span, Event, Event]] = []
        self._timed = backend.capabilities.event_timing
        self._quiet = False
        self._begin = time.perf_counter()
        self._base: Event | None = None

    def recorded(self, stream: Stream, event: Event, generation: int) -> None:
        if not self._quiet:
            super().recorded(stream, event, generation)

    def scope_entered(self, stream: Stream) -> None:
        self._streams.append(stream)

    def scope_left(self, stream: Stream) -> None:
        del stream
        self._streams.pop()

    @property
    def _streams(self) -> list[Stream]:
        found: list[Stream] | None = getattr(self._scopes, "streams", None)
        if found is None:
            found = self._scopes.streams = []
        return found

    @contextmanager
    def timing(self, name: str, stream: Stream | None = None) -> Generator[None]:
        """Time what is enqueued inside."""
        on = stream or (self._streams[-1] if self._streams else None)
        if on is None or self.backend.active_capture is not None:
            yield
            return
        with self.lock:
            span = Span(on.name, name, 0.0, 0.0, here())
            self.timeline.lane(on.name).append(span)
            self.issued[on.name] = self.issued.get(on.name, 0) + 1
        if not self._timed:
            span.start = (time.perf_counter() - self._begin) * 1e6
            yield
            span.end = (time.perf_counter() - self._begin) * 1e6
            return
        first = self._mark(on)
        yield
        self._pending.append((span, first, self._mark(on)))

    def _mark(self, stream: Stream) -> Event:
        event = self.backend.create_event("timing", timing=True)
        self._quiet = True
        try:
            stream.record(event)
        finally:
            self._quiet = False
        if self._base is None:
            self._base = event
        return event

    def finish(self) -> None:
        """Read the clocks."""
        if not self._timed or self._base is None:
            return
        self.backend.synchronize()
        for span, first, last in self._pending:
            span.start, span.end = self._base.elapsed_ms(first) * 1e3, self._base.elapsed_ms(last) * 1e3


class _Mode(TorchDispatchMode):
    def __init__(self, recorder: _Measured) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.is_view:
            return func(*args, **(kwargs or {}))
        with self._recorder.timing(func._schema.name):
            return func(*args, **(kwargs or {}))


@contextmanager
def record(backend: Backend) -> Generator[Timeline]:
    """Record what runs inside the ``with``; the timeline is complete at its end, when the device has been drained."""
    with ExitStack() as stack:
        recorder: _Told | _Measured
        if backend.control is not None:
            recorder = _Told(backend)
        else:
            recorder = measured = _Measured(backend)
            stack.callback(measured.finish)
            stack.enter_context(_timed_replays(measured))
            stack.enter_context(_Mode(measured))
        backend.attach(recorder)
        stack.callback(backend.detach)
        yield recorder.timeline
        backend.synchronize()


@contextmanager
def _timed_replays(recorder: _Measured) -> Generator[None]:
    original = Graph.replay

    def replay(self: Graph, stream: Stream) -> int:
        if not self.backend.capabilities.captures_graphs:
            return original(self, stream)  # it runs operator by operator, and those are timed
        with recorder.timing(f"replay {self.name}", stream):
            return original(self, stream)

    Graph.replay = replay  # type: ignore[method-assign]
    try:
        yield
    finally:
        Graph.replay = original  # type: ignore[method-assign]
