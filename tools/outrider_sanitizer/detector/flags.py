"""State of resettable flags: their sets, waits and resets, and the faults that some schedule can show."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider_sanitizer.detector.clocks import Clock, Point


@dataclass(eq=False, slots=True)
class FlagProgress:
    """The state of one flag after the steps that were able to run.

    A wait comes after the set that it consumes. A round is safe if its reset comes after its waits, and the next set comes
    after the reset. Otherwise the device may execute them in the opposite order.
    """

    raised: Point | None = None
    clock: Clock = field(default_factory=dict)
    seen: list[Point] = field(default_factory=list)
    lowered: Point | None = None

    @property
    def is_set(self) -> bool:
        """True if the flag is set, so a wait passes."""
        return self.raised is not None

    def set(self, point: Point) -> tuple[str, Point] | None:
        """Set the flag. Returns the fault ("up" or "lowered") and the conflicting point, or None."""
        if self.raised is not None:
            return "up", self.raised
        lowered = self.lowered
        self.raised = point
        self.clock = point.actor.release()
        if lowered is not None and not lowered.happened_before(point):
            return "lowered", lowered
        return None

    def wait(self, point: Point) -> None:
        """Record a wait that passes the flag; the caller checks ``up`` first."""
        self.seen = [*self.seen[-15:], point]

    def reset(self, point: Point) -> Point | None:
        """Reset the flag and return a wait of this round that may come later, or None."""
        early = next((seen for seen in self.seen if not seen.happened_before(point)), None)
        self.raised = None
        self.lowered = point
        self.seen = []
        return early
