"""Capture and replay of graphs: recorded operations with fixed addresses, enqueued again by one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.device import CaptureError, InterfaceError
from outrider_sim.machine.memory import Block, Pool
from outrider_sim.machine.queue import EventGeneration, EventState, Op, OperationKind, StreamQueue

if TYPE_CHECKING:
    from outrider_sim.machine.device_state import SimDeviceState
    from outrider_sim.machine.stream_machine import StreamMachine

_EDGES = (OperationKind.RECORD, OperationKind.WAIT)


class OpenCapture:
    """An open capture. Operations enqueued on its streams are recorded here instead of queued; none of them runs.

    The first stream is the one that was captured; another stream joins by waiting for an event recorded on a stream of the
    capture.
    """

    def __init__(self, sim: SimDeviceState, name: str, pool: Pool, origin: StreamQueue) -> None:
        self.sim = sim
        self.name = name
        self.pool = pool
        self.origin = origin
        self.open = False
        self.lanes: dict[StreamQueue, int] = {}
        self.nodes: list[tuple[int, Op]] = []

    def begin(self) -> None:
        """Start recording the origin stream's operations. Raises `CaptureError` if another capture records the stream."""
        if self.origin.capture is not None:
            raise CaptureError(f"stream {self.origin.label!r} is being captured already")
        self.open = True
        self.fork(self.origin)

    def fork(self, stream: StreamQueue) -> None:
        """Add `stream` to the capture. Raises `CaptureError` if the personality's graphs have one branch only."""
        if stream is not self.origin and not self.sim.options.like.forks_in_capture:
            raise CaptureError(f"stream {stream.label!r} can't join the capture of {self.name!r}: a graph is one stream here")
        stream.capture = self
        self.lanes[stream] = len(self.lanes)

    def add(self, op: Op, stream: StreamQueue) -> None:
        """Append an operation.

        Raises `CaptureError` if the operation waits for a record outside the capture, or is one that no graph can hold.
        """
        if op.kind == OperationKind.KERNEL and op.name.rpartition("::")[2].partition(".")[0] in self.sim.options.native:
            raise CaptureError(f"{op.name} is native work on this device (option native), which no graph can hold")
        if op.kind == OperationKind.WAIT and op.target.captured is not self:
            raise CaptureError(
                f"a wait for {op.target} was captured, but that record isn't part of the capture; wait on the stream before "
                "the replay"
            )
        op.order = len(self.nodes) + 1
        self.nodes.append((self.lanes[stream], op))
        tap = self.sim.machine.tap
        if tap is not None:
            tap.launched(op, stream, op.order - 1)

    def poison(self, block: Block, stream: StreamQueue) -> None:
        """Append an operation with which each replay overwrites `block` with the poison pattern before its first use."""
        op = Op(OperationKind.POISON, "poison", block.fill_poison)
        op.order = len(self.nodes) + 1
        self.nodes.append((self.lanes[stream], op))

    def close(self) -> None:
        """Restore the captured streams to normal execution."""
        self.open = False
        for stream in self.lanes:
            stream.capture = None

    def finish(self) -> GraphProgram:
        """Return the captured program. Raises `CaptureError` unless every forked stream has been joined to the
        first stream.
        """
        self._check_joined()
        return GraphProgram(self.sim, self.name, self.nodes, len(self.lanes))

    def _check_joined(self) -> None:
        count = len(self.lanes)
        clocks = [[0] * count for _ in range(count)]
        seen: dict[EventGeneration, list[int]] = {}
        for lane, op in self.nodes:
            if op.kind == OperationKind.RECORD:
                seen[op.target] = list(clocks[lane])
            elif op.kind == OperationKind.WAIT:
                clocks[lane] = [max(a, b) for a, b in zip(clocks[lane], seen[op.target], strict=True)]
            else:
                clocks[lane][lane] += 1
        for stream, lane in self.lanes.items():
            if clocks[0][lane] < clocks[lane][lane]:
                raise CaptureError(
                    f"stream {stream.label!r} was pulled into the capture of {self.name!r} and never joined: record an event "
                    f"on it after its last operation and let {self.origin.label!r} wait for it"
                )


class GraphProgram:
    """A captured graph: operations by lane.

    Queued replays share the operations. A rebinding that comes too early therefore changes a replay in flight, as on a
    device.
    """

    def __init__(self, sim: SimDeviceState, name: str, nodes: Sequence[tuple[int, Op]], lanes: int) -> None:
        self.sim = sim
        self.name = name
        self.nodes = list(nodes)
        self.lanes = lanes
        self._branches: list[StreamQueue] = []
        # With one lane, its own order is all the order there is.
        self._straight = [op for _, op in nodes if op.kind not in _EDGES] if lanes == 1 else []
        # Random operators draw anew and collectives meet anew; everything else is shared by all replays.
        self._fresh = any(op.seed is not None or op.kind >= OperationKind.COLLECTIVE_START for _, op in nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def replay(self, stream: StreamQueue) -> None:
        """Enqueue the graph's operations: lane 0 on `stream`, each other lane on a stream of its own between
        launch and end.
        """
        machine = self.sim.machine
        launch = Op(OperationKind.LAUNCH, f"launch {self.name}", cost=machine.like.kernel_us)
        if self.lanes == 1:
            ops = [self._issue(op, stream) for op in self._straight] if self._fresh else self._straight
            machine.enqueue(launch, stream, ops)
        else:
            self._replay_lanes(machine, stream, launch)

    def _replay_lanes(self, machine: StreamMachine, stream: StreamQueue, launch: Op) -> None:
        while len(self._branches) < self.lanes - 1:
            self._branches.append(machine.create_stream(f"{self.name}.branch{len(self._branches) + 1}"))
        event = EventState(0, f"edges of {self.name}")
        edges: dict[EventGeneration, EventGeneration] = {}
        lanes: list[list[Op]] = [[] for _ in range(self.lanes)]
        queues = [stream, *self._branches]
        start = EventGeneration(event, 0, stream, stream.issued)
        lanes[0].append(_edge(OperationKind.RECORD, start, 0))
        for lane in range(1, self.lanes):
            lanes[lane].append(_edge(OperationKind.WAIT, start, 0))
        for lane, op in self.nodes:
            if op.kind == OperationKind.RECORD:
                edges[op.target] = EventGeneration(event, op.order, queues[lane], 0)
                lanes[lane].append(_edge(OperationKind.RECORD, edges[op.target], op.order))
            elif op.kind == OperationKind.WAIT:
                lanes[lane].append(_edge(OperationKind.WAIT, edges[op.target], op.order))
            else:
                lanes[lane].append(self._issue(op, queues[lane]))
        for queue, ops in zip(queues[1:], lanes[1:], strict=True):
            queue.base_seq = machine.scheduler.seq
            queue.queue.extend(ops)
            queue.issued += len(ops)
        machine.enqueue(launch, stream, lanes[0])

    def _issue(self, op: Op, stream: StreamQueue) -> Op:
        if op.kind >= OperationKind.COLLECTIVE_START:
            fresh = op.target.again(op)
            fresh.target.stream = stream
            return fresh  # type: ignore[no-any-return]
        if op.seed is None:
            return op
        fresh = op.again()
        fresh.fn = op.fn.again(op.seed())  # type: ignore[union-attr]
        return fresh

    def rebind(self, other: GraphProgram, stream: StreamQueue) -> None:
        """Enqueue on `stream` an operation that replaces the operands by those of `other`, a capture with other host
        parameters.

        Raises `InterfaceError` if the two programs differ in more than operands.
        """
        mine, theirs = ([(lane, op.kind, op.name) for lane, op in program.nodes] for program in (self, other))
        if mine != theirs:
            raise InterfaceError(
                f"graph {self.name!r}: other host parameters give another sequence of operations ({len(mine)} and "
                f"{len(theirs)}), which a rebind can't change; capture a graph for them"
            )
        pairs = [(op, new) for (_, op), (_, new) in zip(self.nodes, other.nodes, strict=True) if op.kind not in _EDGES]

        def apply() -> None:
            for op, new in pairs:
                op.fn, op.args, op.kwargs, op.post = new.fn, new.args, new.kwargs, new.post
                if op.kind >= OperationKind.COLLECTIVE_START:
                    op.target.call = new.target.call

        self.sim.machine.enqueue(
            Op(OperationKind.LAUNCH, f"rebind {self.name}", apply, cost=self.sim.machine.like.kernel_us), stream
        )


def _edge(kind: int, generation: EventGeneration, order: int) -> Op:
    op = Op(kind, "edge", target=generation)
    op.order = order
    return op
