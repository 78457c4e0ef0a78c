"""AMD architectures by the names that HIP gives them."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.device import Waiter

# On MI350X and MI355X, a stream's wait for an event was measured to take longer than a host wait.
_HOST_WAITS = frozenset({"gfx950"})


@dataclass(frozen=True, slots=True)
class Architecture:
    """An AMD GPU architecture with its HIP features."""

    name: str
    """Name of the architecture in HIP, such as ``gfx942``."""
    features: tuple[str, ...]
    """Suffixes of HIP's full name, such as ``sramecc+``."""
    wave_size: int
    """Threads per wavefront: 64 on CDNA, 32 on RDNA."""

    @property
    def published_waiter(self) -> Waiter:
        """The default for who waits for published lengths on this architecture: the host or a stream."""
        return Waiter.HOST if self.name in _HOST_WAITS else Waiter.STREAM


def parse_architecture(full_name: str, wave_size: int) -> Architecture:
    """Parse HIP's full name of an architecture, such as ``gfx942:sramecc+:xnack-``."""
    name, *features = full_name.split(":")
    return Architecture(name, tuple(features), wave_size)
