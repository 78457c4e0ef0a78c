"""Entry point of the kernel set ``torch``: the references, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.device.plugin import KernelInfo, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend
    from outrider.device.kernels.kernelset import KernelSet


@hookimpl
def kernel_info() -> KernelInfo:
    """Describe the references, which are usable on any device of torch."""
    return KernelInfo(name="torch", description="The torch references, whatever kernels the backend has of its own")


@hookimpl
def create_kernels(backend: Backend) -> KernelSet:
    """Return the torch references for any backend."""
    from outrider.device.kernels.kernelset import KernelSet

    del backend
    return KernelSet()
