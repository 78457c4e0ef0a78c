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
from unfused import UnfusedProducts, attended_mlp, unfused_mlp

from outrider.device import AttentionMetadata, RotaryArgs
from outrider.device.kernels.weight_formats import WEIGHT_FORMATS
from outrider_triton.kernelset import TritonKernels
from outrider_triton.products.operands import QuantizedProduct
from outrider_triton.tiles.facts import facts_of
from outrider_triton.tiles.store.table import load

HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 4096, 14336, 32, 8, 128
CONTEXT, CAPACITY, PAGE = 640, 1024, 16
TOKENS = (1, 4, 13, 64, 100, 300)
SHAPES = ((4096, 4096), (6144, 4096), (1000, 1056), (1000, 1024), (2048, 14336))
LAYERS = ("fp8", "int4", "int8", "fp8-block")
ERROR, LAYER_ERROR = 6e-3, 8e-3
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
                yield f"{name} {n}x{k}, {m} tokens", wrong(made, right), max(ERROR, 2 * own)


def layers(kernels, device):
    """A product, the norm of its sum with the residual, and the product behind; the second time one that turns its rows."""
    generator = torch.Generator(device).manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, device=device, generator=generator).to(torch.bfloat16)

    shapes = (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER), ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN)
    shapes += ((HIDDEN, 2 * HIDDEN),)
    for name, m in itertools.product(LAYERS, (1, 13, 32, 65, 128)):
        weights = [WEIGHT_FORMATS[name].random_weight(n, k, device=device, generator=generator) for n, k in shapes]
        given = normal(m, HIDDEN), normal(HIDDEN), normal(m, HIDDEN), normal(m, 2 * INNER), normal(m, SIZE)
        work = partial(layer, weights, given)
        right, own = work(REFERENCE, torch.float64), work(REFERENCE, torch.bfloat16)
        made = in_a_graph(partial(work, kernels, torch.bfloat16))
        parts = "gates", "queries", "keys", "values", "first queries", "sum", "final norm", "fused"
        for what, wanted, mine, its in zip(parts, right, made, own, strict=True):
            allowed = max(ERROR, 2 * wrong(its, wanted.double()))
            yield f"{name} {what}, {m} tokens", wrong(mine, wanted.double()), allowed


def layer(weights, given, kernel_set, dtype):
    """What both ends of a layer make: gate and up [T, 2 I], queries, and keys and values from where they were written. Then
    what both ends of a stack do: queries behind no norm, the last sum, the norm of it, and a draft's fusion.
    """
    residual, norm, x, gate_up, angles = (each.to(dtype) for each in given)
    tokens, embedding = torch.arange(x.shape[0], device=x.device).flip(0), x * 0.5
    slots = torch.arange(x.shape[0], device=x.device) + 5
    caches = [torch.zeros(16, 16, KV_HEADS, angles.shape[1], device=x.device, dtype=dtype) for _ in range(2)]
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


class AttendedLayer:
    """An attention block and an MLP with random weights, and ``batch`` sequences of ``width`` new tokens."""

    def __init__(self, name, batch, width, device):
        dice = torch.Generator(device).manual_seed(0)
        shapes = ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN), (HIDDEN, HEADS * SIZE), (2 * INNER, HIDDEN), (HIDDEN, INNER)
        way = WEIGHT_FORMATS[name]
        self.weights = [
            way.random_weight(*shape, device=device, generator=dice, scales_dtype=torch.bfloat16) for shape in shapes
        ]
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
        rows, pages = batch * width, CONTEXT // PAGE
        table = (torch.randperm(batch * pages, device=device) + 1).view(batch, pages).int()
        lane = torch.arange(CONTEXT - width, CONTEXT, device=device)
        self.slots = (table[:, lane // PAGE].long() * PAGE + lane % PAGE).flatten()
        self.metadata = AttentionMetadata(
            query_start=torch.arange(0, rows + 1, width, dtype=torch.int32, device=device),
            seq_lens=torch.full((batch,), CONTEXT, dtype=torch.int32, device=device),
            block_table=table,
            max_query=width,
            max_kv=CAPACITY,
            settled=True,
        )
        size = 1 + batch * pages, PAGE, KV_HEADS, SIZE
        self.cache = [torch.randn(size, dtype=torch.bfloat16, device=device) for _ in range(2)]
        self.residual = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        angle = torch.rand(rows, SIZE, device=device)
        self.angles = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)


def attended(kernels, device):
    """Attention and the blocks after it, with the stored choices of tiles."""
    kernels = TritonKernels(kernels.facts, table=load(kernels.facts.name))
    for name, (batch, width) in itertools.product(LAYERS, ((1, 1), (1, 4), (13, 1), (64, 1), (17, 4), (32, 4))):
        drawn = AttendedLayer(name, batch, width, device)
        qkv, output, gates, down = drawn.weights
        q = torch.randn(batch * width, HEADS, SIZE, device=device).to(torch.bfloat16)

        def layer(kernel_set, dtype, q=q, drawn=drawn, weights=(output, None), others=(gates, None, down, None), qkv=qkv):
            wide = [each.to(dtype, copy=True) for each in (q, *drawn.cache)]
            residual, norm = drawn.residual.to(dtype, copy=True), drawn.norm.to(dtype)
            own = drawn.metadata, *weights, residual, norm, 1e-5, *others
            mlp = attended_mlp if isinstance(kernel_set, TritonKernels) else unfused_mlp
            made = mlp(kernel_set, *wide, *own, scale=SIZE**-0.5)
            rotary = RotaryArgs(*(each.to(dtype) for each in drawn.angles), *wide[1:], drawn.slots)
            turned = kernel_set.quantized.norm_linear_quantized_rope_write_cache(
                made, residual, norm, 1e-5, qkv, None, rotary
            )
            written = (each.flatten(0, 1)[drawn.slots] for each in wide[1:])
            return torch.cat([each.flatten(1) for each in (turned, *written)], dim=1)

        wanted = layer(REFERENCE, torch.float64)
        off, own = (
            wrong(in_a_graph(partial(layer, kernels, torch.bfloat16)), wanted),
            wrong(layer(REFERENCE, torch.bfloat16), wanted),
        )
        yield f"{name} attended {batch}x{width}", off, max(LAYER_ERROR, 1.5 * own)


def main() -> int:
    end = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else 90)
    device = torch.device("cuda")
    kernels = TritonKernels(facts_of(torch.cuda.get_device_properties(device)), device=device)
    cases, failed, late = [], 0, False
    for work in (attended, layers, products):
        found = work(kernels, device)
        while not late:
            try:
                name, off, allowed = next(found)
            except StopIteration:
                break
            except Exception as error:  # the next case may say more
                name, off, allowed = f"{work.__name__}: {type(error).__name__}: {str(error)[:400]}", float("inf"), 0.0
                found = iter(())
            bad = off > allowed
            failed += bad
            cases.append(name)
            print(f"{'WRONG ' if bad else ''}{name}: {off:.2e} (allowed: {allowed:.2e})", flush=True)
            late = time.monotonic() > end
    print(json.dumps({"device": torch.cuda.get_device_name(device), "cases": len(cases), "wrong": failed, "late": late}))
    return 1 if failed or late else 0


if __name__ == "__main__":
    sys.exit(main())
