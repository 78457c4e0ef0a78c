"""Device memory: a caching allocator of blocks.

A block has a fixed address. An allocation is one use of a block, from its creation to its last reference. Tensors, views
and autograd reference the allocation; queued operations reference only the bytes. Freed memory returns at once to its
pool and is reused in the order of the allocating stream. The reuse is safe for that stream alone: the race that
`keep_alive` prevents on a device exists here too.

Freed memory is poisoned in the order of its stream: floats become NaN, integers become huge indices, so that a read of
freed memory has visible effects. New memory is poisoned too.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.device import OutOfDeviceMemory

if TYPE_CHECKING:
    from outrider_sim.machine.queue import StreamQueue
    from outrider_sim.machine.stream_machine import StreamMachine


class Meta:
    """Shape, strides and dtype of a tensor, without its offset. Equal metas are the same object."""

    __slots__ = ("byte_stride", "dense", "dtype", "extent", "itemsize", "nbytes", "numel", "shape", "stride")

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.stride = stride
        self.dtype = dtype
        self.itemsize = dtype.itemsize
        self.numel = self.shape.numel()
        # Bytes from the start of the first element to the end of the last one.
        span = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if self.numel else 0
        self.extent = span * self.itemsize
        self.byte_stride = tuple(s * self.itemsize for s in stride)
        self.nbytes = self.numel * self.itemsize
        self.dense = span == self.numel

    def __repr__(self) -> str:
        return f"Meta({tuple(self.shape)}, {self.stride}, {self.dtype})"


@lru_cache(maxsize=1 << 16)
def intern_meta(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Meta:
    """Return the meta of a shape, strides and dtype: the same object for the same arguments, unless the cache has dropped it,
    which costs only look-ups.
    """
    return Meta(tuple(shape), tuple(stride), dtype)


def meta_of(tensor: Tensor) -> Meta:
    """Return the interned meta of a host tensor."""
    return intern_meta(tensor.shape, tensor.stride(), tensor.dtype)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of a shape, in elements."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(1, shape[i + 1])
    return tuple(strides)


# As float16, bfloat16, float32 and float64 this is NaN; as int32 and int64 it is out of range for any index.
_PATTERN = 0x7FFF
_SMALL = 1 << 20
_MAX_FREE_PINNED = 64
_ALIGN = 512
_BASE = 0x5_0000_0000
_SPACE = 1 << 44


class Block:
    """Memory at one simulated address. `nbytes` is a multiple of 512 and at least 512."""

    __slots__ = ("address", "fill", "last", "nbytes", "pool", "stream", "typed", "views")

    def __init__(self, pool: Pool, stream: StreamQueue, nbytes: int, address: int, poison: bool) -> None:
        self.pool = pool
        self.stream = stream
        self.nbytes = nbytes
        self.address = address
        with torch._C._InferenceMode(False):  # an inference tensor couldn't be written outside that mode
            bytes_ = torch.empty(nbytes, dtype=torch.uint8)
            # Not by torch: memory is freed wherever Python drops it, under any mode or transform.
            self.fill = bytes_.view(torch.int16).numpy()
        self.typed: dict[torch.dtype, Tensor] = {torch.uint8: bytes_}
        # One tensor for each way in which the block was ever used: loops find theirs here.
        self.views: dict[Meta, Tensor] = {}
        self.last: int | None = None
        if poison:
            self.fill_poison()

    def fill_poison(self, pattern: int = _PATTERN) -> None:
        """Overwrite the block with the poison pattern. The pattern is a default argument, because memory is also freed at
        exit.
        """
        self.fill.fill(pattern)

    def inner(self, meta: Meta) -> Tensor:
        """Return the host tensor over the block's bytes with the given shape, strides and dtype, from offset 0."""
        found = self.views.get(meta)
        if found is None:
            typed = self.typed.get(meta.dtype)
            if typed is None:
                size = meta.itemsize
                typed = self.typed[meta.dtype] = self.typed[torch.uint8][: self.nbytes // size * size].view(meta.dtype)
            found = torch.as_strided(typed, meta.shape, meta.stride, 0)
            if len(self.views) > 64:
                self.views.clear()
            self.views[meta] = found
        return found


@dataclass(eq=False, repr=False, slots=True)
class Pool:
    """The free blocks of one pool, by stream and size. `graph` names the graph whose private pool it is."""

    graph: str = ""
    dead: bool = False
    """True if blocks that come back are dropped."""
    free: dict[tuple[int, int], list[Block]] = field(default_factory=dict)


@dataclass(eq=False, repr=False, slots=True)
class Allocation:
    """One use of a block. Dropping the last reference frees it. `id` is never used twice."""

    machine_memory: CachingAllocator
    block: Block
    id: int
    nbytes: int
    stream: StreamQueue
    line: str = ""
    is_empty: bool = False
    """True if `resize(0)` has released the bytes."""
    users: list[StreamQueue] | None = None
    saved: Any = None
    """A weak reference to the bytes on the host while they are being pickled."""

    def used_by(self, stream: StreamQueue) -> None:
        """Prevent reuse of the memory until `stream` has run its work queued at the release."""
        if self.users is None:
            self.users = []
        if stream not in self.users:
            self.users.append(stream)
            tap = self.machine_memory.machine.tap
            if tap is not None:
                tap.shared(self, stream)

    def resize(self, nbytes: int) -> None:
        """Release the bytes if ``nbytes`` is 0, in the order of the allocating stream. Allocate them again if ``nbytes`` is
        the old size, in the order of the current stream.

        The address stays the same. Raises `RuntimeError` for any other number of bytes.
        """
        memory = self.machine_memory
        if nbytes not in (0, self.nbytes):
            raise RuntimeError(
                f"a storage of {self.nbytes} bytes can't be resized to {nbytes} on the simulated device: pass 0 or the size "
                "that it was made with, or make another tensor"
            )
        if (nbytes == 0) == self.is_empty or not self.nbytes:
            return
        self.is_empty = nbytes == 0
        memory.vacate(self) if self.is_empty else memory.refill(self)

    def __del__(self) -> None:
        self.machine_memory.release(self)

    @property
    def address(self) -> int:
        """The simulated device address of the allocation's first byte."""
        return self.block.address


class CachingAllocator:
    """The caching allocator of one machine."""

    def __init__(self, machine: StreamMachine) -> None:
        options = machine.options
        self.machine = machine
        self.sim: Any = None  # whose memory it is
        self.limit = options.memory
        self.poison = options.poison
        self.pool = Pool()
        self._local = threading.local()  # `pool`: where the thread's memory comes from
        self.count = 0  # allocations so far; the number of the next one
        self.allocated = 0
        self.peak = 0
        self.reserved = 0
        self.peak_reserved = 0
        self._next = _BASE + machine.rank * _SPACE
        # Blocks that were freed while a stream of `record_stream` still had work.
        self._held: list[tuple[Block, list[tuple[StreamQueue, int]]]] = []
        self._ids = machine.rank * _SPACE  # unlike those of other devices
        self.faults = options.allocation_faults()
        self._pinned: list[tuple[torch.UntypedStorage, list[tuple[StreamQueue, int]]]] = []

    def allocate(self, nbytes: int, stream: StreamQueue) -> Allocation:
        """Allocate `nbytes` in the order of `stream`; in a capture, from the graph's private pool.

        Raises `OutOfDeviceMemory` if the memory doesn't suffice; the device stays usable.
        """
        self.count += 1
        if self.count in self.faults:
            raise OutOfDeviceMemory(f"allocation {self.count} of {nbytes} bytes failed on request (fault=oom@{self.count})")
        if self._held:
            self._return_held()
        size = _rounded(nbytes)
        capture = stream.capture
        pool = self._chosen() if capture is None else capture.pool
        free = pool.free.get((stream.id, size))
        block = free.pop() if free else self._fresh(pool, stream, size)
        if capture is not None and self.poison:
            capture.poison(block, stream)
        self.allocated += size
        if self.allocated > self.peak:
            self.peak = self.allocated
        made = Allocation(self, block, self.next_id(), nbytes, stream)
        tap = self.machine.tap
        if tap is not None:
            made.line = self.machine.local.line
            tap.allocated(made, block.last)
        if self.machine.scheduler.strategy.needs_accesses:  # not for a tool that only listens: it would grow with the run
            self.machine.scheduler.bases[self._ids] = block.address
        block.last = self._ids
        return made

    def _chosen(self) -> Pool:
        return getattr(self._local, "pool", None) or self.pool

    @contextmanager
    def using(self, pool: Pool) -> Generator[None]:
        """Take the calling thread's memory from `pool` inside the block."""
        before, self._local.pool = getattr(self._local, "pool", None), pool
        try:
            yield
        finally:
            self._local.pool = before

    def take_address(self, nbytes: int) -> int:
        """Reserve `nbytes` of simulated addresses for memory outside blocks (pinned host memory); return the first
        address.
        """
        start = self._next
        self._next += _rounded(nbytes) + _ALIGN
        return start

    def next_id(self) -> int:
        """Return a number for an allocation of device or pinned memory that no other allocation has."""
        self._ids += 1
        return self._ids

    def take_pinned(self, nbytes: int) -> torch.UntypedStorage | None:
        """Return released pinned memory of this size whose copies have completed, or None."""
        for index, (storage, users) in enumerate(self._pinned):
            if storage.nbytes() == nbytes and all(stream.done >= issued for stream, issued in users):
                del self._pinned[index]
                return storage
        return None

    def release_pinned(self, storage: torch.UntypedStorage, users: list[StreamQueue]) -> None:
        """Give pinned memory back, for reuse after the work that its copies' streams have queued so far."""
        self._pinned.append((storage, [(stream, stream.issued) for stream in users]))
        del self._pinned[:-_MAX_FREE_PINNED]

    def release(self, allocation: Allocation) -> None:
        """Return an allocation's block to its pool and enqueue an operation that poisons its bytes."""
        block = allocation.block
        if not allocation.is_empty:
            self._count_release(allocation)
        self._give_back_after([(stream, stream.issued) for stream in allocation.users or ()], block)

    def _count_release(self, allocation: Allocation) -> None:
        self.allocated -= allocation.block.nbytes
        tap = self.machine.tap
        if tap is not None:
            tap.freed(allocation)

    def vacate(self, allocation: Allocation) -> None:
        """Release the bytes of an allocation that keeps its address: poison them in the order of its stream."""
        self._count_release(allocation)
        self._poison(allocation.block)

    def refill(self, allocation: Allocation) -> None:
        """Give an allocation its bytes again, in the order of the current stream."""
        allocation.stream = self.machine.stream
        allocation.users = None
        self.allocated += allocation.block.nbytes
        self.peak = max(self.peak, self.allocated)
        tap = self.machine.tap
        if tap is not None:
            allocation.line = self.machine.local.line
            tap.allocated(allocation, None)

    def _return_held(self) -> None:
        held, self._held = self._held, []
        for block, users in held:
            self._give_back_after(users, block)

    def _give_back_after(self, users: list[tuple[StreamQueue, int]], block: Block) -> None:
        if any(stream.done < issued for stream, issued in users):
            self._held.append((block, users))
        else:
            self._give_back(block)

    def _give_back(self, block: Block) -> None:
        stream = block.stream
        self._poison(block)
        pool = block.pool
        if pool.dead:
            self.reserved -= block.nbytes
        else:
            pool.free.setdefault((stream.id, block.nbytes), []).append(block)

    def _poison(self, block: Block) -> None:
        stream = block.stream
        if not self.poison or block.pool.graph:
            return  # private memory is poisoned where a capture takes it, and again by each replay
        if stream.queue:
            stream.poison.append((stream.issued, block))
        else:
            block.fill_poison()

    def empty_cache(self) -> None:
        """Release free blocks. No operation in flight may access them, as on a real device."""
        self._drop(self.pool)

    def reset_peaks(self) -> None:
        """Set the recorded peaks of device memory to the bytes that are in use now."""
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def start_over(self, floor: int | None) -> int:
        """Drop every free block, so that the next run finds the memory as the first run did.

        New addresses start at `floor` if it is given. Returns the first address.
        """
        self._drop(self.pool)
        self._pinned.clear()
        self.pool.dead = True
        self.pool = Pool()
        self.count = 0
        self.reset_peaks()
        if floor is not None:
            self._next = floor
        return self._next

    def _drop(self, pool: Pool) -> None:
        self.reserved -= sum(block.nbytes for blocks in pool.free.values() for block in blocks)
        pool.free.clear()

    def _fresh(self, pool: Pool, stream: StreamQueue, size: int) -> Block:
        if self.reserved + size > self.limit:
            self.empty_cache()
        if self.reserved + size > self.limit:
            raise OutOfDeviceMemory(
                f"{size} bytes don't fit: {self.reserved} of {self.limit} bytes are taken ({self.allocated} by tensors); "
                "free tensors, or raise the option memory"
            )
        block = Block(pool, stream, size, self.take_address(size), self.poison)
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block


def _rounded(nbytes: int) -> int:
    """Round a size up to its size class: multiples of 512 bytes up to 1 MiB, then of an eighth of the next power of two."""
    if nbytes <= _SMALL:
        return (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN or _ALIGN
    step = 1 << max(0, (nbytes - 1).bit_length() - 3)
    return (nbytes + step - 1) // step * step
