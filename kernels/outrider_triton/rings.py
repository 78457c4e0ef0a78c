"""Tuning of streamed products (:mod:`outrider_triton.jit.streamed`), in a chain of layers.

How much of a multiprocessor's shared memory one of them takes decides which small kernels fit in beside it and how much of
the next one's weights come while they run; so all of a layer are chosen together, one after another, while the others stay.
Both ends of a block are tried both ways: a product in parts that a norm adds up, or one that adds to the residual itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from outrider_triton.chain import Chain, Key, as_json, chosen, with_choice
from outrider_triton.jit.ring import PAIRS
from outrider_triton.kernelset import TritonKernels
from outrider_triton.launch import power_of_two
from outrider_triton.pairs import Job, Keys, check, row_of
from outrider_triton.table import STREAMED, MatmulConfig, Table, parse
from outrider_tune.measure import KernelShape
from outrider_tune.search import BETTER, Report, Search

MOST = 64
"""The most tokens: with more, what a multiprocessor reads again for each tile, the tokens, outweighs the tile."""
_TILE: int = PAIRS.value
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
    block_m = max(8, power_of_two(m))
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
    keys = Keys.of(shape)
    found = {key: shared_out(m, key[2] // 2, key[3], processors) for key in (keys.qkv, _gates_apart(keys), keys.gates)}
    for key in (keys.output, keys.down):
        found[key] = folded(m, key[2], key[3], processors)
        found[_in_parts(key)] = parts(m, key[2], key[3], processors)
    return found


def _in_parts(key: Key) -> Key:
    """The product of ``key`` where a norm adds up its parts."""
    return ("linear_parts", *key[1:])


def _gates_apart(keys: Keys) -> Key:
    """The gated product behind a norm of its own."""
    return ("linear_silu_mul", *keys.gates[1:])


def jobs(shape: KernelShape, sizes: list[int], processors: int) -> list[Job]:
    """What is to be compiled: products of the shape, and configurations."""
    return [(key, config) for m in sizes for key, configs in choices(shape, m, processors).items() for config in configs]


class _Rings:
    """The search for one number of tokens, for which the chain is prepared."""

    def __init__(self, chain: Chain, table: Table, m: int, report: Report) -> None:
        self._keys, self._m = Keys.of(chain.shape), m
        self._choices = choices(chain.shape, m, chain.kernels.processors)
        self.search = Search(chain.attempt, table, chain.attempt(table), report)

    def _start(self, output: bool, down: bool) -> tuple[Table, list[Key]]:
        """A table with streamed products throughout, and what is to be chosen; each end of a block added or in parts."""
        keys, table = self._keys, self.search.table
        order = [keys.output, keys.gates] if output else [_in_parts(keys.output), _gates_apart(keys)]
        order += [keys.down if down else _in_parts(keys.down), keys.qkv]
        for key, added in ((keys.output, output), (keys.down, down), (keys.gates, output)):
            if not added:
                table = with_choice(table, key, self._m, None)
        for key in order:
            table = with_choice(table, key, self._m, self._choices[key][0])
        return table, order

    def run(self) -> None:
        """Each of the four ways: every choice in turn, twice."""
        search = self.search
        for output, down in itertools.product((False, True), repeat=2):
            table, order = self._start(output, down)
            us = search.measure(table)
            for key in (*order, *order):
                table, us = search.best(with_choice(table, key, self._m, config) for config in self._choices[key])
            search.report(
                f"m {self._m}: streamed, output {'added' if output else 'in parts'}, down {'added' if down else 'in parts'}: "
                f"{us:.2f} us a layer, {search.before_us:.2f} before; "
                + "; ".join(f"{key[0]} {chosen(table, key, self._m)}" for key in order)
            )
            search.offer(table, us)


def tune_rings(
    data: dict[str, Any],
    shape: KernelShape,
    sizes: list[int],
    kernels: TritonKernels,
    device: torch.device,
    report: Report,
) -> None:
    """Choose for each number of tokens, streamed or as it was; changes ``data``, the table's JSON."""
    table, chain = parse(data), Chain(shape, kernels, device)
    times: dict[int, tuple[float, float]] = {}
    for m in sizes:
        chain.prepare_for(m)
        found = _Rings(chain, table, m, report)
        found.run()
        tuned, _ = chain.tune_attention(found.search.table)
        # Once more side by side: what came first may only have been cooler.
        pairs = [(chain.attempt(table), chain.attempt(tuned)) for _ in range(3)]
        before, after = (min(each) for each in zip(*pairs, strict=True))
        kept = after < before * BETTER
        report(f"m {m}: {before:.2f} us a layer before, {after:.2f} with rings: {'kept' if kept else 'left out'}")
        if kept:
            table = tuned
        kernels.table = table
        report(f"m {m}: relative error {check(kernels, shape, m, device):.2g}")
        times[m] = before, min(before, after)
    data["attention"] = as_json(table)
    data["rings"] = [{"m": m, "before_us": round(before, 2), "us": round(us, 2)} for m, (before, us) in times.items()]
    rows = {(row["operator"], row["dtype"], row["n"], row["k"], row["m"]): row for row in data["matmul"]}
    for key, m in itertools.product(choices(shape, sizes[0], kernels.processors), sizes):
        config = chosen(table, key, m)
        if "best" in rows.get((*key, m), ()):
            rows[*key, m]["config"] = config  # its times are those alone
        else:
            before, after = times[m]
            rows[*key, m] = row_of(key, m, config, after, before)
    data["matmul"] = list(rows.values())
