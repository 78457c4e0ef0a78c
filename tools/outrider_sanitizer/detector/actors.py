"""Actors and their steps: streams that may be held, host threads, and hand-overs between threads."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from weakref import ReferenceType, ref

from outrider.device import Operation
from outrider_sanitizer.detector.clocks import NOTHING, Actor, Clock, Point

_MAX_TOKENS = 4096

# The original method: in a watched run, a program's call of is_alive is reported as a synchronization.
_ALIVE = threading.Thread.is_alive

Step = Callable[[], bool]
"""An enqueued step of a stream; returns False while the step, or a step before it, waits for a flag."""


class SingleUseToken:
    """A token that one host thread releases and exactly one other thread acquires."""

    __slots__ = ()


class LastWait:
    """The last wait that ordered one actor after another, for the hints of a finding."""

    __slots__ = ("event", "generation", "location")

    def __init__(self, event: str, generation: int, location: str) -> None:
        self.event = event
        self.generation = generation
        self.location = location


class Lane(Actor):
    """A stream: an actor whose steps may be held."""

    __slots__ = ("edges", "held")

    def __init__(self, number: int, name: str) -> None:
        super().__init__(number, name, host=False)
        self.held: deque[Step] | None = None
        self.edges: dict[int, LastWait] = {}


class Lanes:
    """The actors of one device. Not thread-safe: the caller holds a lock around each call."""

    def __init__(self, number: Callable[[], int] | None = None) -> None:
        """Create the actors. ``number`` returns actor numbers that are unique across devices whose clocks are joined."""
        self._number = number or itertools.count(1).__next__
        self.lanes: dict[str, Lane] = {}
        self.sequence = 0
        self._stamp: int | None = None  # sequence number of the running step, if it was held
        self._free_numbers: list[tuple[int, int]] = []
        self._local = threading.local()
        self._threads: list[tuple[ReferenceType[threading.Thread], Actor]] = []
        self._tokens: OrderedDict[int, tuple[object, Clock]] = OrderedDict()
        self._held: list[Lane] = []
        self._later: list[Callable[[], None]] = []

    # -- actors ----------------------------------------------------------------------------------------------------

    def lane(self, name: str) -> Lane:
        """Return the actor of the stream ``name``; creates it on first use."""
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = Lane(self._number(), name)
        return lane

    def thread(self) -> Actor:
        """Return the actor of the calling host thread."""
        actor: Actor | None = getattr(self._local, "actor", None)
        if actor is None:
            actor = self._local.actor = self._new_thread(NOTHING)
        return actor

    def _new_thread(self, known: Clock) -> Actor:
        """Return the actor of the calling thread, which starts after the steps in ``known``."""
        alive = []
        for thread, actor in self._threads:
            found = thread()
            if not _lives(found):
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
        self._threads.append((ref(current), new))
        return new

    def settled(self) -> Clock:
        """Return a clock that every future operation comes after: the minimum of all live host threads' clocks."""
        if self._held:
            return NOTHING  # held steps were enqueued with an older clock
        clocks = [actor.clock for thread, actor in self._threads if _lives(thread())]
        if len(clocks) == 1:
            return clocks[0]
        first, *others = clocks or [NOTHING]
        return {n: min([epoch, *(clock.get(n, 0) for clock in others)]) for n, epoch in first.items()}

    def host_released(self, token: object) -> None:
        """Release the clock of the calling thread to ``token``."""
        known = self._tokens.get(id(token))
        clock = self.thread().release()
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
            if getattr(self._local, "actor", None) is None:
                self._local.actor = self._new_thread(known[1])
            self.thread().join(known[1])
            if isinstance(token, SingleUseToken):
                del self._tokens[id(token)]

    # -- steps of streams --------------------------------------------------------------------------------------------

    def _enqueue(self, lane: Lane, step: Step) -> None:
        """Run a step on ``lane`` now, or after the flag that holds the lane."""
        thread = self.thread()
        if lane.held is None:
            lane.launched_by(thread)
            if not step():
                lane.held = deque([self._as_of_now(step)])
                self._held.append(lane)
            return
        known = thread.release()
        stamped = self._as_of_now(step)

        def later() -> bool:
            lane.join(known)
            return stamped()

        lane.held.append(later)

    def _as_of_now(self, step: Step) -> Step:
        """Return the step bound to its current place in program order, to run later."""
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
        """Run the held steps of all lanes that have become possible."""
        progress = bool(self._held)
        while progress:
            progress = False
            for lane in list(self._held):
                held = lane.held
                while held and held[0]():
                    held.popleft()
                    progress = True
                if not held:
                    lane.held = None
                    self._held.remove(lane)
        if not self._held and self._later:
            later, self._later = self._later, []
            for action in later:
                action()

    def when_none_held(self, action: Callable[[], None]) -> None:
        """Call ``action`` after every step enqueued so far has run and no stream is held."""
        self._later.append(action)

    def _point(self, actor: Actor, name: str, location: str = "", operation: Operation | None = None) -> Point:
        return Point(actor, name, location, self.place(), operation)

    @property
    def now(self) -> int:
        """Return the sequence number of the program order that the running step sees."""
        return self.sequence if self._stamp is None else self._stamp

    def in_order(self, stream: str, action: Callable[[], None]) -> None:
        """Call ``action`` after every earlier step of the stream has been checked."""

        def step() -> bool:
            action()
            return True

        self._enqueue(self.lane(stream), step)

    def place(self) -> int:
        """Return the next sequence number in program order; a held step keeps the number of its enqueueing."""
        if self._stamp is None:
            self.sequence += 1
            return self.sequence
        return self._stamp


def _current() -> threading.Thread:
    """Return the calling thread's object, also while the thread starts.

    Until a starting thread is registered, ``threading.current_thread`` would create a second object for it. An object that is
    collected during the start may already report to the sanitizer.
    """
    own = threading.get_ident()
    starting: dict[threading.Thread, threading.Thread] = getattr(threading, "_limbo", {})
    return next((thread for thread in list(starting) if thread.ident == own), None) or threading.current_thread()


def _lives(thread: threading.Thread | None) -> bool:
    return thread is not None and _ALIVE(thread)
