"""What the estimate says of products with quantised weights, against what a device takes: ``python
tests/kernels/quantized_candidates.py [SECONDS [FORMATS [TOKENS]]]``. A JSON line for each candidate, most important first.

Weights rotate among more bytes than a cache holds; calls run in a graph, each behind the one before.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from outrider_triton.derive import estimate, rank
from outrider_triton.facts import facts_of
from outrider_triton.kernelset import TritonKernels
from outrider_triton.launch import ahead
from outrider_triton.quantized_ops import plan
from outrider_triton.variants import Scope
from outrider_tune.quantized import random_format, random_quantized

SHAPES = {"gate and up": (28672, 4096), "down": (4096, 14336), "qkv": (6144, 4096), "output": (4096, 4096)}
CALLS = 12
ROTATE = 200 << 20
KEPT = 10
"""Candidates of a product, no more than two that are cut up alike."""


def candidates(facts, stored, m, n, k):
    found, alike = [], {}
    for config in rank(facts, "linear_parts", m=m, n=n, k=k, stored=stored):
        cut = config.block_n, config.block_k, config.each, config.split
        alike[cut] = alike.get(cut, 0) + 1
        if alike[cut] == 1 and len(found) < KEPT:
            found.append(config)
    return found


def microseconds(call):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number)
    times = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    return min(times[1:])


def main() -> None:
    given = dict(zip(("seconds", "formats", "tokens"), sys.argv[1:], strict=False))
    end = time.monotonic() + float(given.get("seconds", 60))
    device = torch.device("cuda")
    facts = facts_of(torch.cuda.get_device_properties(device))
    kernels = TritonKernels(facts, everywhere=True, device=device)
    jobs = []
    for m in map(int, given.get("tokens", "1,4,32").split(",")):
        for name in given.get("formats", "fp8,int4").split(","):
            for label, (n, k) in SHAPES.items():
                jobs.append((m, name, label, n, k))

    def call_of(weights, x, way, config):
        def call(number):
            weight = weights[number % len(weights)]
            kernels._skinny(x, weight, None, way, config)

        return call

    # All of them are compiled first, several at a time.
    scope = Scope()
    small = {}
    with scope.entered():
        for m, name, _, n, k in jobs:
            weight = small.setdefault((name, k), random_quantized(random_format(name), 1024, k, device=device))
            way = plan(facts, weight)
            x = torch.randn(m, k, device=device).to(torch.bfloat16)
            for config in candidates(facts, way.stored(weight.format), m, n, k):
                with ahead():
                    call_of([weight], x, way, config)(0)
    print(json.dumps({"compiled_s": 60 - (end - time.monotonic())}), flush=True)
    for m, name, label, n, k in jobs:
        first = random_quantized(random_format(name), n, k, device=device)
        weights = [
            first,
            *(random_quantized(random_format(name), n, k, device=device) for _ in range(ROTATE // first.nbytes)),
        ]
        way, x = plan(facts, first), torch.randn(m, k, device=device).to(torch.bfloat16)
        stored = way.stored(first.format)
        for config in candidates(facts, stored, m, n, k):
            if time.monotonic() > end:
                print(json.dumps({"late": True}))
                return
            guess = 1e6 * estimate(facts, "linear_parts", config, m=max(m, 8), n=n, k=k, stored=stored)
            try:
                us = round(microseconds(call_of(weights, x, way, config)), 2)
            except Exception as error:  # the next candidate may run
                us = f"{type(error).__name__}: {str(error)[:200]}"
            row = {"m": m, "format": name, "product": label, "config": config.as_list(), "us": us}
            print(json.dumps({**row, "estimate": round(guess, 2), "bytes": first.nbytes}), flush=True)


if __name__ == "__main__":
    main()
