"""Torch calls become tasks: a dispatch mode that is on inside `Backend.on`.

A device returns from a call before the work has run, so the result's shape must be known without running it: torch's
`meta` device gives it. The result is allocated at once and filled by the task.
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
    """How an operator must be treated, from its schema. `written` are the arguments that it changes."""

    at_once: bool
    wants_values: bool
    written: tuple[int | str, ...]


class Queueing(TorchDispatchMode):
    """Hands each operator to `enqueue()`; one that must know values goes ahead after `synchronize()`."""

    def __init__(self, enqueue: Enqueue, synchronize: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._enqueue = enqueue
        self._synchronize = synchronize

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator. Inside this method the mode is off."""
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind.at_once:
            return func(*args, **kwargs)
        if kind.wants_values:
            self._synchronize()
            return func(*args, **kwargs)
        try:
            shapes = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        except NotImplementedError:  # the shape depends on values
            self._synchronize()
            return func(*args, **kwargs)
        held, named = tree_map(_held, args), tree_map(_held, kwargs)
        if kind.written:
            changed = [kwargs.get(which) if isinstance(which, str) else args[which] for which in kind.written]
            if shapes is None or (isinstance(shapes, Tensor) and len(func._schema.returns) == 1 and _aliased(func)):
                self._enqueue(lambda: func(*held, **named))
                return None if shapes is None else changed[0]
        results = tree_map(_allocated, shapes)

        def fill() -> None:
            made = func(*held, **named)
            for there, here in zip(_flat(results), _flat(made), strict=True):
                there.copy_(here)

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
        # A view moves no bytes, `empty` writes none, `set_` and `t_` change what a tensor looks at: they're done at once.
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


def _held(value: Any) -> Any:
    """The tensor as it is now: a task isn't to see what the tensor is set to look at meanwhile."""
    return value.detach() if isinstance(value, Tensor) else value


def _allocated(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return value


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _flat(item)] if isinstance(value, list | tuple) else []
