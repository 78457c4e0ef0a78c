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

Resolver = Callable[[Mapping[str, Any]], Found]
_NONE: Mapping[str, Resolver] = MappingProxyType({})

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


_BAGS = MappingProxyType({"weight": _rows_of_weight})
_PICKS: Mapping[str, Mapping[str, Resolver]] = MappingProxyType(
    {
        "_embedding_bag": _BAGS,
        "_embedding_bag_forward_only": _BAGS,
        "_unsafe_index": _INDICES,
        "embedding": _BAGS,
        "embedding_bag": _BAGS,
        "gather": _SCATTERS,
        "index": _INDICES,
        "index_select": _ALONG,
        "masked_select": _MASKS,
        "take": _TAKES,
    }
)
"""Operators that read the elements that an index picks, whatever their overload; `out` is written as a whole."""
_WRITES: Mapping[str, Mapping[str, Resolver]] = MappingProxyType(
    {
        "_index_put_impl_": _INDICES,
        "_unsafe_index_put_": _INDICES,
        "index_add_": _ALONG,
        "index_copy_": _ALONG,
        "index_fill_": _ALONG,
        "index_put_": _INDICES,
        "index_reduce_": _ALONG,
        "masked_fill_": _MASKS,
        "masked_scatter_": _MASKS,
        "put_": _TAKES,
        "scatter_": _SCATTERS,
        "scatter_add_": _SCATTERS,
        "scatter_reduce_": _SCATTERS,
    }
)
"""Operators that write the elements that an index picks, in place."""


def resolvers_of(func: Any) -> Mapping[str, Resolver]:
    """Return how to find the rows of an overload's operands that are indexed by data, by operand."""
    namespace, name = func._schema.name.split("::")
    if namespace != "aten":
        return _NONE
    return _PICKS.get(name) or _WRITES.get(name) or _NONE


def declared(operands: Mapping[str, Callable[..., Tensor]]) -> Mapping[str, Resolver]:
    """Return the resolvers of a custom operator from functions that return the rows of the first dimension."""

    def resolver(name: str, rows: Callable[[Mapping[str, Any]], Tensor]) -> Resolver:
        return Declared(_picked(name, lambda offsets, arguments: offsets[rows(arguments).flatten().long()]))

    return {name: resolver(name, rows) for name, rows in operands.items()}


class Declared:
    """The resolver of a custom operator that declares distinct rows."""

    def __init__(self, resolve: Resolver) -> None:
        self._resolve = resolve

    def __call__(self, arguments: Mapping[str, Any]) -> Found:
        """Return the elements of the declared rows."""
        return self._resolve(arguments)


_SOURCES = MappingProxyType(
    {"index_copy_": "source", "index_put_": "values", "_index_put_impl_": "values", "scatter_": "src"}
)
_ACCUMULATES = ("accumulate", "reduce")


def contested_bytes(operator: str, resolve: Resolver, arguments: Mapping[str, Any], operand: Tensor) -> list[tuple[int, int]]:
    """Return the byte ranges that one operation writes more than once, with different values.

    A custom operator that declares its rows must not write a row twice, whatever the values are.
    """
    name = operator.split("::")[-1].partition(".")[0]
    source = arguments.get(_SOURCES.get(name, ""))
    if any(arguments.get(argument) for argument in _ACCUMULATES) or operand.numel() > _MOST:
        return []
    if name == "put_":
        source = arguments["source"]
    if isinstance(resolve, Declared):
        found = resolve(arguments)
        places = found.offsets if isinstance(found, Elements) else torch.empty(0, dtype=torch.int64)
    elif isinstance(source, Tensor):
        offsets = _offsets(operand)
        if name == "index_copy_":
            places = offsets.index_select(arguments["dim"], arguments["index"].flatten()) if offsets.dim() else offsets
        elif name == "scatter_":
            places = _reached(offsets, arguments["dim"], arguments["index"])
            source = source[tuple(slice(n) for n in places.shape)] if source.dim() == places.dim() else source
        elif name == "put_":
            places = offsets.take(arguments["index"])
        else:
            places = offsets[tuple(slice(None) if i is None else i for i in arguments["indices"])]
        source = source.expand(places.shape).flatten()
    else:
        return []
    flat = places.flatten()
    unique, inverse, counts = flat.unique(return_inverse=True, return_counts=True)
    twice = counts > 1
    if isinstance(source, Tensor) and not isinstance(resolve, Declared) and bool(twice.any()):
        last = torch.empty(len(unique), dtype=source.dtype)
        last[inverse] = source
        differs = torch.zeros(len(unique), dtype=torch.bool)
        differs[inverse[(last[inverse] != source) & ~((last[inverse] != last[inverse]) & (source != source))]] = True
        twice &= differs
    size = operand.element_size()
    return [(low, low + size) for low in unique[twice].tolist()]


class RowResolver:
    """The operands of one queued operation. When the operation runs, the machine calls the object for the accessed rows."""

    __slots__ = ("_accesses", "_bound", "_dims", "_looks", "_name", "_resolvers")

    def __init__(
        self,
        resolvers: Mapping[str, Callable[[Mapping[str, Any]], Found]],
        bound: Mapping[str, Any],
        accesses: Sequence[Access],
        native: bool,
        name: str = "",
    ) -> None:
        self._name = name
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
            if whole.write:
                found.extend(self._contested(whole, name, resolve))
        return tuple(found)

    def _contested(self, whole: Access, name: str, resolve: Resolver) -> list[Access]:
        operand = self._bound.get(name)
        if not isinstance(operand, Tensor):
            return []
        try:
            places = contested_bytes(self._name, resolve, self._bound, operand)
        except (IndexError, RuntimeError):
            return []
        return [
            Access(whole.storage, whole.start + low, whole.start + high, True, None, None, whole.argument, contested=True)
            for low, high in places
        ]

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
