"""HostSeqLens: exact numbers of cached tokens, for devices whose attention takes lengths as host integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.device import HostParam


@dataclass(frozen=True, slots=True)
class HostSeqLens:
    """Sequence lengths of a batch on the host."""

    values: tuple[int, ...]
    """Number of cached tokens of each request."""
    capacity: int
    """Number of tokens that a block table covers. Lengths are clamped to it; only finished requests exceed it."""
    captured: Mapping[str, HostParam] | None = None
    """Parameters of the open capture, which are rebound before each replay."""

    def host_param(self, name: str, ahead: int, *, least: int = 0) -> HostParam:
        """Return the lengths plus ``ahead``, at least ``least``, as a host parameter of an attention kernel."""
        if self.captured is not None:
            return self.captured[name]
        return HostParam(name, self.lengths_after(ahead, least))

    def lengths_after(self, ahead: int, least: int = 0) -> tuple[int, ...]:
        """Return the lengths plus ``ahead``, at least ``least``."""
        return tuple(max(min(value + ahead, self.capacity), least) for value in self.values)

    def padded(self, count: int) -> HostSeqLens:
        """Return the lengths for ``count`` requests; the additional ones have no cached tokens."""
        return HostSeqLens((*self.values, *[0] * (count - len(self.values))), self.capacity)
