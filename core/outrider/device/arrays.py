"""numpy arrays over pinned host memory, whose reads and writes are seen.

Programs fill pinned buffers through `.numpy()` and read results the same way. Indexing, assignment, `tolist`, `item`,
arithmetic and `torch.from_numpy` are noted; what reaches the bytes below Python (a C extension given the array) isn't.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class HostMemory(Protocol):
    """Pinned memory that wants to know what the host does with its bytes."""

    address: int
    nbytes: int

    def range_accessed(self, low: int, high: int, write: bool) -> None:
        """The host reads or writes the bytes ``low`` to ``high``, counted from ``address``, now."""


class PinnedArray(np.ndarray):
    """A view of pinned memory. What is computed from it is an ordinary array."""

    _alloc: HostMemory | None = None

    def __array_finalize__(self, base: Any) -> None:
        """Views belong to the same memory; copies, whose bytes lie elsewhere, to none."""
        alloc = getattr(base, "_alloc", None)
        if alloc is not None and _within(self, alloc):
            self._alloc = alloc

    def _note(self, part: Any, write: bool) -> None:
        alloc = self._alloc
        if alloc is not None and part.size:
            low, high = np.lib.array_utils.byte_bounds(part)
            alloc.range_accessed(low - alloc.address, high - alloc.address, write)

    def _part(self, index: Any) -> Any:
        """The elements that an index picks where it is a view of them, else all."""
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
        """Arithmetic: its inputs are read, its outputs written."""
        if out is not None:
            for target in out:
                if isinstance(target, PinnedArray):
                    target._note(target, write=True)
            kwargs["out"] = tuple(o.view(np.ndarray) if isinstance(o, PinnedArray) else o for o in out)
        result = getattr(ufunc, method)(*[_read(value) for value in inputs], **kwargs)
        return out[0] if out is not None and len(out) == 1 else result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Numpy's functions read what they are given; `copyto` writes its first."""
        del types
        if func is np.copyto:
            args[0]._note(args[0], write=True)
            return func(args[0].view(np.ndarray), *[_read(a) for a in args[1:]], **kwargs)
        return func(*[_read_deep(a) for a in args], **{k: _read_deep(v) for k, v in kwargs.items()})

    def tolist(self) -> Any:
        """Values as Python numbers; a read."""
        return _read(self).tolist()

    def item(self, *args: Any) -> Any:
        """One value; a read."""
        return _read(self).item(*args)

    def copy(self, order: Any = "C") -> Any:
        """An ordinary array; a read."""
        return _read(self).copy(order)

    def fill(self, value: Any) -> None:
        """Set all elements; a write."""
        self[...] = value

    def __iter__(self) -> Any:
        return (self[n] for n in range(len(self)))


def watched(array: Any, alloc: HostMemory) -> PinnedArray:
    """`array`, which lies in the memory of `alloc`, with its reads and writes seen."""
    made: PinnedArray = array.view(PinnedArray)
    made._alloc = alloc
    return made


def _within(array: Any, alloc: HostMemory) -> bool:
    return bool(alloc.address <= array.__array_interface__["data"][0] < alloc.address + max(alloc.nbytes, 1))


def _one(plain: Any, index: Any) -> Any:
    """A single element as a view of one; anything else that an index picks by data counts as all."""
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
