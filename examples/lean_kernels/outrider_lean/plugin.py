"""Entry point of the kernel set `lean`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.device.plugin import KernelInfo, hookimpl

if TYPE_CHECKING:
    from outrider.device import Backend, KernelSet


@hookimpl
def kernel_info() -> KernelInfo:
    """For the host alone."""
    return KernelInfo(name="lean", description="norms in one pass, an activation in place", backends=("cpu",))


@hookimpl
def create_kernels(backend: Backend) -> KernelSet:
    """Nothing depends on the device."""
    from outrider_lean.kernels import LeanKernels

    return LeanKernels()
