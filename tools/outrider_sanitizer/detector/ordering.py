"""The ordering detector: the order of operations over streams, host threads, events, flags and graphs.

Its input is the trace of enqueued operations in program order. A wait takes the generation that was visible when it was
enqueued, so the order of two operations does not depend on when the device ran them. One run therefore covers every schedule
of the same trace. Flags are the exception, since a wait may be enqueued before its set: a stream whose wait has no set yet is
held, with all later operations on it, until the set is enqueued.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from outrider.device import Access, Operation
from outrider_sanitizer.detector.actors import NOTHING, Actor, Clock, GraphReplay, Point, StreamActor
from outrider_sanitizer.detector.intervals import IntervalMap, Listener
from outrider_sanitizer.detector.ranks import RankClocks, WatchedCollectivePart
from outrider_sanitizer.detector.streams import CapturedGraph, CapturedStep, StreamOrdering
from outrider_sanitizer.report import caller_location

if TYPE_CHECKING:
    from outrider.device import Event, Graph


class Ordering(StreamOrdering):
    """The ordering detector. Not thread-safe: the caller holds a lock around each call."""

    def __init__(self, listener: Listener, *, rows_follow: bool = False, ranks: RankClocks | None = None) -> None:
        super().__init__(listener, rows_follow=rows_follow, ranks=ranks)
        self._graphs: WeakKeyDictionary[Graph, CapturedGraph] = WeakKeyDictionary()
        self._params: WeakKeyDictionary[Graph, IntervalMap] = WeakKeyDictionary()
        self._params_sink = Listener(conflict=lambda old, new, how, graph: listener.rebind(old, new, how, str(graph)))

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
