"""CacheAttention: launches of attention over the paged cache, alone and fused with the product that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, KernelSet, QuantizedWeight
from outrider_triton.attention import operators as _attention_ops  # noqa: F401  (registers the operators)
from outrider_triton.attention.prefill import PrefillOperands, PromptAttention
from outrider_triton.launch import has_kernel, power_of_two
from outrider_triton.quantized.jit.nibble_planes import UNIT_COLUMNS
from outrider_triton.quantized.nibble_planes import row_layout
from outrider_triton.quantized.plan import ProductPlan
from outrider_triton.quantized.products import PlannedProduct, QuantizedProducts, TokenRows
from outrider_triton.tiles.configs import AttentionConfig, MatmulConfig
from outrider_triton.tiles.derive.attention import (
    AttentionHeads,
    AttentionLaunch,
    derive_attention_launch,
    unsplit_programs,
)
from outrider_triton.tiles.selection import TileSelection

_TRITON = torch.ops.outrider


class CacheAttention:
    """The launches of attention over the paged cache, alone or fused with the output projection and the norm that follow."""

    def __init__(
        self, kernels: KernelSet, tiles: TileSelection, quantized: QuantizedProducts, prompts: PromptAttention
    ) -> None:
        self.prompts = prompts
        """The kernels of prefill attention."""
        self._kernels, self._tiles, self._quantized, self._pdl = kernels, tiles, quantized, tiles.facts.pdl

    def config(self, q: Tensor, k_cache: Tensor, metadata: AttentionMetadata) -> AttentionLaunch:
        """Return the launch of this attention.

        Only host-side sizes decide: the batch, and the largest query and cache lengths.
        """
        return self.config_for(q, k_cache, metadata.seq_lens.shape[0], metadata.max_query, metadata.max_kv)

    def config_for(self, q: Tensor, k_cache: Tensor, batch: int, max_query: int, max_kv: int) -> AttentionLaunch:
        """Return the launch of :meth:`config` for a batch of these sizes."""
        derived = self.attention_launch(q, k_cache, batch, max_query, max_kv, None)
        if self._tiles.table is None or q.dtype.itemsize != 2:
            return derived
        heads = _heads(q, k_cache)
        groups = unsplit_programs(heads, derived.block_rows, batch, max_query)
        tuned = self._tiles.attention(groups, heads.size, heads.group)
        return derived if tuned is None else self.attention_launch(q, k_cache, batch, max_query, max_kv, tuned)

    def attention_launch(
        self, q: Tensor, k_cache: Tensor, batch: int, max_query: int, max_kv: int, tuned: AttentionConfig | None
    ) -> AttentionLaunch:
        """Return the launch for queries and a cache of these shapes. ``tuned`` is a measured configuration, or None."""
        return derive_attention_launch(
            self._tiles.facts, _heads(q, k_cache), batch=batch, max_query=max_query, max_kv=max_kv, tuned=tuned
        )

    def rows_for(self, call: PrefillOperands, output: QuantizedWeight) -> Callable[[PlannedProduct], TokenRows]:
        """Return a function that runs attention, and returns its rows as a product with the weight ``output`` takes them."""

        def attention_rows(product: PlannedProduct) -> TokenRows:
            layouts = {0}  # larger batches aren't split: their rows keep the ordinary layout
            if self._tiles.scope.depth:
                configs = self._quantized.every_config(call.q, output, product.plan)
                layouts |= {_planes(call, product.plan, config) for config in configs}
            return self._joined(call, _planes(call, product.plan, product.config), layouts)

        return attention_rows

    def _joined(self, call: PrefillOperands, planes: int, layouts: Iterable[int]) -> TokenRows:
        """Return attention rows [T, Hq D]: in the nibble-plane layout ``planes`` if programs split the cached tokens, else
        row-major.

        ``layouts`` are all layouts that other batches may need. In the scope of variants, attention is compiled for each of
        them.
        """
        if planes and attends(call.q):
            for layout in sorted(layouts):  # a fixed order makes the compile order deterministic
                self.compile_variants(call, layout)
            config = self.config(call.q, call.k_cache, call.metadata)
            if config.split > 1 and not call.metadata.parts and not self.prompts.serves(call.q, call.metadata):
                rows = _TRITON.paged_attention.triton(*self.operands(call, config), planes, call.sinks)
                return TokenRows(rows, in_planes=True)
        operands = call.q, call.k_cache, call.v_cache, call.metadata
        sinks: dict[str, Any] = {} if call.sinks is None else {"sinks": call.sinks}
        out = self._kernels.paged_attention(*operands, scale=call.scale, window=call.window, **sinks)
        return TokenRows(out.reshape(out.shape[0], -1))

    def operands(self, call: PrefillOperands, config: AttentionLaunch) -> tuple[Any, ...]:
        """Return the operands of the attention operators, in the order of their schema. ``config`` is the result of
        :meth:`config`.
        """
        metadata = call.metadata
        addressing = metadata.query_start, metadata.seq_lens, metadata.block_table, metadata.tree_mask
        limits = metadata.max_query, metadata.max_kv, call.scale, call.window
        reads_before_wait = self._pdl and metadata.settled and config.can_read_before_wait
        return call.q, call.k_cache, call.v_cache, *addressing, *limits, reads_before_wait, config, self._pdl

    def compile_variants(self, call: PrefillOperands, planes: int) -> None:
        """Compile attention with every launch configuration that these heads may need. Does nothing outside the scope of
        variants, or for heads that were compiled before.
        """
        if not self._tiles.scope.depth:
            return
        q, k_cache, metadata = call.q, call.k_cache, call.metadata
        longest_decode = metadata.max_query if metadata.tree_mask is not None else self.prompts.longest_elsewhere(q)
        modes = metadata.tree_mask is not None, metadata.settled, call.sinks is not None
        variant = metadata.max_query, *modes, call.window, planes
        key = "attention", q.dtype, k_cache.dtype, *q.shape[1:], k_cache.shape[1:], *variant, self._tiles.layer
        configs = self._tiles.scope.attention_configs(
            (_heads(q, k_cache), self._tiles.layer),
            lambda *sizes: self.config_for(q, k_cache, *sizes),
            max_query=min(metadata.max_query, longest_decode),
            capacity=metadata.block_table.shape[1] * k_cache.shape[1],
        )
        for tiling in self._tiles.scope.each(key, configs):
            if tiling.split > 1 or not planes:
                _TRITON.paged_attention.triton(*self.operands(call, tiling), planes, call.sinks)


def _planes(call: PrefillOperands, product_plan: ProductPlan, config: MatmulConfig | None) -> int:
    """Return the nibble-plane layout in which a product with this plan reads its rows (:func:`row_layout`); 0 for row-major
    rows.
    """
    size = call.q.shape[2]
    if config is None or not product_plan.planes:
        return 0
    return row_layout(config) if size % UNIT_COLUMNS.value == 0 and power_of_two(size) == size else 0


def _heads(q: Tensor, k_cache: Tensor) -> AttentionHeads:
    page, kv_heads = k_cache.shape[1:3]
    aligned_page = page if k_cache.dtype is q.dtype and k_cache.data_ptr() % 16 == 0 else 0
    return AttentionHeads(
        group=q.shape[1] // kv_heads, kv_heads=kv_heads, size=q.shape[2], bytes=q.dtype.itemsize, page=aligned_page
    )


def attends(q: Tensor) -> bool:
    """Return True if Triton's attention kernels support queries ``q`` [T, Hq, D] of this dtype and head size."""
    return has_kernel(q) and q.shape[-1] <= 512
