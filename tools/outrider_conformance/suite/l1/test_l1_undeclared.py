"""L1: undeclared abilities do not work. Each ability is tried as if declared; one that works must be declared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider.device import CaptureContext
from outrider_conformance.lab import Lab, expect, observing
from outrider_conformance.observer_log import log_cache_write
from outrider_conformance.promises import promise
from outrider_conformance.reporting.verdict import not_applicable

_WORDS = "and so does a working ability that isn't declared."


def _asynchronous(lab: Lab) -> bool:
    def is_pending() -> bool:
        a, x = lab.one_stream()
        lab.fill_late(a, x, 1)
        return not a.query()

    return lab.sees(observing(is_pending))


def _concurrent(lab: Lab) -> bool:
    def second_finishes_first() -> bool:
        a, b, x, y = lab.two_streams()
        lab.fill_late(a, x, 1)
        lab.fill(b, y, 2)
        b.synchronize()
        return not a.query()

    return lab.sees(observing(second_finishes_first))


def _event_timing(lab: Lab) -> bool:
    (stream,) = lab.streams("s")
    start, end = (lab.backend.create_event(name, timing=True) for name in ("start", "end"))
    stream.record(start)
    lab.slow(stream)
    stream.record(end)
    stream.synchronize()
    return start.elapsed_ms(end) > 0


def _flags(lab: Lab) -> bool:
    a, b, x, y = lab.two_streams()
    flag = lab.backend.create_flag("f")
    lab.fill_late(a, x, 1)
    flag.set(a)
    flag.wait(b)
    lab.copy(b, y, x)
    return bool(lab.read_tensor(b, y) == 1.0)


def _perturbs_timing(lab: Lab) -> bool:
    (stream,) = lab.streams("s")
    lab.backend.delay(stream, 1 << 20)
    stream.synchronize()
    return True


def _memory_limit(lab: Lab) -> bool:
    return lab.backend.memory_info().total > 0


def _captures_graphs(lab: Lab) -> bool:
    backend = lab.backend
    (stream,) = lab.streams("s")
    x, y = lab.full(stream, 1), lab.full(stream, 0)
    calls = []

    def fn(context: CaptureContext) -> None:
        calls.append(1)
        context.outputs["y"].copy_(context.inputs["x"])

    graph = backend.capture("probe", fn, stream=stream, inputs={"x": x}, outputs={"y": y})
    before = len(calls)
    lab.fill(stream, x, 3)
    graph.replay(stream)
    return bool(lab.read_tensor(stream, y) == 3.0) and len(calls) == before


def _forks_in_capture(lab: Lab) -> bool:
    backend = lab.backend
    a, b = lab.streams("a", "b")
    x, y = lab.full(a, 1), lab.full(a, 0)
    fork, join = backend.create_event("fork"), backend.create_event("join")

    def fn(context: object) -> None:
        del context
        a.record(fork)
        b.wait(fork)
        with backend.on(b):
            y.copy_(x)
        b.record(join)
        a.wait(join)

    graph = backend.capture("probe", fn, stream=a, inputs={"x": x}, outputs={"y": y})
    lab.fill(a, x, 3)
    graph.replay(a)
    return bool(lab.read_tensor(a, y) == 3.0)


def _waits_inside_graphs(lab: Lab) -> bool:
    backend = lab.backend
    a, b = lab.streams("a", "b")
    x, y = lab.full(b, 1), lab.full(a, 0)
    event = lab.record(b)

    def fn(context: object) -> None:
        del context
        a.wait(event)
        y.copy_(x)

    graph = backend.capture("probe", fn, stream=a, inputs={"x": x}, outputs={"y": y})
    lab.fill_late(b, x, 3)
    b.record(event)
    graph.replay(a)
    return bool(lab.read_tensor(a, y) == 3.0)


def _updates_graph_params(lab: Lab) -> bool:
    backend = lab.backend
    (stream,) = lab.streams("s")
    y = lab.full(stream, 0)

    def fn(context: CaptureContext) -> None:
        context.outputs["y"].fill_(context.params["value"].value[0])

    graph = backend.capture("probe", fn, stream=stream, inputs={}, outputs={"y": y}, params={"value": [1]})
    graph.update_params({"value": [4]}, stream=stream)
    graph.replay(stream)
    return bool(lab.read_tensor(stream, y) == 4.0)


def _reports_accesses(lab: Lab) -> bool:
    return any(operation.accesses for operation in log_cache_write(lab.backend, (3,))[0].operations)


def _row_exact_accesses(lab: Lab) -> bool:
    return bool(log_cache_write(lab.backend, (3,))[0].rows)


@promise("Capabilities", _WORDS)
@pytest.mark.parametrize(
    ("ability", "base", "works"),
    [
        ("asynchronous", None, _asynchronous),
        ("concurrent_streams", "asynchronous", _concurrent),
        ("event_timing", None, _event_timing),
        ("flags", None, _flags),
        ("perturbs_timing", None, _perturbs_timing),
        ("memory_limit", None, _memory_limit),
        ("captures_graphs", None, _captures_graphs),
        ("forks_in_capture", "captures_graphs", _forks_in_capture),
        ("waits_inside_graphs", "captures_graphs", _waits_inside_graphs),
        ("updates_graph_params", "captures_graphs", _updates_graph_params),
        ("reports_accesses", None, _reports_accesses),
        ("row_exact_accesses", "reports_accesses", _row_exact_accesses),
    ],
    ids=lambda value: value if isinstance(value, str) and value else "",
)
def test_what_works_is_declared(lab: Lab, ability: str, base: str | None, works: Callable[[Lab], bool]) -> None:
    """An undeclared ability does not work. Stream priorities are left out, since their effect cannot be observed."""
    declared = lab.backend.capabilities
    if getattr(declared, ability):
        not_applicable(f"{ability} is declared")
    if base is not None and not getattr(declared, base):
        not_applicable(f"{ability} means nothing without {base}")
    try:
        found = works(Lab(lab.backend.with_capabilities(**{ability: True}), lab.pace))
    except Exception:  # whatever the device says when it can't: that's the right answer here
        found = False
    assert not found, f"{ability} works but isn't declared: set Capabilities({ability}=True), so that it's used and tested"


@promise("Capabilities.dtypes", "Floating dtypes in which every kernel of the backend's KernelSet works.")
def test_dtypes_compute(lab: Lab) -> None:
    """A tensor of each declared dtype can be made, added and read back."""
    (stream,) = lab.streams("s")
    for dtype in sorted(lab.backend.capabilities.dtypes, key=str):
        x = lab.full(stream, 2, dtype=dtype)
        with lab.backend.on(stream):
            y = x + x
        expect(lab.read_tensor(stream, y), 4.0, f"2 + 2 in {dtype}")
        expect(y.dtype, dtype, "the dtype of a sum")
    stream.synchronize()
    assert torch.float32 in lab.backend.capabilities.dtypes, "float32 isn't declared: the kit and the bundled model need it"
