"""Kernels over a cache in e4m3 on a real device, beside those over a plain cache: ``python
tests/kernels/narrow_caches_on_device.py``. Prints a line for each case and a JSON object; exits 1 where one is wrong.

What a kernel writes must be what it writes to a plain cache, rounded; what attention reads must give what a plain cache
with the same numbers gives. So each kernel is judged by itself, as it is compiled: cut up for the device, with early
starts, in a graph. Small shapes, by the interpreter too, are in ``test_narrow_caches.py``.
"""

from __future__ import annotations

import json
import sys

import torch
from on_device import in_a_graph
from unfused import UnfusedProducts

from outrider.device import AttentionMetadata, RotaryArgs
from outrider.device.kernels.weight_formats import WEIGHT_FORMATS
from outrider_triton.kernelset import TritonKernels
from outrider_triton.products.operands import Product, QuantizedProduct
from outrider_triton.tiles.facts import facts_of

E4M3 = torch.float8_e4m3fn
PAGE = 16
HEADS, KV_HEADS, SIZE, HIDDEN = 32, 8, 128, 4096
ROWS = (HEADS + 2 * KV_HEADS) * SIZE
TOKENS = (1, 4, 13, 64, 200)
REFERENCE = UnfusedProducts()


class Cases:
    """The operands of all cases on one device."""

    def __init__(self, device, dtype, kernels):
        self.device, self.dtype, self.kernels = device, dtype, kernels
        self.dice = torch.Generator().manual_seed(0)
        self.found = []

    def normal(self, *shape, scale=1.0):
        return (torch.randn(*shape, generator=self.dice) * scale).to(self.dtype).to(self.device)

    def told(self, name, off, allowed):
        right = bool(off <= allowed)
        self.found.append({"case": name, "off": off, "right": right})
        print(f"{'right' if right else 'WRONG'}  {off:.2e}  {name}", flush=True)

    # -- writes ----------------------------------------------------------------------------------------------------

    def rotary(self, tokens, dtype):
        dice = torch.Generator().manual_seed(tokens)
        angle = (torch.rand(tokens, SIZE // 2, generator=dice) * 6).repeat(1, 2)
        slots = (torch.randperm(4 * tokens, generator=dice)[:tokens] + PAGE).to(self.device)
        shape = 4 * tokens // PAGE + 3, PAGE, KV_HEADS, SIZE
        caches = (torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2))
        turn = (each.to(self.dtype).to(self.device) for each in (angle.cos(), angle.sin()))
        return RotaryArgs(*turn, *caches, slots)

    def writes(self, name, tokens, call):
        """``call(rotary)`` writes; with numbers beyond the range of e4m3 among them."""
        plain, narrow = self.rotary(tokens, self.dtype), self.rotary(tokens, E4M3)
        in_a_graph(lambda: call(plain))
        in_a_graph(lambda: call(narrow))
        off = 0
        for wide, kept in ((plain.k_cache, narrow.k_cache), (plain.v_cache, narrow.v_cache)):
            wanted = wide.float().clamp(-448, 448).to(E4M3)
            if not (wanted.float().abs().max() > 1 and kept.float().isfinite().all()):
                off = float("inf")
            off = max(off, float((kept.float() - wanted.float()).abs().max()))
        self.told(f"{name} of {tokens} tokens", off, 0.0)

    def all_writes(self):
        kernels, hidden = self.kernels, HIDDEN
        weight, bias = self.normal(ROWS, hidden, scale=0.5), self.normal(ROWS)
        first, norm = self.normal(hidden, hidden, scale=hidden**-0.5), self.normal(hidden)
        dice = torch.Generator(self.device).manual_seed(1)
        quantized = {
            name: [
                WEIGHT_FORMATS[name].random_weight(rows, hidden, device=self.device, generator=dice)
                for rows in (hidden, ROWS)
            ]
            for name in ("int4", "fp8")
        }
        for tokens in TOKENS:
            x, residual = self.normal(tokens, hidden, scale=3), self.normal(tokens, hidden)
            qkv = self.normal(tokens, HEADS + 2 * KV_HEADS, SIZE, scale=200)

            def apart(rotary, qkv=qkv):
                made = qkv.clone().split((HEADS, KV_HEADS, KV_HEADS), 1)
                kernels.rope_write_cache(*made, *rotary)
                return made[0]

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
        shape = batch * width + 1, PAGE, KV_HEADS, SIZE
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
        q = self.normal(sum(new), HEADS, SIZE)
        given = {"scale": SIZE**-0.5}
        made, same = (
            in_a_graph(lambda caches=caches: self.kernels.paged_attention(q, *caches, metadata, **given))
            for caches in (narrow, plain)
        )
        right = REFERENCE.paged_attention(q.double(), *(each.double() for each in plain), metadata, **given)
        largest = float(right.abs().max())
        off = float((made.double() - right).abs().max().nan_to_num(float("inf"))) / largest
        own = float((same.double() - right).abs().max()) / largest
        kind = "a tree" if tree else "new tokens"
        self.told(f"attention of {kind} {new} behind {context} (plain cache: {own:.2e})", off, 1.5 * own + 2e-3)

    def all_reads(self):
        self.reads((1,), (4000,))
        self.reads((1, 1, 1), (4000, 7, 0))
        self.reads((4, 4), (4000, 19))
        self.reads((5, 5), (4000, 3), tree=True)
        self.reads((1,) * 64, (500,) * 64)
        self.reads((300,), (0,))
        self.reads((2048,), (1000,))
        self.reads((700, 1, 90), (0, 1500, 33))


def main():
    device, dtype = torch.device("cuda"), torch.bfloat16
    facts = facts_of(torch.cuda.get_device_properties(device))
    kernels = TritonKernels(facts, device=device)
    if "fp8" not in kernels.cache_formats:
        print(f"{facts.architecture} has no numbers of e4m3: nothing to check")
        return 1
    cases = Cases(device, dtype, kernels)
    cases.all_writes()
    cases.all_reads()
    wrong = [each["case"] for each in cases.found if not each["right"]]
    print(json.dumps({"cases": len(cases.found), "wrong": wrong, "architecture": facts.architecture}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
