"""The advisor: waits that can be removed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider_sanitizer.actors import Lane


@dataclass(frozen=True, slots=True)
class Advice:
    """A wait that ordered nothing new, each of the ``count`` times that the line was reached in the watched run.

    What it waited for was known to the stream already: by an earlier wait, or because the host had waited. ``cost_us`` is
    what it cost on the critical path, where a timeline told.
    """

    stream: str
    event: str
    location: str
    count: int
    cost_us: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values."""
        return {name: getattr(self, name) for name in Advice.__slots__}

    def __str__(self) -> str:
        cost = f", {self.cost_us:.1f} us on the critical path" if self.cost_us is not None else ""
        return (
            f"{self.stream!r} waits for event {self.event!r} at {self.location} ({self.count} times), which orders nothing "
            f"that wasn't ordered already{cost}"
        )


class Advisor:
    """Counts, for each line that waits, how often the wait ordered anything new."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, str], list[int]] = {}

    def waited(self, lane: Lane, event: str, generation: int, location: str, new: bool) -> None:
        """Count a wait of a stream; ``new`` is True if the wait added an order."""
        del generation
        counts = self._seen.setdefault((lane.name, event, location), [0, 0])
        counts[0] += 1
        counts[1] += new

    def redundant(self) -> Iterator[Advice]:
        """Return the waits that never added an order."""
        for (stream, event, location), (count, new) in self._seen.items():
            if not new:
                yield Advice(stream, event, location, count)
