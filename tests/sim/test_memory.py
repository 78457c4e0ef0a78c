"""The allocator and pinned memory: what is handed out again when, and which copies the host waits for."""

import pytest
import torch

from outrider.device import Observer, OutOfDeviceMemory, SynchronousCopyError
from outrider_sanitizer import watch as watch_backend


class Watch(Observer):
    def __init__(self):
        self.synchronized = 0
        self.events = []

    def stream_synchronized(self, stream):
        del stream
        self.synchronized += 1

    def allocated(self, storage, nbytes, stream, location):
        del location
        self.events.append(("allocated", storage, nbytes, stream))

    def freed(self, storage, stream):
        self.events.append(("freed", storage, stream))

    def address_reused(self, storage, previous):
        self.events.append(("reused", storage, previous))

    def host_accessed(self, access, location):
        del location
        self.events.append(("host", access.start, access.end, access.write))


def test_memory_is_reused_in_the_order_of_its_stream(sim):
    backend = sim(strategy="lazy")
    first, second = backend.create_stream("first"), backend.create_stream("second")
    with backend.on(first):
        a = torch.empty(100, device=backend.device)
    address = a.data_ptr()
    del a
    with backend.on(second):
        other = torch.empty(100, device=backend.device)
    with backend.on(first):
        again = torch.empty(100, device=backend.device)
    assert other.data_ptr() != address
    assert again.data_ptr() == address


def test_freed_memory_is_poisoned_in_stream_order(sim):
    backend = sim(strategy="lazy")
    x = torch.ones(4, device=backend.device)
    late = x.detach()._inner  # what a stale reader would see
    y = x + 1
    del x
    backend.synchronize()
    assert y.tolist() == [2.0] * 4
    assert late.isnan().all()
    quiet = sim(poison="off")
    x = torch.ones(4, device=quiet.device)
    late = x._inner
    quiet.synchronize()
    del x
    assert late.tolist() == [1.0] * 4


def test_memory_runs_out_at_the_limit_and_on_request(sim):
    backend = sim(memory="1MiB")
    kept = torch.empty(200_000, device=backend.device)
    with pytest.raises(OutOfDeviceMemory, match="memory"):
        torch.empty(200_000, device=backend.device)
    del kept
    assert torch.empty(200_000, device=backend.device).shape == (200_000,)
    assert backend.memory_info().total == 1 << 20
    with pytest.raises(OutOfDeviceMemory, match="oom@2"):
        sim(fault="oom@2") and [torch.empty(1, device="sim") for _ in range(3)]
    assert torch.ones(1, device="sim").item() == 1


def test_memory_stays_flat(sim):
    backend = sim()
    x = torch.ones(16, 16, device=backend.device)
    for _ in range(50):
        x = (x @ x).softmax(-1)
    backend.synchronize()
    reserved = backend.sim.memory.reserved
    for _ in range(500):
        x = (x @ x).softmax(-1)
    backend.synchronize()
    assert backend.sim.memory.reserved == reserved
    assert backend.sim.memory.allocated <= reserved


def test_graph_memory_is_private(sim):
    backend = sim()
    stream = backend.create_stream("s")
    given, out = torch.ones(64, device=backend.device), torch.empty(64, device=backend.device)
    backend.synchronize()
    seen = []

    def body(context):
        inner = context.inputs["given"] * 2
        seen.append(inner.data_ptr())
        context.outputs["out"].copy_(inner + 1)

    graph = backend.capture("g", body, stream=stream, inputs={"given": given}, outputs={"out": out})
    with backend.on(stream):
        outside = [torch.full((64,), 9.0, device=backend.device) for _ in range(4)]
    assert seen[0] not in [t.data_ptr() for t in outside]
    graph.replay(stream)
    stream.synchronize()
    assert out.tolist() == [3.0] * 64
    assert all(t.tolist() == [9.0] * 64 for t in outside)


def test_pageable_copies_wait_and_pinned_ones_dont(sim):
    backend = sim(strategy="lazy")
    watch = Watch()
    stream = backend.create_stream("s")
    with backend.on(stream):
        x = torch.ones(4, 4, device=backend.device)
        pinned = backend.empty_pinned("p", (4, 4), torch.float32).tensor
        backend.attach(watch)

        def waits(action):
            before = watch.synchronized
            action()
            return watch.synchronized > before

        assert waits(lambda: x.cpu())
        assert waits(lambda: x.copy_(torch.ones(4, 4)))
        assert waits(lambda: x.copy_(torch.ones(4, 4), non_blocking=True))
        assert waits(lambda: x.sum().item())
        assert waits(lambda: x[x > 0])
        assert not waits(lambda: x.copy_(pinned, non_blocking=True))
        assert not waits(lambda: pinned.copy_(x, non_blocking=True))
        assert not waits(lambda: x.to("cpu", non_blocking=True))
        assert waits(lambda: x.copy_(pinned))
        # Strided or cast on the host: silently through pageable memory.
        assert waits(lambda: x.copy_(pinned.t(), non_blocking=True))
        assert waits(lambda: x.copy_(pinned.double(), non_blocking=True))
        assert waits(lambda: pinned.t().copy_(x, non_blocking=True))
        backend.detach()
    with pytest.raises(SynchronousCopyError):
        backend.copy_async(x, pinned.t(), stream=stream)


def test_pinned_tensors(sim):
    backend = sim()
    watch = Watch()
    backend.attach(watch)
    p = torch.arange(6.0).reshape(2, 3).pin_memory()
    assert p.is_pinned()
    assert p[1:].is_pinned()
    assert not (p + 1).is_pinned()
    assert backend.is_pinned(p[0])
    assert not backend.is_pinned(torch.ones(1))
    watch.events.clear()
    p[1].add_(1)
    assert p[0].tolist() == [0.0, 1.0, 2.0]
    assert p.numpy().sum() == 18
    assert watch.events == [("host", 12, 24, True), ("host", 0, 12, False), ("host", 0, 24, False)]
    backend.detach()


def test_rows_that_data_decides_are_told_when_they_are_touched(sim):
    class Rows(Observer):
        def __init__(self):
            self.told = {}

        def rows_touched(self, operation, accesses):
            self.told.setdefault(operation.name, []).extend((a.argument, a.start, a.end, a.write) for a in accesses)

    backend = sim(strategy="lazy")
    device = backend.device
    table = torch.zeros(8, 4, device=device)
    pages = [torch.zeros(2, 4, 1, 2, device=device) for _ in range(2)]
    q, k, v = (torch.ones(3, 1, 2, device=device) for _ in range(3))
    angle = torch.ones(3, 2, device=device)
    backend.synchronize()
    watch = Rows()
    backend.attach(watch)
    table.index_copy_(0, torch.tensor([5, 2], device=device), torch.ones(2, 4, device=device))
    table[torch.tensor([1, 2, 7], device=device)]
    backend.kernels.rope_write_cache(q, k, v, angle, angle, *pages, torch.tensor([1, 2, 6], device=device))
    backend.synchronize()
    backend.detach()
    assert watch.told["aten::index_copy_"] == [("self", 32, 48, True), ("self", 80, 96, True)]
    assert watch.told["aten::index.Tensor"] == [("self", 16, 48, False), ("self", 112, 128, False)]
    rows = [(8, 24), (48, 56)]
    written = [(name, low, high, True) for name in ("k_cache", "v_cache") for low, high in rows]
    assert watch.told["outrider::rope_write_cache"] == written


def test_observers_see_memory_come_and_go(sim):
    backend = sim()
    watch = Watch()
    backend.attach(watch)
    a = torch.empty(8, device=backend.device)
    del a
    b = torch.empty(8, device=backend.device)
    kinds = [event[0] for event in watch.events]
    assert kinds == ["allocated", "freed", "allocated", "reused"]
    assert watch.events[0][1:] == (watch.events[1][1], 32, "default")
    assert watch.events[3] == ("reused", watch.events[2][1], watch.events[0][1])
    backend.detach()
    del b


def test_the_host_touches_pinned_memory_of_the_device_that_it_belongs_to(sim):
    """Another device made since is the current one; that changes nothing for memory of the first."""
    first = sim()
    pinned = first.empty_pinned("staging", (4,), torch.float32)
    sim(like="rocm")
    with watch_backend(first) as report:
        pinned.renew()
        pinned.tensor.fill_(3.0)
        stream = first.create_stream("copy")
        with first.on(stream):
            x = torch.zeros(4, device="sim")
        first.copy_async(x, pinned.tensor, stream=stream)
        first.synchronize()
        assert x.tolist() == [3.0] * 4
    assert report.clean, str(report)
