"""Vector clocks with epochs, and their actors: streams that may be held, host threads, and hand-overs between threads.

A clock maps the number of each actor to the last epoch of that actor which is known to have happened. An access keeps its
*epoch*, the entry of its own actor at that time. The access happened before every point whose clock has that entry or a
later one, so one comparison decides (the epochs of FastTrack). An actor opens a new epoch only when it accesses memory after
another actor has copied its clock. A record without a new access before it therefore adds no order, and the sanitizer
reports a wait for that record as redundant.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from outrider.device import Operation

if TYPE_CHECKING:
    from outrider_sanitizer.detector.synchronization import CapturedGraph

Clock = Mapping[int, int]
"""A vector clock: the last known epoch of each actor, by the actor's number. A clock is never changed in place, so a record
may keep it.
"""

NOTHING: Clock = {}


class Actor:
    """An actor, whose steps have an order: a stream, a branch of a graph, or a host thread."""

    __slots__ = ("clock", "handed", "host", "name", "number", "taken")

    def __init__(self, number: int, name: str, *, host: bool) -> None:
        self.number = number
        self.name = name
        self.host = host
        self.clock: Clock = NOTHING
        self.taken = True  # another actor may hold this clock, so the next access opens a new epoch
        self.handed = True  # another host thread may hold this clock, so the next launch opens a new epoch

    def open_epoch(self) -> None:
        """Begin a new epoch of this actor: no other actor's clock covers its next access."""
        clock = dict(self.clock)
        clock[self.number] = clock.get(self.number, 0) + 1
        self.clock = clock
        self.taken = self.handed = False

    def join(self, other: Clock) -> bool:
        """Merge the clock ``other`` into this actor's clock; return True if this clock has changed."""
        mine = self.clock
        new: dict[int, int] | None = None
        for number, epoch in other.items():
            if epoch > mine.get(number, 0):
                if new is None:
                    new = dict(mine)
                new[number] = epoch
        if new is None:
            return False
        self.clock = new
        return True

    def release(self) -> Clock:
        """Return this actor's current clock, for another actor to join later."""
        self.taken = True
        return self.clock

    def __repr__(self) -> str:
        return f"<Actor {self.name!r} {dict(self.clock)}>"


@dataclass(eq=False, slots=True)
class GraphReplay:
    """One replay of a graph, named by the points of its operations. ``step`` names its launch in schedules."""

    graph: str
    generation: int
    location: str
    step: tuple[str, int] | None = None


@dataclass(eq=False, slots=True)
class Point:
    """One operation, or one access of the host, with the clock of its actor at that time; all its accesses share it."""

    actor: Actor
    name: str
    location: str
    sequence: int
    operation: Operation | None = None
    replay: GraphReplay | None = None
    step: tuple[str, int] | None = None
    between: bool = False
    """True for a point that precedes ``step`` and is no step itself."""
    conflicts: bool = False
    """True if a conflict of this point with another access was reported."""
    number: int = field(init=False)
    clock: Clock = field(init=False)
    epoch: int = field(init=False)

    def __post_init__(self) -> None:
        actor = self.actor
        if actor.taken:
            actor.open_epoch()
        self.number = actor.number
        self.clock = actor.clock
        self.epoch = actor.clock[actor.number]

    def happened_before(self, other: Point) -> bool:
        """Return True if this point happened before ``other``."""
        return self.epoch <= other.clock.get(self.number, 0)


_MAX_TOKENS = 4096
_MAX_LAUNCH_EPOCHS = 4096

# The original method: in a watched run, a program's call of is_alive is reported as a synchronization.
THREAD_IS_ALIVE = threading.Thread.is_alive

Step = Callable[[], bool]
"""An enqueued step of a stream. The function runs the step, or returns False while it, or a step before it, waits
for a flag.
"""


class SingleUseToken:
    """A token that one host thread releases and exactly one other thread acquires.

    ``for_task``: any thread of a pool may acquire it, and the task knows nothing of that thread's earlier tasks.
    """

    __slots__ = ("for_task",)

    def __init__(self, *, for_task: bool = False) -> None:
        self.for_task = for_task


@dataclass(eq=False, slots=True)
class LaunchEpochs:
    """The launches of one host thread on one stream: each epoch of the thread in which it launched, with the stream's epoch
    at its first launch.
    """

    number: int
    thread: Actor
    threads: list[int] = field(default_factory=list)
    """Epochs of the thread in which it launched, ascending."""
    own: list[int] = field(default_factory=list)
    """The stream's epoch at the first launch of each of ``threads``."""

    def begin(self, epoch: int, own: int) -> bool:
        """Record the stream's epoch ``own`` at the first launch of the thread's ``epoch``, and return True. Return False for
        a further launch of this epoch.
        """
        if self.threads and self.threads[-1] == epoch:
            return False
        self.threads.append(epoch)
        self.own.append(own)
        if len(self.own) > _MAX_LAUNCH_EPOCHS:
            del self.threads[: _MAX_LAUNCH_EPOCHS // 2], self.own[: _MAX_LAUNCH_EPOCHS // 2]
        return True

    def last_known(self, epoch: int) -> int | None:
        """Return the stream's last epoch that the thread launched up to its ``epoch``, or None if that is every launch."""
        at = bisect_right(self.threads, epoch)
        return self.own[at] if at < len(self.own) else None


class StreamActor(Actor):
    """A stream as an actor whose steps may be held by a flag. Its operations have a number for each host thread that
    launches.
    """

    __slots__ = ("edges", "held", "launcher", "launches", "thread")

    def __init__(self, number: int, name: str) -> None:
        super().__init__(number, name, host=False)
        self.held: deque[Step] | None = None
        self.edges: dict[int, str] = {}  # the last wait that ordered this stream after an actor, for hints
        self.thread: Actor | None = None  # which launched last
        self.launcher: Clock = NOTHING  # the host clock that this stream joined last
        self.launches: dict[int, LaunchEpochs] = {}  # by the number of the host thread

    def launches_numbered(self, number: int) -> LaunchEpochs | None:
        """Return the launches of the host thread whose operations on this stream have actor number ``number``, or None."""
        return next((launches for launches in self.launches.values() if launches.number == number), None)


class _ThreadState(threading.local):
    """The detector's state of each host thread."""

    actor: Actor | None = None
    pool_start: Clock | None = None
    """For a thread of a pool: its clock before its first task."""
    capture: CapturedGraph | None = None
    """The graph that the thread captures."""
    allocation: tuple[int, Point] | None = None
    """The thread's last allocation: its storage and its point."""


class Actors:
    """The streams and host threads of one device. Not thread-safe: the caller holds a lock around each call."""

    def __init__(self, number: Callable[[], int] | None = None) -> None:
        """Create the actors. ``number`` returns actor numbers that are unique across devices whose clocks are joined."""
        self._number = number or itertools.count(1).__next__
        self.stream_actors: dict[str, StreamActor] = {}
        self.sequence = 0
        self._stamp: int | None = None  # sequence number of the running step, if it was held
        self._free_numbers: list[tuple[int, int]] = []
        self.local = _ThreadState()
        self._threads: list[tuple[ReferenceType[threading.Thread], Actor]] = []
        self._tokens: OrderedDict[int, tuple[object, Clock]] = OrderedDict()
        self._launches: dict[int, LaunchEpochs] = {}  # by their number
        self._hosts: set[int] = set()  # numbers of the host threads
        self._held: list[StreamActor] = []
        self._later: list[Callable[[], None]] = []

    # -- actors ----------------------------------------------------------------------------------------------------

    def stream_actor(self, name: str) -> StreamActor:
        """Return the actor of the stream ``name``; creates it on first use."""
        actor = self.stream_actors.get(name)
        if actor is None:
            actor = self.stream_actors[name] = StreamActor(self._number(), name)
        return actor

    def thread(self) -> Actor:
        """Return the actor of the calling host thread."""
        actor = self.local.actor
        if actor is None:
            actor = self.local.actor = self._new_thread(NOTHING)
        return actor

    def _new_thread(self, known: Clock) -> Actor:
        """Return the actor of the calling thread, which starts after the steps in ``known``."""
        alive = []
        for thread, actor in self._threads:
            found = thread()
            if not _is_alive(found):
                self._free_numbers.append((actor.number, actor.clock.get(actor.number, 0)))
            else:
                alive.append((thread, actor))
        self._threads = alive
        current = _current()
        # A new thread reuses the number of a finished thread that is ordered before it, so that clocks do not grow.
        free = next((at for at, (number, epoch) in enumerate(self._free_numbers) if epoch <= known.get(number, 0)), None)
        number = self._number() if free is None else self._free_numbers.pop(free)[0]
        new = Actor(number, f"host thread {current.name}", host=True)
        new.clock = known
        self._hosts.add(number)
        self._threads.append((ref(current), new))
        return new

    def settled(self) -> Clock:
        """Return a clock that every future operation comes after: the minimum of all live host threads' clocks."""
        if self._held:
            return NOTHING  # held steps were enqueued with an older clock
        clocks = [actor.clock for thread, actor in self._threads if _is_alive(thread())]
        if len(clocks) == 1:
            return clocks[0]
        first, *others = clocks or [NOTHING]
        return {n: min([epoch, *(clock.get(n, 0) for clock in others)]) for n, epoch in first.items()}

    def host_released(self, token: object) -> None:
        """Release the clock of the calling thread to ``token``."""
        known = self._tokens.get(id(token))
        thread = self.thread()
        thread.handed = True
        clock = thread.release()
        if known is not None:
            merged = dict(known[1])
            for number, epoch in clock.items():
                merged[number] = max(epoch, merged.get(number, 0))
            clock = merged
        self._tokens[id(token)] = (token, clock)
        self._tokens.move_to_end(id(token))
        if len(self._tokens) > _MAX_TOKENS:
            self._tokens.popitem(last=False)

    def host_acquired(self, token: object) -> None:
        """Join the clock that was released to ``token`` into the calling thread."""
        known = self._tokens.get(id(token))
        if known is not None:
            actor = self.local.actor
            if isinstance(token, SingleUseToken) and token.for_task:
                self._begin_task(actor, known[1])
            elif actor is None:
                self.local.actor = self._new_thread(known[1])
            self.thread().join(known[1])
            if isinstance(token, SingleUseToken):
                del self._tokens[id(token)]

    def _begin_task(self, before: Actor | None, known: Clock) -> None:
        """Give the calling thread of a pool a new actor. It is ordered after the thread's start and the submission ``known``
        of the task, and not after the thread's earlier tasks.
        """
        if self.local.pool_start is None:
            self.local.pool_start = NOTHING if before is None else before.clock
        if before is not None:
            self._threads = [(thread, actor) for thread, actor in self._threads if actor is not before]
            self._free_numbers.append((before.number, before.clock.get(before.number, 0)))
        self.local.actor = self._new_thread(known)
        self.local.actor.join(self.local.pool_start)

    # -- steps of streams --------------------------------------------------------------------------------------------

    def _launch_from(self, actor: StreamActor, thread: Actor, known: Clock | None = None) -> None:
        """Order the next operations of ``actor`` after the steps of ``thread`` that ``known``, by default its clock, has."""
        if thread.handed:
            thread.open_epoch()  # the threads that it handed over to know its launches up to here
        clock = thread.clock if known is None else known
        if actor.launcher is not clock or actor.thread is not thread:
            actor.join(clock)
            actor.launcher, actor.thread = clock, thread
            launches = actor.launches.get(thread.number)
            if launches is None:
                number = self._number() if actor.launches else actor.number
                launches = actor.launches[thread.number] = self._launches[number] = LaunchEpochs(number, thread)
            actor.taken = launches.begin(clock.get(thread.number, 0), actor.clock.get(launches.number, 0)) or actor.taken
            actor.taken = actor.taken or actor.number != launches.number
            actor.number = launches.number
        thread.taken = True

    def _ordered_launches(self, clock: Clock, thread: Actor, known: Clock) -> Clock:
        """Return the part of a stream's ``clock`` that was launched before a step of ``thread`` in every schedule.

        ``known`` is the clock of the thread at that step. A launch of another thread may come later in another schedule
        unless an order of the threads puts it before the step.
        """
        if all(launches.thread is thread for launches in self._launches.values()):
            return clock
        kept = {}
        for number, epoch in clock.items():
            launches = self._launches.get(number)
            if launches is None:
                if number not in self._hosts:  # of another rank: its threads are ordered by collectives alone
                    kept[number] = epoch
            elif launches.thread is thread:
                kept[number] = epoch
            else:
                last = launches.last_known(known.get(launches.thread.number, 0))
                kept[number] = epoch if last is None else min(epoch, last)
        return kept

    def _enqueue(self, actor: StreamActor, step: Step) -> None:
        """Run a step on the stream of ``actor`` now, or after the flag that holds the stream."""
        thread = self.thread()
        if actor.held is None:
            self._launch_from(actor, thread)
            if not step():
                actor.held = deque([self._as_of_now(step)])
                self._held.append(actor)
            return
        if thread.handed:
            thread.open_epoch()
        known = thread.release()
        stamped = self._as_of_now(step)

        def later() -> bool:
            self._launch_from(actor, thread, known)
            return stamped()

        actor.held.append(later)

    def _as_of_now(self, step: Step) -> Step:
        """Return a step that runs ``step`` later, with the sequence number that program order has now."""
        self.sequence += 1
        stamp = self.sequence

        def stamped() -> bool:
            before, self._stamp = self._stamp, stamp
            try:
                return step()
            finally:
                self._stamp = before

        return stamped

    def resume_held(self) -> None:
        """Run the held steps of all streams that have become possible."""
        progress = bool(self._held)
        while progress:
            progress = False
            for actor in list(self._held):
                held = actor.held
                while held and held[0]():
                    held.popleft()
                    progress = True
                if not held:
                    actor.held = None
                    self._held.remove(actor)
        if not self._held and self._later:
            later, self._later = self._later, []
            for action in later:
                action()

    def when_none_held(self, action: Callable[[], None]) -> None:
        """Call ``action`` after every step enqueued so far has run and no stream is held."""
        self._later.append(action)

    def new_point(self, actor: Actor, name: str, location: str = "", operation: Operation | None = None) -> Point:
        """Return the point of an actor's next step, next in program order; a held step keeps the place of its enqueueing."""
        if self._stamp is None:
            self.sequence += 1
        return Point(actor, name, location, self.now, operation)

    @property
    def now(self) -> int:
        """Return the sequence number of the program order that the running step sees."""
        return self.sequence if self._stamp is None else self._stamp

    def in_order(self, stream: str, action: Callable[[], None]) -> None:
        """Call ``action`` after every earlier step of the stream has been checked."""

        def step() -> bool:
            action()
            return True

        self._enqueue(self.stream_actor(stream), step)


def _current() -> threading.Thread:
    """Return the calling thread's object, also while the thread starts.

    Until a starting thread is registered, ``threading.current_thread`` would create a second object for it. An object that is
    collected during the start may already report to the sanitizer.
    """
    own = threading.get_ident()
    starting: dict[threading.Thread, threading.Thread] = getattr(threading, "_limbo", {})
    return next((thread for thread in list(starting) if thread.ident == own), None) or threading.current_thread()


def _is_alive(thread: threading.Thread | None) -> bool:
    return thread is not None and THREAD_IS_ALIVE(thread)
