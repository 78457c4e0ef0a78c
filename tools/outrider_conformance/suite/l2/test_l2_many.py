"""L2: many graphs, and many pending replays of one graph."""

from __future__ import annotations

import gc

import pytest
import torch

from outrider.device import CaptureContext, Graph, GraphPool, InterfaceError, Stream
from outrider_conformance.lab import Lab, expect, in_every_order
from outrider_conformance.promises import needs, promise

_GRAPHS = 40
_REPLAYS = 300
_CYCLES = 24
_TEMPORARY = 1 << 18
"""Number of float32 elements of a graph's temporary tensor, 1 MiB."""


def _adding(lab: Lab, stream: Stream, number: int, pool: GraphPool | None = None) -> Graph:
    """Capture a graph that adds ``number`` to its output, through a temporary."""
    y = lab.full(stream, 0, dtype=torch.int64)

    def fn(context: CaptureContext) -> None:
        out = context.outputs["y"]
        out.copy_(out + number)

    graph = lab.backend.capture("adds", fn, stream=stream, inputs={}, outputs={"y": y}, pool=pool)
    lab.fill(stream, y, 0)
    return graph


@promise("Graph", "Captured work, bound to the addresses of its inputs and outputs.")
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


@promise("Graph.release", "Release the captured work; a later replay raises :class:`InterfaceError` with ``why``.")
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
