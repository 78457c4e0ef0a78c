"""Entry point of the backend ``opencl``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING

from outrider.device.plugin import BackendInfo, CiDeclaration, check_options, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend

OPTIONS = MappingProxyType(
    {
        "queues": "in-order (each stream has its own queue) or out-of-order (all streams share one queue, ordered by events)",
        "graphs": "none or command-buffers (captures become command buffers; needs cl_khr_command_buffer)",
    }
)
_ADVICE = "install the runtime and its Python interface: pip install 'outrider-opencl[pocl]'"


@hookimpl
def backend_info() -> BackendInfo:
    """Describe the backend. It is used only if it is named: `cpu` is faster on the same processor."""
    is_installed = find_spec("pyopencl") is not None
    return BackendInfo(
        name="opencl",
        description="OpenCL devices that share memory with the host",
        priority=-1,
        usable=is_installed,
        reason="" if is_installed else "pyopencl isn't installed",
        advice="" if is_installed else _ADVICE,
        options=OPTIONS,
        ci=CiDeclaration(level="L4"),
    )


@hookimpl
def create_backend(ordinal: int, options: Mapping[str, str]) -> Backend:
    """Create the backend for the usable device ``ordinal`` of all OpenCL platforms, with options of :data:`OPTIONS`.

    Raises :class:`ConfigError` for an unknown option or value, and :class:`BackendLoadError` without the device.
    """
    check_options("opencl", options, {"queues": ("in-order", "out-of-order"), "graphs": ("none", "command-buffers")})
    from outrider_opencl.backend import OpenCLBackend

    return OpenCLBackend(
        ordinal,
        out_of_order=options.get("queues") == "out-of-order",
        command_buffers=options.get("graphs") == "command-buffers",
    )
