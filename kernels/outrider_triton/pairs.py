"""Tuning of products with their neighbours (:mod:`outrider_triton.jit.fused`), in a chain of layers.

Such a kernel replaces several, so it's compared with them where it will be used: by the time of a layer with it and without.
A product that ends a row and the one that takes its norm are chosen together, or neither.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.device import KernelSet, Product, RotaryArgs
from outrider_triton.chain import AHEAD, Chain, Key, as_json, chosen, with_choice
from outrider_triton.kernelset import TritonKernels
from outrider_triton.launch import power_of_two
from outrider_triton.table import STREAMED, MatmulConfig, Table, parse
from outrider_tune.chain import normal
from outrider_tune.measure import KernelShape
from outrider_tune.search import Report, Search

_SHARED_BYTES = 220 << 10
_FEW = 512  # rows of a weight that is only compiled for


def ends(m: int) -> list[MatmulConfig]:
    """For a product that is added to the residual: 4096 rows in 64 or 128 shares, whole or in part of a block."""
    block_m = _block_m(m)
    tiles = [(32, 256, 0), (32, 512, 0), (64, 256, 32), (64, 128, 0), (64, 256, 0)]
    if m > 32:
        tiles = [(64, 128, 32), (64, 64, 0), (64, 128, 0)]
    made = []
    for (block_n, block_k, each), stages, descriptor in itertools.product(tiles, (3, 4, 5), (0, 1)):
        if stages * (block_n + block_m) * block_k * 2 <= _SHARED_BYTES and not (descriptor and each):
            made.append(MatmulConfig(block_m, block_n, block_k, 1, 4 if m <= 32 else 8, stages, 256, descriptor, each))
    return made


def turns(m: int) -> list[MatmulConfig]:
    """For queries, keys and values: 3072 pairs of rows in 128 or 256 shares, both rows of a pair in a block."""
    block_m = _block_m(m)
    made = []
    for (block_n, block_k, each), stages in itertools.product([(64, 64, 24), (64, 128, 24), (64, 256, 24)], (3, 4, 5, 8)):
        if stages * (block_n + block_m) * block_k * 2 <= _SHARED_BYTES:
            made.append(MatmulConfig(block_m, block_n, block_k, 1, 4 if m <= 64 else 8, stages, 256, 0, each))
    return made


def gates(m: int) -> list[MatmulConfig]:
    """For gate and up: 14336 pairs of rows in 261 shares, almost two for each of 132 multiprocessors, or in blocks."""
    block_m = _block_m(m)
    tiles = [(64, 64, 55), (64, 128, 55)] if m <= 32 else [(64, 64, 55), (128, 64, 0)]
    return _pairs_of_rows(block_m, tiles)


def _pairs_of_rows(block_m: int, tiles: list[tuple[int, int, int]]) -> list[MatmulConfig]:
    made = []
    for (block_n, block_k, each), stages in itertools.product(tiles, (3, 5)):
        if stages * (2 * block_n + block_m) * block_k * 2 <= _SHARED_BYTES:
            warps = 8 if block_n * block_m > 4096 else 4
            made.append(MatmulConfig(block_m, block_n, block_k, 1, warps, stages, 256, 0, each))
    return made


def _block_m(m: int) -> int:
    return max(16, power_of_two(m))


@dataclass(frozen=True)
class Keys:
    """What is chosen for a shape."""

    output: Key
    gates: Key
    down: Key
    qkv: Key

    @classmethod
    def of(cls, shape: KernelShape) -> Keys:
        """Those of a decoder's layers."""
        attention = shape.heads * shape.head_size
        rows = attention + 2 * shape.kv_heads * shape.head_size
        return cls(
            output=("linear_add_scaled", "bfloat16", shape.hidden, attention),
            gates=("scaled_silu_mul", "bfloat16", 2 * shape.inner, shape.hidden),
            down=("linear_add_scaled", "bfloat16", shape.hidden, shape.inner),
            qkv=("linear_rope", "bfloat16", rows, shape.hidden),
        )


def without_pairs(table: Table, shape: KernelShape, sizes: list[int]) -> Table:
    """``table`` with each of its kernels apart."""
    keys = Keys.of(shape)
    for m, key in itertools.product(sizes, (keys.output, keys.gates, keys.down, keys.qkv)):
        table = with_choice(table, key, m, None)
    return table


class _Pairs:
    """The search for one number of tokens, for which the chain is prepared; ``table`` is without pairs. ``m``: the entries'
    number.
    """

    def __init__(self, chain: Chain, table: Table, m: int, report: Report) -> None:
        self._keys, self._m = Keys.of(chain.shape), m
        self.search = Search(chain.attempt, table, chain.attempt(table), report)

    def _best(self, start: tuple[Table, float], key: Key, configs: list[MatmulConfig]) -> tuple[Table, float]:
        """The best of ``configs`` for one choice while the others stay; first all, then the winner reading ahead or not."""
        table, us = self.search.best((with_choice(start[0], key, self._m, config) for config in configs), start)
        entry = table.entry(*key[:2], n=key[2], k=key[3], m=self._m)
        if entry is None or entry.config is None:
            return table, us
        ahead = [replace(entry.config, ahead=columns) for columns in AHEAD]
        return self.search.best((with_choice(table, key, self._m, config) for config in ahead), (table, us))

    def _keep(self, name: str, table: Table, us: float) -> None:
        without = self.search.us
        kept = "kept" if self.search.offer(table, us) else "left out"
        self.search.report(f"m {self._m}: {name}: {us:.2f} us a layer, {without:.2f} without: {kept}")

    def run(self) -> None:
        """Rope with qkv; then down with it; then output with the gates."""
        keys, m, unknown = self._keys, self._m, float("inf")
        alone = self._best((self.search.table, unknown), keys.qkv, turns(m))
        self._keep("qkv, rope and the cache's write in one", *alone)
        both = self._best((alone[0], unknown), keys.down, ends(m))
        both = self._best(both, keys.qkv, turns(m))
        self._keep("down with the residual, its norm in qkv", *both)
        start = with_choice(self.search.table, keys.gates, m, gates(m)[0])
        both = self._best((start, unknown), keys.output, ends(m))
        both = self._best(both, keys.gates, gates(m))
        self._keep("output with the residual, its norm in the gates", *both)


# -- the whole of it -----------------------------------------------------------------------------------------------

Job = tuple[Key, MatmulConfig]


def jobs(shape: KernelShape, sizes: list[int]) -> list[Job]:
    """What is to be compiled: products of the shape, and configurations."""
    keys = Keys.of(shape)
    return [
        (key, config)
        for m in sizes
        for key, configs in ((keys.output, ends(m)), (keys.qkv, turns(m)), (keys.gates, gates(m)))
        for config in configs
    ]


def compile_one(key: Key, config: MatmulConfig, shape: KernelShape, device: torch.device, pdl: bool) -> None:
    """Compile for operands that are like those of ``shape`` in all that a compiler sees."""
    ops, m, (operator, _, n, k), block = torch.ops.outrider, config.block_m, key, config.as_list()
    x, weight, two = normal(device, m, k), normal(device, _FEW, k), normal(device, 2 * _FEW, k)
    residual, norm = normal(device, m, _FEW), normal(device, _FEW)
    if operator == "linear":
        ops.linear.triton(x, weight, None, block, pdl)
    elif operator == "linear_parts":
        ops.linear_parts.triton(x, weight, block, pdl)
    elif operator == "linear_add":
        ops.linear_add.triton(x, weight, None, residual, block, pdl)
    elif operator == "linear_add_scaled":
        ops.linear_add_scaled.triton(x, weight, None, residual, norm, block, pdl)
    elif operator == "linear_silu_mul":
        ops.linear_silu_mul.triton(x, two, None, block, pdl)
    # As many shares of a row's squares as a product that adds may leave.
    for rows in (16, 32) if config.descriptor == STREAMED else (32, 64):
        squares = torch.ones((shape.hidden // rows, m), dtype=torch.float32, device=device)
        if operator == "scaled_silu_mul":
            ops.scaled_silu_mul.triton(x, squares, two, None, 1e-5, block, pdl)
        elif operator == "linear_rope":
            cache = torch.zeros(m, 16, shape.kv_heads, shape.head_size, dtype=x.dtype, device=device)
            angle = normal(device, m, shape.head_size)
            rotary = angle, angle, cache, cache, torch.arange(m, device=device)
            for each in (squares, None):
                ops.rope_write_cache.triton_linear(x, each, normal(device, n, k), None, 1e-5, *rotary, block, pdl)


def tune_pairs(
    data: dict[str, Any], shape: KernelShape, sizes: list[int], kernels: TritonKernels, device: torch.device, report: Report
) -> None:
    """Choose for each number of tokens; changes ``data``, the table's JSON."""
    table, chain, keys = without_pairs(parse(data), shape, sizes), Chain(shape, kernels, device), Keys.of(shape)
    layers: list[dict[str, Any]] = []
    for m in sizes:
        chain.prepare_for(m)
        found = _Pairs(chain, table, m, report)
        found.run()
        search = found.search
        table, us = chain.tune_attention(search.table)
        report(f"m {m}: attention once more: {us:.2f} us a layer, {search.us:.2f} before")
        report(f"m {m}: relative error {check(kernels, shape, m, device):.2g}")
        layers.append({"m": m, "width": chain.width, "context": chain.context, "before_us": search.before_us, "us": us})
    data["attention"] = as_json(table)
    kept = [layer for layer in data.get("pairs", ()) if layer["m"] not in sizes]
    data["pairs"] = [*kept, *({**layer, **{name: round(layer[name], 2) for name in ("before_us", "us")}} for layer in layers)]
    operators = {"linear_add_scaled", "scaled_silu_mul", "linear_rope"}
    rows = [row for row in data["matmul"] if row["operator"] not in operators or row["m"] not in sizes]
    for row in rows:
        row["config"] = chosen(table, (row["operator"], row["dtype"], row["n"], row["k"]), row["m"])
    for key in (keys.output, keys.gates, keys.down, keys.qkv):
        rows += [row_of(key, layer["m"], chosen(table, key, layer["m"]), layer["us"], layer["before_us"]) for layer in layers]
    data["matmul"] = rows


def check(kernels: TritonKernels, shape: KernelShape, m: int, device: torch.device) -> float:
    """The largest relative error of a pair against float64; exits where it is more than bfloat16 accounts for."""
    attention, hidden = shape.heads * shape.head_size, shape.hidden

    def rotary(dtype: torch.dtype) -> RotaryArgs:
        empty = [torch.zeros(m, 1, shape.kv_heads, shape.head_size, dtype=dtype, device=device) for _ in range(2)]
        return RotaryArgs(cos.to(dtype), sin.to(dtype), empty[0], empty[1], torch.arange(m, device=device))

    angle = torch.rand(m, shape.head_size // 2, device=device).repeat(1, 2)
    cos, sin = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)
    worst = 0.0
    rows = attention + 2 * shape.kv_heads * shape.head_size
    for width, count in ((attention, 2 * shape.inner), (shape.inner, rows)):
        taking = normal(device, count, hidden)
        added, norm = Product(normal(device, m, width), normal(device, hidden, width), None), normal(device, 1, hidden)[0] + 1
        residual = normal(device, m, hidden)
        exact = residual.double()
        wide = Product(added.x.double(), added.weight.double(), None)
        if width == attention:
            made = [kernels.norm_linear_silu_mul(added, residual, norm, 1e-5, taking, None)]
            right = [KernelSet().norm_linear_silu_mul(wide, exact, norm.double(), 1e-5, taking.double(), None)]
        else:
            own, other = rotary(torch.bfloat16), rotary(torch.float64)
            q = kernels.norm_linear_rope_write_cache(added, residual, norm, 1e-5, taking, None, own)
            p = KernelSet().norm_linear_rope_write_cache(wide, exact, norm.double(), 1e-5, taking.double(), None, other)
            made, right = [q, own.k_cache, own.v_cache], [p, other.k_cache, other.v_cache]
        for one, two in zip((*made, residual), (*right, exact), strict=True):
            worst = max(worst, float((one.double() - two).norm() / two.norm()))
    if not worst < 2e-2:
        raise SystemExit(f"a pair at {m} tokens is wrong: relative error {worst:.3g}")
    return worst


def row_of(key: Key, m: int, config: list[int] | None, us: float, torch_us: float) -> dict[str, Any]:
    """A choice as the table's file has it."""
    operator, dtype, n, k = key
    times = {"us": round(us, 2), "torch_us": round(torch_us, 2)}
    return {"operator": operator, "dtype": dtype, "n": n, "k": k, "m": m, "config": config, **times}
