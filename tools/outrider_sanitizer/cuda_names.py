"""Run programs that use torch's `cuda` names on a simulated device, so that a race can be replayed under a schedule."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from inspect import isfunction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from outrider.device import CapabilityError

if TYPE_CHECKING:
    from outrider.device import Backend

_KIND = "cuda"


@contextmanager
def map_cuda_names(backend: Backend) -> Generator[None]:
    """Map torch's CUDA functions and device strings to ``backend`` inside the scope, also in threads started there.

    A backend whose schedule no tool controls, and a CUDA backend, are left unchanged. Comparisons (``tensor.device.type ==
    "cuda"``), autocast and generators are not mapped.
    """
    if backend.control is None or backend.device.type == _KIND:
        yield
        return
    module: Any = torch.get_device_module(backend.device.type)
    theirs: Any = torch.cuda
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        for name in vars(module):
            if not name.startswith("__") and hasattr(theirs, name):
                replace(theirs, name, getattr(module, name))
        for name in theirs.__all__:
            if isfunction(getattr(theirs, name)) and not hasattr(module, name):
                replace(theirs, name, _refusal(f"torch.cuda.{name}"))
        stack.callback(delattr, Tensor, "is_cuda")
        Tensor.is_cuda = property(lambda tensor: tensor.device.type == backend.device.type)  # type: ignore[assignment]
        replace(torch, "compile", _compile(torch.compile))
        replace(theirs, "init", lambda: None)
        replace(theirs, "_lazy_init", lambda: None)
        set_default, run = torch.set_default_device, threading.Thread.run

        def set_default_device(device: Any) -> None:
            set_default(_redirected(device, backend.device))

        def run_thread(thread: threading.Thread) -> None:
            with _Placed(backend.device):
                run(thread)

        replace(torch, "set_default_device", set_default_device)
        replace(threading.Thread, "run", run_thread)
        stack.enter_context(_Placed(backend.device))
        yield


def _refusal(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise CapabilityError(f"the simulated device doesn't imitate {name}: run the program on a CUDA device for it")

    return refuse


def _compile(original: Any) -> Any:
    def compile(*args: Any, mode: str | None = None, **kwargs: Any) -> Any:
        if mode in ("reduce-overhead", "max-autotune"):
            raise CapabilityError(
                f"the simulated device doesn't imitate torch.compile(mode={mode!r}): the compiler would capture CUDA graphs "
                "itself; capture with torch.cuda.graph, or compile without a mode"
            )
        return original(*args, mode=mode, **kwargs)

    return compile


def _redirected(device: Any, place: torch.device) -> Any:
    """Return the device ``place`` for a device that names CUDA, and any other ``device`` unchanged."""
    if isinstance(device, torch.device):
        found = device.type == _KIND
    else:
        found = isinstance(device, str) and device.partition(":")[0] == _KIND
    return place if found else device


class _Placed(TorchFunctionMode):
    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self._place = place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        place = self._place
        if func is Tensor.cuda:
            tensor, options = _moving(*args, **(kwargs or {}))
            return tensor.to(place, **options)
        args = tuple(_redirected(value, place) for value in args)
        return func(*args, **{name: _redirected(value, place) for name, value in (kwargs or {}).items()})


def _moving(
    tensor: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    del device
    format_option = {} if memory_format is None else {"memory_format": memory_format}
    return tensor, {"non_blocking": non_blocking, **format_option}
