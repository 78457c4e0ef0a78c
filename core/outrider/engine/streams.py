"""Streams: the record of an engine's device streams, some of which may be the same stream."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.device import Stream


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of an engine. ``plan`` and ``copy`` may be ``forward`` itself. ``update`` rebinds host parameters of
    graphs; None on devices without such parameters.
    """

    schedule: Stream
    forward: Stream
    plan: Stream
    copy: Stream
    update: Stream | None = None

    @property
    def all(self) -> tuple[Stream, ...]:
        """Return each stream once, in the order of their creation."""
        streams = (self.schedule, self.forward, self.plan, self.copy, self.update)
        return tuple(dict.fromkeys(stream for stream in streams if stream is not None))
