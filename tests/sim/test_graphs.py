"""Capture and replay on recorded addresses."""

import pytest
import torch

from outrider.device import CaptureError, InterfaceError
from outrider_sim.exploration import explore


def static(backend, *values):
    made = [torch.full((4,), float(v), device=backend.device) for v in values]
    backend.synchronize()
    return made


def test_forked_branches_run_concurrently_and_join(sim):
    def program(backend, joined):
        stream, side = backend.create_stream("s"), backend.create_stream("side")
        given, out = static(backend, 1, 0)

        def body(context):
            fork, join = backend.create_event("fork"), backend.create_event("join")
            half = context.inputs["given"] * 2
            stream.record(fork)
            side.wait(fork)
            with backend.on(side):
                other = half + 1
            context.outputs["out"].copy_(half) if joined else None
            side.record(join)
            stream.wait(join)
            context.outputs["out"].copy_(other)

        graph = backend.capture("g", body, stream=stream, inputs={"given": given}, outputs={"out": out})
        for _ in range(2):
            graph.replay(stream)
        stream.synchronize()
        assert out.tolist() == [3.0] * 4

    result = explore(sim(), lambda b: program(b, True), strategy="random", iterations=50)
    assert result.failure is None


def test_a_branch_that_isnt_joined_fails_the_capture(sim):
    backend = sim()
    stream, side = backend.create_stream("s"), backend.create_stream("side")

    def body(context):
        fork = backend.create_event("fork")
        stream.record(fork)
        side.wait(fork)
        with backend.on(side):
            context.inputs["given"].add_(1)

    with pytest.raises(CaptureError, match="'side' was pulled into"):
        backend.capture("g", body, stream=stream, inputs={"given": static(backend, 1)[0]}, outputs={})
    for s in (stream, side):
        with backend.on(s):
            assert torch.ones(1, device=backend.device).item() == 1


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (lambda b, c: c.inputs["given"].sum().item(), CaptureError),
        (lambda b, c: c.inputs["given"].cpu(), CaptureError),
        (lambda b, c: c.inputs["given"].copy_(torch.ones(4)), CaptureError),
        (lambda b, c: c.inputs["given"][c.inputs["given"] > 0], CaptureError),
        (lambda b, c: b.synchronize(), CaptureError),
        (lambda b, c: 1 / 0, CaptureError),
    ],
)
def test_a_failed_capture_leaves_everything_as_it_was(sim, body, error):
    backend = sim()
    stream = backend.create_stream("s")
    (given,) = static(backend, 1)
    with pytest.raises(error):
        backend.capture("g", lambda c: body(backend, c), stream=stream, inputs={"given": given}, outputs={})
    assert stream.queue_state.capture is None
    assert backend.active_capture is None
    assert backend.sim.machine.stream is backend.sim.machine.default
    with backend.on(stream):
        assert (given + 1).tolist() == [2.0] * 4
    with pytest.raises(CaptureError, match="wasn't recorded in this capture"):
        backend.capture("h", lambda c: stream.wait(backend.create_event("e")), stream=stream, inputs={}, outputs={})


def test_other_streams_go_on_during_a_capture(sim):
    backend = sim(strategy="random", seed="9")
    stream, other = backend.create_stream("s"), backend.create_stream("other")
    given, out = static(backend, 1, 0)
    with backend.on(other):
        busy = torch.ones(2, device=backend.device) + 1
    graph = backend.capture(
        "g", lambda c: c.outputs["out"].copy_(c.inputs["given"]), stream=stream, inputs={"given": given}, outputs={"out": out}
    )
    assert busy.tolist() == [2.0, 2.0]
    graph.replay(stream)
    stream.synchronize()
    assert out.tolist() == [1.0] * 4


def test_pinned_sources_are_read_again_by_each_replay(sim):
    backend = sim(strategy="lazy")
    stream = backend.create_stream("s")
    (given,) = static(backend, 0)
    staging = backend.empty_pinned("staging", (4,), torch.float32).tensor
    graph = backend.capture(
        "g", lambda c: c.inputs["given"].copy_(staging, non_blocking=True), stream=stream, inputs={"given": given}, outputs={}
    )
    for value in (1.0, 2.0):
        staging.fill_(value)
        graph.replay(stream)
        stream.synchronize()
        assert given.tolist() == [value] * 4


def test_random_operations_draw_anew_at_each_replay(sim):
    backend = sim()
    stream = backend.create_stream("s")
    (out,) = static(backend, 0)
    graph = backend.capture("g", lambda c: c.outputs["out"].uniform_(), stream=stream, inputs={}, outputs={"out": out})
    drawn = []
    for _ in range(2):
        graph.replay(stream)
        stream.synchronize()
        drawn.append(out.tolist())
    assert drawn[0] != drawn[1]


def fill(context):
    context.outputs["out"].fill_(float(context.params["n"].value[0]))


def test_a_rebind_that_changes_the_operations_is_refused(sim):
    backend = sim(like="npu")
    stream = backend.create_stream("s")
    (out,) = static(backend, 0)

    def body(context):
        for _ in range(context.params["n"].value[0]):
            context.outputs["out"].add_(1)

    graph = backend.capture("g", body, stream=stream, inputs={}, outputs={"out": out}, params={"n": [1]})
    with pytest.raises(InterfaceError, match="another sequence"):
        graph.update_params({"n": [3]}, stream=stream)


def test_native_work_can_be_enqueued_and_not_captured(sim):
    """Other operators are captured, and the stream is free again after the refusal."""
    backend = sim(native="mm+bmm")
    stream = backend.create_stream("s")
    with backend.on(stream):
        x, y = torch.ones(2, 2, device=backend.device), torch.zeros(2, 2, device=backend.device)
        y.copy_(x.mm(x))
    assert backend.capabilities.captures_in_part
    assert not sim().capabilities.captures_in_part
    operands = {"stream": stream, "inputs": {"x": x}, "outputs": {"y": y}}
    with pytest.raises(CaptureError, match="mm is native work on this device"):
        backend.capture("native", lambda context: y.copy_(x.mm(x)), **operands)
    graph = backend.capture("plain", lambda context: y.add_(x), **operands)
    graph.replay(stream)
    stream.synchronize()
    assert y.tolist() == [[3.0, 3.0], [3.0, 3.0]]
