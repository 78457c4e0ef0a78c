"""numpy arrays over pinned host memory that report each read and write by the host.

Programs fill pinned buffers through `.numpy()` and read results the same way. The arrays report indexing, assignment,
`tolist`, `item`, arithmetic and `torch.from_numpy`. They do not report accesses of a C extension that reads the bytes
through the address.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class HostMemory(Protocol):
    """Pinned memory that is notified of each access by the host."""

    address: int
    nbytes: int

    def range_accessed(self, low: int, high: int, write: bool) -> None:
        """Handle an access by the host to the bytes ``low`` to ``high``, counted from ``address``."""


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
        plain = self.view(np.ndarray)
        part = plain[index]
        return part if isinstance(part, np.ndarray) and np.may_share_memory(part, plain) else _one(plain, index)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(found, PinnedArray) and found._alloc is not None:
            return found  # a view reads nothing yet
        self._note(self._part(index), write=False)
        return found.view(np.ndarray) if isinstance(found, PinnedArray) else found

    def __setitem__(self, index: Any, value: Any) -> None:
        self._note(self._part(index), write=True)
        self.view(np.ndarray)[index] = _read(value)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        """Report the inputs of an arithmetic operation as read and its outputs as written."""
        if out is not None:
            for target in out:
                if isinstance(target, PinnedArray):
                    target._note(target, write=True)
            kwargs["out"] = tuple(o.view(np.ndarray) if isinstance(o, PinnedArray) else o for o in out)
        result = getattr(ufunc, method)(*[_read(value) for value in inputs], **kwargs)
        return out[0] if out is not None and len(out) == 1 else result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Report the arguments of a numpy function as read; the first argument of `copyto` is written."""
        del types
        if func is np.copyto:
            args[0]._note(args[0], write=True)
            return func(args[0].view(np.ndarray), *[_read(a) for a in args[1:]], **kwargs)
        return func(*[_read_deep(a) for a in args], **{k: _read_deep(v) for k, v in kwargs.items()})

    def tolist(self) -> Any:
        """Return the values as Python numbers, and report a read."""
        return _read(self).tolist()

    def item(self, *args: Any) -> Any:
        """Return one value of the array as a Python number, and report a host read."""
        return _read(self).item(*args)

    def copy(self, order: Any = "C") -> Any:
        """Return an ordinary numpy array with the same values, and report a host read."""
        return _read(self).copy(order)

    def fill(self, value: Any) -> None:
        """Set all elements of the array to one value, and report a host write."""
        self[...] = value

    def __iter__(self) -> Any:
        return (self[n] for n in range(len(self)))


def watched(array: Any, alloc: HostMemory) -> PinnedArray:
    """Return a view of `array`, which lies in the memory of `alloc`, that reports its reads and writes."""
    view: PinnedArray = array.view(PinnedArray)
    view._alloc = alloc
    return view


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


def _read(value: Any) -> Any:
    if isinstance(value, PinnedArray):
        value._note(value, write=False)
        return value.view(np.ndarray)
    return value


def _read_deep(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_read_deep(v) for v in value)
    return _read(value)
