"""DeviceFacts: the hardware properties that determine tile configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CLOCK_HZ = 1.6e9
"""Approximate clock under load in cycles per second, for every supported device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """The facts about a device from which tile configurations are derived, as its runtime reports them."""

    architecture: str
    """Name of the architecture: ``sm_90`` for NVIDIA, ``gfx942`` for AMD."""
    processors: int
    """Number of multiprocessors (compute units)."""
    shared_bytes: int
    """Maximum shared memory of one program after opt-in, in bytes."""
    processor_shared: int
    """Shared memory of a multiprocessor in bytes, divided among its programs."""
    l2_bytes: int
    """Size of the second-level cache in bytes."""
    registers: int = 65536
    """Number of 4-byte registers per multiprocessor."""
    warp: int = 32
    """Number of threads per warp."""
    bandwidth: float = 0.0
    """Memory bandwidth in bytes per second, from clock and bus width; 0 if the runtime doesn't report them."""
    name: str = ""
    """The name that the device reports."""
    early_starts: bool | None = None
    """True if the device has programmatic dependent launch; None: as usual for the generation."""
    copy_engine: bool | None = None
    """True if the device has a copy engine that reads by descriptors (TMA); None: as usual for the generation."""

    @property
    def capability(self) -> int:
        """Return NVIDIA's compute capability, such as 90; 0 for other vendors."""
        return int(self.architecture[3:]) if self.architecture.startswith("sm_") else 0

    @property
    def pdl(self) -> bool:
        """Return True if a kernel can start before its predecessor has ended (programmatic dependent launch)."""
        return self.capability >= 90 if self.early_starts is None else self.early_starts

    @property
    def descriptors(self) -> bool:
        """Return True if a copy engine reads memory by tensor descriptors."""
        return self.capability >= 90 if self.copy_engine is None else self.copy_engine

    @property
    def streams_products(self) -> bool:
        """Return True if streamed kernels run: :mod:`outrider_triton.products.jit.streamed` needs Hopper's matrix unit."""
        return self.capability // 10 == 9

    @property
    def warpgroups(self) -> bool:
        """Return True if the matrix unit reads tiles of 64 rows or more from shared memory, which delays their reuse by a
        stage.
        """
        return self.capability // 10 in (9, 10)

    @property
    def fp8(self) -> bool:
        """Return True if the device has e4m3 instructions."""
        return self.capability >= 89

    @property
    def bytes_per_second(self) -> float:
        """Return ``bandwidth``, or an estimate: devices since 2020 have 5 to 36 GB/s per multiprocessor."""
        return self.bandwidth or 20e9 * self.processors

    @property
    def flops(self) -> float:
        """Return the approximate half-precision operations per second of the matrix units."""
        per_cycle = {8: 1024, 9: 4096, 10: 8192, 12: 1024}.get(self.capability // 10, 2048)
        return self.processors * CLOCK_HZ * (2048 if self.capability == 80 else per_cycle)


_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""Maximum shared memory of a program in KiB by compute capability, for runtimes that don't report it."""


def facts_of(properties: Any) -> DeviceFacts:
    """Return the facts for torch's ``get_device_properties``."""
    name = getattr(properties, "gcnArchName", "")
    if name and not name.startswith("NVIDIA"):
        architecture, default_kib = name.split(":")[0], 64
    else:
        capability = 10 * properties.major + properties.minor
        architecture, default_kib = f"sm_{capability}", _SHARED_KIB.get(capability, 99)
    program_shared = int(getattr(properties, "shared_memory_per_block_optin", 0)) or default_kib << 10
    clock, width = (int(getattr(properties, field, 0)) for field in ("memory_clock_rate", "memory_bus_width"))
    return DeviceFacts(
        architecture=architecture,
        processors=int(properties.multi_processor_count),
        # A runtime that doesn't know the opt-in limit reports the limit without opt-in.
        shared_bytes=max(program_shared, default_kib << 10) if architecture.startswith("sm_") else default_kib << 10,
        processor_shared=int(getattr(properties, "shared_memory_per_multiprocessor", 0)) or (default_kib + 1) << 10,
        l2_bytes=int(getattr(properties, "L2_cache_size", 0)) or 4 << 20,
        registers=int(getattr(properties, "regs_per_multiprocessor", 0)) or 65536,
        warp=int(getattr(properties, "warp_size", 32)),
        bandwidth=2e3 * clock * width / 8,
        name=str(getattr(properties, "name", "")),
    )
