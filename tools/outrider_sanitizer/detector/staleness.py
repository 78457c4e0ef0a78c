"""The staleness detector: reads that are ordered and still see old or undefined contents.

The detector uses only the program order: the last write of each byte, the age of each view, and the memory that was declared
stale. One run therefore finds as much as many runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from outrider.device import Access
from outrider_sanitizer.detector.actors import Point
from outrider_sanitizer.detector.intervals import StaleMark, dense_parts
from outrider_sanitizer.detector.synchronization import TWO_WRITERS
from outrider_sanitizer.report import Finding, FindingKind

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.device import Graph
    from outrider_sanitizer.detector.diagnose import Diagnoser
    from outrider_sanitizer.detector.memory import Shadow
    from outrider_sanitizer.detector.ordering import Ordering


_MAX_ENUMERATED_RUNS = 256
"""Maximum number of runs of a strided region that are checked one by one; a region of more runs counts as its
whole extent.
"""


@dataclass(eq=False, slots=True)
class Age:
    """The replays of one graph so far, with positions in the trace over all graphs of the device."""

    name: str
    before: int
    """Position in the trace at which the graph was seen first."""
    first: int = 0
    last: int = 0
    generation: int = 0
    """Generation of the last replay."""
    sequence: int = 0
    """Position of the last replay in the trace."""
    inputs: list[tuple[str, Access]] = field(default_factory=list)
    rebound: dict[str, int] = field(default_factory=dict)
    """Position in the trace at which each host parameter was rebound last."""


class Staleness:
    """The rules about stale contents: graphs' inputs and outputs, mirrors and marks. They are applied to the histories that
    the ordering detector keeps.
    """

    def __init__(
        self,
        ordering: Ordering,
        diagnosis: Diagnoser,
        add: Callable[[Finding], None],
        locate: Callable[[Tensor], Access | None],
    ) -> None:
        self._ordering = ordering
        self._diagnosis = diagnosis
        self._add = add
        self._locate = locate
        self._ages: WeakKeyDictionary[Graph, Age] = WeakKeyDictionary()
        self._mirrors: dict[int, list[tuple[Access, Access]]] = {}
        """Each region that the program reads as the current value of another region, and that other region, by storage."""
        self._params: WeakKeyDictionary[Graph, dict[str, Access]] = WeakKeyDictionary()

    # -- marks -----------------------------------------------------------------------------------------------------

    def mark_stale(self, tensor: Tensor, reason: str, label: str = "") -> None:
        """Mark the contents of a tensor as stale: a read before the next write is a finding."""
        place = self._locate(tensor)
        if place is None:
            return
        shadow = self._ordering.memory.shadow(place.storage)
        shadow.label = shadow.label or label
        mark = StaleMark(reason, None, self._ordering.sequence)
        for start, end in dense_parts(place, _MAX_ENUMERATED_RUNS) or ((place.start, place.end),):
            shadow.mark_stale(start, end, mark)

    def mirror(self, mirror: Tensor | tuple[Graph, str], source: Tensor) -> None:
        """Register a region, or a graph's host parameter, as a mirror of another region."""
        place = self._locate(source)
        if place is None:
            return
        if isinstance(mirror, tuple):
            graph, name = mirror
            self._params.setdefault(graph, {})[name] = place
            self._age(graph).rebound.setdefault(name, self._ordering.sequence)
            return
        seen = self._locate(mirror)
        if seen is not None:
            known = self._mirrors.setdefault(seen.storage, [])
            known[:] = [pair for pair in known if (pair[0].start, pair[0].end) != (seen.start, seen.end)]
            known.append((seen, place))

    def freed(self, storage: int) -> None:
        """Drop the marks and mirrors of the memory of ``storage``, which was freed."""
        self._mirrors.pop(storage, None)

    # -- graphs ----------------------------------------------------------------------------------------------------

    def _age(self, graph: Graph) -> Age:
        age = self._ages.get(graph)
        if age is None:
            age = self._ages[graph] = Age(graph.name, self._ordering.sequence)
            inputs = {id(tensor) for tensor in graph.inputs.values()}
            for kind, tensors in (("input", graph.inputs), ("output", graph.outputs)):
                for name, tensor in tensors.items():
                    place = self._locate(tensor)
                    if place is None:
                        continue
                    shadow = self._ordering.memory.shadow(place.storage)
                    shadow.label = shadow.label or f"{kind} {name!r} of graph {graph.name!r}"
                    if kind == "input":
                        age.inputs.append((name, place))
                    elif id(tensor) not in inputs:
                        shadow.aged = [*(shadow.aged or []), (place.start, place.end, age)]
        return age

    def replayed(self, graph: Graph, stream: str, generation: int, replays: int, location: str) -> None:
        """Check the inputs of a replay before its accesses are recorded."""
        age = self._age(graph)
        for name, place in age.inputs:
            if age.first:
                self._padding(age, name, place, stream, generation, location)
        for name, source in self._params.get(graph, {}).items():
            self._rebound(age, name, source, stream, generation, location)
        age.first = age.first or replays
        age.last = replays
        age.generation = generation
        age.sequence = self._ordering.now

    def rebound(self, graph: Graph, names: tuple[str, ...]) -> None:
        """Record the position in the trace at which the host parameters ``names`` of ``graph`` were rebound."""
        age = self._age(graph)
        for name in names:
            age.rebound[name] = self._ordering.sequence

    def _replay_point(self, stream: str, age: Age, location: str) -> Point:
        return self._ordering.new_point(self._ordering.stream_actor(stream), f"replay of graph {age.name!r}", location)

    def _padding(self, age: Age, name: str, place: Access, stream: str, generation: int, location: str) -> None:
        """Report input bytes that a statement wrote for an earlier replay and did not write for this replay."""
        shadow = self._ordering.memory.shadow(place.storage)
        fresh: list[tuple[Point, Access]] = []
        old: list[tuple[int, int, Point, Access]] = []
        for begin, finish in dense_parts(place, _MAX_ENUMERATED_RUNS) or ((place.start, place.end),):
            for start, end, point, access in shadow.writes(begin, finish):
                if point.sequence > age.sequence:
                    fresh.append((point, access))
                else:
                    old.append((start, end, point, access))
        for start, end, before, was in old:
            for point, now in fresh:
                left = _left_behind(was, now, start, end) if _shrunk(before, was, point, now) else None
                if left is not None:
                    self._add(
                        Finding(
                            kind=FindingKind.STALE_PADDING,
                            first=self._diagnosis.site(before, was),
                            second=self._diagnosis.site(
                                self._replay_point(stream, age, location),
                                Access(place.storage, *left, False, argument=name),
                            ),
                            missing=(
                                f"write bytes {left[0]} to {left[1]} of input {name!r} again before replay {generation} of "
                                f"graph {age.name!r}: {point.location or point.name} wrote bytes {now.start} to {now.end} "
                                f"this time and {was.start} to {was.end} before"
                            ),
                            memory=shadow.described,
                            hint="the graph reads its whole input; what lies behind this batch is left from a larger one",
                        )
                    )
                    return

    def _rebound(self, age: Age, name: str, source: Access, stream: str, generation: int, location: str) -> None:
        shadow = self._ordering.memory.shadow(source.storage)
        write = shadow.last_write(source.start, source.end)
        if write is None or write[0].sequence <= age.rebound.get(name, age.before):
            return
        self._add(
            Finding(
                kind=FindingKind.NOT_REBOUND,
                first=self._diagnosis.site(write[0], write[1]),
                second=self._diagnosis.site(self._replay_point(stream, age, location)),
                missing=(
                    f"call update_params({name!r}) on graph {age.name!r} after {self._diagnosis.site(write[0]).brief} and "
                    f"before replay {generation}"
                ),
                memory=f"host parameter {name!r} of graph {age.name!r}, which stands for {shadow.described}",
            )
        )

    # -- reads -----------------------------------------------------------------------------------------------------

    def check_read(self, point: Point, access: Access, shadow: Shadow) -> None:
        """Check a read for stale bytes before the read is added to the history."""
        if shadow.aged is not None and access.born >= 0 and point.replay is None:
            self._output(point, access, shadow)
        for region, source in self._mirrors.get(access.storage, ()) if self._mirrors else ():
            if region.start < access.end and access.start < region.end:
                self._mirrored(point, access, shadow, region, source)

    def _output(self, point: Point, access: Access, shadow: Shadow) -> None:
        for start, end, age in shadow.aged or ():
            assert isinstance(age, Age)
            if not (start < access.end and access.start < end and 0 < age.first <= access.born < age.last):
                continue
            write = shadow.last_write(access.start, access.end)
            if write is None or write[0].sequence <= age.sequence:
                continue
            self._add(
                Finding(
                    kind=FindingKind.STALE_OUTPUT,
                    first=self._diagnosis.site(write[0], write[1]),
                    second=self._diagnosis.site(point, access),
                    missing=(
                        f"read the view, or clone it, before replay {age.generation} of graph {age.name!r} is enqueued; a "
                        "view that is meant to follow the graph is made before its first replay"
                    ),
                    memory=shadow.described,
                    hint=f"the view was made before replay {age.generation}, which overwrote what it showed",
                )
            )

    def _mirrored(self, point: Point, access: Access, shadow: Shadow, region: Access, mirrored: Access) -> None:
        source = self._ordering.memory.shadow(mirrored.storage)
        written = source.last_write(mirrored.start, mirrored.end)
        if written is None:
            return
        refreshed = shadow.last_write(region.start, region.end)
        if refreshed is not None and refreshed[0].sequence > written[0].sequence:
            return
        self._add(
            Finding(
                kind=FindingKind.STALE_MIRROR,
                first=self._diagnosis.site(written[0], written[1]),
                second=self._diagnosis.site(point, access),
                missing=(
                    f"copy the value again after {self._diagnosis.site(written[0]).brief} and before "
                    f"{self._diagnosis.site(point).brief}, or keep it up to date beside it"
                ),
                memory=f"{shadow.described}, which mirrors {source.described}",
            )
        )

    def stale(self, mark: StaleMark, point: Point, access: Access, shadow: Shadow) -> None:
        """Report a read of bytes that are stale or were never written."""
        if shadow.promised:
            return  # a write may cover them that was launched before and hasn't run
        two = mark.reason == TWO_WRITERS
        self._add(
            Finding(
                kind=FindingKind.TWO_WRITERS if two else FindingKind.STALE if mark.reason else FindingKind.UNDEFINED,
                first=self._diagnosis.site(mark.origin[0]) if mark.origin is not None else None,
                second=self._diagnosis.site(point, access),
                missing=(
                    "give each row one writer, or accumulate"
                    if two
                    else "write all of it again before it's read"
                    if mark.reason
                    else "write all of it, or read only what was written"
                ),
                memory=shadow.described,
                hint=mark.reason,
            )
        )


def _shrunk(before: Point, was: Access, after: Point, now: Access) -> bool:
    same_place = before.location == after.location and before.name == after.name
    return same_place and was.start == now.start and now.end < was.end


def _left_behind(was: Access, now: Access, start: int, end: int) -> tuple[int, int] | None:
    """Return the first bytes of [start, end) that the access ``was`` wrote and ``now`` doesn't, or None.

    Returns the whole range if an access has too many runs to enumerate.
    """
    before, after = dense_parts(was, _MAX_ENUMERATED_RUNS), dense_parts(now, _MAX_ENUMERATED_RUNS)
    if before is None or after is None:
        return start, end
    for first, last in before:
        first, last = max(first, start), min(last, end)
        for low, high in sorted(after):
            if low <= first < high:
                first = high
        if first < last:
            return first, last
    return None
