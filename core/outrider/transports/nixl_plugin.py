"""Plugin module of the transport ``nixl``, named by its entry point."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from outrider.transports.plugin import TransportInfo, hookimpl

if TYPE_CHECKING:
    from outrider.transports.link import Transport


@hookimpl
def transport_info() -> TransportInfo:
    """Describe the transport, which is usable if one of NIXL's packages is installed."""
    usable = any(find_spec(name) is not None for name in ("nixl_cu13", "nixl_cu12", "nixl"))
    return TransportInfo(
        name="nixl",
        description="NIXL over UCX: one-sided writes between host or device memory, RDMA where there is such a network",
        usable=usable,
        reason="" if usable else "NIXL isn't installed",
        advice="" if usable else "pip install 'outrider[nixl]'",
        options={
            "devices": "network devices by UCX's names, separated by +; default: what UCX chooses, loopback on one host",
            "errors": "UCX's error handling, peer or none; default: peer",
        },
    )


@hookimpl
def create_transport(options: Mapping[str, str]) -> Transport:
    """Import NIXL and create the transport."""
    from outrider.transports.nixl_transport import NixlTransport

    return NixlTransport(devices=options.get("devices", "").replace("+", ","), errors=options.get("errors", "peer"))
