"""Which rows an operation that indexes by data really touches, found when it runs and its indices are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from outrider.device import Access
from outrider_sim.tensor import SimTensor


def _index_dim0(name: str) -> Callable[[Mapping[str, Any]], Tensor | None]:
    def rows(arguments: Mapping[str, Any]) -> Tensor | None:
        if arguments.get("dim", 0) != 0:
            return None
        index: Tensor = arguments[name]
        return index.flatten()

    return rows


def _first_index(arguments: Mapping[str, Any]) -> Tensor | None:
    indices = arguments["indices"]
    first = indices[0]
    if first is None or first.dtype == torch.bool:
        return None
    index: Tensor = first.flatten()
    return torch.where(index < 0, index + arguments["self"].shape[0], index)


_FIRST = MappingProxyType({"self": _first_index})

ATEN: Mapping[str, Mapping[str, Callable[[Mapping[str, Any]], Tensor | None]]] = MappingProxyType(
    {
        "aten::embedding": MappingProxyType({"weight": _index_dim0("indices")}),
        "aten::index_select": MappingProxyType({"self": _index_dim0("index")}),
        "aten::index_copy_": MappingProxyType({"self": _index_dim0("index")}),
        "aten::index_add_": MappingProxyType({"self": _index_dim0("index")}),
        "aten::index_fill_.int_Scalar": MappingProxyType({"self": _index_dim0("index")}),
        "aten::index.Tensor": _FIRST,
        "aten::index_put_": _FIRST,
        "aten::_index_put_impl_": _FIRST,
    }
)
"""Operators of torch whose first dimension is indexed by data. None from a resolver: it may touch everything."""


class Resolver:
    """The operands of one queued operation, to be asked when it runs."""

    __slots__ = ("_accesses", "_bound", "_dims", "_looks", "_resolvers")

    def __init__(
        self,
        resolvers: Mapping[str, Callable[[Mapping[str, Any]], Tensor | None]],
        bound: Mapping[str, Any],
        accesses: Sequence[Access],
        native: bool,
    ) -> None:
        self._resolvers = resolvers
        # Host tensors over the same bytes: the caller's wrappers may be gone by then.
        self._bound = {name: _inner(value) for name, value in bound.items()}
        self._accesses = {access.argument: access for access in accesses}
        # A row of torch's operators is one index of the first dimension, of the kernels' one of the first two.
        self._dims = 1 if native else 2
        self._looks = {
            name: (tuple(t.shape), tuple(s * t.element_size() for s in t.stride()), t.element_size())
            for name, t in self._bound.items()
            if name in resolvers and isinstance(t, Tensor)
        }

    def __call__(self) -> tuple[Access, ...]:
        """The accesses, row by row (neighbours merged), of the operands that are indexed by data; the operand's whole
        access again where the rows can't be told.
        """
        found: list[Access] = []
        for name, resolve in self._resolvers.items():
            whole = self._accesses.get(name)
            if whole is None:
                continue
            rows = resolve(self._bound)
            if rows is None:
                found.append(whole)
            else:
                found.extend(self._spread(whole, rows, *self._looks[name]))
        return tuple(found)

    def _spread(
        self, whole: Access, rows: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int
    ) -> list[Access]:
        dims = min(self._dims, len(shape))
        tail = sum((n - 1) * s for n, s in zip(shape[dims:], stride[dims:], strict=True)) + itemsize
        inner = shape[dims - 1]
        limit = shape[0] if dims == 1 else shape[0] * inner
        spans: list[tuple[int, int]] = []
        for row in sorted({int(r) for r in rows.tolist() if 0 <= int(r) < limit}):
            low = whole.start + (row * stride[0] if dims == 1 else row // inner * stride[0] + row % inner * stride[1])
            if spans and spans[-1][1] == low:
                spans[-1] = (spans[-1][0], low + tail)
            else:
                spans.append((low, low + tail))
        return [Access(whole.storage, low, high, whole.write, None, None, whole.argument) for low, high in spans]


def _inner(value: Any) -> Any:
    if isinstance(value, SimTensor):
        return value._inner
    if isinstance(value, list | tuple):
        return [_inner(item) for item in value]
    return value
