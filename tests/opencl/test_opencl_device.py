"""The device is asynchronous for real: a missing wait reads the old value, and the sanitizer names it."""

from __future__ import annotations

import pytest
import torch

from outrider.device import CaptureError, DeviceFault, EagerGraph
from outrider_sanitizer import FindingKind, watch

LATE = 50_000_000
"""Cycles of a delay, which are nanoseconds here."""


@pytest.fixture(scope="module", params=["in-order", "out-of-order"])
def backend(opencl, request):
    return opencl(queues=request.param)


@pytest.mark.parametrize("waits", [True, False])
def test_only_a_wait_orders_two_streams_and_the_sanitizer_names_a_missing_one(backend, waits):
    a, b, event = backend.create_stream("a"), backend.create_stream("b"), backend.create_event("ready")
    with backend.on(a):
        x, y = torch.zeros(4), torch.zeros(4)
    backend.synchronize()
    with watch(backend) as report:
        backend.delay(a, LATE)
        with backend.on(a):
            x.fill_(1)
        a.record(event)
        if waits:
            b.wait(event)
        with backend.on(b):
            y.copy_(x)
        backend.synchronize()
    assert y.tolist() == [float(waits)] * 4
    assert [finding.kind for finding in report] == ([] if waits else [FindingKind.READ_AFTER_WRITE])


@pytest.mark.parametrize("waits", [True, False])
def test_the_sanitizer_sees_an_opencl_kernel(backend, waits):
    a, b, event = backend.create_stream("a"), backend.create_stream("b"), backend.create_event("copied")
    with backend.on(a):
        source, out = torch.arange(12).view(4, 3).clone(), torch.zeros(4, 6, dtype=torch.int64)
    backend.synchronize()
    with watch(backend) as report:
        with backend.on(a):
            backend.kernels.copy_rows(source, out[:, 2:5])
        a.record(event)
        if waits:
            b.wait(event)
        with backend.on(b):
            total = out.sum()
        backend.synchronize()
    assert out[3].tolist() == [0, 0, 9, 10, 11, 0]
    assert [finding.kind for finding in report] == ([] if waits else [FindingKind.READ_AFTER_WRITE])
    assert "outrider::copy_rows" in str(report) or waits
    assert int(total) == 66 or not waits


def test_a_scope_reads_values_after_the_work_before_them(backend):
    stream = backend.create_stream("s")
    with backend.on(stream):
        x = torch.zeros(3)
        for value, read in ((1.0, torch.Tensor.tolist), (2.0, lambda tensor: tensor.numpy().tolist())):
            backend.delay(stream, LATE // 10)
            x.fill_(value)
            assert read(x) == [value] * 3
        assert torch.empty(4, device="meta").fill_(1).is_meta  # computes shapes alone


def test_a_record_on_an_empty_stream_waits_for_no_other_stream(backend):
    busy, empty, event = backend.create_stream("busy"), backend.create_stream("empty"), backend.create_event("empty")
    backend.delay(busy, LATE)
    empty.record(event)
    assert event.synchronize_within(0.02)
    assert not busy.query()
    busy.synchronize()


def test_a_flag_holds_a_wait_that_comes_before_its_set_and_can_be_reset(backend):
    a, b, flag = backend.create_stream("a"), backend.create_stream("b"), backend.create_flag("f")
    for _ in range(2):
        flag.wait(b)
        assert not b.query()
        flag.set(a)
        b.synchronize()
        flag.reset(b)
        b.synchronize()


def test_work_survives_its_tensors_and_a_fault_is_raised_once(backend):
    stream = backend.create_stream("s")
    with backend.on(stream):
        out = torch.zeros(1000)
        backend.delay(stream, LATE // 5)
        out.copy_(torch.ones(1000) * 3)  # the temporary is dropped at once
        others = [torch.full((1000,), 7.0) for _ in range(20)]
    stream.synchronize()
    assert out.unique().tolist() == [3.0]
    assert len(others) == 20
    backend.provoke_fault(stream)
    with pytest.raises(DeviceFault, match="a fault was provoked"):
        stream.synchronize()
    stream.synchronize()


def test_memory_is_given_back_with_its_last_tensor(backend):
    before = backend.memory_info().allocated
    buffer = backend.empty_pinned("test", (1 << 20,), torch.uint8)
    assert backend.is_pinned(buffer.tensor[5:])
    assert not backend.is_pinned(torch.empty(4))
    assert backend.memory_info().allocated == before + (1 << 20)
    del buffer
    assert backend.memory_info().allocated == before


def test_without_command_buffers_graphs_are_declared_absent_and_a_capture_is_eager(backend):
    stream, calls = backend.create_stream("s"), []
    graph = backend.capture("eager", lambda context: calls.append(1), stream=stream, inputs={}, outputs={})
    assert not backend.capabilities.captures_graphs
    assert isinstance(graph, EagerGraph)
    graph.replay(stream)
    assert calls == [1]


def test_a_command_buffer_replays_kernels_in_order_and_refuses_native_work(with_graphs):
    backend = with_graphs
    stream, other = backend.create_stream("s"), backend.create_stream("other")
    with backend.on(stream):
        x, y, half = torch.full((4,), 2.0), torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)
    stream.synchronize()

    def fn(context):
        y.copy_(x * 3 + 1)
        half.copy_(y)

    graph = backend.capture("g", fn, stream=stream, inputs={"x": x}, outputs={"y": y})
    assert y.tolist() == [0.0] * 4  # a capture runs nothing
    backend.delay(other, LATE)
    with backend.on(other):
        x.fill_(5)
    graph.replay(other)
    graph.replay(other)
    assert y.tolist() == [0.0] * 4
    other.synchronize()
    assert y.tolist() == [16.0] * 4 == half.tolist()
    with pytest.raises(CaptureError, match="operator 'mm' runs on .* as a native kernel, which a command buffer can't hold"):
        backend.capture("m", lambda context: torch.mm(x.view(2, 2), x.view(2, 2)), stream=stream, inputs={}, outputs={})
    with backend.on(stream):
        x.add_(1)  # the thread is out of the capture
    stream.synchronize()
    assert x.tolist() == [6.0] * 4
