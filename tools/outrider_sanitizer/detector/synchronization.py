"""Records of the ordering detector: captured graphs, flags, and generations of events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.device import Access, Operation
from outrider_sanitizer.detector.actors import NOTHING, Actor, Clock, Point, StreamActor
from outrider_sanitizer.detector.memory import Shadow


class CapturedStep(NamedTuple):
    """One captured step on a branch: an operation, or a record, wait, set or reset of an event or flag object."""

    what: str  # launch, allocate, record, wait, join, set, await, reset, collective
    branch: str
    subject: Any


@dataclass(eq=False)
class CapturedGraph:
    """The steps of one graph, in the order of capture."""

    main: str
    steps: list[CapturedStep] = field(default_factory=list)
    branches: dict[str, StreamActor] = field(default_factory=dict)
    summary: list[tuple[Operation, list[Access]]] | None = None
    """For a graph without branches and flags: each operation, with the accesses that operations outside can conflict with.

    All accesses of a replay then lie in one epoch of one stream, so one check per region is enough.
    """
    temporaries: set[int] = field(default_factory=set)
    dead: dict[int, tuple[Shadow, str]] = field(default_factory=dict)
    """Storages that the graph uses and that were freed after capture, with the location of the release."""

    def outside(self) -> set[int]:
        """Return the storages that the graph uses and does not own."""
        launched = [step.subject.accesses for step in self.steps if step.what == "launch"]
        launched += [step.subject[2] for step in self.steps if step.what == "collective"]
        return {access.storage for accesses in launched for access in accesses} - self.temporaries

    def has_collective(self, storage: int) -> bool:
        """Return True if a captured collective reads or writes the storage."""
        calls = (step.subject[2] for step in self.steps if step.what == "collective")
        return any(access.storage == storage for accesses in calls for access in accesses)

    def finish(self) -> None:
        """Build the summary of the graph's storages and flags at the end of the capture."""
        if any(step.branch != self.main or step.what not in ("launch", "allocate") for step in self.steps):
            return
        seen: set[tuple[object, ...]] = set()
        summary: list[tuple[Operation, list[Access]]] = []
        for step in self.steps:
            if step.what != "launch":
                continue
            kept = []
            for access in step.subject.accesses:
                place = (access.storage, access.start, access.end, access.shape, access.stride, access.by_rows)
                region = (*place, access.write)
                # An access that conflicts with a read of data that the graph wrote conflicts with that write, too.
                if region not in seen and (*place, True) not in seen:
                    seen.add(region)
                    kept.append(access)
            if kept:
                summary.append((step.subject, kept))
        self.summary = summary

    @property
    def waits_for_flags(self) -> bool:
        """True if a replay waits for flags."""
        return any(step.what == "await" for step in self.steps)


@dataclass(eq=False, slots=True)
class FlagProgress:
    """The state of one flag after the steps that were able to run.

    A wait comes after the set that it consumes. A round is safe if its reset comes after its waits, and the next set comes
    after the reset. Otherwise the device may execute them in the opposite order.
    """

    set_at: Point | None = None
    clock: Clock = field(default_factory=dict)
    waits: list[Point] = field(default_factory=list)
    reset_at: Point | None = None

    @property
    def is_set(self) -> bool:
        """True if the flag is set, so a wait passes."""
        return self.set_at is not None

    def set(self, point: Point) -> tuple[str, Point] | None:
        """Set the flag. Returns the fault ("still set" or "unordered reset") and the conflicting point, or None."""
        if self.set_at is not None:
            return "still set", self.set_at
        reset_at = self.reset_at
        self.set_at = point
        self.clock = point.actor.release()
        if reset_at is not None and not reset_at.happened_before(point):
            return "unordered reset", reset_at
        return None

    def wait(self, point: Point) -> None:
        """Record a wait that passes the flag; the caller checks :attr:`is_set` first."""
        self.waits = [*self.waits[-15:], point]

    def reset(self, point: Point) -> Point | None:
        """Reset the flag and return a wait of this round that may come later, or None."""
        early = next((wait for wait in self.waits if not wait.happened_before(point)), None)
        self.set_at = None
        self.reset_at = point
        self.waits = []
        return early


HOST = "host"
REMAPPED = "other pages were mapped under its addresses, and nothing has written them since"
TWO_WRITERS = "one operation writes them more than once, and nothing orders its parts: any of the values may remain"
_MAX_GENERATIONS = 16


@dataclass(eq=False, slots=True)
class EventRecords:
    """The latest generations of one event."""

    name: str
    hosts: dict[int, Point] = field(default_factory=dict)
    """The host's call of each generation, oldest first."""
    clocks: dict[int, Clock] = field(default_factory=dict)
    """The clock of the recording stream, for each generation whose record the stream has reached."""

    def add(self, generation: int, host: Point) -> None:
        """Add a generation, and forget the oldest one if there are too many."""
        self.hosts[generation] = host
        if len(self.hosts) > _MAX_GENERATIONS:
            oldest = next(iter(self.hosts))
            del self.hosts[oldest]
            self.clocks.pop(oldest, None)

    def covered(self, generation: int, thread: Actor) -> int:
        """Return the newest generation, up to this one, whose record is ordered before the calling thread.

        Another thread's record that nothing orders may come after the wait in another schedule, so no wait relies on it.
        """
        clock = thread.clock
        while generation > 0:
            host = self.hosts.get(generation)
            if host is None or host.number == thread.number or host.epoch <= clock.get(host.number, 0):
                break
            generation -= 1
        return generation

    def is_pending(self, generation: int) -> bool:
        """Return True until the stream has reached the record of a generation."""
        return generation in self.hosts and generation not in self.clocks

    def clock_of(self, generation: int) -> Clock:
        """Return the clock of a generation; nothing for a generation that is pending or unknown."""
        return self.clocks.get(generation, NOTHING)
