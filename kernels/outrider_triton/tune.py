"""``python -m outrider_triton.tune``: measure every candidate on this device and write the table of what won.

Candidates are compiled first, by many processes (compiled kernels are kept by Triton on disk), then measured one after
another by this one. Each is compared with torch's own in the same run, in the same way.
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from outrider.device import KernelSet
from outrider_triton import behind, pairs, rings
from outrider_triton.chain import AHEAD, Chain, Key, as_json, attention_candidates
from outrider_triton.facts import facts_of
from outrider_triton.kernelset import TritonKernels
from outrider_triton.table import AttentionConfig, MatmulConfig, parse, slug
from outrider_tune.measure import KernelCase, KernelShape, kernel_cases
from outrider_tune.timing import bandwidth, microseconds

_SHARED_BYTES = 220 << 10  # of a multiprocessor's shared memory, a little less than there is
_ROTATE_BYTES = 256 << 20  # several times the second-level cache

SHAPES: Mapping[str, KernelShape] = {
    "llama-3.1-8b": KernelShape(hidden=4096, heads=32, kv_heads=8, head_size=128, inner=14336, vocabulary=128256, fused=8192),
}


def matmuls(shape: KernelShape) -> Iterator[tuple[str, int, int]]:
    """(operator, rows of the weight, columns) of a model's matrix products."""
    attention = shape.heads * shape.head_size
    yield "linear", attention + 2 * shape.kv_heads * shape.head_size, shape.hidden
    yield "linear_parts", shape.hidden, attention
    yield "linear_silu_mul", 2 * shape.inner, shape.hidden
    yield "linear_parts", shape.hidden, shape.inner
    yield "linear", shape.vocabulary, shape.hidden
    yield "linear", shape.hidden, shape.fused


def candidates(operator: str, m: int, n: int, processors: int) -> list[MatmulConfig]:
    """Configurations worth trying for so many tokens and rows of the weight."""
    block_m = max(16, min(128, triton.next_power_of_2(m)))
    tall = [(16, 256), (16, 512), (32, 128), (32, 256), (64, 128), (64, 256), (128, 64)] if block_m <= 32 else []
    wide = [(32, 64), (32, 128), (64, 64), (64, 128), (128, 64)] if block_m > 16 else []
    splits = (1, 2, 4) if operator == "linear_parts" else (1,)
    depths = [(3, 256), (5, 256), (4, 0)] if block_m <= 32 else [(3, 256), (4, 0)]
    rows = n // 2 if operator == "linear_silu_mul" else n
    found = []
    for (block_n, block_k), split, (stages, ahead) in itertools.product(dict.fromkeys(tall + wide), splits, depths):
        # So many rows a program that every multiprocessor has one, two or four programs, and as much to do as any other.
        even = {-(-rows * split // (processors * waves)) for waves in (1, 2, 4)}
        even |= {-(-each // 8) * 8 for each in even}
        layouts = [(0, 0), *((0, each) for each in sorted(even) if block_n // 2 < each < block_n)]
        if operator != "linear_silu_mul":
            layouts.append((1, 0))
        for descriptor, each in layouts:
            warps = 8 if block_n * block_m > 4096 else 4
            config = MatmulConfig(block_m, block_n, block_k, split, warps, stages, ahead, descriptor, each)
            if _shared(config, operator) <= _SHARED_BYTES:
                found.append(config)
    return found


def _shared(config: MatmulConfig, operator: str) -> int:
    """Bytes of shared memory of a program."""
    rows = config.block_n * (2 if operator == "linear_silu_mul" else 1) + config.block_m
    return config.stages * rows * config.block_k * 2


def operands(
    operator: str, n: int, k: int, m: int, device: torch.device, *, rotate: int = _ROTATE_BYTES
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Tokens, weights to rotate among, and a residual with its norm."""
    copies = max(2, -(-rotate // (n * k * 2)))
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


def _candidate(
    operator: str,
    config: MatmulConfig,
    x: Tensor,
    weights: list[Tensor],
    residual: Tensor,
    norm: Tensor,
    pdl: bool,
    number: int,
) -> Tensor:
    return run(operator, config, x, weights[number % len(weights)], residual, norm, pdl)


def reference(operator: str, kernels: KernelSet, x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
    """Torch's product and the best of the rest around it."""
    if operator == "linear_parts":
        return kernels.add_rms_norm(torch.nn.functional.linear(x, weight), residual, norm, 1e-5)
    if operator == "linear_silu_mul":
        return kernels.silu_mul(torch.nn.functional.linear(x, weight))
    return torch.nn.functional.linear(x, weight)


def compile_all(
    jobs: list[tuple[str, MatmulConfig]],
    attention: list[AttentionConfig],
    fused: list[pairs.Job],
    shape: KernelShape,
    device: torch.device,
    pdl: bool,
) -> None:
    """Compile candidates on small operands; what doesn't fit is met again, and left out, when it's measured."""
    torch.get_device_module(device).set_device(device)
    for key, config in fused:
        try:
            pairs.compile_one(key, config, shape, device, pdl)
        except TritonError as failure:
            print(f"left out: {failure}", flush=True)
    for operator, config in jobs:
        x, weights, residual, norm = operands(operator, 512, 4096, config.block_m, device, rotate=1)
        try:
            run(operator, config, x, weights[0], residual, norm, pdl)
        except TritonError as failure:
            print(f"left out: {failure}", flush=True)
    q = torch.randn(4, 4, 128, dtype=torch.bfloat16, device=device)
    cache = torch.randn(3, 16, 1, 128, dtype=torch.bfloat16, device=device)
    starts = torch.tensor([0, 4], dtype=torch.int32, device=device)
    lens, table = starts[1:] + 28, torch.tensor([[1, 2]], dtype=torch.int32, device=device)
    for each in attention:
        block = [16, each.block_kv, each.split, each.warps, each.stages]
        settled = pdl and each.split > 1  # as in a layer behind the first
        try:
            torch.ops.outrider.paged_attention.triton(
                q, cache, cache, starts, lens, table, None, 4, 32, 0.1, 0, settled, block, pdl
            )
        except TritonError as failure:
            print(f"left out: {failure}", flush=True)


def compile_in_parallel(
    jobs: Iterable[tuple[str, MatmulConfig]],
    attention: Iterable[AttentionConfig],
    fused: Iterable[pairs.Job],
    shape: KernelShape,
    device: torch.device,
    pdl: bool,
) -> None:
    """Share the jobs out among processes, one a core."""
    every = [list(dict.fromkeys(each)) for each in (jobs, attention, fused)]
    workers = min(os.cpu_count() or 1, 14)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=compile_all, args=(*(each[i::workers] for each in every), shape, device, pdl))
        for i in range(workers)
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
    for config in candidates(operator, m, n, kernels.processors):
        try:
            us = microseconds(
                module,
                partial(_candidate, operator, config, x, weights, residual, norm, pdl),
                calls=calls,
            )
        except TritonError:
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
    wrong = float((made - right).norm() / right.norm())
    if not wrong < 1e-2:
        raise SystemExit(f"{operator} {n}x{k} at {m} tokens with {config} is wrong: relative error {wrong:.3g}")
    return {
        "operator": operator,
        "dtype": "bfloat16",
        "n": n,
        "k": k,
        "m": m,
        "config": config.as_list() if us < torch_us else None,
        "us": round(us, 2),
        "torch_us": round(torch_us, 2),
        "error": float(f"{wrong:.2g}"),
        "best": [[round(each, 2), *other.as_list()] for each, other in tried[:4]],
    }


def measure_small(case: KernelCase, kernels: TritonKernels, module: Any) -> dict[str, Any]:
    """One of the other kernels against the reference."""
    us = microseconds(module, lambda i: case.call(kernels, i), calls=16)
    torch_us = microseconds(module, lambda i: case.call(KernelSet(), i), calls=16)
    return {"kernel": case.kernel, "case": case.name, "us": round(us, 2), "torch_us": round(torch_us, 2)}


def in_place(
    data: dict[str, Any], shape: KernelShape, sizes: list[int], kernels: TritonKernels, device: torch.device
) -> list[dict[str, Any]]:
    """Tune every choice once more in a chain of layers; changes ``data``, returns what a layer takes."""
    table = parse(data)
    chain = Chain(shape, kernels, device)
    layers = []
    products = [(op, "bfloat16", n, k) for op, n, k in list(matmuls(shape))[:4]]
    for m in sizes:
        chain.prepare_for(m)
        choices: dict[Key, list[MatmulConfig | None]] = {}
        for key in products:
            row = next(r for r in data["matmul"] if (r["operator"], r["n"], r["k"], r["m"]) == (key[0], key[2], key[3], m))
            fastest = [MatmulConfig(*best[1:]) for best in row["best"]]
            even = [c for c in candidates(key[0], m, key[2], kernels.processors) if c.each]
            tried = [replace(c, ahead=ahead) for c in dict.fromkeys((*fastest, *even)) for ahead in AHEAD]
            choices[key] = [None, *dict.fromkeys(tried)]
        before = chain.layer_us()
        table = chain.tune(table, m, choices, lambda line: print(line, flush=True))
        layers.append(
            {
                "m": m,
                "width": chain.width,
                "context": chain.context,
                "before_us": round(before, 2),
                "us": round(chain.layer_us(), 2),
            }
        )
    for row in data["matmul"]:
        entry = table.entry(row["operator"], row["dtype"], n=row["n"], k=row["k"], m=row["m"])
        assert entry is not None  # every row came from the data
        row["config"] = None if entry.config is None else entry.config.as_list()
    data["attention"] = as_json(table)
    return layers


def main() -> None:
    """Tune and write the table, or ``--again`` a part of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--tokens", default="4,16,32,64,128", help="numbers of tokens, by commas")
    parser.add_argument("--in-place", default="4,16,32,64,128", help="those that are also tuned in a chain of layers")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--again",
        action="store_true",
        help="keep the device's table but for pairs, attention, what stands alone and small kernels",
    )
    parser.add_argument("--out", type=Path, help="file to write; default: this package's table of the device")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    module = torch.get_device_module(device)
    module.set_device(device)
    properties = module.get_device_properties(device)
    kernels = TritonKernels(facts_of(properties), everywhere=True)
    pdl = kernels.pdl
    shape, sizes = SHAPES[arguments.shape], [int(size) for size in arguments.tokens.split(",")]
    name, began = module.get_device_name(device), time.perf_counter()
    in_chain = [int(m) for m in arguments.in_place.split(",")]
    ringed = [m for m in in_chain if m <= rings.MOST] if pdl else []
    fused = pairs.jobs(shape, in_chain) + behind.jobs(shape, in_chain, kernels.processors, rings=pdl)
    fused += rings.jobs(shape, ringed, kernels.processors)
    attention = attention_candidates(1, 640)
    if arguments.again:
        compile_in_parallel([], attention, fused, shape, device, kernels.pdl)
        data = json.loads(_home(name).read_text(encoding="utf-8"))
    else:
        data = from_scratch(shape, sizes, in_chain, attention, fused, kernels, device)
    print(f"compiled and tuned alone after {time.perf_counter() - began:.0f} s", flush=True)
    steps = [(pairs.tune_pairs, in_chain), (rings.tune_rings, ringed), (behind.tune_behind, in_chain)]
    for tune, tokens in steps:
        tune(data, shape, tokens, kernels, device, lambda line: print(line, flush=True))
    data["software"] = {"torch": torch.__version__, "triton": triton.__version__}
    data["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    data["cases"] = [
        measure_small(case, kernels, module) for case in kernel_cases(shape, dtype=torch.bfloat16, device=device)
    ]
    data["kernels"] = {
        name: all(row["us"] < row["torch_us"] for row in data["cases"] if row["kernel"] == name)
        for name in dict.fromkeys(row["kernel"] for row in data["cases"])
    }
    for row in data["cases"]:
        print(row, flush=True)
    out = arguments.out or _home(name)
    out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {out} after {time.perf_counter() - began:.0f} s: {data['kernels']}", flush=True)


def _home(name: str) -> Path:
    return Path(__file__).with_name("tuned") / f"{slug(name)}.json"


def from_scratch(
    shape: KernelShape,
    sizes: list[int],
    in_chain: list[int],
    attention: list[AttentionConfig],
    fused: list[pairs.Job],
    kernels: TritonKernels,
    device: torch.device,
) -> dict[str, Any]:
    """A table without pairs and small kernels: every product alone, then in a chain of layers."""
    module, products = torch.get_device_module(device), list(matmuls(shape))
    alone = [
        (op, replace(c, each=0)) for op, n, _ in products for m in sizes for c in candidates(op, m, n, kernels.processors)
    ]
    compile_in_parallel(
        alone,
        attention,
        fused,
        shape,
        device,
        kernels.pdl,
    )
    rows = []
    for operator, n, k in products:
        for m in sizes:
            row = measure(operator, n, k, m, kernels, device, kernels.pdl)
            rows.append(row)
            rate = n * k * 2 / row["us"] / 1e6
            print(
                operator, n, k, m, row["us"], row["torch_us"], f"{rate:.2f} TB/s", row["config"], row["best"][1:3], flush=True
            )
    data: dict[str, Any] = {
        "device": module.get_device_name(device),
        "software": {},
        "date": "",
        "bandwidth_gb_per_s": round(bandwidth(module, device) / 1e9),
        "matmul": rows,
        "kernels": {"add_rms_norm": True, "rms_norm": True, "rope_write_cache": True, "paged_attention": True},
        "cases": [],
    }
    data["chain"] = in_place(data, shape, in_chain, kernels, device)
    return data


if __name__ == "__main__":
    main()
