"""Entry point of the kernel set ``triton``, and the kernels that a backend has of its own accord."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from outrider.device.errors import BackendLoadError
from outrider.device.plugin import KernelInfo, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend
    from outrider.device.kernels import KernelSet

_ADVICE = "install triton, which torch's builds for GPUs bring along"


@hookimpl
def kernel_info() -> KernelInfo:
    """Usable where Triton is installed."""
    found = find_spec("triton") is not None
    return KernelInfo(
        name="triton",
        description="Kernels in Triton, all of them, whatever was measured",
        backends=("cuda", "rocm"),
        usable=found,
        reason="" if found else "triton isn't installed",
        advice="" if found else _ADVICE,
    )


@hookimpl
def create_kernels(backend: Backend) -> KernelSet:
    """Every kernel in Triton, with this device's table where there is one."""
    return _kernels(backend, everywhere=True)


def tuned_kernels(backend: Backend) -> KernelSet:
    """What was measured to be fastest on this device: Triton's kernels where its table says that they won.

    A device without a table gets the torch references: nothing was measured. Raises :class:`BackendLoadError` where there
    is a table and no Triton.
    """
    import torch

    from outrider.device.kernels import KernelSet
    from outrider_triton.table import load

    name = torch.get_device_module(backend.device.type).get_device_properties(backend.device).name
    return KernelSet() if load(name) is None else _kernels(backend, everywhere=False)


def _kernels(backend: Backend, *, everywhere: bool) -> KernelSet:
    if find_spec("triton") is None:
        raise BackendLoadError(
            f"{backend.label} has tuned kernels in Triton, which isn't installed; {_ADVICE}, or choose kernels=torch"
        )
    import torch

    from outrider_triton.kernelset import TritonKernels
    from outrider_triton.table import load

    properties = torch.get_device_module(backend.device.type).get_device_properties(backend.device)
    return TritonKernels(
        table=load(properties.name),
        everywhere=everywhere,
        processors=properties.multi_processor_count,
        pdl=torch.version.hip is None and properties.major >= 9,
        shared=getattr(properties, "shared_memory_per_block_optin", 64 << 10),
        capability=0 if torch.version.hip is not None else properties.major,
    )
