"""Tuning of streamed products (:mod:`outrider_triton.jit.streamed`), in a chain of layers.

How much of a multiprocessor's shared memory one of them takes decides which small kernels fit in beside it and how much of
the next one's weights come while they run; so all of a layer are chosen together, one after another, while the others stay.
Both ends of a block are tried both ways: a product in parts that a norm adds up, or one that adds to the residual itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from outrider.device.kernels.measure import KernelShape
from outrider_triton.chain import Chain, Key, as_json, normal, with_choice
from outrider_triton.kernelset import TritonKernels
from outrider_triton.pairs import Keys, Report, check, row_of
from outrider_triton.table import STREAMED, MatmulConfig, Table, parse

MOST = 64
"""The most tokens: with more, what a multiprocessor reads again for each tile, the tokens, outweighs the tile."""
_TILE = 32
_FEW = 512
_RINGS = (108 << 10, 150 << 10, 180 << 10, 208 << 10)
"""Bytes of shared memory: with the first, two programs fit into a multiprocessor."""
_SHARED_BYTES = 226 << 10
"""What a program may have, and also holds a tile of results."""


def _shares(pairs: int, processors: int) -> list[tuple[int, int, int]]:
    """(pairs of a program, rows of a box, programs a multiprocessor): as even as boxes allow, boxes as large as may be."""
    found = {}
    for waves, box in itertools.product((1, 2), (8, 16, 32)):
        each = -(-pairs // (processors * waves * box)) * box
        found[each, waves] = box
    return [(each, box, waves) for (each, waves), box in found.items()]


def _rings(m: int, waves: int, fold: int) -> Iterator[tuple[int, int, int]]:
    """(tokens of a block, columns of a tile, stages)."""
    block_m = max(8, 1 << (m - 1).bit_length())
    width = fold * block_m
    for block_k, size in itertools.product((128, 256), _RINGS[:1] if waves > 1 else _RINGS):
        stages = min(size, _SHARED_BYTES - 2 * _TILE * width * 4) // ((2 * _TILE + width) * block_k * 2)
        if stages > 1:
            yield block_m, block_k, stages


def _made(m: int, k: int, each: int, box: int, waves: int, *, split: int = 1, fold: int = 1) -> Iterator[MatmulConfig]:
    for block_m, block_k, stages in _rings(m, waves, fold):
        if k % (split * block_k * fold) == 0:
            yield MatmulConfig(block_m, box, block_k, split, 4, stages, 0, STREAMED, each)


def parts(m: int, n: int, k: int, processors: int) -> list[MatmulConfig]:
    """For a product in parts: whole tiles, and so many parts that they fill the device once or twice."""
    tiles = -(-n // (2 * _TILE))
    splits = {waves: max(1, processors * waves // tiles) for waves in (1, 2)}
    return [
        c for waves, split in splits.items() for c in _made(m, k, _TILE, _TILE, waves, split=1 << (split.bit_length() - 1))
    ]


def shared_out(m: int, pairs: int, k: int, processors: int) -> list[MatmulConfig]:
    """For a product whose pairs of rows are shared out."""
    return [c for each, box, waves in _shares(pairs, processors) for c in _made(m, k, each, box, waves)]


def folded(m: int, n: int, k: int, processors: int) -> list[MatmulConfig]:
    """For a product that adds: each row a pair, a program a tile at most."""
    shares = [share for share in _shares(n, processors) if share[0] <= _TILE]
    return [c for each, box, waves in shares for c in _made(m, k, each, box, waves, fold=2)]


def choices(shape: KernelShape, m: int, processors: int) -> dict[Key, list[MatmulConfig]]:
    """Every candidate of a layer's products."""
    keys, gates = Keys.of(shape), 2 * shape.inner
    kinds = {key: ("linear_parts", *key[1:]) for key in (keys.output, keys.down)}
    found: dict[Key, list[MatmulConfig]] = {
        keys.qkv: shared_out(m, keys.qkv[2] // 2, keys.qkv[3], processors),
        ("linear_silu_mul", "bfloat16", gates, shape.hidden): shared_out(m, shape.inner, shape.hidden, processors),
        keys.gates: shared_out(m, shape.inner, shape.hidden, processors),
    }
    for add, part in kinds.items():
        found[add] = folded(m, add[2], add[3], processors)
        found[part] = parts(m, part[2], part[3], processors)
    return found


Job = tuple[Key, MatmulConfig]


def jobs(shape: KernelShape, sizes: list[int], processors: int) -> list[Job]:
    """What is to be compiled: products of the shape, and configurations; those too that stand alone in a draft's pass."""
    alone = [("linear", shape.fused), ("linear_add", shape.inner)]
    layers = [(key, c) for m in sizes for key, configs in choices(shape, m, processors).items() for c in configs]
    return layers + [
        ((operator, "bfloat16", shape.hidden, k), config)
        for operator, k in alone
        for m in sizes
        for config in folded(m, shape.hidden, k, processors)
    ]


def compile_one(key: Key, config: MatmulConfig, shape: KernelShape, device: torch.device, pdl: bool) -> None:
    """Compile for operands that are like those of ``shape`` in all that a compiler sees."""
    ops, m, (operator, _, n, k), block = torch.ops.outrider, config.block_m, key, config.as_list()
    x, residual, norm = normal(device, m, k), normal(device, m, _FEW), normal(device, _FEW)
    if operator == "linear_parts":
        ops.linear_parts.triton(x, normal(device, _FEW, k), block, pdl)
    elif operator == "linear_add_scaled":
        ops.linear_add_scaled.triton(x, normal(device, _FEW, k), None, residual, norm, block, pdl)
    elif operator == "linear":
        ops.linear.triton(x, normal(device, _FEW, k), None, block, pdl)
    elif operator == "linear_add":
        ops.linear_add.triton(x, normal(device, _FEW, k), None, residual, block, pdl)
    elif operator == "linear_silu_mul":
        ops.linear_silu_mul.triton(x, normal(device, 2 * _FEW, k), None, block, pdl)
    for shares in (shape.hidden // 32, shape.hidden // 16):  # as many as a product that adds may leave
        squares = torch.ones((shares, m), dtype=torch.float32, device=device)
        if operator == "scaled_silu_mul":
            ops.scaled_silu_mul.triton(x, squares, normal(device, 2 * _FEW, k), None, 1e-5, block, pdl)
        elif operator == "linear_rope":
            cache = torch.zeros(m, 16, shape.kv_heads, shape.head_size, dtype=x.dtype, device=device)
            angle = normal(device, m, shape.head_size)
            turn = angle, angle, cache, cache, torch.arange(m, device=device)
            for each in (squares, None):
                ops.rope_write_cache.triton_linear(x, each, normal(device, n, k), None, 1e-5, *turn, block, pdl)


class Search:
    """For one number of tokens, for which the chain is prepared."""

    def __init__(self, chain: Chain, table: Table, m: int, report: Report) -> None:
        self._chain, self._m, self._report = chain, m, report
        self._keys = keys = Keys.of(chain.shape)
        self._gates = ("linear_silu_mul", "bfloat16", keys.gates[2], keys.gates[3])
        self._parts = {key: ("linear_parts", *key[1:]) for key in (keys.output, keys.down)}
        self._choices = choices(chain.shape, m, chain.kernels.processors)
        self.table, self.before_us = table, chain.attempt(table)
        self.us = self.before_us

    def _start(self, output: bool, down: bool) -> tuple[Table, list[Key]]:
        """A table with streamed products throughout, and what is to be chosen; each end of a block added or in parts."""
        keys, table = self._keys, self.table
        order = [keys.output if output else self._parts[keys.output], keys.gates if output else self._gates]
        order += [keys.down if down else self._parts[keys.down], keys.qkv]
        for key, added in ((keys.output, output), (keys.down, down), (keys.gates, output)):
            if not added:
                table = with_choice(table, key, self._m, None)
        for key in order:
            table = with_choice(table, key, self._m, self._choices[key][0])
        return table, order

    def run(self) -> None:
        """Each of the four ways: every choice in turn, twice."""
        for output, down in itertools.product((False, True), repeat=2):
            table, order = self._start(output, down)
            us = self._chain.attempt(table)
            for key in (*order, *order):
                tried = [with_choice(table, key, self._m, config) for config in self._choices[key]]
                table, us = min(((each, self._chain.attempt(each)) for each in tried), key=lambda pair: pair[1])
            self._report(
                f"m {self._m}: streamed, output {'added' if output else 'in parts'}, down {'added' if down else 'in parts'}: "
                f"{us:.2f} us a layer, {self.before_us:.2f} before; "
                + "; ".join(f"{key[0]} {self._config(table, key)}" for key in order)
            )
            if us < self.us * 0.999:
                self.table, self.us = table, us

    def _config(self, table: Table, key: Key) -> list[int] | None:
        entry = table.entry(*key[:2], n=key[2], k=key[3], m=self._m)
        return None if entry is None or entry.config is None else entry.config.as_list()


def tune_streams(
    data: dict[str, Any],
    shape: KernelShape,
    sizes: list[int],
    kernels: TritonKernels,
    device: torch.device,
    report: Callable[[str], None],
) -> None:
    """Choose for each number of tokens, streamed or as it was; changes ``data``, the table's JSON."""
    table, chain = parse(data), Chain(shape, kernels, device)
    times: dict[int, tuple[float, float]] = {}
    for m in sizes:
        width = 1 if m == 16 else 4
        chain.prepare(m // width, width, 640)
        search = Search(chain, table, m, report)
        search.run()
        tuned, _ = chain.tune_attention(search.table)
        # Once more side by side: what came first may only have been cooler.
        pairs = [(chain.attempt(table), chain.attempt(tuned)) for _ in range(3)]
        before, after = (min(each) for each in zip(*pairs, strict=True))
        kept = after < before * 0.999
        report(f"m {m}: {before:.2f} us a layer before, {after:.2f} with rings: {'kept' if kept else 'left out'}")
        if kept:
            table = tuned
        kernels.table = table
        report(f"m {m}: relative error {check(kernels, shape, m, device):.2g}")
        times[m] = before, min(before, after)
    data["attention"] = as_json(table)
    data["streams"] = [{"m": m, "before_us": round(before, 2), "us": round(us, 2)} for m, (before, us) in times.items()]
    rows = {(row["operator"], row["dtype"], row["n"], row["k"], row["m"]): row for row in data["matmul"]}
    for key, m in itertools.product(choices(shape, sizes[0], kernels.processors), sizes):
        entry = table.entry(*key[:2], n=key[2], k=key[3], m=m)
        config = None if entry is None or entry.config is None else entry.config.as_list()
        if "best" in rows.get((*key, m), ()):
            rows[*key, m]["config"] = config  # its times are those alone
        else:
            before, after = times[m]
            rows[*key, m] = row_of(key, m, config, after, before)
    data["matmul"] = list(rows.values())
