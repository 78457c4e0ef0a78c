"""Entry point of the kernel set ``triton``, and the kernels that backends use by default."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from outrider.device.errors import BackendLoadError
from outrider.device.plugin import KernelInfo, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend
    from outrider.device.kernels.kernelset import KernelSet

_ADVICE = "install triton, which torch's builds for GPUs bring along"


@hookimpl
def kernel_info() -> KernelInfo:
    """Describe the kernel set; it is usable if Triton is installed."""
    found = find_spec("triton") is not None
    return KernelInfo(
        name="triton",
        description="Kernels in Triton with this device's measurements",
        backends=("cuda", "rocm"),
        usable=found,
        reason="" if found else "triton isn't installed",
        advice="" if found else _ADVICE,
    )


@hookimpl
def create_kernels(backend: Backend) -> KernelSet:
    """Return the kernel set that backends use by default, for ``backend``."""
    return default_kernels(backend)


def default_kernels(backend: Backend, *, measured: bool = True) -> KernelSet:
    """Return the kernel set with the measurements of this device; configurations without one are derived.

    Torch's library computes the products that it won in the table. ``measured=False`` ignores earlier measurements, shipped
    or stored on this machine; later ones are used. Raises :class:`BackendLoadError` without Triton.
    """
    if find_spec("triton") is None:
        raise BackendLoadError(
            f"the kernels of {backend.label} are in Triton, which isn't installed; {_ADVICE}, or choose kernels=torch"
        )
    import torch

    from outrider_triton.kernelset import TritonKernels
    from outrider_triton.launch import hash_compiler
    from outrider_triton.tiles.facts import facts_of
    from outrider_triton.tiles.store.table import load

    hash_compiler()
    properties = torch.get_device_module(backend.device.type).get_device_properties(backend.device)
    return TritonKernels(
        facts_of(properties),
        table=load(properties.name) if measured else None,
        device=backend.device,
        takes_over=measured,
    )
