"""numpy arrays over pinned host memory that report each read and write by the host.

Programs fill pinned buffers through `.numpy()` and read results the same way. Every method, operator and numpy function on
such an array reports: results that share the memory are arrays of the same kind, other results are a read, and `out=` and the
operand of an in-place function are a write. The sanitizer extends the reports to constructors that numpy and torch run
in C. Not reported: a C extension that reads the bytes through the address or the buffer protocol.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Protocol

import numpy as np


class HostMemory(Protocol):
    """Pinned memory that is notified of each access by the host."""

    address: int
    nbytes: int

    def range_accessed(self, low: int, high: int, write: bool) -> None:
        """Handle an access by the host to the bytes ``low`` to ``high``, counted from ``address``."""

    def tensor_over(self, array: Any) -> Any:
        """Return a tensor over the bytes of ``array``, a plain array in this memory, that reports as the memory does."""


_IN_PLACE = frozenset(
    {"byteswap", "copyto", "fill", "fill_diagonal", "partition", "place", "put", "put_along_axis", "putmask", "resize"}
    | {"setfield", "sort", "__setstate__"}
)
"""Methods and functions that write their first operand. Functions of these names that return a copy are reads, too."""
_RETURNS_COPY = frozenset({"partition", "resize", "sort"})
"""Names in `_IN_PLACE` whose function, unlike the method, returns a changed copy."""
_SHAPE_ALONE = frozenset(
    {"common_type", "empty_like", "full_like", "iscomplexobj", "isrealobj", "may_share_memory", "ndim", "ones_like"}
    | {"result_type", "shape", "shares_memory", "size", "zeros_like"}
)
"""Functions that look at an array's shape, dtype or address, and at none of its elements."""
_SPECIAL = (
    *("__bool__", "__complex__", "__contains__", "__copy__", "__deepcopy__", "__float__", "__format__"),
    *("__index__", "__int__", "__reduce__", "__reduce_ex__", "__repr__", "__setstate__", "__str__"),
)


class PinnedArray(np.ndarray):
    """A view of pinned memory. Arithmetic on the view returns ordinary arrays."""

    _alloc: HostMemory | None = None

    def __array_finalize__(self, base: Any) -> None:
        """Assign a view to the memory of its base. A copy, whose bytes lie elsewhere, belongs to no memory."""
        alloc = getattr(base, "_alloc", None)
        if alloc is not None and _within(self, alloc):
            self._alloc = alloc

    def _note(self, part: Any, write: bool) -> None:
        alloc = self._alloc
        if alloc is not None and part.size:
            low, high = np.lib.array_utils.byte_bounds(part)
            alloc.range_accessed(low - alloc.address, high - alloc.address, write)

    def _part(self, index: Any) -> Any:
        """Return the elements of this array that ``index`` selects if numpy returns a view of them, else all elements."""
        plain = plain_array(self)
        part = plain[index]
        return part if isinstance(part, np.ndarray) and np.may_share_memory(part, plain) else _one(plain, index)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(found, PinnedArray) and found._alloc is not None:
            return found  # a view reads nothing yet
        self._note(self._part(index), write=False)
        return plain_array(found) if isinstance(found, PinnedArray) else found

    def __setitem__(self, index: Any, value: Any) -> None:
        self._note(self._part(index), write=True)
        plain_array(self)[index] = read_array(value)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        """Report the inputs of an arithmetic operation as read and its outputs as written."""
        if method == "at" and isinstance(inputs[0], PinnedArray):  # in place, on the first operand
            inputs[0]._note(inputs[0], write=True)
        if out is not None:
            for target in out:
                if isinstance(target, PinnedArray):
                    target._note(target, write=True)
            kwargs["out"] = tuple(plain_array(o) if isinstance(o, PinnedArray) else o for o in out)
        kwargs = {name: read_array(value) for name, value in kwargs.items()}
        result = getattr(ufunc, method)(*[read_array(value) for value in inputs], **kwargs)
        return out[0] if out is not None and len(out) == 1 else result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Report the arguments of a numpy function as read, `out` and the operand of an in-place function as written."""
        del types
        name = getattr(func, "__name__", "")
        if name in _SHAPE_ALONE:
            return func(*_plain_deep(args), **_plain_deep(kwargs))
        return call_reporting(func, args, kwargs, name in _IN_PLACE - _RETURNS_COPY, _out_position(func))

    def byteswap(self, inplace: bool = False) -> Any:
        """Return the array with the bytes of its elements swapped; with `inplace`, report a write and change the memory."""
        return call_reporting(np.ndarray.byteswap, (self, inplace), {}, inplace, None)

    def view(self, *args: Any, **kwargs: Any) -> Any:
        """Return a view of the same memory that reports, whatever array class is asked for."""
        return _watched_result(np.ndarray.view(self, *args, **kwargs), self)

    @property
    def flat(self) -> Any:
        """The elements of the array in one dimension; reading, writing and iterating report."""
        return FlatView(self)

    @flat.setter
    def flat(self, value: Any) -> None:
        self._note(self, write=True)
        plain_array(self).flat = read_array(value)

    @property
    def data(self) -> Any:
        """The buffer of the array; reading and writing its elements report."""
        return BufferView(self)

    def __dlpack__(self, **options: Any) -> Any:
        """Return a capsule over the array's bytes, whose use is not seen: report a read and a write."""
        self._note(self, write=True)
        return plain_array(self).__dlpack__(**options)

    def __bytes__(self) -> bytes:
        found: bytes = self.tobytes()
        return found

    def __iter__(self) -> Any:
        return (self[n] for n in range(len(self)))


def _method(name: str) -> Callable[..., Any]:
    original = getattr(np.ndarray, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call_reporting(original, (self, *args), kwargs, name in _IN_PLACE, _out_position(getattr(np, name, None)))

    call.__name__, call.__doc__ = name, original.__doc__
    return call


_SILENT = ("setflags", "to_device")
for _name in (*(n for n in dir(np.ndarray) if not n.startswith("_") and callable(getattr(np.ndarray, n))), *_SPECIAL):
    if _name not in vars(PinnedArray) and _name not in _SILENT:
        setattr(PinnedArray, _name, _method(_name))


@lru_cache(1 << 10)
def _out_position(func: Any) -> int | None:
    """Return the position of the argument `out` of a numpy function, None if it has none."""
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("out") if "out" in names else None


def call_reporting(func: Any, args: Any, kwargs: Any, in_place: bool, out: int | None) -> Any:
    """Run a numpy function on plain arrays; report writes before the call and reads after it.

    Operands whose memory the result shares are not read: the result is a view that reports.
    """
    targets = [kwargs["out"]] if "out" in kwargs else [args[out]] if out is not None and len(args) > out else []
    targets += [args[0]] if in_place and args else []
    pinned = list(_pinned_in((args, kwargs)))
    written = list(_pinned_in(targets))
    for target in written:
        target._note(target, write=True)
    result = func(*_plain_deep(args), **_plain_deep(kwargs))
    for target in written:
        if (
            isinstance(result, np.ndarray)
            and np.may_share_memory(result, plain_array(target))
            and result.shape == target.shape
        ):
            result = target
    views = _views(result, pinned)
    if views is None:
        for value in pinned:
            if not any(value is target for target in written):
                value._note(value, write=False)
        return result
    return views


def _views(result: Any, pinned: list[PinnedArray]) -> Any:
    """Return ``result`` with the arrays in the memory of ``pinned`` reporting, None if some part of it is no view."""
    if isinstance(result, PinnedArray):
        return result
    if isinstance(result, np.ndarray):
        owner = next((value for value in pinned if value._alloc is not None and _within(result, value._alloc)), None)
        return None if owner is None else _watched_result(result, owner)
    if isinstance(result, list | tuple) and result and type(result) in (list, tuple):
        parts = [_views(part, pinned) for part in result]
        return None if any(part is None for part in parts) else type(result)(parts)
    return None


class FlatView:
    """The elements of a pinned array in one dimension, as `ndarray.flat` gives them."""

    def __init__(self, array: PinnedArray) -> None:
        self._array = array

    def __len__(self) -> int:
        return int(self._array.size)

    def __getitem__(self, index: Any) -> Any:
        self._array._note(self._array, write=False)
        return plain_array(self._array).flat[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._array._note(self._array, write=True)
        plain_array(self._array).flat[index] = read_array(value)

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            yield self[index]

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.array(self[:], *args, **kwargs)


_MEMORYVIEW = memoryview  # a watched run replaces the name


class BufferView:
    """A `memoryview` of a pinned array that reports its reads and writes."""

    def __init__(self, array: PinnedArray, view: Any = None) -> None:
        self._array = array
        self._view = _MEMORYVIEW(plain_array(array)) if view is None else view

    def __getitem__(self, index: Any) -> Any:
        found = self._view[index]
        if isinstance(found, _MEMORYVIEW):
            return BufferView(self._array, found)
        self._array._note(self._array, write=False)
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        self._array._note(self._array, write=True)
        self._view[index] = value

    def __len__(self) -> int:
        return len(self._view)

    def cast(self, *args: Any) -> BufferView:
        """Return the view with another element format."""
        return BufferView(self._array, self._view.cast(*args))

    def _bytes(self) -> bytes:
        self._array._note(self._array, write=False)
        found: bytes = self._view.tobytes()
        return found

    def __buffer__(self, flags: int) -> Any:
        """Give the bytes away to C code (Python 3.12): report a read."""
        self._array._note(self._array, write=False)
        return self._view

    def __bytes__(self) -> bytes:
        return self._bytes()

    tobytes = _bytes

    def hex(self, *args: Any) -> str:
        """Return the bytes as hexadecimal digits, and report a read."""
        return self._bytes().hex(*args)

    def tolist(self) -> Any:
        """Return the elements as a list, and report a read."""
        self._array._note(self._array, write=False)
        return self._view.tolist()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        self._array._note(self._array, write=False)
        return bool(self._view == (other._view if isinstance(other, BufferView) else other))

    __hash__ = None  # type: ignore[assignment]  # as of a view of memory that changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def watched(array: Any, alloc: HostMemory) -> PinnedArray:
    """Return a view of `array`, which lies in the memory of `alloc`, that reports its reads and writes."""
    view: PinnedArray = np.ndarray.view(array, PinnedArray)
    view._alloc = alloc
    return view


def _watched_result(result: Any, owner: PinnedArray) -> Any:
    return result if owner._alloc is None else watched(result, owner._alloc)


def _within(array: Any, alloc: HostMemory) -> bool:
    return bool(alloc.address <= array.__array_interface__["data"][0] < alloc.address + max(alloc.nbytes, 1))


def _one(plain: Any, index: Any) -> Any:
    """Return a single element as a view; any other index that selects by data counts as all elements."""
    try:
        keys = index if isinstance(index, tuple) else (index,)
        if len(keys) == plain.ndim and all(isinstance(k, int | np.integer) for k in keys):
            return plain[tuple(slice(int(k), None if k == -1 else int(k) + 1) for k in keys)]
    except TypeError:
        pass
    return plain


def plain_array(value: Any) -> Any:
    """Return a view of an array that reports nothing."""
    return np.ndarray.view(value, np.ndarray)


def read_array(value: Any) -> Any:
    """Report a read of a pinned array and return its plain view; return any other value unchanged."""
    if isinstance(value, PinnedArray):
        value._note(value, write=False)
        return plain_array(value)
    return value


def _pinned_in(value: Any) -> Iterator[PinnedArray]:
    if isinstance(value, PinnedArray):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _pinned_in(part)


def _plain_deep(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain_deep(part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain_deep(part) for part in value)
    return plain_array(value) if isinstance(value, PinnedArray) else value
