"""Entry point of the kernel set `lean`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.device.plugin import KernelInfo, hookimpl

if TYPE_CHECKING:
    from outrider.device import Backend, KernelSet


@hookimpl
def kernel_info() -> KernelInfo:
    """Describe the kernels, which run on the host only."""
    return KernelInfo(name="lean", description="norms in one pass, an activation in place", backends=("cpu",))


@hookimpl
def create_kernels(backend: Backend) -> KernelSet:
    """Create the kernels, which are the same for every device."""
    from outrider_lean.kernels import LeanKernels

    return LeanKernels()
