"""Constructors of numpy and torch that read a pinned array or tensor in C, so that they report the access."""

from __future__ import annotations

import builtins
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from outrider.device.arrays import BufferView, PinnedArray, call_reporting, plain_array, read_array

_MEMORYVIEW = memoryview


class _MemoryViewMeta(type):
    def __call__(cls, value: Any) -> Any:
        return BufferView(value) if isinstance(value, PinnedArray) else _MEMORYVIEW(value)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, (_MEMORYVIEW, BufferView))


class _MemoryView(metaclass=_MemoryViewMeta):
    """The name `memoryview` in a watched run."""


@contextmanager
def converted_names() -> Generator[None]:
    """Let the constructors of numpy and torch that read a pinned array or tensor in C report it inside the scope."""

    def array(original: Any) -> Any:
        def make(value: Any = None, *args: Any, **kwargs: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.is_pinned():
                value = value.numpy()
            if not isinstance(value, PinnedArray):
                return original(*(() if value is None and not args else (value,)), *args, **kwargs)
            return call_reporting(original, (value, *args), kwargs, False, None)

        return make

    def tensor(original: Any, *, shares: bool) -> Any:
        def make(value: Any, *args: Any, **kwargs: Any) -> Any:
            value = value._array if isinstance(value, BufferView) else value
            if not isinstance(value, PinnedArray):
                return original(value, *args, **kwargs)
            if shares and value._alloc is not None and not args and not kwargs:
                return value._alloc.tensor_over(plain_array(value))
            return original(read_array(value), *args, **kwargs)

        return make

    torch_names = ("from_numpy", "as_tensor", "from_dlpack", "asarray")
    numpy_names = ("asarray", "asanyarray", "ascontiguousarray", "asfortranarray", "frombuffer", "require", "from_dlpack")
    changes: list[tuple[Any, str, Any]] = [(torch, name, tensor(getattr(torch, name), shares=True)) for name in torch_names]
    changes += [(torch, name, tensor(getattr(torch, name), shares=False)) for name in ("tensor", "frombuffer")]
    changes += [(np, name, array(getattr(np, name))) for name in numpy_names]
    changes += [(np, "array", array(np.array)), (builtins, "memoryview", _MemoryView)]
    with ExitStack() as stack:
        for owner, name, made in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, made)
        yield
