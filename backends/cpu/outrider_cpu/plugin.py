"""Entry point of the backend ``cpu``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outrider.device.errors import BackendLoadError, ConfigError
from outrider.device.plugin import BackendInfo, CiDeclaration, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend


@hookimpl
def backend_info() -> BackendInfo:
    """The reference backend runs everywhere; it loses every probe against a device."""
    return BackendInfo(
        name="cpu",
        description="reference: the same contract, executed at once on the host",
        priority=1,
        device_count=1,
        ci=CiDeclaration(markers=("reference",), level="L6"),
    )


@hookimpl
def create_backend(ordinal: int, options: Mapping[str, str]) -> Backend:
    """The one host processor, without options."""
    if ordinal != 0:
        raise BackendLoadError(f"backend 'cpu': device {ordinal} was asked for, there is only device 0")
    if options:
        raise ConfigError(f"backend 'cpu' takes no options, got {sorted(options)}")
    from outrider_cpu.backend import CpuBackend

    return CpuBackend()
