"""Bulk reads of checkpoint tensors: several threads read large chunks while earlier chunks are copied to the device.

Reading one tensor at a time through a mapped file is bound by page faults and by one thread's copies. Bulk reads of a
checkpoint in the page cache are several times as fast.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO

import torch
from torch import Tensor

from outrider.device import Backend, Event, PinnedBuffer, Stream
from outrider.model.checkpoint.files import Extent, wrap_read_errors

_MAX_READ_THREADS = 8
_MAX_PINNED_BUFFERS = 16
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class TensorRead:
    """A tensor to read: its extent in a file, and contiguous device memory of the same dtype."""

    key: str
    extent: Extent
    destination: Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A contiguous range of a tensor's values, which one worker thread reads."""

    part: TensorRead
    first: int
    """Index of the chunk's first value among all values of the tensor that is read."""
    values: int
    """Number of values in the chunk."""
    last: bool
    """True for the last chunk of its tensor."""


@dataclass(slots=True)
class _BulkSlot:
    """A pinned host buffer, and the event after which the copy from it to the device has ended and the buffer is
    free again.
    """

    buffer: PinnedBuffer
    copied: Event
    staging: Tensor | None
    """Host memory that the file is read into before the pinned buffer. None if the file is read into the buffer itself."""


def read_parts(parts: Sequence[TensorRead], backend: Backend, stream: Stream, done: Callable[[str], None]) -> None:
    """Read every part and copy its values to the device on ``stream``. Return when all copies have completed.

    All parts have one dtype. If the host can write device memory directly, the values are read into it without a pinned
    buffer. ``done(key)`` is called after each part has been read. Raises :class:`CheckpointError` if a file is too short or
    unreadable.
    """
    if not parts:
        return
    itemsize = parts[0].extent.dtype.itemsize
    max_values = max(1, _CHUNK_BYTES // itemsize)
    chunks = [chunk for part in parts for chunk in _chunks_of(part, max_values)]
    workers = max(1, min(_MAX_READ_THREADS, os.cpu_count() or 1, len(chunks)))
    with ThreadPoolExecutor(workers, thread_name_prefix="outrider-weights") as pool:
        if backend.capabilities.host_writes_memory and backend.observer is not None:
            for chunk in chunks:
                staging = _memory_before_torch(chunk.values, parts[0].extent.dtype)
                pool.submit(_read, chunk, staging).result()
                _destination_of(chunk).copy_(staging)
                if chunk.last:
                    done(chunk.part.key)
        elif backend.capabilities.host_writes_memory:

            def submit(chunk: _Chunk) -> Future[None]:
                return pool.submit(_read, chunk, _destination_of(chunk))

            for chunk, read in _with_read_ahead(chunks, 2 * workers, submit):
                read.result()
                if chunk.last:
                    done(chunk.part.key)
        else:
            _read_through_pinned(chunks, backend, stream, done, pool)


def _read_through_pinned(
    chunks: Sequence[_Chunk], backend: Backend, stream: Stream, done: Callable[[str], None], pool: ThreadPoolExecutor
) -> None:
    """Read ``chunks`` through pinned buffers. Workers fill one half of the buffers while the other half is copied to the
    device.
    """
    size, dtype = max(chunk.values for chunk in chunks), chunks[0].part.extent.dtype
    slots: list[_BulkSlot] = []
    for number in range(min(_MAX_PINNED_BUFFERS, len(chunks))):
        buffer = backend.empty_pinned(f"weights[{number}]", (size,), dtype)
        # The buffers are reused: page faults on fresh memory would take as long as the reads.
        watched = backend.observer is not None or type(buffer.tensor) is not Tensor
        staging = _memory_before_torch(size, dtype) if watched else None
        slots.append(_BulkSlot(buffer, backend.create_event(f"weights[{number}]"), staging))
    free, filling = deque(slots), deque[_BulkSlot]()

    def submit(chunk: _Chunk) -> Future[None]:
        slot = free.popleft()
        if slot.copied.generation:
            slot.copied.synchronize()  # wait until the previous copy from the buffer has completed
            slot.buffer.renew()
        filling.append(slot)
        return pool.submit(_read_pinned, chunk, slot.buffer.tensor[: chunk.values], slot.staging)

    try:
        for chunk, read in _with_read_ahead(chunks, max(1, len(slots) // 2), submit):
            read.result()
            slot = filling.popleft()
            backend.copy_async(_destination_of(chunk), slot.buffer.tensor[: chunk.values], stream=stream)
            stream.record(slot.copied)
            free.append(slot)
            if chunk.last:
                done(chunk.part.key)
    finally:  # the buffers outlive their copies
        for slot in slots:
            if slot.copied.generation:
                slot.copied.synchronize()
        pool.shutdown()  # a worker keeps its last buffer for a moment, and must not be the one that frees it


def _memory_before_torch(values: int, dtype: torch.dtype) -> Tensor:
    """Return host memory that torch sees as written before the tensor exists.

    Observers track torch operations only, so a worker's file read into ordinary tensor memory would look like a missing
    write.
    """
    return torch.frombuffer(bytearray(values * dtype.itemsize), dtype=dtype)


def _with_read_ahead(
    chunks: Sequence[_Chunk], count: int, submit: Callable[[_Chunk], Future[None]]
) -> Iterator[tuple[_Chunk, Future[None]]]:
    """Yield each chunk with the future of its read, in order. At most ``count`` reads are started in advance."""
    started: deque[tuple[_Chunk, Future[None]]] = deque()
    for chunk in chunks:
        if len(started) == count:
            yield started.popleft()
        started.append((chunk, submit(chunk)))
    yield from started


def _chunks_of(part: TensorRead, max_values: int) -> Iterator[_Chunk]:
    total, row_values = part.destination.numel(), part.extent.contiguous_values
    if row_values:
        max_values = max(1, max_values // row_values) * row_values  # whole rows
    for first in range(0, total, max_values):
        values = min(max_values, total - first)
        yield _Chunk(part, first, values, first + values == total)


def _destination_of(chunk: _Chunk) -> Tensor:
    return chunk.part.destination.view(-1)[chunk.first : chunk.first + chunk.values]


def _read_pinned(chunk: _Chunk, into: Tensor, staging: Tensor | None) -> None:
    """Read ``chunk`` from its file into the pinned host tensor ``into``. With ``staging``, read into that and copy with
    torch, which observers see.
    """
    if staging is None:
        _read(chunk, into)
    else:
        _read(chunk, staging[: chunk.values])
        into.copy_(staging[: chunk.values])


def _read(chunk: _Chunk, into: Tensor) -> None:
    """Read ``chunk`` from its file into the host tensor ``into``. Runs in a worker thread and never touches the device.
    Raises :class:`CheckpointError` for a file that is too short or unreadable.
    """
    extent = chunk.part.extent
    view = into.view(torch.uint8).numpy().data
    with wrap_read_errors(extent.path, f"tensor {chunk.part.key!r}"), extent.path.open("rb", buffering=0) as file:
        size = extent.dtype.itemsize
        row_bytes = extent.contiguous_values * size or len(view)
        first_value = (
            chunk.first // extent.contiguous_values * extent.row_pitch_values if extent.contiguous_values else chunk.first
        )
        file_offset = extent.offset + first_value * size
        while view:
            file.seek(file_offset)
            _read_exactly(file, view[:row_bytes])
            view, file_offset = view[row_bytes:], file_offset + extent.row_pitch_values * size


def _read_exactly(file: FileIO, view: memoryview) -> None:
    while view:
        count = file.readinto(view)
        if not count:
            raise ValueError(f"it ends {len(view)} bytes early; was it changed while it was read?")
        view = view[count:]
