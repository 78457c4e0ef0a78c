"""Entry point of the backend ``cpu``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from outrider.device.errors import BackendLoadError, CapabilityError
from outrider.device.plugin import BackendInfo, CiDeclaration, check_options, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend

OPTIONS = MappingProxyType(
    {"freed": "kept or returned: whether freed memory stays with the process; without it kept where the C library can"}
)


@hookimpl
def backend_info() -> BackendInfo:
    """Describe the backend: always usable, with the lowest priority of all backends."""
    return BackendInfo(
        name="cpu",
        description="reference: the same contract, executed at once on the host",
        priority=1,
        device_count=1,
        options=OPTIONS,
        ci=CiDeclaration(markers=("reference",), level="L6"),
    )


@hookimpl
def create_backend(ordinal: int, options: Mapping[str, str]) -> Backend:
    """Create the backend of the host, with options of :data:`OPTIONS`.

    Raises :class:`ConfigError` for an unknown option or value, and :class:`BackendLoadError` for another ordinal than 0.
    """
    if ordinal != 0:
        raise BackendLoadError(f"backend 'cpu': device {ordinal} was asked for, there is only device 0")
    check_options("cpu", options, {"freed": ("kept", "returned")})
    from outrider_cpu.backend import CpuBackend, retain_freed_memory

    if options.get("freed") != "returned":
        kept = retain_freed_memory()
        if "freed" in options and not kept:
            raise CapabilityError(
                "backend 'cpu': this C library has no setting for freed=kept (glibc's mallopt); leave it out"
            )
    return CpuBackend()
