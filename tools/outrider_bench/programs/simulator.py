"""What the simulated device costs: per operation, per schedule, and in memory over a long run.

    python -m outrider_bench.programs.simulator [--operations 1000000]

Each figure is the best of several repeats (other work on the machine only adds), in one process and one thread.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch

from outrider.device import Backend, Observer
from outrider_sim.explore import run_once
from outrider_sim.plugin import create_backend as create
from outrider_sim.strategies import Random, Strategy


def create_backend(options: dict[str, str]) -> Any:
    """A simulated device; the type of its ``control`` is the plugin's own."""
    return create(0, options)


def best(repeats: int, fn: Callable[[], object]) -> float:
    """The shortest of several runs, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return min(times)


def operations(observer: bool) -> dict[str, tuple[float, float]]:
    """Microseconds to enqueue, and to enqueue and run, one small operation."""
    backend = create_backend({"strategy": "lazy"})
    if observer:
        backend.attach(Observer())
    x, y = torch.randn(4, 8, device=backend.device), torch.randn(4, 8, device=backend.device)
    w = torch.randn(8, 8, device=backend.device)
    n = 500
    rows = {}
    kinds: dict[str, Callable[[], torch.Tensor]] = {
        "add": lambda: x + y,
        "add_": lambda: x.add_(y),
        "mm": lambda: x @ w,
        "view": lambda: x.view(8, 4),
    }
    for name, op in kinds.items():
        enqueue = both = 9.0
        with torch.no_grad():
            for _ in range(15):
                backend.synchronize()
                start = time.perf_counter()
                for _ in range(n):
                    op()
                middle = time.perf_counter()
                backend.synchronize()
                enqueue = min(enqueue, middle - start)
                both = min(both, time.perf_counter() - start)
        rows[name] = (enqueue / n * 1e6, both / n * 1e6)
    if observer:
        backend.detach()
    return rows


def protocol(backend: Backend) -> None:
    """Two streams, 20 operations: 5 rounds of fill, record, wait, read."""
    forward, plan = backend.create_stream("forward"), backend.create_stream("plan")
    ready = backend.create_event("ready")
    x, y = torch.empty(4, device=backend.device), torch.empty(4, device=backend.device)
    for _ in range(5):
        with backend.on(forward):
            x.fill_(1.0)
        forward.record(ready)
        plan.wait(ready)
        with backend.on(plan):
            y.copy_(x)


def schedules() -> float:
    """Runs of the protocol a second, each under another random schedule, the reset included."""
    backend = create_backend({})
    seeds = iter(range(1 << 30))
    n = 200

    def runs() -> None:
        for _ in range(n):
            error = run_once(backend, protocol, Random(next(seeds)))
            assert error is None

    return n / best(7, runs)


def memory(count: int) -> float:
    """Megabytes that the process grows over the run, after its first tenth."""
    backend = create_backend({})
    backend.control.reset(Strategy())
    x = torch.ones(32, 32, device=backend.device)
    start = 0
    with torch.no_grad():
        for i in range(count // 2):
            x = torch.relu(x) * 0.5
            if i == count // 20:
                start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    backend.synchronize()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024


def main() -> None:
    """Parse the options, measure, print a line for each figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--operations", type=int, default=1_000_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for observer in (False, True):
        for name, (enqueue, total) in operations(observer).items():
            print(
                f"{name:5} {'observed' if observer else 'alone':8}  enqueue {enqueue:5.1f} µs, with running {total:5.1f} µs"
            )
    print(f"protocol of 20 operations: {schedules():.0f} schedules/s")
    print(f"memory over {arguments.operations} operations: {memory(arguments.operations):+.1f} MiB")


if __name__ == "__main__":
    main()
