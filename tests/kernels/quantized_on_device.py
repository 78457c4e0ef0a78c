"""Kernels for quantised weights on a real device, against the reference in float64 there: ``python
tests/kernels/quantized_on_device.py [SECONDS]``. Prints a line for each case and a JSON object; exits 1 where one is wrong.

What the tests check by the interpreter, here as it is compiled: with early starts, in bfloat16, in a graph, with more tokens.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from functools import partial

import torch
from on_device import in_a_graph, wrong
from unfused import UnfusedProducts

from outrider.device import RotaryArgs
from outrider.device.kernels.weight_formats import WEIGHT_FORMATS
from outrider_triton.kernelset import TritonKernels
from outrider_triton.products.operands import QuantizedProduct
from outrider_triton.tiles.facts import facts_of

TOKENS = (1, 4, 13, 64, 100, 300)
SHAPES = ((4096, 4096), (6144, 4096), (1000, 1056), (1000, 1024), (2048, 14336))
LAYERS = ("fp8", "int4", "int8", "fp8-block")
ERROR = 6e-3
"""Relative to the largest number of the row: a rounding of bfloat16 is 4e-3, and the reference rounds nothing."""
REFERENCE = UnfusedProducts()


def products(kernels, device):
    generator = torch.Generator(device).manual_seed(0)
    for name, way in WEIGHT_FORMATS.items():
        for n, k in SHAPES:
            weight = way.random_weight(n, k, device=device, generator=generator)
            bias = torch.randn(n, device=device, generator=generator).to(torch.bfloat16)
            for m in TOKENS:
                x = torch.randn(m, k, device=device, generator=generator).to(torch.bfloat16)
                # Activations are quantised from what is in bfloat16, and by either side in its own precision.
                right = REFERENCE.linear_quantized(x.double(), weight, bias.double())
                own = wrong(REFERENCE.linear_quantized(x, weight, bias), right)
                made = in_a_graph(partial(kernels.linear_quantized, x, weight, bias))
                yield f"{name} {n}x{k}, {m} tokens", wrong(made, right), own


def layers(kernels, device):
    """A product, the norm of its sum with the residual, and the product behind; the second time one that turns its rows."""
    generator = torch.Generator(device).manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, device=device, generator=generator).to(torch.bfloat16)

    hidden, inner, heads, kv_heads, size = 4096, 14336, 32, 8, 128
    shapes = (hidden, hidden), (2 * inner, hidden), (hidden, inner), ((heads + 2 * kv_heads) * size, hidden)
    shapes += ((hidden, 2 * hidden),)
    for name, m in itertools.product(LAYERS, (1, 13, 32, 65, 128)):
        weights = [WEIGHT_FORMATS[name].random_weight(n, k, device=device, generator=generator) for n, k in shapes]
        given = normal(m, hidden), normal(hidden), normal(m, hidden), normal(m, 2 * inner), normal(m, size)
        work = partial(layer, weights, given, kv_heads)
        right, own = work(REFERENCE, torch.float64), work(REFERENCE, torch.bfloat16)
        made = in_a_graph(partial(work, kernels, torch.bfloat16))
        parts = "gates", "queries", "keys", "values", "first queries", "sum", "final norm", "fused"
        for what, wanted, mine, its in zip(parts, right, made, own, strict=True):
            yield f"{name} {what}, {m} tokens", wrong(mine, wanted.double()), wrong(its, wanted.double())


def layer(weights, given, kv_heads, kernel_set, dtype):
    """What both ends of a layer make: gate and up [T, 2 I], queries, and keys and values from where they were written. Then
    what both ends of a stack do: queries behind no norm, the last sum, the norm of it, and a draft's fusion.
    """
    residual, norm, x, gate_up, angles = (each.to(dtype) for each in given)
    tokens, embedding = torch.arange(x.shape[0], device=x.device).flip(0), x * 0.5
    slots = torch.arange(x.shape[0], device=x.device) + 5
    caches = [torch.zeros(16, 16, kv_heads, angles.shape[1], device=x.device, dtype=dtype) for _ in range(2)]
    turned = RotaryArgs(angles.cos(), angles.sin(), *caches, slots)
    added = QuantizedProduct(x, weights[0], None)
    products = kernel_set.quantized
    gates = products.norm_linear_quantized(added, residual.clone(), norm, 1e-5, weights[1])
    added = QuantizedProduct(gate_up, weights[2], None, gated=True)
    q = products.norm_linear_quantized_rope_write_cache(added, residual.clone(), norm, 1e-5, weights[3], None, turned)
    written = [cache.flatten(0, 1)[slots].flatten(1) for cache in caches]
    first = products.linear_quantized_rope_write_cache(x, weights[3], None, turned)
    inner = kernel_set.silu_mul(gate_up)
    made = QuantizedProduct(inner, weights[2], None, maxima=inner.abs().amax(1).float()[None])
    total = products.linear_quantized_add(made, residual.clone())
    return (
        gates,
        q.flatten(1),
        *written,
        first.flatten(1),
        total,
        kernel_set.quantized.linear_quantized_add_rms_norm(added, residual.clone(), norm, 1e-5),
        kernel_set.fuse_embedding(tokens, embedding, x, weights[4], None),
    )


def main() -> int:
    end = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else 90)
    device = torch.device("cuda")
    kernels = TritonKernels(facts_of(torch.cuda.get_device_properties(device)), device=device)
    cases, failed, late = [], 0, False
    for work in (layers, products):
        found = work(kernels, device)
        while not late:
            try:
                name, off, own = next(found)
            except StopIteration:
                break
            except Exception as error:  # the next case may say more
                name, off, own = f"{work.__name__}: {type(error).__name__}: {str(error)[:400]}", float("inf"), 0.0
                found = iter(())
            bad = off > max(ERROR, 2 * own)
            failed += bad
            cases.append([name, off, own])
            print(f"{'WRONG ' if bad else ''}{name}: {off:.2e} (the reference in bfloat16: {own:.2e})", flush=True)
            late = time.monotonic() > end
    print(json.dumps({"device": torch.cuda.get_device_name(device), "cases": len(cases), "wrong": failed, "late": late}))
    return 1 if failed or late else 0


if __name__ == "__main__":
    sys.exit(main())
