"""Timing on the device: many calls captured in a graph, over operands that rotate so that no cache holds them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

Call = Callable[[int], object]
"""Enqueue the work once; the number says which set of operands to take."""


def microseconds(module: Any, call: Call, *, calls: int, replays: int = 5) -> float:
    """Device microseconds of one ``call``: ``calls`` of them in a graph, the median of ``replays`` of it.

    ``module`` is the device's torch module. Every call is warmed up first, so that nothing is compiled in the capture.
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
