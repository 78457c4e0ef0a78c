"""Registration of the simulated device with torch, and the module `torch.sim`.

torch has one slot for an external device type (PrivateUse1). The first registered name occupies the slot until the
process ends. `register` occupies it; an import doesn't.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration

from outrider.device import BackendLoadError
from outrider_sim.machine.device_state import SimDeviceState
from outrider_sim.machine.pinned import PinnedTensor
from outrider_sim.options import MAX_DEVICES, SimOptions
from outrider_sim.torch_device import autocast, autograd, composites, tensor, torch_names
from outrider_sim.torch_device.dispatch import Dispatcher
from outrider_sim.torch_device.opinfo import OpInfo
from outrider_sim.torch_device.tensor import SimTensor

# Torch's composites of these factories resize an empty tensor through `.out`; simulated memory can't be resized.
_FACTORIES = ("arange", "linspace", "logspace", "eye", "randperm", "tril_indices", "triu_indices")


class TorchRegistration:
    """The process's one registration: the device, its dispatcher, and objects that must outlive all torch calls."""

    def __init__(self, name: str, dispatcher: Dispatcher, module: ModuleType, kept: tuple[Any, ...]) -> None:
        self.name = name
        self.dispatcher = dispatcher
        self.module = module
        self.backend: Any = None  # the newest backend; it receives torch calls outside any scope
        self._kept = kept


class _TorchSlot:
    """State of torch's PrivateUse1 slot. The slot is global and permanent, so the state is global too."""

    registered: TorchRegistration | None = None
    lock = threading.Lock()


def registered() -> TorchRegistration | None:
    """Return the process's registration, or None before `register`."""
    return _TorchSlot.registered


class CurrentDeviceState:
    """The device of torch calls without device operands, saved and restored when host threads switch."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def save(self) -> SimDeviceState:
        """Return the current device of the running thread."""
        return self._dispatcher.current

    def restore(self, saved: SimDeviceState) -> None:
        """Restore the current device of a host thread that runs again."""
        self._dispatcher.current = saved


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


def register(name: str = "sim", options: SimOptions | None = None) -> TorchRegistration:
    """Register `torch.device(name)` as the simulated device, or return the existing registration of that name.

    Raises `BackendLoadError` if another name occupies torch's slot (an installed torch_npu does so when torch is imported).
    """
    with _TorchSlot.lock:
        if _TorchSlot.registered is not None:
            if _TorchSlot.registered.name != name:
                raise BackendLoadError(
                    f"the simulated device is {_TorchSlot.registered.name!r} in this process and can't become {name!r}: "
                    "torch takes one such name; use that name, or another process"
                )
            return _TorchSlot.registered
        taken = torch._C._get_privateuse1_backend_name()
        if taken != "privateuseone":
            raise BackendLoadError(
                f"torch's slot for devices from outside is taken by {taken!r}, so {name!r} can't be simulated in this "
                "process; start it with TORCH_DEVICE_BACKEND_AUTOLOAD=0, or use a process that doesn't import that package"
            )
        _TorchSlot.registered = _register(name, options or SimOptions(name=name))
        return _TorchSlot.registered


def _register(name: str, options: SimOptions) -> TorchRegistration:
    from outrider_sim.torch_device.torch_module import make_module

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return True

        def has_primary_context(self, dev_id: int) -> bool:
            del dev_id
            return True

        def is_built(self) -> bool:
            return True

    class SimDeviceGuard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    dispatcher: Dispatcher
    module = make_module(name)
    hooks, guard = Hooks(), SimDeviceGuard()
    backend_registration._setup_privateuseone_for_python_backend(name, module, hooks, guard)
    dispatcher = Dispatcher(torch.device(name, 0), SimDeviceState(options))
    failed = autograd.install()
    SimTensor._dispatch = staticmethod(dispatcher)
    SimTensor._failed = staticmethod(failed)
    PinnedTensor._dispatch = staticmethod(dispatcher.pinned)
    kept = (hooks, guard, *_libraries(dispatcher, failed), *torch_names.install(name, dispatcher))
    tensor.install(name)
    return TorchRegistration(name, dispatcher, module, kept)


def _libraries(dispatcher: Dispatcher, failed: Callable[[BaseException], Any]) -> Iterator[Any]:
    """Yield libraries of kernels for calls that reach PrivateUse1 below Python's dispatch key, and for autocast."""
    aten = torch.library.Library("aten", "IMPL")
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    explicit = torch._C.DispatchKey.CompositeExplicitAutograd
    nonfunctional = torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        if not full.startswith("aten::"):
            continue
        name, _, overload = full.removeprefix("aten::").partition(".")
        factory = name in _FACTORIES and overload not in ("out", "start_out", "m_out", "generator_out")
        if not factory and (has(full, composite) or has(full, explicit) or has(full, nonfunctional)):
            continue
        try:
            func = getattr(getattr(torch.ops.aten, name), overload or "default")
        except (AttributeError, RuntimeError):
            continue  # some names exist for the JIT alone
        aten.impl(
            full.removeprefix("aten::"),
            _factory(dispatcher, func) if factory else _kernel(dispatcher, func, failed),
            "PrivateUse1",
        )
    # torch's own kernels for pinned memory need an accelerator build; these serve `Tensor.pin_memory()`.
    aten.impl("_pin_memory", _pin_memory(dispatcher), "CPU")
    aten.impl("is_pinned", lambda tensor, device=None: isinstance(tensor, PinnedTensor), "CPU")
    for full, kernel in composites.kernels():
        aten.impl(full, kernel, "AutogradPrivateUse1")
    yield aten
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    yield fallback
    autocast.register(aten, dispatcher.device.type)


def _pin_memory(dispatcher: Dispatcher) -> Any:
    def kernel(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        del device
        made = dispatcher.current.pinned(tuple(tensor.shape), tensor.dtype, guarded=True)
        made.plain(write=True).copy_(tensor)
        return made

    return kernel


def _kernel(dispatcher: Dispatcher, func: Any, failed: Callable[[BaseException], Any]) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            return dispatcher(func, args, kwargs)
        except BaseException as error:
            return failed(error)

    torch_names.untraced(kernel.__code__)
    return kernel


def _factory(dispatcher: Dispatcher, func: Any) -> Any:
    info = OpInfo(func)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return dispatcher.creation.factory(info, args, kwargs)

    return kernel
