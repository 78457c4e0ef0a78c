"""A chain of layers (:mod:`outrider_tune.chain`) with Triton's kernels: a table is tried, and bettered choice by choice."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

import torch
from triton.errors import TritonError

from outrider_triton.kernelset import TritonKernels
from outrider_triton.table import AttentionConfig, AttentionEntry, Entry, MatmulConfig, Table
from outrider_tune.chain import LayerChain
from outrider_tune.measure import KernelShape
from outrider_tune.search import Report, Search, fastest

AHEAD = (0, 256, 1024)
"""Columns of a weight that may be asked for early."""

Key = tuple[str, str, int, int]
"""Operator, dtype, rows and columns of the weight."""


def attention_candidates(groups: int, context: int) -> list[AttentionConfig]:
    """Configurations worth trying."""
    every = itertools.product((32, 64, 128), (1, 2, 4, 8, 16, 32), (4, 8), (1, 2, 3))
    return [
        AttentionConfig(block_kv, split, warps, stages)
        for block_kv, split, warps, stages in every
        if block_kv * split <= 2 * context and groups * split <= 2048
    ]


class Chain(LayerChain):
    """Layers whose kernels take a table."""

    def __init__(
        self, shape: KernelShape, kernels: TritonKernels, device: torch.device, *, most_bytes: int | None = None
    ) -> None:
        super().__init__(shape, kernels, device, most_bytes=most_bytes)
        self.kernels: TritonKernels = kernels

    def attempt(self, table: Table) -> float:
        """Microseconds of a layer with ``table``, infinite where something in it can't be compiled; the table stays."""
        self.kernels.table = table
        try:
            return self.layer_us()
        except TritonError:
            return float("inf")

    def tune_attention(self, table: Table) -> tuple[Table, float]:
        """The best configuration of attention while the rest stays, and what a layer takes with it."""
        others = tuple(e for e in table.attention if (e.groups, e.head_size) != (self.groups, self.shape.head_size))
        size = self.shape.head_size
        entries = (
            AttentionEntry(groups=self.groups, max_kv=self.context, config=config, head_size=size)
            for config in attention_candidates(self.groups, self.context)
        )
        trials = (replace(table, attention=(*others, entry)) for entry in entries)
        # Measured is better than guessed, even where it isn't faster.
        return fastest(self.attempt, trials, (table, float("inf")))

    def tune(self, table: Table, m: int, choices: Mapping[Key, list[MatmulConfig | None]], report: Report) -> Table:
        """Better each choice in turn while the others stay, attention first; ``m`` is the entries' number of tokens."""
        report(f"m {m}: {self.attempt(table):.2f} us a layer at the start")
        search = Search(self.attempt, *self.tune_attention(table), report)
        for _ in range(2):
            before = search.us
            for key, configs in choices.items():
                kept = search.table
                for choice in configs:
                    trial = with_choice(kept, key, m, choice)
                    search.offer(trial, self.attempt(trial))
                entry = search.table.entry(key[0], key[1], n=key[2], k=key[3], m=m)
                report(f"m {m}: {search.us:.2f} us with {key[0]} {key[2:]} {entry}")
            if search.us > 0.995 * before:
                break
        self.kernels.table = search.table
        return search.table


def with_choice(table: Table, key: Key, m: int, config: MatmulConfig | None) -> Table:
    """``table`` with another choice for ``m`` tokens; None: without that kernel."""
    entries = dict(table.entries)
    old = {entry.m: entry for entry in entries.get(key, ())}
    found = old.get(m)
    old[m] = Entry(m=m, config=config, us=0.0, torch_us=0.0) if found is None else replace(found, config=config)
    entries[key] = tuple(old[each] for each in sorted(old))
    return replace(table, entries=entries)


def chosen(table: Table, key: Key, m: int) -> list[int] | None:
    """The configuration for ``m`` tokens as a table's file has it; None: without that kernel."""
    entry = table.entry(*key[:2], n=key[2], k=key[3], m=m)
    return None if entry is None or entry.config is None else entry.config.as_list()


def as_json(table: Table) -> list[dict[str, Any]]:
    """A table's attention entries as its file has them."""
    return [
        {
            "groups": entry.groups,
            "max_kv": entry.max_kv,
            "head_size": entry.head_size,
            "config": list(astuple(entry.config)),
        }
        for entry in table.attention
    ]
