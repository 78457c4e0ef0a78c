"""Faults around graphs: their inputs, outputs, addresses and host parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import Backend, CaptureContext, Graph, Stream
from outrider_sanitizer.races.race import Race, expect, filled, order, race
from outrider_sanitizer.report import FindingKind

RACES: list[Race] = []


def _double(context: CaptureContext) -> None:
    torch.mul(context.inputs["x"], 2.0, out=context.outputs["y"])


def _graph(backend: Backend, stream: Stream, size: int = 4) -> tuple[Graph, Tensor, Tensor]:
    x, y = filled(backend, stream, 1.0, size), filled(backend, stream, 0.0, size)
    graph = backend.capture("verify", _double, stream=stream, inputs={"x": x}, outputs={"y": y})
    return graph, x, y


@race(
    RACES,
    FindingKind.WRITE_AFTER_READ,
    names=("record an event on 'forward' after replay 1 of graph 'verify'", "make 'plan' wait"),
)
def input_overwritten(backend: Backend, fixed: bool, forward: Stream, plan: Stream) -> None:
    """A graph's static input is written while a replay reads it.

    Plan fills the static input for the next replay while the last one runs.
    """
    graph, x, y = _graph(backend, forward)
    order(forward, plan)
    graph.replay(forward)
    if fixed:
        order(forward, plan)
    with backend.on(plan):
        x.fill_(5.0)
    with backend.on(forward):
        out = y.clone()
    expect(backend, out, 2.0)


@race(RACES, FindingKind.WRITE_AFTER_READ, names=("event 'shared_reads_done'", "after replay 1 of graph 'verify'"))
def fence_before_the_replay(backend: Backend, fixed: bool, forward: Stream, schedule: Stream) -> None:
    """A fence recorded before a replay doesn't cover the replay.

    The fence says that shared rows have been read, and the replay after it reads the rows again.
    """
    reads_done = backend.create_event("shared_reads_done")
    graph, x, y = _graph(backend, forward)
    with backend.on(forward):
        private = x.clone()
    if not fixed:
        forward.record(reads_done)
    graph.replay(forward)
    if fixed:
        forward.record(reads_done)
    schedule.wait(reads_done)
    with backend.on(schedule):
        x.fill_(5.0)
    expect(backend, y, 2.0)
    del private


@race(RACES, FindingKind.STALE_OUTPUT, names=("output 'y' of graph 'verify'",), visible=False)
def output_after_the_next_replay(backend: Backend, fixed: bool, forward: Stream) -> None:
    """A view of a graph's output is read after the graph has run again.

    The program keeps a view of the output; the next replay overwrites the bytes of the view.
    """
    graph, x, y = _graph(backend, forward)
    with backend.on(forward):
        graph.replay(forward)
        hidden = y[:2].clone() if fixed else y[:2]
        x.fill_(5.0)
        graph.replay(forward)
        used = hidden * 1.0
    expect(backend, used, 2.0 if fixed else 10.0)


@race(RACES, FindingKind.REUSE, names=("graph 'verify'",), visible=False)
def captured_address(backend: Backend, fixed: bool, forward: Stream) -> None:
    """A graph reads the address that it captured, and not the new tensor of the same name.

    Metadata is rebuilt in new memory, and the graph reads the memory of the tensor that was captured.
    """
    table = filled(backend, forward, 1.0)
    y = filled(backend, forward, 0.0)

    def body(context: CaptureContext) -> None:
        context.outputs["y"].copy_(table)

    graph = backend.capture("verify", body, stream=forward, inputs={}, outputs={"y": y})
    if fixed:
        with backend.on(forward):
            table.fill_(2.0)
    else:
        del table
        table = filled(backend, forward, 2.0, 5)
    graph.replay(forward)
    if fixed:
        expect(backend, y, 2.0)


@race(RACES, FindingKind.STALE_PADDING, names=("input 'x'", "bytes 8 to 16"), visible=False)
def stale_padding(backend: Backend, fixed: bool, forward: Stream) -> None:
    """A graph reads rows of an earlier, larger batch as padding.

    A batch of two follows a batch of four: the graph still reads four rows.
    """
    graph, x, y = _graph(backend, forward)
    for batch in (4, 2):
        with backend.on(forward):
            value = torch.full((batch,), float(batch), device=backend.device)
            if fixed:
                x.zero_()
            x[:batch].copy_(value)
        graph.replay(forward)
    expect(backend, y[2:] if fixed else y[:2], 0.0 if fixed else 4.0)


@race(RACES, FindingKind.STALE, names=("a new batch begins",), visible=False)
def marked_over(backend: Backend, fixed: bool, forward: Stream) -> None:
    """Contents that the program declared stale are read.

    A buffer that was marked as stale is read before it is written again.
    """
    graph, x, y = _graph(backend, forward)
    backend.mark_stale(x, "a new batch begins")
    with backend.on(forward):
        x[: 4 if fixed else 3].fill_(3.0)
    graph.replay(forward)
    expect(backend, y[:3], 6.0)


def _parametrised(backend: Backend, stream: Stream) -> tuple[Graph, Tensor]:
    y = filled(backend, stream, 0.0)

    def body(context: CaptureContext) -> None:
        context.outputs["y"].fill_(float(context.params["lengths"].value[0]))

    graph = backend.capture("verify", body, stream=stream, inputs={}, outputs={"y": y}, params={"lengths": [1]})
    return graph, y


@race(RACES, FindingKind.NOT_REBOUND, names=("update_params('lengths')",), visible=False, needs="updates_graph_params")
def not_rebound(backend: Backend, fixed: bool, forward: Stream) -> None:
    """A host parameter of a graph is older than the value that it mirrors.

    The lengths have grown, and the graph still has the lengths of the previous step.
    """
    lengths = filled(backend, forward, 1.0)
    graph, y = _parametrised(backend, forward)
    backend.mark_mirror((graph, "lengths"), lengths)
    graph.replay(forward)
    with backend.on(forward):
        lengths.fill_(2.0)
    if fixed:
        graph.update_params({"lengths": [2]}, stream=forward)
    graph.replay(forward)
    expect(backend, y, 2.0 if fixed else 1.0)


@race(RACES, FindingKind.REBIND, names=("host parameter 'lengths'", "make 'update' wait"), needs="updates_graph_params")
def rebound_during_a_replay(backend: Backend, fixed: bool, forward: Stream, update: Stream) -> None:
    """A host parameter is rebound while a replay still reads it.

    Parameters are rebound for the next replay while the last one may still read them.
    """
    graph, y = _parametrised(backend, forward)
    order(forward, update)
    graph.replay(forward)
    with backend.on(forward):
        out = y.clone()
    if fixed:
        order(forward, update)
    graph.update_params({"lengths": [2]}, stream=update)
    order(update, forward)
    graph.replay(forward)
    expect(backend, out, 1.0)
