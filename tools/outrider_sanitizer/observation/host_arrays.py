"""Constructors of numpy and torch that read a pinned array or tensor in C, so that they report the access."""

from __future__ import annotations

import builtins
import struct
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from outrider.device.arrays import BufferView, PinnedArray, call_reporting, plain_array, read_array
from outrider_sanitizer.observation.hostsync import Replacement, replaced

_MEMORYVIEW = memoryview
_NDITER = np.nditer
_DEFAULT_RNG = np.random.default_rng


class _MemoryViewMeta(type):
    def __call__(cls, value: Any) -> Any:
        return BufferView(value) if isinstance(value, PinnedArray) else _MEMORYVIEW(value)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, (_MEMORYVIEW, BufferView))


class _MemoryView(metaclass=_MemoryViewMeta):
    """A replacement of the name `memoryview` in a watched run, which reports a host read of pinned memory."""


def _iterating(operands: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `numpy.nditer` over ``operands``, and report accesses to pinned arrays: writes if its flags let it write."""
    writes = "write" in str((args, kwargs.get("op_flags")))
    return call_reporting(_NDITER, (operands, *args), kwargs, writes, None)


def _filling(name: str) -> Any:
    def fill(self: np.random.Generator, *args: Any, **kwargs: Any) -> Any:
        return call_reporting(partial(getattr(np.random.Generator, name), self), args, kwargs, False, None)

    return fill


class _WatchedGenerator(np.random.Generator):
    """A random generator whose `shuffle` and `out=` report writes."""

    def shuffle(self, x: Any, axis: int = 0) -> None:
        call_reporting(super().shuffle, (x, axis), {}, True, None)


for _name in ("random", "standard_normal", "standard_exponential", "standard_gamma", "permuted"):
    setattr(_WatchedGenerator, _name, _filling(_name))


def _random(seed: Any = None) -> np.random.Generator:
    """Return a :class:`_WatchedGenerator`; the replacement of `numpy.random.default_rng`."""
    made = _DEFAULT_RNG(seed)
    return made if made is seed else _WatchedGenerator(made.bit_generator)


def _packing(original: Any) -> Any:
    """Wrap a function of `struct` that takes a buffer as its second argument."""

    def call(layout: str, buffer: Any, *args: Any, **kwargs: Any) -> Any:
        def swapped(buffer: Any, *args: Any, **kwargs: Any) -> Any:
            return original(layout, buffer, *args, **kwargs)

        return call_reporting(swapped, (buffer, *args), kwargs, original.__name__ == "pack_into", None)

    return call


def _is_pinned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.is_pinned()


@contextmanager
def converted_names() -> Generator[None]:
    """Let the constructors of numpy and torch that read a pinned array or tensor in C report it inside the scope."""

    def array(original: Any) -> Any:
        def make(value: Any = None, *args: Any, **kwargs: Any) -> Any:
            if _is_pinned(value):
                value = value.numpy()
            if not isinstance(value, PinnedArray):
                return original(*(() if value is None and not args else (value,)), *args, **kwargs)
            return call_reporting(original, (value, *args), kwargs, False, None)

        return make

    def tensor(original: Any) -> Any:
        def make(value: Any, *args: Any, **kwargs: Any) -> Any:
            if original.__name__ == "from_dlpack" and _is_pinned(value):
                return value.detach()  # by the buffer protocol it would have a storage of its own
            value = value._array if isinstance(value, BufferView) else value
            if not isinstance(value, PinnedArray):
                return original(value, *args, **kwargs)
            plain = plain_array(value)
            made = original(plain, *args, **kwargs)
            if value._alloc is not None and made.device.type == "cpu" and np.may_share_memory(made.numpy(), plain):
                return value._alloc.tensor_over(made.numpy())
            read_array(value)
            return made

        return make

    torch_names = ("from_numpy", "as_tensor", "from_dlpack", "asarray", "tensor", "frombuffer")
    numpy_names = (
        "asarray",
        "asanyarray",
        "ascontiguousarray",
        "asfortranarray",
        "frombuffer",
        "require",
        "from_dlpack",
        "array",
    )
    changes: list[Replacement] = [(torch, name, tensor) for name in torch_names]
    changes += [(np, name, array) for name in numpy_names]
    changes += [(builtins, "memoryview", lambda _: _MemoryView), (np, "nditer", lambda _: _iterating)]
    changes += [(np.random, "default_rng", lambda _: _random)]
    changes += [(struct, name, _packing) for name in ("pack_into", "unpack_from")]
    with replaced(changes):
        yield
