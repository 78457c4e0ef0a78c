"""AMD architectures by the names that HIP gives them."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.device import Waiter

# A wait of a stream for an event was measured to cost an iteration more than a wait of the host does: MI350X and MI355X.
_HOST_WAITS = frozenset({"gfx950"})


@dataclass(frozen=True, slots=True)
class Architecture:
    """``name``: ``gfx942``. ``features``: what follows it, such as ``sramecc+``. ``wave_size``: threads that run in step,
    64 on CDNA and 32 on RDNA; kernels must ask, not assume.
    """

    name: str
    features: tuple[str, ...]
    wave_size: int

    @property
    def published_waiter(self) -> Waiter:
        """Who waits for published lengths, unless an option says otherwise."""
        return Waiter.HOST if self.name in _HOST_WAITS else Waiter.STREAM


def parse_architecture(full_name: str, wave_size: int) -> Architecture:
    """From HIP's full name of a device's architecture: ``gfx942:sramecc+:xnack-``."""
    name, *features = full_name.split(":")
    return Architecture(name, tuple(features), wave_size)
