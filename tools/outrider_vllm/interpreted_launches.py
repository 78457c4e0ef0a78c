"""Launches of Triton kernels that its interpreter runs on tensors of the simulated device.

Triton's interpreter runs the unmodified kernel when the simulated stream reaches the launch. At the launch, each tensor is
declared as one that the kernel may read and write. After the run, the interpreter reports the accessed bytes: it has the
addresses of each load and store as an array, and a mask of the elements that are accessed. The bytes include memory that the
kernel reached through a table of addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from outrider.device import Access, ConfigError
from outrider_sim.torch_device.launches import host_view, launch
from outrider_sim.torch_device.row_accesses import Ranges, merge_adjacent, range_accesses, strided_accesses
from outrider_sim.torch_device.tensor import SimTensor

Addresses = NDArray[numpy.uint64]
MAX_RANGES = 512
"""Maximum number of ranges for one storage and direction. More ranges are joined across the smallest gaps."""
_MAX_RAW_ADDRESSES = 1 << 18
"""Number of recorded addresses above which they are merged into ranges, to limit memory."""
_EMPTY: Ranges = (numpy.empty(0, numpy.int64), numpy.empty(0, numpy.int64))


@dataclass(frozen=True, kw_only=True)
class StorageRange:
    """The address range of a storage on the host: bytes `[base, base + nbytes)`."""

    base: int
    nbytes: int
    storage: int
    """Id of the storage for the sanitizer."""
    argument: str
    """Name of the kernel's parameter, for reports."""


class RecordedAccesses:
    """The addresses that one launch loads and stores, recorded while the kernel runs."""

    def __init__(self) -> None:
        self._raw: dict[bool, dict[int, list[Addresses]]] = {False: {}, True: {}}
        """Recorded addresses, by direction (True: write) and by element size in bytes."""
        self._ranges: dict[bool, Ranges] = {False: _EMPTY, True: _EMPTY}
        """Merged ranges of earlier addresses, by direction."""
        self._num_raw = 0

    def record_access(self, pointers: Addresses, mask: Any, size: int, *, write: bool) -> None:
        """Record a store (``write``) or a load of elements of `size` bytes at `pointers` where `mask` is true. The mask may
        broadcast.
        """
        addresses = pointers[numpy.broadcast_to(mask, pointers.shape).astype(bool)]
        if not addresses.size:
            return
        self._raw[write].setdefault(size, []).append(addresses)
        self._num_raw += addresses.size
        if self._num_raw > _MAX_RAW_ADDRESSES:
            self._merge_raw()

    def ranges(self, *, write: bool) -> Ranges:
        """Return the ranges that have been stored (`write`) or loaded so far."""
        self._merge_raw()
        return self._ranges[write]

    def accesses(self, places: Iterable[StorageRange]) -> tuple[list[Access], int]:
        """Return the accesses to the storages at `places`, and the number of ranges outside of them.

        The address ranges of `places` must be disjoint.
        """
        storages = sorted(places, key=lambda place: place.base)
        bases = numpy.array([place.base for place in storages], dtype=numpy.int64)
        accesses: list[Access] = []
        num_outside = 0
        for write in (False, True):
            starts, ends = self.ranges(write=write)
            owners = numpy.searchsorted(bases, starts, side="right") - 1
            for owner in numpy.unique(owners).tolist():
                has_owner = owners == owner
                place = storages[owner] if owner >= 0 else None
                if place is None:
                    num_outside += int(has_owner.sum())
                    continue
                inside = has_owner & (starts < place.base + place.nbytes)
                num_outside += int(has_owner.sum()) - int(inside.sum())
                if inside.any():
                    accesses += _storage_accesses(place, starts[inside] - place.base, ends[inside] - place.base, write)
        return accesses, num_outside

    def _merge_raw(self) -> None:
        for write, sizes in self._raw.items():
            parts = [self._ranges[write]]
            for size, arrays in sizes.items():
                parts.append(merge_adjacent(numpy.concatenate(arrays), size))
            self._ranges[write] = _union(parts)
            sizes.clear()
        self._num_raw = 0


def _union(parts: list[Ranges]) -> Ranges:
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


def _storage_accesses(
    place: StorageRange, starts: NDArray[numpy.int64], ends: NDArray[numpy.int64], write: bool
) -> list[Access]:
    """Return one strided access for ranges of equal length and distance. Else return one access per range.

    At most `MAX_RANGES` accesses are returned.
    """
    ends = numpy.minimum(ends, place.nbytes)
    whole = Access(place.storage, 0, place.nbytes, write, argument=place.argument)
    found = strided_accesses(whole, (starts, ends))
    if len(found) <= MAX_RANGES:
        return found
    largest_gaps = numpy.sort(numpy.argsort(starts[1:] - ends[:-1], kind="stable")[-(MAX_RANGES - 1) :])
    starts = starts[numpy.concatenate(([0], largest_gaps + 1))]
    return range_accesses(whole, (starts, ends[numpy.concatenate((largest_gaps, [-1]))]))


class InterpretedLaunches:
    """The interpreted launches of Triton kernels of this process. It replaces `InterpretedFunction.run`.

    `executor` is Triton's grid executor. The loads, stores and atomics of the interpreter's `builder` are replaced by methods
    that record them for the running launch.
    """

    def __init__(self, executor: Callable[..., Any], builder: Any) -> None:
        self.executor = executor
        self.counts: dict[str, int] = {}
        """Number of launches by kernel."""
        self.unknown_accesses: dict[str, int] = {}
        """Number of accessed address ranges outside known memory, by kernel. The sanitizer doesn't see these accesses."""
        self._in_tables: dict[int, StorageRange] = {}
        """Storages whose addresses may be in tables of addresses, by base address."""
        self._current: RecordedAccesses | None = None
        for name, write in (("create_masked_load", False), ("create_masked_store", True)):
            setattr(builder, name, self._recorded(getattr(builder, name), (write,), mask=1 + write))
        builder.create_atomic_rmw = self._recorded(builder.create_atomic_rmw, (False, True), pointer=1, mask=3)
        builder.create_atomic_cas = self._recorded(builder.create_atomic_cas, (False, True), mask=None)

    def _recorded(
        self, method: Callable[..., Any], directions: tuple[bool, ...], *, pointer: int = 0, mask: int | None
    ) -> Callable[..., Any]:
        """Return `method` with recording. `pointer` and `mask` are the indices of these arguments."""

        def record_and_call(*args: Any) -> Any:
            if self._current is not None:
                pointers = args[pointer]
                size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
                for write in directions:
                    # In the interpreter, addresses are unsigned numbers of 64 bits.
                    self._current.record_access(
                        numpy.asarray(pointers.data, dtype=numpy.uint64),
                        True if mask is None else args[mask].data, size, write=write,
                    )  # fmt: skip
            return method(*args)

        return record_and_call

    def host_address(self, tensor: SimTensor) -> int:
        """Return the host address of a tensor, and register its storage: a kernel may load the address from a table."""
        place = _storage_range(tensor, "in a table of addresses")
        self._in_tables[place.base] = place
        return int(tensor._inner.data_ptr())

    def queue_launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        """Enqueue one launch of `kernel` on the current simulated stream, with Triton's arguments. A warm-up does nothing.

        Raises `ConfigError` for a tensor on another device.
        """
        if warmup:
            return
        names = list(kernel.arg_names)
        function, rewritten = kernel.fn, kernel.rewrite()
        arguments = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        name = f"triton::{function.__name__}"
        self.counts[name] = self.counts.get(name, 0) + 1
        tensors: list[tuple[str, torch.Tensor]] = []
        operands: dict[int, StorageRange] = {}
        for parameter, value in arguments.items():
            if not isinstance(value, torch.Tensor):
                continue
            if not isinstance(value, SimTensor):
                raise ConfigError(f"{name}: {parameter!r} is on {value.device}; a kernel takes tensors of the device")
            place = _storage_range(value, parameter)
            operands.setdefault(place.base, place)
            tensors.append((parameter, value))
        hosts = {k: host_view(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        for parameter, value in arguments.items():
            # The interpreter rejects a bool that isn't a constexpr, because it would have both 32 bits and one bit.
            if isinstance(value, bool) and "constexpr" not in str(function.__annotations__.get(parameter, "")):
                hosts[parameter] = int(value)
        if callable(grid):
            grid = grid(dict(arguments))
        sizes = tuple(int(n) for n in (grid if isinstance(grid, tuple | list) else (grid,)))
        if 0 in sizes:
            return
        recorded_accesses = RecordedAccesses()

        def run_kernel() -> None:
            outer, self._current = self._current, recorded_accesses
            try:
                self.executor(rewritten, names, sizes)(**hosts)
            finally:
                self._current = outer

        def accesses() -> tuple[Access, ...]:
            known, nowhere = recorded_accesses.accesses({**self._in_tables, **operands}.values())
            if nowhere:
                self.unknown_accesses[name] = self.unknown_accesses.get(name, 0) + nowhere
            return tuple(known)

        launch(name, run_kernel, reads=tensors, writes=tensors, touched=accesses)


def _storage_range(tensor: SimTensor, argument: str) -> StorageRange:
    base = int(tensor._inner.untyped_storage().data_ptr())
    return StorageRange(
        base=base, nbytes=tensor._inner.untyped_storage().nbytes(), storage=tensor._alloc.id, argument=argument
    )
