"""Kernels over memory of the peers against the library's collectives: ``python peers_on_devices.py``, with two GPUs.

Eager and in graphs, whose replays find the buffers as the replays before left them; a rank is late on purpose, now this one,
now the other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

REPLAYS = 300
SHAPES = ((1, 64), (1, 4096), (3, 128), (4, 4096), (5, 2050), (16, 4096), (64, 1024), (33, 4096), (4, 8192))


def check(place: Any) -> list[str]:
    """What each rank runs; returns what it looked at."""
    backend = place.backend
    group = backend.create_group("checked", ranks=range(place.size), rank=place.index, store=place.store)
    plain = backend.create_group("plain", ranks=range(place.size), rank=place.index, store=place.store)
    plain.restrict_implementations()
    stream = backend.create_stream("main")
    said = [f"ways {group.implementations}, peer memory {group.has_peer_memory}"]
    dice = torch.Generator(device="cpu").manual_seed(5)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in SHAPES:
            compare(place, group, plain, stream, dice, dtype, shape)
        said.append(f"{dtype}: {len(SHAPES)} shapes")
    group.close()
    plain.close()
    return said


def compare(place: Any, group: Any, plain: Any, stream: Any, dice: torch.Generator, dtype: torch.dtype, shape: Any) -> None:
    """All verbs of one dtype and shape."""
    from outrider.device import KernelSet

    backend = place.backend
    kernels, reference = backend.kernels_in_use, KernelSet()
    parts = torch.randn(place.size, *shape, generator=dice).to(dtype)
    weight = torch.randn(shape[1], generator=dice).to(dtype).to(backend.device)
    start = torch.randn(*shape, generator=dice).to(dtype)
    with backend.on(stream):
        source = parts[place.index].to(backend.device, copy=True)
        x, residual = source.clone(), start.to(backend.device, copy=True)
        normed, gathered = torch.empty_like(x), x.new_empty(place.size, *shape)
        summed, rooted = source.clone(), source.clone()

    def work(_: object) -> None:
        x.copy_(source)
        summed.copy_(source)
        rooted.copy_(source)
        normed.copy_(kernels.all_reduce_rms_norm(x, residual, weight, 1e-6, group=group, stream=stream))
        group.all_reduce(summed, stream=stream)
        group.all_gather(gathered, source, stream=stream)
        group.broadcast(rooted, root=1, stream=stream)

    def reset() -> None:
        with backend.on(stream):
            residual.copy_(start.to(backend.device, copy=True))

    with backend.on(stream):
        total = source.clone()
    plain.all_reduce(total, stream=stream)
    with backend.on(stream):
        kept = start.to(backend.device, copy=True)
        wanted = reference.add_rms_norm(total.clone(), kept, weight, 1e-6)
    stream.synchronize()

    def judge(how: str) -> None:
        stream.synchronize()
        scale = 8 * torch.finfo(dtype).eps
        near(summed, total, scale, how, dtype, shape)
        near(residual, kept, scale, how, dtype, shape)
        near(normed, wanted, 2 * scale, how, dtype, shape)
        assert torch.equal(gathered.cpu(), parts), f"{how} gathered {dtype} {shape}"
        assert torch.equal(rooted.cpu(), parts[1]), f"{how} rooted {dtype} {shape}"
        same = x.new_empty(place.size, *shape)
        plain.all_gather(same, normed, stream=stream)
        stream.synchronize()
        assert torch.equal(same[0], same[1]), f"{how} ranks differ in bits, {dtype} {shape}"

    with backend.on(stream):
        work(None)
    judge("eager")
    reset()
    graph = backend.capture("work", work, stream=stream, inputs={}, outputs={})
    reset()
    graph.replay(stream)
    judge("in a graph")
    for turn in range(REPLAYS):
        if turn % 20 == 0:
            late(stream, backend, place.index == turn // 20 % 2)
        reset()
        graph.replay(stream)
    judge("after many replays")


def near(found: Tensor, wanted: Tensor, scale: float, *what: object) -> None:
    """Within rounding."""
    torch.testing.assert_close(found, wanted, rtol=scale, atol=scale, msg=lambda text: f"{what}: {text}")


def late(stream: Any, backend: Any, this: bool) -> None:
    """Let this rank's device, or its host, come late."""
    if this:
        backend.delay(stream, 2_000_000)
        time.sleep(0.01)


def main(say: Callable[[str], None]) -> None:
    """Both ranks, each in a process."""
    from outrider_conformance.ranks.runner import TaskProcesses

    with TaskProcesses(sys.argv[1] if sys.argv[1:] else "cuda", 2) as ranks:
        for line in ranks.run_task("peers_on_devices:check", limit_s=150)[0]:
            say(line)


if __name__ == "__main__":
    main(print)
