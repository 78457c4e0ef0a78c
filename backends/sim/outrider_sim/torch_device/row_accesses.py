"""Rows that an operation with data-dependent indices accesses, determined when the operation runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from outrider.device import Access
from outrider_sim.torch_device.tensor import SimTensor


class Elements(NamedTuple):
    """Byte offsets, from the beginning of the operand, of the elements that an operation touches."""

    offsets: Tensor


Found = Tensor | Elements | None
"""Rows of the first dimension, or elements; None: it may touch everything."""

_MOST = 1 << 18
"""Elements of an operand up to which its elements are told apart."""


def _offsets(operand: Tensor) -> Tensor:
    """Return the byte offset of each element of the operand, in the operand's shape."""
    size = operand.element_size()
    made = torch.zeros((), dtype=torch.int64)
    for dim, (count, stride) in enumerate(zip(operand.shape, operand.stride(), strict=True)):
        steps = torch.arange(count, dtype=torch.int64) * (stride * size)
        made = made + steps.view([-1 if d == dim else 1 for d in range(operand.dim())])
    return made.expand(operand.shape)


def _picked(name: str, pick: Callable[[Tensor, Mapping[str, Any]], Tensor]) -> Callable[[Mapping[str, Any]], Found]:
    """Return the elements of operand `name` that `pick` selects, by applying `pick` to a tensor of byte offsets."""

    def elements(arguments: Mapping[str, Any]) -> Found:
        operand: Tensor = arguments[name]
        if operand.numel() > _MOST:
            return None
        return Elements(pick(_offsets(operand), arguments).flatten())

    return elements


def _along(index: str) -> Callable[[Mapping[str, Any]], Found]:
    """Return the elements of whole slices of the operand at `indices` along dimension `dim`."""
    others = _picked("self", lambda offsets, a: offsets.index_select(a.get("dim", 0), a[index].flatten()))

    def found(arguments: Mapping[str, Any]) -> Found:
        if arguments["self"].dim() == 0:
            return None
        if arguments.get("dim", 0) % arguments["self"].dim() == 0:
            rows: Tensor = arguments[index].flatten()
            return rows
        return others(arguments)

    return found


def _rows_of_weight(arguments: Mapping[str, Any]) -> Found:
    index: Tensor = arguments["indices"]
    return index.flatten()


def _by_indices(arguments: Mapping[str, Any]) -> Found:
    indices, operand = arguments["indices"], arguments["self"]
    first = indices[0]
    if len(indices) == 1 and first is not None and first.dtype not in (torch.bool, torch.uint8):
        index: Tensor = first.flatten()
        return torch.where(index < 0, index + operand.shape[0], index)
    if operand.numel() > _MOST:
        return None
    kept = [slice(None) if i is None else i for i in indices]
    return Elements(_offsets(operand)[tuple(kept)].flatten())


_INDICES = MappingProxyType({"self": _by_indices})
_SCATTERS = MappingProxyType({"self": _picked("self", lambda offsets, a: _reached(offsets, a["dim"], a["index"]))})
_TAKES = MappingProxyType({"self": _picked("self", lambda offsets, a: offsets.take(a["index"]))})
_MASKS = MappingProxyType({"self": _picked("self", lambda offsets, a: offsets[a["mask"].expand(offsets.shape)])})
_ALONG = MappingProxyType({"self": _along("index")})


def _reached(offsets: Tensor, dim: int, index: Tensor) -> Tensor:
    if offsets.dim() == 0 or index.dim() == 0:
        return offsets.reshape(-1)
    return offsets.gather(dim, index)


ATEN: Mapping[str, Mapping[str, Callable[[Mapping[str, Any]], Found]]] = MappingProxyType(
    {
        "aten::embedding": MappingProxyType({"weight": _rows_of_weight}),
        "aten::index_select": _ALONG,
        "aten::index_copy_": _ALONG,
        "aten::index_add_": _ALONG,
        "aten::index_reduce_": _ALONG,
        "aten::index_fill_.int_Scalar": _ALONG,
        "aten::index_fill_.int_Tensor": _ALONG,
        "aten::index.Tensor": _INDICES,
        "aten::index_put_": _INDICES,
        "aten::_index_put_impl_": _INDICES,
        "aten::gather": _SCATTERS,
        "aten::scatter_.src": _SCATTERS,
        "aten::scatter_.value": _SCATTERS,
        "aten::scatter_.reduce": _SCATTERS,
        "aten::scatter_.value_reduce": _SCATTERS,
        "aten::scatter_add_": _SCATTERS,
        "aten::scatter_reduce_.two": _SCATTERS,
        "aten::take": _TAKES,
        "aten::put_": _TAKES,
        "aten::masked_fill_.Scalar": _MASKS,
        "aten::masked_fill_.Tensor": _MASKS,
        "aten::masked_scatter_": _MASKS,
    }
)
"""Operators of torch that are indexed by data."""


class RowResolver:
    """The operands of one queued operation. When the operation runs, the machine calls the object for the accessed rows."""

    __slots__ = ("_accesses", "_bound", "_dims", "_looks", "_resolvers")

    def __init__(
        self,
        resolvers: Mapping[str, Callable[[Mapping[str, Any]], Found]],
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
        """Return the accesses to the operands that data indexes, row by row, with adjacent rows merged.

        Returns an access to the whole operand if its rows can't be determined.
        """
        found: list[Access] = []
        known: dict[Callable[[Mapping[str, Any]], Found], Found] = {}
        for name, resolve in self._resolvers.items():
            whole = self._accesses.get(name)
            if whole is None:
                continue
            if resolve not in known:  # keys and values have the same rows
                try:
                    known[resolve] = resolve(self._bound)
                except (IndexError, RuntimeError):  # the operation itself is about to say what is wrong
                    known[resolve] = None
            rows = known[resolve]
            if rows is None:
                found.append(whole)
            elif isinstance(rows, Elements):
                found.extend(_runs(whole, rows.offsets, self._looks[name][2]))
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
        row = numpy.unique(rows.numpy())
        row = row[(row >= 0) & (row < limit)]
        if not row.size:
            return []
        low = whole.start + (row * stride[0] if dims == 1 else row // inner * stride[0] + row % inner * stride[1])
        gaps = numpy.flatnonzero(low[1:] != low[:-1] + tail) + 1
        starts = low[numpy.concatenate(([0], gaps))].tolist()
        ends = (low[numpy.concatenate((gaps - 1, [-1]))] + tail).tolist()
        return [
            Access(whole.storage, start, end, whole.write, None, None, whole.argument)
            for start, end in zip(starts, ends, strict=True)
        ]


def _runs(whole: Access, offsets: Tensor, itemsize: int) -> list[Access]:
    """Merge elements into byte ranges: adjacent elements form one, and ranges of equal length and distance one strided
    access.
    """
    low = numpy.unique(offsets.numpy())
    if not low.size:
        return []
    gaps = numpy.flatnonzero(low[1:] != low[:-1] + itemsize) + 1
    starts = low[numpy.concatenate(([0], gaps))]
    ends = low[numpy.concatenate((gaps - 1, [-1]))] + itemsize
    if len(starts) > 2:
        step = int(starts[1] - starts[0])
        length = int(ends[0] - starts[0])
        if bool((numpy.diff(starts) == step).all()) and bool((ends - starts == length).all()):
            start, end = whole.start + int(starts[0]), whole.start + int(ends[-1])
            shape, stride = (len(starts), length // itemsize), (step, itemsize)
            return [Access(whole.storage, start, end, whole.write, shape, stride, whole.argument)]
    return [
        Access(whole.storage, whole.start + start, whole.start + end, whole.write, None, None, whole.argument)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]


def _inner(value: Any) -> Any:
    if isinstance(value, SimTensor):
        return value._inner
    if isinstance(value, list | tuple):
        return [_inner(item) for item in value]
    return value
