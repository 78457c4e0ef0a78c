"""The ordering detector: the order of operations over streams, host threads, events, flags and graphs.

Its input is the trace of enqueued operations in program order. A wait takes the generation that was visible when it was
enqueued, so the order of two operations does not depend on when the device ran them. One run therefore covers every schedule
of the same trace. Flags are the exception, since a wait may be enqueued before its set: a stream whose wait has no set yet is
held, with all later operations on it, until the set is enqueued.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from outrider.device import Access, Operation
from outrider_sanitizer.detector.actors import NOTHING, Actor, Actors, Clock, GraphReplay, Point, StreamActor
from outrider_sanitizer.detector.intervals import UNKNOWN_END, IntervalMap, Listener, StaleMark
from outrider_sanitizer.detector.memory import Shadow, ShadowMemory
from outrider_sanitizer.detector.ranks import RankClocks, WatchedCollectivePart
from outrider_sanitizer.detector.synchronization import (
    HOST,
    REMAPPED,
    TWO_WRITERS,
    CapturedGraph,
    CapturedStep,
    EventRecords,
    FlagProgress,
)
from outrider_sanitizer.report import caller_location

if TYPE_CHECKING:
    from outrider.device import Collective, Event, Flag, Graph, Group

_MAX_AWAITED = 4096


class Ordering(Actors):
    """The ordering detector: the order of operations on streams and host threads. Inside a capture, operations are recorded
    for the replays. Not thread-safe: the caller holds a lock around each call.
    """

    def __init__(self, listener: Listener, *, rows_follow: bool = False, ranks: RankClocks | None = None) -> None:
        super().__init__(ranks.number if ranks is not None else None)
        self.ranks = ranks
        if ranks is not None:
            ranks.orderings.append(self)
        self.listener = listener
        listener.settled = self.settled
        self.rows_follow = rows_follow
        self.steps = listener.steps
        self.memory = ShadowMemory(listener.reused, strict=rows_follow)
        if ranks is not None and rows_follow:  # such devices number their memory in one sequence, and ranks may read it
            self.memory.shadows = ranks.shadows
        self.flags_set_outside = 0
        """Number of flags that were set outside the backend interface."""
        self._events: WeakKeyDictionary[Event, EventRecords] = WeakKeyDictionary()
        self._flags: WeakKeyDictionary[Flag, FlagProgress] = WeakKeyDictionary()
        self._users: dict[int, WeakSet[CapturedGraph]] = {}
        self._awaited: OrderedDict[int, deque[Point]] = OrderedDict()
        self._lost: set[str] = set()
        self._last = 0  # sequence number of the last operation, host access or wait of a host thread
        self._pooled: set[int] = set()  # storages from the pools of graphs, whose addresses later captures alone reuse
        self._waiting_flag: dict[StreamActor, tuple[str, Point]] = {}
        self._graphs: WeakKeyDictionary[Graph, CapturedGraph] = WeakKeyDictionary()
        self._params: WeakKeyDictionary[Graph, IntervalMap] = WeakKeyDictionary()
        self._params_sink = Listener(conflict=lambda old, new, how, graph: listener.rebind(old, new, how, str(graph)))

    # -- accesses ----------------------------------------------------------------------------------------------------

    def launched(self, operation: Operation) -> None:
        """Check the accesses of an operation that was enqueued on a stream."""
        capture = self.local.capture
        if capture is not None:
            capture.steps.append(CapturedStep("launch", operation.stream, operation))
            return
        actor = self.stream_actor(operation.stream)
        self._enqueue(actor, lambda: self._launch(actor, operation))

    def _launch(self, actor: StreamActor, operation: Operation) -> bool:
        self._access(self.new_point(actor, operation.name, operation.location, operation), operation.accesses)
        self._last = self.sequence
        return True

    def _access(self, point: Point, accesses: tuple[Access, ...] | list[Access]) -> None:
        awaited = False
        for access in accesses:
            if access.by_rows and self.rows_follow:
                awaited = True
                if access.write:
                    self.memory.shadow(access.storage).promised += 1
                continue
            self.touch(point, access, self.memory.shadow(access.storage))
        if awaited:
            self._await_rows(point)

    def touch(self, point: Point, access: Access, shadow: Shadow, late: bool = False) -> None:
        """Check one access against all earlier accesses to the storage."""
        listener = self.listener
        if listener.read is not None and not access.write:
            listener.read(point, access, shadow)
        shadow.touch(point, access, listener, late)

    def _await_rows(self, point: Point) -> None:
        # By identity: a captured operation is the same object in every replay, and the point keeps it alive.
        key = id(point.operation)
        waiting = self._awaited.get(key)
        if waiting is None:
            waiting = self._awaited[key] = deque(maxlen=64)
            if len(self._awaited) > _MAX_AWAITED:
                self._awaited.popitem(last=False)
        waiting.append(point)

    def rows_touched(self, operation: Operation, accesses: tuple[Access, ...]) -> None:
        """Check the rows that an earlier launch or replay has reported."""
        key = id(operation)
        waiting = self._awaited.get(key)
        if not waiting:
            return
        point = waiting.popleft()
        if not waiting:
            del self._awaited[key]
        for access in operation.accesses:
            if access.by_rows and access.write:
                self.memory.shadow(access.storage).promised -= 1
        # Later operations of the same replay may already be checked: temporaries of a graph share memory.
        late = point.sequence != self.sequence or point.epoch != point.actor.clock[point.number]
        for access in accesses:
            shadow = self.memory.shadow(access.storage)
            if access.contested:
                shadow.mark_stale(access.start, access.end, StaleMark(TWO_WRITERS, (point, access), point.sequence))
            else:
                self.touch(point, access, shadow, late)

    def host_accessed(self, access: Access, location: str) -> None:
        """Check an access of the calling thread to pinned memory."""
        thread = self.thread()
        point = self.new_point(thread, "host write" if access.write else "host read", location)
        step = self.steps(HOST)
        point.step = (step[0], step[1] - 1) if step is not None else None
        self.touch(point, access, self.memory.shadow(access.storage))
        self._last = self.sequence

    def memory_remapped(self, storage: int, location: str) -> None:
        """Check that every access is ordered before the host's remapping; the new pages were never written.

        A collective that a graph captured uses the pages that it registered, so its next replay is a finding.
        """
        shadow = self.memory.shadow(storage)
        point = self.new_point(self.thread(), "remapping of memory", location)
        self.touch(point, Access(storage, 0, shadow.nbytes or UNKNOWN_END, True, argument="pages"), shadow)
        shadow.mark_stale(0, shadow.nbytes or UNKNOWN_END, StaleMark(REMAPPED, (point, None), point.sequence))
        for captured in self._users.get(storage, ()):
            if captured.has_collective(storage):
                captured.dead[storage] = (shadow, location)

    def allocated(self, storage: int, nbytes: int, stream: str, location: str) -> None:
        """Record an allocation in the order of a stream, or of the calling thread."""
        capture = self.local.capture
        if capture is not None and stream != HOST:
            capture.temporaries.add(storage)
            self._pooled.add(storage)
            self.memory.allocate(storage, nbytes, stream, location, None, True)
            return
        if stream == HOST:
            self._allocate(self.thread(), storage, nbytes, stream, location)
            return
        actor = self.stream_actor(stream)
        self._enqueue(actor, lambda: self._allocate(actor, storage, nbytes, stream, location))

    def _allocate(self, actor: Actor, storage: int, nbytes: int, stream: str, location: str) -> bool:
        point = self.new_point(actor, "allocation", location)
        if self.memory.waits_for(stream):
            point.step = self.steps(stream)  # the next step there is the first that can use the memory
        self.memory.allocate(storage, nbytes, stream, location, point, False)
        self.local.allocation = (storage, point)
        return True

    def freed(self, storage: int, stream: str) -> None:
        """Record a release in the order of a stream, or of the calling thread."""
        capture = self.local.capture
        if (capture is not None and stream != HOST) or storage in self._pooled:
            self._pooled.discard(storage)
            return  # the addresses stay with the graph's pool
        users = self._users.pop(storage, None) if self._users else None
        shadow = self.memory.shadows.get(storage) if users else None
        if users and shadow is not None:
            location = caller_location()
            for captured in users:
                captured.dead[storage] = (shadow, location)
        if stream == HOST:
            self.memory.free(storage, stream, self.thread(), self._release)
            return
        actor, location = self.stream_actor(stream), caller_location() if self._held else ""
        self._enqueue(actor, lambda: self._free(actor, storage, location))

    def _free(self, actor: StreamActor, storage: int, location: str) -> bool:
        """Release memory in the order of a stream: after the accesses before it, which held streams have yet to check."""
        then = actor.release() if self._held else None
        free = partial(self.memory.free, storage, actor.name, actor, lambda by: self._release(by, location), then)
        if self._held:
            self.when_none_held(free)
        else:
            free()
        return True

    def _release(self, releaser: Actor, location: str = "") -> Point:
        return self.new_point(releaser, "release of memory", location or caller_location())

    def address_reused(self, storage: int, previous: int) -> None:
        """Check a new storage at the address of an old one; called right after its allocation."""
        capture = self.local.capture
        if capture is not None and storage in capture.temporaries:
            self.memory.same_place(storage, previous)
            return
        last = self.local.allocation
        self.memory.reuse(previous, last[1] if last is not None and last[0] == storage else None)

    # -- collectives -------------------------------------------------------------------------------------------------

    def collective(self, stream: str, group: Group, call: Collective, accesses: tuple[Access, ...]) -> None:
        """Enqueue a rank's part of a collective."""
        location = caller_location()
        capture = self.local.capture
        if capture is not None:
            capture.steps.append(CapturedStep("collective", stream, (group, call, accesses, location)))
            return
        assert self.ranks is not None
        actor = self.stream_actor(stream)
        part = self.ranks.issue(group, call, in_graph=False, location=location)
        step = self.steps(stream)
        self._enqueue(actor, lambda: self._arrive(actor, group, part, accesses, step))
        self._enqueue(actor, lambda: self._join_collective(actor, group, part))
        self.ranks.resume()

    def _arrive(
        self,
        actor: Actor,
        group: Group,
        part: WatchedCollectivePart,
        accesses: tuple[Access, ...],
        step: tuple[str, int] | None,
        replay: GraphReplay | None = None,
    ) -> bool:
        """Begin a rank's part of a collective: release the stream's clock for the other ranks, then check the accesses of the
        part.
        """
        assert self.ranks is not None
        part.clock = actor.release()
        point = self.new_point(actor, part.call.kind, part.location)
        point.step, point.replay = step, replay
        self._access(point, accesses)
        self.ranks.arrived(group, part, point)
        return True

    def _join_collective(self, actor: Actor, group: Group, part: WatchedCollectivePart) -> bool:
        """Join the clocks that a rank's ``part`` of a collective waits for into the stream's clock. Return False while
        another rank's part is missing.
        """
        assert self.ranks is not None
        if not part.ready:
            return False
        for clock in part.clocks():
            actor.join(clock)
        self.ranks.passed(part, group)
        return True

    # -- events ------------------------------------------------------------------------------------------------------

    def _event(self, event: Event) -> EventRecords:
        state = self._events.get(event)
        if state is None:
            state = self._events[event] = EventRecords(event.name)
        return state

    def recorded(self, stream: str, event: Event, generation: int) -> None:
        """Record a new generation of an event, which covers the operations enqueued on the stream so far."""
        capture = self.local.capture
        if capture is not None:
            capture.steps.append(CapturedStep("record", stream, event))
            return
        actor, thread = self.stream_actor(stream), self.thread()
        state = self._event(event)
        state.add(generation, self.new_point(thread, "record"))
        known = thread.clock

        def step() -> bool:
            if generation in state.hosts:
                state.clocks[generation] = self._ordered_launches(actor.release(), thread, known)
            return True

        self._enqueue(actor, step)

    def waited(self, stream: str, event: Event, generation: int) -> None:
        """Order the next operations of ``stream`` after that generation of the event."""
        capture = self.local.capture
        if capture is not None:
            capture.steps.append(CapturedStep("join" if generation else "wait", stream, (event, generation)))
            return
        actor = self.stream_actor(stream)
        state = self._event(event)
        location = caller_location()
        generation = state.covered(generation, self.thread())
        self._enqueue(actor, lambda: self._wait(actor, state, generation, location))

    def _wait(self, actor: StreamActor, state: EventRecords, generation: int, location: str) -> bool:
        if generation not in state.hosts:
            return True
        if state.is_pending(generation):
            return False
        clock = state.clock_of(generation)
        new = actor.join(clock)
        edge = f"generation {generation} of event {state.name!r} at {location}"
        actor.edges.update(dict.fromkeys(clock, edge))
        self.listener.waited(actor.name, state.name, generation, location, new)
        return True

    def event_synchronized(self, event: Event, generation: int) -> None:
        """Order the calling thread after that generation of the event."""
        state = self._event(event)
        generation = state.covered(generation, self.thread())
        if state.is_pending(generation):
            self._continue_held_streams()
        self.thread().join(state.clock_of(generation))

    def stream_synchronized(self, stream: str) -> None:
        """Order the calling thread after all operations enqueued on the stream."""
        actor = self.stream_actor(stream)
        if actor.held is not None:
            self._continue_held_streams()
        thread = self.thread()
        thread.join(self._ordered_launches(actor.release(), thread, thread.clock))
        self._last = self.sequence

    def device_synchronized(self) -> None:
        """Order the calling thread after every stream."""
        for stream in list(self.stream_actors):
            self.stream_synchronized(stream)

    # -- flags -------------------------------------------------------------------------------------------------------

    def _flag(self, flag: Flag) -> FlagProgress:
        state = self._flags.get(flag)
        if state is None:
            state = self._flags[flag] = FlagProgress()
        return state

    def flag_step(self, what: str, stream: str, flag: Flag) -> None:
        """Enqueue a ``set``, ``await`` or ``reset`` of a flag."""
        capture = self.local.capture
        if capture is not None:
            capture.steps.append(CapturedStep(what, stream, flag))
            return
        actor = self.stream_actor(stream)
        location = caller_location()
        self._enqueue(actor, lambda: self._run_flag_step(what, actor, flag, location, None))
        if what == "set":
            self.resume_all()

    def _run_flag_step(self, what: str, actor: StreamActor, flag: Flag, location: str, replay: GraphReplay | None) -> bool:
        state = self._flag(flag)
        name = f"{'wait for' if what == 'await' else what} flag {flag.name!r}"
        if what == "await" and not state.is_set:
            if actor not in self._waiting_flag:
                self._waiting_flag[actor] = (flag.name, self.new_point(actor, name, location))
            return False
        if what == "await":
            self._waiting_flag.pop(actor, None)
            actor.join(state.clock)
        # A point of its own epoch: resets and sets are ordered against it.
        actor.taken = True
        point = self.new_point(actor, name, location)
        point.replay = replay
        if what == "await":
            state.wait(point)
        elif what == "set":
            wrong = state.set(point)
            if wrong is not None:
                self._lost.add(flag.name)
                self.listener.flag(wrong[0], flag.name, wrong[1], point)
        else:
            early = state.reset(point)
            if early is not None:
                self.listener.flag("early reset", flag.name, early, point)
        return True

    def _continue_held_streams(self) -> None:
        """Continue every stream that is held at a flag: the device has passed the wait, so the flag was set outside the
        watched calls.
        """
        if self.ranks is not None:
            self.ranks.passed_without()
        for actor in list(self._held):
            held = actor.held
            if held:
                held.popleft()
                self._waiting_flag.pop(actor, None)
        if self.ranks is None or not self.ranks.broken:
            self.flags_set_outside += 1
        self.resume_all()

    # -- graphs ------------------------------------------------------------------------------------------------------

    def capture_began(self, graph: Graph, stream: str) -> None:
        """Add the next operations of the calling thread to ``graph``."""
        self.local.capture = self._graphs[graph] = CapturedGraph(stream)

    def capture_ended(self, graph: Graph, failed: bool) -> None:
        """End the capture of the calling thread; a failed capture drops the graph."""
        capture = self.local.capture
        self.local.capture = None
        if capture is None:
            return
        if failed:
            self._graphs.pop(graph, None)
            return
        capture.finish()
        for storage in capture.outside():
            self._users.setdefault(storage, WeakSet()).add(capture)

    def replayed(self, graph: Graph, stream: str, generation: int) -> None:
        """Repeat the accesses of ``graph`` on ``stream``."""
        captured = self._graphs.get(graph)
        if captured is None:
            return
        actor = self.stream_actor(stream)
        replay = GraphReplay(graph.name, generation, caller_location(), self.steps(stream))
        if captured.dead:
            self._enqueue(actor, lambda: self._use_dead(captured, actor, replay))
        if captured.summary is not None:
            summary = captured.summary

            def step() -> bool:
                self._read_params(graph, actor, replay)
                for operation, accesses in summary:
                    self._access(self._replay_point(actor, operation, replay), accesses)
                return True

            self._enqueue(actor, step)
            return
        walk = self._walk(graph, captured, actor, replay, self._issue(captured), self.thread())
        self._enqueue(actor, lambda: next(walk, True))
        self.resume_all()

    def _use_dead(self, captured: CapturedGraph, actor: StreamActor, replay: GraphReplay) -> bool:
        point = self.new_point(actor, f"replay of graph {replay.graph!r}", replay.location)
        for shadow, freed in captured.dead.values():
            self.listener.dead(shadow, point, freed)
        return True

    def _replay_point(self, actor: Actor, operation: Operation, replay: GraphReplay) -> Point:
        point = self.new_point(actor, operation.name, operation.location, operation)
        point.replay = replay
        return point

    def _param_history(self, graph: Graph) -> IntervalMap:
        history = self._params.get(graph)
        if history is None:
            history = self._params[graph] = IntervalMap(owner=graph.name)
        return history

    def _read_params(self, graph: Graph, actor: Actor, replay: GraphReplay) -> None:
        if not graph.context.params:
            return
        history = self._param_history(graph)
        point = self.new_point(actor, f"replay of graph {graph.name!r}", replay.location)
        point.replay = replay
        for at, name in enumerate(graph.context.params):
            history.touch(point, Access(0, at, at + 1, False, argument=name), self._params_sink)

    def _issue(self, captured: CapturedGraph) -> Iterator[WatchedCollectivePart]:
        """Issue the captured collectives of a graph, in order, when a replay is enqueued."""
        parts = []
        for step in captured.steps:
            if step.what == "collective":
                assert self.ranks is not None
                group, call, _, location = step.subject
                parts.append(self.ranks.issue(group, call, in_graph=True, location=location))
        return iter(parts)

    def _walk(
        self,
        graph: Graph,
        captured: CapturedGraph,
        actor: StreamActor,
        replay: GraphReplay,
        parts: Iterator[WatchedCollectivePart],
        thread: Actor,
    ) -> Generator[bool]:
        """Run a replay's captured steps one after the other; yields False while a flag holds the graph."""
        edges: dict[Event, Clock] = {}
        touched: dict[str, StreamActor] = {captured.main: actor}
        params_read = False

        def actor_of(branch: str) -> StreamActor:
            known = touched.get(branch)
            if known is None:
                known = captured.branches.get(branch)
                if known is None:
                    known = captured.branches[branch] = StreamActor(self._number(), f"{branch} in graph {graph.name}")
                touched[branch] = known
                self._launch_from(known, thread, actor.launcher)
            return known

        if not captured.waits_for_flags:
            self._read_params(graph, actor, replay)
            params_read = True
        for step in captured.steps:
            branch = actor_of(step.branch)
            if step.what == "collective":
                part = next(parts)
                self._arrive(branch, step.subject[0], part, step.subject[2], None, replay)
                run = partial(self._join_collective, branch, step.subject[0], part)
            else:
                run = partial(self._run_captured_step, step, branch, edges, replay)
            while not run():
                yield False
            if step.what == "await" and not params_read:
                # The operation that the flag holds reads the parameters.
                self._read_params(graph, branch, replay)
                params_read = True
        for branch in touched.values():
            if branch is not actor:
                actor.join(branch.release())
        yield True

    def _run_captured_step(
        self, step: CapturedStep, branch: StreamActor, edges: dict[Event, Clock], replay: GraphReplay
    ) -> bool:
        """Run a captured step other than a collective. Return False, without effect, while an event or a flag holds it."""
        if step.what == "launch":
            self._access(self._replay_point(branch, step.subject, replay), step.subject.accesses)
        elif step.what == "record":
            edges[step.subject] = branch.release()
        elif step.what == "wait":
            branch.join(edges.get(step.subject[0], NOTHING))
        elif step.what == "join":
            state = self._event(step.subject[0])
            if state.is_pending(step.subject[1]):
                return False
            branch.join(state.clock_of(step.subject[1]))
        elif step.what in ("set", "await", "reset"):
            return self._run_flag_step(step.what, branch, step.subject, replay.location, replay)
        return True

    def params_updated(self, graph: Graph, stream: str, names: tuple[str, ...]) -> None:
        """Record that host parameters of a captured graph were rebound on a stream."""
        if graph not in self._graphs:
            return  # it runs eagerly and reads them on the host
        actor = self.stream_actor(stream)
        location = caller_location()
        after = self.steps(stream)  # it was enqueued before it is told, in however many steps
        history = self._param_history(graph)
        order = list(graph.context.params)

        def step() -> bool:
            point = self.new_point(actor, f"rebinding of graph {graph.name!r}", location)
            point.step, point.between = after, True
            for name in names:
                at = order.index(name)
                history.touch(point, Access(0, at, at + 1, True, argument=name), self._params_sink)
            return True

        self._enqueue(actor, step)

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Report the steps that still wait for a flag at the end of the run."""
        self.resume_all()
        for name, point in self._waiting_flag.values():
            if name not in self._lost:  # else it's the consequence of what was told
                self.listener.flag("never set", name, None, point)
        self._waiting_flag.clear()
        self.memory.finish(self._last)

    def resume_all(self) -> None:
        """Run the held steps that have become possible, on other ranks, too."""
        if self.ranks is not None:
            self.ranks.resume()
        self.resume_held()
