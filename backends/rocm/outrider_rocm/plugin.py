"""Entry point of the backend ``rocm``. torch's HIP build answers under the names of its CUDA module; what tells the two
apart is ``torch.version.hip``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outrider.device.errors import BackendLoadError
from outrider.device.plugin import BackendInfo, CiDeclaration, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend

DESCRIPTION = "AMD GPUs through torch's HIP build"
CI = CiDeclaration(runner_labels=("self-hosted", "rocm"), markers=("asynchronous", "graphs"), device_count=2)


def hip_version() -> str | None:
    """The HIP that torch was built for; None for every other build."""
    import torch

    return torch.version.hip


@hookimpl
def backend_info() -> BackendInfo:
    """Usable where torch is built for HIP and sees a device; asking starts no device."""
    import torch

    from outrider_rocm.options import OPTIONS

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
    """GPU ``ordinal``; options in :data:`outrider_rocm.options.OPTIONS`."""
    from outrider_rocm.options import parse_options

    parsed = parse_options(options)
    info = backend_info()
    if not info.usable:
        raise BackendLoadError(f"backend 'rocm' can't run here: {info.reason}; {info.advice}")
    from outrider_rocm.backend import RocmBackend

    return RocmBackend(ordinal, parsed)
