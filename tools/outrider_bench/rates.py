"""The rates of a device that limit a model: bytes a second that it reads, operations a second of its products, and the time
of collectives between its ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.device import KernelSet, OutriderError, Reduction
from outrider.device.kernels.weights import QuantizedWeight

if TYPE_CHECKING:
    from outrider.device import Backend, Group, Stream
    from outrider_conformance.ranks.runner import RankHandle

_HOST_BYTES = 256 << 20
_DEVICE_BYTES = 4 << 30
_ROW_ELEMENTS = 1 << 17
"""Number of elements of a row that the read-only reductions get."""
_REPEATS = 7
_PRODUCT_SIZES = (512, 1024, 2048, 4096, 8192)
"""Sizes of square matrices, and numbers of rows that a quantised weight is multiplied with."""
_LONG_PRODUCT_S = 0.005
"""Duration in seconds from which larger products are no faster for each operation."""
_FUSED = "fused"
_CAPTURED_CALLS = 64
_EAGER_CALLS = 8
_COLLECTIVE_REPEATS = 9
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Cost:
    """The least work of a computation: the bytes that it must read, and the operations of its products."""

    bytes: float
    operations: float


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """The best measured rates of a device."""

    bandwidth: float
    """Bytes a second."""
    operations: float
    """Operations of matrix products a second; a product and a sum are two."""

    def limit_s(self, cost: Cost) -> float:
        """Return the lower limit of the time in seconds: the larger of the time of its bytes and that of its operations."""
        return max(cost.bytes / self.bandwidth, cost.operations / self.operations)

    def limits_ms(self, cost: Cost) -> dict[str, float]:
        """Return the lower limit of the time and both of its parts in milliseconds, as entries of a report."""
        return {
            "limit_ms": 1e3 * self.limit_s(cost),
            "bytes_ms": 1e3 * cost.bytes / self.bandwidth,
            "operations_ms": 1e3 * cost.operations / self.operations,
        }

    def describe(self) -> dict[str, object]:
        """Return the rates as entries of a report; ``rates`` is the text for people."""
        return {"bandwidth_gb_per_s": self.bandwidth / 1e9, "matrix_tflops": self.operations / 1e12, "rates": str(self)}

    def __str__(self) -> str:
        return f"measured in this run: {self.bandwidth / 1e9:.1f} GB/s, {self.operations / 1e12:.4g} TFLOP/s"


def measure_rates(
    backend: Backend, dtype: torch.dtype, *, kernels: KernelSet | None = None, weights: Sequence[QuantizedWeight] = ()
) -> DeviceRates:
    """Return the rates of a device for a model in ``dtype`` with these quantised weights, of which the largest is measured.

    ``kernels`` replace those in use. The products of a quantised model may run at the rate of ``dtype`` or of its format, so
    the better of both counts.
    """
    kernels = kernels or backend.kernels_in_use
    largest = max(weights, key=lambda each: each.nbytes, default=None)
    operations = [_measure_products(backend, kernels, dtype, None)]
    if largest is not None:
        operations.append(_measure_products(backend, kernels, dtype, largest))
    return DeviceRates(measure_bandwidth(backend, kernels), max(operations))


def measure_bandwidth(backend: Backend, kernels: KernelSet | None = None) -> float:
    """Return bytes a second: the best of a copy (read and written) and three reductions (read), medians of 7 runs.

    The reductions are two sums of torch's and ``find_nan`` of ``kernels`` or of those in use: it reads all values and writes
    two numbers a row. The buffers are larger than any cache and have at most a quarter of the free memory.
    """
    kernels = kernels or backend.kernels_in_use
    memory = backend.memory_info()
    size = min(_DEVICE_BYTES, memory.free // 4) if memory.total else _HOST_BYTES
    stream = backend.create_stream("bandwidth")
    with backend.on(stream):
        rows = max(1, size // (4 * _ROW_ELEMENTS))
        source = torch.ones((rows, _ROW_ELEMENTS), dtype=torch.float32, device=backend.device)
        found = torch.empty((rows, 2), dtype=torch.int64, device=backend.device)
        target = torch.empty_like(source)
    copy = _seconds_of(backend, stream, lambda: target.copy_(source))
    reductions = (source.sum, source.view(torch.int64).sum, partial(kernels.find_nan, source, found))
    read = min(_seconds_of(backend, stream, each) for each in reductions)
    return max(2 * source.nbytes / copy, source.nbytes / read)


def _measure_products(backend: Backend, kernels: KernelSet, dtype: torch.dtype, weight: QuantizedWeight | None) -> float:
    """Return operations a second: the best of products of growing size, until a product takes 5 ms."""
    stream = backend.create_stream("products")
    best = 0.0
    for size in _PRODUCT_SIZES:
        rows, columns = (size, size) if weight is None else weight.shape
        with backend.on(stream):
            x = torch.randn((size, columns), dtype=dtype, device=backend.device)
            if weight is None:
                dense = torch.randn((rows, columns), dtype=dtype, device=backend.device)
                multiply = partial(kernels.linear, x, dense)
            else:
                multiply = partial(kernels.linear_quantized, x, weight)
        seconds = _seconds_of(backend, stream, multiply)
        best = max(best, 2 * size * columns * rows / seconds)
        if seconds > _LONG_PRODUCT_S:
            break
    return best


def _seconds_of(backend: Backend, stream: Stream, work: Callable[[], object]) -> float:
    def enqueue() -> None:
        with backend.on(stream):
            work()

    return median_seconds(backend, stream, enqueue, _REPEATS)


def median_seconds(backend: Backend, stream: Stream, enqueue: Callable[[], object], repeats: int) -> float:
    """Return the median of ``repeats`` times of :func:`seconds_on_stream`, after a run that warms up."""
    return statistics.median([seconds_on_stream(backend, stream, enqueue) for _ in range(repeats + 1)][1:])


def seconds_on_stream(backend: Backend, stream: Stream, enqueue: Callable[[], object]) -> float:
    """Return the seconds from the start to the end of the work that ``enqueue`` puts on ``stream``.

    The device's events measure the time if the backend has them, else the host's clock.
    """
    stream.synchronize()
    began = time.perf_counter()
    if not backend.capabilities.event_timing:
        enqueue()
        stream.synchronize()
        return time.perf_counter() - began
    start, end = (backend.create_event(name, timing=True) for name in ("bench-start", "bench-end"))
    stream.record(start)
    enqueue()
    stream.record(end)
    stream.synchronize()
    return start.elapsed_ms(end) / 1e3


# -- collectives -------------------------------------------------------------------------------------------------------


def collective_seconds(group: Group, kind: str, rows: int, width: int, dtype: torch.dtype) -> float:
    """Return the seconds of a call by the group's best implementation, in a graph if collectives can be captured."""
    stream = group.backend.create_stream("collectives")
    work, check = _implementation(group, stream, kind, rows, width, dtype, fused=kind == "all_reduce_rms_norm")
    check()
    return _microseconds(group, stream, work)[0] / 1e6


def measure_collectives(
    rank: RankHandle, *, kinds: Sequence[str], tokens: Sequence[int], width: int, dtype: str
) -> dict[str, Any]:
    """Return the measured rows of the table, timed by this rank's clock. Every rank calls this function at the same time."""
    backend = rank.backend
    group = backend.create_group("bench", ranks=range(rank.size), rank=rank.index, store=rank.store)
    stream = backend.create_stream("bench")
    rows = []
    try:
        for kind in kinds:
            for count in tokens:
                for way, work, check in _implementations(group, stream, kind, count, width, getattr(torch, dtype)):
                    check()
                    median, captured = _microseconds(group, stream, work)
                    rows.append({"kind": kind, "tokens": count, "way": way, "us": median, "in_graph": captured})
    finally:
        backend.synchronize()
        group.close()
    return {
        "rows": rows,
        "device": str(backend.device),
        "backend": backend.name,
        "versions": dict(backend.versions()),
        "bytes_per_token": width * getattr(torch, dtype).itemsize,
    }


def _implementations(
    group: Group, stream: Stream, kind: str, tokens: int, width: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """Yield (name, call, check) for each implementation of a collective; fused kernels come last, then their choice."""
    kernels = group.backend.kernels_in_use
    first, *others = group.implementations
    has_others = kind in ("all_reduce", "all_reduce_rms_norm", "all_gather", "broadcast")
    is_fused = kind == "all_reduce_rms_norm" and type(kernels).all_reduce_rms_norm is not KernelSet.all_reduce_rms_norm
    for way in (first, *(others if has_others else [])):
        group.restrict_implementations(way)
        yield way, *_implementation(group, stream, kind, tokens, width, dtype, fused=False)
    for way in others if is_fused else []:
        group.restrict_implementations(way)
        yield f"{_FUSED}, {way}", *_implementation(group, stream, kind, tokens, width, dtype, fused=True)
    group.restrict_implementations(*group.implementations)
    if is_fused:
        yield _FUSED, *_implementation(group, stream, kind, tokens, width, dtype, fused=True)


def _implementation(
    group: Group, stream: Stream, kind: str, tokens: int, width: int, dtype: torch.dtype, *, fused: bool
) -> tuple[Callable[[], None], Callable[[], None]]:
    backend, size, rank = group.backend, group.size, group.rank
    device, kernels = backend.device, backend.kernels_in_use
    with backend.on(stream):
        x = torch.zeros((tokens, width), dtype=dtype, device=device)
        every = torch.zeros((size, tokens, width), dtype=dtype, device=device)
        part = torch.zeros_like(every)
        residual, weight = torch.zeros_like(x), torch.ones(width, dtype=dtype, device=device)

    def all_reduce_rms_norm() -> None:
        with backend.on(stream):
            if fused:
                kernels.all_reduce_rms_norm(x, residual, weight, _EPS, group=group, stream=stream)
            else:
                group.all_reduce(x, stream=stream)
                kernels.add_rms_norm(x, residual, weight, _EPS)

    def send() -> None:
        if rank == 0:
            group.send(x, to=1, stream=stream)
        elif rank == 1:
            group.receive(x, source=0, stream=stream)

    works: dict[str, tuple[Callable[[], None], Callable[[], Tensor], Callable[[], Any]]] = {
        "all_reduce": (lambda: group.all_reduce(x, stream=stream), lambda: x, lambda: sum(range(1, size + 1))),
        "all_reduce_rms_norm": (all_reduce_rms_norm, lambda: residual, lambda: sum(range(1, size + 1))),
        "all_gather": (lambda: group.all_gather(every, x, stream=stream), lambda: every[-1], lambda: size),
        "reduce_scatter": (
            lambda: group.reduce_scatter(x, every, stream=stream, reduction=Reduction.SUM),
            lambda: x,
            lambda: sum(range(1, size + 1)),
        ),
        "broadcast": (lambda: group.broadcast(x, root=size - 1, stream=stream), lambda: x, lambda: size),
        "all_to_all": (lambda: group.all_to_all(part, every, stream=stream), lambda: part[-1], lambda: size),
        "send": (send, lambda: x, lambda: 1 if rank < 2 else rank + 1),
    }
    work, made, expected = works[kind]

    def check() -> None:
        with backend.on(stream):
            x.fill_(rank + 1)
            every.fill_(rank + 1)
            residual.zero_()
        work()
        stream.synchronize()
        if kind != "send" or size > 1:
            found = made().float()
            if not bool((found == expected()).all()):
                raise OutriderError(
                    f"{kind} of {tokens} x {width} {dtype} gave {found.flatten()[:4].tolist()} on rank {rank}"
                )
        with backend.on(stream):
            for tensor in (x, every, residual):
                tensor.zero_()  # so that nothing overflows over many calls
        stream.synchronize()

    return work, check


def _microseconds(group: Group, stream: Stream, work: Callable[[], None]) -> tuple[float, bool]:
    """Return the microseconds of one call, the median of 9 runs, and True if they were replayed as a graph."""
    backend = group.backend
    captured = backend.capabilities.captures_graphs and backend.capabilities.captures_collectives
    calls = _CAPTURED_CALLS if captured else _EAGER_CALLS

    def repeat_call(context: object = None) -> None:
        del context
        for _ in range(calls):
            work()

    enqueue: Callable[[], object] = repeat_call
    if captured:
        graph = backend.capture("collectives", repeat_call, stream=stream, inputs={}, outputs={})
        enqueue = partial(graph.replay, stream)
    seconds = []
    for _ in range(_COLLECTIVE_REPEATS + 1):
        stream.synchronize()
        with backend.on(stream):
            gate = torch.zeros(1, device=backend.device)
        group.all_reduce(gate, stream=stream)  # all ranks begin together
        seconds.append(seconds_on_stream(backend, stream, enqueue))
    return 1e6 * statistics.median(seconds[1:]) / calls, captured  # the first run warms up
