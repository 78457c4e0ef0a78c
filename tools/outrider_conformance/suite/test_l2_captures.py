"""L2: a capture refuses unsuitable calls, and a failed capture leaves streams, scopes, events and pools usable.

An error inside a graph is raised like an error outside a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import Tensor

from outrider.device import (
    Backend,
    CapabilityError,
    CaptureContext,
    CaptureError,
    DeviceError,
    DeviceFault,
    Graph,
    StreamOrderError,
)
from outrider_conformance.lab import WIDTH, Lab, builtin_exceptions, call_on_new_thread, error_of, expect, in_every_order
from outrider_conformance.promises import needs, promise
from outrider_conformance.reporting.verdict import not_applicable
from outrider_conformance.suite.test_l1_errors import WAITS, fallible
from outrider_conformance.suite.test_l2_graphs import triple

_BUFFERS = 12
_SCALARS = ("b4", "b9")
"""Names of the buffers with one element, which a driver may pass to a kernel by value."""
_COPIES = ("cpu", "tolist")


def _still_works(lab: Lab, backend: Backend) -> None:
    """Check that streams, scopes, events, graphs and pools work after a failure."""
    a, b = lab.streams("after a", "after b")
    x, y = lab.full(a, 0), lab.full(b, 0)
    lab.fill_late(a, x, 1)
    b.wait(lab.record(a, "after"))
    lab.expect_read(b, y, x, 1.0, "an ordinary exchange after the failure")
    graph = triple(lab, a, "after", backend.create_graph_pool("after"))
    lab.fill_late(a, graph.inputs["x"], 2)
    graph.replay(a)
    expect(lab.read_tensor(a, graph.outputs["y"]), 7.0, "a graph captured after the failure")
    assert backend.active_capture is None, "a capture is still open on this thread"


@needs("captures_in_part")
@promise("Capabilities.captures_in_part", "A capture raises :class:`CaptureError` for some operators and kernels")
@pytest.mark.parametrize("name", ["matmul", "softmax", "cumsum", "add"])
def test_an_operator_is_captured_or_refused(lab: Lab, name: str) -> None:
    """A capture of an operator replays it, or raises CaptureError and leaves the stream usable."""
    backend = lab.backend
    (stream,) = lab.streams("s")
    x, y = lab.full(stream, 0), lab.full(stream, 0)
    operators: dict[str, Callable[[], Tensor]] = {
        "matmul": lambda: (x.view(-1, 1) @ x.view(1, -1))[0],
        "softmax": lambda: torch.softmax(x, 0) * x,
        "cumsum": lambda: torch.cumsum(x, 0),
        "add": lambda: x + 1,
    }
    lab.fill(stream, x, 2)
    with backend.on(stream):
        wanted = operators[name]()

    def work(_: object) -> None:
        y.copy_(operators[name]())

    try:
        graph = backend.capture(name, work, stream=stream, inputs={"x": x}, outputs={"y": y})
    except CaptureError:
        _still_works(lab, backend)
        return
    graph.replay(stream)
    expect(lab.read_tensor(stream, y), lab.current_values(wanted), f"what a graph computed with {name}")


@needs("captures_graphs")
@promise("Backend.capture", "Raises :class:`CaptureError`, with the cause, when ``fn`` or the device fails")
@pytest.mark.parametrize("after", [0, 2], ids=["at once", "after some work"])
@in_every_order(schedules=8)
def test_a_failing_callable_leaves_no_trace(lab: Lab, after: int) -> None:
    """The error of a failing callable has its cause; the stream, its scope, its events and the pool remain usable."""
    backend = lab.backend
    (stream,) = lab.streams("s")
    x, y = lab.full(stream, 1), lab.full(stream, -1)
    pool = backend.create_graph_pool("pool")
    event, mistake = lab.record(stream), ValueError("of the test")

    def fn(context: CaptureContext) -> None:
        for _ in range(after):
            context.outputs["y"].copy_(context.inputs["x"] * 2)
        raise mistake

    with pytest.raises(CaptureError) as caught:
        backend.capture("fails", fn, stream=stream, inputs={"x": x}, outputs={"y": y}, pool=pool)
    causes = [caught.value.__cause__, getattr(caught.value.__cause__, "__cause__", None)]
    assert mistake in causes, f"the cause is lost: {causes}"
    assert backend.active_capture is None, "a capture is still open on this thread"
    lab.fill_late(stream, x, 5)
    expect(stream.record(event), 2, "the generation of an event from before the failure")
    lab.expect_read(stream, y, x, 5.0, "work on the stream whose capture failed")
    graph = triple(lab, stream, "again", pool)
    lab.fill(stream, graph.inputs["x"], 2)
    graph.replay(stream)
    expect(lab.read_tensor(stream, graph.outputs["y"]), 7.0, "a second capture with the same stream and pool")
    _still_works(lab, backend)


@needs("captures_graphs")
@promise("Backend.capture", "Raises :class:`CaptureError`, with the cause, when ``fn`` or the device fails")
def test_an_exception_of_any_type_fails_the_capture(lab: Lab) -> None:
    """Each builtin exception of a callable is the cause of a CaptureError, and a device error passes unchanged."""
    backend = lab.backend
    (stream,) = lab.streams("s")
    for error in (DeviceFault("of the test"), *builtin_exceptions()):

        def fn(_: CaptureContext, error: BaseException = error) -> None:
            raise error

        found = cause = error_of(partial(backend.capture, "raises", fn, stream=stream, inputs={}, outputs={}))
        while cause is not None and cause is not error and not isinstance(error, DeviceFault):
            cause = cause.__cause__
        assert cause is error, f"a callable raised {error!r}, and its capture {found!r}: the graph would lack work"
        assert backend.active_capture is None, f"a capture is still open after {error!r}"
        expect(lab.read_tensor(stream, lab.full(stream, 1)), 1.0, f"work after {error!r} in a capture")
    _still_works(lab, backend)


@promise("Graph")
@pytest.mark.parametrize("made", ["here", "on another thread"])
@in_every_order(schedules=4)
def test_a_replay_reads_and_writes_every_buffer(lab: Lab, made: str) -> None:
    """A graph copies each of a dozen inputs, of several dtypes and partly strided views, to an output of its own. It gets
    its scalars unchanged. The capture may be a new thread's.
    """
    backend = lab.backend
    (stream,) = lab.streams("s")
    dtypes = [*sorted(backend.capabilities.dtypes, key=str), torch.int64, torch.int32, torch.uint8, torch.bool]

    def buffers(strided: int) -> dict[str, Tensor]:
        wholes = [lab.full(stream, 0, dtype=dtypes[n % len(dtypes)], width=2 * WIDTH) for n in range(_BUFFERS)]
        made = {f"b{n}": whole[1::2] if n % 3 == strided else whole[WIDTH:] for n, whole in enumerate(wholes)}
        return {name: tensor[:1] if name in _SCALARS else tensor for name, tensor in made.items()}

    inputs, outputs = buffers(0), buffers(1)
    scalars: dict[str, bool | int | float] = {"flag": True, "small": 0.1, "large": (1 << 40) + 1}
    graphs: list[Graph] = []

    def fn(context: CaptureContext) -> None:
        expect({**context.scalars}, scalars, "the scalars of a capture")
        for name in inputs:
            context.outputs[name].copy_(context.inputs[name])

    def capture() -> None:
        graphs.append(backend.capture("copies", fn, stream=stream, inputs=inputs, outputs=outputs, scalars=scalars))

    capture() if made == "here" or backend.control is not None else call_on_new_thread(capture)
    for turn in (1, 2, 3):
        for number, tensor in enumerate(inputs.values()):
            lab.fill(stream, tensor, (number + turn) % 2 if tensor.dtype == torch.bool else number + 20 * turn)
        graphs[0].replay(stream)
        stream.synchronize()
        for name in inputs:
            expect(lab.current_values(outputs[name]), lab.current_values(inputs[name]), f"output {name} of replay {turn}")


@needs("captures_graphs")
@promise("CaptureError", "Streams, pools and the ambient stream are as they were before it.")
@pytest.mark.parametrize("fails", [False, True], ids=["captured", "failed"])
@in_every_order(schedules=8)
def test_the_scope_around_a_capture_is_restored(lab: Lab, fails: bool) -> None:
    """Work after a capture on another stream runs on the stream of the surrounding scope."""
    backend = lab.backend
    scope, stream = lab.streams("scope", "stream")
    x, y, z = lab.full(scope, 0), lab.full(scope, 0), lab.full(stream, 0)

    def fn(context: CaptureContext) -> None:
        context.outputs["z"].add_(1)
        if fails:
            raise ValueError("of the test")

    lab.slow(scope)
    with backend.on(scope):
        x.fill_(1)
        try:
            backend.capture("in a scope", fn, stream=stream, inputs={}, outputs={"z": z})
        except CaptureError:
            assert fails, "the capture failed"
        y.copy_(x)
    expect(lab.read_tensor(scope, y), 1.0, "work in the scope, after the capture")


@needs("captures_graphs")
@promise("Backend.check_not_capturing")
@pytest.mark.parametrize(
    "use",
    [
        lambda lab, s, e, g: s.synchronize(),
        lambda lab, s, e, g: s.query(),
        lambda lab, s, e, g: e.synchronize(),
        lambda lab, s, e, g: e.query(),
        lambda lab, s, e, g: lab.backend.synchronize(),
        lambda lab, s, e, g: g.replay(s),
        lambda lab, s, e, g: lab.backend.capture("nested", lambda _: None, stream=s, inputs={}, outputs={}),
    ],
    ids=[
        *("stream.synchronize", "stream.query", "event.synchronize", "event.query", "backend.synchronize"),
        *("graph.replay", "nested capture"),
    ],
)
def test_what_needs_results_is_refused_while_capturing(lab: Lab, use: Callable[..., object]) -> None:
    """A wait or query inside a capture raises an error, and the device works afterwards."""
    backend = lab.backend
    stream, other = lab.streams("s", "other")
    y = lab.full(stream, 0)
    event = lab.record(other)
    graph = triple(lab, other)
    refused: list[Exception] = []

    def fn(context: CaptureContext) -> None:
        context.outputs["y"].add_(1)
        if backend.active_capture is None:
            return  # a warm-up, in which all of it is allowed
        try:
            use(lab, stream, event, graph)
        except (StreamOrderError, CaptureError) as error:
            refused.append(error)
            raise

    with pytest.raises(CaptureError):
        backend.capture("asks", fn, stream=stream, inputs={}, outputs={"y": y})
    assert refused, "it wasn't refused inside the capture"
    _still_works(lab, backend)


@needs("captures_graphs")
@promise("Backend.capture", "a library that synchronises (``Tensor.item``) fails the capture.")
@pytest.mark.parametrize(
    "read",
    [lambda x: x.sum().item(), lambda x: bool((x > 0).any()), lambda x: x.cpu(), lambda x: x.tolist()],
    ids=["item", "bool", *_COPIES],
)
def test_a_library_that_synchronises_fails_the_capture(
    lab: Lab, read: Callable[[Tensor], object], request: pytest.FixtureRequest
) -> None:
    """A value that torch reads on the host inside a capture raises an error, and the device works afterwards."""
    backend = lab.backend
    if not backend.is_host(torch.ones(1)) and request.node.callspec.id in _COPIES:
        not_applicable("the device computes in host memory: nothing is copied")
    (stream,) = lab.streams("s")
    x, y = lab.full(stream, 1), lab.full(stream, 0)
    found: list[object] = []

    def fn(context: CaptureContext) -> None:
        context.outputs["y"].add_(1)
        if backend.active_capture is not None and not backend.active_capture.rehearsal:
            found.append(read(context.outputs["y"]))

    try:
        backend.capture("reads", fn, stream=stream, inputs={"x": x}, outputs={"y": y})
    except (CaptureError, DeviceError):
        pass
    else:
        raise AssertionError(f"a value was read in a capture, in which nothing runs, and nothing was raised: {found}")
    _still_works(lab, backend)


@needs("captures_graphs")
@promise("Backend.capture", "capture is thread-local, and a query by another thread doesn't break it.")
def test_another_thread_may_query_during_a_capture(lab: Lab) -> None:
    """Another thread queries and enqueues work on its own stream while this thread captures."""
    backend = lab.backend
    stream, other = lab.streams("s", "other")
    x, y, z = lab.full(stream, 1), lab.full(stream, 0), lab.full(other, 0)
    event = lab.record(other)

    def watch() -> None:
        event.query()
        other.query()
        with backend.on(other):
            z.fill_(1)  # may run twice: a device may run the callable before the capture
        other.record(event)
        event.synchronize()

    def fn(context: CaptureContext) -> None:
        middle = context.inputs["x"] * 2
        if backend.active_capture is not None:
            call_on_new_thread(watch)
        context.outputs["y"].copy_(middle)

    graph = backend.capture("watched", fn, stream=stream, inputs={"x": x}, outputs={"y": y})
    expect(lab.read_tensor(other, z), 1.0, "work of another thread during the capture")
    lab.fill(stream, x, 4)
    lab.fill(other, z, 5)
    graph.replay(stream)
    expect(lab.read_tensor(stream, y), 8.0, "the output of the graph that was captured meanwhile")
    expect(lab.read_tensor(other, z), 5.0, "work of the other thread, which a replay must not do again")


@promise("Backend.provoke_fault", "*Capture.* A captured operation fails at each replay of the graph.")
@pytest.mark.parametrize("wait", WAITS)
@in_every_order(schedules=6)
def test_every_way_to_wait_raises_what_failed_in_a_graph(lab: Lab, wait: str) -> None:
    """Each replay of a failing graph raises its error once; other graphs and later work run."""
    fallible(lab)
    backend = lab.backend
    a, b = lab.streams("a", "b")
    x, y = lab.full(a, 2), lab.full(a, 0)
    fails = True

    def fn(context: CaptureContext) -> None:
        context.outputs["y"].copy_(context.inputs["x"])
        if fails:
            backend.provoke_fault(b)

    try:
        broken = backend.capture("fails", fn, stream=b, inputs={"x": x}, outputs={"y": y})
    except CaptureError as error:
        if isinstance(error.__cause__, CapabilityError):
            not_applicable(str(error.__cause__))
        raise
    with suppress(DeviceError):  # a warm-up has run it
        backend.synchronize()
    fails = False
    whole = backend.capture("works", fn, stream=b, inputs={"x": x}, outputs={"y": y})
    for turn in (1.0, 2.0):
        lab.fill_late(b, x, turn)
        fails = True  # for a device without graphs, which runs the callable now
        broken.replay(b)
        fails = False
        event = lab.record(b)
        with pytest.raises(DeviceFault):
            WAITS[wait](backend, b, event)
        for again in WAITS.values():
            again(backend, b, event)
    lab.fill(b, x, 3)
    whole.replay(b)
    expect(lab.read_tensor(b, y), 3.0, "what another graph copied after the error was raised")
