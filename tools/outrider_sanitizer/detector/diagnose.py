"""Findings from conflicts: the kind, the missing edge, and the reason why the present edges give no order."""

from __future__ import annotations

from outrider.device import Access, ControllableDevice
from outrider_sanitizer.detector.actors import Actor, Point, StreamActor
from outrider_sanitizer.detector.intervals import Record
from outrider_sanitizer.detector.memory import Shadow
from outrider_sanitizer.report import AccessSite, Finding, FindingKind

_CASTS = ("aten::_to_copy", "aten::to.", "aten::type_as")


class Diagnoser:
    """The maker of findings from conflicts that the detectors report.

    ``control`` is the device's handle for schedules, or None. ``labels`` maps streams to their names in schedules. ``rank``
    is the device's rank if several ranks are watched.
    """

    def __init__(self, control: ControllableDevice | None, labels: dict[str, str], rank: int = -1) -> None:
        self._control = control
        self._rank = rank
        self._labels = labels

    # -- sites -----------------------------------------------------------------------------------------------------

    def site(self, point: Point, access: Access | None = None) -> AccessSite:
        """Return the report's description of a point: operation, stream or thread, and source line."""
        operation = point.operation
        step = point.step[1] if point.step is not None else -1
        return AccessSite(
            operation=point.name,
            actor=point.actor.name,
            host=point.actor.host,
            index=operation.index if operation is not None else step,
            location=point.location,
            graph=point.replay.graph if point.replay else "",
            generation=point.replay.generation if point.replay else 0,
            launch=point.replay.step[1] if point.replay and point.replay.step else -1,
            argument=access.argument if access else "",
            start=access.start if access else 0,
            end=access.end if access else 0,
            between=point.between,
            rank=self._rank,
        )

    # -- ordering --------------------------------------------------------------------------------------------------

    def conflict(self, old: Record, point: Point, access: Access | None, shadow: Shadow) -> Finding:
        """Return the finding of two accesses without an order."""
        before, was = old
        if was is None:
            kind = FindingKind.ALLOCATION
        elif access is not None and not access.write:
            kind = FindingKind.READ_AFTER_WRITE
        else:
            kind = FindingKind.WRITE_AFTER_WRITE if was.write else FindingKind.WRITE_AFTER_READ
        return Finding(
            kind=kind,
            first=self.site(before, was),
            second=self.site(point, access),
            missing=self.edge(before, point),
            memory=shadow.described,
            hint=self.hint(before, point),
            schedule=self.schedule(before, point) if was is not None else None,
        )

    def reused(self, shadow: Shadow, record: Record, point: Point, freed: str) -> Finding:
        """Return the finding of memory that may be reused while an access is pending."""
        before, was = record
        when = f" (at {freed})" if freed else ""
        return Finding(
            kind=FindingKind.REUSE,
            first=self.site(before, was),
            second=self.site(point),
            missing=(
                f"keep the tensor alive until an event recorded on {before.actor.name!r} after {_site(before)} has "
                f"completed (Backend.keep_alive), or make {point.actor.name!r} wait for that event before the memory is freed"
            ),
            memory=f"{shadow.described}; it was freed{when} before that was ordered",
            hint=f"the next allocation on {point.actor.name!r} may take the same memory",
            schedule=self.schedule(before, point),
        )

    def dead(self, shadow: Shadow, point: Point, freed: str) -> Finding:
        """Return the finding of a replay that uses the address of freed memory."""
        return Finding(
            kind=FindingKind.REUSE,
            first=AccessSite("release of memory", shadow.stream, shadow.stream == "host", -1, freed),
            second=self.site(point),
            missing=(
                "a graph uses the addresses that it captured: name the tensor as an input, which the graph keeps alive, and "
                "write new contents into it in place"
            ),
            memory=shadow.described,
        )

    def rebind(self, old: Record, point: Point, access: Access | None, graph: str) -> Finding:
        """Return the finding of a host parameter that was written while a replay may read it."""
        name = access.argument if access else ""
        return Finding(
            kind=FindingKind.REBIND,
            first=self.site(old[0], old[1]),
            second=self.site(point, access),
            missing=self.edge(old[0], point),
            memory=f"host parameter {name!r} of graph {graph!r}",
            hint=self.hint(old[0], point),
        )

    def flag(self, what: str, name: str, first: Point | None, second: Point) -> Finding:
        """Return the finding of a flag whose steps can run in an order that loses one of them."""
        if what == "never set":
            return Finding(
                kind=FindingKind.FLAG_NEVER_SET,
                first=None,
                second=self.site(second),
                missing=f"set flag {name!r} on the stream that produces, or don't wait: {second.actor.name!r} hangs here",
                memory=f"flag {name!r}",
            )
        assert first is not None
        if what == "early reset":
            kind, text = FindingKind.FLAG_RESET, "so the reset may come before that wait has passed, which then hangs"
        elif what == "unordered reset":
            kind, text = FindingKind.FLAG_LOST, "so the set may come before the reset, which then undoes it"
        else:
            kind, text = FindingKind.FLAG_LOST, "so the second set is lost"
        fix = (
            f"reset flag {name!r} after its waits and before it is set again"
            if what == "still set"
            else self.edge(first, second)
        )
        return Finding(
            kind=kind,
            first=self.site(first),
            second=self.site(second),
            missing=fix,
            memory=f"flag {name!r}",
            hint=f"nothing orders the two, {text}" if what != "still set" else f"the flag is still up, {text}",
        )

    def edge(self, first: Point, second: Point) -> str:
        """Return the advice, as text, which edge would order ``first`` before ``second``."""
        one, two = first.actor, second.actor
        after, before = _site_and_replay(first), _site_and_replay(second)
        if first.replay is not None and first.replay is second.replay:
            return (
                f"inside graph {first.replay.graph!r}: record an event on {one.name!r} after {_site(first)} and make "
                f"{two.name!r} wait for it before {_site(second)}"
            )
        launcher = _unordered_launcher(first, second)
        if one.host or launcher is not None:
            name = launcher.name if launcher is not None else one.name
            thread = f"{name} at {first.location}" if first.location else name
            rest = f"{two.name} does {before}" if two.host else f"{before} is enqueued on {two.name!r}"
            return f"order {thread} before {rest}: hand over through a queue, a join or an event of the host"
        if two.host:
            return f"record an event on {one.name!r} after {after} and synchronize {two.name} with it before {before}"
        return f"record an event on {one.name!r} after {after} and make {two.name!r} wait for it before {before}"

    def hint(self, first: Point, second: Point) -> str:
        """Return, as text, the orderings that are present between the two points and why they are not enough."""
        parts = []
        launcher = _unordered_launcher(first, second)
        if launcher is not None:
            parts.append(
                f"waits cover {_site(first)} in some schedules alone: {launcher.name} launched it, and nothing orders that "
                f"before {_site(second)}"
            )
        elif isinstance(second.actor, StreamActor) and not first.actor.host:
            edge = second.actor.edges.get(first.number)
            if edge is None and second.clock.get(first.number, 0):
                parts.append(
                    f"what {second.actor.name!r} knows of {first.actor.name!r} came through the host, which last waited for "
                    f"{first.actor.name!r} before {_site(first)}"
                )
            elif edge is None:
                parts.append(f"{second.actor.name!r} has never waited for {first.actor.name!r}")
            else:
                parts.append(
                    f"{second.actor.name!r} last learnt of {first.actor.name!r} by waiting for {edge}, which was recorded "
                    f"before {_site(first)}"
                )
        parts += [
            f"{point.name} is a kernel of its own, on the stream of the scope it's written in ({point.actor.name!r})"
            for point in (first, second)
            if point.name.startswith(_CASTS) and not point.actor.host
        ]
        return "; ".join(parts)

    # -- schedules -------------------------------------------------------------------------------------------------

    def schedule(self, first: Point, second: Point) -> str | None:
        """Return the schedule that runs the two steps in the opposite order; None if no tool controls the device or a step is
        unknown.
        """
        if self._control is None:
            return None
        one, two = self._step(first), self._step(second)
        return self._control.delaying(one, two) if one is not None and two is not None else None

    def _step(self, point: Point) -> tuple[str, int] | None:
        if point.step is not None:
            return point.step
        operation = point.operation
        if operation is None:
            return None
        if point.replay is not None:
            launch = point.replay.step
            # Branches of a graph have streams of their own, which only the device names.
            return (launch[0], launch[1] + operation.index + 1) if launch and _on_main(point) else None
        label = self._labels.get(operation.stream)
        return (label, operation.index) if label is not None else None


def _unordered_launcher(first: Point, second: Point) -> Actor | None:
    """Return the host thread that launched ``first`` if nothing orders that launch before ``second``, else None."""
    launches = first.actor.launches_numbered(first.number) if isinstance(first.actor, StreamActor) else None
    if launches is None or first.clock.get(launches.thread.number, 0) <= second.clock.get(launches.thread.number, 0):
        return None
    return launches.thread


def _on_main(point: Point) -> bool:
    return " in graph " not in point.actor.name


def _site(point: Point) -> str:
    return f"{point.name} ({point.location})" if point.location else point.name


def _site_and_replay(point: Point) -> str:
    if point.replay is None:
        return _site(point)
    where = f" ({point.replay.location})" if point.replay.location else ""
    return f"replay {point.replay.generation} of graph {point.replay.graph!r}{where}"
