"""Resettable flags: who set them, who waited for them, and what can go wrong in some schedule."""

from __future__ import annotations

from outrider_sanitizer.clocks import NOTHING, Clock, Point


class FlagState:
    """One flag, as far as the steps that could run have brought it.

    Orders: a wait comes after the set that it consumes. For a round to be safe, a reset must come after the waits of
    its round, and the next set after the reset; else the device may take them the other way round.
    """

    __slots__ = ("clock", "lowered", "raised", "seen")

    def __init__(self) -> None:
        self.raised: Point | None = None
        self.clock: Clock = NOTHING
        self.seen: list[Point] = []
        self.lowered: Point | None = None

    @property
    def up(self) -> bool:
        """Whether a wait passes."""
        return self.raised is not None

    def set(self, point: Point) -> tuple[str, Point] | None:
        """Raise it; what is wrong with that, if anything."""
        if self.raised is not None:
            return "up", self.raised
        lowered = self.lowered
        self.raised = point
        self.clock = point.actor.release()
        if lowered is not None and not lowered.before(point):
            return "lowered", lowered
        return None

    def wait(self, point: Point) -> None:
        """Pass, when it's up."""
        self.seen = [*self.seen[-15:], point]

    def reset(self, point: Point) -> Point | None:
        """Lower it; a wait of this round that may come later, if any."""
        early = next((seen for seen in self.seen if not seen.before(point)), None)
        self.raised = None
        self.lowered = point
        self.seen = []
        return early
