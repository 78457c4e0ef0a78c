"""Multi-head latent attention (DeepSeek-V2, section 2.1): queries, keys and values are expanded from latent vectors.

The expanded keys and values are cached like those of other models. A head's dimensions are ordered for the rotation, which
turns the first ones, and values are padded to the size of keys. Attention is then that of any other layer.

Letters: T new tokens, H hidden size, Hq heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import AttentionBlock, AttentionTokens, ConfigError, KernelSet, ResidualStream, Weight
from outrider.device.kernels.blocks import attended_rows, contributed, write_heads
from outrider.device.kernels.weights import linear, prepare
from outrider.model.config.model_config import LatentConfig
from outrider.model.layers.layer_weights import LayerWeights

_EPS = 1e-6
"""Epsilon of the norms of latent vectors, whatever that of other norms is, as in DeepSeek's code and in transformers."""


class LatentAttention:
    """The attention half of a layer with latent vectors, composed of primitives of ``kernels``.

    ``layer`` has the weights of this rank, which holds ``heads`` heads. Raises :class:`ConfigError` for a layer without
    latent vectors.
    """

    def __init__(self, kernels: KernelSet, layer: LayerWeights, latent: LatentConfig, heads: int) -> None:
        if layer.latent is None:
            raise ConfigError("a layer has no latent vectors, and the config has; expected both or none")
        self._kernels, self._weights, self._latent, self._heads = kernels, layer.latent, latent, heads
        self._columns = head_columns(latent, heads).to(layer.latent.kv_norm.device)
        prepare(kernels, layer.qkv, layer.latent.q_up, layer.latent.kv_up, layer.output)

    def __call__(self, x: ResidualStream, block: AttentionBlock, tokens: AttentionTokens) -> ResidualStream:
        """Return the stream with the contribution of attention, as :meth:`KernelSet.attention_block` does."""
        kernels = self._kernels
        q = write_heads(kernels, self._expand(x.norm(block.norm, block.eps), block.qkv), block, tokens)
        padded = attended_rows(kernels, q, None, block, tokens, kernels.paged_attention)
        attended = padded.unflatten(1, (self._heads, -1))[..., : self._latent.value_size].flatten(1)
        rows = tokens.rows.continued(kernels, x.rows)
        return contributed(kernels, rows, linear(kernels, attended, block.output), block.ranks)

    def _expand(self, normed: Tensor, projection: Weight) -> Tensor:
        """Return queries, keys and values [T, 3 Hq D] of the normalised tokens [T, H], not yet rotated."""
        kernels, weights, latent = self._kernels, self._weights, self._latent
        projected = linear(kernels, normed, projection)
        sizes = projected.shape[1] - latent.rank - latent.rotated_size, latent.rank, latent.rotated_size
        queries, vector, rotated_key = projected.split(sizes, dim=1)
        if weights.q_norm is not None and weights.q_up is not None:
            queries = linear(kernels, kernels.rms_norm(queries, weights.q_norm, _EPS), weights.q_up)
        expanded = linear(kernels, kernels.rms_norm(vector, weights.kv_norm, _EPS), weights.kv_up)
        return torch.cat((queries, expanded, rotated_key), dim=1).index_select(1, self._columns)


def head_columns(latent: LatentConfig, heads: int) -> Tensor:
    """Return the column, int64 [3 Hq D], that each dimension of queries, keys and values is read from.

    The columns hold each head's query, each head's key without its rotated dimensions and value, and the rotated dimensions
    of the key. In a stored query, the rotated dimensions follow the others, and may be in pairs of neighbours.
    """
    unrotated, rotated, size = latent.unrotated_size, latent.rotated_size, latent.head_size
    order = torch.arange(rotated)
    if latent.interleaved:  # the rotation pairs each dimension with the one half of them further on
        order = order.view(-1, 2).t().flatten()
    query = torch.cat((unrotated + order, torch.arange(unrotated)))
    expanded = heads * size + torch.arange(heads * (unrotated + latent.value_size)).view(heads, -1)
    keys, values = expanded.split((unrotated, latent.value_size), dim=1)
    first = heads * size + expanded.numel()  # of the key's rotated dimensions
    padding = torch.full((heads, size - latent.value_size), first)  # any column: what attention makes of it is dropped
    return torch.cat(
        (
            (torch.arange(heads).unsqueeze(1) * size + query).flatten(),
            torch.cat(((first + order).expand(heads, -1), keys), dim=1).flatten(),
            torch.cat((values, padding), dim=1).flatten(),
        )
    )
