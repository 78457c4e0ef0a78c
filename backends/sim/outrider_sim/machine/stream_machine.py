"""The machine of one simulated device: streams of queued operations, events, flags, virtual time.

The module doesn't depend on torch. The `scheduler` decides when an operation runs. Devices that are ranks of one program
share a scheduler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from outrider.device import CapabilityError, DeadlockError, DeviceError, DeviceFault, DeviceLost
from outrider_sim.machine.host_scheduler import HostScheduler
from outrider_sim.machine.queue import (
    ENQUEUE,
    Action,
    EventGeneration,
    EventState,
    FlagState,
    HostThread,
    Op,
    OperationKind,
    StreamQueue,
    reached_at,
)
from outrider_sim.options import SimOptions
from outrider_sim.strategies import Strategy, safe_name

if TYPE_CHECKING:
    from outrider_sim.backend import ObserverTap


def describe_operation(op: Op, stream: StreamQueue, index: int) -> str:
    """Return the name of an operation in messages: stream, index, operator, source line."""
    line = f" at {op.line}" if op.line else ""
    return f"operation {stream.label}.{index} ({op.name}{line})"


class _EndlessOperation:
    """The target of a hanging operation's wait; it is never reached."""

    done = False

    def __init__(self, number: int) -> None:
        self._number = number

    def __str__(self) -> str:
        return f"its own end, which never comes (fault=stuck@{self._number})"


def make_endless(op: Op) -> None:
    """Turn `op` into a wait that never ends."""
    op.kind, op.target = OperationKind.WAIT, _EndlessOperation(op.number + 1)


class _MachineThread(threading.local):
    stream: StreamQueue | None = None
    fresh: bool | None = None  # a thread of Python's that chose no stream
    line = ""  # of the torch call that is being carried out


class StreamMachine:
    """One simulated device. Every method may be called from any thread; `HostScheduler` says who runs when.

    `rank` is the machine's number in its scheduler. Schedules prefix stream names with `rN.`, except on machine 0.
    """

    def __init__(self, options: SimOptions, scheduler: HostScheduler | None = None, rank: int = 0) -> None:
        self.options = options
        self.like = options.like
        self.scheduler = scheduler or HostScheduler(options)
        self.rank = rank
        self.tap: ObserverTap | None = None
        self.sim: Any = None  # what has this machine
        self.lost: DeviceLost | None = None  # the error that lost the device
        self.tracks = self.tells = False  # operations carry their accesses, and the line that issued them
        self.eager = self.asks = False  # as the scheduler has it
        self._failed: DeviceError | CapabilityError | None = None  # a recoverable error that the host hasn't seen yet
        self.local = _MachineThread()
        self._main_ident = threading.get_ident()
        self.streams: list[StreamQueue] = []
        self.default = self.create_stream("default")
        self.main_stream = self.default
        self._event_count = 0
        self._flag_count = 0
        self.enqueued = 0  # operations since the last reset: faults are counted in them
        self.resident = 0  # collectives that have started and aren't over
        self.runs = 0
        self.faults = options.operation_faults()
        self.replays = 0  # graph replays so far, as the backend interface counts them
        self.scheduler.machines.append(self)
        if scheduler is None:
            self.scheduler.use_options()
        else:
            scheduler.update_mode()

    # -- the scheduler's ----------------------------------------------------------------------------------------------

    def point(self, action: Action) -> None:
        """Let the strategy run other actors' steps before the calling thread does `action`."""
        self.scheduler.point(action, self)

    def reset(self, strategy: Strategy | None = None) -> None:
        """Drain all streams, then clear decisions, indices, virtual time and errors on every machine of the scheduler.

        Memory and streams stay. A lost or deadlocked device drops its queued operations instead of running them.
        """
        scheduler = self.scheduler
        if len(scheduler.threads) > 1:
            scheduler.abort_threads()
        scheduler.diverged = None
        for machine in scheduler.machines:
            try:
                if machine.lost is None:
                    scheduler.use(Strategy())
                    machine.synchronize_device()
            except DeadlockError:
                machine.drop()
            except (DeviceError, CapabilityError):
                pass
        for machine in scheduler.machines:
            machine.start_over()
        scheduler.diverged = None
        scheduler.clear_decisions()
        if strategy is None:
            scheduler.use_options()
        else:
            scheduler.use(strategy)

    def start_over(self) -> None:
        """Clear this machine's step indices, virtual time and errors, and drop its queued operations."""
        self.lost = self._failed = None
        self.runs = 0
        self.enqueued = 0
        self.resident = 0
        for stream in self.streams:
            if stream.queue:
                self.drop()
            stream.issued = stream.done = stream.base_seq = 0
            stream.clock = 0.0
            stream.capture = None

    def drop(self) -> None:
        """Drop all queued operations of this machine, as on a destroyed device."""
        for stream in self.streams:
            stream.queue.clear()
            stream.done = stream.issued
            self._poison(stream)

    # -- objects ----------------------------------------------------------------------------------------------------

    def create_stream(self, name: str = "", priority: int = 0) -> StreamQueue:
        """Create a stream. Its name in schedules is made from `name`, unique among the machine's streams."""
        ident = 0
        used = {stream.id for stream in self.streams}
        while ident in used:
            ident += 1
        stream = StreamQueue(ident, name, priority, self)
        self.streams.append(stream)
        self.rename_stream(stream, name)
        return stream

    def rename_stream(self, stream: StreamQueue, name: str) -> None:
        """Name the stream `name`, with a suffix if another stream has that name."""
        stream.name = name
        label = base = safe_name(name) or f"s{stream.id}"
        if base.startswith("host"):  # that is what host threads are called
            label = base = f"s-{base}"
        if self.rank:
            label = base = f"r{self.rank}.{base}"
        taken = {other.label for other in self.streams if other is not stream}
        number = 1
        while label in taken:
            number += 1
            label = f"{base}.{number}"
        stream.label = label

    def drop_stream(self, stream: StreamQueue) -> None:
        """Remove an empty stream that no backend object references, and free its number."""
        if not stream.queue and stream in self.streams and stream is not self.default:
            self.streams.remove(stream)

    def create_event(self, name: str = "") -> EventState:
        """Create an event that no stream has recorded; without a name it is named by its number."""
        self._event_count += 1
        return EventState(self._event_count, name or f"event {self._event_count}")

    def create_flag(self, name: str = "") -> FlagState:
        """Create a flag that is not set; without a name it is named by its number."""
        self._flag_count += 1
        return FlagState(name or f"flag {self._flag_count}")

    @property
    def stream(self) -> StreamQueue:
        """The stream on which the calling thread enqueues operations."""
        local = self.local
        if local.stream is not None:
            return local.stream
        if local.fresh is None:
            ident = threading.get_ident()
            known = getattr(threading, "_active", {}).get(ident)
            # Threads that aren't Python's (a library's workers) follow the thread that made the machine.
            foreign = known is None or isinstance(known, threading._DummyThread)
            local.fresh = ident != self._main_ident and not foreign
        return self.default if local.fresh else self.main_stream

    def set_stream(self, stream: StreamQueue) -> StreamQueue:
        """Make `stream` current on the calling thread; return the previous stream."""
        local = self.local
        before = self.stream
        if threading.get_ident() == self._main_ident:
            self.main_stream = stream
        else:
            local.stream = stream
        return before

    # -- enqueueing -------------------------------------------------------------------------------------------------

    def enqueue(self, op: Op, stream: StreamQueue, launched: Sequence[Op] = ()) -> None:
        """Queue `op`, or add it to the capture that is open on `stream`. Raises `DeviceLost` after a sticky fault.

        `launched` are the operations of a graph whose launch `op` is: they follow it without a point between them.
        """
        if self.lost is not None:
            raise self.new_lost_error()
        if stream.capture is not None:
            stream.capture.add(op, stream)
            return
        me = self.scheduler.local.thread or self.scheduler.main
        if self.eager:
            me.step += 1
        else:
            self.point(ENQUEUE)
            if self.lost is not None:
                raise self.new_lost_error()
        op.seq = self.scheduler.seq
        self.scheduler.seq += 1
        op.number = self.enqueued
        self.enqueued += 1
        if self.faults and self.faults.get(op.number + 1) == "stuck":
            make_endless(op)
        me.clock = op.host_time = me.clock + self.like.launch_us
        stream.queue.append(op)
        stream.queue.extend(launched)
        index = stream.issued
        stream.issued = index + 1 + len(launched)
        if self.tap is not None:
            self.tap.launched(op, stream, index)
        if self.eager:
            self.scheduler.run_all(None if launched else stream)

    def record(self, event: EventState, stream: StreamQueue) -> EventGeneration:
        """Enqueue a record of `event` on `stream`; the returned generation is complete when the record has run."""
        event.count += 1
        generation = EventGeneration(event, event.count, stream, stream.issued)
        generation.captured = stream.capture
        if self.options.recycled_events and event.latest is not None:
            # The injected fault: one completed flag for all records, as if the driver recycled the event.
            generation = event.latest
        event.latest = generation
        self.enqueue(Op(OperationKind.RECORD, f"record {event.name}", target=generation), stream)
        return generation

    def wait(self, generation: EventGeneration, stream: StreamQueue) -> None:
        """Hold the operations enqueued on `stream` from now on until the generation is complete.

        A wait for a record inside an open capture pulls `stream` into that capture.
        """
        capture = generation.captured
        if capture is not None and stream.capture is None and capture.open:
            capture.fork(stream)
        op = Op(OperationKind.WAIT, f"wait for {generation.event.name}", target=generation, cost=self.like.wait_us)
        self.enqueue(op, stream)

    def flag(self, kind: int, flag: FlagState, stream: StreamQueue) -> None:
        """Enqueue a set, wait or reset of `flag`."""
        verb = {OperationKind.FLAG_SET: "set", OperationKind.FLAG_WAIT: "wait for", OperationKind.FLAG_RESET: "reset"}[kind]
        self.enqueue(Op(kind, f"{verb} {flag.name}", target=flag), stream)

    # -- the host waits ---------------------------------------------------------------------------------------------

    def synchronize_stream(self, stream: StreamQueue) -> None:
        """Block the host until everything enqueued on `stream` so far has run."""
        target = stream.issued
        self._block(lambda: stream.done >= target, f"stream {stream.label!r}", stream)

    def synchronize_event(self, generation: EventGeneration) -> None:
        """Block the host until the event's `generation` is complete."""
        self._block(lambda: generation.done, str(generation.event.name), generation)

    def synchronize_device(self) -> None:
        """Block the host until every stream is empty."""
        self._block(lambda: not any(stream.queue for stream in self.streams), "the device", None)

    def query(self, done: Callable[[], bool], target: Any) -> bool:
        """Return `done()` without blocking. The strategy may run device operations first.

        Under every strategy, a host that polls repeatedly gets True after finitely many calls. Raises the error of the loss
        if the device is lost.
        """
        self.scheduler.queries = True
        self.point(Action("query", target))
        answer = done()
        if not answer and self.lost is None:
            self.scheduler.count_refusal()
            answer = done()
        if self.lost is not None:
            raise self.new_lost_error()
        if answer:
            self._raise_failed()
        return answer

    def _block(self, ready: Callable[[], bool], what: str, target: Any) -> None:
        """Let other actors run until `ready` holds and the strategy picks this thread; then raise the machine's pending
        error.
        """
        me = self.scheduler.local.thread or self.scheduler.main
        if self.lost is not None:
            raise self.new_lost_error()
        if not self.asks:
            self.scheduler.record_host_first_delays(me, 0)
        self.scheduler.turns(me, Action("sync", target), ready, what, self)
        self._settle(me, target)
        if self.lost is not None:
            raise self.new_lost_error()
        self._raise_failed()

    def _settle(self, me: HostThread, target: Any) -> None:
        """Advance the calling thread's virtual time to the time at which its wait ended."""
        reached = reached_at(target, self.streams)
        me.clock = max(me.clock, reached) + self.like.sync_us

    def execute(self, stream: StreamQueue) -> None:
        """Run the next operation of `stream` and advance the stream's virtual time."""
        op = stream.queue.popleft()
        index = stream.done
        stream.done = index + 1
        kind = op.kind
        start = stream.clock if stream.clock > op.host_time else op.host_time
        if kind < OperationKind.RECORD:
            fault = self.faults.get(op.number + 1) if self.faults else None
            if fault is not None and op.number >= 0:
                self._inject(fault, op, stream, index)
            else:
                if op.rows is not None and self.tap is not None and not op.after:
                    self.tap.rows(op, stream, index)
                try:
                    if op.post is None:
                        op.fn(*op.args, **op.kwargs)  # type: ignore[misc]
                    else:
                        op.post(op.fn(*op.args, **op.kwargs))  # type: ignore[misc]
                    if op.after and self.tap is not None:
                        self.tap.rows(op, stream, index)
                except Exception as error:
                    self._fail(op, stream, index, error)
        elif kind == OperationKind.RECORD:
            op.target.done = True
            op.target.time = start
        elif kind == OperationKind.WAIT:
            start = max(start, op.target.time)
        elif kind == OperationKind.LAUNCH:
            stream.base_seq = op.seq
            if op.fn is not None:
                op.fn()
        elif kind == OperationKind.COLLECTIVE_START:
            op.target.start(start)
        elif kind == OperationKind.COLLECTIVE:
            start = max(start, op.target.rendezvous.time)
            try:
                op.target.release()
            except DeviceError as error:
                self._failed = self._failed or error
            except Exception as error:
                self._fail(op, stream, index, error)
        else:
            start = op.target.apply(kind, start)
        stream.clock = start + op.cost
        self.runs += 1
        names = self.scheduler.names
        if names is not None:
            names[f"{stream.label}.{index}"] = f"{op.name} at {op.line}" if op.line else op.name
        if stream.poison:
            self._poison(stream)
        note = self.scheduler.note
        if note is not None:
            note(stream.label, stream.done)
        if self.tap is not None:
            self.tap.ran(op, stream, index, start, stream.clock)

    def _poison(self, stream: StreamQueue) -> None:
        pending = stream.poison
        while pending and pending[0][0] <= stream.done:
            pending.popleft()[1].fill_poison()

    # -- faults -----------------------------------------------------------------------------------------------------

    def _raise_failed(self) -> None:
        """Raise the machine's pending recoverable error once, then clear it."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def new_lost_error(self) -> DeviceLost:
        """Return a new error object for a device that an earlier fault has made unusable."""
        assert self.lost is not None
        return DeviceLost(str(self.lost))

    def _inject(self, fault: str, op: Op, stream: StreamQueue, index: int) -> None:
        place = describe_operation(op, stream, index)
        if fault == "error":
            self._failed = self._failed or DeviceFault(
                f"{place} failed on request (fault=error@{op.number + 1}); its results are undefined, the device lives on"
            )
        else:
            self._lose_device(f"{place} failed on request (fault=lost@{op.number + 1})")

    def _fail(self, op: Op, stream: StreamQueue, index: int, error: Exception) -> None:
        if isinstance(error, NotImplementedError):  # the operation didn't run, so the device survives
            missing = f"the simulated device has no such operator for these operands: {error}; use another backend"
            self._failed = self._failed or CapabilityError(f"{describe_operation(op, stream, index)}: {missing}")
            return
        if isinstance(error, DeviceFault):  # from `provoke_fault`
            self._failed = self._failed or DeviceFault(f"{describe_operation(op, stream, index)}: {error}")
            return
        # A kernel that fails while it runs (an index out of range) is a sticky fault on a device.
        self._lose_device(f"{describe_operation(op, stream, index)} failed: {type(error).__name__}: {error}")
        assert self.lost is not None
        self.lost.__cause__ = error

    def _lose_device(self, text: str) -> None:
        self.lost = DeviceLost(f"{text}; the device is lost: queued work is gone, make a new backend")
        self.drop()
