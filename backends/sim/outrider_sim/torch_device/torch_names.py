"""Python replacements of torch names that require C++ code of a device vendor.

Torch's slot for external devices forwards three calls to Python. Generators, streams, pinned memory and
`torch.accelerator` aren't among them: without replacements they raise, or return a stream that orders no work.
The replacements keep torch's behaviour for all other devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from outrider_sim.machine.pinned import PinnedTensor
from outrider_sim.torch_device import torch_module as module
from outrider_sim.torch_device.tensor import SimTensor
from outrider_sim.torch_device.torch_module import SimTorchEvent, SimTorchStream

if TYPE_CHECKING:
    from outrider_sim.torch_device.dispatch import Dispatcher


def install(kind: str, dispatcher: Dispatcher) -> Iterator[Any]:
    """Replace the torch names for devices of type `kind`. Yields objects that must stay alive."""
    _modules_swap()
    _generators(kind)
    _streams(kind)
    _accelerator()
    for entered in (SimTensor.__torch_dispatch__, PinnedTensor.__torch_dispatch__):
        exclude_from_dynamo(entered.__func__.__code__)  # type: ignore[attr-defined]  # a class method, for mypy a function
    yield _pinned_factories(dispatcher)


def exclude_from_dynamo(code: CodeType) -> None:
    """Exclude the function with the bytecode ``code``, which torch calls to run an operator, and its callees from Dynamo's
    traces.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


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


def _pinned_factories(dispatcher: Dispatcher) -> Any:
    """Replace the two host factories to which all factories with `pin_memory=True` lead."""
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
