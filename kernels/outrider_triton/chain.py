"""A chain of layers (:mod:`outrider_tune.chain`) with Triton's kernels, to time a table and improve it choice by choice."""

from __future__ import annotations

from dataclasses import replace

import torch
from triton.errors import TritonError

from outrider.device import DecoderShape
from outrider_triton.kernelset import TritonKernels
from outrider_triton.table import Entry, Key, MatmulConfig, Table, by_layer
from outrider_tune.chain import LayerChain


class Chain(LayerChain):
    """Layers whose kernels read their configurations from a table."""

    def __init__(
        self, shape: DecoderShape, kernels: TritonKernels, device: torch.device, *, most_bytes: int | None = None
    ) -> None:
        super().__init__(shape, kernels, device, most_bytes=most_bytes)
        self.kernels: TritonKernels = kernels.for_shape(shape)

    def attempt(self, table: Table) -> float:
        """Install ``table`` and return microseconds per layer; infinite if one of its kernels can't be compiled."""
        self.kernels.table = table
        try:
            return self.layer_us()
        except TritonError:
            return float("inf")


def with_choice(table: Table, product: Key, m: int, config: MatmulConfig | None, *, layer: str) -> Table:
    """Return ``table`` with another configuration for ``m`` tokens in ``layer``; None: the library's kernel."""
    old = [(name, entry) for name, found in table.entries.get(product, {}).items() for entry in found]
    entry = Entry(m=m, config=config, us=0.0, torch_us=0.0)
    return replace(table, entries={**table.entries, product: by_layer([*old, (layer, entry)])})
