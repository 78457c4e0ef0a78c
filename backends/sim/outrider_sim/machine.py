"""The simulated machine: streams of queued operations, host threads, and a strategy that says who goes next.

Nothing here knows torch. An operation runs only when the strategy picks it, at a *point* where a host thread is about to
do something with the device, or while a host thread is blocked. Points are counted per thread, operations per stream, so
a step has the same name in every schedule of one program.

One host thread runs at a time; further ones are in `hosts`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from outrider.device import CapabilityError, DeadlockError, DeviceError
from outrider_sim.failing import Failing
from outrider_sim.failures import deadlock, hang
from outrider_sim.hosts import HostThreads, hand_over
from outrider_sim.options import SimOptions
from outrider_sim.queue import (
    ENQUEUE,
    Action,
    EventState,
    FlagState,
    Generation,
    HostThread,
    Kind,
    Op,
    StreamQueue,
    action_text,
    age,
    can_run,
    reached_at,
)
from outrider_sim.schedule import Schedule, Step, safe_name
from outrider_sim.strategies import Strategy, make_strategy

if TYPE_CHECKING:
    from outrider_sim.tap import Tap


class _Local(threading.local):
    thread: HostThread | None = None
    stream: StreamQueue | None = None


class Machine(Failing):
    """One simulated device. Every method may be called from any thread; see the module for who runs when."""

    def __init__(self, options: SimOptions) -> None:
        self.options = options
        self.like = options.like
        self.tap: Tap | None = None
        self.lost = None
        self.queries = False  # somebody asked what has run
        self.tracks = self.tells = False  # operations carry their accesses, and the line that issued them
        self.line = ""  # of the torch call that is being carried out
        self.quiet: Callable[[], AbstractContextManager[Any]] = nullcontext  # opened around operations that run
        self._failed = None
        self._lock = threading.RLock()
        self.local = _Local()
        self._main_ident = threading.get_ident()
        self.streams: list[StreamQueue] = []
        self.default = self.create_stream("default")
        self.main_stream = self.default
        self.hosts = HostThreads(self)
        self.main = HostThread(0, "main", self.default)
        self.threads: list[HostThread] = [self.main]
        self._event_count = 0
        self._flag_count = 0
        self.seq = 0
        self.runs = 0
        self.delays: dict[Step, Step] = {}
        self.diverged: BaseException | None = None
        self.names: dict[str, str] | None = None  # where set, collects what each step was
        self.bases: dict[int, int] = {}  # storage → address, while decisions look at accesses
        self.faults = options.operation_faults()
        self.replays = 0  # graph replays so far, as the seam counts them
        self.strategy: Strategy
        self.use(make_strategy(options.strategy, options.seed, options.strategy_options))

    # -- strategy ---------------------------------------------------------------------------------------------------

    def use(self, strategy: Strategy) -> None:
        """Let `strategy` decide from now on."""
        self.strategy = strategy
        self.note: Callable[[str, int], None] | None = getattr(strategy, "note", None)
        bind = getattr(strategy, "bind", None)
        if bind is not None:
            bind(self)
        self.update_mode()
        strategy.begin()

    def update_mode(self) -> None:
        """Work out how much needs asking; call it after anything that it depends on has changed."""
        alone = len(self.threads) == 1
        # With one thread, the order of the program is: run whatever can run, oldest first.
        self._eager = type(self.strategy) is Strategy and alone and not self.options.late_copies
        self._asks = not (self.strategy.host_first and alone)
        self.tells = self.tap is not None or self.names is not None
        self.tracks = self.tells or self.strategy.needs_accesses
        self._sees_all = self.strategy.sees_all

    def schedule(self) -> Schedule:
        """The departures from the order of the program since the last reset."""
        if not self._asks:
            self._note_lazy(self.main, 1)
        return Schedule.of(self.delays)

    def _note_lazy(self, me: HostThread, further: int) -> None:
        """Where the host runs first nobody is asked, so note what that came to: what is queued now waited until here."""
        step = me.step - 1 + further
        if step >= 0 and self.options.record:
            after = Step(me.label, step)
            for stream in self.streams:
                if stream.queue and can_run(stream.queue[0]):
                    self.delays[Step(stream.label, stream.done)] = after

    def reset(self, strategy: Strategy | None = None) -> None:
        """Drain, then forget decisions, indices, virtual time and errors. Memory and streams stay.

        A device that was lost, or that is deadlocked, drops what is queued instead.
        """
        if len(self.threads) > 1:
            self.hosts.abort()
        self.diverged = None
        try:
            if self.lost is None:
                self.use(Strategy())
                self.synchronize_device()
        except DeadlockError:
            self.drop()
        except (DeviceError, CapabilityError):
            pass
        self.lost = self._failed = None
        self.delays = {}
        self.seq = 0
        self.runs = 0
        self.queries = False
        self.bases.clear()
        self.hosts.count = 1
        for stream in self.streams:
            stream.issued = stream.done = stream.base_seq = 0
            stream.clock = 0.0
            stream.capture = None
        self.main.step = 0
        self.main.clock = 0.0
        if self.names is not None:
            self.names.clear()
        if strategy is None:
            strategy = make_strategy(self.options.strategy, self.options.seed, self.options.strategy_options)
        self.use(strategy)

    def drop(self) -> None:
        """Forget what is queued, as a device does that is torn down."""
        for stream in self.streams:
            stream.queue.clear()
            stream.done = stream.issued
            self._poison(stream)

    # -- objects ----------------------------------------------------------------------------------------------------

    def create_stream(self, name: str = "", priority: int = 0) -> StreamQueue:
        """A new stream. The name in schedules is made from `name`, unique among the machine's streams."""
        ident = 0
        used = {stream.id for stream in self.streams}
        while ident in used:
            ident += 1
        stream = StreamQueue(ident, name, priority)
        self.streams.append(stream)
        self.rename_stream(stream, name)
        return stream

    def rename_stream(self, stream: StreamQueue, name: str) -> None:
        """Call the stream `name`, or something like it where another one is called so."""
        stream.name = name
        label = base = safe_name(name) or f"s{stream.id}"
        if base.startswith("host"):  # that is what host threads are called
            label = base = f"s-{base}"
        taken = {other.label for other in self.streams if other is not stream}
        number = 1
        while label in taken:
            number += 1
            label = f"{base}.{number}"
        stream.label = label

    def drop_stream(self, stream: StreamQueue) -> None:
        """Nobody enqueues on `stream` any more; it goes when it has run empty, and its number is free again."""
        if not stream.queue and stream in self.streams and stream is not self.default:
            self.streams.remove(stream)

    def create_event(self, name: str = "") -> EventState:
        """A new event, never recorded."""
        self._event_count += 1
        return EventState(self._event_count, name)

    def create_flag(self, name: str = "") -> FlagState:
        """A new flag, down."""
        self._flag_count += 1
        return FlagState(self._flag_count, name)

    @property
    def thread(self) -> HostThread:
        """The actor that the calling thread is; threads that nobody registered act as the first one."""
        return self.local.thread or self.main

    @property
    def stream(self) -> StreamQueue:
        """The calling thread's current stream."""
        return self.local.stream or self.main_stream

    def set_stream(self, stream: StreamQueue) -> StreamQueue:
        """Make `stream` current on the calling thread; returns the one before."""
        local = self.local
        before = local.stream or self.main_stream
        if threading.get_ident() == self._main_ident:
            # Threads that never chose a stream (autograd's workers) follow the thread that made the machine.
            self.main_stream = stream
        else:
            local.stream = stream
        return before

    # -- enqueueing -------------------------------------------------------------------------------------------------

    def enqueue(self, op: Op, stream: StreamQueue) -> None:
        """Queue `op`, or add it to the capture that is open on `stream`. Raises `DeviceLost` after a sticky fault."""
        if self.lost is not None:
            raise self.lost_again()
        if stream.capture is not None:
            stream.capture.add(op, stream)
            return
        me = self.local.thread or self.main
        if self._eager:
            me.step += 1
        else:
            self.point(ENQUEUE)
            if self.lost is not None:
                raise self.lost_again()
        op.seq = self.seq
        self.seq += 1
        if self.faults and self.faults.get(op.seq + 1) == "stuck":
            hang(op)
        me.clock = op.host_time = me.clock + self.like.launch_us
        stream.queue.append(op)
        index = stream.issued
        stream.issued = index + 1
        if self.tap is not None:
            self.tap.launched(op, stream, index)
        if self._eager:
            self._run_all(stream)

    def launch(self, ops: Sequence[Op], stream: StreamQueue, op: Op) -> None:
        """Queue `op` (a graph launch) and the graph's operations after it, as one enqueue."""
        eager, self._eager = self._eager, False
        try:
            self.enqueue(op, stream)
            stream.queue.extend(ops)
            stream.issued += len(ops)
        finally:
            self._eager = eager
        if eager:
            self._run_all(None)

    def record(self, event: EventState, stream: StreamQueue) -> Generation:
        """Enqueue a record; the generation is complete when it has run."""
        event.count += 1
        generation = Generation(event, event.count, stream, stream.issued)
        generation.captured = stream.capture
        if self.options.recycled_events and event.latest is not None:
            # The injected fault: one completed flag for all records, as if the driver recycled the event.
            generation = event.latest
        event.latest = generation
        self.enqueue(Op(Kind.RECORD, f"record {event.label}", target=generation), stream)
        return generation

    def wait(self, generation: Generation, stream: StreamQueue) -> None:
        """Hold what is enqueued on `stream` from now on until the generation is complete.

        A wait for a record inside an open capture pulls `stream` into that capture.
        """
        capture = generation.captured
        if capture is not None and stream.capture is None and capture.open:
            capture.fork(stream)
        op = Op(Kind.WAIT, f"wait for {generation.event.label}", target=generation, cost=self.like.wait_us)
        self.enqueue(op, stream)

    def flag(self, kind: int, flag: FlagState, stream: StreamQueue) -> None:
        """Enqueue a set, wait or reset of `flag`."""
        verb = {Kind.FLAG_SET: "set", Kind.FLAG_WAIT: "wait for", Kind.FLAG_RESET: "reset"}[kind]
        self.enqueue(Op(kind, f"{verb} {flag.label}", target=flag), stream)

    # -- the host waits ---------------------------------------------------------------------------------------------

    def synchronize_stream(self, stream: StreamQueue) -> None:
        """Block until everything enqueued on `stream` so far has run."""
        target = stream.issued
        self._block(lambda: stream.done >= target, f"stream {stream.label!r}", stream)

    def synchronize_event(self, generation: Generation) -> None:
        """Block until `generation` is complete."""
        self._block(lambda: generation.done, str(generation.event.label), generation)

    def synchronize_device(self) -> None:
        """Block until every stream is empty."""
        self._block(lambda: not any(stream.queue for stream in self.streams), "the device", None)

    def query(self, done: Callable[[], bool], target: Any) -> bool:
        """Ask without blocking; a point at which the strategy may let the device go on first."""
        self.queries = True
        self.point(Action("query", target))
        answer = done()
        if self.lost is not None:
            raise self.lost_again()
        if answer:
            self._raise_failed()
        return answer

    # -- turns ------------------------------------------------------------------------------------------------------

    def point(self, action: Action) -> None:
        """The calling thread is about to do `action`: let the strategy run what it wants to run before."""
        me = self.local.thread or self.main
        if self._eager:
            self._run_all(None)
            me.step += 1
        elif self._asks:
            self.turns(me, action, None, "")
        else:
            me.step += 1

    def _block(self, ready: Callable[[], bool], what: str, target: Any) -> None:
        """Let the strategy run others until `ready` holds and this thread is picked; then raise what has failed."""
        me = self.local.thread or self.main
        if self.lost is not None:
            raise self.lost_again()
        if not self._asks:
            self._note_lazy(me, 0)
        self.turns(me, Action("sync", target), ready, what)
        self._settle(me, target)
        if self.lost is not None:
            raise self.lost_again()
        self._raise_failed()

    def _settle(self, me: HostThread, target: Any) -> None:
        """Virtual time of the host after a wait."""
        reached = reached_at(target, self.streams)
        me.clock = max(me.clock, reached) + self.like.sync_us

    def turns(self, me: HostThread, action: Action, ready: Callable[[], bool] | None, what: str) -> None:
        """Let the strategy pick until it picks `me`, which is a candidate as soon as `ready` holds."""
        me.action, me.ready = action, ready
        me.waits_for = what
        try:
            with self.quiet():
                self._take_turns(me)
        except BaseException as error:
            # Whoever meets the failure, every other thread must end too: none of them can be picked any more.
            self.diverged = self.diverged or error
            raise

    def _take_turns(self, me: HostThread) -> None:
        while True:
            with self._lock:
                candidates = self._candidates()
                if not candidates:
                    raise deadlock(self)
                pick = candidates[0] if len(candidates) == 1 and not self._sees_all else self._choose(candidates)
                if isinstance(pick, StreamQueue):
                    self._execute(pick)
                    continue
            if pick is not me:
                hand_over(me, pick)
                if me.finished:
                    return
                if self.diverged is not None:
                    raise self.diverged
            me.step += 1
            me.ready = None
            if self.note is not None:
                self.note(me.label, me.step)
            if self.names is not None:
                self.names[f"{me.label}.{me.step - 1}"] = f"the host: {action_text(me.action)}"
            return

    def _candidates(self) -> list[StreamQueue | HostThread]:
        heads: list[StreamQueue] = []
        for stream in self.streams:
            queue = stream.queue
            if queue and can_run(queue[0]):
                heads.append(stream)
        if len(heads) > 1:
            heads.sort(key=age)
        found: list[StreamQueue | HostThread] = list(heads)
        found.extend(
            thread
            for thread in self.threads
            if not thread.finished and (thread.ready is None or thread.ready() or self.lost is not None)
        )
        if self.options.late_copies and len(found) > 1:
            prompt = [a for a in found if not (isinstance(a, StreamQueue) and a.queue[0].kind == Kind.COPY)]
            found = prompt or found
        return found

    def _choose(self, candidates: list[StreamQueue | HostThread]) -> StreamQueue | HostThread:
        index = self.strategy.choose(candidates)
        pick = candidates[index]
        if index and self.options.record:
            after = Step(pick.label, pick.step)
            for passed in candidates[:index]:
                self.delays[Step(passed.label, passed.step)] = after
        return pick

    def _run_all(self, only: StreamQueue | None) -> None:
        """The order of the program, with one thread: oldest first, until nothing can run."""
        with self._lock:
            if only is not None and only.queue and only.queue[0].kind < Kind.RECORD and len(only.queue) == 1:
                self._execute(only)  # the common case; it can't unblock anything
                return
            with self.quiet():
                while heads := [stream for stream in self.streams if stream.queue and can_run(stream.queue[0])]:
                    self._execute(min(heads, key=age) if len(heads) > 1 else heads[0])

    def _execute(self, stream: StreamQueue) -> None:
        op = stream.queue.popleft()
        index = stream.done
        stream.done = index + 1
        kind = op.kind
        start = stream.clock if stream.clock > op.host_time else op.host_time
        if kind < Kind.RECORD:
            fault = self.faults.get(op.seq + 1) if self.faults else None
            if fault is not None and op.seq >= 0:
                self._inject(fault, op, stream, index)
            else:
                if op.rows is not None and self.tap is not None:
                    self.tap.rows(op, stream, index)
                try:
                    if op.post is None:
                        op.fn(*op.args, **op.kwargs)  # type: ignore[misc]
                    else:
                        op.post(op.fn(*op.args, **op.kwargs))  # type: ignore[misc]
                except Exception as error:
                    self._fail(op, stream, index, error)
        elif kind == Kind.RECORD:
            op.target.done = True
            op.target.time = start
        elif kind == Kind.WAIT:
            start = max(start, op.target.time)
        elif kind == Kind.LAUNCH:
            stream.base_seq = op.seq
            if op.fn is not None:
                op.fn()
        else:
            start = op.target.run(kind, start)
        stream.clock = start + op.cost
        self.runs += 1
        if self.names is not None:
            self.names[f"{stream.label}.{index}"] = f"{op.name} at {op.line}" if op.line else op.name
        if stream.poison:
            self._poison(stream)
        if self.note is not None:
            self.note(stream.label, stream.done)
        if self.tap is not None:
            self.tap.ran(op, stream, index, start, stream.clock)

    def _poison(self, stream: StreamQueue) -> None:
        pending = stream.poison
        while pending and pending[0][0] <= stream.done:
            pending.popleft()[1].fill_poison()
