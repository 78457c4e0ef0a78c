"""The tools' view of a device: the observer, and the records that it receives.

A tool (the sanitizer, a tracer) subclasses :class:`Observer` and attaches it with ``Backend.attach``. The interface's own
classes report streams, events, flags, scopes, captures and host synchronisation on every backend. Memory accesses are
reported by the backend itself where it declares ``reports_accesses``; elsewhere a tool derives them from torch's
dispatcher and the operators' schemas.

Callbacks run on the host thread that made the call, after the call's arguments were checked and, for operations that
are queued, in the order in which they were enqueued. A callback must not enqueue device work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

    from outrider.device.backend import Backend
    from outrider.device.collectives import Collective, Decision, Group
    from outrider.device.graph import Graph
    from outrider.device.stream import Event, Flag, Stream


@dataclass(frozen=True, slots=True)
class Access:
    """One access of an operation to one storage.

    ``storage`` identifies the memory for as long as it lives (a backend never uses a number twice). ``start`` and
    ``end`` are byte offsets into it, end exclusive. ``shape``, ``stride`` (in bytes) describe the strided region inside
    that interval when it isn't dense, so that two interleaved regions can be told apart; None when dense.
    ``argument`` is the operand's name in the operator's schema, or ``"out"``.

    ``by_rows``: which rows of the region are touched is decided by data. Where the backend declares
    ``row_exact_accesses`` the rows follow through :meth:`Observer.rows_touched`; elsewhere the operation is taken to own
    its rows, so two such accesses don't conflict.

    ``born``: how many graph replays the backend had enqueued when the operand's tensor object was made
    (``Backend.replays``), -1 where that isn't known. A view that is older than a replay, and whose memory the replay
    overwrote, doesn't show what its maker saw.

    ``contested``: parts of this one operation write the bytes with different values, and nothing orders the parts.
    """

    storage: int
    start: int
    end: int
    write: bool
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    argument: str = ""
    by_rows: bool = False
    born: int = -1
    contested: bool = False

    @classmethod
    def of_tensor(
        cls, tensor: Tensor, storage: int, write: bool, argument: str, by_rows: bool = False, born: int = -1, base: int = 0
    ) -> Access:
        """Return the access to all elements of ``tensor`` in the memory ``storage``, strided if the tensor has holes.

        ``base``: byte offset in that memory at which the tensor's own storage begins.
        """
        size = tensor.element_size()
        low = base + int(tensor.storage_offset()) * size
        if tensor.is_contiguous():
            return cls(storage, low, low + int(tensor.numel()) * size, write, None, None, argument, by_rows, born)
        shape = tuple(int(n) for n in tensor.shape)
        stride = tuple(int(s) * size for s in tensor.stride())
        span = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + size if tensor.numel() else 0
        return cls(storage, low, low + span, write, shape, stride, argument, by_rows, born)


@dataclass(frozen=True, slots=True)
class Operation:
    """One enqueued operation.

    ``stream`` is the stream's name and ``index`` its position among that stream's operations, so that
    ``(stream, index)`` is the same in every schedule of one program. ``location`` is ``file:line`` of the Python call
    (the innermost frame outside torch and Outrider), or empty where it wasn't taken.
    """

    name: str
    stream: str
    index: int
    accesses: tuple[Access, ...]
    location: str = ""


class Observer:
    """Receives what happens on a device. Every method does nothing unless a tool overrides it."""

    def stream_created(self, stream: Stream) -> None:
        """A stream exists. Streams that existed before the observer was attached are announced on attach."""

    def scope_entered(self, stream: Stream) -> None:
        """The calling thread places its torch work on ``stream`` from here."""

    def scope_left(self, stream: Stream) -> None:
        """The calling thread left the scope; the scope around it, if any, holds again."""

    def launched(self, operation: Operation) -> None:
        """An operation was enqueued. Its data-dependent rows aren't known yet (see :meth:`rows_touched`)."""

    def rows_touched(self, operation: Operation, accesses: tuple[Access, ...]) -> None:
        """Report the rows that an operation touched. It was launched before, with an access to the whole operand."""

    def recorded(self, stream: Stream, event: Event, generation: int) -> None:
        """``stream`` will complete ``generation`` of ``event`` after everything enqueued on it so far.

        In a capture the generation is 0 and the record is an edge of the graph.
        """

    def waited(self, stream: Stream, event: Event, generation: int) -> None:
        """Work enqueued on ``stream`` from here runs after ``generation`` of ``event``.

        In a capture the generation is 0 where the wait is an edge of the graph.
        """

    def event_synchronized(self, event: Event, generation: int) -> None:
        """The calling thread was blocked until ``generation`` had completed."""

    def event_queried(self, event: Event, generation: int, done: bool) -> None:
        """The calling thread queried the event; if ``done``, the thread is ordered after the record."""

    def stream_synchronized(self, stream: Stream) -> None:
        """The calling thread was blocked until everything enqueued on ``stream`` had run."""

    def stream_queried(self, stream: Stream, done: bool) -> None:
        """The calling thread queried the stream; if ``done``, the thread is ordered after the stream's work."""

    def device_synchronized(self) -> None:
        """The calling thread was blocked until every stream was empty."""

    def flag_set(self, stream: Stream, flag: Flag) -> None:
        """A set of ``flag`` was enqueued on ``stream``."""

    def flag_waited(self, stream: Stream, flag: Flag) -> None:
        """A wait for ``flag`` was enqueued on ``stream``; it may precede the set that it consumes."""

    def flag_reset(self, stream: Stream, flag: Flag) -> None:
        """A reset of ``flag`` was enqueued on ``stream``."""

    def allocated(self, storage: int, nbytes: int, stream: str, location: str) -> None:
        """Memory was allocated, in the order of ``stream``; host memory has the stream ``"host"``."""

    def memory_shared(self, storage: int, stream: str) -> None:
        """``record_stream`` was called: freed memory is reused only after the work that ``stream`` then holds has run."""

    def freed(self, storage: int, stream: str) -> None:
        """The last reference was dropped; the memory may be allocated again in the order of ``stream``."""

    def address_reused(self, storage: int, previous: int) -> None:
        """``storage`` has the address of the freed ``previous``: their accesses conflict unless they are ordered."""

    def host_accessed(self, access: Access, location: str) -> None:
        """The calling thread read or wrote pinned memory directly."""

    def collective(
        self, group: Group, call: Collective, stream: Stream, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]
    ) -> None:
        """A rank makes a call of its group, which reads and writes these operands in the order of ``stream``.

        Reported before the call is enqueued. If the device isn't asynchronous, the rank hasn't waited for the others yet.
        """

    def memory_remapped(self, storage: int) -> None:
        """Handle new pages under the addresses of ``storage``, mapped by the calling host thread without waiting."""

    def decided(self, group: Group, name: str, value: Decision) -> None:
        """The host of a rank made a decision that every rank of ``group`` must make equally, in the same order."""

    def capture_began(self, graph: Graph, stream: Stream) -> None:
        """Operations from here to :meth:`capture_ended` on this thread belong to ``graph``; none of them runs."""

    def capture_ended(self, graph: Graph, failed: bool) -> None:
        """The capture is over; when ``failed``, the graph will never be replayed."""

    def replayed(self, graph: Graph, stream: Stream, generation: int) -> None:
        """The accesses of ``graph`` happen again, on ``stream``."""

    def params_updated(self, graph: Graph, stream: Stream, params: Mapping[str, tuple[int, ...]]) -> None:
        """Host parameters were rebound, in the order of ``stream``."""

    def renewed(self, owner: str, tensor: Tensor, generation: int) -> None:
        """A pinned buffer starts a new generation: tensors that were read under the old generation are invalid."""

    def marked_stale(self, tensor: Tensor, reason: str) -> None:
        """The contents of ``tensor`` are stale: bytes of it that are read before they are written again are stale reads."""

    def marked_mirror(self, mirror: Tensor | tuple[Graph, str], source: Tensor) -> None:
        """``mirror`` (memory, or a host parameter of a graph) is read as the present value of ``source``."""

    def host_released(self, token: object) -> None:
        """Earlier actions of the calling thread precede the actions of any thread after it acquires ``token``."""

    def host_acquired(self, token: object) -> None:
        """Later actions of the calling thread follow the actions that preceded the release of ``token``."""


class TimedObserver(Observer):
    """An observer that also learns when operations ran, from backends that can tell."""

    def ran(self, operation: Operation | None, name: str, stream: str, index: int, start_us: float, end_us: float) -> None:
        """An operation has run, between these (virtual) microseconds.

        ``operation`` is the launched operation, or None for work without a launch report (waits, records, the launch of a
        graph).
        """


class ProcessView(Protocol):
    """State that exists once per process (arguments, environment), and of which each simulated rank needs its own."""

    def save(self) -> Any:
        """Return the state of the running rank."""

    def restore(self, saved: Any) -> None:
        """Restore the state ``saved``: the rank that saved it runs again."""


@runtime_checkable
class ControllableDevice(Protocol):
    """A device whose schedule a tool decides, offered as ``Backend.control``."""

    def set_schedule(self, schedule: str) -> None:
        """Replay the decisions in ``schedule`` (the string that :meth:`schedule` printed)."""

    def schedule(self) -> str:
        """Return the decisions since the last reset, as a short string that replays them exactly."""

    def reset(self) -> None:
        """Drain the device, then reset decisions, stream indices and virtual time; memory is unchanged."""

    def virtual_time(self) -> float:
        """Return the seconds of simulated device time since the last reset."""

    def steps(self, stream: Stream | None) -> tuple[str, int]:
        """Return the name of ``stream`` in schedules (None: the calling thread), and its number of steps so far."""

    def delaying(self, step: tuple[str, int], after: tuple[str, int]) -> str:
        """Return the schedule, as text, in which ``step`` runs only after ``after`` has run; both are (name, number)."""

    def explore(self, program: Callable[[Backend], None], *, strategy: str, iterations: int, seed: int) -> ExplorationResult:
        """Run ``program`` under up to ``iterations`` schedules of ``strategy``; stop at the first failure and shrink it.

        ``program`` creates its streams and tensors, and raises an exception if a result is wrong.
        """

    def diverge(self, kind: str) -> None:
        """Let this device or host thread differ from other ranks until the next reset: ``tie``, ``ulp`` or ``slow``."""

    def create_store(self) -> Store:
        """Create a store for ranks that are threads of :meth:`run_threads`: a wait at the store lets the others run."""

    def run_ranks(self, bodies: Sequence[Callable[[], None]], views: Sequence[ProcessView] = ()) -> None:
        """Run the callables as the ranks of one program, as if each rank had its own process.

        In each rank, its device is the current device, and torch.distributed joins the ranks' devices with any backend.
        ``views`` are further states that each rank has for itself.
        """

    def run_threads(self, *bodies: Callable[[], None]) -> None:
        """Run the callables as host threads that the schedule selects in turn, and join them.

        The threads may synchronise only through device calls: a lock or queue would block the whole device.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleFailure:
    """A schedule under which a program failed, its minimal form, and the form in words."""

    run: int
    """Index of the failed run, from 0."""
    error: BaseException
    """The exception that the program raised."""
    schedule: object
    """The schedule of the failed run; its ``str`` replays the run."""
    shrunk: object
    """The decisions that the failure needs; their ``str`` replays the failure."""
    orderings: tuple[str, ...]
    """One sentence for each ordering that the failure needs."""


@dataclass(kw_only=True, slots=True)
class ExplorationResult:
    """The result of an exploration."""

    runs: int = 0
    """Number of complete runs."""
    pruned: int = 0
    """Number of runs that were aborted because they repeat earlier runs."""
    exhausted: bool = False
    """True if every schedule was explored."""
    failure: ScheduleFailure | None = None
    """The first failed run, or None."""
