"""Tuning of products that leave room for the next one.

A product's programs can ask for their weights while the product before still runs, if both fit into a multiprocessor's
shared memory. So what is fastest alone, with deep buffers, may be slower in a chain than smaller programs that overlap: a
choice that must be made for all products at once, and is then bettered one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from outrider.device.kernels.measure import KernelShape
from outrider_triton.chain import Chain, Key, with_choice
from outrider_triton.table import MatmulConfig, Table

_HALF_BYTES = 113 << 10
"""Shared memory of a program, so that two fit."""
_AHEAD = (0, 256, 512, 1024)


def keys(shape: KernelShape) -> tuple[Key, Key, Key, Key]:
    """The products of a layer in their order."""
    attention = shape.heads * shape.head_size
    return (
        ("linear", "bfloat16", attention + 2 * shape.kv_heads * shape.head_size, shape.hidden),
        ("linear_parts", "bfloat16", shape.hidden, attention),
        ("linear_silu_mul", "bfloat16", 2 * shape.inner, shape.hidden),
        ("linear_parts", "bfloat16", shape.hidden, shape.inner),
    )


def small(operator: str, m: int) -> list[MatmulConfig]:
    """Configurations of which two fit into a multiprocessor, the likeliest first."""
    block_m = max(16, 1 << (m - 1).bit_length())
    rows, each, split = 64, {"linear": 48, "linear_parts": 0, "linear_silu_mul": 56}[operator], 1
    if operator == "linear_parts":
        split = 2
    tiles = 2 if operator == "linear_silu_mul" else 1
    made = []
    for block_k, stages, descriptor in itertools.product((128, 256, 64), (5, 4, 3), (0, 1)):
        fits = stages * (tiles * rows + block_m) * block_k * 2 <= _HALF_BYTES
        if fits and not (descriptor and each) and (stages > 3 or block_k > 64):
            made.append(MatmulConfig(block_m, rows, block_k, split, 4, stages, 256, descriptor, each))
    return made


def better(chain: Chain, table: Table, m: int, report: Callable[[str], None]) -> Table:
    """``table``, or one with small programs for ``m`` tokens where the chain is faster with it."""
    before = chain.attempt(table)
    trial = table
    for key in keys(chain.shape):
        trial = with_choice(trial, key, m, small(key[0], m)[0])
    us = chain.attempt(trial)
    report(f"m {m}: programs of which two fit: {us:.2f} us a layer to begin with, {before:.2f} with large ones")
    for key in keys(chain.shape) * 2:
        kept = trial
        entry = kept.entry(*key[:2], n=key[2], k=key[3], m=m)
        if entry is None or entry.config is None:
            continue
        ahead = [replace(entry.config, ahead=columns) for columns in _AHEAD]
        for config in (*ahead, *small(key[0], m)):
            found = chain.attempt(with_choice(kept, key, m, config))
            if found < us:
                trial, us = with_choice(kept, key, m, config), found
    kept_it = us < before * 0.999
    report(f"m {m}: programs of which two fit: {us:.2f} us a layer, {before:.2f} before: {'kept' if kept_it else 'left out'}")
    for key in keys(chain.shape):
        report(f"   {key[0]} {key[2:]}: {trial.entry(*key[:2], n=key[2], k=key[3], m=m)}")
    return trial if kept_it else table


def jobs(sizes: list[int]) -> list[tuple[str, MatmulConfig]]:
    """What is to be compiled."""
    return [
        (operator, config)
        for m in sizes
        for operator in ("linear", "linear_parts", "linear_silu_mul")
        for config in small(operator, m)
    ]
