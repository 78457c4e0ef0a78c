"""Tuning of the products that stand alone in a draft's pass: its fusion of two inputs, and its last one with the residual.

Each is timed behind a gated product, not by itself. Where programs of the kernel ahead end one by one, those of a product
with fewer programs than multiprocessors go wherever there is room, two to a multiprocessor while others have none: what is
best on an idle device, which spreads them evenly, may take a quarter longer there, and never twice the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from triton.errors import TritonError

from outrider.device import KernelSet
from outrider_triton.kernelset import TritonKernels
from outrider_triton.pairs import Job, ends, row_of
from outrider_triton.rings import MOST, folded
from outrider_triton.table import MatmulConfig, parse
from outrider_tune.chain import normal
from outrider_tune.measure import KernelShape
from outrider_tune.search import Report
from outrider_tune.timing import microseconds

_WEIGHTS = 4


def jobs(shape: KernelShape, sizes: list[int], processors: int, *, rings: bool) -> list[Job]:
    """What is to be compiled: products of the shape, and configurations."""
    return [
        ((operator, "bfloat16", shape.hidden, k), config)
        for operator, k in _columns(shape).items()
        for m in sizes
        for config in _candidates(m, shape.hidden, k, processors, rings=rings)
    ]


def _columns(shape: KernelShape) -> dict[str, int]:
    return {"linear": shape.fused, "linear_add": shape.inner}


def _candidates(m: int, n: int, k: int, processors: int, *, rings: bool) -> list[MatmulConfig]:
    return ends(m) + (folded(m, n, k, processors) if rings and m <= MOST else [])


def tune_behind(
    data: dict[str, Any], shape: KernelShape, sizes: list[int], kernels: TritonKernels, device: torch.device, report: Report
) -> None:
    """Choose for each number of tokens; changes ``data``, the table's JSON."""
    kernels.table = parse(data)  # the gated product ahead is the one that will be there
    gates = [normal(device, 2 * shape.inner, shape.hidden) for _ in range(_WEIGHTS)]
    for operator, k in _columns(shape).items():
        weights = [normal(device, shape.hidden, k) for _ in range(_WEIGHTS)]
        for m in sizes:
            row = _measure(operator, k, m, weights, gates, kernels, device)
            report(f"m {m}: {operator} {shape.hidden}x{k}: {row['us']} us, torch {row['torch_us']}, {row['config']}")
            others = [old for old in data["matmul"] if any(old[name] != row[name] for name in ("operator", "n", "k", "m"))]
            data["matmul"] = [*others, row]


def _measure(
    operator: str,
    k: int,
    m: int,
    weights: list[torch.Tensor],
    gates: list[torch.Tensor],
    kernels: TritonKernels,
    device: torch.device,
) -> dict[str, Any]:
    n, module = weights[0].shape[0], torch.get_device_module(device)
    x, before = normal(device, m, k), normal(device, m, gates[0].shape[1])
    residual = normal(device, m, n)

    def timed(product: Callable[[torch.Tensor], object]) -> float:
        def call(number: int) -> None:
            kernels.linear_silu_mul(before, gates[number % _WEIGHTS])
            product(weights[number % _WEIGHTS])

        return microseconds(module, call, calls=2 * _WEIGHTS, replays=9)

    alone = timed(lambda weight: None)
    plain = KernelSet()

    def of_torch(weight: torch.Tensor) -> object:
        return plain.linear(x, weight) if operator == "linear" else plain.linear_add(x, weight, None, residual)

    torch_us = timed(of_torch)
    found: list[tuple[float, MatmulConfig]] = []
    for config in _candidates(m, n, k, kernels.processors, rings=kernels.pdl):
        with suppress(TritonError):
            found.append((timed(partial(_enqueue, operator, x, residual, config, kernels.pdl)), config))
    us, best = min(found, key=lambda pair: pair[0])
    chosen = best.as_list() if us < torch_us else None
    return row_of((operator, "bfloat16", n, k), m, chosen, us - alone, torch_us - alone)


def _enqueue(
    operator: str, x: torch.Tensor, residual: torch.Tensor, config: MatmulConfig, pdl: bool, weight: torch.Tensor
) -> None:
    ops = torch.ops.outrider
    if operator == "linear":
        ops.linear.triton(x, weight, None, config.as_list(), pdl)
    else:
        ops.linear_add.triton(x, weight, None, residual, config.as_list(), pdl)
