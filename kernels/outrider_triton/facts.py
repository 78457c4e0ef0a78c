"""DeviceFacts: what a device says about itself, as far as it decides how kernels are cut up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CLOCK = 1.6e9
"""Cycles a second under load, of any of these devices, about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """A device as its runtime describes it.

    ``architecture``: ``sm_90`` for NVIDIA's, ``gfx942`` for AMD's. ``processors``: multiprocessors (compute units).
    ``shared_bytes``: shared memory that one program may have, opted in; ``processor_shared``: that of a multiprocessor, which
    its programs divide. ``l2_bytes``: the second-level cache. ``registers``: of a multiprocessor, 4 bytes each. ``warp``:
    threads that run in step. ``bandwidth``: bytes a second of the memory, by its clock and width; 0 where nothing says so.
    ``name``: what it calls itself. ``early_starts``, ``copy_engine``: whether it has them; None: as its generation has.
    """

    architecture: str
    processors: int
    shared_bytes: int
    processor_shared: int
    l2_bytes: int
    registers: int = 65536
    warp: int = 32
    bandwidth: float = 0.0
    name: str = ""
    early_starts: bool | None = None
    copy_engine: bool | None = None

    @property
    def capability(self) -> int:
        """NVIDIA's compute capability, such as 90; 0 for another vendor's device."""
        return int(self.architecture[3:]) if self.architecture.startswith("sm_") else 0

    @property
    def pdl(self) -> bool:
        """Whether a kernel can start before the one ahead of it has ended."""
        return self.capability >= 90 if self.early_starts is None else self.early_starts

    @property
    def descriptors(self) -> bool:
        """Whether there is a copy engine that reads by descriptors."""
        return self.capability >= 90 if self.copy_engine is None else self.copy_engine

    @property
    def rings(self) -> bool:
        """Whether the kernels of :mod:`outrider_triton.jit.streamed` run there: they need this generation's matrix unit."""
        return self.capability // 10 == 9

    @property
    def warpgroups(self) -> bool:
        """Whether the matrix unit reads a tile of 64 rows or more from shared memory, which is free one stage later then."""
        return self.capability // 10 in (9, 10)

    @property
    def fp8(self) -> bool:
        """Whether there are instructions for numbers of e4m3."""
        return self.capability >= 89

    @property
    def bytes_per_second(self) -> float:
        """``bandwidth``, or a guess: of devices since 2020, 5 to 36 GB/s a multiprocessor."""
        return self.bandwidth or 20e9 * self.processors

    @property
    def flops(self) -> float:
        """Operations a second of the matrix units in half precision, about."""
        per_cycle = {8: 1024, 9: 4096, 10: 8192, 12: 1024}.get(self.capability // 10, 2048)
        return self.processors * CLOCK * (2048 if self.capability == 80 else per_cycle)


_SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""KiB of shared memory that a program may have, by compute capability, where the runtime doesn't say."""


def facts_of(properties: Any) -> DeviceFacts:
    """From what torch says of a device, ``get_device_properties``."""
    name = getattr(properties, "gcnArchName", "")
    if name and not name.startswith("NVIDIA"):
        architecture, default = name.split(":")[0], 64
    else:
        capability = 10 * properties.major + properties.minor
        architecture, default = f"sm_{capability}", _SHARED.get(capability, 99)
    program = int(getattr(properties, "shared_memory_per_block_optin", 0)) or default << 10
    clock, width = (int(getattr(properties, field, 0)) for field in ("memory_clock_rate", "memory_bus_width"))
    return DeviceFacts(
        architecture=architecture,
        processors=int(properties.multi_processor_count),
        # A runtime that doesn't know of the larger size says what a program has without asking for more.
        shared_bytes=max(program, default << 10) if architecture.startswith("sm_") else default << 10,
        processor_shared=int(getattr(properties, "shared_memory_per_multiprocessor", 0)) or (default + 1) << 10,
        l2_bytes=int(getattr(properties, "L2_cache_size", 0)) or 4 << 20,
        registers=int(getattr(properties, "regs_per_multiprocessor", 0)) or 65536,
        warp=int(getattr(properties, "warp_size", 32)),
        bandwidth=2e3 * clock * width / 8,
        name=str(getattr(properties, "name", "")),
    )
