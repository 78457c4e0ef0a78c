"""The torch layer: inside `placed(stream)` each torch call becomes a launch.

A call returns before its kernel has run, so the shape of the result must be known first. Torch's `meta` device computes the
shape, the memory is allocated immediately, and the kernel fills it. A call that needs values on the host waits for the
stream.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from toy_driver.api import SUCCESS, toy_error_string, toy_launch, toy_stream_synchronize
from toy_driver.queues import Kernel

_placement = threading.local()


class ToyError(RuntimeError):
    """A driver call failed inside a torch call."""


@contextmanager
def placed(stream: int) -> Generator[None]:
    """Send this thread's torch calls to `stream`. Scopes nest; the outer stream is restored at the end."""
    before: int | None = getattr(_placement, "stream", None)
    _placement.stream = stream
    try:
        if before is None:
            with _Launching():
                yield
        else:  # the outer scope's dispatch mode is active and looks up the current stream
            yield
    finally:
        _placement.stream = before


class _Launching(TorchDispatchMode):
    """The dispatch mode that launches kernels. It is inactive inside `__torch_dispatch__`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _needs_no_kernel(func):
            return func(*args, **kwargs)
        if not _gives_tensors(func):
            _synchronize()
            return func(*args, **kwargs)
        try:
            shapes = func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
        except RuntimeError as error:
            if not isinstance(error, NotImplementedError) and torch.Tag.dynamic_output_shape not in func.tags:
                raise  # else the shape depends on values
            _synchronize()
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        in_place = bool(written) and (shapes is None or (isinstance(shapes, Tensor) and _returns_alias(func)))
        if in_place:
            _launch(lambda: func(*args, **kwargs))
            return None if shapes is None else written[0]
        results = tree_map(_memory, shapes)

        def kernel() -> None:
            for target, value in zip(_tensors(results), _tensors(func(*args, **kwargs)), strict=True):
                target.copy_(value)

        _launch(kernel)
        return results


def _launch(kernel: Kernel) -> None:
    _check(toy_launch(_placement.stream, kernel), "a launch")


def _synchronize() -> None:
    _check(toy_stream_synchronize(_placement.stream), "waiting for a value")


def _check(status: int, doing: str) -> None:
    if status != SUCCESS:
        raise ToyError(f"{doing} failed: {toy_error_string(status)}")


def _needs_no_kernel(func: Any) -> bool:
    """Return True for views, `empty` and `set_`, which access no values."""
    allocates = func._schema.name.split("::")[1].startswith(("empty", "new_empty", "set_"))
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)
    return allocates or (_returns_alias(func) and not writes)


def _gives_tensors(func: Any) -> bool:
    returns = func._schema.returns
    return not returns or any("Tensor" in str(result.type) for result in returns)


def _returns_alias(func: Any) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    return [
        kwargs.get(argument.name) if argument.kwarg_only else args[position]
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return value


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
