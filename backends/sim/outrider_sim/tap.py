"""From the machine's reports to the backend interface's observer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from outrider.device import Access, Observer, Operation
from outrider_sim.pinned import HostAllocation
from outrider_sim.queue import Op, OperationKind, StreamQueue

if TYPE_CHECKING:
    from outrider_sim.backend import SimBackend


class Tap(Protocol):
    """Callbacks of the machine. Each runs on the host thread that caused it, in the order of that thread's calls."""

    def launched(self, op: Op, stream: StreamQueue, index: int) -> None:
        """`op` was enqueued as operation `index` of `stream`."""

    def ran(self, op: Op, stream: StreamQueue, index: int, start: float, end: float) -> None:
        """`op` has run, over these virtual microseconds."""

    def synchronized(self, stream: StreamQueue) -> None:
        """The host was blocked on `stream` inside a torch call (`.item()`, a pageable copy)."""

    def allocated(self, allocation: Any, previous: int | None) -> None:
        """Memory was handed out; `previous` is the identity that the bytes had before."""

    def shared(self, allocation: Any, stream: StreamQueue) -> None:
        """`record_stream`: the memory isn't handed out again before `stream` is past what it holds at the release."""

    def freed(self, allocation: Any) -> None:
        """Report that the last reference to an allocation was dropped."""

    def host_accessed(self, access: Access, line: Any) -> None:
        """A host thread touched pinned memory directly."""

    def rows(self, op: Op, stream: StreamQueue, index: int) -> None:
        """`op` is about to run: its index operands hold what it will use. Or it has run, where that tells (`Op.after`)."""


class ObserverTap:
    """Reports to an observer what the machine does. The interface itself reports streams, events, flags and captures."""

    def __init__(self, backend: SimBackend, observer: Observer) -> None:
        self._backend = backend
        self._observer = observer
        self.timeline = getattr(observer, "ran", None)

    def launched(self, op: Op, stream: StreamQueue, index: int) -> None:
        """Kernels and copies are operations; records, waits and launches have reports of their own."""
        if op.kind > OperationKind.COPY:
            return
        op.report = Operation(op.name, stream.name or stream.label, index, op.accesses, op.line)
        self._observer.launched(op.report)

    def ran(self, op: Op, stream: StreamQueue, index: int, start: float, end: float) -> None:
        """Virtual times, for observers that draw timelines."""
        if self.timeline is not None:
            self.timeline(op.report, op.name, stream.name or stream.label, index, start, end)

    def synchronized(self, stream: StreamQueue) -> None:
        """A synchronise inside a torch call orders the host as any other does."""
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
        """The allocator waits for another stream as well."""
        self._observer.memory_shared(allocation.id, stream.name or stream.label)

    def freed(self, allocation: Any) -> None:
        """Report a freed allocation with its stream."""
        host = isinstance(allocation, HostAllocation)
        self._observer.freed(allocation.id, "host" if host else allocation.stream.name or allocation.stream.label)

    def host_accessed(self, access: Access, line: Any) -> None:
        """The host touched pinned memory."""
        self._observer.host_accessed(access, line)

    def rows(self, op: Op, stream: StreamQueue, index: int) -> None:
        """The rows that an operation is about to touch, or touched."""
        del stream, index
        if op.report is not None:
            self._observer.rows_touched(op.report, op.rows())
