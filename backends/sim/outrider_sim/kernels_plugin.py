"""Entry point of the kernel set ``host-plans``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.device.plugin import KernelInfo, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend
    from outrider.device.kernels.kernelset import KernelSet


@hookimpl
def kernel_info() -> KernelInfo:
    """Describe the kernel set. It is limited to the simulated device, where an error in a queued operation stops the run."""
    return KernelInfo(name="host-plans", description="Attention that is planned on the host, for tests", backends=("sim",))


@hookimpl
def create_kernels(backend: Backend) -> KernelSet:
    """Create the kernel set around the backend's own kernels."""
    from outrider_sim.kernels import HostPlanKernels

    return HostPlanKernels(backend.kernels, backend)
