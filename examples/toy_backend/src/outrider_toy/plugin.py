"""Entry point of the backend `toy`: what it is, and how to make it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outrider.device.errors import BackendLoadError
from outrider.device.plugin import BackendInfo, CiDeclaration, check_options, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend

# Import no vendor package and no torch here: this module is loaded on every machine, just to be described.


@hookimpl
def backend_info() -> BackendInfo:
    """Cheap and repeatable. `usable=False` with a reason and advice says that this machine lacks the device."""
    return BackendInfo(
        name="toy",
        description="toy: the imaginary device of the tutorial",
        interface_min=1,
        interface_max=1,
        priority=-1,  # negative: never chosen unless named. Raise it when the backend passes L4.
        device_count=1,
        ci=CiDeclaration(level="L4"),
    )


@hookimpl
def create_backend(ordinal: int, options: Mapping[str, str]) -> Backend:
    """Device `ordinal`, with the options of `--backend toy:key=value`."""
    check_options("toy", options, {})
    if ordinal != 0:
        raise BackendLoadError(f"backend 'toy': device {ordinal} was asked for, there is only device 0")
    from outrider_toy.backend import ToyBackend

    return ToyBackend()
