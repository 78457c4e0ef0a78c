"""Entry point of the backend `threads`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outrider.device.errors import BackendLoadError
from outrider.device.plugin import BackendInfo, CiDeclaration, check_options, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend


@hookimpl
def backend_info() -> BackendInfo:
    """Describe the backend. As an example it is used only if it is named."""
    return BackendInfo(
        name="threads",
        description="example: each stream is a thread of the host",
        interface_min=1,
        interface_max=1,
        priority=-1,
        device_count=1,
        ci=CiDeclaration(level="L4"),
    )


@hookimpl
def create_backend(ordinal: int, options: Mapping[str, str]) -> Backend:
    """Create the backend for device 0, without options."""
    if ordinal != 0:
        raise BackendLoadError(f"backend 'threads': device {ordinal} was asked for, there is only device 0")
    check_options("threads", options, {})
    from outrider_threads.backend import ThreadsBackend

    return ThreadsBackend()
