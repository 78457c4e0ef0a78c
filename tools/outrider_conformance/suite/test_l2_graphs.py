"""L2: a replay repeats the captured work in order on the named storage, with and without real graphs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.device import CaptureContext, CaptureError, Graph, GraphPool, InterfaceError, Stream
from outrider_conformance.lab import (
    CALLS,
    THREADS,
    WIDTH,
    Lab,
    call_at_once,
    check_not_overridden,
    expect,
    in_every_order,
    in_some_order,
)
from outrider_conformance.promises import needs, promise
from outrider_conformance.reporting.verdict import not_applicable

_OPERATIONS = 700
"""A third of the number of operations of a long graph: more than pages and queues of 256, 512, 1024 or 2048 entries hold."""
_MODULUS = 65_521
_REPLAY_S = 0.005
"""Seconds in which a replay without a delay ends, where the device has a clock."""


def triple(lab: Lab, stream: Stream, name: str = "triple", pool: GraphPool | None = None, *, slow: bool = False) -> Graph:
    """Capture a graph of ``y = 3 * x + 1`` with its own intermediate; x is 0 and y is -1 at first.

    ``slow`` delays the stream before the intermediate is read.
    """
    x, y = lab.full(stream, 0), lab.full(stream, -1)
    if slow:
        lab.slow(stream)  # how long is measured now, which no capture allows

    def fn(context: CaptureContext) -> None:
        middle = context.inputs["x"] * 3
        if slow:
            lab.slow(stream)
        context.outputs["y"].copy_(middle + 1)

    graph = lab.backend.capture(name, fn, stream=stream, inputs={"x": x}, outputs={"y": y}, pool=pool)
    lab.fill(stream, y, -1)  # a warm-up may have run it
    return graph


@promise(
    "Graph.replay", "Enqueue the captured work on ``stream``; return the replay's generation, counted from 1. Never a no-op."
)
@in_every_order()
def test_a_replay_does_the_work_again(lab: Lab) -> None:
    """Each replay reads the current inputs, and increases the generation by one."""
    backend = lab.backend
    (stream,) = lab.streams("s")
    graph = triple(lab, stream)
    check_not_overridden(graph, Graph)
    replays = backend.replays
    expect(lab.read_tensor(stream, graph.outputs["y"]), -1.0, "the output before the first replay")
    for turn in (1, 2, 3):
        lab.fill_late(stream, graph.inputs["x"], turn)
        expect(graph.replay(stream), turn, "the replay's generation")
        expect(lab.read_tensor(stream, graph.outputs["y"]), 3.0 * turn + 1, f"the output of replay {turn}")
    expect(graph.generation, 3, "generations after three replays")
    expect(backend.replays - replays, 3, "replays that the backend counts")


@promise("Graph.replay", "Enqueue the captured work on ``stream``")
def test_a_graph_holds_thousands_of_operations(lab: Lab) -> None:
    """A replay runs each of the captured operations once and in order, and so does the next replay."""
    (stream,) = lab.streams("s")
    x = lab.full(stream, 0, dtype=torch.float64)

    def fn(context: CaptureContext) -> None:
        for number in range(_OPERATIONS):
            context.outputs["x"].mul_(2).remainder_(_MODULUS).add_(number)

    graph = lab.backend.capture("long", fn, stream=stream, inputs={}, outputs={"x": x})
    lab.fill(stream, x, 1)  # a warm-up may have run it
    value = 1
    for turn in (1, 2):
        graph.replay(stream)
        for number in range(_OPERATIONS):
            value = 2 * value % _MODULUS + number
        expect(lab.read_tensor(stream, x), float(value), f"{3 * _OPERATIONS} operations after replay {turn}")


@promise("Graph", "``replay`` enqueues the whole graph on a stream like one operation.")
@pytest.mark.parametrize("sent", [False, True], ids=["written by a kernel", "sent by the host"])
@in_every_order()
def test_a_replay_keeps_the_order_of_its_stream(lab: Lab, sent: bool) -> None:
    """A replay runs between work enqueued before it, a kernel or a copy from the host, and work enqueued after it."""
    (stream,) = lab.streams("s")
    graph = triple(lab, stream)
    x = graph.inputs["x"]
    kept = [lab.full(stream, 0) for _ in range(3)]
    buffers = [lab.backend.empty_pinned(f"sent {turn}", tuple(x.shape), x.dtype) for turn in range(3)]
    for turn, (keep, buffer) in enumerate(zip(kept, buffers, strict=True), 1):
        if sent:
            buffer.tensor.fill_(turn)
            lab.slow(stream)
            lab.backend.copy_async(x, buffer.tensor, stream=stream)
        else:
            lab.fill_late(stream, x, turn)
        graph.replay(stream)
        lab.copy(stream, keep, graph.outputs["y"])
    lab.fill(stream, x, 50)
    stream.synchronize()
    expect([lab.current_values(keep) for keep in kept], [4.0, 7.0, 10.0], "outputs of three replays in a row")


@needs("captures_graphs")
@promise("Backend.copy_async", "The bytes of the source are read, and those of the destination written, in stream order")
@in_every_order(schedules=8)
def test_captured_copies_from_and_to_the_host_are_replayed(lab: Lab) -> None:
    """Each replay reads what the host wrote to pinned memory after the capture, and writes to pinned memory; a device whose
    graphs can't hold one of these copies refuses the capture.
    """
    backend = lab.backend
    (stream,) = lab.streams("s")
    y, pinned = lab.full(stream, 0), [backend.empty_pinned(name, (WIDTH,), torch.float32).tensor for name in ("up", "down")]
    for tensor in pinned:
        tensor.fill_(-1)

    def fn(context: CaptureContext) -> None:
        backend.copy_async(context.outputs["y"], pinned[0], stream=stream)
        backend.copy_async(pinned[1], context.outputs["y"], stream=stream)

    try:
        graph = backend.capture("copies", fn, stream=stream, inputs={}, outputs={"y": y})
    except CaptureError as refusal:
        not_applicable(str(refusal))
    for turn in (1.0, 2.0):
        stream.synchronize()
        pinned[0].fill_(turn)
        lab.slow(stream)
        graph.replay(stream)
        stream.synchronize()
        expect(lab.current_values(pinned[1]), turn, f"what replay {turn:.0f} copied from the host and back")


@promise("Graph.replay", "Enqueue the captured work on ``stream``")
@in_every_order()
def test_a_replay_goes_to_the_stream_that_is_named(lab: Lab) -> None:
    """A replay on another stream than the captured one, in whose scope it is called, obeys that stream's waits, and its
    records cover the replay.
    """
    captured, producer, stream, consumer = lab.streams("captured", "producer", "stream", "consumer")
    graph = triple(lab, captured)
    captured.synchronize()
    z = lab.full(consumer, 0)
    lab.fill_late(producer, graph.inputs["x"], 2)
    stream.wait(lab.record(producer, "written"))
    with lab.backend.on(captured):
        graph.replay(stream)
    consumer.wait(lab.record(stream, "replayed"))
    lab.expect_read(consumer, z, graph.outputs["y"], 7.0, "the output, read after a record of the stream that replayed")


@needs("asynchronous")
@promise("Graph.replay", "Enqueue the captured work on ``stream``")
@in_some_order("earlier work was always done after several replays: a replay synchronises")
def test_a_replay_does_not_block_the_host(lab: Lab) -> bool:
    """The calls of several replays after slow work return while that work runs."""
    (stream,) = lab.streams("s")
    graph = triple(lab, stream)
    stream.synchronize()
    lab.slow(stream)
    busy = lab.record(stream, "busy")
    for _ in range(CALLS):
        graph.replay(stream)
    return not busy.query()


@needs("captures_graphs")
@promise("Capabilities.captures_graphs", "``replay`` launches it without running the callable again.")
def test_a_replay_does_not_run_the_callable(lab: Lab) -> None:
    """Replays do the captured work without calling the callable again."""
    backend = lab.backend
    (stream,) = lab.streams("s")
    y = lab.full(stream, 0)
    calls = []

    def fn(context: CaptureContext) -> None:
        calls.append(1)
        context.outputs["y"].add_(1)

    graph = backend.capture("count", fn, stream=stream, inputs={}, outputs={"y": y})
    captured = len(calls)
    lab.fill(stream, y, 10)
    for _ in range(3):
        graph.replay(stream)
    expect(lab.read_tensor(stream, y), 13.0, "three replays of an increment")
    expect(len(calls), captured, "calls of the callable after three replays")


@promise("CaptureContext.scalars")
def test_scalars_are_frozen(lab: Lab) -> None:
    """Changes of the caller's dictionaries after the capture have no effect."""
    backend = lab.backend
    (stream,) = lab.streams("s")
    x, y = lab.full(stream, 2), lab.full(stream, 0)
    scalars: dict[str, bool | int | float] = {"factor": 4}
    inputs, outputs = {"x": x}, {"y": y}

    def scale(context: CaptureContext) -> None:
        context.outputs["y"].copy_(context.inputs["x"] * context.scalars["factor"])

    graph = backend.capture("scale", scale, stream=stream, inputs=inputs, outputs=outputs, scalars=scalars)
    scalars["factor"] = 9
    inputs["x"] = outputs["y"] = lab.full(stream, 100)
    graph.replay(stream)
    expect(lab.read_tensor(stream, y), 8.0, "the output after the caller's dictionaries changed")


@promise("Backend.create_graph_pool")
@in_every_order()
def test_graphs_of_one_pool_take_turns(lab: Lab) -> None:
    """Two graphs of one pool, replayed in turn, give their own results."""
    (stream,) = lab.streams("s")
    pool = lab.backend.create_graph_pool("shared")
    expect(pool.name, "shared", "the pool's name")
    graphs = [triple(lab, stream, name, pool) for name in ("first", "second")]
    kept = []
    for turn in range(1, 5):
        graph = graphs[turn % 2]
        lab.fill_late(stream, graph.inputs["x"], turn)
        graph.replay(stream)
        keep = lab.full(stream, 0)
        lab.copy(stream, keep, graph.outputs["y"])
        kept.append(keep)
    stream.synchronize()
    expect([lab.current_values(keep) for keep in kept], [4.0, 7.0, 10.0, 13.0], "outputs of two graphs in turn")


@promise("GraphPool")
@in_every_order()
def test_graphs_of_different_pools_do_not_touch(lab: Lab) -> None:
    """Two graphs of different pools and two without a pool, replayed concurrently, do not share intermediates."""
    backend = lab.backend
    *streams, captured = lab.streams("a", "b", "c", "d", "captured")
    pools = [backend.create_graph_pool("first"), backend.create_graph_pool("second"), None, None]
    graphs = [triple(lab, captured, "graph", pool, slow=True) for pool in pools]
    backend.synchronize()
    for turn in (1, 2):
        for number, (stream, graph) in enumerate(zip(streams, graphs, strict=True), turn):
            lab.fill_late(stream, graph.inputs["x"], number)
            graph.replay(stream)
        backend.synchronize()
        found = [lab.current_values(graph.outputs["y"]) for graph in graphs]
        expect(found, [3.0 * (turn + index) + 1 for index in range(len(graphs))], "outputs of graphs of different pools")


@promise("Backend.capture", "Other streams of the device may be busy")
@in_every_order()
def test_other_streams_may_be_busy_during_a_capture(lab: Lab) -> None:
    """A long job on another stream is neither captured, nor lost, nor repeated by a replay."""
    stream, busy = lab.streams("s", "busy")
    z = lab.full(busy, 0)
    lab.fill_late(busy, z, 5)
    graph = triple(lab, stream)
    lab.fill(stream, graph.inputs["x"], 1)
    graph.replay(stream)
    expect(lab.read_tensor(stream, graph.outputs["y"]), 4.0, "the output of a graph captured while another stream was busy")
    expect(lab.read_tensor(busy, z), 5.0, "the job that ran during the capture")
    lab.fill(busy, z, 6)
    graph.replay(stream)
    lab.backend.synchronize()
    expect(lab.current_values(z), 6.0, "what a replay must not repeat: the job that ran during the capture")


@needs("asynchronous", "captures_graphs", "perturbs_timing")
@promise("Backend.delay", "Captured, it does so at each replay of the graph.")
@in_some_order("a stream was always idle after a replay of a graph with a delay: the capture doesn't hold the delay")
def test_a_captured_delay_is_replayed(lab: Lab) -> bool:
    """A replay of a graph with a delay keeps its stream busy."""
    (stream,) = lab.streams("s")
    graph = triple(lab, stream, slow=True)
    stream.synchronize()
    graph.replay(stream)
    time.sleep(_REPLAY_S)
    return not stream.query()


@needs("captures_graphs", "forks_in_capture")
@promise("Capabilities.forks_in_capture")
@in_every_order()
def test_a_capture_may_fork(lab: Lab) -> None:
    """Two branches and a join give the same result at every replay, and order following work."""
    backend = lab.backend
    a, b = lab.streams("a", "b")
    x, y = lab.full(a, 0), lab.full(a, 0)
    fork, join = backend.create_event("fork"), backend.create_event("join")
    held: list[Tensor] = []  # what crosses between branches must outlive both

    def fn(context: CaptureContext) -> None:
        source = context.inputs["x"]
        one = source + 1
        expect(a.record(fork), 0, "the generation of a record inside a capture")
        b.wait(fork)
        with backend.on(b):
            two = one * 10
        three = one * 100
        held.extend((one, two))
        b.record(join)
        a.wait(join)
        context.outputs["y"].copy_(two + three)

    graph = backend.capture("fork", fn, stream=a, inputs={"x": x}, outputs={"y": y})
    kept = [lab.full(a, 0) for _ in range(2)]
    for turn, keep in enumerate(kept, 1):
        lab.fill_late(a, x, turn)
        graph.replay(a)
        lab.copy(a, keep, y)
    a.synchronize()
    expect([lab.current_values(keep) for keep in kept], [220.0, 330.0], "outputs of two replays of a graph with two branches")


@needs("captures_graphs", "waits_inside_graphs")
@promise("Capabilities.waits_inside_graphs")
@in_every_order()
def test_a_graph_may_wait_for_an_event_outside(lab: Lab) -> None:
    """Each replay waits for the generation that is visible when the replay is enqueued."""
    a, b = lab.streams("a", "b")
    x, y = lab.full(b, 1), lab.full(a, 0)
    event = lab.record(b)

    def fn(context: CaptureContext) -> None:
        a.wait(event)
        context.outputs["y"].copy_(context.inputs["x"])

    graph = lab.backend.capture("waits", fn, stream=a, inputs={"x": x}, outputs={"y": y})
    for turn in (2.0, 3.0):
        lab.fill_late(b, x, turn)
        b.record(event)
        graph.replay(a)
        expect(lab.read_tensor(a, y), turn, "what the graph read after its wait")


@needs("captures_graphs")
@promise("Backend.capture", "capture is thread-local")
def test_threads_replay_graphs_at_once(lab: Lab) -> None:
    """Each of eight threads captures a graph, one after the other, and all replay at once with their own values."""
    pairs = [(stream, triple(lab, stream, "same")) for stream in lab.streams(*(f"s{n}" for n in range(THREADS)))]

    def replay(number: int) -> None:
        stream, graph = pairs[number]
        for turn in range(CALLS):
            lab.fill(stream, graph.inputs["x"], 10 * number + turn)
            graph.replay(stream)
            expect(lab.read_tensor(stream, graph.outputs["y"]), 3.0 * (10 * number + turn) + 1, f"of thread {number}")

    call_at_once(replay)


_GRAPHS = 40
_REPLAYS = 300
_CYCLES = 24
_TEMPORARY = 1 << 18
"""Number of float32 elements of a graph's temporary tensor, 1 MiB."""


def _adding(lab: Lab, stream: Stream, number: int, pool: GraphPool | None = None) -> Graph:
    """Capture a graph that adds ``number`` to its output, which is its input too, through a temporary."""
    y = lab.full(stream, 0, dtype=torch.int64)

    def fn(context: CaptureContext) -> None:
        context.outputs["y"].copy_(context.inputs["before"] + number)

    graph = lab.backend.capture("adds", fn, stream=stream, inputs={"before": y}, outputs={"y": y}, pool=pool)
    lab.fill(stream, y, 0)
    return graph


@promise("Graph")
@in_every_order(schedules=2)
def test_dozens_of_graphs_are_all_their_own(lab: Lab) -> None:
    """Forty graphs give their own results, after every third graph has been dropped."""
    (stream,) = lab.streams("s")
    graphs = [_adding(lab, stream, number) for number in range(1, _GRAPHS + 1)]
    del graphs[::3]
    for _ in range(2):
        for graph in reversed(graphs):
            graph.replay(stream)
    stream.synchronize()
    found = [lab.current_values(graph.outputs["y"]) for graph in graphs]
    expect(found, [2 * number for number in range(1, _GRAPHS + 1) if (number - 1) % 3], "what each graph added, twice")


@promise("Graph", "``replay`` enqueues the whole graph on a stream like one operation.")
@in_every_order(schedules=2)
def test_hundreds_of_replays_are_pending(lab: Lab) -> None:
    """None of 300 replays that are enqueued after slow work is lost."""
    (stream,) = lab.streams("s")
    graph = _adding(lab, stream, 1)
    lab.slow(stream)
    for _ in range(_REPLAYS):
        graph.replay(stream)
    expect(lab.read_tensor(stream, graph.outputs["y"]), _REPLAYS, "what so many replays added")


@promise("Graph.release")
@pytest.mark.parametrize("together", [False, True], ids=["own pools", "one pool"])
def test_a_released_graph_leaves_the_others_alone(lab: Lab, together: bool) -> None:
    """A released graph raises an error at a replay, can be released again, and other graphs with its name still work."""
    (stream,) = lab.streams("s")
    pool = lab.backend.create_graph_pool("pool") if together else None
    graphs = [_adding(lab, stream, number, pool) for number in range(1, 4)]
    released = graphs.pop(1)
    released.replay(stream)
    expect(lab.read_tensor(stream, released.outputs["y"]), 2, "the output of a graph before its release")
    for _ in range(2):
        released.release("of the test")
    with pytest.raises(InterfaceError, match="of the test"):
        released.replay(stream)
    for graph, wanted in zip(graphs, (1, 3), strict=True):
        graph.replay(stream)
        expect(lab.read_tensor(stream, graph.outputs["y"]), wanted, "the output of a graph after another one's release")


@needs("captures_graphs")
@promise("Graph.release", "Release the captured work")
@pytest.mark.parametrize("how", ["released", "dropped"])
def test_graphs_come_and_go(lab: Lab, how: str) -> None:
    """Two dozen graphs that are captured, replayed and given up in turn give their results, and give all memory back."""
    backend = lab.backend
    (stream,) = lab.streams("s")
    y = lab.full(stream, 0)
    allocated = []

    def fn(context: CaptureContext) -> None:
        large = torch.zeros(_TEMPORARY, device=y.device)
        context.outputs["y"].copy_(large[: y.numel()] + 1)

    for cycle in range(_CYCLES):
        graph = backend.capture("same", fn, stream=stream, inputs={}, outputs={"y": y})
        lab.fill(stream, y, 7)
        graph.replay(stream)
        expect(lab.read_tensor(stream, y), 1.0, f"the output of graph {cycle}")
        if how == "released":
            graph.release("of the test")
        del graph
        gc.collect()
        backend.synchronize()
        allocated.append(backend.memory_info().allocated)
    if backend.capabilities.memory_limit:
        grown = allocated[-1] - allocated[_CYCLES // 2]
        assert grown < _TEMPORARY, f"{_CYCLES // 2} graphs of 1 MiB were {how}, and {grown} bytes more are allocated"


@promise("Graph", "``replay`` enqueues the whole graph on a stream like one operation.")
def test_random_programs_with_graphs(random_programs: Callable[[str], None]) -> None:
    """Several graphs are replayed in turn and concurrently, and dropped while they run."""
    random_programs("graphs")
