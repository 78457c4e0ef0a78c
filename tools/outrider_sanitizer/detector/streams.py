"""The part of the ordering detector for accesses, events and flags outside graphs, and the record of a captured graph."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from outrider.device import Access, Operation
from outrider_sanitizer.detector.actors import NOTHING, Actor, Actors, Clock, GraphReplay, LastWait, Point, StreamActor
from outrider_sanitizer.detector.intervals import UNKNOWN_END, Listener, StaleMark
from outrider_sanitizer.detector.memory import Shadow, ShadowMemory
from outrider_sanitizer.detector.ranks import RankClocks, WatchedCollectivePart
from outrider_sanitizer.report import caller_location

if TYPE_CHECKING:
    from outrider.device import Collective, Event, Flag, Group


class CapturedStep(NamedTuple):
    """One captured step on a branch: an operation, or a record, wait, set or reset of an event or flag object."""

    what: str  # launch, allocate, record, wait, join, set, await, reset, collective
    branch: str
    subject: Any


@dataclass(eq=False)
class CapturedGraph:
    """The steps of one graph, in the order of capture."""

    main: str
    steps: list[CapturedStep] = field(default_factory=list)
    branches: dict[str, StreamActor] = field(default_factory=dict)
    summary: list[tuple[Operation, list[Access]]] | None = None
    """For a graph without branches and flags: each operation, with the accesses that operations outside can conflict with.

    All accesses of a replay then lie in one epoch of one stream, so one check per region is enough.
    """
    temporaries: set[int] = field(default_factory=set)
    dead: dict[int, tuple[Shadow, str]] = field(default_factory=dict)
    """Storages that the graph uses and that were freed after capture, with the location of the release."""

    def outside(self) -> set[int]:
        """Return the storages that the graph uses and does not own."""
        launched = [step.subject.accesses for step in self.steps if step.what == "launch"]
        launched += [step.subject[2] for step in self.steps if step.what == "collective"]
        return {access.storage for accesses in launched for access in accesses} - self.temporaries

    def has_collective(self, storage: int) -> bool:
        """Return True if a captured collective reads or writes the storage."""
        calls = (step.subject[2] for step in self.steps if step.what == "collective")
        return any(access.storage == storage for accesses in calls for access in accesses)

    def finish(self) -> None:
        """Build the summary of the graph's storages and flags at the end of the capture."""
        if any(step.branch != self.main or step.what not in ("launch", "allocate") for step in self.steps):
            return
        seen: set[tuple[object, ...]] = set()
        summary: list[tuple[Operation, list[Access]]] = []
        for step in self.steps:
            if step.what != "launch":
                continue
            kept = []
            for access in step.subject.accesses:
                place = (access.storage, access.start, access.end, access.shape, access.stride, access.by_rows)
                region = (*place, access.write)
                # An access that conflicts with a read of data that the graph wrote conflicts with that write, too.
                if region not in seen and (*place, True) not in seen:
                    seen.add(region)
                    kept.append(access)
            if kept:
                summary.append((step.subject, kept))
        self.summary = summary

    @property
    def waits_for_flags(self) -> bool:
        """True if a replay waits for flags."""
        return any(step.what == "await" for step in self.steps)


@dataclass(eq=False, slots=True)
class FlagProgress:
    """The state of one flag after the steps that were able to run.

    A wait comes after the set that it consumes. A round is safe if its reset comes after its waits, and the next set comes
    after the reset. Otherwise the device may execute them in the opposite order.
    """

    set_at: Point | None = None
    clock: Clock = field(default_factory=dict)
    waits: list[Point] = field(default_factory=list)
    reset_at: Point | None = None

    @property
    def is_set(self) -> bool:
        """True if the flag is set, so a wait passes."""
        return self.set_at is not None

    def set(self, point: Point) -> tuple[str, Point] | None:
        """Set the flag. Returns the fault ("still set" or "unordered reset") and the conflicting point, or None."""
        if self.set_at is not None:
            return "still set", self.set_at
        reset_at = self.reset_at
        self.set_at = point
        self.clock = point.actor.release()
        if reset_at is not None and not reset_at.happened_before(point):
            return "unordered reset", reset_at
        return None

    def wait(self, point: Point) -> None:
        """Record a wait that passes the flag; the caller checks :attr:`is_set` first."""
        self.waits = [*self.waits[-15:], point]

    def reset(self, point: Point) -> Point | None:
        """Reset the flag and return a wait of this round that may come later, or None."""
        early = next((wait for wait in self.waits if not wait.happened_before(point)), None)
        self.set_at = None
        self.reset_at = point
        self.waits = []
        return early


HOST = "host"
REMAPPED = "other pages were mapped under its addresses, and nothing has written them since"
TWO_WRITERS = "one operation writes them more than once, and nothing orders its parts: any of the values may remain"
_MAX_GENERATIONS = 16
_MAX_AWAITED = 4096


@dataclass(eq=False, slots=True)
class _EventRecord:
    """One generation of an event: the host's call, and the clock of the stream, or None until the stream has reached it."""

    host: Point
    clock: Clock | None = None


@dataclass(eq=False, slots=True)
class _EventState:
    name: str
    records: OrderedDict[int, _EventRecord] = field(default_factory=OrderedDict)

    def covered(self, generation: int, thread: Actor) -> int:
        """Return the newest generation, up to this one, whose record is ordered before the calling thread.

        Another thread's record that nothing orders may come after the wait in another schedule, so no wait relies on it.
        """
        clock = thread.clock
        while generation > 0:
            known = self.records.get(generation)
            host = known.host if known is not None else None
            if host is None or host.number == thread.number or host.epoch <= clock.get(host.number, 0):
                break
            generation -= 1
        return generation

    def is_pending(self, generation: int) -> bool:
        """Return True until the stream has reached the record of a generation."""
        known = self.records.get(generation)
        return known is not None and known.clock is None

    def clock_of(self, generation: int) -> Clock:
        """Return the clock of a generation; nothing for a generation that is pending or unknown."""
        known = self.records.get(generation)
        return (known.clock if known is not None else None) or NOTHING


class StreamOrdering(Actors):
    """The order of operations on streams and host threads; inside a capture, operations are recorded for the replays."""

    def __init__(self, listener: Listener, *, rows_follow: bool = False, ranks: RankClocks | None = None) -> None:
        super().__init__(ranks.number if ranks is not None else None)
        self.ranks = ranks
        if ranks is not None:
            ranks.orderings.append(self)  # type: ignore[arg-type]
        self.listener = listener
        listener.settled = self.settled
        self.rows_follow = rows_follow
        self.steps = listener.steps
        self.memory = ShadowMemory(listener.reused, strict=rows_follow)
        if ranks is not None and rows_follow:  # such devices number their memory in one sequence, and ranks may read it
            self.memory.shadows = ranks.shadows
        self.flags_set_outside = 0
        """Number of flags that were set outside the backend interface."""
        self._events: WeakKeyDictionary[Event, _EventState] = WeakKeyDictionary()
        self._flags: WeakKeyDictionary[Flag, FlagProgress] = WeakKeyDictionary()
        self._users: dict[int, WeakSet[CapturedGraph]] = {}
        self._awaited: OrderedDict[int, deque[Point]] = OrderedDict()
        self._lost: set[str] = set()
        self._last = 0  # sequence number of the last operation, host access or wait of a host thread
        self._pooled: set[int] = set()  # storages from the pools of graphs, whose addresses later captures alone reuse
        self._waiting_flag: dict[StreamActor, tuple[str, Point]] = {}

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

    def _event(self, event: Event) -> _EventState:
        state = self._events.get(event)
        if state is None:
            state = self._events[event] = _EventState(event.name)
        return state

    def recorded(self, stream: str, event: Event, generation: int) -> None:
        """Record a new generation of an event, which covers the operations enqueued on the stream so far."""
        capture = self.local.capture
        if capture is not None:
            capture.steps.append(CapturedStep("record", stream, event))
            return
        actor, thread = self.stream_actor(stream), self.thread()
        state = self._event(event)
        record = state.records[generation] = _EventRecord(self.new_point(thread, "record"))
        known = thread.clock
        while len(state.records) > _MAX_GENERATIONS:
            state.records.popitem(last=False)

        def step() -> bool:
            record.clock = self._ordered_launches(actor.release(), thread, known)
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

    def _wait(self, actor: StreamActor, state: _EventState, generation: int, location: str) -> bool:
        if generation not in state.records:
            return True
        if state.is_pending(generation):
            return False
        clock = state.clock_of(generation)
        new = actor.join(clock)
        edge = LastWait(state.name, generation, location)
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
