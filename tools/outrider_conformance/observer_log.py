"""An observer that stores the reports of a backend, for tests of observers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from outrider.device import Access, Backend, Collective, Decision, Event, Group, Observer, Operation, Stream


class ObserverLog(Observer):
    """An observer that stores a backend's reports in the order of their arrival."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.operations: list[Operation] = []
        self.rows: list[tuple[Access, ...]] = []
        self.collectives: list[tuple[Any, ...]] = []

    def stream_created(self, stream: Stream) -> None:
        """Store the name of a new stream."""
        self.entries.append(("stream", stream.name))

    def scope_entered(self, stream: Stream) -> None:
        """Store the stream of an entered scope."""
        self.entries.append(("entered", stream.name))

    def scope_left(self, stream: Stream) -> None:
        """Store the stream of a left scope."""
        self.entries.append(("left", stream.name))

    def recorded(self, stream: Stream, event: Event, generation: int) -> None:
        """Store the stream and the generation of a record."""
        self.entries.append(("recorded", stream.name, generation))

    def waited(self, stream: Stream, event: Event, generation: int) -> None:
        """Store the stream and the generation of a wait."""
        self.entries.append(("waited", stream.name, generation))

    def event_synchronized(self, event: Event, generation: int) -> None:
        """Store the generation that the host waited for."""
        self.entries.append(("event synchronized", generation))

    def stream_synchronized(self, stream: Stream) -> None:
        """Store the stream that the host waited for."""
        self.entries.append(("stream synchronized", stream.name))

    def device_synchronized(self) -> None:
        """Store that the host waited for the device."""
        self.entries.append(("device synchronized",))

    def launched(self, operation: Operation) -> None:
        """Store an operation with its accesses."""
        self.operations.append(operation)

    def rows_touched(self, operation: Operation, accesses: tuple[Access, ...]) -> None:
        """Store the exact rows of an operation."""
        self.rows.append(accesses)

    def collective(
        self, group: Group, call: Collective, stream: Stream, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]
    ) -> None:
        """Record a call with the numbers of operands that it reads and writes, without memory that other ranks write."""
        writes = tuple(each for each in writes if not any(each is buffer for buffer in group.peer_written))
        peers = (call.reduction, call.root, call.peer)
        self.collectives.append(
            (group.name, call.kind, call.sequence, call.count, peers, stream.name, len(reads), len(writes))
        )

    def decided(self, group: Group, name: str, value: Decision) -> None:
        """Record a decision of the group with its name and value."""
        self.collectives.append((group.name, name, value))


@contextmanager
def logged(backend: Backend) -> Generator[ObserverLog]:
    """Attach a new log as observer of ``backend`` for this scope."""
    log = ObserverLog()
    backend.attach(log)
    try:
        yield log
    finally:
        backend.detach()


def log_cache_write(backend: Backend, slots: tuple[int, ...]) -> tuple[ObserverLog, Tensor]:
    """Write one token to each of ``slots`` of a KV cache with pages of 2 tokens; return the log and the key cache."""
    stream, count = backend.create_stream("s"), len(slots)
    with backend.on(stream):
        x, turn = torch.ones(count, 1, 4, device=backend.device), torch.ones(count, 4, device=backend.device)
        keys, values = (torch.zeros(4, 2, 1, 4, device=backend.device) for _ in range(2))
        places = torch.tensor(slots, dtype=torch.int64, device=backend.device)
    stream.synchronize()
    with logged(backend) as log:
        with backend.on(stream):
            backend.kernels.rope_write_cache(x, x.clone(), x.clone(), turn, turn, keys, values, places)
        stream.synchronize()
    return log, keys
