"""Entry point of the kernel set ``flashinfer``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from outrider.device.errors import BackendLoadError
from outrider.device.plugin import KernelInfo, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend
    from outrider.device.kernels.kernelset import KernelSet

_ADVICE = "install flashinfer-python 0.6, and nvcc of the CUDA that torch is built for"
_TESTED = "0.6."


@hookimpl
def kernel_info() -> KernelInfo:
    """Describe the kernel set: usable if FlashInfer is installed. The function doesn't import FlashInfer."""
    found = find_spec("flashinfer") is not None
    return KernelInfo(
        name="flashinfer",
        description="FlashInfer's attention, planned on the host; everything else as the backend has it",
        backends=("cuda",),
        usable=found,
        reason="" if found else "flashinfer isn't installed",
        advice="" if found else _ADVICE,
    )


@hookimpl
def create_kernels(backend: Backend) -> KernelSet:
    """Create the kernel set that wraps the backend's own kernels.

    Raises :class:`BackendLoadError` if FlashInfer is missing, of another version, or can't run on the device.
    """
    info = kernel_info()
    if not info.usable:
        raise BackendLoadError(f"{backend.label} can't have FlashInfer's attention: {info.reason}; {info.advice}")
    try:
        import flashinfer
    except Exception as error:
        raise BackendLoadError(
            f"flashinfer is installed and can't be imported: {type(error).__name__}: {error}; {_ADVICE}"
        ) from error
    version = str(flashinfer.__version__)
    if not version.startswith(_TESTED):
        raise BackendLoadError(
            f"flashinfer {version} is installed, and this plugin is written for {_TESTED}x; install flashinfer-python "
            "0.6.14, or choose kernels=triton"
        )

    import torch

    from outrider_flashinfer.kernelset import FlashInferKernels

    properties = torch.get_device_module(backend.device.type).get_device_properties(backend.device)
    return FlashInferKernels(backend.kernels, backend, processors=int(properties.multi_processor_count))
