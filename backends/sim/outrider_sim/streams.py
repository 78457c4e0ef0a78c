"""Streams, events, flags and graphs of the simulated device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider.device import CaptureContext, Event, Flag, Graph, GraphCallable, Stream, StreamOrderError
from outrider_sim.machine.graphs import GraphProgram
from outrider_sim.machine.memory import Pool
from outrider_sim.machine.queue import EventState, FlagState, OperationKind, StreamQueue

if TYPE_CHECKING:
    from outrider_sim.backend import SimBackend


class SimStream(Stream):
    """A simulated stream. `queue_state` is its queue in the machine, which tools may read."""

    backend: SimBackend

    def __init__(self, backend: SimBackend, name: str, priority: int, queue: StreamQueue) -> None:
        super().__init__(backend, name, priority)
        self.queue_state = queue
        self.epoch = backend.epoch

    @property
    def native(self) -> Any:
        """The stream's queue in the simulated machine."""
        return self.queue_state

    def _record(self, event: Event) -> None:
        assert isinstance(event, SimEvent)
        self.backend.sim.machine.record(event.state, self.queue_state)

    def _wait(self, event: Event) -> None:
        assert isinstance(event, SimEvent)
        generation = event.state.latest
        if generation is None:
            raise StreamOrderError(f"event {event.name!r} was never recorded")
        self.backend.sim.machine.wait(generation, self.queue_state)

    def _synchronize(self) -> None:
        self.backend.sim.machine.synchronize_stream(self.queue_state)

    def _query(self) -> bool:
        queue = self.queue_state
        target = queue.issued
        return self.backend.sim.machine.query(lambda: queue.done >= target, queue)


class SimEvent(Event):
    """A simulated event; `state` holds one generation per record."""

    backend: SimBackend

    def __init__(self, backend: SimBackend, name: str, timing: bool, state: EventState) -> None:
        super().__init__(backend, name, timing)
        self.state = state

    def _query(self) -> bool:
        generation = self.state.latest
        assert generation is not None
        return self.backend.sim.machine.query(lambda: generation.done, generation)

    def _synchronize(self) -> None:
        generation = self.state.latest
        assert generation is not None
        self.backend.sim.machine.synchronize_event(generation)

    def _synchronize_within(self, seconds: float) -> bool:
        """Ignore the time limit: without a clock, a wait that can't end is detected at once."""
        del seconds
        self._synchronize()
        return True

    def _elapsed_ms(self, end: Event) -> float:
        assert isinstance(end, SimEvent)
        first, last = self.state.latest, end.state.latest
        if first is None or last is None or not (first.done and last.done):
            raise StreamOrderError(
                f"events {self.name!r} and {end.name!r} haven't both completed: synchronize with both first"
            )
        return (last.time - first.time) / 1000.0


class SimFlag(Flag):
    """A flag whose state the simulated machine holds."""

    backend: SimBackend

    def __init__(self, backend: SimBackend, name: str, state: FlagState) -> None:
        super().__init__(backend, name)
        self.state = state

    def _set(self, stream: Stream) -> None:
        self._enqueue(OperationKind.FLAG_SET, stream)

    def _wait(self, stream: Stream) -> None:
        self._enqueue(OperationKind.FLAG_WAIT, stream)

    def _reset(self, stream: Stream) -> None:
        self._enqueue(OperationKind.FLAG_RESET, stream)

    def _enqueue(self, kind: int, stream: Stream) -> None:
        assert isinstance(stream, SimStream)
        self.backend.sim.machine.flag(kind, self.state, stream.queue_state)


class SimGraph(Graph):
    """A graph of operations captured from simulated streams."""

    backend: SimBackend

    def __init__(self, backend: SimBackend, name: str, context: CaptureContext, fn: GraphCallable) -> None:
        super().__init__(backend, name, context)
        self.fn = fn
        self.program: GraphProgram | None = None
        self.pool: Pool | None = None
        self.origin: SimStream | None = None

    def _replay(self, stream: Stream) -> None:
        assert isinstance(stream, SimStream)
        assert self.program is not None
        self.backend.sim.machine.replays = self.backend.replays
        self.program.replay(stream.queue_state)

    def _update_params(self, params: Mapping[str, tuple[int, ...]], stream: Stream) -> None:
        if not self.backend.sim.options.like.updates_graph_params:
            super()._update_params(params, stream)
        assert isinstance(stream, SimStream)
        assert self.program is not None
        assert self.pool is not None
        assert self.origin is not None
        for name, values in params.items():
            self.context.params[name].value = values
        # The new values are found by capturing again; the operations that queued replays share get them when the update
        # runs on its stream.
        fresh = self.backend.record_program(self, self.fn, self.origin, self.pool, seen=False)
        self.program.rebind(fresh, stream.queue_state)
