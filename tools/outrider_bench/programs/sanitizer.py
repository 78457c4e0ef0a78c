"""What the sanitizer costs: per operation, per decode iteration, per schedule, and in memory over a long run.

    python -m outrider_bench.programs.sanitizer [--operations 1000000]

Processor time, not wall time, and the best of several repeats: other work on the machine must not count.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from outrider.device import Backend, Graph, Observer
from outrider_sanitizer import watch
from outrider_sim.explore import run_once
from outrider_sim.plugin import create_backend as create
from outrider_sim.strategies import Random, Strategy

LAYERS, BATCH, HIDDEN, HEADS, HEAD, PAGE, PAGES, VOCABULARY = 2, 4, 64, 4, 16, 16, 64, 256


def create_backend(options: dict[str, str]) -> Any:
    """A simulated device; the type of its ``control`` is the plugin's own."""
    return create(0, options)


def best(repeats: int, count: int, fn: Callable[[], object]) -> float:
    """The shortest of several runs over ``count``, in seconds of processor time."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        fn()
        times.append(time.process_time() - start)
    return min(times) / count


@contextmanager
def observed(backend: Backend) -> Iterator[None]:
    """The device reports to an observer that does nothing."""
    backend.attach(Observer())
    try:
        yield
    finally:
        backend.detach()


MODES: dict[str, Callable[[Backend], AbstractContextManager[Any]]] = {
    "alone": lambda _: nullcontext(),
    "reporting": observed,
    "sanitized": watch,
}


def operations() -> dict[tuple[str, str], float]:
    """Microseconds to enqueue and run one small operation."""
    backend = create_backend({"strategy": "lazy"})
    x, y = torch.randn(4, 8, device=backend.device), torch.randn(4, 8, device=backend.device)
    backend.synchronize()
    rows = {}
    kinds: dict[str, Callable[[], torch.Tensor]]
    kinds = {"add (allocates)": lambda: x + y, "add_ (in place)": lambda: x.add_(y)}
    for name, op in kinds.items():
        for mode, around in MODES.items():

            def loop(op: Callable[[], torch.Tensor] = op) -> None:
                for _ in range(500):
                    op()
                backend.synchronize()

            with around(backend), torch.no_grad():
                rows[name, mode] = best(15, 500, loop) * 1e6
    return rows


class Decoder:
    """Two layers of a paged decoder at batch 4, with the result copied out on a stream of its own."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        assert backend.kernels is not None  # registers torch.ops.outrider
        device = backend.device
        self.forward, self.copy = backend.create_stream("forward"), backend.create_stream("copy")
        self.ready, self.taken = backend.create_event("results_ready"), backend.create_event("results_taken")
        with backend.on(self.forward):
            shape = {"qkv": 3 * HIDDEN, "o": HIDDEN, "gate_up": 4 * HIDDEN, "down": HIDDEN}
            inner = {"down": 2 * HIDDEN}
            self.weights = [
                {name: torch.randn(out, inner.get(name, HIDDEN), device=device) * 0.05 for name, out in shape.items()}
                for _ in range(LAYERS)
            ]
            self.norm = torch.ones(HIDDEN, device=device)
            self.table = torch.randn(VOCABULARY, HIDDEN, device=device)
            self.caches = [torch.zeros(2, PAGES, PAGE, HEADS, HEAD, device=device) for _ in range(LAYERS)]
            self.pages = torch.arange(PAGES, device=device, dtype=torch.int32).view(BATCH, -1)
            self.starts = torch.arange(BATCH + 1, device=device, dtype=torch.int32)
            self.cos, self.sin = torch.ones(BATCH, HEAD, device=device), torch.zeros(BATCH, HEAD, device=device)
            self.tokens = torch.zeros(BATCH, dtype=torch.int64, device=device)
            self.lens = torch.ones(BATCH, dtype=torch.int32, device=device)
            self.firsts = torch.arange(BATCH, device=device) * (PAGES // BATCH * PAGE)
        self.results = backend.empty_pinned("results", (BATCH,), torch.int64)
        self.copy.record(self.taken)
        backend.synchronize()

    def step(self, _: object = None) -> None:
        """One forward of every request, on the stream that is current."""
        x = torch.nn.functional.embedding(self.tokens, self.table)
        slots = self.firsts + self.lens - 1
        for weights, cache in zip(self.weights, self.caches, strict=True):
            h = torch.ops.outrider.rms_norm(x, self.norm, 1e-5)
            q, k, v = (h @ weights["qkv"].t()).view(BATCH, 3, HEADS, HEAD).unbind(1)
            q, k = q.contiguous(), k.contiguous()
            torch.ops.outrider.rope_write_cache(q, k, v, self.cos, self.sin, cache[0], cache[1], slots)
            a = torch.ops.outrider.paged_attention(
                q, cache[0], cache[1], self.starts, self.lens, self.pages, None, 1, PAGES // BATCH * PAGE, HEAD**-0.5, 0
            )
            x = x + a.view(BATCH, HIDDEN) @ weights["o"].t()
            h = torch.ops.outrider.rms_norm(x, self.norm, 1e-5)
            x = x + torch.ops.outrider.silu_mul(h @ weights["gate_up"].t()) @ weights["down"].t()
        self.tokens.copy_(torch.argmax(x @ self.table.t(), -1))
        self.lens.copy_(torch.clamp(self.lens + 1, max=200))

    def iteration(self, graph: Graph | None = None) -> list[int]:
        """One step and the copy of its tokens to the host."""
        backend = self.backend
        self.forward.wait(self.taken)
        if graph is not None:
            graph.replay(self.forward)
        else:
            with backend.on(self.forward), torch.no_grad():
                self.step()
        self.forward.record(self.ready)
        self.copy.wait(self.ready)
        backend.copy_async(self.results.tensor, self.tokens, stream=self.copy)
        self.copy.record(self.taken)
        self.taken.synchronize()
        tokens: list[int] = self.results.tensor.tolist()
        return tokens

    def graph(self) -> Graph:
        """The step as a graph."""
        with torch.no_grad():
            return self.backend.capture("decode", self.step, stream=self.forward, inputs={}, outputs={"tokens": self.tokens})


def decoding() -> dict[tuple[str, str], float]:
    """Decode iterations a second."""
    rows = {}
    for mode, around in MODES.items():
        backend = create_backend({})
        with around(backend) as report:
            decoder = Decoder(backend)
            for name, graph in (("eager", None), ("graph", decoder.graph())):

                def loop(decoder: Decoder = decoder, graph: Graph | None = graph) -> None:
                    for _ in range(50):
                        decoder.iteration(graph)

                rows[name, mode] = 1 / best(6, 50, loop)
        if mode == "sanitized":
            report.raise_if_any()
    return rows


def schedules() -> dict[str, float]:
    """Runs of 20 iterations a second, each under another random schedule, the reset included."""
    rows = {}
    for mode in ("alone", "sanitized"):
        backend = create_backend({})
        seeds = iter(range(1 << 30))

        def program(device: Backend, mode: str = mode) -> None:
            with MODES[mode](device) as report:
                decoder = Decoder(device)
                for _ in range(20):
                    decoder.iteration()
            if report is not None:
                report.raise_if_any()

        def run(backend: Any = backend, seeds: Iterator[int] = seeds, program: Callable[[Backend], None] = program) -> None:
            error = run_once(backend, program, Random(next(seeds)))
            assert error is None, error

        run()
        rows[mode] = 1 / best(8, 1, run)
    return rows


def memory(count: int) -> float:
    """Megabytes that the process grows over the run with the sanitizer, after its first tenth."""
    backend = create_backend({})
    backend.control.reset(Strategy())
    side = backend.create_stream("side")
    done, back = backend.create_event("done"), backend.create_event("back")
    start = operations = 0
    with watch(backend) as report, torch.no_grad():
        x = torch.ones(32, 32, device=backend.device)
        while report.operations < count:
            with backend.on(backend.streams[0]):
                x = torch.relu(x) * 0.5
            backend.streams[0].record(done)
            side.wait(done)
            with backend.on(side):
                y = x[:, :3] + 1.0
            side.record(back)
            backend.streams[0].wait(back)
            if not start and report.operations >= count // 10:
                start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            operations += 1
        backend.synchronize()
        del y
    report.raise_if_any()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024


def main() -> None:
    """Parse the options, measure, print a line for each figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--operations", type=int, default=1_000_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for (name, mode), cost in operations().items():
        print(f"{name:18} {mode:10} {cost:6.1f} µs")
    for (name, mode), rate in decoding().items():
        print(f"decode, {name:10} {mode:10} {rate:6.0f} iterations/s")
    for mode, rate in schedules().items():
        print(f"20 iterations      {mode:10} {rate:6.1f} schedules/s")
    print(f"memory over {arguments.operations} operations: {memory(arguments.operations):+.1f} MiB")


if __name__ == "__main__":
    main()
