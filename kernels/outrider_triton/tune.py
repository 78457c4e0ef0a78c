"""``python -m outrider_triton.tune``: measure every candidate on this device and write the table of what won.

Candidates are compiled first, by many processes (compiled kernels are kept by Triton on disk), then measured one after another
by this one. Each is compared with torch's own in the same run, in the same way.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from outrider.device import KernelSet
from outrider_triton.cases import Case, Shape, small_cases
from outrider_triton.kernelset import TritonKernels
from outrider_triton.table import MatmulConfig, slug
from outrider_triton.timing import bandwidth, microseconds

_SHARED_BYTES = 220 << 10  # of a multiprocessor's shared memory, a little less than there is
_ROTATE_BYTES = 256 << 20  # several times the second-level cache

SHAPES: Mapping[str, Shape] = {
    "llama-3.1-8b": Shape(
        hidden=4096, heads=32, kv_heads=8, head_size=128, inner=14336, vocabulary=128256, fused=8192
    ),
}


def matmuls(shape: Shape) -> Iterator[tuple[str, int, int]]:
    """(operator, rows of the weight, columns) of a model's matrix products."""
    attention = shape.heads * shape.head_size
    yield "linear", attention + 2 * shape.kv_heads * shape.head_size, shape.hidden
    yield "linear_parts", shape.hidden, attention
    yield "linear_silu_mul", 2 * shape.inner, shape.hidden
    yield "linear_parts", shape.hidden, shape.inner
    yield "linear", shape.vocabulary, shape.hidden
    yield "linear", shape.hidden, shape.fused


def candidates(operator: str, m: int) -> list[MatmulConfig]:
    """Configurations worth trying for so many tokens."""
    block_m = max(16, min(128, triton.next_power_of_2(m)))
    tall = [(16, 256), (16, 512), (32, 128), (32, 256), (64, 128), (64, 256)] if block_m <= 32 else []
    wide = [(32, 64), (32, 128), (64, 64), (64, 128), (128, 64)] if block_m > 16 else []
    splits = (1, 2, 4) if operator == "linear_parts" and block_m <= 32 else (1,)
    weights = 2 if operator == "linear_silu_mul" else 1
    descriptors = (0,) if operator == "linear_silu_mul" else (0, 1)
    depths = [(3, 256), (5, 256), (4, 0)] if block_m <= 32 else [(3, 256), (4, 0)]
    found = []
    for (block_n, block_k), split, (stages, ahead), descriptor in itertools.product(tall + wide, splits, depths, descriptors):
        if stages * (weights * block_n + block_m) * block_k * 2 > _SHARED_BYTES:
            continue
        found.append(MatmulConfig(block_m, block_n, block_k, split, 8 if block_n * block_m > 4096 else 4, stages, ahead, descriptor))
    return found


def operands(operator: str, n: int, k: int, m: int, device: torch.device) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Tokens, weights to rotate among, and a residual with its norm."""
    copies = max(2, -(-_ROTATE_BYTES // (n * k * 2)))
    weights = [torch.randn(n, k, dtype=torch.bfloat16, device=device) * k**-0.5 for _ in range(copies)]
    x = torch.randn(m, k, dtype=torch.bfloat16, device=device)
    rows = n // 2 if operator == "linear_silu_mul" else n
    residual = torch.randn(m, rows, dtype=torch.bfloat16, device=device)
    return x, weights, residual, torch.ones(rows, dtype=torch.bfloat16, device=device)


def run(operator: str, config: MatmulConfig, x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, pdl: bool) -> Tensor:
    """The candidate, with what consumes it where that is part of the bargain."""
    ops = torch.ops.outrider
    if operator == "linear_parts":
        parts = ops.linear_parts.triton(x, weight, config.as_list(), pdl)
        return ops.add_parts_rms_norm.triton(parts, None, residual, norm, 1e-5, pdl)  # type: ignore[no-any-return]
    call = ops.linear.triton if operator == "linear" else ops.linear_silu_mul.triton
    return call(x, weight, None, config.as_list(), pdl)  # type: ignore[no-any-return]


def reference(operator: str, kernels: KernelSet, x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
    """Torch's product and the best of the rest around it."""
    if operator == "linear_parts":
        return kernels.add_rms_norm(torch.nn.functional.linear(x, weight), residual, norm, 1e-5)
    if operator == "linear_silu_mul":
        return kernels.silu_mul(torch.nn.functional.linear(x, weight))
    return torch.nn.functional.linear(x, weight)


def compile_all(jobs: list[tuple[str, MatmulConfig]], device: torch.device, pdl: bool) -> None:
    """Compile candidates on small weights; what doesn't fit or compile is found again, and left out, when measured."""
    torch.get_device_module(device).set_device(device)
    for operator, config in jobs:
        x, weights, residual, norm = operands(operator, 512, 4096, config.block_m, device)
        try:
            run(operator, config, x, weights[0], residual, norm, pdl)
        except Exception as error:  # any failure of a compiler means: not this one
            print(f"left out {operator} {config}: {type(error).__name__}", flush=True)


def compile_in_parallel(jobs: Iterable[tuple[str, MatmulConfig]], device: torch.device, pdl: bool) -> None:
    """Share the jobs out among processes, one a core."""
    unique = list(dict.fromkeys(jobs))
    workers = min(os.cpu_count() or 1, 14)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=compile_all, args=(unique[number::workers], device, pdl)) for number in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def measure(operator: str, n: int, k: int, m: int, kernels: TritonKernels, device: torch.device, pdl: bool) -> dict[str, Any]:
    """Every candidate for one product; the winner's error against float64 comes along."""
    module = torch.get_device_module(device)
    x, weights, residual, norm = operands(operator, n, k, m, device)
    calls = max(2 * len(weights), 8)
    torch_us = microseconds(
        module, lambda i: reference(operator, kernels, x, weights[i % len(weights)], residual, norm), calls=calls
    )
    tried: list[tuple[float, MatmulConfig]] = []
    for config in candidates(operator, m):
        try:
            us = microseconds(
                module,
                lambda i, config=config: run(operator, config, x, weights[i % len(weights)], residual, norm, pdl),
                calls=calls,
            )
        except (RuntimeError, triton.errors.TritonError, triton.runtime.errors.OutOfResources):
            continue
        tried.append((us, config))
    tried.sort(key=lambda pair: pair[0])
    us, config = tried[0]
    residual.normal_()
    exact = residual.double()
    wanted = KernelSet()
    if operator == "linear_parts":
        right = wanted.linear_add_rms_norm(x.double(), weights[0].double(), None, exact, norm.double(), 1e-5)
    elif operator == "linear_silu_mul":
        right = wanted.linear_silu_mul(x.double(), weights[0].double())
    else:
        right = x.double() @ weights[0].double().T
    made = run(operator, config, x, weights[0], residual, norm, pdl).double()
    error = float((made - right).norm() / right.norm())
    if not error < 1e-2:
        raise SystemExit(f"{operator} {n}x{k} at {m} tokens with {config} is wrong: relative error {error:.3g}")
    return {
        "operator": operator,
        "dtype": "bfloat16",
        "n": n,
        "k": k,
        "m": m,
        "config": config.as_list() if us < torch_us else None,
        "us": round(us, 2),
        "torch_us": round(torch_us, 2),
        "error": float(f"{error:.2g}"),
        "best": [[round(each, 2), *other.as_list()] for each, other in tried[:4]],
    }


def measure_small(case: Case, module: Any) -> dict[str, Any]:
    """One of the other kernels against the reference."""
    us = microseconds(module, lambda i: case.call(case.kernels, i), calls=16)
    torch_us = microseconds(module, lambda i: case.call(KernelSet(), i), calls=16)
    return {"kernel": case.kernel, "case": case.name, "us": round(us, 2), "torch_us": round(torch_us, 2)}


def main() -> None:
    """Tune and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--tokens", default="4,16,32,64,128", help="numbers of tokens, by commas")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="file to write; default: this package's table of the device")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    module = torch.get_device_module(device)
    module.set_device(device)
    properties = module.get_device_properties(device)
    pdl = torch.version.hip is None and properties.major >= 9
    kernels = TritonKernels(table=None, everywhere=True, processors=properties.multi_processor_count, pdl=pdl)
    shape, sizes = SHAPES[arguments.shape], [int(size) for size in arguments.tokens.split(",")]
    began = time.perf_counter()
    products = list(matmuls(shape))
    compile_in_parallel(((op, c) for op, _, _ in products for m in sizes for c in candidates(op, m)), device, pdl)
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    rows = []
    for operator, n, k in products:
        for m in sizes:
            row = measure(operator, n, k, m, kernels, device, pdl)
            rows.append(row)
            rate = n * k * 2 / row["us"] / 1e6
            print(operator, n, k, m, row["us"], row["torch_us"], f"{rate:.2f} TB/s", row["config"], row["best"][1:3], flush=True)
    small = []
    for case in small_cases(shape, kernels, device):
        small.append(measure_small(case, module))
        print(small[-1], flush=True)
    wins = {
        name: all(row["us"] < row["torch_us"] for row in small if row["kernel"] == name)
        for name in dict.fromkeys(row["kernel"] for row in small)
    }
    name = module.get_device_name(device)
    data = {
        "device": name,
        "software": {"torch": torch.__version__, "triton": triton.__version__},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "bandwidth_gb_per_s": round(bandwidth(module, device) / 1e9),
        "matmul": rows,
        "kernels": wins,
        "cases": small,
    }
    out = arguments.out or Path(__file__).with_name("tuned") / f"{slug(name)}.json"
    out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {out} after {time.perf_counter() - began:.0f} s: {wins}", flush=True)


if __name__ == "__main__":
    main()
