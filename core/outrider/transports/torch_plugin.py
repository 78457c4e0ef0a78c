"""Plugin module of the transport ``torch``, named by its entry point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outrider.transports.plugin import TransportInfo, hookimpl

if TYPE_CHECKING:
    from outrider.transports.link import Transport


@hookimpl
def transport_info() -> TransportInfo:
    """Describe the transport, which needs no package but torch."""
    return TransportInfo(name="torch", description="torch.distributed's gloo, through host memory; needs nothing more")


@hookimpl
def create_transport(options: Mapping[str, str]) -> Transport:
    """Create the transport ``torch``, which has no options; the registry refuses unknown ones."""
    from outrider.transports.torch_transport import TorchTransport

    del options
    return TorchTransport()
