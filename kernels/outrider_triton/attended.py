"""The part of the kernel set that attends over the cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, QuantizedProduct, QuantizedWeight
from outrider_triton import attention_ops as _attention_ops  # noqa: F401  (registers the operators)
from outrider_triton import variants
from outrider_triton.derive_attention import AttentionCut, Heads, cut, programs, reads_early
from outrider_triton.ends import TritonEnds
from outrider_triton.facts import DeviceFacts
from outrider_triton.jit.planes import UNIT
from outrider_triton.launch import ahead, power_of_two
from outrider_triton.planes_ops import laying
from outrider_triton.prompts import PromptAttention, Prompts
from outrider_triton.quantized import Normed, Rows
from outrider_triton.quantized_ops import Plan
from outrider_triton.table import AttentionConfig, MatmulConfig, Table

_TRITON = torch.ops.outrider


class TritonAttention(TritonEnds):
    """Attention, by itself and with the product behind it."""

    facts: DeviceFacts
    pdl: bool
    table: Table | None
    _scope: variants.Scope
    _prompts: PromptAttention
    _layer: str

    def attention_config(self, q: Tensor, k_cache: Tensor, metadata: AttentionMetadata) -> list[int]:
        """See :class:`~outrider_triton.derive_attention.AttentionCut`: from what the host knows."""
        return self._attention_config(q, k_cache, metadata.seq_lens.shape[0], metadata.max_query, metadata.max_kv)

    def _attention_config(self, q: Tensor, k_cache: Tensor, batch: int, max_query: int, max_kv: int) -> list[int]:
        derived = self.cut_up(q, k_cache, batch, max_query, max_kv, None)
        if self.table is None or q.dtype.itemsize != 2:
            return derived.as_list()
        heads = _heads(q, k_cache)
        groups = programs(heads, derived.block_rows, batch, max_query)
        tuned = self.table.attention_config(groups, heads.size, heads.group, layer=self._layer)
        return self.cut_up(q, k_cache, batch, max_query, max_kv, tuned).as_list()

    def cut_up(
        self, q: Tensor, k_cache: Tensor, batch: int, max_query: int, max_kv: int, tuned: AttentionConfig | None
    ) -> AttentionCut:
        """The launch for queries and a cache like these, with what was measured; None: derived."""
        return cut(self.facts, _heads(q, k_cache), batch=batch, max_query=max_query, max_kv=max_kv, tuned=tuned)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        """Online softmax over the pages; few queries split the cached tokens among programs. Prompts go their own way."""
        if not self._attends(q):
            return super().paged_attention(q, k_cache, v_cache, metadata, scale=scale, window=window)
        call = Prompts(q, k_cache, v_cache, metadata, scale, window)
        self._compile_attention(call, 0)
        if self._prompts.serves(q, metadata):
            if self._scope.depth:
                self._prompts.measure(call)
            return self._prompts.attend(call)
        config = self.attention_config(q, k_cache, metadata)
        return _TRITON.paged_attention.triton(*self._operands(call, config))  # type: ignore[no-any-return]

    def attention_norm_linear_quantized(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        output: QuantizedWeight,
        output_bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        *,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        """What joins the splits of attention leaves rows as a product of four bits takes them: a kernel less."""
        call = Prompts(q, k_cache, v_cache, metadata, scale, window)
        behind = residual, norm, eps, weight, bias
        normed = self._attention_normed(call, output, output_bias, *behind)
        if normed is None:
            operands = q, k_cache, v_cache, metadata, output, output_bias, *behind
            return super().attention_norm_linear_quantized(*operands, scale=scale, window=window)
        return self._behind(normed, residual, weight, bias, parts=False)

    def attention_norm_linear_silu_mul_quantized(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        output: QuantizedWeight,
        output_bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: QuantizedWeight,
        bias: Tensor | None,
        down: QuantizedWeight,
        down_bias: Tensor | None,
        *,
        scale: float,
        window: int = 0,
    ) -> QuantizedProduct:
        """A product through a ring ends in the activation, and leaves the maxima of its rows: several programs a row quantise
        them for the next product, where one had to see the whole row.
        """
        call = Prompts(q, k_cache, v_cache, metadata, scale, window)
        behind = residual, norm, eps, weight, bias
        normed = self._attention_normed(call, output, output_bias, *behind)
        if normed is None:
            operands = q, k_cache, v_cache, metadata, output, output_bias, *behind, down, down_bias
            return super().attention_norm_linear_silu_mul_quantized(*operands, scale=scale, window=window)
        activated = self._activated(normed, residual, weight, bias)
        if activated is not None:
            made, maxima = activated
            return QuantizedProduct(made, down, down_bias, maxima=maxima)
        return QuantizedProduct(self._behind(normed, residual, weight, bias, parts=False), down, down_bias, gated=True)

    def _attention_normed(
        self,
        call: Prompts,
        output: QuantizedWeight,
        output_bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: QuantizedWeight,
        bias: Tensor | None,
    ) -> Normed | None:
        """Attention, its product, and the norm behind it; None, and nothing was done: not for these."""
        whole = residual[:, :1].expand(-1, output.shape[1])  # for its shape and dtype

        def attended(way: Plan, config: MatmulConfig) -> Rows:
            # Of more requests it isn't split: rows lie plainly then.
            ways = {0, *(_planes(call, way, each) for each in self._every(call.q, output, way))} if self._scope.depth else ()
            return self._joined(call, _planes(call, way, config), ways)

        added = QuantizedProduct(whole, output, output_bias)
        return self._normed(added, residual, norm, eps, weight, bias, parts=False, taken=attended)

    def _joined(self, call: Prompts, planes: int, ways: Iterable[int]) -> Rows:
        """Rows [T, Hq D] of attention, in ``planes`` where it's split. ``ways``: in which they may be for other batches."""
        if planes and self._attends(call.q):
            for each in sorted(ways):  # in the same order each time
                self._compile_attention(call, each)
            config = self.attention_config(call.q, call.k_cache, call.metadata)
            if config[2] > 1 and not self._prompts.serves(call.q, call.metadata):
                return Rows(_TRITON.paged_attention.triton_planes(*self._operands(call, config), planes), None, True)
        operands = call.q, call.k_cache, call.v_cache, call.metadata
        out = self.paged_attention(*operands, scale=call.scale, window=call.window)
        return Rows(out.reshape(out.shape[0], -1), None, False)

    def _attends(self, q: Tensor) -> bool:
        return self._uses("paged_attention", q) and q.shape[-1] <= 256

    def _operands(self, call: Prompts, config: list[int]) -> tuple[Any, ...]:
        metadata = call.metadata
        held = metadata.query_start, metadata.seq_lens, metadata.block_table, metadata.tree_mask
        sizes = metadata.max_query, metadata.max_kv, call.scale, call.window
        settled = self.pdl and metadata.settled and reads_early(config)
        return call.q, call.k_cache, call.v_cache, *held, *sizes, settled, config, self.pdl

    def _compile_attention(self, call: Prompts, planes: int) -> None:
        """Every way to cut it up; once, in the scope alone."""
        q, k_cache, metadata = call.q, call.k_cache, call.metadata
        longest = metadata.max_query if metadata.tree_mask is not None else self._prompts.longest_elsewhere(q)
        variant = metadata.max_query, metadata.tree_mask is not None, metadata.settled, call.window, planes
        if self._scope.first(("attention", q.dtype, k_cache.dtype, *q.shape[1:], k_cache.shape[1:], *variant, self._layer)):
            for each in self._scope.attention_configs(
                (q.dtype, *q.shape[1:], k_cache.shape[2], self._layer),
                lambda *sizes: self._attention_config(q, k_cache, *sizes),
                max_query=min(metadata.max_query, longest),
                capacity=metadata.block_table.shape[1] * k_cache.shape[1],
            ):
                with ahead():
                    if not planes:
                        _TRITON.paged_attention.triton(*self._operands(call, list(each)))
                    elif each[2] > 1:
                        _TRITON.paged_attention.triton_planes(*self._operands(call, list(each)), planes)


def _planes(call: Prompts, way: Plan, config: MatmulConfig) -> int:
    """How rows are laid out for such a product; 0: plainly."""
    size = call.q.shape[2]
    return laying(config) if way.planes and size % UNIT.value == 0 and power_of_two(size) == size else 0


def _heads(q: Tensor, k_cache: Tensor) -> Heads:
    page, kv_heads = k_cache.shape[1:3]
    own = page if k_cache.dtype is q.dtype and k_cache.data_ptr() % 16 == 0 else 0
    return Heads(group=q.shape[1] // kv_heads, kv_heads=kv_heads, size=q.shape[2], bytes=q.dtype.itemsize, page=own)
