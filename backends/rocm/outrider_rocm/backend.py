"""The backend for ROCm devices. HIP builds of torch use CUDA's names for streams, events and graphs.

``TorchDeviceBackend`` holds the code shared with other torch devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outrider.device import Capabilities, KernelSet, SpeculativeSync, TorchDeviceBackend, Waiter

# On MI350X and MI355X, a stream's wait for an event was measured to take longer than a host wait.
_HOST_WAITS = frozenset({"gfx950"})

CAPABILITIES = Capabilities(
    asynchronous=True,
    concurrent_streams=True,
    stream_priorities=True,
    event_timing=True,
    captures_graphs=True,
    forks_in_capture=True,
    waits_inside_graphs=False,  # HIP has no external events for a capture
    collectives=True,
    captures_collectives=True,
    perturbs_timing=True,
    memory_limit=True,
    dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
    preferred_dtypes=(torch.bfloat16, torch.float16, torch.float32),  # float64 is left to the references
)


class RocmSync(SpeculativeSync):
    """Synchronization policy of ROCm devices. Events have generations.

    By default the host waits for published lengths on architectures where a host wait is faster, and the forward
    stream copies results to the host. Options override both.
    """

    def __init__(self, backend: RocmBackend, published: str, results: str) -> None:
        super().__init__(backend)
        default = Waiter.HOST if backend.architecture in _HOST_WAITS else Waiter.STREAM
        self.published_waiter = default if published == "auto" else Waiter(published)
        self.results_on_forward = results == "forward"


class RocmBackend(TorchDeviceBackend):
    """The backend of one AMD GPU under ROCm, with the options of :data:`outrider_rocm.plugin.OPTIONS`."""

    device_type = "cuda"  # torch's HIP build uses CUDA's name

    # HIP's texts of errors after which the context is gone; they arrive as plain RuntimeErrors on some torch versions.
    is_accelerator = True
    sticky_faults = ("illegal memory access", "unspecified launch failure", "device-side assert", "hipErrorLaunchFailure")

    def __init__(self, ordinal: int, *, published: str = "auto", results: str = "forward") -> None:
        super().__init__(
            "rocm",
            self.device_type,
            ordinal,
            capabilities=CAPABILITIES,
            kernels=KernelSet(),
            speculative_sync=lambda backend: RocmSync(backend, published, results),
        )
        properties = self.module.get_device_properties(self.device)
        self.architecture = str(properties.gcnArchName).partition(":")[0]
        """Name of the architecture in HIP, such as ``gfx942``, without suffixes of features."""
        self._wave_size = int(properties.warp_size)

    def _new_graph(self) -> Any:
        return self.module.CUDAGraph()

    def versions(self) -> Mapping[str, str]:
        """Return the versions of torch and HIP, the architecture and the device name."""
        return {
            **super().versions(),
            "hip": str(torch.version.hip),
            "architecture": self.architecture,
            "wave_size": str(self._wave_size),
        }
