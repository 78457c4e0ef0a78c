"""Layers with quantised weights on a real device: ``python tests/kernels/quantized_layers_on_device.py [SECONDS]``.

First attention and what follows it, in a graph, against the reference in float64. Then microseconds of a layer in a chain of
layers of the shape of Llama-3.1-8B, as its products are cut up by themselves, and with each of them cut in other ways while
the others stay: what is fastest alone needn't be so there, since a ring fills while small kernels ahead of it run. A line of
JSON last; exits 1 where something is wrong. In 60 seconds or fewer nothing else is tried.
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
from outrider.model.config.shapes import decoder_shape, shape_config
from outrider_triton.kernelset import TritonKernels
from outrider_triton.launch import compile_only
from outrider_triton.products.operands import QuantizedProduct
from outrider_triton.tiles import selection
from outrider_triton.tiles.derive.products import rank_configs
from outrider_triton.tiles.facts import facts_of
from outrider_triton.tiles.measure.chain import microseconds
from outrider_triton.tiles.store.table import load

HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 4096, 14336, 32, 8, 128
CONTEXT, CAPACITY, PAGE, LAYERS = 640, 1024, 16, 6
ERROR = 8e-3
"""Relative to the largest number of a row; the reference rounds nothing."""
BF16 = torch.bfloat16
FORMATS = ("int4", "fp8", "int8", "fp8-block")


class Layers:
    """Layers with random weights; ``kernels`` compute them."""

    def __init__(self, kernels, format, device, *, layers=LAYERS):
        self.kernels, self.device = kernels, device
        dice = torch.Generator(device).manual_seed(0)
        shapes = ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN), (HIDDEN, HEADS * SIZE), (2 * INNER, HIDDEN), (HIDDEN, INNER)
        way = WEIGHT_FORMATS[format]
        self.weights = [
            [way.random_weight(*shape, device=device, generator=dice, scales_dtype=BF16) for shape in shapes]
            for _ in range(layers)
        ]
        self.norm = torch.ones(HIDDEN, dtype=BF16, device=device)

    def prepare(self, batch, width):
        device, rows, pages = self.device, batch * width, CONTEXT // PAGE
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
        self.caches = [[torch.randn(size, dtype=BF16, device=device) for _ in range(2)] for _ in self.weights]
        self.residual = torch.randn(rows, HIDDEN, dtype=BF16, device=device)
        self.both = torch.randn(rows, 2 * INNER, dtype=BF16, device=device) * 0.1
        angle = torch.rand(rows, SIZE, device=device)
        self.angles = angle.cos().to(BF16), angle.sin().to(BF16)

    def run(self, _=0, *, joined=True):
        """``joined``: attention and what follows it in the one method; else one after the other."""
        kernels, residual = self.kernels, self.residual.clone()
        added = QuantizedProduct(self.both, self.weights[-1][3], None, gated=True)
        behind = partial(attended_mlp if joined else unfused_mlp, kernels)
        for (qkv, output, gates, down), cache in zip(self.weights, self.caches, strict=True):
            rotary = RotaryArgs(*self.angles, *cache, self.slots)
            q = kernels.quantized.norm_linear_quantized_rope_write_cache(added, residual, self.norm, 1e-5, qkv, None, rotary)
            operands = q, *cache, self.metadata, output, None, residual, self.norm, 1e-5, gates, None, down, None
            added = behind(*operands, scale=SIZE**-0.5)
        return added.x

    def layer_us(self, *, joined=True):
        return microseconds(torch.cuda, partial(self.run, joined=joined), calls=1, replays=7) / len(self.weights)


def right(facts, device):
    found = []
    for format, (batch, width) in itertools.product(FORMATS, ((1, 1), (1, 4), (13, 1), (64, 1), (17, 4), (32, 4))):
        layers = Layers(TritonKernels(facts, table=load(facts.name)), format, device, layers=1)
        layers.prepare(batch, width)
        qkv, output, gates, down = layers.weights[0]
        q = torch.randn(batch * width, HEADS, SIZE, device=device).to(BF16)

        def layer(kernel_set, dtype, q=q, layers=layers, weights=(output, None), others=(gates, None, down, None), qkv=qkv):
            wide = [each.to(dtype, copy=True) for each in (q, *layers.caches[0])]
            residual, norm = layers.residual.to(dtype, copy=True), layers.norm.to(dtype)
            own = layers.metadata, *weights, residual, norm, 1e-5, *others
            mlp = attended_mlp if isinstance(kernel_set, TritonKernels) else unfused_mlp
            made = mlp(kernel_set, *wide, *own, scale=SIZE**-0.5)
            rotary = RotaryArgs(*(each.to(dtype) for each in layers.angles), *wide[1:], layers.slots)
            turned = kernel_set.quantized.norm_linear_quantized_rope_write_cache(
                made, residual, norm, 1e-5, qkv, None, rotary
            )
            written = (each.flatten(0, 1)[layers.slots] for each in wide[1:])
            return torch.cat([each.flatten(1) for each in (turned, *written)], dim=1)

        wanted = layer(UnfusedProducts(), torch.float64)
        off, own = (
            wrong(in_a_graph(partial(layer, layers.kernels, BF16)), wanted),
            wrong(layer(UnfusedProducts(), BF16), wanted),
        )
        bad = off > max(ERROR, 1.5 * own)
        found.append(bad)
        print(
            f"{format} {batch}x{width}: off {off:.1e}, the reference in bfloat16 {own:.1e}{' WRONG' if bad else ''}",
            flush=True,
        )
    return sum(found)


def candidates(kernels, key, *, most=12):
    """The likeliest, no more than two of which differ in how much is on its way alone."""
    operator, stored, n, k, m, half = key
    found, alike = [], {}
    for config in rank_configs(kernels.facts, operator, m=m, n=n, k=k, half=half, stored=stored):
        cut = (
            config.split,
            config.warps,
            config.descriptor,
            config.rows_per_program,
            config.prefetch_columns or config.block_n,
        )
        alike[cut] = alike.get(cut, 0) + 1
        if alike[cut] <= 2 and (config.descriptor or not half):
            found.append(config)
    return found[:most]


def search(layers, chosen):
    """Each product's cuts, the largest product first; ``chosen`` keeps the fastest."""
    ways = {key: candidates(layers.kernels, key) for key in chosen}
    with selection._compiling():
        for key, config in ((key, config) for key, found in ways.items() for config in found):
            old, chosen[key] = chosen[key], config
            with compile_only():
                layers.run()
            chosen[key] = old
    measured = {}
    for key in sorted(ways, key=lambda key: -key[2] * key[3]):
        old, times = chosen[key], []
        for config in ways[key]:
            chosen[key] = config
            times.append((layers.layer_us(), config))
        times.sort(key=lambda pair: pair[0])
        chosen[key] = times[0][1]
        name = f"{key[0]} {key[2]}x{key[3]}"
        measured[name] = [[*config.as_list(), round(us, 2)] for us, config in times]
        print(f"  {name} was {old.as_list()}: {measured[name][:3]}", flush=True)
    return measured


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 120
    deadline, searching = time.monotonic() + seconds, seconds > 60
    device = torch.device("cuda", 0)
    facts = facts_of(torch.cuda.get_device_properties(device))
    print(facts.name, flush=True)
    bad, found = right(facts, device), {}
    for format in FORMATS:
        kernels = TritonKernels(facts, table=load(facts.name)).for_shape(decoder_shape(shape_config("llama-3.1-8b"), BF16))
        layers = Layers(kernels, format, device)
        for batch, width in ((1, 1), (1, 4), (4, 4), (16, 4), (20, 4), (32, 4)):
            if time.monotonic() > deadline:
                break
            layers.prepare(batch, width)
            kernels.tiles._derived.clear()
            derived, apart = layers.layer_us(), layers.layer_us(joined=False)
            print(f"{format} {batch}x{width}: {derived:.1f} as derived, {apart:.1f} with attention by itself", flush=True)
            if not searching:
                continue
            measured = search(layers, kernels.tiles._derived)
            best = layers.layer_us()
            print(f"{format} {batch}x{width}: {derived:.1f} as derived, {best:.1f} with the fastest of each", flush=True)
            found[f"{format} {batch}x{width}"] = {"derived": derived, "fastest": best, "measured": measured}
        del layers, kernels
        torch.cuda.empty_cache()
    print(json.dumps({"device": facts.name, "wrong": bad, "layers": found}))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
