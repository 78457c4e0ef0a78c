"""The scheduler of host threads and of the streams of all simulated devices of a host.

An operation runs only when the strategy picks it: at a *point*, where a host thread is about to use a device, or while a
host thread is blocked. Points are counted per thread and operations per stream, so a step has the same name in every
schedule of a program.

One host thread runs at a time. Each is an operating-system thread, so it can run any code. It runs only while it holds the
baton, which the strategy hands out. Process-wide state with a value per thread (such as
the current device) is saved and restored when threads switch: see `AttributeView`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import starmap
from typing import TYPE_CHECKING, Any

from outrider.device import DeadlockError, ProcessView, StreamOrderError
from outrider_sim.machine.queue import (
    Action,
    HostThread,
    OperationKind,
    StreamQueue,
    acquired_lock,
    action_text,
    age,
    can_run,
    reason,
)
from outrider_sim.options import SimOptions
from outrider_sim.strategies import Delay, Schedule, ScheduleStep, Strategy, make_strategy

if TYPE_CHECKING:
    from outrider_sim.machine.stream_machine import StreamMachine
    from outrider_sim.ranks.exchange import Exchange


REFUSALS = 64
"""Number of negative answers to a thread's queries after which another actor takes a step, whatever the strategy."""


class AttributeView:
    """A process view: the attribute `name` of `owner` has a separate value per host thread."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name

    def save(self) -> Any:
        """Return the attribute's current value, before the running thread is switched out."""
        return getattr(self._owner, self._name)

    def restore(self, saved: Any) -> None:
        """Set the attribute to `saved`, the value of the thread that runs next."""
        setattr(self._owner, self._name, saved)


class _SchedulerThread(threading.local):
    thread: HostThread | None = None


class HostScheduler:
    """Picks the steps of all machines of a host; the options of the machine that joined first name the strategy."""

    def __init__(self, options: SimOptions) -> None:
        self.options = options
        self.operation_scope: Callable[[], AbstractContextManager[Any]] = nullcontext  # opened around operations that run
        self.queries = False  # a host thread queried an event or stream
        self.lock = threading.RLock()
        self.local = _SchedulerThread()
        self.machines: list[StreamMachine] = []
        self.ambient: list[ProcessView] = []
        self.exchange: Exchange | None = None  # groups of ranks, once there is one
        self.main = HostThread(0, "main", None)
        self.threads: list[HostThread] = [self.main]
        self._thread_count = 1  # threads so far, the first one included: numbers the next
        self._failures: list[BaseException] = []  # errors of threads, in the order in which they failed
        self.seq = 0
        self.delays: dict[ScheduleStep, ScheduleStep] = {}
        self.diverged: BaseException | None = None
        self.slow: set[HostThread] = set()  # go on only when nothing else can
        self.names: dict[str, str] | None = None  # where set, collects what each step was
        self.bases: dict[int, int] = {}  # storage → address, while decisions look at accesses
        self.asks = self.eager = self._sees_all = False
        self.strategy: Strategy
        self.note: Callable[[str, int], None] | None = None

    @property
    def streams(self) -> list[StreamQueue]:
        """Return the streams of every machine, in machine order."""
        return [stream for machine in self.machines for stream in machine.streams]

    @property
    def thread(self) -> HostThread:
        """The calling thread's actor. Unregistered threads act as the first host thread."""
        return self.local.thread or self.main

    # -- strategy ---------------------------------------------------------------------------------------------------

    def use(self, strategy: Strategy) -> None:
        """Replace the strategy that picks which stream or host thread takes the next step."""
        self.strategy = strategy
        self.note = getattr(strategy, "note", None)
        bind = getattr(strategy, "bind", None)
        if bind is not None:
            bind(self)
        self.update_mode()
        strategy.begin()

    def use_options(self) -> None:
        """Select the strategy that the options of the device name."""
        self.use(make_strategy(self.options.strategy, self.options.seed, self.options.strategy_options))

    def update_mode(self) -> None:
        """Recompute whether the scheduler must call the strategy. Call after a change of its inputs."""
        alone = len(self.threads) == 1
        # With one thread, the order of the program is: run whatever can run, oldest first.
        self.eager = type(self.strategy) is Strategy and alone and not self.options.late_copies
        self.asks = not (self.strategy.host_first and alone)
        self._sees_all = self.strategy.sees_all
        for machine in self.machines:
            machine.eager, machine.asks = self.eager, self.asks
            machine.tells = machine.tap is not None or self.names is not None
            machine.tracks = machine.tells or self.strategy.needs_accesses

    def schedule(self) -> Schedule:
        """Return the deviations from program order since the last reset."""
        if not self.asks:
            self.record_host_first_delays(self.main, 1)
        return Schedule(starmap(Delay, self.delays.items()))

    def record_host_first_delays(self, me: HostThread, further: int) -> None:
        """Record a delay for each stream with a runnable operation: the operation waits for the thread's current step. Called
        instead of the strategy in a host-first run. ``further`` is added to the number of the step.
        """
        step = me.step - 1 + further
        if step >= 0 and self.options.record:
            after = ScheduleStep(me.label, step)
            for stream in self.streams:
                if stream.queue and can_run(stream.queue[0]):
                    self.delays[ScheduleStep(stream.label, stream.done)] = after

    def clear_decisions(self) -> None:
        """Clear recorded decisions, step indices and virtual time."""
        self.delays = {}
        self.seq = 0
        self.queries = False
        self.bases.clear()
        self.slow.clear()
        self._thread_count = 1
        if self.exchange is not None:
            self.exchange.start_over()
        self.main.step = self.main.refused = 0
        self.main.clock = 0.0
        if self.names is not None:
            self.names.clear()

    # -- turns ------------------------------------------------------------------------------------------------------

    def point(self, action: Action, machine: StreamMachine | None = None) -> None:
        """Let the strategy run steps of other actors before the calling thread carries out `action`."""
        me = self.local.thread or self.main
        if self.eager:
            self.run_all(None)
            me.step += 1
        elif self.asks:
            self.turns(me, action, None, "", machine)
        else:
            me.step += 1

    def turns(
        self,
        me: HostThread,
        action: Action,
        ready: Callable[[], bool] | None,
        what: str,
        machine: StreamMachine | None = None,
    ) -> None:
        """Run picked steps until the strategy picks `me`, a candidate once `ready` holds or `machine` is lost."""

        def wait() -> None:
            me.action, me.ready, me.machine, me.waits_for = action, ready, machine, what

        try:
            with self.operation_scope():
                self._take_turns(me, wait)
        except BaseException as error:
            # Every thread must end when one fails: the scheduler picks none of them again.
            self.diverged = self.diverged or error
            raise

    def count_refusal(self) -> None:
        """Count a query with a negative answer, and let another actor take a step after every `REFUSALS` of them.

        Otherwise a polling host would never end under a strategy that prefers it. The step is the oldest runnable
        operation, or another host thread's. A replay counts the same queries, so it takes the same step.
        """
        me = self.thread
        me.refused += 1
        if me.refused % REFUSALS:
            return
        if not self.asks:
            self.record_host_first_delays(me, 0)
        with self.lock, self.operation_scope():
            heads = [stream for stream in self.streams if stream.queue and can_run(stream.queue[0])]
            if heads:
                if self.options.late_copies:
                    heads = [stream for stream in heads if stream.queue[0].kind != OperationKind.COPY] or heads
                oldest = min(heads, key=age)
                oldest.machine.execute(oldest)
                return
            others = [thread for thread in self._candidates() if isinstance(thread, HostThread) and thread is not me]
        if others:
            steps = sum(thread.step for thread in self.threads if thread is not me)
            went_on: Callable[[], bool] = lambda: sum(t.step for t in self.threads if t is not me) > steps  # noqa: E731
            self.turns(me, Action("query"), went_on, "another thread")

    def _take_turns(self, me: HostThread, wait: Callable[[], None]) -> None:
        while True:
            with self.lock:
                wait()  # for each pick: unregistered threads share one actor
                candidates = self._candidates()
                if not candidates:
                    if self.exchange is not None and self.exchange.give_up_waiting():
                        continue
                    raise deadlock_error(self)
                pick = candidates[0] if len(candidates) == 1 and not self._sees_all else self._choose(candidates)
                if isinstance(pick, StreamQueue):
                    pick.machine.execute(pick)
                    continue
            if pick is not me:
                self._hand_over(me, pick)
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
        for machine in self.machines:
            for stream in machine.streams:
                queue = stream.queue
                if queue and can_run(queue[0]):
                    heads.append(stream)
        if len(heads) > 1:
            heads.sort(key=age)
        found: list[StreamQueue | HostThread] = list(heads)
        found.extend(
            thread
            for thread in self.threads
            if not thread.finished
            and (thread.ready is None or thread.ready() or (thread.machine is not None and thread.machine.lost is not None))
        )
        if self.slow and len(found) > 1:
            found = [actor for actor in found if actor not in self.slow] or found
        if self.options.late_copies and len(found) > 1:
            prompt = [a for a in found if not (isinstance(a, StreamQueue) and a.queue[0].kind == OperationKind.COPY)]
            found = prompt or found
        return found

    def _choose(self, candidates: list[StreamQueue | HostThread]) -> StreamQueue | HostThread:
        index = self.strategy.choose(candidates)
        pick = candidates[index]
        if index and self.options.record:
            after = ScheduleStep(pick.label, pick.step)
            for passed in candidates[:index]:
                self.delays[ScheduleStep(passed.label, passed.step)] = after
        return pick

    def run_all(self, only: StreamQueue | None) -> None:
        """Run operations in program order, for a single thread, until no operation can run."""
        with self.lock:
            if only is not None and only.queue and only.queue[0].kind < OperationKind.RECORD and len(only.queue) == 1:
                only.machine.execute(only)  # the common case; it can't unblock anything
                return
            with self.operation_scope():
                while heads := [stream for stream in self.streams if stream.queue and can_run(stream.queue[0])]:
                    stream = min(heads, key=age) if len(heads) > 1 else heads[0]
                    stream.machine.execute(stream)

    # -- host threads -----------------------------------------------------------------------------------------------

    def run_threads(self, *bodies: Callable[[], None]) -> None:
        """Run the callables as interleaved host threads and join them all.

        Raises the error of the thread that failed first.
        """
        self._failures.clear()
        threads = [self._spawn(body, getattr(body, "__name__", "")) for body in bodies]
        failed: BaseException | None = None
        for thread in threads:
            try:
                self._join(thread)
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            # The first failure may have left other threads waiting, so their errors are consequences.
            raise self._failures[0] if self._failures else failed

    def abort_threads(self) -> None:
        """End the threads that a failed run left parked: each raises an error at the point where it waits."""
        self.diverged = self.diverged or StreamOrderError("the run was given up")
        for thread in self.threads[1:]:
            if not thread.finished:
                thread.pass_baton()
            thread.os.join()
        self.main.baton = acquired_lock()
        self.threads = [self.main]

    def _spawn(self, fn: Callable[[], None], name: str) -> HostThread:
        """Start a host thread. It runs when the strategy picks it; each device's default stream is its current stream."""
        self.point(Action("spawn"))
        thread = HostThread(self._thread_count, name, [(machine, machine.default) for machine in self.machines])
        self._thread_count += 1
        thread.clock = self.thread.clock
        thread.saved = [each.save() for each in self.ambient]

        def body() -> None:
            thread.baton.acquire()
            self.local.thread = thread
            for machine, stream in thread.streams:
                machine.local.stream = stream
            self._restore(thread)
            thread.step += 1
            thread.ready = None
            if self.note is not None:
                self.note(thread.label, thread.step)
            try:
                if self.diverged is None:
                    fn()
            except BaseException as error:
                thread.error = error
                self._failures.append(error)
            thread.finished = True
            self._finish_thread(thread)

        # A daemon, so that a program that fails before joining can still end.
        thread.os = threading.Thread(target=body, name=f"outrider-sim {thread.label}", daemon=True)
        self.threads.append(thread)
        self.update_mode()
        thread.os.start()
        return thread

    def _join(self, thread: HostThread) -> None:
        """Block until `thread` has finished; raise the error that the thread raised, if any."""
        self.turns(self.thread, Action("join", thread), lambda: thread.finished, str(thread))
        thread.os.join()
        if thread in self.threads:
            self.threads.remove(thread)
        self.update_mode()
        if self.diverged is not None:
            raise self.diverged
        if thread.error is not None:
            raise thread.error

    def _finish_thread(self, thread: HostThread) -> None:
        """Give the baton of a finished thread to another. If no thread can continue, the first thread wakes up and raises."""
        try:
            if self.diverged is None:
                self.turns(thread, Action("exit"), None, "")
        except BaseException as error:
            self.diverged = error
        if self.diverged is not None:
            self.main.pass_baton()

    def _hand_over(self, me: HostThread, other: HostThread) -> None:
        """Give the baton to thread `other`. Returns when `me` gets the baton again, or at once if `me` has finished."""
        me.saved = [each.save() for each in self.ambient]
        other.pass_baton()
        if not me.finished:
            me.baton.acquire()
            self._restore(me)

    def _restore(self, thread: HostThread) -> None:
        for each, saved in zip(self.ambient, thread.saved, strict=False):
            each.restore(saved)


def deadlock_error(scheduler: HostScheduler) -> DeadlockError:
    """Return the error for a host on which no operation can run. It lists every wait."""
    lines = []
    for stream in scheduler.streams:
        if stream.queue:
            op = stream.queue[0]
            line = f" ({op.line})" if op.line else ""
            lines.append(f"stream {stream.label!r} is held at operation {stream.done}{line}: {reason(op)}")
    lines.extend(
        f"{thread} waits for {thread.waits_for}" for thread in scheduler.threads if not thread.finished and thread.ready
    )
    return DeadlockError("nothing that is queued can run:\n  " + "\n  ".join(lines))
