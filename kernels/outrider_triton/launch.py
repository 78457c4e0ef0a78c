"""Operators and their kernel launches: registration, block sizes for shapes, dependent launch, and the compiler's hash."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime import cache

from outrider.device.kernels.operators import define_operator

# torch unregisters an operator when its Library is collected, so this module must own it.
_LIBRARY = torch.library.Library("outrider", "FRAGMENT")
_ahead = ContextVar("outrider_triton_ahead", default=False)
_UNINITIALIZED = frozenset({torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty})
"""Functions that return memory as it is."""


class _ZeroedMemory(TorchFunctionMode):
    """A scope in which new memory is zero: no kernel writes it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.zero_() if func in _UNINITIALIZED else found


def define(name: str, implementation: Callable[..., Any], *, writes: Sequence[str] = ()) -> None:
    """Define a new operator in this package's torch library, by its name, its implementation and the operands that it writes.

    Inside :func:`compile_only` its results are zeros.
    """

    @wraps(implementation)
    def run(*operands: Any) -> Any:
        if not _ahead.get():
            return implementation(*operands)
        with _ZeroedMemory():
            return implementation(*operands)

    define_operator(_LIBRARY, name, run, writes=writes)


def power_of_two(value: int) -> int:
    """Return the least power of two that isn't below ``value``."""
    return 1 << max(value - 1, 0).bit_length()


def has_kernel(*operands: Tensor) -> bool:
    """Return True unless an operand has dtype float64, which only the references compute exactly."""
    return all(operand.dtype is not torch.float64 for operand in operands)


def warps_for(block: int) -> int:
    """Return the number of warps for a block of ``block`` elements: about 8 elements per thread."""
    return min(max(block // 256, 1), 16)


def vocabulary_shares(rows: int, vocabulary: int, processors: int) -> int:
    """Return the number of programs that share a vocabulary, so that each multiprocessor runs four programs or more.

    The loads of a single program are far fewer than memory can have in flight.
    """
    return max(1, min(64, power_of_two(-(-4 * processors // max(rows, 1))), power_of_two(vocabulary // 2048)))


@contextmanager
def compile_only() -> Iterator[None]:
    """Compile instead of running every kernel that this thread launches in the context; compilation may be asynchronous.
    Results of operators are zeros, so that torch's operations on them are valid.
    """
    token = _ahead.set(True)
    try:
        yield
    finally:
        _ahead.reset(token)


def only_compiles() -> bool:
    """Return True inside :func:`compile_only`, where launches compile their kernel and don't run it."""
    return _ahead.get()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, pdl: bool, warps: int = 0, **settings: Any) -> None:
    """Enqueue a kernel on the ambient stream, or only compile it inside :func:`compile_only`.

    Without ``warps``, their number follows from the setting BLOCK (:func:`warps_for`). An empty grid is not launched.
    """
    if min(grid) < 1:
        return
    warps = warps or warps_for(settings["BLOCK"])
    if pdl:
        settings["launch_pdl"] = True
    kernel.run(*arguments, grid=grid, warmup=_ahead.get(), PDL=pdl, num_warps=warps, **settings)


def hash_compiler() -> None:
    """Hash the compiler's source files in a background thread, once per process.

    The hash is part of each compiled kernel's cache key, takes half a second, and is cached by Triton. Releases without
    ``triton_key`` compute it with the first kernel.
    """
    key = getattr(cache, "triton_key", None)
    if key is not None:
        # The thread only reads files, so the process can exit without waiting for it.
        Thread(target=key, name="outrider-triton-key", daemon=True).start()
