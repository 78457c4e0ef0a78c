"""What a launch of a Triton kernel really touched: addresses that its interpreter loads and stores, as ranges of storages.

A kernel's source says which tensors it may touch; which blocks of a cache, and what lies behind a table of addresses, only
its run says. Triton's interpreter holds each load's and store's addresses as an array, after which the mask decides.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from outrider.device import Access

Addresses = NDArray[numpy.uint64]
Ranges = tuple[NDArray[numpy.int64], NDArray[numpy.int64]]
"""First bytes, and the bytes behind the last: sorted, with a gap between each two."""

MOST = 512
"""Ranges of one storage and direction; where a launch has more of them, those with the smallest gaps are joined."""
_HELD = 1 << 18
_EMPTY: Ranges = (numpy.empty(0, numpy.int64), numpy.empty(0, numpy.int64))


@dataclass(frozen=True, kw_only=True)
class Place:
    """A storage, where it lies: bytes `[base, base + nbytes)` of the host. `argument` names the operand, for people."""

    base: int
    nbytes: int
    storage: int
    argument: str


class Touched:
    """The loads and stores of one launch, while it runs and after."""

    def __init__(self) -> None:
        self._raw: dict[bool, dict[int, list[Addresses]]] = {False: {}, True: {}}
        self._done: dict[bool, Ranges] = {False: _EMPTY, True: _EMPTY}
        self._count = 0

    def note(self, pointers: Addresses, mask: Any, size: int, *, write: bool) -> None:
        """Elements of `size` bytes at `pointers`, where `mask` is true (both of one shape, or the mask broadcasts)."""
        kept = pointers[numpy.broadcast_to(mask, pointers.shape).astype(bool)]
        if not kept.size:
            return
        self._raw[write].setdefault(size, []).append(kept)
        self._count += kept.size
        if self._count > _HELD:
            self._settle()

    def ranges(self, *, write: bool) -> Ranges:
        """What was loaded, or stored, so far."""
        self._settle()
        return self._done[write]

    def accesses(self, places: Iterable[Place]) -> tuple[list[Access], int]:
        """The ranges as accesses of the storages at `places` (disjoint), and how many ranges lie in none of them."""
        known = sorted(places, key=lambda place: place.base)
        bases = numpy.array([place.base for place in known], dtype=numpy.int64)
        found: list[Access] = []
        nowhere = 0
        for write in (False, True):
            starts, ends = self.ranges(write=write)
            owners = numpy.searchsorted(bases, starts, side="right") - 1
            for owner in numpy.unique(owners).tolist():
                mine = owners == owner
                place = known[owner] if owner >= 0 else None
                if place is None:
                    nowhere += int(mine.sum())
                    continue
                inside = mine & (starts < place.base + place.nbytes)
                nowhere += int(mine.sum()) - int(inside.sum())
                if inside.any():
                    found += _of_storage(place, starts[inside] - place.base, ends[inside] - place.base, write)
        return found, nowhere

    def _settle(self) -> None:
        for write, sizes in self._raw.items():
            parts = [self._done[write]]
            for size, arrays in sizes.items():
                parts.append(runs(numpy.concatenate(arrays), size))
            self._done[write] = _joined(parts)
            sizes.clear()
        self._count = 0


def runs(addresses: Addresses, size: int) -> Ranges:
    """Elements of `size` bytes as ranges; neighbours are one."""
    low = numpy.unique(addresses).astype(numpy.int64)
    gaps = numpy.flatnonzero(numpy.diff(low) > size) + 1
    return low[numpy.concatenate(([0], gaps))], low[numpy.concatenate((gaps - 1, [-1]))] + size


def _joined(parts: list[Ranges]) -> Ranges:
    if len(parts) == 1:
        return parts[0]
    starts = numpy.concatenate([p[0] for p in parts])
    ends = numpy.concatenate([p[1] for p in parts])
    if not starts.size:
        return starts, ends
    order = numpy.argsort(starts, kind="stable")
    starts, ends = starts[order], numpy.maximum.accumulate(ends[order])
    first = numpy.concatenate(([0], numpy.flatnonzero(starts[1:] > ends[:-1]) + 1))
    return starts[first], ends[numpy.concatenate((first[1:] - 1, [-1]))]


def _of_storage(place: Place, starts: NDArray[numpy.int64], ends: NDArray[numpy.int64], write: bool) -> list[Access]:
    """One access where the ranges are alike and at one distance, else one for each range, at most `MOST`."""
    ends = numpy.minimum(ends, place.nbytes)
    if len(starts) > 2:
        step, length = int(starts[1] - starts[0]), int(ends[0] - starts[0])
        if bool((numpy.diff(starts) == step).all()) and bool((ends - starts == length).all()):
            shape, stride = (len(starts), length), (step, 1)
            return [Access(place.storage, int(starts[0]), int(ends[-1]), write, shape, stride, place.argument)]
    if len(starts) > MOST:
        kept = numpy.sort(numpy.argsort(starts[1:] - ends[:-1], kind="stable")[-(MOST - 1) :])
        starts, ends = starts[numpy.concatenate(([0], kept + 1))], ends[numpy.concatenate((kept, [-1]))]
    return [
        Access(place.storage, start, end, write, None, None, place.argument)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]


class Recorder:
    """Stands before the loads and stores of Triton's interpreter and notes them for the launch that is running."""

    def __init__(self, builder: Any) -> None:
        self.now: Touched | None = None
        for name, write in (("create_masked_load", False), ("create_masked_store", True)):
            setattr(builder, name, self._before(getattr(builder, name), (write,), mask=1 + write))
        builder.create_atomic_rmw = self._before(builder.create_atomic_rmw, (False, True), pointer=1, mask=3)
        builder.create_atomic_cas = self._before(builder.create_atomic_cas, (False, True), mask=None)

    @contextmanager
    def of(self, touched: Touched) -> Generator[None]:
        """Note in `touched` what the interpreter does inside."""
        before, self.now = self.now, touched
        try:
            yield
        finally:
            self.now = before

    def _before(
        self, call: Callable[..., Any], directions: tuple[bool, ...], *, pointer: int = 0, mask: int | None
    ) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            if self.now is not None:
                pointers = args[pointer]
                size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
                for write in directions:
                    # The interpreter casts a pointer's numbers to itself: they are unsigned, of 64 bits.
                    self.now.note(
                        numpy.asarray(pointers.data, dtype=numpy.uint64),
                        True if mask is None else args[mask].data, size, write=write,
                    )  # fmt: skip
            return call(*args)

        return noted
