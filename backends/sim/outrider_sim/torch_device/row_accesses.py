"""Rows that an operation with data-dependent indices accesses, determined when the operation runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.device import Access
from outrider.device.kernels.operators import index_arguments, operands_by_index
from outrider_sim.torch_device.tensor import SimTensor


class Elements(NamedTuple):
    """Byte offsets, from the beginning of the operand, of the elements that an operation touches."""

    offsets: Tensor


Found = Tensor | Elements | None
"""The accesses that a resolver finds: rows of the first dimension, or elements; None means the whole operand."""

Resolver = Callable[[Mapping[str, Any]], Found]

_CPU = torch.device("cpu")
_MOST = 1 << 18
"""Maximum number of an operand's elements for which reads are found element by element; for more, row by row."""
_MOST_WRITTEN = 1 << 22
"""Maximum number of an operand's elements for which writes are found element by element; for more, row by row."""


def _offsets(operand: Tensor) -> Tensor:
    """Return the byte offset of each element from the operand's first one, in the operand's shape."""
    size = operand.element_size()
    made = torch.zeros((), dtype=torch.int64, device=_CPU)
    for dim, (count, stride) in enumerate(zip(operand.shape, operand.stride(), strict=True)):
        steps = torch.arange(count, device=_CPU) * (stride * size)
        made = made + steps.view([-1 if d == dim else 1 for d in range(operand.dim())])
    return made.expand(operand.shape)


def _read_elements(func: Any, name: str, arguments: Mapping[str, Any]) -> Found:
    """Return the elements of operand `name` that an operator reads at its index arguments.

    The operator itself runs on labels in place of the operand's elements, and on the labels counted backwards. If it copies
    elements, its two results name them. Otherwise the rows that the indices name are the elements read if the operator's
    result stays the same when every other row is overwritten.
    """
    operand: Tensor = arguments[name]
    if operand.numel() <= _MOST:
        labels = _offsets(operand)
    else:  # one label for each row, without memory for each element
        labels = torch.arange(operand.shape[0], device=_CPU).view(-1, *(1,) * (operand.dim() - 1)).expand(operand.shape)
    last = int(labels.max()) if labels.numel() else 0
    try:
        found, backwards = (_first(func, arguments, {name: each}) for each in (labels, last - labels))
    except (NotImplementedError, RuntimeError):  # it doesn't take integers
        return _read_rows(func, name, arguments)
    if found.dtype != torch.int64 or not torch.equal(found, last - backwards):
        return _read_rows(func, name, arguments)
    return Elements(found.flatten()) if operand.numel() <= _MOST else found.flatten().unique()


def _read_rows(func: Any, name: str, arguments: Mapping[str, Any]) -> Found:
    operand: Tensor = arguments[name]
    index = [arguments[each] for each in index_arguments(func) if isinstance(arguments.get(each), Tensor)]
    if not index or not operand.dim() or not operand.is_floating_point() or index[0].dtype in (torch.bool, torch.uint8):
        return None
    rows = torch.cat([each.flatten() for each in index])
    others = torch.full_like(operand, torch.nan)
    others[rows] = operand[rows]
    same = torch.equal(*(_first(func, arguments, {name: each}).nan_to_num(1.5) for each in (operand, others)))
    return rows if same else None


def _first(func: Any, arguments: Mapping[str, Any], replaced: Mapping[str, Any]) -> Tensor:
    """Return the first result of an operator's call with other operands, in new memory."""
    outs = [argument.name for argument in func._schema.arguments if argument.is_out]
    call = {k: v for k, v in {**arguments, **replaced}.items() if k not in outs}
    result = (func.overloadpacket if outs else func._op)(**call)
    first: Tensor = result if isinstance(result, Tensor) else result[0]
    return first


def _written_elements(func: Any, name: str, arguments: Mapping[str, Any]) -> Found:
    """Return the elements of operand `name` that an in-place operator writes at its index arguments.

    The operator itself runs twice: with zeros in the operand and ones in the values, and the other way round. The elements
    that differ afterwards are written.
    """
    operand: Tensor = arguments[name]
    if operand.numel() > _MOST_WRITTEN:
        return None
    indices = index_arguments(func)
    values = {k: v for k, v in arguments.items() if isinstance(v, Tensor) and k != name and k not in indices}
    changed = torch.zeros(operand.shape, dtype=torch.bool, device=_CPU)
    for before in (0, 1):
        place = torch.full(operand.shape, before, dtype=operand.dtype, device=_CPU)
        func._op(**{**arguments, **{k: torch.full_like(v, 1 - before) for k, v in values.items()}, name: place})
        changed |= place != before
    steps = torch.tensor(operand.stride(), dtype=torch.int64, device=_CPU) * operand.element_size()
    return Elements((changed.nonzero() * steps).sum(1))


def _reached_offsets(offsets: Tensor, dim: int, index: Tensor) -> Tensor:
    if offsets.dim() == 0 or index.dim() == 0:
        return offsets.reshape(-1)
    return offsets.gather(dim, index)


def resolvers_of(func: Any) -> Mapping[str, Resolver]:
    """Return, by operand of an overload, the function that finds the elements accessed at indices."""
    writes = any(argument.alias_info is not None and not argument.is_out for argument in func._schema.arguments)
    find = _written_elements if writes else _read_elements
    return {name: partial(find, func, name) for name in operands_by_index(func)}


def declared(operands: Mapping[str, Callable[..., Tensor]]) -> Mapping[str, Resolver]:
    """Return the resolvers of a custom operator from functions that return the rows of the first dimension."""
    return {name: partial(_declared_elements, name, rows) for name, rows in operands.items()}


def _declared_elements(name: str, rows: Callable[..., Tensor], arguments: Mapping[str, Any]) -> Elements:
    """Return the elements of the distinct rows of operand `name` that a custom operator declares."""
    return Elements(_offsets(arguments[name])[rows(arguments).flatten().long()].flatten())


_SOURCES = MappingProxyType(
    {"index_copy_": "source", "index_put_": "values", "_index_put_impl_": "values", "put_": "source", "scatter_": "src"}
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
    is_declared = isinstance(resolve, partial) and resolve.func is _declared_elements
    if is_declared:
        found = resolve(arguments)
        places = found.offsets if isinstance(found, Elements) else torch.empty(0, dtype=torch.int64)
    elif isinstance(source, Tensor):
        offsets = _offsets(operand)
        if name == "index_copy_":
            places = offsets.index_select(arguments["dim"], arguments["index"].flatten()) if offsets.dim() else offsets
        elif name == "scatter_":
            places = _reached_offsets(offsets, arguments["dim"], arguments["index"])
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
    if isinstance(source, Tensor) and not is_declared and bool(twice.any()):
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
                itemsize = self._looks[name][2]
                found.extend(strided_accesses(whole, merge_adjacent(rows.offsets.numpy(), itemsize), itemsize))
            else:
                found.extend(self._spread(whole, rows, *self._looks[name]))
            if whole.write:
                found.extend(self._resolved_accesses(whole, name, resolve))
        return tuple(found)

    def _resolved_accesses(self, whole: Access, name: str, resolve: Resolver) -> list[Access]:
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
        low = row * stride[0] if dims == 1 else row // inner * stride[0] + row % inner * stride[1]
        return range_accesses(whole, merge_adjacent(low, tail))


Ranges = tuple[NDArray[numpy.int64], NDArray[numpy.int64]]
"""Byte ranges: the start and the end (exclusive) of each, sorted, with a gap between consecutive ranges."""


def merge_adjacent(addresses: NDArray[Any], size: int) -> Ranges:
    """Return the ranges of elements of `size` bytes at `addresses`. Adjacent elements form one range."""
    low = numpy.unique(addresses).astype(numpy.int64)
    is_first = numpy.diff(low, prepend=low[:1] - size - 1) > size
    return low[is_first], low[numpy.append(is_first[1:], True)[: low.size]] + size


def range_accesses(whole: Access, ranges: Ranges) -> list[Access]:
    """Return one access of `whole` for each byte range. Ranges count from its start."""
    return [
        Access(whole.storage, whole.start + start, whole.start + end, whole.write, None, None, whole.argument)
        for start, end in zip(*(bounds.tolist() for bounds in ranges), strict=True)
    ]


def strided_accesses(whole: Access, ranges: Ranges, itemsize: int = 1) -> list[Access]:
    """Return one strided access of `whole` for ranges of equal length and distance, else the accesses of
    :func:`range_accesses`. `itemsize`: bytes of an element of the strided access.
    """
    starts, ends = ranges
    if len(starts) > 2:
        step, length = int(starts[1] - starts[0]), int(ends[0] - starts[0])
        if bool((numpy.diff(starts) == step).all()) and bool((ends - starts == length).all()):
            start, end = whole.start + int(starts[0]), whole.start + int(ends[-1])
            shape, stride = (len(starts), length // itemsize), (step, itemsize)
            return [Access(whole.storage, start, end, whole.write, shape, stride, whole.argument)]
    return range_accesses(whole, ranges)


def _inner(value: Any) -> Any:
    if isinstance(value, SimTensor):
        return value._inner
    if isinstance(value, list | tuple):
        return [_inner(item) for item in value]
    return value
