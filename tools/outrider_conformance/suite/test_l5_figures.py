"""L5: the cost of the backend interface's calls. Figures are reported; a test fails only if it cannot measure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from outrider.device import CaptureContext, Stream
from outrider_conformance import engines
from outrider_conformance.lab import Lab
from outrider_conformance.plugin import Figure
from outrider_conformance.promises import needs, promise

_TIMES = 30
_BYTES = 16 << 20
_CHAIN = 16


def _median_us(run: Callable[[], object], times: int = _TIMES) -> float:
    for _ in range(3):
        run()
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        spent.append((time.perf_counter() - start) * 1e6)
    return statistics.median(spent)


@promise("Capabilities.asynchronous")
def test_launch_cost(lab: Lab, figure: Figure) -> None:
    """Measure the host time of one small operation in an open scope, and of opening a scope."""
    backend = lab.backend
    stream, x = lab.one_stream()
    with backend.on(stream):
        figure("launch of one operation", _median_us(lambda: x.add_(1)), "µs")
    stream.synchronize()

    def scope() -> None:
        with backend.on(stream):
            pass

    figure("opening and leaving a scope", _median_us(scope), "µs")


@promise("Event")
def test_event_latency(lab: Lab, figure: Figure) -> None:
    """Measure the host time of a record, a wait and a query, and the time from a record until the host knows."""
    a, b = lab.streams("a", "b")
    event = lab.record(a)

    def there() -> None:
        a.record(event)
        event.synchronize()

    figure("record", _median_us(lambda: a.record(event)), "µs")
    figure("wait of a stream", _median_us(lambda: b.wait(event)), "µs")
    figure("query", _median_us(lambda: event.query()), "µs")
    figure("record until the host knows", _median_us(there), "µs")

    def exchange() -> None:
        for _ in range(_CHAIN):
            a.record(event)
            b.wait(event)
            b.record(event)
            a.wait(event)
        a.synchronize()

    figure("one stream hands over to another", _median_us(exchange) / (2 * _CHAIN), "µs")


@promise("Backend.copy_async", "device to device, pinned host to device, or back.")
@pytest.mark.parametrize("direction", ["host to device", "device to host", "on the device"])
def test_copy_bandwidth(lab: Lab, figure: Figure, direction: str) -> None:
    """Measure copies of 16 MiB from and to pinned memory, and on the device."""
    backend = lab.backend
    (stream,) = lab.streams("s")
    pinned = backend.empty_pinned("bandwidth", (_BYTES,), torch.uint8)
    pinned.tensor.fill_(1)
    with backend.on(stream):
        here, there = (torch.zeros(_BYTES, dtype=torch.uint8, device=backend.device) for _ in range(2))
    stream.synchronize()
    pairs = {
        "host to device": (here, pinned.tensor),
        "device to host": (pinned.tensor, here),
        "on the device": (there, here),
    }

    def copy() -> None:
        backend.copy_async(*pairs[direction], stream=stream)
        stream.synchronize()

    figure(f"copy {direction}", _BYTES / _median_us(copy, 8) / 1e3, "GB/s")


@promise("Graph.replay", "Enqueue the captured work on ``stream``")
def test_graph_launch(lab: Lab, figure: Figure) -> None:
    """Measure the host time of sixteen small operations, called one by one and as a graph."""
    backend = lab.backend
    stream, x = lab.one_stream()

    def work() -> None:
        for _ in range(_CHAIN):
            x.add_(1)

    def fn(context: CaptureContext) -> None:
        work()

    graph = backend.capture("chain", fn, stream=stream, inputs={}, outputs={"x": x})
    stream.synchronize()
    with backend.on(stream):
        figure(f"{_CHAIN} operations, one by one", _median_us(work), "µs")
    stream.synchronize()
    figure(f"{_CHAIN} operations, as a graph", _median_us(lambda: graph.replay(stream)), "µs")
    stream.synchronize()


@needs("asynchronous", "concurrent_streams")
@promise("Capabilities.concurrent_streams")
def test_overlap(lab: Lab, figure: Figure) -> None:
    """Compare two slow jobs on two streams with two on one stream: 2 is perfect overlap, 1 is none."""
    a, b = lab.streams("a", "b")

    def spent(first: Stream, second: Stream) -> float:
        control = lab.backend.control
        lab.backend.synchronize()
        start = time.perf_counter() if control is None else control.virtual_time()
        lab.slow(first)
        lab.slow(second)
        lab.backend.synchronize()
        return (time.perf_counter() if control is None else control.virtual_time()) - start

    lab.slow(a)
    alone = statistics.median(spent(a, a) for _ in range(3))
    concurrent = statistics.median(spent(a, b) for _ in range(3))
    figure("overlap of two streams", alone / max(concurrent, 1e-9), "of 2")


@promise("SpeculativeSync.step_modes")
@pytest.mark.parametrize("speculate", ["none", "eagle"])
def test_engine_speed(lab: Lab, figure: Figure, speculate: str) -> None:
    """Measure the bundled model with three requests of 24 tokens in wall-clock time, and its acceptance length."""
    engine = engines.engine_on(lab.backend, speculate=speculate, overlap=True)
    start = time.perf_counter()
    outcome = engines.run(engine)
    spent = time.perf_counter() - start
    what = "speculative (EAGLE)" if speculate == "eagle" else "plain"
    figure(f"{what} decoding of the bundled model", sum(map(len, outcome.tokens)) / spent, "tokens/s")
    if speculate == "eagle":
        figure("tokens that a verification yields", outcome.acceptance, "tokens")
