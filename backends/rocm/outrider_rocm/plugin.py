"""Entry point of the backend ``rocm``. torch's HIP build uses the names of the CUDA module, and ``torch.version.hip``
distinguishes the two builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from outrider.device.plugin import BackendInfo, CiDeclaration, check_options, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend

DESCRIPTION = "AMD GPUs through torch's HIP build"
CI = CiDeclaration(runner_labels=("self-hosted", "rocm"), markers=("asynchronous", "graphs"), device_count=2)
OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "published": "who waits for published lengths: stream, host, or auto (default) by architecture",
        "results": "the stream that copies results out: forward (default) or copy",
    }
)
_VALUES = {"published": ("auto", "stream", "host"), "results": ("forward", "copy")}


def hip_version() -> str | None:
    """Return the HIP version that torch was built for, or None for other builds."""
    import torch

    return torch.version.hip


@hookimpl
def backend_info() -> BackendInfo:
    """Describe the backend: usable if torch is built for HIP and sees a device. Starts no device."""
    import torch

    reason = advice = ""
    count: int | None = None
    if hip_version() is None:
        reason = f"torch {torch.__version__} isn't built for HIP"
        advice = "install a torch build for ROCm"
    else:
        count = torch.cuda.device_count()
        if count == 0:
            reason = "torch sees no AMD device"
            advice = "check rocminfo, the permissions of /dev/kfd, and that HIP_VISIBLE_DEVICES doesn't hide it"
    return BackendInfo(
        name="rocm",
        description=DESCRIPTION,
        priority=100,
        usable=not reason,
        reason=reason,
        advice=advice,
        device_count=count,
        options=OPTIONS,
        ci=CI,
    )


@hookimpl
def create_backend(ordinal: int, options: Mapping[str, str]) -> Backend:
    """Create the backend of GPU ``ordinal``, with options of :data:`OPTIONS`.

    Raises :class:`ConfigError` for an unknown option or value, and :class:`BackendLoadError` if the GPU can't be used.
    """
    check_options("rocm", options, _VALUES)
    from outrider_rocm.backend import RocmBackend

    return RocmBackend(ordinal, **options)
