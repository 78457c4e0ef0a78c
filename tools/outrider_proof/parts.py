"""What one of several ranks has of a model that is whole in memory; for models that no checkpoint holds."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.model import DecoderWeights, Eagle3Weights, EagleWeights, LayerWeights, ModelConfig, MtpWeights, Shards
from outrider.model.products import plain


def table_part(table: Tensor, shards: Shards) -> Tensor:
    """A part of the rows of a table with one for each token, as many as the first part has, zeros behind the last."""
    start, stop = shards.vocabulary.uneven(table.shape[0])
    missing = shards.vocabulary.width(table.shape[0]) - (stop - start)
    return torch.nn.functional.pad(table[start:stop], (0, 0, 0, missing)).contiguous()


def layer_part(weights: LayerWeights, config: ModelConfig, shards: Shards) -> LayerWeights:
    """A part of a layer; ``config`` is that of the whole."""
    size, heads, kv_heads = config.head_size, config.num_heads, config.num_kv_heads
    own, own_kv, inner = shards.heads(config), shards.kv_heads(config), shards.mlp.even(config.intermediate_size)

    def rows(part: Tensor, between: tuple[int, int], unit: int) -> Tensor:
        return part[between[0] * unit : between[1] * unit]

    def qkv(stacked: Tensor | None) -> Tensor | None:
        if stacked is None:
            return None
        q, k, v = stacked.split((heads * size, kv_heads * size, kv_heads * size))
        return torch.cat((rows(q, own, size), rows(k, own_kv, size), rows(v, own_kv, size)))

    def gate_up(stacked: Tensor | None) -> Tensor | None:
        return None if stacked is None else torch.cat([rows(half, inner, 1) for half in stacked.chunk(2)])

    projections, gates = qkv(plain(weights.qkv)), gate_up(plain(weights.gate_up))
    assert projections is not None
    assert gates is not None
    return replace(
        weights,
        qkv=projections,
        qkv_bias=qkv(weights.qkv_bias),
        output=plain(weights.output)[:, own[0] * size : own[1] * size].contiguous(),
        output_bias=weights.output_bias if shards.attention.rank == 0 else None,
        gate_up=gates,
        gate_up_bias=gate_up(weights.gate_up_bias),
        down=plain(weights.down)[:, inner[0] : inner[1]].contiguous(),
        down_bias=weights.down_bias if shards.mlp.rank == 0 else None,
    )


def decoder_part(weights: DecoderWeights, config: ModelConfig, shards: Shards) -> DecoderWeights:
    """A part of a decoder."""
    embedding = table_part(weights.embedding, shards)
    tied = weights.head is weights.embedding
    return replace(
        weights,
        embedding=embedding,
        head=embedding if tied else table_part(plain(weights.head), shards),
        layers=tuple(layer_part(layer, config, shards) for layer in weights.layers),
    )


def eagle_part(weights: EagleWeights, config: ModelConfig, shards: Shards) -> EagleWeights:
    """A part of an EAGLE head with an embedding of its own."""
    return replace(
        weights,
        embedding=table_part(weights.embedding, shards),
        layers=tuple(layer_part(layer, config, shards) for layer in weights.layers),
    )


def eagle3_part(weights: Eagle3Weights, config: ModelConfig, shards: Shards) -> Eagle3Weights:
    """A part of an EAGLE-3 head with an embedding of its own."""
    return replace(
        weights,
        embedding=table_part(weights.embedding, shards),
        head=table_part(plain(weights.head), shards),
        layer=layer_part(weights.layer, config, shards),
    )


def mtp_part(weights: MtpWeights, config: ModelConfig, shards: Shards) -> MtpWeights:
    """A part of a head of multi-token prediction."""
    return replace(weights, layer=layer_part(weights.layer, config, shards))
