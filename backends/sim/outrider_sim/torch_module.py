"""The module `torch.sim`: what torch and its users expect of a device's module."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class _DeviceScope:
    """`with torch.sim.device(0)`: there is one device."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def __enter__(self) -> None:
        """Nothing changes."""

    def __exit__(self, *_: object) -> None:
        """Nothing changes."""


def make_module(name: str) -> ModuleType:
    """The module for the device called `name`."""
    module = ModuleType(f"torch.{name}", "A simulated accelerator.")
    members: dict[str, Any] = {
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "_is_in_bad_fork": lambda: False,
        "device": _DeviceScope,
        "manual_seed_all": lambda seed: None,
    }
    for key, value in members.items():
        setattr(module, key, value)
    return module
