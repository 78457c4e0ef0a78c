"""Entry point of the backend ``cuda``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from outrider.device.plugin import BackendInfo, CiDeclaration, check_options, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend

DESCRIPTION = "NVIDIA GPUs through torch's CUDA module"
OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "peers": "on (default): small tensors go over the peers' memory, where GPUs of one host reach it; off: all by NCCL",
        "tuned": "on (default): kernels as they were measured to be fastest, where they were; off: as they're derived from "
        "what the device says of itself, whatever ships or was kept on this machine",
    }
)
CI = CiDeclaration(
    runner_labels=("self-hosted", "gpu"),
    torch="https://download.pytorch.org/whl/cu130",
    markers=("asynchronous", "graphs"),
    device_count=2,
    ranks_runner_labels=("self-hosted", "gpu", "two-devices"),
)


@hookimpl
def backend_info() -> BackendInfo:
    """Describe the backend: usable if torch is built for CUDA and sees a device. Starts no device."""
    import torch

    reason = advice = ""
    count = torch.cuda.device_count() if torch.version.cuda is not None else 0
    if torch.version.cuda is None:
        reason, advice = f"torch {torch.__version__} is built without CUDA", "install a torch build for CUDA"
    elif not count:
        reason = "torch sees no CUDA device"
        advice = "check that the driver lists the device, and that CUDA_VISIBLE_DEVICES doesn't hide it"
    return BackendInfo(
        name="cuda",
        description=DESCRIPTION,
        priority=100,
        usable=not reason,
        reason=reason,
        advice=advice,
        device_count=count or None,
        options=OPTIONS,
        cache_variables=("TRITON_CACHE_DIR",),
        sanitizer_variables={"TORCH_CUDA_SANITIZER": "1"},
        ci=CI,
    )


@hookimpl
def create_backend(ordinal: int, options: Mapping[str, str]) -> Backend:
    """Create the backend of GPU ``ordinal``, with options of :data:`OPTIONS`.

    Raises :class:`ConfigError` for an unknown option or value, and :class:`BackendLoadError` if the GPU can't be used.
    """
    check_options("cuda", options, dict.fromkeys(OPTIONS, ("off", "on")))
    from outrider_cuda.backend import CudaBackend

    return CudaBackend(ordinal, **{name: options.get(name) != "off" for name in OPTIONS})
