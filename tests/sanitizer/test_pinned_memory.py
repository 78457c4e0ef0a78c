"""What torch's allocator of pinned memory waits for, and pinned memory that a device sees as its own."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outrider_sanitizer import FindingKind
from outrider_sanitizer.cuda_names import map_cuda_names
from outrider_sanitizer.observation.storages import Storages, extent
from outrider_sim.backend import SimBackend
from outrider_sim.machine.device_state import SimDeviceState
from sanitizer.over_sim import watched

COPIES = {
    "copy_": "x.copy_(torch.ones(1024).pin_memory(), non_blocking=True)",
    "to": "x = torch.ones(1024).pin_memory().to('cuda', non_blocking=True)",
    "back": "x.to('cpu', non_blocking=True)",
}
KERNEL = "x.copy_(mapped(torch.ones(1024).pin_memory()))"


@pytest.fixture
def told(monkeypatch: Any) -> None:
    """The device tells when pinned memory is dropped, and doesn't say what its allocator makes of it."""
    before = SimDeviceState.pinned
    monkeypatch.setattr(SimDeviceState, "pinned", lambda self, *args, **kwargs: before(self, *args))


def kinds(line: str, monkeypatch: Any, inference: bool = False) -> set[FindingKind]:
    lines = ("import torch", "from outrider_sim.torch_device.launches import mapped", "x = torch.zeros(1024, device='cuda')")
    text = "\n".join((*lines, "for _ in range(3):", f"    {line}"))
    backend = SimBackend()
    with map_cuda_names(backend), watched(backend, monkeypatch) as sanitizer, torch.inference_mode(inference):
        exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    assert sanitizer.report.operations >= 3
    return {finding.kind for finding in sanitizer.report}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", COPIES)
def test_the_allocator_waits_for_streams_that_copied(name: str, inference: bool, monkeypatch: Any, told: None) -> None:
    assert kinds(COPIES[name], monkeypatch, inference) == set()


def test_it_does_not_wait_for_a_kernel_that_reads_pinned_memory(monkeypatch: Any, told: None) -> None:
    assert kinds(KERNEL, monkeypatch) == {FindingKind.REUSE}


def test_a_value_for_the_host_is_a_read_in_inference_mode(monkeypatch: Any) -> None:
    """There, composite operators aren't taken apart before they are seen."""
    for read in ("x[0].item()", "x.to('cpu')", "bool(x[0])", "x.view(32, 32).t().reshape(-1)"):
        line = f"with torch.cuda.stream(torch.cuda.Stream()): x.add_(1)\n    {read}"
        assert FindingKind.READ_AFTER_WRITE in kinds(line, monkeypatch, True), read


def storages() -> Storages:
    return Storages(SimpleNamespace(device=torch.device("cuda"), is_pinned=lambda _: True))  # type: ignore[arg-type]


def of_device(tensor: torch.Tensor) -> Any:
    """A tensor of a device over the same bytes, with a storage of its own."""
    other = torch.from_numpy(tensor.numpy())
    names = ("untyped_storage", "storage_offset", "element_size", "numel", "is_contiguous")
    return SimpleNamespace(
        device=torch.device("cuda"),
        dim=other.dim,
        kept=other,
        **{name: partial(getattr(torch.Tensor, name), other) for name in names},
    )


def test_pinned_memory_that_a_device_sees_is_one_memory() -> None:
    table = storages()
    pinned, apart = torch.zeros(64), torch.zeros(64)
    host = table.known(pinned)
    assert host is not None
    assert host[1]
    whole, part, other = of_device(pinned), of_device(pinned[16:]), of_device(apart)
    for tensor, low in ((whole, 0), (part, 64)):
        found = table.known(tensor)
        assert found is not None
        assert not found[1]
        access = extent(tensor, found[0], False, "", -1)
        assert (access.storage, access.start, access.end) == (host[0].number, low, 256)
    found = table.known(other)
    assert found is not None
    assert found[0].number != host[0].number


def test_a_view_of_the_device_that_goes_leaves_the_pinned_memory() -> None:
    table = storages()
    pinned = torch.zeros(64)
    host = table.known(pinned)
    assert host is not None
    table.note(pinned)
    whole = of_device(pinned)
    assert table.known(whole) is not None
    table.note(whole.kept)
    del whole
    assert table.gone() == []
    del pinned
    assert table.gone() == [host[0]]
    assert table._pinned == []


def test_a_tensor_without_bytes_is_no_pinned_memory() -> None:
    table = storages()
    assert table.known(torch.zeros(64)) is not None
    with FakeTensorMode():
        traced = torch.empty(64, device="cuda")
    found = table.known(traced)
    assert found is not None
    assert found[1]
