"""Vector clocks with epochs, over streams and host threads.

A clock maps the number of each actor to the last epoch of that actor which is known to have happened. An access keeps its
*epoch*, the entry of its own actor at that time. The access happened before every point whose clock has that entry or a
later one, so one comparison decides (the epochs of FastTrack). An actor opens a new epoch only when it accesses memory after
another actor has copied its clock. A record without a new access before it therefore adds no order, and the sanitizer
reports a wait for that record as redundant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.device import Operation

Clock = Mapping[int, int]
"""A vector clock: the last known epoch of each actor, by the actor's number. A clock is never changed in place, so a record
may keep it.
"""

NOTHING: Clock = {}


class Actor:
    """An actor, whose steps have an order: a stream, a branch of a graph, or a host thread."""

    __slots__ = ("clock", "handed", "host", "name", "number", "taken")

    def __init__(self, number: int, name: str, *, host: bool) -> None:
        self.number = number
        self.name = name
        self.host = host
        self.clock: Clock = NOTHING
        self.taken = True  # another actor may hold this clock, so the next access opens a new epoch
        self.handed = True  # another host thread may hold this clock, so the next launch opens a new epoch

    def open_epoch(self) -> None:
        """Begin a new epoch of this actor: no other actor's clock covers its next access."""
        clock = dict(self.clock)
        clock[self.number] = clock.get(self.number, 0) + 1
        self.clock = clock
        self.taken = self.handed = False

    def join(self, other: Clock) -> bool:
        """Merge the clock ``other`` into this actor's clock; return True if this clock has changed."""
        mine = self.clock
        new: dict[int, int] | None = None
        for number, epoch in other.items():
            if epoch > mine.get(number, 0):
                if new is None:
                    new = dict(mine)
                new[number] = epoch
        if new is None:
            return False
        self.clock = new
        return True

    def release(self) -> Clock:
        """Return this actor's current clock, for another actor to join later."""
        self.taken = True
        return self.clock

    def __repr__(self) -> str:
        return f"<Actor {self.name!r} {dict(self.clock)}>"


@dataclass(eq=False, slots=True)
class GraphReplay:
    """One replay of a graph, named by the points of its operations. ``step`` names its launch in schedules."""

    graph: str
    generation: int
    location: str
    step: tuple[str, int] | None = None


@dataclass(eq=False, slots=True)
class Point:
    """One operation, or one access of the host, with the clock of its actor at that time; all its accesses share it."""

    actor: Actor
    name: str
    location: str
    sequence: int
    operation: Operation | None = None
    replay: GraphReplay | None = None
    step: tuple[str, int] | None = None
    between: bool = False
    """True for a point that precedes ``step`` and is no step itself."""
    conflicts: bool = False
    """True if a conflict of this point with another access was reported."""
    number: int = field(init=False)
    clock: Clock = field(init=False)
    epoch: int = field(init=False)

    def __post_init__(self) -> None:
        actor = self.actor
        if actor.taken:
            actor.open_epoch()
        self.number = actor.number
        self.clock = actor.clock
        self.epoch = actor.clock[actor.number]

    def happened_before(self, other: Point) -> bool:
        """Return True if this point happened before ``other``."""
        return self.epoch <= other.clock.get(self.number, 0)
