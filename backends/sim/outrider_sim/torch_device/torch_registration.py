"""Registration of the simulated device with torch, and the module `torch.sim`.

torch has one slot for an external device type (PrivateUse1). The first registered name occupies the slot until the
process ends. `register` occupies it; an import doesn't.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import backend_registration

from outrider.device import BackendLoadError
from outrider_sim.machine.device_state import SimDeviceState
from outrider_sim.machine.pinned import PinnedTensor
from outrider_sim.options import SimOptions
from outrider_sim.torch_device import autocast, autograd, composites, tensor, torch_names
from outrider_sim.torch_device.dispatch import Dispatcher
from outrider_sim.torch_device.opinfo import OpInfo
from outrider_sim.torch_device.tensor import SimTensor
from outrider_sim.torch_device.torch_module import make_module
from outrider_sim.torch_device.torch_slot import TorchRegistration, TorchSlot

# Torch's composites of these factories resize an empty tensor through `.out`; simulated memory can't be resized.
_FACTORIES = ("arange", "linspace", "logspace", "eye", "randperm", "tril_indices", "triu_indices")


def register(name: str, options: SimOptions, create_backend: Callable[[], Any]) -> TorchRegistration:
    """Register `torch.device(name)` as the simulated device, or return the existing registration of that name.

    `create_backend` makes the backend of torch calls that come before any other. Raises `BackendLoadError` if another name
    occupies torch's slot (an installed torch_npu does so when torch is imported).
    """
    with TorchSlot.lock:
        if TorchSlot.registered is not None:
            if TorchSlot.registered.name != name:
                raise BackendLoadError(
                    f"the simulated device is {TorchSlot.registered.name!r} in this process and can't become {name!r}: "
                    "torch takes one such name; use that name, or another process"
                )
            return TorchSlot.registered
        taken = torch._C._get_privateuse1_backend_name()
        if taken != "privateuseone":
            raise BackendLoadError(
                f"torch's slot for devices from outside is taken by {taken!r}, so {name!r} can't be simulated in this "
                "process; start it with TORCH_DEVICE_BACKEND_AUTOLOAD=0, or use a process that doesn't import that package"
            )
        TorchSlot.registered = _register(name, options, create_backend)
        return TorchSlot.registered


def _register(name: str, options: SimOptions, create_backend: Callable[[], Any]) -> TorchRegistration:
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
    return TorchRegistration(name, dispatcher, module, create_backend, kept)


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

    torch_names.exclude_from_dynamo(kernel.__code__)
    return kernel


def _factory(dispatcher: Dispatcher, func: Any) -> Any:
    info = OpInfo(func)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return dispatcher.creation.factory(info, args, kwargs)

    return kernel
