"""What tools see of a device: the observer, and the records that it is handed.

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
        """The rows that an operation, launched before with an access to the whole operand, really touched."""

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
        """The calling thread asked; when ``done``, it's ordered after the record like a synchronise."""

    def stream_synchronized(self, stream: Stream) -> None:
        """The calling thread was blocked until everything enqueued on ``stream`` had run."""

    def stream_queried(self, stream: Stream, done: bool) -> None:
        """The calling thread asked whether ``stream`` is empty; when ``done``, it's ordered after it."""

    def device_synchronized(self) -> None:
        """The calling thread was blocked until every stream was empty."""

    def flag_set(self, stream: Stream, flag: Flag) -> None:
        """A set was enqueued."""

    def flag_waited(self, stream: Stream, flag: Flag) -> None:
        """A wait was enqueued; it may precede the set that it consumes."""

    def flag_reset(self, stream: Stream, flag: Flag) -> None:
        """A reset was enqueued."""

    def allocated(self, storage: int, nbytes: int, stream: str, location: str) -> None:
        """Memory was handed out, in the order of ``stream``; host memory has the stream ``"host"``."""

    def memory_shared(self, storage: int, stream: str) -> None:
        """``record_stream``: once freed, the memory isn't handed out before ``stream`` is past what it holds by then."""

    def freed(self, storage: int, stream: str) -> None:
        """The last reference went; the memory may be handed out again in the order of ``stream``."""

    def address_reused(self, storage: int, previous: int) -> None:
        """``storage`` lies where ``previous`` lay: their accesses conflict unless something orders them."""

    def host_accessed(self, access: Access, location: str) -> None:
        """The calling thread read or wrote pinned memory directly."""

    def collective(
        self, group: Group, call: Collective, stream: Stream, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]
    ) -> None:
        """A rank makes a call of its group, which reads and writes these operands of it in the order of ``stream``. Reported
        before the call is enqueued: where the device isn't asynchronous, before the rank waits for the others.
        """

    def decided(self, group: Group, name: str, value: Decision) -> None:
        """The host of a rank took a decision that every rank of ``group`` must take alike, in the same order."""

    def capture_began(self, graph: Graph, stream: Stream) -> None:
        """Operations from here to :meth:`capture_ended` on this thread belong to ``graph``; none of them runs."""

    def capture_ended(self, graph: Graph, failed: bool) -> None:
        """The capture is over; when ``failed``, the graph will never be replayed."""

    def replayed(self, graph: Graph, stream: Stream, generation: int) -> None:
        """The accesses of ``graph`` happen again, on ``stream``."""

    def params_updated(self, graph: Graph, stream: Stream, params: Mapping[str, tuple[int, ...]]) -> None:
        """Host parameters were rebound, in the order of ``stream``."""

    def renewed(self, owner: str, tensor: Tensor, generation: int) -> None:
        """A pinned buffer starts a new generation: what was read under the old one is invalid."""

    def marked_stale(self, tensor: Tensor, reason: str) -> None:
        """The contents of ``tensor`` are stale: bytes of it that are read before they are written again are stale reads."""

    def marked_mirror(self, mirror: Tensor | tuple[Graph, str], source: Tensor) -> None:
        """``mirror`` (memory, or a host parameter of a graph) is read as the present value of ``source``."""

    def host_released(self, token: object) -> None:
        """What the calling thread did so far comes before whatever a thread does after acquiring ``token``."""

    def host_acquired(self, token: object) -> None:
        """What the calling thread does from here comes after what was done before ``token`` was released."""


class TimedObserver(Observer):
    """An observer that also learns when operations ran, from backends that can tell."""

    def ran(self, operation: Operation | None, name: str, stream: str, index: int, start_us: float, end_us: float) -> None:
        """An operation has run, between these (virtual) microseconds. ``operation`` is what was launched, None for work
        that has no report of its own (waits, records, the launch of a graph).
        """


class ProcessView(Protocol):
    """Something that a process has one of (arguments, environment), of which each rank shall see its own."""

    def save(self) -> Any:
        """What the running rank sees."""

    def restore(self, saved: Any) -> None:
        """The rank that saved this runs again."""


@runtime_checkable
class ControllableDevice(Protocol):
    """A device whose schedule a tool decides. A backend that has it offers it as ``Backend.control``."""

    def set_schedule(self, schedule: str) -> None:
        """Replay the decisions in ``schedule`` (the string that :meth:`schedule` printed)."""

    def schedule(self) -> str:
        """The decisions taken since the last reset, as a short string that replays them exactly."""

    def reset(self) -> None:
        """Drain the device, then forget decisions, streams' indices and virtual time; memory stays."""

    def virtual_time(self) -> float:
        """Seconds of simulated device time since the last reset."""

    def steps(self, stream: Stream | None) -> tuple[str, int]:
        """How schedules name ``stream`` (None: the calling thread), and how many steps it has enqueued (taken) so far."""

    def delaying(self, step: tuple[str, int], after: tuple[str, int]) -> str:
        """The schedule in which ``step`` isn't taken before ``after`` has been."""

    def explore(self, program: Callable[[Backend], None], *, strategy: str, iterations: int, seed: int) -> ExplorationResult:
        """Run ``program``, which makes what it needs and raises when something is wrong, under up to ``iterations``
        schedules that ``strategy`` picks; stop at the first failure and shrink it.
        """

    def diverge(self, kind: str) -> None:
        """Let this device, or the calling host thread, depart from those of other ranks until the next reset: ``tie``,
        ``ulp`` or ``slow``.
        """

    def create_store(self) -> Store:
        """A store for ranks that are threads of :meth:`run_threads`: a wait there lets the others run."""

    def run_ranks(self, bodies: Sequence[Callable[[], None]], views: Sequence[ProcessView] = ()) -> None:
        """Run the callables as the ranks of one program, as if each had its process: its device is the current one there, and
        torch.distributed, whatever backend is asked for, joins the ranks' devices. ``views``: what else each has of its own.
        """

    def run_threads(self, *bodies: Callable[[], None]) -> None:
        """Run the callables as host threads that the schedule picks in turn, and join them. Between themselves they may
        meet at device calls alone: a lock or queue would block the whole device.
        """


class ScheduleFailure(Protocol):
    """A schedule under which a program failed. ``shrunk`` is what of it matters, ``orderings`` says so in words."""

    @property
    def run(self) -> int:
        """Which run it was, from 0."""

    @property
    def error(self) -> BaseException:
        """What the program raised."""

    @property
    def schedule(self) -> object:
        """As found; ``str`` replays it."""

    @property
    def shrunk(self) -> object:
        """What of it is needed; ``str`` replays it."""

    @property
    def orderings(self) -> tuple[str, ...]:
        """One sentence for each ordering that is needed."""


class ExplorationResult(Protocol):
    """What an exploration came to."""

    @property
    def runs(self) -> int:
        """Complete runs."""

    @property
    def exhausted(self) -> bool:
        """No schedule is left."""

    @property
    def failure(self) -> ScheduleFailure | None:
        """The first run that failed."""
