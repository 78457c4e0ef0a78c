"""What ``outrider bench collectives`` runs on each rank: the time of a collective, by its size and the way it's done."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.device import KernelSet, OutriderError, Reduction

if TYPE_CHECKING:
    from outrider.device import Backend, Group, Stream
    from outrider_conformance.rank_processes import Place

KINDS = ("all_reduce", "all_reduce_rms_norm", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")
FUSED = "fused"
_CALLS = 64
_EAGER_CALLS = 8
_REPEATS = 9
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Bench:
    """One rank's side: what is measured on."""

    group: Group
    stream: Stream
    kernels: KernelSet

    @property
    def backend(self) -> Backend:
        """The rank's device."""
        return self.group.backend


class WrongResult(OutriderError):
    """A collective that was to be measured gave something else than it must."""


def measure(place: Place, *, kinds: Sequence[str], tokens: Sequence[int], width: int, dtype: str) -> dict[str, Any]:
    """Rows of the table, of this rank's clock; every rank measures the same at the same time."""
    backend = place.backend
    group = backend.create_group("bench", ranks=range(place.size), rank=place.rank, store=place.store)
    bench = Bench(group, backend.create_stream("bench"), backend.kernels_in_use)
    rows = []
    try:
        for kind in kinds:
            for count in tokens:
                for way, work, check in _works(bench, kind, count, width, getattr(torch, dtype)):
                    check()
                    median, captured = _microseconds(bench, work)
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


def call_us(group: Group, kind: str, tokens: int, width: int, dtype: torch.dtype) -> float:
    """Microseconds of one call by the best way that the group has for it; a graph's where collectives are captured.

    Every rank of ``group`` calls this at the same time.
    """
    backend = group.backend
    bench = Bench(group, backend.create_stream("collectives"), backend.kernels_in_use)
    work, check = _one(bench, kind, tokens, width, dtype, fused=kind == "all_reduce_rms_norm")
    check()
    return _microseconds(bench, work)[0]


def _works(
    bench: Bench, kind: str, tokens: int, width: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """(name of the way, the call, a check of it), by each way that may take it; the fused kernel last."""
    group = bench.group
    first, *others = group.ways
    for way in (first, *(others if kind in ("all_reduce", "all_reduce_rms_norm", "all_gather", "broadcast") else [])):
        group.take(way)
        yield way, *_one(bench, kind, tokens, width, dtype, fused=False)
    group.take(*group.ways)
    if kind == "all_reduce_rms_norm" and type(bench.kernels).all_reduce_rms_norm is not KernelSet.all_reduce_rms_norm:
        yield FUSED, *_one(bench, kind, tokens, width, dtype, fused=True)


def _one(
    bench: Bench, kind: str, tokens: int, width: int, dtype: torch.dtype, *, fused: bool
) -> tuple[Callable[[], None], Callable[[], None]]:
    group, stream = bench.group, bench.stream
    device, size, rank = bench.backend.device, group.size, group.rank
    with bench.backend.on(stream):
        x = torch.zeros((tokens, width), dtype=dtype, device=device)
        every = torch.zeros((size, tokens, width), dtype=dtype, device=device)
        part = torch.zeros_like(every)
        residual, weight = torch.zeros_like(x), torch.ones(width, dtype=dtype, device=device)

    def all_reduce_rms_norm() -> None:
        with bench.backend.on(stream):
            if fused:
                bench.kernels.all_reduce_rms_norm(x, residual, weight, _EPS, group=group, stream=stream)
            else:
                group.all_reduce(x, stream=stream)
                bench.kernels.add_rms_norm(x, residual, weight, _EPS)

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
        with bench.backend.on(stream):
            x.fill_(rank + 1)
            every.fill_(rank + 1)
            residual.zero_()
        work()
        stream.synchronize()
        if kind != "send" or size > 1:
            found = made().float()
            if not bool((found == expected()).all()):
                raise WrongResult(f"{kind} of {tokens} x {width} {dtype} gave {found.flatten()[:4].tolist()} on rank {rank}")
        with bench.backend.on(stream):
            for tensor in (x, every, residual):
                tensor.zero_()  # so that nothing overflows over many calls
        stream.synchronize()

    return work, check


def _microseconds(bench: Bench, work: Callable[[], None]) -> tuple[float, bool]:
    """Microseconds of one call, the median of many, and whether they were replayed as a graph."""
    backend, stream = bench.backend, bench.stream
    declared = backend.capabilities
    captured = declared.captures_graphs and declared.captures_collectives
    if captured:

        def many(context: object) -> None:
            del context
            for _ in range(_CALLS):
                work()

        graph = backend.capture("collectives", many, stream=stream, inputs={}, outputs={})

        def run() -> None:
            graph.replay(stream)

        calls = _CALLS
    else:

        def run() -> None:
            for _ in range(_EAGER_CALLS):
                work()

        calls = _EAGER_CALLS
    seconds = []
    for repeat in range(_REPEATS + 1):
        stream.synchronize()
        with backend.on(stream):
            gate = torch.zeros(1, device=backend.device)
        bench.group.all_reduce(gate, stream=stream)  # all ranks begin together
        stream.synchronize()
        if declared.event_timing:
            start, end = (backend.create_event(name, timing=True) for name in ("start", "end"))
            stream.record(start)
            run()
            stream.record(end)
            stream.synchronize()
            took = start.elapsed_ms(end) / 1e3
        else:
            began = time.perf_counter()
            run()
            stream.synchronize()
            took = time.perf_counter() - began
        if repeat:  # the first warms up
            seconds.append(took)
    return 1e6 * statistics.median(seconds) / calls, captured
