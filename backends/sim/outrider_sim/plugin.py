"""Entry point of the backend ``sim``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outrider.device.plugin import BackendInfo, CiDeclaration, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend


@hookimpl
def backend_info() -> BackendInfo:
    """Describe the backend. It runs wherever torch runs, finds bugs and is slow, so it is never chosen unless named."""
    from outrider_sim.options import MAX_DEVICES, OPTIONS

    return BackendInfo(
        name="sim",
        description="simulated accelerator with adversarial, replayable schedules",
        priority=-1,
        device_count=MAX_DEVICES,
        options=OPTIONS,
        ci=CiDeclaration(markers=("simulated", "asynchronous", "graphs"), level="L6"),
    )


@hookimpl
def create_backend(ordinal: int, options: Mapping[str, str]) -> Backend:
    """Create a simulated device with these options, and register it in torch's PrivateUse1 slot of this process."""
    from outrider_sim.backend import SimBackend
    from outrider_sim.options import parse_options

    return SimBackend(parse_options(options), ordinal)
