"""The ordering detector: what is ordered before what, over streams, host threads, events, flags and graphs.

It takes the trace of enqueued work, in the order of the program, and needs no other order: a wait takes the generation
that was visible when it was enqueued, so what orders two operations doesn't depend on when the device ran them. One run
therefore stands for every schedule of the same trace. Flags are the exception, since a wait may be enqueued before its
set: a stream whose wait isn't satisfied yet is held, with all that follows on it, until the set has been seen.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import ReferenceType, WeakKeyDictionary, ref

from outrider.device import Access, Operation
from outrider.sanitizer.captured import Captured, Verb
from outrider.sanitizer.clocks import NOTHING, Actor, Clock, Point, Replay
from outrider.sanitizer.flags import FlagState
from outrider.sanitizer.intervals import IntervalMap, Record
from outrider.sanitizer.memory import Memory, Shadow
from outrider.sanitizer.places import here

if TYPE_CHECKING:
    from outrider.device import Event, Flag, Graph

HOST = "host"
_GENERATIONS = 16
_AWAITED = 4096

Step = Callable[[], bool]
"""Something enqueued on a stream; False while it has to wait for a flag, or for what waits for one."""


class Edge:
    """The last wait by which one actor learnt of another, for hints."""

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
        self.edges: dict[int, Edge] = {}


@dataclass
class Listener:
    """What the detector tells; every field may be left as it is."""

    conflict: Callable[[Record, Point, Access | None, Shadow], None] = lambda *_: None
    reused: Callable[[Shadow, Record, Point, str], None] = lambda *_: None
    stale: Callable[[str, Record | None, Point, Access, Shadow], None] = lambda *_: None
    read: Callable[[Point, Access, Shadow], None] | None = None
    flag: Callable[[str, str, Point | None, Point], None] = lambda *_: None
    rebind: Callable[[Record, Point, Access | None, str], None] = lambda *_: None
    waited: Callable[[Lane, str, int, str, bool], None] = lambda *_: None


@dataclass
class _EventState:
    name: str
    clocks: OrderedDict[int, Clock | None] = field(default_factory=OrderedDict)


class Ordering:
    """See the module. Not thread-safe: the caller holds a lock around each call."""

    def __init__(self, listener: Listener, *, rows_follow: bool = False) -> None:
        self.listener = listener
        self.rows_follow = rows_follow
        self.memory = Memory(listener.reused)
        self.lanes: dict[str, Lane] = {}
        self.sequence = 0
        self.blind: dict[str, int] = {}
        self._actors = 0
        self._free_numbers: list[tuple[int, int]] = []
        self._local = threading.local()
        self._threads: list[tuple[ReferenceType[threading.Thread], Actor]] = []
        self._events: WeakKeyDictionary[Event, _EventState] = WeakKeyDictionary()
        self._flags: WeakKeyDictionary[Flag, FlagState] = WeakKeyDictionary()
        self._graphs: WeakKeyDictionary[Graph, Captured] = WeakKeyDictionary()
        self._params: WeakKeyDictionary[Graph, IntervalMap] = WeakKeyDictionary()
        self._tokens: OrderedDict[int, tuple[object, Clock]] = OrderedDict()
        self._awaited: OrderedDict[int, deque[Point]] = OrderedDict()
        self._held: list[Lane] = []
        self._waiting_flag: dict[int, tuple[str, Point]] = {}

    # -- actors ----------------------------------------------------------------------------------------------------

    def _number(self) -> int:
        self._actors += 1
        return self._actors

    def lane(self, name: str) -> Lane:
        """The actor of a stream."""
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = Lane(self._number(), name)
        return lane

    def thread(self) -> Actor:
        """The actor of the calling host thread."""
        actor: Actor | None = getattr(self._local, "actor", None)
        if actor is None:
            actor = self._local.actor = self._new_thread()
        return actor

    def _new_thread(self) -> Actor:
        alive = []
        for thread, actor in self._threads:
            found = thread()
            if found is None or not found.is_alive():
                self._free_numbers.append((actor.number, actor.clock.get(actor.number, 0)))
            else:
                alive.append((thread, actor))
        self._threads = alive
        current = threading.current_thread()
        # A thread that is over leaves its number to a new one, so that clocks don't grow with every thread.
        number, epoch = self._free_numbers.pop() if self._free_numbers else (self._number(), 0)
        new = Actor(number, f"host thread {current.name}", host=True)
        if epoch:
            new.clock = {number: epoch}
        self._threads.append((ref(current), new))
        return new

    def host_released(self, token: object) -> None:
        """The calling thread hands over what it knows."""
        known = self._tokens.get(id(token))
        clock = self.thread().release()
        if known is not None:
            merged = dict(known[1])
            for number, epoch in clock.items():
                merged[number] = max(epoch, merged.get(number, 0))
            clock = merged
        self._tokens[id(token)] = (token, clock)
        self._tokens.move_to_end(id(token))
        if len(self._tokens) > _AWAITED:
            self._tokens.popitem(last=False)

    def host_acquired(self, token: object) -> None:
        """The calling thread takes over what was released."""
        known = self._tokens.get(id(token))
        if known is not None:
            self.thread().join(known[1])

    # -- steps of streams --------------------------------------------------------------------------------------------

    def _enqueue(self, lane: Lane, step: Step) -> None:
        """Take a step on ``lane``, now or when what it waits for has come."""
        thread = self.thread()
        if lane.held is None:
            lane.launched_by(thread)
            if not step():
                lane.held = deque([step])
                self._held.append(lane)
            return
        known = thread.release()

        def later() -> bool:
            lane.join(known)
            return step()

        lane.held.append(later)

    def _resume(self) -> None:
        """Take the steps that have become possible."""
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

    def _point(self, actor: Actor, name: str, location: str = "", operation: Operation | None = None) -> Point:
        self.sequence += 1
        return Point(actor, name, location, self.sequence, operation)

    # -- accesses ----------------------------------------------------------------------------------------------------

    def launched(self, operation: Operation) -> None:
        """An operation was enqueued."""
        capture: Captured | None = getattr(self._local, "capture", None)
        if capture is not None:
            capture.verbs.append(Verb("launch", operation.stream, operation))
            return
        lane = self.lanes.get(operation.stream) or self.lane(operation.stream)
        if lane.held is None:
            lane.launched_by(self.thread())
            self.sequence += 1
            point = Point(lane, operation.name, operation.location, self.sequence, operation)
            self._access(point, operation.accesses)
        else:
            self._enqueue(lane, lambda: self._launch(lane, operation))

    def _launch(self, lane: Lane, operation: Operation) -> bool:
        self._access(self._point(lane, operation.name, operation.location, operation), operation.accesses)
        return True

    def _access(self, point: Point, accesses: tuple[Access, ...] | list[Access]) -> None:
        awaited = False
        shadows = self.memory.shadows
        for access in accesses:
            if access.by_rows and self.rows_follow:
                awaited = True
                continue
            shadow = shadows.get(access.storage) or self.memory.shadow(access.storage)
            self.touch(point, access, shadow)
        if awaited:
            self._await_rows(point)

    def touch(self, point: Point, access: Access, shadow: Shadow, late: bool = False) -> None:
        """One access, against all that came before it."""
        listener = self.listener
        if listener.read is not None and not access.write:
            listener.read(point, access, shadow)
        shadow.history.touch(
            point,
            access,
            lambda old, new, how: listener.conflict(old, new, how, shadow),
            lambda why, origin, new, how: listener.stale(why, origin, new, how, shadow),
            late,
        )

    def _await_rows(self, point: Point) -> None:
        # By identity: a captured operation is the same object in every replay, and the point keeps it alive.
        key = id(point.operation)
        waiting = self._awaited.get(key)
        if waiting is None:
            waiting = self._awaited[key] = deque(maxlen=64)
            if len(self._awaited) > _AWAITED:
                self._awaited.popitem(last=False)
        waiting.append(point)

    def rows_touched(self, operation: Operation, accesses: tuple[Access, ...]) -> None:
        """The rows of an operation that was launched (or replayed) before."""
        key = id(operation)
        waiting = self._awaited.get(key)
        if not waiting:
            return
        point = waiting.popleft()
        if not waiting:
            del self._awaited[key]
        late = point.sequence != self.sequence
        for access in accesses:
            self.touch(point, access, self.memory.shadow(access.storage), late)

    def host_accessed(self, access: Access, location: str) -> None:
        """The calling thread touched pinned memory."""
        thread = self.thread()
        point = self._point(thread, "host write" if access.write else "host read", location)
        self.touch(point, access, self.memory.shadow(access.storage))

    def allocated(self, storage: int, nbytes: int, stream: str, location: str) -> None:
        """Memory was handed out in the order of a stream, or of the calling thread."""
        capture: Captured | None = getattr(self._local, "capture", None)
        if capture is not None and stream != HOST:
            capture.temporaries.add(storage)
            self.memory.allocate(storage, nbytes, stream, location, None, True)
            return
        if stream == HOST:
            self._allocate(self.thread(), storage, nbytes, stream, location)
            return
        lane = self.lane(stream)
        self._enqueue(lane, lambda: self._allocate(lane, storage, nbytes, stream, location))

    def _allocate(self, actor: Actor, storage: int, nbytes: int, stream: str, location: str) -> bool:
        point = self._point(actor, "allocation", location)
        self.memory.allocate(storage, nbytes, stream, location, point, False)
        self._local.allocation = (storage, point)
        return True

    def freed(self, storage: int, stream: str) -> None:
        """Memory went back to the order of a stream, or of the calling thread."""
        capture: Captured | None = getattr(self._local, "capture", None)
        if capture is not None and stream != HOST:
            return  # the addresses stay with the graph
        if stream == HOST:
            self.memory.free(storage, stream, self.thread(), here)
            return
        lane = self.lane(stream)

        def step() -> bool:
            self.memory.free(storage, stream, lane, here)
            return True

        self._enqueue(lane, step)

    def address_reused(self, storage: int, previous: int) -> None:
        """A new storage lies where an old one lay; told right after its allocation."""
        last: tuple[int, Point] | None = getattr(self._local, "allocation", None)
        self.memory.reuse(previous, last[1] if last is not None and last[0] == storage else None)

    # -- events ------------------------------------------------------------------------------------------------------

    def _event(self, event: Event) -> _EventState:
        state = self._events.get(event)
        if state is None:
            state = self._events[event] = _EventState(event.name)
        return state

    def recorded(self, stream: str, event: Event, generation: int) -> None:
        """A new generation covers what is enqueued on the stream so far."""
        capture: Captured | None = getattr(self._local, "capture", None)
        if capture is not None:
            capture.verbs.append(Verb("record", stream, event))
            return
        lane = self.lane(stream)
        state = self._event(event)
        state.clocks[generation] = None
        while len(state.clocks) > _GENERATIONS:
            state.clocks.popitem(last=False)

        def step() -> bool:
            state.clocks[generation] = lane.release()
            return True

        self._enqueue(lane, step)

    def waited(self, stream: str, event: Event, generation: int) -> None:
        """What follows on the stream comes after that generation."""
        capture: Captured | None = getattr(self._local, "capture", None)
        if capture is not None:
            capture.verbs.append(Verb("join" if generation else "wait", stream, (event, generation)))
            return
        lane = self.lane(stream)
        state = self._event(event)
        location = here()
        self._enqueue(lane, lambda: self._wait(lane, state, generation, location))

    def _wait(self, lane: Lane, state: _EventState, generation: int, location: str) -> bool:
        if generation not in state.clocks:
            return True
        clock = state.clocks[generation]
        if clock is None:
            return False
        new = lane.join(clock)
        edge = Edge(state.name, generation, location)
        for number in clock:
            lane.edges[number] = edge
        self.listener.waited(lane, state.name, generation, location, new)
        return True

    def event_synchronized(self, event: Event, generation: int) -> None:
        """The calling thread comes after that generation."""
        state = self._event(event)
        if state.clocks.get(generation, NOTHING) is None:
            self._force()
        clock = state.clocks.get(generation)
        if clock is not None:
            self.thread().join(clock)

    def event_queried(self, event: Event, generation: int, done: bool) -> None:
        """The calling thread comes after that generation, when it's over."""
        if done:
            self.event_synchronized(event, generation)

    def stream_synchronized(self, stream: str) -> None:
        """The calling thread comes after all that is enqueued on the stream."""
        lane = self.lane(stream)
        if lane.held is not None:
            self._force()
        self.thread().join(lane.release())

    def stream_queried(self, stream: str, done: bool) -> None:
        """The calling thread comes after the stream, when it's empty."""
        if done:
            self.stream_synchronized(stream)

    def device_synchronized(self) -> None:
        """The calling thread comes after every stream."""
        for stream in list(self.lanes):
            self.stream_synchronized(stream)

    # -- flags -------------------------------------------------------------------------------------------------------

    def _flag(self, flag: Flag) -> FlagState:
        state = self._flags.get(flag)
        if state is None:
            state = self._flags[flag] = FlagState()
        return state

    def flag_step(self, what: str, stream: str, flag: Flag) -> None:
        """A ``set``, ``await`` or ``reset`` was enqueued."""
        capture: Captured | None = getattr(self._local, "capture", None)
        if capture is not None:
            capture.verbs.append(Verb(what, stream, flag))
            return
        lane = self.lane(stream)
        location = here()
        self._enqueue(lane, lambda: self._flag_verb(what, lane, flag, location, None))
        if what == "set":
            self._resume()

    def _flag_verb(self, what: str, lane: Lane, flag: Flag, location: str, replay: Replay | None) -> bool:
        state = self._flag(flag)
        name = f"{'wait for' if what == 'await' else what} flag {flag.name!r}"
        if what == "await" and not state.up:
            if lane.number not in self._waiting_flag:
                self._waiting_flag[lane.number] = (flag.name, self._point(lane, name, location))
            return False
        if what == "await":
            self._waiting_flag.pop(lane.number, None)
            lane.join(state.clock)
        # A point of its own epoch: resets and sets are ordered against it.
        lane.taken = True
        point = self._point(lane, name, location)
        point.replay = replay
        if what == "await":
            state.wait(point)
        elif what == "set":
            wrong = state.set(point)
            if wrong is not None:
                self.listener.flag(wrong[0], flag.name, wrong[1], point)
        else:
            early = state.reset(point)
            if early is not None:
                self.listener.flag("early", flag.name, early, point)
        return True

    def _force(self) -> None:
        """The device got past a wait whose set we never saw: go on without it."""
        for lane in list(self._held):
            held = lane.held
            if held:
                held.popleft()
                self._waiting_flag.pop(lane.number, None)
        self._blind("a flag was raised outside the seam", 1)
        self._resume()

    def finish(self) -> None:
        """The run is over: what still waits for a flag would wait for ever."""
        self._resume()
        for name, point in self._waiting_flag.values():
            self.listener.flag("never", name, None, point)
        self._waiting_flag.clear()

    def _blind(self, what: str, count: int) -> None:
        self.blind[what] = self.blind.get(what, 0) + count

    # -- graphs ------------------------------------------------------------------------------------------------------

    @property
    def capturing(self) -> bool:
        """Whether the calling thread captures."""
        return getattr(self._local, "capture", None) is not None

    def capture_began(self, graph: Graph, stream: str) -> None:
        """What the calling thread enqueues from here belongs to ``graph``."""
        self._local.capture = self._graphs[graph] = Captured(stream)

    def capture_ended(self, graph: Graph, failed: bool) -> None:
        """The capture is over."""
        capture: Captured | None = getattr(self._local, "capture", None)
        self._local.capture = None
        if capture is None:
            return
        if failed:
            self._graphs.pop(graph, None)
            return
        capture.finish()

    def captured(self, graph: Graph) -> Captured | None:
        """What was captured, or None for a graph that runs eagerly."""
        return self._graphs.get(graph)

    def replayed(self, graph: Graph, stream: str, generation: int) -> None:
        """The accesses of ``graph`` happen again."""
        captured = self._graphs.get(graph)
        if captured is None:
            return
        lane = self.lane(stream)
        replay = Replay(graph.name, generation, here())
        captured.replays += 1
        if captured.summary is not None:
            summary = captured.summary

            def step() -> bool:
                self._read_params(graph, lane, replay)
                for operation, accesses in summary:
                    self._access(self._replay_point(lane, operation, replay), accesses)
                return True

            self._enqueue(lane, step)
            return
        walk = self._walk(graph, captured, lane, replay)
        self._enqueue(lane, lambda: next(walk, True))
        self._resume()

    def _replay_point(self, actor: Actor, operation: Operation, replay: Replay) -> Point:
        point = self._point(actor, operation.name, operation.location, operation)
        point.replay = replay
        return point

    def _read_params(self, graph: Graph, actor: Actor, replay: Replay) -> None:
        history = self._params.get(graph)
        if history is None:
            return
        point = self._point(actor, f"replay of graph {graph.name!r}", replay.location)
        point.replay = replay
        for at, name in enumerate(graph.context.params):
            access = Access(0, at, at + 1, False, argument=name)
            history.touch(
                point,
                access,
                lambda old, new, how: self.listener.rebind(old, new, how, graph.name),
                lambda *_: None,
            )

    def _walk(self, graph: Graph, captured: Captured, lane: Lane, replay: Replay) -> Generator[bool]:
        """The captured steps, one after the other; yields False while a flag holds the graph."""
        edges: dict[Event, Clock] = {}
        touched: dict[str, Actor] = {captured.main: lane}
        params_read = False

        def actor(branch: str) -> Actor:
            known = touched.get(branch)
            if known is None:
                known = captured.branches.get(branch)
                if known is None:
                    known = captured.branches[branch] = Lane(self._number(), f"{branch} in graph {graph.name}")
                touched[branch] = known
            return known

        if not captured.flags:
            self._read_params(graph, lane, replay)
            params_read = True
        for verb in captured.verbs:
            branch = actor(verb.branch)
            if verb.what == "launch":
                self._access(self._replay_point(branch, verb.subject, replay), verb.subject.accesses)
            elif verb.what == "record":
                edges[verb.subject] = branch.release()
            elif verb.what == "wait":
                branch.join(edges.get(verb.subject[0], NOTHING))
            elif verb.what == "join":
                state = self._event(verb.subject[0])
                while state.clocks.get(verb.subject[1], NOTHING) is None:
                    yield False
                branch.join(state.clocks.get(verb.subject[1]) or NOTHING)
            elif verb.what in ("set", "await", "reset"):
                assert isinstance(branch, Lane)
                while not self._flag_verb(verb.what, branch, verb.subject, replay.location, replay):
                    yield False
                if verb.what == "await" and not params_read:
                    # A parameter behind a flag is read by the operation that the flag holds.
                    self._read_params(graph, branch, replay)
                    params_read = True
        for branch in touched.values():
            if branch is not lane:
                lane.join(branch.release())
        yield True

    def params_updated(self, graph: Graph, stream: str, names: tuple[str, ...]) -> None:
        """Host parameters of a captured graph were rebound on a stream."""
        if graph not in self._graphs:
            return  # it runs eagerly and reads them on the host
        lane = self.lane(stream)
        location = here()
        history = self._params.get(graph)
        if history is None:
            history = self._params[graph] = IntervalMap()
        order = list(graph.context.params)

        def step() -> bool:
            point = self._point(lane, f"rebinding of graph {graph.name!r}", location)
            for name in names:
                access = Access(0, order.index(name), order.index(name) + 1, True, argument=name)
                history.touch(
                    point,
                    access,
                    lambda old, new, how: self.listener.rebind(old, new, how, graph.name),
                    lambda *_: None,
                )
            return True

        self._enqueue(lane, step)
