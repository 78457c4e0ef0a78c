"""Entry point of the backend ``npu``. The module doesn't import torch_npu, whose import fails without CANN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outrider.device.errors import BackendLoadError, ConfigError
from outrider.device.plugin import BackendInfo, CiDeclaration, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend

DESCRIPTION = "Ascend NPUs through torch_npu"
CI = CiDeclaration(
    runner_labels=("self-hosted", "npu"), markers=("asynchronous", "graphs", "graph parameters", "flags"), device_count=2
)


@hookimpl
def backend_info() -> BackendInfo:
    """Describe the backend: usable if a matching torch_npu is installed and the driver lists a device. Imports neither."""
    from outrider_npu import runtime

    obstacle = runtime.find_obstacle()
    return BackendInfo(
        name="npu",
        description=DESCRIPTION,
        priority=100,
        usable=obstacle is None,
        reason=obstacle.reason if obstacle else "",
        advice=obstacle.advice if obstacle else "",
        device_count=runtime.device_count() or None,
        ci=CI,
    )


@hookimpl
def create_backend(ordinal: int, options: Mapping[str, str]) -> Backend:
    """Create the backend of NPU ``ordinal``, which has no options. Imports torch_npu; its errors contain advice."""
    if options:
        raise ConfigError(f"backend 'npu' takes no options, got {sorted(options)}")
    from outrider_npu import runtime

    obstacle = runtime.find_obstacle()
    if obstacle is not None:
        raise BackendLoadError(f"backend 'npu' can't run here: {obstacle.reason}; {obstacle.advice}")
    runtime.load()
    from outrider_npu.backend import NpuBackend

    return NpuBackend(ordinal)
