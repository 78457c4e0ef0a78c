"""Tuning in place: the layers of a decoder one after another, as a decode step runs them.

A product that is fast by itself may hold up its neighbours: how much of a processor its programs take decides whether the
next kernel can start early and bring in its weights. So each choice is tried where it will be used, by the time of the chain.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from outrider.device import AttentionMetadata, Product, RotaryArgs
from outrider_triton.kernelset import TritonKernels
from outrider_triton.table import AttentionConfig, AttentionEntry, Entry, MatmulConfig, Table
from outrider_tune.measure import KernelShape
from outrider_tune.timing import microseconds

_LAYERS = 8
_PAGE = 16
_CONTEXT = 640
AHEAD = (0, 256, 1024)
"""Columns of a weight that may be asked for early."""

Key = tuple[str, str, int, int]


def normal(device: torch.device, *size: int) -> Tensor:
    """Random numbers in bfloat16, of a variance of one over the last dimension."""
    made: Tensor = torch.randn(size, dtype=torch.bfloat16, device=device) * size[-1] ** -0.5
    return made


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    k_cache: Tensor
    v_cache: Tensor


def attention_candidates(groups: int, context: int) -> list[AttentionConfig]:
    """Configurations worth trying."""
    every = itertools.product((32, 64, 128), (1, 2, 4, 8, 16, 32), (4, 8), (1, 2, 3))
    return [
        AttentionConfig(block_kv, split, warps, stages)
        for block_kv, split, warps, stages in every
        if block_kv * split <= 2 * context and groups * split <= 2048
    ]


class Chain:
    """Layers with random weights for ``batch`` sequences of ``context`` tokens, of which ``width`` are new."""

    def __init__(self, shape: KernelShape, kernels: TritonKernels, device: torch.device) -> None:
        self.shape, self.kernels, self.device = shape, kernels, device
        self._module = torch.get_device_module(device)
        attention = shape.heads * shape.head_size
        self._weights = [
            tuple(
                normal(device, n, k)
                for n, k in (
                    (attention + 2 * shape.kv_heads * shape.head_size, shape.hidden),
                    (shape.hidden, attention),
                    (2 * shape.inner, shape.hidden),
                    (shape.hidden, shape.inner),
                )
            )
            for _ in range(_LAYERS)
        ]
        self._norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)

    def prepare_for(self, m: int) -> None:
        """Prepare for a table's entries of ``m`` tokens: four of each sequence, or one where they're 16."""
        width = 1 if m == 16 else 4
        self.prepare(m // width, width, _CONTEXT)

    def prepare(self, batch: int, width: int, context: int) -> None:
        """Inputs and caches for what is measured next."""
        shape, device, rows = self.shape, self.device, batch * width
        self.rows, self.groups, self.width, self.context = rows, batch * shape.kv_heads, width, context
        per = -(-context // _PAGE)
        table = (torch.randperm(batch * per, device=device) + 1).view(batch, per).to(torch.int32)
        lane = torch.arange(context - width, context, device=device)
        self._slots = (table[:, lane // _PAGE].to(torch.int64) * _PAGE + lane % _PAGE).flatten()
        self._metadata = AttentionMetadata(
            query_start=torch.arange(0, rows + 1, width, dtype=torch.int32, device=device),
            seq_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
            block_table=table,
            max_query=width,
            max_kv=context,
            settled=True,
        )
        size = (1 + batch * per, _PAGE, shape.kv_heads, shape.head_size)
        self._layers = [
            _Layer(*weights, *(torch.randn(size, dtype=torch.bfloat16, device=device) for _ in range(2)))
            for weights in self._weights
        ]
        self._residual = torch.randn(rows, shape.hidden, dtype=torch.bfloat16, device=device)
        angle = torch.rand(rows, shape.head_size, device=device)
        self._angles = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)

    def run(self, _: int) -> Tensor:
        """All layers once; the last one's sum and norm."""
        kernels, shape = self.kernels, self.shape
        size = shape.head_size
        residual = self._residual.clone()
        norm, eps = self._norm, 1e-5
        pending: Product | None = None
        for layer in self._layers:
            rotary = RotaryArgs(*self._angles, layer.k_cache, layer.v_cache, self._slots)
            if pending is None:
                q = kernels.linear_rope_write_cache(Product(kernels.rms_norm(residual, norm, eps), layer.qkv, None), rotary)
            else:
                q = kernels.norm_linear_rope_write_cache(pending, residual, norm, eps, layer.qkv, None, rotary)
            out = kernels.paged_attention(q, layer.k_cache, layer.v_cache, self._metadata, scale=size**-0.5)
            added = Product(out.flatten(1), layer.output, None)
            gated = kernels.norm_linear_silu_mul(added, residual, norm, eps, layer.gate_up, None)
            pending = Product(gated, layer.down, None)
        assert pending is not None  # there are layers
        return kernels.linear_add_rms_norm(*pending, residual, norm, eps)

    def layer_us(self) -> float:
        """Microseconds of a layer, with the table that the kernels have now."""
        return microseconds(self._module, self.run, calls=1, replays=7) / _LAYERS

    # -- search ----------------------------------------------------------------------------------------------------

    def attempt(self, table: Table) -> float:
        """Microseconds of a layer with ``table``, infinite where something in it can't be compiled; the table stays."""
        self.kernels.table = table
        try:
            return self.layer_us()
        except TritonError:
            return float("inf")

    def tune_attention(self, table: Table) -> tuple[Table, float]:
        """The best configuration of attention while the rest stays, and what a layer takes with it."""
        others = tuple(e for e in table.attention if (e.groups, e.max_kv) != (self.groups, self.context))
        best, best_us = table, float("inf")  # measured is better than guessed, even where it isn't faster
        for config in attention_candidates(self.groups, self.context):
            entry = AttentionEntry(groups=self.groups, max_kv=self.context, config=config)
            trial = replace(table, attention=(*others, entry))
            us = self.attempt(trial)
            if us < best_us:
                best, best_us = trial, us
        return best, best_us

    def tune(
        self,
        table: Table,
        m: int,
        choices: Mapping[Key, list[MatmulConfig | None]],
        report: Callable[[str], None],
    ) -> Table:
        """Better each choice in turn while the others stay, attention first; ``m`` is the entries' number of tokens."""
        report(f"m {m}: {self.attempt(table):.2f} us a layer at the start")
        table, best_us = self.tune_attention(table)
        for _ in range(2):
            before = best_us
            for key, configs in choices.items():
                kept = table
                for choice in configs:
                    trial = with_choice(kept, key, m, choice)
                    us = self.attempt(trial)
                    if us < best_us * 0.999:
                        best_us, table = us, trial
                report(
                    f"m {m}: {best_us:.2f} us with {key[0]} {key[2:]} {table.entry(key[0], key[1], n=key[2], k=key[3], m=m)}"
                )
            if best_us > 0.995 * before:
                break
        self.kernels.table = table
        return table


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
            "config": list(astuple(entry.config)),
        }
        for entry in table.attention
    ]
