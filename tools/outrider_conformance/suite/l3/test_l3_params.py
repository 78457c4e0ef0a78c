"""L3: host parameters of a graph are rebound between replays."""

from __future__ import annotations

import pytest
import torch

from outrider.device import Backend, CapabilityError, CaptureContext, Graph, InterfaceError, Stream
from outrider_conformance.lab import Lab, expect
from outrider_conformance.promises import needs, promise
from outrider_conformance.reporting.verdict import not_applicable


def drop_result(_: object) -> None:
    """Drop a result, so that a lambda returns None."""


def scaled(lab: Lab, stream: Stream) -> Graph:
    """Capture a graph of ``y = x * n`` with the host parameter ``n``, which is 1 at the capture; x is 10."""
    x, y = lab.full(stream, 10), lab.full(stream, 0)

    def fn(context: CaptureContext) -> None:
        source, result = context.inputs["x"], context.outputs["y"]
        lab.backend.reissue(context.params["n"], lambda values: drop_result(torch.mul(source, values[0], out=result)))

    return lab.backend.capture(
        "scaled", fn, stream=stream, inputs={"x": x}, outputs={"y": y}, params={"n": [1], "unused": [7, 8]}
    )


def _rebindable(backend: Backend) -> None:
    if backend.capabilities.captures_graphs and not backend.capabilities.updates_graph_params:
        not_applicable("updates_graph_params isn't declared, and captured graphs can't be rebound without it")


@promise("Graph.update_params", "Rebind host parameters for the replays enqueued after this call.")
def test_a_rebind_changes_the_next_replay(lab: Lab) -> None:
    """Each replay uses the values that were bound last."""
    _rebindable(lab.backend)

    def program(backend: Backend) -> None:
        (stream,) = lab.streams("s")
        graph = scaled(lab, stream)
        found = []
        for values in (None, 4, 5, 5):
            if values is not None:
                graph.update_params({"n": [values]}, stream=stream)
            lab.slow(stream)
            graph.replay(stream)
            found.append(lab.read_tensor(stream, graph.outputs["y"]))
        expect(found, [10.0, 40.0, 50.0, 50.0], "outputs with the parameter as captured, 4, 5 and 5 again")

    lab.check_in_every_order(program)


@promise("Graph.update_params", "The rebinding is work on ``stream``.")
def test_a_rebind_leaves_earlier_replays_alone(lab: Lab) -> None:
    """A queued replay keeps its value when a later call rebinds the parameter on another stream."""
    _rebindable(lab.backend)

    def program(backend: Backend) -> None:
        forward, update = lab.streams("forward", "update")
        graph = scaled(lab, forward)
        kept = [lab.full(forward, 0) for _ in range(3)]
        free, bound = backend.create_event("free"), backend.create_event("bound")
        forward.record(free)
        for turn, keep in enumerate(kept, 2):
            update.wait(free)
            lab.slow(update)
            graph.update_params({"n": [turn]}, stream=update)
            update.record(bound)
            forward.wait(bound)
            lab.slow(forward)
            graph.replay(forward)
            forward.record(free)
            lab.copy(forward, keep, graph.outputs["y"])
        forward.synchronize()
        expect(
            [lab.current_values(keep) for keep in kept], [20.0, 30.0, 40.0], "outputs of three replays, each rebound before"
        )

    lab.check_in_every_order(program)


@promise("Backend", "*Names* are for reports: two objects with one name share nothing.")
def test_a_rebind_leaves_other_graphs_alone(lab: Lab) -> None:
    """A rebind of one of three graphs, all with one name, changes no other graph."""
    _rebindable(lab.backend)
    (stream,) = lab.streams("s")
    graphs = [scaled(lab, stream) for _ in range(3)]
    for turn, rebound in enumerate(graphs, 2):
        rebound.update_params({"n": [turn]}, stream=stream)
        for graph in graphs:
            graph.replay(stream)
        stream.synchronize()
        wanted = [10.0 * (index + 2 if index + 2 <= turn else 1) for index in range(len(graphs))]
        found = [lab.current_values(graph.outputs["y"]) for graph in graphs]
        expect(found, wanted, f"outputs of three graphs after graph {turn - 1} was rebound")


@promise("Graph.update_params", "The values are copied before the call returns.")
def test_values_are_copied(lab: Lab) -> None:
    """The call that rebinds a parameter copies the values: the caller may change its list of them before the replay."""
    _rebindable(lab.backend)
    (stream,) = lab.streams("s")
    graph = scaled(lab, stream)
    values = [6]
    graph.update_params({"n": values}, stream=stream)
    values[0] = 100
    graph.replay(stream)
    expect(lab.read_tensor(stream, graph.outputs["y"]), 60.0, "the output after the caller's list changed")


@promise(
    "Graph.update_params", "Raises :class:`InterfaceError` for a name that the capture doesn't have or a length that differs"
)
def test_wrong_names_and_lengths_are_refused(lab: Lab) -> None:
    """A wrong name or length raises an error and changes no value."""
    (stream,) = lab.streams("s")
    graph = scaled(lab, stream)
    wrongs: list[dict[str, list[int]]] = [{"m": [2]}, {"n": [2, 3]}, {"n": []}]
    for wrong in wrongs:
        with pytest.raises(InterfaceError):
            graph.update_params(wrong, stream=stream)
    graph.replay(stream)
    expect(lab.read_tensor(stream, graph.outputs["y"]), 10.0, "the output after refused rebinds")


@needs("captures_graphs")
@promise("Graph.update_params", "where a captured graph can't be rebound")
def test_a_rebind_is_refused_where_it_is_not_declared(lab: Lab) -> None:
    """A rebind raises an error, since the replay would silently use the old values."""
    if lab.backend.capabilities.updates_graph_params:
        not_applicable("updates_graph_params is declared")
    (stream,) = lab.streams("s")
    graph = scaled(lab, stream)
    with pytest.raises(CapabilityError):
        graph.update_params({"n": [2]}, stream=stream)
