"""Multi-head latent attention (DeepSeek-V2, section 2.1), with a cache of latent vectors.

Every head's key, but for its rotated dimensions, and every head's value could be expanded from the latent vector of a token.
The expansions are absorbed instead: that of keys into queries, so that attention is to latent vectors, which all heads
share, and that of values into the result. For a long prompt, expanding the keys and values of all its tokens is less work.

Letters: T new tokens, S those that continue, H hidden size, Hq query heads, D head size, R size of the latent vector.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import (
    AttentionBlock,
    AttentionMetadata,
    AttentionTokens,
    ConfigError,
    KernelSet,
    ResidualStream,
    RotaryArgs,
)
from outrider.device.kernels.blocks import contributed
from outrider.device.kernels.weights import dequantized, linear, prepare
from outrider.model.config.model_config import EXPANDED_TOKENS, LatentConfig
from outrider.model.layers.layer_weights import LayerWeights

_EPS = 1e-6
"""Epsilon of the norms of latent vectors, whatever that of other norms is, as in DeepSeek's code and in transformers."""
MIN_EXPANDED_QUERY = 256
"""Least number of new tokens of a prompt for which keys and values are expanded."""


class _Pages(NamedTuple):
    """Pages of a cache whose keys and values are expanded."""

    caches: tuple[Tensor, Tensor]
    """Rotated keys and latent vectors, [pages, page size, 1, ...]; a page may have one token."""
    chosen: Tensor
    """int64 [N]: the pages, in their order in the expanded cache."""
    table: Tensor
    """int32 [B, ...]: the block table of the expanded cache."""


class LatentAttention:
    """The attention half of a layer with latent vectors, composed of primitives of ``kernels``.

    ``layer`` has the weights of this rank, which holds ``heads`` heads. Raises :class:`ConfigError` for a layer without
    latent vectors.
    """

    def __init__(self, kernels: KernelSet, layer: LayerWeights, latent: LatentConfig, heads: int) -> None:
        if layer.latent is None:
            raise ConfigError("a layer has no latent vectors, and the config has; expected both or none")
        self._kernels, self._weights, self._latent, self._heads = kernels, layer.latent, latent, heads
        self._expand = dequantized(layer.latent.kv_up, layer.latent.kv_norm.dtype)
        by_head = self._expand.view(heads, -1, latent.rank)
        self._absorb_key = by_head[:, : latent.unrotated_size].transpose(1, 2)  # [Hq, R, size of an unrotated key]
        self._expand_value = by_head[:, latent.unrotated_size :]  # [Hq, size of a value, R]
        prepare(kernels, layer.qkv, layer.latent.q_up, layer.output, self._expand)

    def __call__(self, x: ResidualStream, block: AttentionBlock, tokens: AttentionTokens) -> ResidualStream:
        """Return the stream with the contribution of attention, as :meth:`KernelSet.attention_block` does."""
        kernels, latent, rotary = self._kernels, self._latent, tokens.rotary
        projected = linear(kernels, x.norm(block.norm, block.eps), block.qkv)
        sizes = projected.shape[1] - latent.rank - latent.rotated_size, latent.rank, latent.rotated_size
        queries, vector, rotated_key = projected.split(sizes, dim=1)
        query_heads = self._queries(queries)
        rotated = query_heads[..., latent.unrotated_size :]
        kernels.latent_norm_rope_write_cache(vector, self._weights.kv_norm, _EPS, rotated, rotated_key, rotary)
        values = self._attend(tokens.rows.select(kernels, query_heads), rotary, tokens.attention, block.scale).flatten(1)
        rows = tokens.rows.continued(kernels, x.rows)
        return contributed(kernels, rows, linear(kernels, values, block.output), block.ranks)

    def _queries(self, projected: Tensor) -> Tensor:
        """Return the queries [T, Hq, D], rotated dimensions last, of their latent vectors or of the products themselves."""
        kernels, weights = self._kernels, self._weights
        if weights.q_norm is not None and weights.q_up is not None:
            projected = linear(kernels, kernels.rms_norm(projected, weights.q_norm, _EPS), weights.q_up)
        return projected.view(projected.shape[0], self._heads, -1)

    def _attend(self, q: Tensor, rotary: RotaryArgs, metadata: AttentionMetadata, scale: float) -> Tensor:
        """Return attention [S, Hq, size of a value] of the queries ``q`` [S, Hq, D]: of each part of a batch by itself."""
        if metadata.parts:
            counts = [count for count, _ in metadata.parts]
            parts = zip(q.split(counts), rotary.slots.split(counts), metadata.parts, strict=True)
            return torch.cat([self._attend(rows, rotary._replace(slots=own), part, scale) for rows, own, (_, part) in parts])
        kernels, latent, caches = self._kernels, self._latent, (rotary.k_cache, rotary.v_cache)
        pages = self._pages_to_expand(rotary, metadata)
        if pages is not None:
            return self._attend_expanded(q, pages, metadata, scale)
        unrotated, rotated = q.split((latent.unrotated_size, latent.rotated_size), dim=2)
        absorbed = kernels.head_linear(unrotated, self._absorb_key)
        attended = kernels.latent_attention(absorbed, rotated, *caches, metadata, scale=scale)
        return kernels.head_linear(attended, self._expand_value)

    def _pages_to_expand(self, rotary: RotaryArgs, metadata: AttentionMetadata) -> _Pages | None:
        """Return the pages whose keys and values are expanded: those of long prompts, if the host knows that they take the
        memory of at most :data:`EXPANDED_TOKENS` tokens for each new one, or the new tokens alone if there are no others.

        None for other batches, and for kernels that are ``row_invariant``: a token's bits would depend on the length of the
        prompt's chunk.
        """
        if metadata.max_query < MIN_EXPANDED_QUERY or metadata.tree_mask is not None or self._kernels.row_invariant:
            return None
        used = metadata.block_table[:, : -(-metadata.max_kv // rotary.k_cache.shape[1])]
        starts = metadata.host_query_start
        if starts is not None and used.numel() * rotary.k_cache.shape[1] <= EXPANDED_TOKENS * starts[-1]:
            table = torch.arange(used.numel(), dtype=torch.int32, device=used.device).view(used.shape)
            return _Pages((rotary.k_cache, rotary.v_cache), used.flatten().to(torch.int64), table)
        if metadata.host_context is None or any(metadata.host_context):
            return None
        place = metadata.query_start[:-1, None] + torch.arange(metadata.max_kv, dtype=torch.int32, device=used.device)
        caches = (rotary.k_cache.flatten(0, 1).unsqueeze(1), rotary.v_cache.flatten(0, 1).unsqueeze(1))
        return _Pages(caches, rotary.slots, place.clamp(max=rotary.slots.shape[0] - 1))

    def _attend_expanded(self, q: Tensor, pages: _Pages, metadata: AttentionMetadata, scale: float) -> Tensor:
        """Return attention [T, Hq, size of a value] to the expanded keys and values of ``pages``."""
        kernels, latent, heads = self._kernels, self._latent, self._heads
        rotated, vectors = (kernels.gather_rows(cache, pages.chosen).to(q.dtype) for cache in pages.caches)
        expanded = linear(kernels, vectors.flatten(0, 2), self._expand).view(*vectors.shape[:2], heads, -1)
        unrotated, values = expanded.split((latent.unrotated_size, latent.value_size), dim=3)
        keys = torch.cat((unrotated, rotated.expand(-1, -1, heads, -1)), dim=3)
        padded = F.pad(values, (0, latent.head_size - latent.value_size))
        batch = replace(metadata, block_table=pages.table, plan=None, parts=(), shapes=(), settled=False)
        return kernels.paged_attention(q, keys, padded, batch, scale=scale)[..., : latent.value_size]
