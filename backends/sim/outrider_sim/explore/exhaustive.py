"""Every schedule of a small protocol, up to the order of steps that can't influence each other.

Depth-first search over decisions, run after run, with sleep sets: a step that was explored first at some point isn't
tried again after a sibling unless something dependent has run in between. Steps that depend on nothing (the host
enqueues, a stream passes a wait) are never branched on. Two steps depend on each other when they touch the same bytes
and one writes, move the same flag, when one asks what the other completes, or when both are host code.

What it doesn't model: memory that the host frees while another stream still uses it is overwritten in the order of the
stream that it was allocated on, without a branch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider_sim.explore.strategies import Strategy
from outrider_sim.machine.queue import EventGeneration, HostThread, OperationKind, StreamQueue

if TYPE_CHECKING:
    from outrider_sim.machine.host_scheduler import HostScheduler


class Pruned(BaseException):
    """Raised to abort a run that can only repeat the result of an earlier run. Not an `Exception`, so programs don't catch
    it.
    """


class StepAccesses(NamedTuple):
    """Memory and objects that one step may access. A span is (first address, end, writes); `all` conflicts with all."""

    actor: str
    host: bool
    spans: tuple[tuple[int, int, bool], ...] = ()
    flag: Any = None
    completes: Any = None  # the generation that a record completes
    asks: Any = None  # what a host query looks at: a generation, or a stream
    all: bool = False


class _Frame:
    __slots__ = ("current", "labels", "sleep", "todo", "touches")

    def __init__(self, touches: dict[str, StepAccesses], todo: list[str], sleep: dict[str, StepAccesses]) -> None:
        self.touches = touches
        self.todo = todo
        self.sleep = sleep
        self.current = todo[0]


class Exhaustive(Strategy):
    """The exhaustive strategy: each run takes the next path of one search tree. `exhausted` is set after the last path."""

    name = "exhaustive"
    needs_accesses = True
    sees_all = True  # also where there is no choice: a sleeping step may have to wake up

    def __init__(self) -> None:
        self.exhausted = False
        self.floors: dict[int, int] = {}  # rank → where addresses start in every run, so that runs can be compared
        self._stack: list[_Frame] = []
        self._depth = 0
        self._sleep: dict[str, StepAccesses] = {}
        self._no_queries = True
        self._scheduler: HostScheduler | None = None

    def bind(self, scheduler: HostScheduler) -> None:
        """Store the scheduler whose steps this strategy picks."""
        self._scheduler = scheduler

    def begin(self) -> None:
        """Return to the root of the search tree before a run."""
        self._depth = 0
        self._sleep = {}

    def end(self) -> None:
        """Advance to the next unexplored path of the search tree."""
        assert self._scheduler is not None
        if self._scheduler.queries and self._no_queries:
            # The search treated records as unobserved, but the program queried an event: restart without that assumption.
            self._no_queries = False
            self._stack.clear()
            return
        while self._stack:
            frame = self._stack[-1]
            frame.sleep[frame.current] = frame.touches[frame.current]
            frame.todo.pop(0)
            if frame.todo:
                frame.current = frame.todo[0]
                return
            self._stack.pop()
        self.exhausted = True

    def choose(self, candidates: Sequence[StreamQueue | HostThread]) -> int:
        """Pick the next step of this run's path. Raises `Pruned` if only repetitions remain."""
        if self._depth < len(self._stack):
            frame = self._stack[self._depth]
        else:
            frame = self._open(candidates)
            self._stack.append(frame)
        self._depth += 1
        taken = frame.touches[frame.current]
        self._sleep = {label: touch for label, touch in frame.sleep.items() if are_independent(touch, taken)}
        for index, actor in enumerate(candidates):
            if actor.label == frame.current:
                return index
        raise Pruned("the program took another path on the same decisions: it isn't deterministic")

    def _open(self, candidates: Sequence[StreamQueue | HostThread]) -> _Frame:
        assert self._scheduler is not None
        touches = {actor.label: self._touch(actor) for actor in candidates}
        hosts = sum(touch.host for touch in touches.values())
        free = next((t.actor for t in touches.values() if self._touches_nothing(t, hosts)), None)
        todo = [free] if free is not None else list(touches)
        todo = [label for label in todo if label not in self._sleep]
        if not todo:
            raise Pruned("every step from here was explored from an equivalent point")
        return _Frame(touches, todo, dict(self._sleep))

    def _touches_nothing(self, touch: StepAccesses, hosts: int) -> bool:
        assert self._scheduler is not None
        if touch.host and (hosts > 1 or len(self._scheduler.threads) > 1):
            return False
        if touch.completes is not None and not self._no_queries:
            return False
        return not touch.spans and touch.flag is None and touch.asks is None and not touch.all

    def _touch(self, actor: StreamQueue | HostThread) -> StepAccesses:
        assert self._scheduler is not None
        bases = self._scheduler.bases
        if isinstance(actor, HostThread):
            action = actor.action
            spans = tuple((bases[a.storage] + a.start, bases[a.storage] + a.end, a.write) for a in action.accesses)
            return StepAccesses(actor.label, True, spans, asks=action.target if action.what == "query" else None)
        op = actor.queue[0]
        if op.kind < OperationKind.RECORD:
            spans = tuple((bases[a.storage] + a.start, bases[a.storage] + a.end, a.write) for a in op.accesses)
            # An operation that says nothing about its memory may touch any.
            return StepAccesses(actor.label, False, spans, all=not spans)
        if op.kind in (OperationKind.FLAG_SET, OperationKind.FLAG_WAIT, OperationKind.FLAG_RESET):
            return StepAccesses(actor.label, False, flag=op.target)
        if op.kind == OperationKind.RECORD:
            return StepAccesses(actor.label, False, completes=op.target)
        if op.kind == OperationKind.COLLECTIVE_START:
            return StepAccesses(actor.label, False, flag=op.target.member.machine)  # places on the device are few
        return StepAccesses(actor.label, False, all=op.fn is not None or op.kind == OperationKind.COLLECTIVE)


def are_independent(one: StepAccesses, other: StepAccesses) -> bool:
    """Return whether exchanging two adjacent steps of different actors leaves the program's result unchanged."""
    if one.host and other.host:
        return False
    if one.all or other.all:
        return one.host or other.host
    if one.flag is not None and one.flag is other.flag:
        return False
    if _asked(one, other) or _asked(other, one):
        return False
    return not any(a[0] < b[1] and b[0] < a[1] and (a[2] or b[2]) for a in one.spans for b in other.spans)


def _asked(query: StepAccesses, step: StepAccesses) -> bool:
    if query.asks is None:
        return False
    if isinstance(query.asks, EventGeneration):
        # Generations are made anew in each run: compare what they are.
        done = step.completes
        return done is not None and (done.event.id, done.number) == (query.asks.event.id, query.asks.number)
    return isinstance(query.asks, StreamQueue) and query.asks.label == step.actor
