"""The backend of CUDA devices: torch's streams, events and graphs, and a classification of driver errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from outrider.device import (
    QUANTIZED_FORMATS,
    Capabilities,
    Group,
    SpeculativeSync,
    StepMode,
    TorchDeviceBackend,
)
from outrider_triton.plugin import default_kernels

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

CAPABILITIES = Capabilities(
    asynchronous=True,
    concurrent_streams=True,
    stream_priorities=True,
    event_timing=True,
    captures_graphs=True,
    forks_in_capture=True,
    collectives=True,
    captures_collectives=True,
    perturbs_timing=True,
    memory_limit=True,
    dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
    preferred_dtypes=(torch.bfloat16, torch.float16, torch.float32),  # float64 is left to the references
    quantized_formats=frozenset(QUANTIZED_FORMATS),
)


class CudaSync(SpeculativeSync):
    """Synchronization policy of CUDA devices: events with generations; a whole iteration may be one graph."""

    step_modes = frozenset(StepMode)


class CudaBackend(TorchDeviceBackend):
    """One CUDA device. Its kernels use configurations measured on the device, if a table of them exists,
    else derived ones.
    """

    # Sticky faults of the driver arrive as plain RuntimeErrors on some torch versions.
    is_accelerator = True
    sticky_faults = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")

    def __init__(self, ordinal: int, *, peers: bool = True, tuned: bool = True) -> None:
        """Open the device.

        With ``peers``, groups send small tensors through peer memory if the GPUs of one host can access it. With ``tuned``,
        kernels use earlier measurements.
        """
        capabilities = replace(CAPABILITIES, peer_memory=peers)
        kernels = partial(default_kernels, measured=tuned)
        super().__init__("cuda", "cuda", ordinal, capabilities=capabilities, kernels=kernels, speculative_sync=CudaSync)

    def _create_group(self, name: str, ranks: tuple[int, ...], rank: int, store: Store, timeout_s: float) -> Group:
        from outrider_cuda.collectives import CudaGroup

        return CudaGroup(self, name, ranks, rank, store, timeout_s, peers=self.capabilities.peer_memory)

    def _new_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def versions(self) -> Mapping[str, str]:
        """Return the versions of torch and CUDA, and the device name."""
        return {**super().versions(), "cuda": str(torch.version.cuda)}
