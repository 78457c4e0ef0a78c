"""Kernels over a cache in e4m3 on a real device, beside those over a plain cache: ``python
tests/kernels/narrow_caches_on_device.py``. Prints a line for each case and a JSON object; exits 1 where one is wrong.

What a kernel writes must be what it writes to a plain cache, rounded; what attention reads must give what a plain cache
with the same numbers gives. So each kernel is judged by itself, as it is compiled: cut up for the device, with early
starts, in a graph.
With ``cpu`` it runs small shapes by Triton's interpreter, to try the script itself.
"""

from __future__ import annotations

import json
import os
import sys

if sys.argv[1:] == ["cpu"]:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from unfused import UnfusedProducts

from outrider.device import AttentionMetadata, RotaryArgs
from outrider.device.kernels.weight_formats import WEIGHT_FORMATS
from outrider_triton.kernelset import TritonKernels
from outrider_triton.products.operands import Product, QuantizedProduct
from outrider_triton.tiles.facts import DeviceFacts, facts_of

E4M3 = torch.float8_e4m3fn
PAGE = 16
REFERENCE = UnfusedProducts()


def sizes(small):
    """Query heads, key heads, size of a head, hidden size; numbers of tokens."""
    return ((4, 2, 16, 64), (1, 5)) if small else ((32, 8, 128, 4096), (1, 4, 13, 64, 200))


class Cases:
    """The operands of all cases on one device."""

    def __init__(self, device, dtype, kernels, small):
        self.device, self.dtype, self.kernels, self.small = device, dtype, kernels, small
        (self.heads, self.kv_heads, self.size, self.hidden), self.tokens = sizes(small)
        self.rows = (self.heads + 2 * self.kv_heads) * self.size
        self.dice = torch.Generator().manual_seed(0)
        self.found = []

    def normal(self, *shape, scale=1.0):
        return (torch.randn(*shape, generator=self.dice) * scale).to(self.dtype).to(self.device)

    def told(self, name, off, allowed):
        right = bool(off <= allowed)
        self.found.append({"case": name, "off": off, "right": right})
        print(f"{'right' if right else 'WRONG'}  {off:.2e}  {name}", flush=True)

    def graphed(self, call):
        """``call`` in a graph that is replayed, where there are graphs."""
        if self.device.type != "cuda":
            return call()
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = call()
        graph.replay()
        torch.cuda.synchronize()
        return made

    # -- writes ----------------------------------------------------------------------------------------------------

    def rotary(self, tokens, dtype):
        dice = torch.Generator().manual_seed(tokens)
        angle = (torch.rand(tokens, self.size // 2, generator=dice) * 6).repeat(1, 2)
        slots = (torch.randperm(4 * tokens, generator=dice)[:tokens] + PAGE).to(self.device)
        shape = 4 * tokens // PAGE + 3, PAGE, self.kv_heads, self.size
        caches = (torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2))
        turn = (each.to(self.dtype).to(self.device) for each in (angle.cos(), angle.sin()))
        return RotaryArgs(*turn, *caches, slots)

    def writes(self, name, tokens, call):
        """``call(rotary)`` writes; with numbers beyond the range of e4m3 among them."""
        plain, narrow = self.rotary(tokens, self.dtype), self.rotary(tokens, E4M3)
        self.graphed(lambda: call(plain))
        self.graphed(lambda: call(narrow))
        off = 0
        for wide, kept in ((plain.k_cache, narrow.k_cache), (plain.v_cache, narrow.v_cache)):
            wanted = wide.float().clamp(-448, 448).to(E4M3)
            if not (wanted.float().abs().max() > 1 and kept.float().isfinite().all()):
                off = float("inf")
            off = max(off, float((kept.float() - wanted.float()).abs().max()))
        self.told(f"{name} of {tokens} tokens", off, 0.0)

    def all_writes(self):
        kernels, hidden = self.kernels, self.hidden
        weight, bias = self.normal(self.rows, hidden, scale=0.5), self.normal(self.rows)
        first, norm = self.normal(hidden, hidden, scale=hidden**-0.5), self.normal(hidden)
        dice = torch.Generator(self.device).manual_seed(1)
        quantized = {
            name: [
                WEIGHT_FORMATS[name].random_weight(rows, hidden, device=self.device, generator=dice)
                for rows in (hidden, self.rows)
            ]
            for name in (() if self.small else ("int4", "fp8"))
        }
        for tokens in self.tokens:
            x, residual = self.normal(tokens, hidden, scale=3), self.normal(tokens, hidden)
            qkv = self.normal(tokens, self.heads + 2 * self.kv_heads, self.size, scale=200)

            def apart(rotary, qkv=qkv):
                made = qkv.clone().split((self.heads, self.kv_heads, self.kv_heads), 1)
                kernels.rope_write_cache(*made, *rotary)

            self.writes("rope_write_cache", tokens, apart)
            self.writes(
                "linear_rope_write_cache",
                tokens,
                lambda rotary, x=x: kernels.dense.linear_rope_write_cache(Product(x, weight, bias), rotary),
            )
            self.writes(
                "norm_linear_rope_write_cache",
                tokens,
                lambda rotary, x=x, residual=residual: kernels.dense.norm_linear_rope_write_cache(
                    Product(x, first, None), residual.clone(), norm, 1e-5, weight, bias, rotary
                ),
            )
            for name, (one, two) in quantized.items():
                self.writes(
                    f"norm_linear_quantized_rope_write_cache, {name},",
                    tokens,
                    lambda rotary, x=x, residual=residual, one=one, two=two: (
                        kernels.quantized.norm_linear_quantized_rope_write_cache(
                            QuantizedProduct(x, one, None), residual.clone(), norm, 1e-5, two, bias * 50, rotary
                        )
                    ),
                )
                self.writes(
                    f"linear_quantized_rope_write_cache, {name},",
                    tokens,
                    lambda rotary, x=x, two=two: kernels.quantized.linear_quantized_rope_write_cache(
                        x, two, bias * 50, rotary
                    ),
                )

    # -- reads -----------------------------------------------------------------------------------------------------

    def reads(self, new, context, *, tree=False):
        batch, lens = len(new), [n + c for n, c in zip(new, context, strict=True)]
        width = -(-max(lens) // PAGE)
        table = (torch.randperm(batch * width, generator=self.dice) + 1).view(batch, width).to(torch.int32)
        shape = batch * width + 1, PAGE, self.kv_heads, self.size
        narrow = [torch.randn(shape, generator=self.dice).to(E4M3).to(self.device) for _ in range(2)]
        plain = [each.to(self.dtype) for each in narrow]
        starts = [0, *torch.tensor(new).cumsum(0).tolist()]
        mask = None
        if tree:
            mask = torch.ones(sum(new), max(new), dtype=torch.bool).tril()
            mask = (mask | torch.eye(sum(new), max(new), dtype=torch.bool)).to(self.device)
            mask[:, 0] = True
        metadata = AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32, device=self.device),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=self.device),
            block_table=table.to(self.device),
            max_query=max(new),
            max_kv=max(lens),
            tree_mask=mask,
            host_query_start=tuple(starts),
        )
        q = self.normal(sum(new), self.heads, self.size)
        given = {"scale": self.size**-0.5}
        made, same = (
            self.graphed(lambda caches=caches: self.kernels.paged_attention(q, *caches, metadata, **given))
            for caches in (narrow, plain)
        )
        right = REFERENCE.paged_attention(q.double(), *(each.double() for each in plain), metadata, **given)
        largest = float(right.abs().max())
        off = float((made.double() - right).abs().max().nan_to_num(float("inf"))) / largest
        own = float((same.double() - right).abs().max()) / largest
        kind = "a tree" if tree else "new tokens"
        self.told(f"attention of {kind} {new} behind {context} (plain cache: {own:.2e})", off, 1.5 * own + 2e-3)

    def all_reads(self):
        longest = 40 if self.small else 4000
        self.reads((1,), (longest,))
        self.reads((1, 1, 1), (longest, 7, 0))
        self.reads((4, 4), (longest, 19))
        self.reads((5, 5), (longest, 3), tree=True)
        if not self.small:
            self.reads((1,) * 64, (500,) * 64)
            self.reads((300,), (0,))
            self.reads((2048,), (1000,))
            self.reads((700, 1, 90), (0, 1500, 33))

    def moves(self):
        cache = torch.randn(6, PAGE, self.kv_heads, self.size, generator=self.dice).to(E4M3).to(self.device)
        keys, values = cache.clone(), cache.clone()
        sources = torch.tensor([21, 22, 23, 40], device=self.device)
        self.kernels.move_cache(keys, values, sources, sources + 1)
        wanted = cache.flatten(0, 1).float()
        wanted[sources + 1] = wanted[sources]
        self.told("move_cache", float((keys.flatten(0, 1).float() - wanted).abs().max()), 0.0)


def main():
    small = sys.argv[1:] == ["cpu"]
    if small:
        device, dtype = torch.device("cpu"), torch.float16
        sizes_of = {"processors": 4, "shared_bytes": 99 << 10, "processor_shared": 100 << 10, "l2_bytes": 1 << 20}
        facts = DeviceFacts(architecture="sm_89", early_starts=False, **sizes_of)
    else:
        device, dtype = torch.device("cuda"), torch.bfloat16
        facts = facts_of(torch.cuda.get_device_properties(device))
    kernels = TritonKernels(facts, device=device)
    if "fp8" not in kernels.cache_formats:
        print(f"{facts.architecture} has no numbers of e4m3: nothing to check")
        return 1
    cases = Cases(device, dtype, kernels, small)
    cases.all_writes()
    cases.all_reads()
    cases.moves()
    wrong = [each["case"] for each in cases.found if not each["right"]]
    print(json.dumps({"cases": len(cases.found), "wrong": wrong, "architecture": facts.architecture}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
