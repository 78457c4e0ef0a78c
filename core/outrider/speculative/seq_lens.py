"""Exact numbers of cached tokens, for devices whose attention takes them as host integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.device import HostParam


@dataclass(frozen=True, slots=True)
class HostSeqLens:
    """``values``: a length for each request. ``capacity``: the most that a block table holds; what counts further belongs to
    requests that are over. ``captured``: the parameters of the capture that is open, which are rebound before each replay.
    """

    values: tuple[int, ...]
    capacity: int
    captured: Mapping[str, HostParam] | None = None

    def param(self, name: str, ahead: int, *, least: int = 0) -> HostParam:
        """The lengths plus ``ahead``, and ``least`` at the least, as a host parameter that an attention kernel reads."""
        if self.captured is not None:
            return self.captured[name]
        return HostParam(name, self.plus(ahead, least))

    def plus(self, ahead: int, least: int = 0) -> tuple[int, ...]:
        """The lengths after ``ahead`` more tokens, and ``least`` at the least."""
        return tuple(max(min(value + ahead, self.capacity), least) for value in self.values)

    def padded(self, count: int) -> HostSeqLens:
        """The same for ``count`` requests; those behind have nothing cached."""
        return HostSeqLens((*self.values, *[0] * (count - len(self.values))), self.capacity)
