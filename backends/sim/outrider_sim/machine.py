"""The simulated machine: streams of queued operations, host threads, and a strategy that says who goes next.

Nothing here knows torch. An operation runs only when the strategy picks it, at a *point* where a host thread is about to
do something with the device, or while a host thread is blocked. Points are counted per thread, operations per stream, so
a step has the same name in every schedule of one program.

One host thread runs at a time. Further ones (`spawn`) are operating-system threads that pass a baton, so that any code
may run in them, but who runs is decided by the strategy alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from outrider.device import Access, DeadlockError, DeviceError, DeviceFault, DeviceLost, StreamOrderError
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
)
from outrider_sim.schedule import Schedule, Step, safe_name
from outrider_sim.strategies import Strategy, make_strategy


class Tap(Protocol):
    """What a tool can listen to. Called on the host thread concerned, in the order of its calls."""

    def launched(self, op: Op, stream: StreamQueue, index: int) -> None:
        """`op` was enqueued as operation `index` of `stream`."""

    def ran(self, op: Op, stream: StreamQueue, index: int, start: float, end: float) -> None:
        """`op` has run, over these virtual microseconds."""

    def synchronized(self, stream: StreamQueue) -> None:
        """The host was blocked on `stream` inside a torch call (`.item()`, a pageable copy)."""

    def allocated(self, allocation: Any, previous: int | None) -> None:
        """Memory was handed out; `previous` is the identity that the bytes had before."""

    def freed(self, allocation: Any) -> None:
        """The last reference went."""

    def host_accessed(self, access: Access, line: Any) -> None:
        """A host thread touched pinned memory directly."""

    def rows(self, op: Op, stream: StreamQueue, index: int) -> None:
        """`op` is about to run: its index operands hold what it will use."""


class _Local(threading.local):
    thread: HostThread | None = None
    stream: StreamQueue | None = None


class Machine:
    """One simulated device. Every method may be called from any thread; see the module for who runs when."""

    def __init__(self, options: SimOptions) -> None:
        self.options = options
        self.like = options.like
        self.tap: Tap | None = None
        self.lost: DeviceLost | None = None
        self.tracks = False  # operations carry their accesses
        self.quiet: Callable[[], AbstractContextManager[Any]] = nullcontext  # opened around operations that run
        self._failed: DeviceError | None = None
        self._lock = threading.RLock()
        self._local = _Local()
        self._main_ident = threading.get_ident()
        self.streams: list[StreamQueue] = []
        self.default = self.create_stream("default")
        self.main_stream = self.default
        self.main = HostThread(0, "main", self.default)
        self.threads: list[HostThread] = [self.main]
        self._thread_count = 1
        self._event_count = 0
        self._flag_count = 0
        self.seq = 0
        self.runs = 0
        self.delays: dict[Step, Step] = {}
        self.diverged: BaseException | None = None
        self.names: dict[str, str] | None = None  # where set, collects what each step was
        self.bases: dict[int, int] = {}  # storage → address, while decisions look at accesses
        self._faults = {n: kind for kind, n in options.faults if kind != "oom"}
        self.queries = False
        self.replays = 0  # graph replays so far, as the seam counts them
        self.strategy: Strategy
        self.use(make_strategy(options.strategy, options.seed, options.strategy_options))

    # -- strategy ---------------------------------------------------------------------------------------------------

    def use(self, strategy: Strategy) -> None:
        """Let `strategy` decide from now on."""
        self.strategy = strategy
        self._note: Callable[[str, int], None] | None = getattr(strategy, "note", None)
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
        self.tracks = self.tap is not None or self.strategy.needs_accesses or self.names is not None
        self._sees_all = self.strategy.sees_all

    def schedule(self) -> Schedule:
        """The departures from the order of the program since the last reset."""
        if not self._asks:
            self._note_lazy(self.main, 1)
        return Schedule.of(self.delays)

    def _note_lazy(self, me: HostThread, further: int) -> None:
        """Where the host runs first nobody is asked, so note what that came to: what is queued now waited until here."""
        step = me.step - 1 + further
        if step >= 0:
            after = Step(me.label, step)
            for stream in self.streams:
                if stream.queue:
                    self.delays[Step(stream.label, stream.done)] = after

    def reset(self, strategy: Strategy | None = None) -> None:
        """Drain, then forget decisions, indices, virtual time and errors. Memory and streams stay.

        A device that was lost, or that is deadlocked, drops what is queued instead.
        """
        if len(self.threads) > 1:
            self._abort_threads()
        self.diverged = None
        try:
            if self.lost is None:
                self.use(Strategy())
                self.synchronize_device()
        except DeadlockError:
            self.drop()
        except DeviceError:
            pass
        self.lost = self._failed = None
        self.delays = {}
        self.seq = 0
        self.runs = 0
        self.queries = False
        self.bases.clear()
        self._thread_count = 1
        for stream in self.streams:
            stream.issued = stream.done = stream.base_seq = 0
            stream.clock = 0.0
            stream.capture = None
        self.main.step = 0
        self.main.clock = 0.0
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
        label = base = safe_name(name) or f"s{ident}"
        taken = {other.label for other in self.streams}
        number = 1
        while label in taken or label.startswith("host"):
            number += 1
            label = f"{base}.{number}" if not base.startswith("host") else f"s-{base}.{number}"
        stream.label = label
        self.streams.append(stream)
        return stream

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
        return self._local.thread or self.main

    @property
    def stream(self) -> StreamQueue:
        """The calling thread's current stream."""
        return self._local.stream or self.main_stream

    def set_stream(self, stream: StreamQueue) -> StreamQueue:
        """Make `stream` current on the calling thread; returns the one before."""
        local = self._local
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
        me = self._local.thread or self.main
        if self._eager:
            me.step += 1
        else:
            self.point(ENQUEUE)
            if self.lost is not None:
                raise self.lost_again()
        op.seq = self.seq
        self.seq += 1
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

    def flag(self, kind: Kind, flag: FlagState, stream: StreamQueue) -> None:
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
        return done()

    # -- turns ------------------------------------------------------------------------------------------------------

    def point(self, action: Action) -> None:
        """The calling thread is about to do `action`: let the strategy run what it wants to run before."""
        me = self._local.thread or self.main
        if self._eager:
            self._run_all(None)
            me.step += 1
        elif self._asks:
            self._turns(me, action, None, "")
        else:
            me.step += 1

    def _block(self, ready: Callable[[], bool], what: str, target: Any) -> None:
        """Let the strategy run others until `ready` holds and this thread is picked; then raise what has failed."""
        me = self._local.thread or self.main
        if self.lost is not None:
            raise self.lost_again()
        if not self._asks:
            self._note_lazy(me, 0)
        self._turns(me, Action("sync", target), ready, what)
        self._settle(me, target)
        if self.lost is not None:
            raise self.lost_again()
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _settle(self, me: HostThread, target: Any) -> None:
        """Virtual time of the host after a wait."""
        if isinstance(target, StreamQueue):
            reached = target.clock
        elif isinstance(target, Generation):
            reached = target.time
        else:
            reached = max(stream.clock for stream in self.streams)
        me.clock = max(me.clock, reached) + self.like.sync_us

    def _turns(self, me: HostThread, action: Action, ready: Callable[[], bool] | None, what: str) -> None:
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
                    if me.finished:
                        return
                    raise self._deadlock()
                pick = candidates[0] if len(candidates) == 1 and not self._sees_all else self._choose(candidates)
                if isinstance(pick, StreamQueue):
                    self._execute(pick)
                    continue
            if pick is not me:
                self._hand_over(me, pick)
                if me.finished:
                    return
                if self.diverged is not None:
                    raise self.diverged
            me.step += 1
            me.ready = None
            if self._note is not None:
                self._note(me.label, me.step)
            if self.names is not None:
                self.names[f"{me.label}.{me.step - 1}"] = f"the host: {action_text(me.action)}"
            return

    def _candidates(self) -> list[StreamQueue | HostThread]:
        heads: list[StreamQueue] = []
        for stream in self.streams:
            queue = stream.queue
            if queue and _can_run(queue[0]):
                heads.append(stream)
        if len(heads) > 1:
            heads.sort(key=_age)
        found: list[StreamQueue | HostThread] = list(heads)
        for thread in self.threads:
            if not thread.finished and (thread.ready is None or thread.ready() or self.lost is not None):
                found.append(thread)
        if self.options.late_copies and len(found) > 1:
            prompt = [a for a in found if not (isinstance(a, StreamQueue) and a.queue[0].kind == Kind.COPY)]
            found = prompt or found
        return found

    def _choose(self, candidates: list[StreamQueue | HostThread]) -> StreamQueue | HostThread:
        index = self.strategy.choose(candidates)
        pick = candidates[index]
        if index:
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
            while True:
                best = None
                for stream in self.streams:
                    queue = stream.queue
                    if queue and _can_run(queue[0]) and (best is None or _age(stream) < _age(best)):
                        best = stream
                if best is None:
                    return
                self._execute(best)

    def _execute(self, stream: StreamQueue) -> None:
        op = stream.queue.popleft()
        index = stream.done
        stream.done = index + 1
        kind = op.kind
        start = stream.clock if stream.clock > op.host_time else op.host_time
        if kind < Kind.RECORD:
            fault = self._faults.get(op.seq + 1) if self._faults else None
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
            self._run_flag(kind, op.target, start)
            if kind == Kind.FLAG_WAIT:
                start = max(start, op.target.time)
        stream.clock = start + op.cost
        self.runs += 1
        if self.names is not None:
            self.names[f"{stream.label}.{index}"] = f"{op.name} at {op.line}" if op.line else op.name
        if stream.poison:
            self._poison(stream)
        if self._note is not None:
            self._note(stream.label, stream.done)
        if self.tap is not None:
            self.tap.ran(op, stream, index, start, stream.clock)

    def _run_flag(self, kind: int, flag: FlagState, now: float) -> None:
        if kind == Kind.FLAG_SET:
            if flag.is_set:
                flag.lost += 1  # the device remembers one set: this one is lost
            flag.is_set = True
            flag.time = now
        elif kind == Kind.FLAG_RESET:
            flag.is_set = False

    def _poison(self, stream: StreamQueue) -> None:
        pending = stream.poison
        while pending and pending[0][0] <= stream.done:
            pending.popleft()[1].fill_poison()

    # -- failures ---------------------------------------------------------------------------------------------------

    def lost_again(self) -> DeviceLost:
        """A fresh error for a device that is already lost."""
        assert self.lost is not None
        return DeviceLost(str(self.lost))

    def _where(self, op: Op, stream: StreamQueue, index: int) -> str:
        line = f" at {op.line}" if op.line else ""
        return f"operation {stream.label}.{index} ({op.name}{line})"

    def _inject(self, fault: str, op: Op, stream: StreamQueue, index: int) -> None:
        where = self._where(op, stream, index)
        if fault == "error":
            self._failed = self._failed or DeviceFault(
                f"{where} failed on request (fault=error@{op.seq + 1}); its results are undefined, the device lives on"
            )
        else:
            self._lose(f"{where} failed on request (fault=lost@{op.seq + 1})")

    def _fail(self, op: Op, stream: StreamQueue, index: int, error: Exception) -> None:
        # A kernel that fails while it runs (an index out of range) is a sticky fault on a device.
        self._lose(f"{self._where(op, stream, index)} failed: {type(error).__name__}: {error}")
        assert self.lost is not None
        self.lost.__cause__ = error

    def _lose(self, text: str) -> None:
        self.lost = DeviceLost(f"{text}; the device is lost: queued work is gone, make a new backend")
        self.drop()

    def _deadlock(self) -> DeadlockError:
        lines = []
        for stream in self.streams:
            if not stream.queue:
                continue
            op = stream.queue[0]
            line = f" ({op.line})" if op.line else ""
            lines.append(f"stream {stream.label!r} is held at operation {stream.done}{line}: {_reason(op)}")
        lines.extend(
            f"{thread} waits for {thread.waits_for}" for thread in self.threads if not thread.finished and thread.ready
        )
        return DeadlockError("nothing that is queued can run:\n  " + "\n  ".join(lines))

    # -- host threads -----------------------------------------------------------------------------------------------

    def spawn(self, fn: Callable[[], None], name: str = "") -> HostThread:
        """Start a host thread. It runs when the strategy picks it; its current stream is the caller's."""
        self.point(Action("spawn"))
        thread = HostThread(self._thread_count, name, self.stream)
        self._thread_count += 1
        thread.baton = threading.Semaphore(0)
        if self.main.baton is None:
            self.main.baton = threading.Semaphore(0)
        me = self.thread
        thread.clock = me.clock

        def body() -> None:
            thread.baton.acquire()
            self._local.thread, self._local.stream = thread, thread.stream
            thread.step += 1
            thread.ready = None
            if self._note is not None:
                self._note(thread.label, thread.step)
            try:
                if self.diverged is None:
                    fn()
            except BaseException as error:
                thread.error = error
            thread.finished = True
            self._leave(thread)

        # A daemon, so that a program that fails before joining can still end.
        thread.os = threading.Thread(target=body, name=f"outrider-sim {thread.label}", daemon=True)
        self.threads.append(thread)
        self.update_mode()
        thread.os.start()
        return thread

    def join(self, thread: HostThread) -> None:
        """Block until `thread` has finished; raises what it raised."""
        self._turns(self.thread, Action("join", thread), lambda: thread.finished, str(thread))
        if thread.os is not None:
            thread.os.join()
        if thread in self.threads:
            self.threads.remove(thread)
        self.update_mode()
        if self.diverged is not None:
            raise self.diverged
        if thread.error is not None:
            raise thread.error

    def run_threads(self, *bodies: Callable[[], None]) -> None:
        """Run the callables as host threads beside each other and join them all."""
        threads = [self.spawn(body, getattr(body, "__name__", "")) for body in bodies]
        failed: BaseException | None = None
        for thread in threads:
            try:
                self.join(thread)
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _hand_over(self, me: HostThread, other: HostThread) -> None:
        other.baton.release()
        if not me.finished:
            me.baton.acquire()

    def _leave(self, thread: HostThread) -> None:
        """A finished thread passes its turn on; where nobody can go on, the first thread wakes up and raises."""
        try:
            if self.diverged is None:
                self._turns(thread, Action("exit"), None, "")
        except BaseException as error:
            self.diverged = error
        if self.diverged is not None:
            self.main.baton.release()

    def _abort_threads(self) -> None:
        """End threads that a failed run left parked: each raises at the point where it waits."""
        self.diverged = self.diverged or StreamOrderError("the run was given up")
        for thread in self.threads[1:]:
            if not thread.finished:
                thread.baton.release()
            thread.os.join()
        if self.main.baton is not None:
            self.main.baton = threading.Semaphore(0)
        self.threads = [self.main]


def action_text(action: Action) -> str:
    """What a host thread did, in words."""
    return {"enqueue": "enqueues", "query": "asks", "host": "touches pinned memory", "sync": "waits"}.get(
        action.what, action.what
    )


def _can_run(op: Op) -> bool:
    kind = op.kind
    if kind == Kind.WAIT:
        return bool(op.target.done)
    if kind == Kind.FLAG_WAIT:
        return bool(op.target.is_set)
    return True


def _age(stream: StreamQueue) -> tuple[int, int]:
    op = stream.queue[0]
    return (op.seq, 0) if op.seq >= 0 else (stream.base_seq, op.order)


def _reason(op: Op) -> str:
    if op.kind == Kind.WAIT:
        return f"it waits for {op.target}"
    if op.kind == Kind.FLAG_WAIT:
        lost = f" ({op.target.lost} sets were lost)" if op.target.lost else ""
        return f"it waits for {op.target.label}, which is down{lost}"
    return f"{op.name} can run"
