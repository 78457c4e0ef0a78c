"""Staleness of strided regions, and of reads whose rows are told late: neither makes an alarm that isn't one."""

import pytest
import torch

from outrider_sanitizer import watch
from outrider_sanitizer.report import FindingKind
from outrider_sim.exploration import run_once
from outrider_sim.plugin import create_backend
from outrider_sim.strategies import make_strategy


def kinds(program, strategy="program"):
    backend = create_backend(0, {})
    reports = []

    def run(device):
        with watch(device) as report:
            program(device)
        reports.append(report)

    assert run_once(backend, run, make_strategy(strategy, 0, {})) is None
    return [finding.kind for finding in reports[0]]


def doubling(backend, stream, name, x, y):
    """A graph that writes twice ``x`` to ``y``."""

    def body(context):
        context.outputs["y"].copy_(context.inputs["x"] * 2)

    return backend.capture(name, body, stream=stream, inputs={"x": x}, outputs={"y": y})


@pytest.mark.parametrize("columns", [2, 1])
def test_the_columns_of_a_smaller_batch_are_written_and_no_others_are_read(columns):
    """A graph's input is some columns of a buffer; a larger batch's graph reads more of them."""

    def program(backend):
        stream = backend.create_stream("forward")
        with backend.on(stream):
            whole = torch.zeros(3, 4, device=backend.device)
            y = torch.zeros(3, 4, device=backend.device)
        graphs = {}
        for count in (4, 2):
            graphs[count] = doubling(backend, stream, f"verify[{count}]", whole[:, :count], y[:, :count])
        for count, written in ((2, 2), (4, 4), (2, columns), (2, columns)):
            with backend.on(stream):
                whole[:, :written] = float(count)
            graphs[count].replay(stream)
        stream.synchronize()

    found = kinds(program)
    assert found == ([] if columns == 2 else [FindingKind.STALE_PADDING])


@pytest.mark.parametrize("rows", [20, 19])
def test_rows_side_by_side_of_a_smaller_batch_are_written_and_no_others_are_read(rows):
    """Each half of the rows is a statement's of its own. What lies between two runs of one isn't left from a larger batch."""

    def program(backend):
        stream = backend.create_stream("forward")
        with backend.on(stream):
            whole = torch.zeros(40, 4, device=backend.device)
            y = torch.zeros(40, 4, device=backend.device)
        graphs = {}
        for count in (40, 20):
            graphs[count] = doubling(backend, stream, f"extend[{count}]", whole[:count], y[:count])
        for count, written in ((20, 20), (40, 40), (20, rows), (20, rows)):
            with backend.on(stream):
                for half in (whole[:, :2], whole[:, 2:]):
                    half[:written] = float(count)
            graphs[count].replay(stream)
        stream.synchronize()

    found = kinds(program)
    assert found == ([] if rows == 20 else [FindingKind.STALE_PADDING])


@pytest.mark.parametrize("strategy", ["program", "lazy"])
@pytest.mark.parametrize("again", [True, False])
def test_a_read_by_rows_before_the_mark_is_no_stale_read(strategy, again):
    """Which rows it takes is known when it runs, and by then the host has declared the contents over."""

    def program(backend):
        stream = backend.create_stream("forward")
        with backend.on(stream):
            index = torch.tensor([0, 1, 2], device=backend.device)
            x = torch.zeros(3, 4, device=backend.device)
            for turn in range(2):
                backend.mark_stale(x, "a new batch begins")
                stream.synchronize()  # the read of the batch before runs, at the latest
                if again or turn == 0:
                    x.fill_(float(turn))
                x.index_select(0, index)
        backend.synchronize()

    found = kinds(program, strategy)
    assert found == ([] if again else [FindingKind.STALE])
