"""Tensor-parallel parts of models that are complete in memory, for models without a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from outrider.device import DeltaRuleWeights
from outrider.model import (
    DecoderWeights,
    DFlashWeights,
    Eagle3Weights,
    EagleWeights,
    LayerWeights,
    ModelConfig,
    MtpWeights,
    RecurrentConfig,
    Shards,
)
from outrider.model.layers.products import plain

_Eagle3 = TypeVar("_Eagle3", bound=Eagle3Weights)


def table_part(table: Tensor, shards: Shards) -> Tensor:
    """Return this rank's rows of an embedding or head, [vocabulary, hidden], padded with zeros to the first rank's size."""
    start, stop = shards.vocabulary.uneven(table.shape[0])
    missing = shards.vocabulary.width(table.shape[0]) - (stop - start)
    return torch.nn.functional.pad(table[start:stop], (0, 0, 0, missing)).contiguous()


def layer_part(weights: LayerWeights, config: ModelConfig, shards: Shards) -> LayerWeights:
    """Return this rank's part of a layer; ``config`` describes the complete model."""
    size, heads, kv_heads = config.head_size, config.num_heads, config.num_kv_heads
    own, own_kv, inner = shards.heads(config), shards.kv_heads(config), shards.mlp.even(config.intermediate_size)

    def rows(part: Tensor, between: tuple[int, int], unit: int) -> Tensor:
        return part[between[0] * unit : between[1] * unit]

    def qkv(stacked: Tensor | None) -> Tensor | None:
        if stacked is None:
            return None
        widths = (heads * size, kv_heads * size, kv_heads * size)
        q, k, v, gate = stacked.split((*widths, stacked.shape[0] - sum(widths)))
        return torch.cat((rows(q, own, size), rows(k, own_kv, size), rows(v, own_kv, size), rows(gate, own, size)))

    def gate_up(stacked: Tensor | None) -> Tensor | None:
        return None if stacked is None else torch.cat([rows(half, inner, 1) for half in stacked.chunk(2)])

    output = plain(weights.output)[:, own[0] * size : own[1] * size].contiguous()
    if weights.recurrent is not None and config.recurrent is not None:
        projections: Tensor | None
        projections, output, recurrent = _recurrent_part(weights, weights.recurrent, config.recurrent, shards)
        weights = replace(weights, recurrent=recurrent)
    else:
        projections = qkv(plain(weights.qkv))
    assert projections is not None
    if weights.router is None:
        gates, down = gate_up(plain(weights.gate_up)), plain(weights.down)[:, inner[0] : inner[1]].contiguous()
        assert gates is not None
    else:
        gates, down = _experts_part(plain(weights.gate_up), plain(weights.down), shards)
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        stacked = _experts_part(plain(weights.shared_gate_up)[None], plain(weights.shared_down)[None], shards)
        weights = replace(weights, shared_gate_up=stacked[0][0], shared_down=stacked[1][0])
    if weights.cache is not None and weights.cache.input_scales is not None and weights.cache.output_scales is not None:
        q, k, v = weights.cache.input_scales.split((heads, kv_heads, kv_heads))
        before = torch.cat((rows(q, own, 1), rows(k, own_kv, 1), rows(v, own_kv, 1)))
        weights = replace(
            weights,
            cache=replace(weights.cache, input_scales=before, output_scales=rows(weights.cache.output_scales, own, 1)),
        )
    return replace(
        weights,
        qkv=projections,
        qkv_bias=qkv(weights.qkv_bias),
        output=output,
        output_bias=weights.output_bias if shards.attention.rank == 0 else None,
        gate_up=gates,
        gate_up_bias=gate_up(weights.gate_up_bias),
        down=down,
        down_bias=weights.down_bias if shards.mlp.rank == 0 else None,
    )


def _recurrent_part(
    weights: LayerWeights, recurrent: DeltaRuleWeights, config: RecurrentConfig, shards: Shards
) -> tuple[Tensor, Tensor, DeltaRuleWeights]:
    """Return this rank's part of a recurrent layer: the product of q, k, v and gates, the output, and the other weights."""
    first, last = shards.attention.even(config.key_heads)
    keys = slice(first * config.key_size, last * config.key_size)
    repeats = config.value_heads // config.key_heads
    heads = slice(first * repeats, last * repeats)
    values = slice(heads.start * config.value_size, heads.stop * config.value_size)
    widths = (config.key_width, config.key_width, config.value_width)

    def channels(stacked: Tensor) -> list[Tensor]:
        return [part[own] for part, own in zip(stacked.split(widths), (keys, keys, values), strict=True)]

    mixed, gate, b, a = plain(weights.qkv).split((config.channels, config.value_width, *[config.value_heads] * 2))
    own = replace(
        recurrent,
        convolution=torch.cat(channels(recurrent.convolution)),
        a_log=recurrent.a_log[heads],
        dt_bias=recurrent.dt_bias[heads],
    )
    return torch.cat((*channels(mixed), gate[values], b[heads], a[heads])), plain(weights.output)[:, values].contiguous(), own


def _experts_part(gate_up: Tensor, down: Tensor, shards: Shards) -> tuple[Tensor, Tensor]:
    """Return this rank's inner columns of stacked MLPs: (gate and up, down)."""
    first, last = shards.mlp.even(down.shape[2])
    gates = torch.cat([half[:, first:last] for half in gate_up.chunk(2, dim=1)], dim=1)
    return gates, down[:, :, first:last].contiguous()


def decoder_part(weights: DecoderWeights, config: ModelConfig, shards: Shards) -> DecoderWeights:
    """Return this rank's part of a decoder's weights."""
    embedding = table_part(weights.embedding, shards)
    tied = weights.head is weights.embedding
    return replace(
        weights,
        embedding=embedding,
        head=embedding if tied else table_part(plain(weights.head), shards),
        layers=tuple(layer_part(layer, config, shards) for layer in weights.layers),
    )


def eagle_part(weights: EagleWeights, config: ModelConfig, shards: Shards) -> EagleWeights:
    """Return this rank's part of an EAGLE head with its own embedding."""
    return replace(
        weights,
        embedding=table_part(weights.embedding, shards),
        layers=tuple(layer_part(layer, config, shards) for layer in weights.layers),
    )


def eagle3_part(weights: _Eagle3, config: ModelConfig, shards: Shards) -> _Eagle3:
    """Return this rank's part of an EAGLE-3 or P-EAGLE head with its own embedding."""
    return replace(
        weights,
        embedding=table_part(weights.embedding, shards),
        head=None if weights.head is None else table_part(plain(weights.head), shards),
        layer=layer_part(weights.layer, config, shards),
        later=tuple(layer_part(layer, config, shards) for layer in weights.later),
    )


def dflash_part(weights: DFlashWeights, config: ModelConfig, shards: Shards) -> DFlashWeights:
    """Return this rank's part of a DFlash head."""
    return replace(weights, layers=tuple(layer_part(layer, config, shards) for layer in weights.layers))


def mtp_part(weights: MtpWeights, config: ModelConfig, shards: Shards) -> MtpWeights:
    """Return this rank's part of an MTP head."""
    return replace(weights, layer=layer_part(weights.layer, config, shards))
