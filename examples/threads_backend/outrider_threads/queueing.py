"""Queueing: a dispatch mode inside `Backend.on` that turns torch calls into tasks.

A device call returns before the work has run, so the result's shape must be known without running it. Torch's `meta` device
computes the shape. The result is allocated immediately, and the task fills it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

Enqueue = Callable[[Callable[[], object]], None]


class Kind(NamedTuple):
    """Handling of an operator, derived from its schema."""

    at_once: bool
    """True if the operator runs immediately, because it neither reads nor writes values."""
    wants_values: bool
    """True if the operator needs values on the host."""
    written: tuple[int | str, ...]
    """Arguments that the operator changes."""


class Queueing(TorchDispatchMode):
    """Passes each operator to `enqueue()`. An operator that needs values on the host runs after `synchronize()`."""

    def __init__(self, enqueue: Enqueue, synchronize: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._enqueue = enqueue
        self._synchronize = synchronize

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle one operator. The mode is inactive inside this method."""
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind.at_once:
            return func(*args, **kwargs)
        if kind.wants_values:
            self._synchronize()
            return func(*args, **kwargs)
        try:
            shapes = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        except RuntimeError as error:
            if not isinstance(error, NotImplementedError) and torch.Tag.dynamic_output_shape not in func.tags:
                raise  # else the shape depends on values
            self._synchronize()
            return func(*args, **kwargs)
        task_args, task_kwargs = tree_map(_alias, args), tree_map(_alias, kwargs)
        if kind.written:
            changed = [kwargs.get(which) if isinstance(which, str) else args[which] for which in kind.written]
            if shapes is None or (isinstance(shapes, Tensor) and len(func._schema.returns) == 1 and _aliased(func)):
                self._enqueue(lambda: func(*task_args, **task_kwargs))
                return None if shapes is None else changed[0]
        results = tree_map(_allocated, shapes)

        def fill() -> None:
            values = func(*task_args, **task_kwargs)
            for target, value in zip(_flat(results), _flat(values), strict=True):
                target.copy_(value)

        self._enqueue(fill)
        return results


def _kind(func: Any) -> Kind:
    found: Kind | None = getattr(func, "_threads_kind", None)
    if found is None:
        arguments = func._schema.arguments
        written = tuple(
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        # Views, `empty`, and operators that change a tensor's view (`set_`, `t_`) access no values: run them at once.
        allocates = func._schema.name.split("::")[1].startswith(("empty", "new_empty"))
        found = func._threads_kind = Kind(
            at_once=allocates or torch.Tag.inplace_view in func.tags or (_aliased(func) and not written),
            wants_values=bool(func._schema.returns) and not any("Tensor" in str(r.type) for r in func._schema.returns),
            written=written,
        )
    return found


def _aliased(func: Any) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _alias(value: Any) -> Any:
    """Return an alias of a tensor, so that later changes of the tensor's view don't affect a queued task."""
    return value.detach() if isinstance(value, Tensor) else value


def _allocated(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return value


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _flat(item)] if isinstance(value, list | tuple) else []
