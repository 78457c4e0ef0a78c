"""torch's one slot for an external device type, and the registration that occupies it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from outrider.device import BackendLoadError
from outrider_sim.machine.device_state import SimDeviceState
from outrider_sim.options import MAX_DEVICES, SimOptions

if TYPE_CHECKING:
    from torch.library import Library

    from outrider_sim.torch_device.dispatch import Dispatcher


@dataclass(eq=False)
class TorchRegistration:
    """The process's one registration: the device, its dispatcher, and objects that must outlive all torch calls.

    torch's PrivateUse1 slot is global and permanent, so `current` is global too: the registration that occupies the slot.
    """

    current: ClassVar[TorchRegistration | None] = None
    lock: ClassVar[threading.Lock] = threading.Lock()

    name: str
    dispatcher: Dispatcher
    create_backend: Callable[[], Any]
    replace_factories: Callable[[], Library]
    kept: tuple[Any, ...]
    backend: Any = None
    """The newest backend; it receives torch calls outside any scope."""

    def __post_init__(self) -> None:
        self._factories: Library | None = self.replace_factories()

    @property
    def pins_in_factories(self) -> bool:
        """True if torch's factories such as `torch.empty` accept `pin_memory=True`, the default.

        The kernels of the factories then run in Python. They take 12 microseconds for each result that an operator allocates
        on the host, several times the time of the operator. A program that pins memory by its backend alone can set False.
        """
        return self._factories is not None

    @pins_in_factories.setter
    def pins_in_factories(self, pins: bool) -> None:
        if pins and self._factories is None:
            self._factories = self.replace_factories()
        elif not pins and self._factories is not None:
            self._factories._destroy()
            self._factories = None


def registered() -> TorchRegistration | None:
    """Return the process's registration, or None before `register`."""
    return TorchRegistration.current


def host_of(registered: TorchRegistration, options: SimOptions, rank: int) -> SimDeviceState:
    """Return device 0 of the newest host, to which the new device `rank` belongs.

    Raises `BackendLoadError` if no device 0 exists, or if its device `rank` is in use.
    """
    first = registered.backend
    if not 0 < rank < MAX_DEVICES:
        raise BackendLoadError(f"backend {options.name!r}: device {rank} was asked for, a host has 0 to {MAX_DEVICES - 1}")
    if first is None:
        raise BackendLoadError(
            f"backend {options.name!r}: device {rank} was asked for, and there is no device 0, whose scheduler it'd share; "
            f"make '{options.name}:0' first"
        )
    scheduler = first.sim.machine.scheduler
    for machine in list(scheduler.machines):
        if machine.rank == rank:
            if machine.lost is None and machine.sim.backend() is not None:
                raise BackendLoadError(
                    f"backend {options.name!r}: device {rank} of this host is in use; a host begins with '{options.name}:0'"
                )
            scheduler.machines.remove(machine)
    found: SimDeviceState = first.sim
    return found
