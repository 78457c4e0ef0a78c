"""Pinned memory through numpy, through a device's view of it, and kernels that come past torch's dispatcher."""

import numpy as np
import torch

from outrider import get_backend
from outrider_sanitizer import watch
from outrider_sim.torch_device.launches import host_view, launch, mapped


def test_writes_and_reads_of_an_array_are_seen():
    backend = get_backend("sim")
    with watch(backend) as report:
        host = torch.zeros(8, dtype=torch.int32, pin_memory=True)
        array = host.numpy()
        device = torch.zeros(8, dtype=torch.int32, device="sim")
        backend.synchronize()
        device.copy_(host, non_blocking=True)
        array[2:4] = 5
        device.to("cpu", non_blocking=True).numpy().tolist()
    text = [str(f) for f in report]
    assert len(text) == 2
    assert "bytes 8 to 16" in text[0]
    assert "read after write" in text[1]


def test_an_array_computes_as_numpy_does():
    get_backend("sim")
    array = torch.arange(6, dtype=torch.int32).pin_memory().numpy()
    array[1] += 10
    assert array[:3].sum() == 13
    assert (array + 1).tolist() == [1, 12, 3, 4, 5, 6]
    np.copyto(array, np.ones(6, dtype=np.int32))
    assert list(array) == [1] * 6
    assert type(array.copy()) is np.ndarray


def test_a_device_view_of_pinned_memory_is_read_when_the_kernel_runs():
    backend = get_backend("sim:strategy=lazy")
    host = torch.ones(4, pin_memory=True)
    view, out = mapped(host), torch.zeros(4, device="sim")
    backend.synchronize()
    with watch(backend) as report:
        out.copy_(view)
        host.fill_(2.0)
        backend.synchronize()
    assert out.tolist() == [2.0] * 4
    assert [f.kind.value for f in report] == ["write after read"]


def test_a_launch_is_queued_and_its_accesses_are_seen():
    backend = get_backend("sim:strategy=lazy")
    x = torch.zeros(4, device="sim")
    side = torch.sim.Stream()
    backend.synchronize()
    with watch(backend) as report:
        launch("mine", lambda: host_view(x).add_(1), reads=[("x", x)], writes=[("x", x)])
        with torch.sim.stream(side):
            x + 1
        backend.synchronize()
    assert x.tolist() == [1.0] * 4
    assert [f.kind.value for f in report] == ["read after write"]


def test_pinned_memory_of_torchs_allocator_may_be_dropped_while_it_is_copied():
    backend = get_backend("sim")
    device = torch.zeros(4, device="sim")
    with watch(backend) as report:
        for n in range(8):
            device.copy_(torch.full((4,), float(n), pin_memory=True), non_blocking=True)
    assert report.clean
    assert device.tolist() == [7.0] * 4
