"""Streams, events, memory and synchronization policy of the backend ``cpu``. Each operation finishes before its
call returns.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.device import (
    QUANTIZED_FORMATS,
    Backend,
    Capabilities,
    DeviceError,
    Event,
    Group,
    MemoryInfo,
    OutOfDeviceMemory,
    SpeculativeSync,
    StepMode,
    Stream,
    TorchGroup,
)
from outrider_cpu.kernels import CpuKernels

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_WIDE = (torch.float32, torch.float64)
_LEVELS_WITHOUT_BFLOAT16 = frozenset({"DEFAULT", "AVX2"})
"""Instruction sets without a bfloat16 product, by torch's names."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_MAX_RETAINED_BYTES = 256 << 20
"""Maximum bytes of freed memory at the end of the heap that the C library keeps."""
_MAX_HEAP_BLOCK_BYTES = 32 << 20
"""Maximum bytes of a block that is allocated from the heap; glibc accepts no larger value."""


def retain_freed_memory() -> bool:
    """Let the C library retain up to 256 MiB of freed memory for blocks of up to 32 MiB. Return whether it accepts this.

    By default glibc returns freed blocks of about 100 KiB or more to the system. The next such block then causes a page
    fault every 4 KiB, which takes longer than filling the block. The setting applies to all threads of the process.
    Other C libraries have no such settings and are unchanged.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _MAX_RETAINED_BYTES)) and bool(mallopt(_MMAP_THRESHOLD, _MAX_HEAP_BLOCK_BYTES))


def computes_bfloat16() -> bool:
    """Return whether torch multiplies bfloat16 with instructions of this processor; without them float32 is faster.

    The environment variable ``ATEN_CPU_CAPABILITY`` can restrict torch to instructions that have no such product.
    """
    if torch.backends.cpu.get_cpu_capability() in _LEVELS_WITHOUT_BFLOAT16:
        return False
    return any(getattr(torch.cpu, probe, bool)() for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))


def capabilities(*, bfloat16: bool) -> Capabilities:
    """Return the capabilities of the host. ``bfloat16`` says that its processor multiplies bfloat16."""
    return Capabilities(
        host_writes_memory=True,
        dtypes=frozenset({*_WIDE, torch.bfloat16, torch.float16}),
        collectives=True,
        quantized_formats=frozenset(QUANTIZED_FORMATS),
        preferred_dtypes=(torch.bfloat16, *_WIDE) if bfloat16 else _WIDE,
    )


class CpuStream(Stream):
    """A stream whose operations finish before the call that enqueues them returns."""

    @property
    def native(self) -> Any:
        """The stream's name: the host has no stream object."""
        return self.name

    def _record(self, event: Event) -> None:
        """Record nothing: all earlier work has run, so the counted generation is already complete."""

    def _wait(self, event: Event) -> None:
        """Return at once: the backend interface has checked that the generation was recorded."""

    def _synchronize(self) -> None:
        """Return at once: a host stream never has pending work."""

    def _query(self) -> bool:
        return True


class CpuEvent(Event):
    """An event of the host; a record completes at once."""

    def _query(self) -> bool:
        return True

    def _synchronize(self) -> None:
        """Return at once: the record completed the event."""


class CpuSync(SpeculativeSync):
    """Host policy that supports every step mode, because no work is ever pending."""

    step_modes = frozenset(StepMode)


class CpuBackend(Backend):
    """The reference backend: operations run synchronously on the host CPU."""

    def __init__(self) -> None:
        super().__init__(
            "cpu",
            torch.device("cpu"),
            capabilities=capabilities(bfloat16=computes_bfloat16()),
            kernels=CpuKernels(),
            speculative_sync=CpuSync,
        )

    @contextmanager
    def _on(self, stream: Stream) -> Generator[None]:
        del stream  # the host runs all operations in one order
        yield

    def _create_stream(self, name: str, priority: int) -> Stream:
        return CpuStream(self, name, priority)

    def _create_event(self, name: str, timing: bool) -> Event:
        return CpuEvent(self, name, timing)

    def _synchronize(self) -> None:
        """Return at once: the host never has pending work."""

    def _empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def _is_pinned(self, tensor: Tensor) -> bool:
        # Host operations access pinned and pageable memory alike.
        return tensor.device.type == "cpu"

    def translate_error(self, error: Exception, doing: str) -> DeviceError | None:
        """Return `OutOfDeviceMemory` for a failed host allocation, else None. Torch raises a plain RuntimeError for it."""
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error)):
            reason = str(error).splitlines()[0] if str(error) else "MemoryError"
            return OutOfDeviceMemory(f"{self.label} is out of memory {doing}: {reason}")
        return None

    def _create_group(self, name: str, ranks: tuple[int, ...], rank: int, store: Store, timeout_s: float) -> Group:
        return TorchGroup(self, name, ranks, rank, store, timeout_s)

    def memory_info(self) -> MemoryInfo:
        """Return zeros: the host backend has no memory limit."""
        return MemoryInfo(total=0, free=0, allocated=0)
