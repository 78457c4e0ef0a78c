"""Products with quantised weights by themselves, in each way they could be cut up: ``python
tests/kernels/quantized_candidates.py [SECONDS [FORMATS [TOKENS [PRODUCTS]]]]``. A JSON line for each candidate.

Weights rotate among more bytes than a cache holds; calls run in a graph, each behind the one before; tokens are laid out or
quantised as the kernel before leaves them. ``share``: of what reading the weight takes at the rate of a copy. ``error``:
relative, against the reference in float32; more than 0.02 is wrong. Lines end with ``{"late": true}`` where SECONDS did.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from on_device import microseconds

from outrider.device import KernelSet
from outrider.device.kernels.weight_formats import weight_format
from outrider_triton.kernelset import TritonKernels
from outrider_triton.launch import compile_only
from outrider_triton.quantized.nibble_planes import permute_rows, row_layout
from outrider_triton.quantized.operators import plan, quantized_rows
from outrider_triton.quantized.products import PlannedProduct, TokenRows
from outrider_triton.tiles.configs import MatmulConfig
from outrider_triton.tiles.derive.products import rank_configs
from outrider_triton.tiles.facts import facts_of
from outrider_triton.tiles.variants import VariantScope

SHAPES = {"gate and up": (28672, 4096), "down": (4096, 14336), "qkv": (6144, 4096), "output": (4096, 4096)}
HEAD = {"head": (128256, 4096)}
ROTATE = 200 << 20
CUTS = {
    "int4": [(64, 256, 4, 4), (64, 512, 4, 3), (64, 512, 4, 4), (128, 256, 4, 4), (128, 512, 4, 3), (128, 256, 8, 4),
             (32, 512, 2, 4), (32, 256, 2, 5), (64, 256, 2, 4), (16, 512, 1, 4), (64, 1024, 4, 2)],
    "fp8": [(64, 256, 4, 4), (64, 512, 4, 3), (64, 512, 4, 5), (128, 256, 4, 4), (128, 256, 8, 5), (32, 512, 4, 4),
            (32, 256, 2, 5), (64, 256, 4, 6)],
}  # fmt: skip
"""Rows, columns, warps, stages."""


def candidates(facts, stored, m, n, k, name):
    """The derived one first; then each cut with all its rows, and with a share that all multiprocessors have alike."""
    found = rank_configs(facts, "linear_parts", m=m, n=n, k=k, stored=stored)[:2]
    early = found[0].prefetch_columns
    for rows, columns, warps, stages in CUTS["int4" if name.startswith("int4") else "fp8"]:
        for split in (1, 2, 4):
            shares = {0} | {-(-n * split // (facts.processors * waves * 8)) * 8 for waves in (1, 2, 3, 4, 6)}
            for each in sorted(each for each in shares if each == 0 or rows * 3 // 4 <= each < rows):
                programs = -(-n // (each or rows)) * split
                if facts.processors * 0.7 < programs < facts.processors * 16 and k % (split * columns) == 0:
                    found.append(MatmulConfig(8, rows, columns, split, warps, stages, early, 0, each))
    return list(dict.fromkeys(found))


def copied(device):
    """Bytes a second of a copy, read and written."""
    one = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    two = torch.empty_like(one)
    return 2e6 * one.nbytes / microseconds(lambda number: two.copy_(one))


def prepared(x, weight, way, config):
    """Tokens as the kernel before leaves them."""
    if way.planes:
        return TokenRows(permute_rows(x, False, row_layout(config)), in_planes=True)
    if weight.activations:
        return TokenRows(*quantized_rows(x, weight.activations, weight.activation_group, None, weight.data.dtype, False))
    return TokenRows(x)


def main() -> None:
    given = dict(zip(("seconds", "formats", "tokens", "products"), sys.argv[1:], strict=False))
    begun = time.monotonic()
    end = begun + float(given.get("seconds", 60))
    device = torch.device("cuda")
    facts = facts_of(torch.cuda.get_device_properties(device))
    kernels = TritonKernels(facts, device=device)
    rate = copied(device)
    only = given.get("products")
    jobs = []
    for name in given.get("formats", "fp8,int4").split(","):
        for label, (n, k) in (SHAPES | (HEAD if name.startswith("fp8") else {})).items():
            if only is None or label in only.split(","):
                jobs.append((name, label, n, k))
    tokens = [int(each) for each in given.get("tokens", "1,4,8").split(",")]

    def call_of(weights, rows, way, config):
        def call(number):
            product = PlannedProduct(weights[number % len(weights)], None, way, config)
            return kernels.quantized.launch_product(rows, product, torch.bfloat16, parts=True)

        return call

    # All of them are compiled first, several at a time.
    scope, small = VariantScope(), {}
    with scope.entered():
        for name, _, n, k in jobs:
            weight = small.setdefault((name, k), weight_format(name).random_weight(1024, k, device=device))
            way = plan(facts, weight)
            drawn = torch.randn(tokens[0], k, device=device).to(torch.bfloat16)
            for config in candidates(facts, way.stored(weight.format), tokens[0], n, k, name):
                rows = prepared(drawn, weight, way, config)
                with compile_only():
                    call_of([weight], rows, way, config)(0)
    print(json.dumps({"copy_GB/s": round(rate / 1e9), "compiled_s": round(time.monotonic() - begun, 1)}), flush=True)
    reference, best = KernelSet(), {}
    for name, label, n, k in jobs:
        way_of = weight_format(name)
        first = way_of.random_weight(n, k, device=device)
        weights = [first, *(way_of.random_weight(n, k, device=device) for _ in range(ROTATE // first.nbytes))]
        way = plan(facts, first)
        for m in tokens:
            plain = torch.randn(m, k, device=device).to(torch.bfloat16)
            right = reference.linear_quantized(plain.float(), first)
            for config in candidates(facts, way.stored(first.format), m, n, k, name):
                if time.monotonic() > end:
                    print(json.dumps({"late": True, "best": best}))
                    return
                row = {"m": m, "format": name, "product": label, "config": config.as_list()}
                try:
                    call = call_of(weights, prepared(plain, first, way, config), way, config)
                    made = call(0).float()
                    made = made.sum(0) if config.split > 1 else made
                    row["error"] = round(float((made - right).norm() / right.norm()), 5)
                    us = microseconds(call)
                    row |= {"us": round(us, 2), "GB/s": round(first.nbytes / us / 1e3)}
                    row["share"] = round(1e6 * first.nbytes / rate / us, 3)
                    key = f"{name} {label} {m}"
                    if row["error"] <= 0.02 and (key not in best or us < best[key][0]):
                        best[key] = round(us, 2), row["share"], config.as_list()
                except Exception as error:  # the next candidate may run
                    row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
                print(json.dumps(row), flush=True)
        del weights, first
    print(json.dumps({"best": best}))


if __name__ == "__main__":
    main()
