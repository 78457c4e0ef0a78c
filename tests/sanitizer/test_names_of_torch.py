"""What programs call torch by: `.cuda()` on a simulated device, and numpy arrays over pinned memory on any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider_sanitizer import FindingKind, watch
from outrider_sanitizer.cuda_names import map_cuda_names
from outrider_sanitizer.observation.dispatch import DerivedSanitizer
from outrider_sim.backend import SimBackend
from sanitizer.over_sim import OverNames

WAYS: dict[str, Any] = {
    "plain": lambda t: t.cuda(),
    "number": lambda t: t.cuda(0),
    "name": lambda t: t.cuda("cuda:0"),
    "device": lambda t: t.cuda(device=torch.device("cuda")),
    "format": lambda t: t.cuda(memory_format=torch.contiguous_format),
    "both": lambda t: t.cuda(0, True),
}


@pytest.mark.parametrize("way", WAYS)
def test_cuda_moves_to_the_simulated_device(way: str) -> None:
    with map_cuda_names(SimBackend()):
        x = torch.arange(4.0)
        moved = WAYS[way](x)
        assert moved.device.type == "sim"
        torch.cuda.synchronize()
        assert moved.tolist() == x.tolist()
        assert moved.cuda() is moved
        assert torch.nn.Linear(2, 3).cuda().weight.device.type == "sim"
        with pytest.raises(TypeError):
            x.cuda(unknown=1)


@pytest.mark.parametrize("at_once", [False, True])
def test_cuda_blocks_unless_it_is_told_not_to(at_once: bool) -> None:
    backend = SimBackend()
    with map_cuda_names(backend), watch(backend) as report:
        host = torch.ones(1 << 12).pin_memory()
        moved = host.cuda(non_blocking=at_once)
        host.fill_(2)
        torch.cuda.synchronize()
    assert {finding.kind for finding in report} == ({FindingKind.WRITE_AFTER_READ} if at_once else set()), str(report)
    assert moved.device.type == "sim"


def test_an_array_over_pinned_memory_tells_what_is_done_with_it(monkeypatch: Any) -> None:
    """Giving the memory away touches nothing: programs call `numpy()` before the copy into it is over."""
    backend = OverNames()
    monkeypatch.setattr(backend, "is_pinned", lambda tensor: tensor.dtype == torch.int32)
    sanitizer = DerivedSanitizer(backend)
    seen: list[tuple[int, int, bool]] = []
    monkeypatch.setattr(sanitizer, "host_accessed", lambda access, _: seen.append((access.start, access.end, access.write)))
    with sanitizer.scope():
        pinned = torch.zeros(8, dtype=torch.int32)
        array, part = pinned.numpy(), pinned[4:].numpy()
        pageable = torch.zeros(8).numpy()
        assert seen == []
        array[2] = 1
        array[:4].tolist()
        assert (array > 0).sum() == 1
        part[0] = 5
        assert pageable.sum() == 0
        assert torch.from_numpy(array)[4] == 5
        assert seen[:4] == [(8, 12, True), (0, 16, False), (0, 32, False), (16, 20, True)]
        told = len(seen)
    array[1] = 1
    assert len(seen) == told  # nobody watches any more
    assert pinned[1] == 1
