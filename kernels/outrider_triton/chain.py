"""A chain of layers (:mod:`outrider_tune.chain`) with Triton's kernels: a table is tried, and bettered choice by choice."""

from __future__ import annotations

from dataclasses import replace

import torch
from triton.errors import TritonError

from outrider.device import DecoderShape
from outrider_triton.kernelset import TritonKernels
from outrider_triton.table import Entry, MatmulConfig, Table
from outrider_tune.chain import LayerChain

Key = tuple[str, str, int, int]
"""Operator, dtype, rows and columns of the weight."""


class Chain(LayerChain):
    """Layers whose kernels take a table."""

    def __init__(
        self, shape: DecoderShape, kernels: TritonKernels, device: torch.device, *, most_bytes: int | None = None
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
