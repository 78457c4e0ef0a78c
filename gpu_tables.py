# ruff: noqa
"""Derived configurations on a device: right against float64, and their times beside the table's and torch's own.

A program for a device, run by hand: ``python tests/kernels/derived_on_device.py [--out FILE] [--seconds S]``; prints JSON. Each product is
timed in a graph over weights that rotate, then whole layers with derived configurations, with the table's, and with torch's
products.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from outrider.device import AttentionMetadata, KernelSet, Product, RotaryArgs
from outrider.model.shapes import decoder_shape, shape_config
from outrider_triton.chain import Chain
from outrider_triton.facts import facts_of
from outrider_triton.kernelset import TritonKernels
from outrider_triton.table import load
from outrider.device import DecoderShape as KernelShape
from outrider_tune.timing import microseconds

CHECKED = ("qwen2.5-0.5b", "phi-3-mini", "qwen2.5-7b", "llama-3.1-70b/4")
TIMED = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-8b")
SIZES = (4, 32, 128)
_ROTATE = 192 << 20


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator("cuda").manual_seed(seed + sum(size))
    return torch.randn(size, generator=made, device="cuda", dtype=torch.bfloat16) * size[-1] ** -0.5


def off(made: torch.Tensor, right: torch.Tensor) -> float:
    return float((made.double() - right).norm() / right.norm())


def errors(kernels: TritonKernels, shape: KernelShape, m: int) -> dict[str, float]:
    """Relative errors of every operation that takes a derived configuration."""
    reference, found = KernelSet(), {}
    attention, size = shape.heads * shape.head_size, shape.head_size
    rows = attention + 2 * shape.kv_heads * size
    hidden, inner = shape.hidden, shape.inner
    x, residual, norm = normal(m, hidden), normal(m, hidden, seed=1), normal(1, hidden)[0] + 1
    qkv, bias, gates = normal(rows, hidden), normal(rows), normal(2 * inner, hidden)
    output, down = normal(hidden, attention), normal(hidden, inner)
    found["linear"] = off(kernels.linear(x, qkv, bias), reference.linear(x.double(), qkv.double(), bias.double()))
    found["gated"] = off(kernels.linear_silu_mul(x, gates), reference.linear_silu_mul(x.double(), gates.double()))
    angle = torch.rand(m, size // 2, device="cuda").repeat(1, 2) * 6

    def rotary(dtype: torch.dtype) -> RotaryArgs:
        empty = [torch.zeros(m, 1, shape.kv_heads, size, dtype=dtype, device="cuda") for _ in range(2)]
        cos, sin = (angle.cos().bfloat16().to(dtype), angle.sin().bfloat16().to(dtype))
        return RotaryArgs(cos, sin, *empty, torch.arange(m, device="cuda"))

    for name, width, weight in (("output", attention, output), ("down", inner, down)):
        wide = normal(m, width, seed=2)
        for pair in ("norm", "gates", "rope", "residual"):
            kept, exact = residual.clone(), residual.double()
            one, two = Product(wide, weight, None), Product(wide.double(), weight.double(), None)
            if pair == "norm":
                made = [kernels.linear_add_rms_norm(*one, kept, norm, 1e-5)]
                right = [reference.linear_add_rms_norm(*two, exact, norm.double(), 1e-5)]
            elif pair == "gates":
                made = [kernels.norm_linear_silu_mul(one, kept, norm, 1e-5, gates, None)]
                right = [reference.norm_linear_silu_mul(two, exact, norm.double(), 1e-5, gates.double(), None)]
            elif pair == "rope":
                own, other = rotary(torch.bfloat16), rotary(torch.float64)
                q = kernels.norm_linear_rope_write_cache(one, kept, norm, 1e-5, qkv, bias, own)
                p = reference.norm_linear_rope_write_cache(
                    two, exact, norm.double(), 1e-5, qkv.double(), bias.double(), other
                )
                made, right = [q, own.k_cache, own.v_cache], [p, other.k_cache, other.v_cache]
            else:
                made, right = [kernels.linear_add(*one, kept)], [reference.linear_add(*two, exact)]
            pairs = zip((*made, kept), (*right, exact), strict=True)
            found[f"{name}, {pair}"] = max(off(a, b) for a, b in pairs)
    return found


def attention_errors(kernels: TritonKernels, shape: KernelShape) -> dict[str, float]:
    """Short and long sequences together under capacities that a capture would have."""
    found = {}
    for batch, width, longest, capacity in (
        (1, 4, 700, 640 * 32),
        (3, 4, 5000, 8192),
        (8, 1, 300, 131072),
        (32, 4, 9000, 16384),
    ):
        lens = torch.linspace(width, longest, batch, device="cuda").to(torch.int32)
        lens[-1] = longest
        pages = capacity // 16
        table = torch.zeros(batch, pages, dtype=torch.int32, device="cuda")
        used = -(-longest // 16)
        table[:, :used] = (torch.randperm(batch * used, device="cuda") + 1).view(batch, used).to(torch.int32)
        caches = [normal(1 + batch * used, 16, shape.kv_heads, shape.head_size, seed=seed) * 11 for seed in (1, 2)]
        q = normal(batch * width, shape.heads, shape.head_size) * 11
        metadata = AttentionMetadata(
            query_start=torch.arange(0, batch * width + 1, width, dtype=torch.int32, device="cuda"),
            seq_lens=lens,
            block_table=table,
            max_query=width,
            max_kv=capacity,
            settled=True,
        )
        short = AttentionMetadata(
            query_start=metadata.query_start,
            seq_lens=lens,
            block_table=table[:, :used].contiguous(),
            max_query=width,
            max_kv=longest,
        )
        scale = shape.head_size**-0.5
        made = kernels.paged_attention(q, *caches, metadata, scale=scale)
        right = KernelSet().paged_attention(q.float(), *(c.float() for c in caches), short, scale=scale)
        found[f"attention {batch}x{width} of {longest} in {capacity}"] = off(made, right.double())
    return found


def times(kernels: dict[str, KernelSet], shape: KernelShape, m: int) -> dict[str, dict[str, float]]:
    """Microseconds of each product by kernel set."""
    attention = shape.heads * shape.head_size
    rows = attention + 2 * shape.kv_heads * shape.head_size
    hidden, inner, found = shape.hidden, shape.inner, {}
    for name, n, k in (
        ("qkv", rows, hidden),
        ("output", hidden, attention),
        ("gates", 2 * inner, hidden),
        ("down", hidden, inner),
        ("head", shape.vocabulary, hidden),
    ):
        weights = [normal(n, k, seed=i) for i in range(max(2, -(-_ROTATE // (n * k * 2))))]
        x, residual, norm = normal(m, k), normal(m, n), normal(n)

        def call(
            own: KernelSet,
            number: int,
            name: str = name,
            weights: Any = weights,
            x: Any = x,
            residual: Any = residual,
            norm: Any = norm,
        ) -> object:
            weight = weights[number % len(weights)]
            if name in ("output", "down"):
                return own.linear_add_rms_norm(x, weight, None, residual, norm, 1e-5)
            return own.linear_silu_mul(x, weight) if name == "gates" else own.linear(x, weight)

        for label, own in kernels.items():
            us = microseconds(torch.cuda, lambda i, own=own: call(own, i), calls=max(8, len(weights)))
            found.setdefault(name, {})[label] = round(us, 2)
    return found


def layers(kernels: dict[str, TritonKernels], shape: KernelShape, m: int, config: Any) -> dict[str, float]:
    """Microseconds of a layer, with 640 cached tokens of each sequence, looked up by capacities of 640 and of 16,384."""
    found = {}
    chain = Chain(shape, next(iter(kernels.values())), torch.device("cuda"))
    for label, own in kernels.items():
        chain.kernels = own
        for capacity in (640, 16384):
            chain.prepare(m // 4, 4, 640, capacity=capacity)
            with suppress(TritonError):
                found[f"{label}, capacity {capacity}"] = round(chain.layer_us(), 2)
    return found


def sets(label: str = "") -> dict[str, TritonKernels]:
    properties = torch.cuda.get_device_properties(0)
    facts = facts_of(properties)
    return {"derived": TritonKernels(facts), "tuned": TritonKernels(facts, table=load(properties.name))}


def library() -> KernelSet:
    derived = sets()["derived"]

    class Library(KernelSet):
        add_rms_norm = derived.add_rms_norm
        silu_mul = derived.silu_mul

    return Library()


def warm(job: tuple[str, int]) -> str:
    """Compile what is timed."""
    name, m = job
    shape = decoder_shape(shape_config(name), torch.bfloat16)
    try:
        chain = None
        for own in sets().values():
            if chain is None:
                chain = Chain(shape, own, torch.device("cuda"))
            chain.kernels = own
            for capacity in (640, 16384):
                chain.prepare(m // 4, 4, 640, capacity=capacity)
                chain.run(0)
            hidden, head = normal(m, shape.hidden), normal(shape.vocabulary, shape.hidden)
            own.linear(hidden, head)
            own.linear(hidden, chain._weights[0][0])
            own.linear_silu_mul(hidden, chain._weights[0][2])
            for x, weight in ((normal(m, shape.heads * shape.head_size), 1), (normal(m, shape.inner), 3)):
                own.linear_add_rms_norm(x, chain._weights[0][weight], None, hidden.clone(), normal(shape.hidden), 1e-5)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job}: {type(error).__name__}: {str(error)[:500]}"
    return ""


def check(job: tuple[str, int]) -> tuple[tuple[str, int], dict[str, float], str]:
    name, m = job
    shape = decoder_shape(shape_config(name), torch.bfloat16)
    own = sets()["derived"]
    try:
        found = errors(own, shape, m) | (attention_errors(own, shape) if m == 7 else {})
    except Exception as error:
        return job, {}, f"{type(error).__name__}: {str(error)[:500]}"
    return job, found, ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=100.0)
    arguments = parser.parse_args()
    began = time.perf_counter()
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    properties = torch.cuda.get_device_properties(0)
    print(facts_of(properties), [a for a in dir(properties) if not a.startswith("_")], flush=True)
    data: dict[str, Any] = {
        "device": properties.name,
        "torch": torch.__version__,
        "errors": {},
        "failed": [],
        "layers": {},
        "products": {},
    }
    with context.Pool(15) as pool:
        warming = pool.map_async(warm, [(name, m) for name in TIMED for m in SIZES], chunksize=1)
        checking = pool.map_async(check, [(name, m) for name in CHECKED for m in (7, 32, 128)], chunksize=1)
        for said in warming.get(timeout=arguments.seconds):
            if said:
                data["failed"].append(said)
                print("FAILED", said, flush=True)
        print(f"warm after {time.perf_counter() - began:.0f} s", flush=True)
        try:
            results = checking.get(timeout=max(1.0, arguments.seconds - 30 - (time.perf_counter() - began)))
        except multiprocessing.TimeoutError:
            results = []
            print("checks took too long", flush=True)
        for job, found, said in results:
            if said:
                data["failed"].append(f"{job}: {said}")
                print("FAILED", job, said, flush=True)
                continue
            data["errors"][str(job)] = {key: float(f"{value:.2g}") for key, value in found.items()}
            worst = max(found, key=lambda each: found[each])
            print(job, "worst", worst, f"{found[worst]:.2g}", "WRONG" if not found[worst] < 2e-2 else "", flush=True)
        pool.terminate()
    print(f"checked after {time.perf_counter() - began:.0f} s", flush=True)
    for part in ("layers", "products"):
        for name in TIMED:
            shape = decoder_shape(shape_config(name), torch.bfloat16)
            for m in SIZES:
                if time.perf_counter() - began > arguments.seconds:
                    print("left out", part, name, m, flush=True)
                    continue
                key = f"{name}, {m} tokens"
                if part == "layers":
                    data[part][key] = layers(sets(), shape, m, None)
                else:
                    data[part][key] = times({**sets(), "torch": library()}, shape, m)
                print(key, data[part][key], flush=True)
                if arguments.out:
                    arguments.out.write_text(json.dumps(data, indent=1))
    print(f"{time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
