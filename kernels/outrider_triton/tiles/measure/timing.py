"""Device timing of many calls captured in one graph. Operands rotate, so that no cache holds them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

Call = Callable[[int], object]
"""A function that enqueues the measured work once. Its argument is the index of the operand set."""


def microseconds(module: Any, call: Call, *, calls: int, replays: int = 5) -> float:
    """Return the device microseconds of one ``call``: the median of ``replays`` replays of a graph of ``calls`` calls.

    ``module`` is the device's torch module. Two warm-up calls compile all kernels before the capture.
    """
    for number in range(2):
        call(number)
    module.synchronize()
    stream = module.Stream()
    graph = module.CUDAGraph()
    with module.graph(graph, stream=stream):
        for number in range(calls):
            call(number)
    graph.replay()
    module.synchronize()
    times: list[float] = []
    for _ in range(replays):
        start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        with module.stream(stream):
            start.record()
            graph.replay()
            end.record()
        module.synchronize()
        times.append(1e3 * start.elapsed_time(end) / calls)
    graph.reset()
    return statistics.median(times)
