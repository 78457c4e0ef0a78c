"""Adapter from the machine's callbacks to the backend interface's observer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.device import Access, Observer, Operation
from outrider_sim.machine.pinned import HostAllocation
from outrider_sim.machine.queue import Op, OperationKind, StreamQueue

if TYPE_CHECKING:
    from outrider_sim.backend import SimBackend


class ObserverTap:
    """The callbacks of the machine. Each runs on the host thread that caused it, in the order of that thread's calls.

    Reports operations and memory to an observer. The interface reports streams, events, flags and captures.
    """

    def __init__(self, backend: SimBackend, observer: Observer) -> None:
        self._backend = backend
        self._observer = observer
        self.timeline = getattr(observer, "ran", None)

    def launched(self, op: Op, stream: StreamQueue, index: int) -> None:
        """Report kernels and copies as operations; records, waits and launches have reports of their own."""
        if op.kind > OperationKind.COPY:
            return
        op.report = Operation(op.name, stream.name or stream.label, index, op.accesses, op.line)
        self._observer.launched(op.report)

    def ran(self, op: Op, stream: StreamQueue, index: int, start: float, end: float) -> None:
        """Report the virtual start and end of an operation, for observers that draw timelines."""
        if self.timeline is not None:
            self.timeline(op.report, op.name, stream.name or stream.label, index, start, end)

    def synchronized(self, stream: StreamQueue) -> None:
        """Report that the host waited for a stream inside a torch call."""
        for candidate in self._backend.streams:
            if candidate.native is stream:
                self._observer.stream_synchronized(candidate)

    def allocated(self, allocation: Any, previous: int | None) -> None:
        """Report a new allocation, and the previous allocation of its address."""
        if isinstance(allocation, HostAllocation):
            self._observer.allocated(allocation.id, allocation.nbytes, "host", allocation.line)
            return
        stream = allocation.stream
        self._observer.allocated(allocation.id, allocation.nbytes, stream.name or stream.label, allocation.line)
        if previous is not None:
            self._observer.address_reused(allocation.id, previous)

    def shared(self, allocation: Any, stream: StreamQueue) -> None:
        """Report that an allocation's reuse also waits for another stream."""
        self._observer.memory_shared(allocation.id, stream.name or stream.label)

    def freed(self, allocation: Any) -> None:
        """Report a freed allocation with the stream that allocated it."""
        host = isinstance(allocation, HostAllocation)
        self._observer.freed(allocation.id, "host" if host else allocation.stream.name or allocation.stream.label)

    def host_accessed(self, access: Access, line: Any) -> None:
        """Report that a host thread reads or writes pinned memory."""
        self._observer.host_accessed(access, line)

    def remapped(self, allocation: Any) -> None:
        """Report that other pages lie under an allocation's addresses."""
        self._observer.memory_remapped(allocation.id)

    def rows(self, op: Op, stream: StreamQueue, index: int) -> None:
        """Report the rows that an operation accesses."""
        del stream, index
        if op.report is not None:
            self._observer.rows_touched(op.report, op.rows())
