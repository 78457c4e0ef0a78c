"""L2: many graphs, and many pending replays of one graph."""

from __future__ import annotations

import torch

from outrider.device import CaptureContext, Graph, Stream
from outrider_conformance.lab import Lab, expect, in_every_order
from outrider_conformance.promises import promise

_GRAPHS = 40
_REPLAYS = 300


def _adding(lab: Lab, stream: Stream, number: int) -> Graph:
    """Capture a graph that adds ``number`` to its output, through a temporary."""
    y = lab.full(stream, 0, dtype=torch.int64)

    def fn(context: CaptureContext) -> None:
        out = context.outputs["y"]
        out.copy_(out + number)

    graph = lab.backend.capture(f"adds {number}", fn, stream=stream, inputs={}, outputs={"y": y})
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
