"""A CUDA device behind the seam: torch's streams, events and graphs, and the errors of the driver told apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outrider.device import (
    BackendLoadError,
    Capabilities,
    KernelSet,
    SpeculativeSync,
    StepMode,
    TorchDeviceBackend,
)

CAPABILITIES = Capabilities(
    asynchronous=True,
    concurrent_streams=True,
    stream_priorities=True,
    event_timing=True,
    captures_graphs=True,
    forks_in_capture=True,
    perturbs_timing=True,
    memory_limit=True,
    dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
)


class CudaSync(SpeculativeSync):
    """Events with generations and cheap stream waits; a whole iteration may be one graph."""

    step_modes = frozenset(StepMode)


KERNELS = ("tuned", "triton", "torch")
"""Values of the option ``kernels``: Triton's where this device's table says that they won, everywhere, or nowhere."""


def _kernels(choice: str, device: torch.device) -> KernelSet:
    if choice == "torch":
        return KernelSet()
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise BackendLoadError(
            f"backend 'cuda': kernels={choice} needs Triton, which torch's CUDA builds bring along, but importing it failed: "
            f"{error}; install triton, or choose cuda:kernels=torch"
        ) from error
    from outrider_triton.kernelset import TritonKernels
    from outrider_triton.table import load

    properties = torch.cuda.get_device_properties(device)
    return TritonKernels(
        table=load(properties.name),
        everywhere=choice == "triton",
        processors=properties.multi_processor_count,
        pdl=properties.major >= 9,
    )


class CudaBackend(TorchDeviceBackend):
    """One CUDA device. ``kernels`` is one of :data:`KERNELS`; a device without a table is tuned to the torch references."""

    # Sticky faults of the driver arrive as plain RuntimeErrors on some torch versions.
    sticky_faults = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")

    def __init__(self, ordinal: int, *, kernels: str = "tuned") -> None:
        super().__init__("cuda", "cuda", ordinal)
        self._kernels = _kernels(kernels, self.device)
        self._sync = CudaSync(self)

    @property
    def capabilities(self) -> Capabilities:
        """Asynchronous, concurrent streams, graphs."""
        return CAPABILITIES

    @property
    def kernels(self) -> KernelSet:
        """As the option ``kernels`` says."""
        return self._kernels

    @property
    def speculative_sync(self) -> SpeculativeSync:
        """The default policy: events with generations, cheap stream waits."""
        return self._sync

    def _new_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def versions(self) -> Mapping[str, str]:
        """Torch, CUDA runtime, device name and kernels."""
        return {**super().versions(), "cuda": str(torch.version.cuda), "kernels": self._kernels.name}
