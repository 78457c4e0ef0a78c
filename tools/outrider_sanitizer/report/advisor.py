"""The advisor: it finds waits of the watched run that can be removed, because they add no order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Advice:
    """A wait that added no order in any of the ``count`` times that its line ran in the watched run.

    An earlier wait of the stream, or a wait of the host, had already ordered the stream after the record.
    """

    stream: str
    event: str
    location: str
    count: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values."""
        return {name: getattr(self, name) for name in Advice.__slots__}

    def __str__(self) -> str:
        return (
            f"{self.stream!r} waits for event {self.event!r} at {self.location} ({self.count} times), which orders nothing "
            "that wasn't ordered already"
        )


class Advisor:
    """A counter of waits by source line, and of how many of them added an order."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, str], list[int]] = {}

    def waited(self, stream: str, event: str, generation: int, location: str, new: bool) -> None:
        """Count a wait of ``stream``; ``new`` is True if the wait added an order."""
        del generation
        counts = self._seen.setdefault((stream, event, location), [0, 0])
        counts[0] += 1
        counts[1] += new

    def redundant(self) -> Iterator[Advice]:
        """Yield an advice for each line whose waits never added an order."""
        for (stream, event, location), (count, new) in self._seen.items():
            if not new:
                yield Advice(stream, event, location, count)
