"""Entry point of the backend ``cpu``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outrider.device.errors import BackendLoadError, CapabilityError, ConfigError
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
    """The one host processor. ``freed``: ``kept``, the default where the C library can, or ``returned``: whether memory that
    is freed stays with the process (:func:`outrider_cpu.memory.keep_freed`).
    """
    if ordinal != 0:
        raise BackendLoadError(f"backend 'cpu': device {ordinal} was asked for, there is only device 0")
    unknown = sorted(options.keys() - {"freed"})
    if unknown:
        raise ConfigError(f"backend 'cpu' has no option {', '.join(unknown)}; expected freed")
    freed = options.get("freed")
    if freed not in (None, "kept", "returned"):
        raise ConfigError(f"backend 'cpu': freed is {freed!r}; expected kept or returned")
    from outrider_cpu.backend import CpuBackend
    from outrider_cpu.memory import keep_freed

    if freed != "returned" and not keep_freed() and freed == "kept":
        raise CapabilityError("backend 'cpu': this C library has no setting for freed=kept (glibc's mallopt); leave it out")
    return CpuBackend()
