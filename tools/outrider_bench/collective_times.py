"""The times of collectives on one rank, by kind, size and implementation; ``outrider bench collectives`` runs them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.device import KernelSet, OutriderError, Reduction
from outrider_bench.limits import seconds_on_stream

if TYPE_CHECKING:
    from outrider.device import Backend, Group, Stream
    from outrider_conformance.ranks.processes import RankContext

FUSED = "fused"
_CALLS = 64
_EAGER_CALLS = 8
_REPEATS = 9
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class RankBench:
    """The group, the stream and the kernels of one rank."""

    group: Group
    stream: Stream
    kernels: KernelSet

    @property
    def backend(self) -> Backend:
        """The backend of this rank's device."""
        return self.group.backend


class WrongResult(OutriderError):
    """Raised if a collective gives a wrong result."""


def measure(place: RankContext, *, kinds: Sequence[str], tokens: Sequence[int], width: int, dtype: str) -> dict[str, Any]:
    """Return the rows of the table by this rank's clock. Every rank calls this function at the same time."""
    backend = place.backend
    group = backend.create_group("bench", ranks=range(place.size), rank=place.rank, store=place.store)
    bench = RankBench(group, backend.create_stream("bench"), backend.kernels_in_use)
    rows = []
    try:
        for kind in kinds:
            for count in tokens:
                for way, work, check in _implementations(bench, kind, count, width, getattr(torch, dtype)):
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
    """Return the microseconds of one call by the group's best implementation, in a graph if collectives can be captured.

    Every rank of ``group`` calls this function at the same time.
    """
    backend = group.backend
    bench = RankBench(group, backend.create_stream("collectives"), backend.kernels_in_use)
    work, check = _implementation(bench, kind, tokens, width, dtype, fused=kind == "all_reduce_rms_norm")
    check()
    return _microseconds(bench, work)[0]


def _implementations(
    bench: RankBench, kind: str, tokens: int, width: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """Yield (name, call, check) for each implementation of a collective; the fused kernel comes last."""
    group = bench.group
    first, *others = group.implementations
    for way in (first, *(others if kind in ("all_reduce", "all_reduce_rms_norm", "all_gather", "broadcast") else [])):
        group.restrict_implementations(way)
        yield way, *_implementation(bench, kind, tokens, width, dtype, fused=False)
    group.restrict_implementations(*group.implementations)
    if kind == "all_reduce_rms_norm" and type(bench.kernels).all_reduce_rms_norm is not KernelSet.all_reduce_rms_norm:
        yield FUSED, *_implementation(bench, kind, tokens, width, dtype, fused=True)


def _implementation(
    bench: RankBench, kind: str, tokens: int, width: int, dtype: torch.dtype, *, fused: bool
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


def _microseconds(bench: RankBench, work: Callable[[], None]) -> tuple[float, bool]:
    """Return the microseconds of one call, the median of 9 runs, and True if they were replayed as a graph."""
    backend, stream = bench.backend, bench.stream
    captured = backend.capabilities.captures_graphs and backend.capabilities.captures_collectives
    calls = _CALLS if captured else _EAGER_CALLS

    def repeat_call(context: object = None) -> None:
        del context
        for _ in range(calls):
            work()

    enqueue: Callable[[], object] = repeat_call
    if captured:
        graph = backend.capture("collectives", repeat_call, stream=stream, inputs={}, outputs={})
        enqueue = partial(graph.replay, stream)
    seconds = []
    for _ in range(_REPEATS + 1):
        stream.synchronize()
        with backend.on(stream):
            gate = torch.zeros(1, device=backend.device)
        bench.group.all_reduce(gate, stream=stream)  # all ranks begin together
        seconds.append(seconds_on_stream(backend, stream, enqueue))
    return 1e6 * statistics.median(seconds[1:]) / calls, captured  # the first run warms up
