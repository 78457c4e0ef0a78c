"""Registration of the simulated device with torch, and the torch names that it replaces.

torch has one slot for an external device type (PrivateUse1). The first registered name occupies the slot until the process
ends. `register` occupies it; an import doesn't.

The slot forwards three calls to Python. Generators, streams, pinned memory and `torch.accelerator` aren't among them: without
replacements they raise, or return a stream that orders no work. The replacements of these names, which require C++ code of a
device vendor, keep torch's behaviour for all other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils import backend_registration

from outrider.device import BackendLoadError
from outrider.device.kernels.operators import exclude_from_dynamo
from outrider_sim.machine.device_state import PinnedTensor, SimDeviceState
from outrider_sim.options import SimOptions
from outrider_sim.torch_device import autograd, tensor
from outrider_sim.torch_device import torch_module as module
from outrider_sim.torch_device.dispatch import Dispatcher
from outrider_sim.torch_device.opinfo import OpInfo
from outrider_sim.torch_device.replacements import composite_kernels
from outrider_sim.torch_device.tensor import SimTensor
from outrider_sim.torch_device.torch_module import SimTorchEvent, SimTorchStream, make_module
from outrider_sim.torch_device.torch_slot import TorchRegistration


def install_names(kind: str) -> None:
    """Replace the torch names for devices of type `kind`."""
    _modules_swap()
    _generators(kind)
    _streams(kind)
    _accelerator()
    for entered in (SimTensor.__torch_dispatch__, PinnedTensor.__torch_dispatch__):
        exclude_from_dynamo(entered.__func__)  # type: ignore[attr-defined]  # a class method, for mypy a function


def _modules_swap() -> None:
    # A module that moves to the device must exchange its parameters' contents, which keeps tied weights tied.
    import torch.nn.modules.module as module

    names: Any = module  # it imports the function that is replaced, so for mypy it has none
    before: Any = names.is_traceable_wrapper_subclass
    names.is_traceable_wrapper_subclass = lambda t: isinstance(t, SimTensor) or before(t)


class _Replaced(type):
    """Metaclass of a replaced name: creates the device's class for the device and torch's class for others."""

    of_torch: type
    of_device: type
    kind: str

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.of_torch, cls.of_device))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, (cls.of_torch, cls.of_device))

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.of_torch, name)


def _replace(name: str, of_device: type, kind: str, *, default: bool) -> type:
    """Return the replacement of `torch.NAME`. With `default`, a call without a device selects the device's class."""
    of_torch: type = getattr(torch, name)

    class Name(metaclass=_Replaced):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device", args[0] if args else None)
            if device is None or isinstance(device, int):
                mine = default
            else:
                mine = isinstance(device, torch.device | str) and torch.device(device).type == kind
            return (of_device if mine else of_torch)(*args, **kwargs)

    Name.of_torch, Name.of_device, Name.kind = of_torch, of_device, kind
    Name.__name__ = Name.__qualname__ = name
    Name.__module__, Name.__doc__ = "torch", of_torch.__doc__
    return Name


class Generator(torch._C.Generator):
    """A random number generator for the device: a host generator that supplies each operator's seed."""

    place: torch.device

    def __new__(cls, device: Any = None) -> Generator:
        """Create a generator for `device`."""
        made = super().__new__(cls, "cpu")  # type: ignore[call-arg]  # the stubs have __init__ alone
        found = torch.device(device)
        made.place = torch.device(found.type, found.index or 0)
        return made

    def __init__(self, device: Any = None) -> None:
        del device

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch's is a plain attribute
        """The device of the generator."""
        return self.place


def _generators(kind: str) -> None:
    torch.Generator = _replace("Generator", Generator, kind, default=False)  # type: ignore[misc,assignment]  # a class's name is replaced


def _streams(kind: str) -> None:
    class TimedEvent(SimTorchEvent):
        """An event with `torch.Event`'s constructor, which takes a device first."""

        def __init__(self, device: Any = None, **options: Any) -> None:
            del device
            super().__init__(**options)

    torch.Stream = _replace("Stream", SimTorchStream, kind, default=True)  # type: ignore[misc,assignment]  # also a type
    torch.Event = _replace("Event", TimedEvent, kind, default=True)  # type: ignore[misc,assignment]  # also a type


def _accelerator() -> None:
    # torch.accelerator asks these; the device is the only accelerator of a process that has it.
    for name, answer in {
        "_accelerator_synchronizeDevice": module.synchronize,
        "_accelerator_getStream": module.current_stream,
        "_accelerator_setStream": module.set_stream,
        "_accelerator_getDeviceIndex": lambda: module._backend().sim.machine.rank,
        "_accelerator_setDeviceIndex": module._set_device,
        "_accelerator_deviceCount": module._device_count,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": module._empty_cache,
        "_accelerator_emptyHostCache": lambda: None,  # the device keeps none
        "_accelerator_getMemoryInfo": lambda index: module._memory_info(),
        "_accelerator_getDeviceStats": lambda index: module._memory_stats(),
        "_accelerator_resetPeakStats": lambda index: module._reset_peaks(),
        "_accelerator_resetAccumulatedStats": lambda index: None,  # it counts nothing that accumulates
    }.items():
        if hasattr(torch._C, name):
            setattr(torch._C, name, answer)


def _replace_factories(dispatcher: Dispatcher) -> torch.library.Library:
    """Replace the two host factories to which all factories with `pin_memory=True` lead, for as long as the library lives."""
    library = torch.library.Library("aten", "IMPL")

    def wrap(name: str, position: int) -> None:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        layout = "layout"

        def make(keys: Any, *args: Any, **kwargs: Any) -> Any:
            pinned = kwargs.get("pin_memory", args[position] if len(args) > position else None)
            if not pinned:
                return kernel.call_boxed(keys, *args, **kwargs)
            if kwargs.get(layout) not in (None, torch.strided):
                raise NotImplementedError("pinned memory of the simulated device is strided")
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            made = dispatcher.current.pinned(tuple(args[0]), dtype, guarded=True)
            if name == "empty_strided" and tuple(args[1]) != made.stride():
                raise NotImplementedError("pinned memory of the simulated device is contiguous when it's made")
            return made

        library.impl(name, make, "CPU", with_keyset=True)

    import warnings

    with warnings.catch_warnings():  # that another kernel was there is what's meant
        warnings.simplefilter("ignore")
        wrap("empty.memory_format", 4)
        wrap("empty_strided", 5)
    return library


# Torch's composites of these factories resize an empty tensor through `.out`; simulated memory can't be resized.
_FACTORIES = ("arange", "linspace", "logspace", "eye", "randperm", "tril_indices", "triu_indices")


def register(name: str, options: SimOptions, create_backend: Callable[[], Any]) -> TorchRegistration:
    """Register `torch.device(name)` as the simulated device, or return the existing registration of that name.

    `create_backend` makes the backend of torch calls that come before any other. Raises `BackendLoadError` if another name
    occupies torch's slot (an installed torch_npu does so when torch is imported).
    """
    with TorchRegistration.lock:
        if TorchRegistration.current is not None:
            if TorchRegistration.current.name != name:
                raise BackendLoadError(
                    f"the simulated device is {TorchRegistration.current.name!r} in this process and can't become {name!r}: "
                    "torch takes one such name; use that name, or another process"
                )
            return TorchRegistration.current
        taken = torch._C._get_privateuse1_backend_name()
        if taken != "privateuseone":
            raise BackendLoadError(
                f"torch's slot for devices from outside is taken by {taken!r}, so {name!r} can't be simulated in this "
                "process; start it with TORCH_DEVICE_BACKEND_AUTOLOAD=0, or use a process that doesn't import that package"
            )
        TorchRegistration.current = _register(name, options, create_backend)
        return TorchRegistration.current


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
    kept = (hooks, guard, *_libraries(dispatcher, failed))
    install_names(name)
    tensor.install(name)
    return TorchRegistration(name, dispatcher, create_backend, partial(_replace_factories, dispatcher), kept)


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
    for full, kernel in composite_kernels():
        aten.impl(full, kernel, "AutogradPrivateUse1")
    yield aten
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    yield fallback
    autograd.register_autocast(aten, dispatcher.device.type)


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

    exclude_from_dynamo(kernel)
    return kernel


def _factory(dispatcher: Dispatcher, func: Any) -> Any:
    info = OpInfo(func)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return dispatcher.tensor_operators.factory(info, args, kwargs)

    return kernel
