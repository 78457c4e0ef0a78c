"""Layers with quantised weights on a real device: ``python tests/kernels/quantized_layers_on_device.py``.

Attention and the blocks after it, in a graph, are compared with the reference in float64. Exits 1 where something is wrong.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial

import torch
from on_device import in_a_graph, wrong
from unfused import UnfusedProducts, attended_mlp, unfused_mlp

from outrider.device import AttentionMetadata, RotaryArgs
from outrider.device.kernels.weight_formats import WEIGHT_FORMATS
from outrider_triton.kernelset import TritonKernels
from outrider_triton.tiles.facts import facts_of
from outrider_triton.tiles.store.table import load

HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 4096, 14336, 32, 8, 128
CONTEXT, CAPACITY, PAGE = 640, 1024, 16
ERROR = 8e-3
"""Relative to the largest number of a row; the reference rounds nothing."""
BF16 = torch.bfloat16
FORMATS = ("int4", "fp8", "int8", "fp8-block")


class Layer:
    """A layer with random weights, and ``batch`` sequences of ``width`` new tokens."""

    def __init__(self, format, batch, width, device):
        dice = torch.Generator(device).manual_seed(0)
        shapes = ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN), (HIDDEN, HEADS * SIZE), (2 * INNER, HIDDEN), (HIDDEN, INNER)
        way = WEIGHT_FORMATS[format]
        self.weights = [way.random_weight(*shape, device=device, generator=dice, scales_dtype=BF16) for shape in shapes]
        self.norm = torch.ones(HIDDEN, dtype=BF16, device=device)
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
        self.cache = [torch.randn(size, dtype=BF16, device=device) for _ in range(2)]
        self.residual = torch.randn(rows, HIDDEN, dtype=BF16, device=device)
        angle = torch.rand(rows, SIZE, device=device)
        self.angles = angle.cos().to(BF16), angle.sin().to(BF16)


def right(facts, device):
    found = []
    for format, (batch, width) in itertools.product(FORMATS, ((1, 1), (1, 4), (13, 1), (64, 1), (17, 4), (32, 4))):
        kernels, drawn = TritonKernels(facts, table=load(facts.name)), Layer(format, batch, width, device)
        qkv, output, gates, down = drawn.weights
        q = torch.randn(batch * width, HEADS, SIZE, device=device).to(BF16)

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

        wanted = layer(UnfusedProducts(), torch.float64)
        off, own = (
            wrong(in_a_graph(partial(layer, kernels, BF16)), wanted),
            wrong(layer(UnfusedProducts(), BF16), wanted),
        )
        bad = off > max(ERROR, 1.5 * own)
        found.append(bad)
        print(
            f"{format} {batch}x{width}: off {off:.1e}, the reference in bfloat16 {own:.1e}{' WRONG' if bad else ''}",
            flush=True,
        )
    return sum(found)


def main():
    device = torch.device("cuda", 0)
    facts = facts_of(torch.cuda.get_device_properties(device))
    print(facts.name, flush=True)
    return int(bool(right(facts, device)))


if __name__ == "__main__":
    sys.exit(main())
