"""An observer that records its calls."""

from __future__ import annotations

from typing import Any

from outrider.device import Access, Event, Observer, Operation, Stream


class Diary(Observer):
    """Entries in the order of the calls."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.operations: list[Operation] = []
        self.rows: list[tuple[Access, ...]] = []

    def stream_created(self, stream: Stream) -> None:
        """Record it."""
        self.entries.append(("stream", stream.name))

    def scope_entered(self, stream: Stream) -> None:
        """Record it."""
        self.entries.append(("entered", stream.name))

    def scope_left(self, stream: Stream) -> None:
        """Record it."""
        self.entries.append(("left", stream.name))

    def recorded(self, stream: Stream, event: Event, generation: int) -> None:
        """Record it."""
        self.entries.append(("recorded", stream.name, generation))

    def waited(self, stream: Stream, event: Event, generation: int) -> None:
        """Record it."""
        self.entries.append(("waited", stream.name, generation))

    def event_synchronized(self, event: Event, generation: int) -> None:
        """Record it."""
        self.entries.append(("event synchronized", generation))

    def stream_synchronized(self, stream: Stream) -> None:
        """Record it."""
        self.entries.append(("stream synchronized", stream.name))

    def device_synchronized(self) -> None:
        """Record it."""
        self.entries.append(("device synchronized",))

    def launched(self, operation: Operation) -> None:
        """Keep it."""
        self.operations.append(operation)

    def rows_touched(self, operation: Operation, accesses: tuple[Access, ...]) -> None:
        """Keep them."""
        self.rows.append(accesses)
