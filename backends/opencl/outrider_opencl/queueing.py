"""Queueing: a dispatch mode inside ``Backend.on`` that turns torch calls into commands of a stream.

A call returns before its work has run, so the shapes of its results come from torch's ``meta`` device. A copy becomes a copy
of the runtime, an operator with an OpenCL kernel becomes that kernel, and any other operator becomes a native kernel that
calls torch on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from outrider_opencl.backend import OpenCLStream
    from outrider_opencl.command_buffers import Recorder

    Launcher: TypeAlias = OpenCLStream | Recorder  # the current stream, or the graph that the thread captures

OVERLOAD = "opencl"
"""The overload of an operator of the backend interface that an OpenCL kernel computes."""


class OperatorHandling(NamedTuple):
    """Properties of an operator, derived from its schema, by which :class:`Queueing` enqueues or runs the operator."""

    at_once: bool
    """True if the operator runs immediately, because it neither reads nor writes the contents of tensors."""
    allocates: bool
    """True if the operator only allocates a result with undefined contents."""
    returns_values: bool
    """True if the operator returns values to the host."""
    written: tuple[int | str, ...]
    """Names or indices of the arguments that the operator writes."""
    is_alias: bool
    """True if the result is one of the arguments, or a view of one."""


class Queueing(TorchDispatchMode):
    """Pass each operator to the launcher that ``current()`` returns; wait before an operator whose values the host needs."""

    def __init__(self, current: Callable[[], Launcher]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._current = current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Enqueue or run one operator. The mode is inactive inside this method."""
        kwargs = kwargs or {}
        kind = _kind_of(func)
        if kind.at_once or _is_on_meta(args, kwargs):
            return func(*args, **kwargs)
        if kind.returns_values:
            self._current().synchronize_for_value()
            return func(*args, **kwargs)
        try:
            shapes = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        except RuntimeError as error:
            if not _depends_on_values(func, error):
                raise
            self._current().synchronize_for_value()
            return func(*args, **kwargs)
        if kind.allocates:
            return tree_map(self._allocated, shapes)
        held, named = tree_map(_alias_of, args), tree_map(_alias_of, kwargs)
        if kind.written:
            changed = [kwargs.get(which) if isinstance(which, str) else args[which] for which in kind.written]
            if shapes is None or (isinstance(shapes, Tensor) and len(func._schema.returns) == 1 and kind.is_alias):
                if func is not torch.ops.aten.copy_.default or not self._current().copy(_alias_of(changed[0]), held[1]):
                    self._launch(func, held, named, [], _alias_of(changed[0]), lambda: func(*held, **named))
                return None if shapes is None else changed[0]
        results = tree_map(self._allocated, shapes)
        filled = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]

        def fill() -> None:
            values = [leaf for leaf in tree_leaves(func(*held, **named)) if isinstance(leaf, Tensor)]
            for target, value in zip(filled, values, strict=True):
                target.copy_(value)

        self._launch(func, held, named, filled, results, fill)
        return results

    def _launch(
        self, func: Any, args: Any, kwargs: Any, results: list[Tensor], target: Any, task: Callable[[], None]
    ) -> None:
        """Enqueue the OpenCL kernel of ``func``, which writes ``results``, or an elementwise kernel that writes ``target``,
        or ``task`` on the host.
        """
        launcher, name = self._current(), _name_of(func)
        if func._overloadname == OVERLOAD:
            launcher.run_kernel(name, (*args, *results))
        elif not isinstance(target, Tensor) or not launcher.run_elementwise(name, target, args, kwargs):
            launcher.run_on_host(name, task)

    def _allocated(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._current().allocate(tuple(value.shape), value.stride(), value.dtype)
        return value


_READS_ON_HOST = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


class ReadsOutsideOperators(TorchFunctionMode):
    """Wait for the current stream before a call that reads memory of the host without an operator."""

    def __init__(self, current: Callable[[], Launcher]) -> None:
        super().__init__()
        self._current = current

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, after a wait for the current stream if ``func`` reads tensor memory. The mode is inactive inside
        this method.
        """
        if func in _READS_ON_HOST:
            self._current().synchronize_for_value()
        return func(*args, **(kwargs or {}))


def _depends_on_values(func: Any, error: RuntimeError) -> bool:
    """Return True if ``error`` of ``func`` on ``meta`` means that the shape of the result depends on values."""
    return isinstance(error, NotImplementedError) or torch.Tag.dynamic_output_shape in func.tags


def _name_of(func: Any) -> str:
    """Return the name of an operator without namespace and overload, such as ``add_``."""
    return str(func._schema.name).split("::")[1]


def _kind_of(func: Any) -> OperatorHandling:
    found: OperatorHandling | None = getattr(func, "_opencl_kind", None)
    if found is None:
        schema = func._schema
        written = tuple(
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        is_alias = any(result.alias_info is not None for result in schema.returns)
        found = func._opencl_kind = OperatorHandling(
            at_once=torch.Tag.inplace_view in func.tags or (is_alias and not written),
            allocates=_name_of(func).startswith(("empty", "new_empty")),
            returns_values=bool(schema.returns) and not any("Tensor" in str(r.type) for r in schema.returns),
            written=written,
            is_alias=is_alias,
        )
    return found


def _is_on_meta(args: Any, kwargs: Any) -> bool:
    """Return True if the caller works on torch's ``meta`` device, where only shapes are computed."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "meta"
    return any(isinstance(value, Tensor) and value.is_meta for value in args)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _alias_of(value: Any) -> Any:
    """Return an alias of a tensor, so that a later change of the tensor's view does not change the queued command."""
    return value.detach() if isinstance(value, Tensor) else value
