"""Reading many tensors at once: large pieces, by several threads, each on its way to the device while others are read.

A tensor at a time, through a mapped file, is bound by page faults and by one thread's copies; a checkpoint in the page cache
can be read several times as fast as that.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from outrider.device import Backend, Event, PinnedBuffer, Stream
from outrider.model.cuts import Cut
from outrider.model.reading import reading

_THREADS = 8
_BUFFERS = 16
_PIECE = 16 << 20


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor's values lie: ``offset`` bytes into the file at ``path``, one behind the other.

    ``run`` and ``pitch``: of a cut of columns, so many values lie behind one another, and so many begin from one row to the
    next; 0: all lie behind one another.
    """

    path: Path
    offset: int
    dtype: torch.dtype
    run: int = 0
    pitch: int = 0

    def cut(self, shape: tuple[int, ...], cut: Cut | None) -> Extent:
        """Where a cut of this tensor, of ``shape`` and whole, lies."""
        if cut is None:
            return self
        columns = math.prod(shape[1:]) if cut.dim == 0 and cut.matrix is None else shape[-1]
        if cut.dim == 0:
            first = cut.start if cut.matrix is None else cut.matrix * shape[1] + cut.start
            return replace(self, offset=self.offset + first * columns * self.dtype.itemsize)
        offset = self.offset + cut.start * self.dtype.itemsize
        return replace(self, offset=offset, run=cut.stop - cut.start, pitch=columns)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor to be read: where it lies, and the contiguous memory of its dtype on the device that takes it."""

    key: str
    extent: Extent
    destination: Tensor


@dataclass(frozen=True, slots=True)
class _Piece:
    """``values`` of a part from ``first`` on; ``last``: the part ends with it."""

    part: Part
    first: int
    values: int
    last: bool


@dataclass(slots=True)
class _Slot:
    """``between``: memory of the same size that the file is read into first; None: it's read into the buffer itself."""

    buffer: PinnedBuffer
    copied: Event
    between: Tensor | None


def read_parts(parts: Sequence[Part], backend: Backend, stream: Stream, done: Callable[[str], None]) -> None:
    """Read every part, all of one dtype, and copy it to the device on ``stream``; on return the copies have run.

    A device whose memory the host writes at once is read into without a buffer between. ``done(key)`` is called once a
    part is read. Raises :class:`CheckpointError` where a file ends early or can't be read.
    """
    if not parts:
        return
    itemsize = parts[0].extent.dtype.itemsize
    largest = max(1, _PIECE // itemsize)
    pieces = [piece for part in parts for piece in _pieces(part, largest)]
    workers = max(1, min(_THREADS, os.cpu_count() or 1, len(pieces)))
    with ThreadPoolExecutor(workers, thread_name_prefix="outrider-weights") as pool:
        if backend.capabilities.host_writes_memory and backend.observer is not None:
            for piece in pieces:
                between = _unwatched(piece.values, parts[0].extent.dtype)
                pool.submit(_read, piece, between).result()
                _memory(piece).copy_(between)
                if piece.last:
                    done(piece.part.key)
        elif backend.capabilities.host_writes_memory:
            for piece, read in _ahead(pieces, 2 * workers, lambda piece: pool.submit(_read, piece, _memory(piece))):
                read.result()
                if piece.last:
                    done(piece.part.key)
        else:
            _read_through_buffers(pieces, backend, stream, done, pool)


def _read_through_buffers(
    pieces: Sequence[_Piece], backend: Backend, stream: Stream, done: Callable[[str], None], pool: ThreadPoolExecutor
) -> None:
    """Half of the buffers are being read into while the other half is on its way to the device."""
    size, dtype = max(piece.values for piece in pieces), pieces[0].part.extent.dtype
    slots: list[_Slot] = []
    for number in range(min(_BUFFERS, len(pieces))):
        buffer = backend.empty_pinned(f"weights[{number}]", (size,), dtype)
        # Both memories are used again: fresh pages would take as long as the reading.
        watched = backend.observer is not None or type(buffer.tensor) is not Tensor
        between = _unwatched(size, dtype) if watched else None
        slots.append(_Slot(buffer, backend.create_event(f"weights[{number}]"), between))
    free, filling = deque(slots), deque[_Slot]()

    def submit(piece: _Piece) -> Future[None]:
        slot = free.popleft()
        if slot.copied.generation:
            slot.copied.synchronize()  # the copy out of it has run
            slot.buffer.renew()
        filling.append(slot)
        return pool.submit(_read_pinned, piece, slot.buffer.tensor[: piece.values], slot.between)

    try:
        for piece, read in _ahead(pieces, max(1, len(slots) // 2), submit):
            read.result()
            slot = filling.popleft()
            backend.copy_async(_memory(piece), slot.buffer.tensor[: piece.values], stream=stream)
            stream.record(slot.copied)
            free.append(slot)
            if piece.last:
                done(piece.part.key)
    finally:  # the buffers outlive their copies
        for slot in slots:
            if slot.copied.generation:
                slot.copied.synchronize()


def _unwatched(values: int, dtype: torch.dtype) -> Tensor:
    """Host memory for a worker to read a file into where tools watch: they see operations of torch alone, and this memory was
    written before torch saw it.
    """
    return torch.frombuffer(bytearray(values * dtype.itemsize), dtype=dtype)


def _ahead(
    pieces: Sequence[_Piece], count: int, submit: Callable[[_Piece], Future[None]]
) -> Iterator[tuple[_Piece, Future[None]]]:
    """The pieces in order, each with its reading; up to ``count`` are begun before they're asked for."""
    begun: deque[tuple[_Piece, Future[None]]] = deque()
    for piece in pieces:
        if len(begun) == count:
            yield begun.popleft()
        begun.append((piece, submit(piece)))
    yield from begun


def _pieces(part: Part, largest: int) -> Iterator[_Piece]:
    total, run = part.destination.numel(), part.extent.run
    largest = max(1, largest // run) * run if run else largest  # whole rows
    for first in range(0, total, largest):
        values = min(largest, total - first)
        yield _Piece(part, first, values, first + values == total)


def _memory(piece: _Piece) -> Tensor:
    return piece.part.destination.view(-1)[piece.first : piece.first + piece.values]


def _read_pinned(piece: _Piece, into: Tensor, between: Tensor | None) -> None:
    """As :func:`_read`, where there's memory ``between`` by an operation of torch into the pinned memory."""
    if between is None:
        _read(piece, into)
    else:
        _read(piece, between[: piece.values])
        into.copy_(between[: piece.values])


def _read(piece: _Piece, into: Tensor) -> None:
    """In a worker: it touches host memory and the file, never the device."""
    extent = piece.part.extent
    view = into.view(torch.uint8).numpy().data
    with reading(extent.path, f"tensor {piece.part.key!r}"), extent.path.open("rb", buffering=0) as file:
        size = extent.dtype.itemsize
        run = extent.run * size or len(view)
        place = extent.offset + (piece.first // extent.run * extent.pitch if extent.run else piece.first) * size
        while view:
            file.seek(place)
            _fill(file, view[:run])
            view, place = view[run:], place + extent.pitch * size


def _fill(file: FileIO, view: memoryview) -> None:
    while view:
        count = file.readinto(view)
        if not count:
            raise ValueError(f"it ends {len(view)} bytes early; was it changed while it was read?")
        view = view[count:]
