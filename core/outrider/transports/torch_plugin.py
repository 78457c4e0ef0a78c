"""Entry point of the transport ``torch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outrider.transports.plugin import TransportInfo, hookimpl

if TYPE_CHECKING:
    from outrider.transports.link import Transport


@hookimpl
def transport_info() -> TransportInfo:
    """Usable wherever torch is."""
    return TransportInfo(name="torch", description="torch.distributed's gloo, through host memory; needs nothing more")


@hookimpl
def create_transport(options: Mapping[str, str]) -> Transport:
    """It has no options; whoever calls has checked that."""
    from outrider.transports.torch_link import TorchTransport

    del options
    return TorchTransport()
