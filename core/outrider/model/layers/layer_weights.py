"""LayerWeights: the tensors of one decoder layer as a checkpoint loads them, and the blocks that they make up.

Letters: H hidden size, Hq query heads, Hkv KV heads, D head size, I intermediate size, E experts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.device import (
    AttentionBlock,
    ConfigError,
    CorrectedRouting,
    DeltaRuleWeights,
    ExpertBiases,
    ExpertsBlock,
    HeadNorms,
    MlpBlock,
    QuantizedWeight,
    RankBoundary,
    RecurrentBlock,
    SplitWeight,
    Weight,
)
from outrider.device.kernels.weights import label, plain
from outrider.model.config.model_config import ModelConfig, RecurrentConfig
from outrider.model.layers.ranks import ModelRanks


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFormat:
    """Format of a layer's KV pages if it isn't the model's dtype. A cached number is multiplied by the scale of its KV head.

    The scale tensors are float32 or wider. They are None if all scales are 1; kernels that write the cache at the end of a
    product can then be used.
    """

    dtype: torch.dtype
    """Dtype of the pages, one of ``CACHE_FORMATS``."""
    input_scales: Tensor | None = None
    """Factors of q, k and v before the rotary embedding, [Hq + 2 Hkv, 1]. Queries are multiplied by the scale of their keys,
    keys and values by the inverse of theirs.
    """
    output_scales: Tensor | None = None
    """Factors of the attention output, the scales of the values, [Hq, 1]."""


class SandwichExpertVectors(NamedTuple):
    """Vectors of experts next to an MLP (Gemma 4): norm weights [H], and factors of the experts [E]."""

    router_norm: Tensor
    """Norm weight of the router's input, the residual stream before the MLP; to be divided by the square root of H."""
    input_norm: Tensor
    """Norm weight of the experts' input, the residual stream before the MLP."""
    output_norm: Tensor
    """Norm weight of the experts' result."""
    mlp_output_norm: Tensor
    """Norm weight of the MLP's result, before the experts' is added."""
    factors: Tensor
    """Factors of the experts' routing weights, float32 or wider like ``router_norm``."""


class PerLayerInputWeights(NamedTuple):
    """Weights that add a layer's own input of size P for each token to the residual stream (Gemma 4 E2B and E4B)."""

    gate: Weight
    """Product [P, H] for the gate that the input is multiplied by."""
    projection: Weight
    """Product [H, P] that follows the gate."""
    norm: Tensor
    """Norm weight [H] of the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentWeights:
    """Device tensors of the latent vectors of a layer with latent attention. The products may be quantized."""

    kv_norm: Tensor
    """Norm weight of the latent vector of keys and values."""
    kv_up: Weight
    """Product for each head's key, without its rotated dimensions, and value, of which attention takes dequantized rows."""
    q_norm: Tensor | None = None
    """Norm weight of the latent vector of queries; None if queries have none."""
    q_up: Weight | None = None
    """Product for the queries, the rotated dimensions of each head last; None if queries have no latent vector."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """Device tensors of one layer. The matrices ``qkv``, ``output``, ``gate_up`` and ``down`` may be quantized.

    A mixture of E experts has a router and stacked expert weights; quantized expert weights are [E 2 I, H] and [E H, I].
    """

    qkv: Weight
    """Product for q, k and v, [(Hq + 2 Hkv) D, H] in this order, then the rows [Hq D, H] of the attention's gate if the
    config has one. In a recurrent layer: q, k, v, the output gate, then the rows of b and a of each value head. With latent
    attention: q or its latent vector, the latent vector of k and v, then the rotated dimensions of the key. In a layer that
    shares keys and values: q alone.
    """
    output: Weight
    """Output projection [H, Hq D] of attention. In a recurrent layer: [H, Hv E] for Hv value heads of size E. With latent
    attention: D is the size of values.
    """
    gate_up: Weight
    """Gate and up projections of the MLP in one product, [2 I, H], or [E, 2 I, H] for experts."""
    down: Weight
    """Down projection of the MLP, [H, I], or [E, H, I] for experts."""
    mlp_norm: Tensor
    """Norm weight [H] of the MLP's input."""
    attention_norm: Tensor | None = None
    """Norm weight [H] of the attention's input; None in an EAGLE head that doesn't norm it."""
    recurrent: DeltaRuleWeights | None = None
    """Further weights of a recurrent layer; None for a layer with attention."""
    latent: LatentWeights | None = None
    """Further weights of latent attention; None for other attention."""
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    sinks: Tensor | None = None
    """Logit [Hq] of one more column in the softmax of each query head; None for models without it."""
    gate_up_bias: Tensor | None = None
    """Bias of ``gate_up``: [2 I], or [E, 2 I] for experts. None for models without it."""
    down_bias: Tensor | None = None
    """Bias of ``down``: [H], or [E, H] for experts. None for models without it, and for ranks that don't add it."""
    q_norm: Tensor | None = None
    """Norm weight [D] of each query head, or [Hq D] of all; None for models without it."""
    k_norm: Tensor | None = None
    """Norm weight [D] of each key head, or [Hkv D] of all; None for models without it."""
    router: Weight | None = None
    """Product [E, H] for the logits by which tokens are routed to experts; None without experts."""
    router_bias: Tensor | None = None
    """Bias [E] of ``router``; None for models without it."""
    router_correction: Tensor | None = None
    """Correction [E] or [1, E] of the router's scores, float32 or wider; None for routers without it."""
    shared_gate_up: Weight | None = None
    """Gate and up projections [2 Is, H] of a shared expert with intermediate size Is; None without one."""
    shared_down: Weight | None = None
    """Down projection [H, Is] of the shared expert; None without one."""
    shared_gate: Weight | None = None
    """Product [1, H] for the gate that scales the shared expert's output; None without a gate."""
    attention_output_norm: Tensor | None = None
    """Norm weight [H] of attention's result; None for models without it."""
    mlp_output_norm: Tensor | None = None
    """Norm weight [H] of the MLP's result, with the experts' next to it; None for models without it."""
    sandwich_experts: SandwichExpertVectors | None = None
    """Vectors of routed experts next to an MLP, which is the shared expert; None for other layers."""
    per_layer_input: PerLayerInputWeights | None = None
    """Weights for the layer's own input for each token; None for models without per-layer embeddings."""
    output_scale: Tensor | None = None
    """Factor [1] of the residual stream after the layer; None for models without it."""
    cache: CacheFormat | None = None
    """Format of the layer's KV pages. None means the model's dtype."""


def layer_blocks(
    config: ModelConfig, weights: LayerWeights, window: int, ranks: ModelRanks, index: int
) -> tuple[tuple[str, Any], tuple[str, Any]]:
    """Return the two halves of layer ``index``, each as the name of its kernel and the block.

    Raises :class:`ConfigError` if the config or the formats of the weights don't fit the layer's kind.
    """
    if weights.recurrent is None or config.recurrent is None:
        mixer: tuple[str, Any] = "attention_block", attention_block(config, weights, window, ranks)
    else:
        mixer = "recurrent_block", recurrent_block(config, config.recurrent, weights, weights.recurrent, ranks)
    if weights.router is None:
        return mixer, ("mlp_block", mlp_block(config, weights, ranks))
    return mixer, ("experts_block", experts_block(config, weights, weights.router, ranks, index))


def attention_block(config: ModelConfig, weights: LayerWeights, window: int, ranks: RankBoundary) -> AttentionBlock:
    """Return the attention block of a layer; ``config`` has the number of heads of this rank."""
    norms = None
    if weights.q_norm is not None and weights.k_norm is not None:
        norms = HeadNorms(weights.q_norm, weights.k_norm, config.rms_eps, config.joint_qk_norm)
    return AttentionBlock(
        norm=weights.attention_norm,
        eps=config.rms_eps,
        qkv=weights.qkv,
        qkv_bias=weights.qkv_bias,
        output=weights.output,
        output_bias=weights.output_bias,
        scale=config.attention_scale,
        window=window,
        sinks=weights.sinks,
        head_norms=norms,
        gated=config.attention_gate,
        input_scales=None if weights.cache is None else weights.cache.input_scales,
        output_scales=None if weights.cache is None else weights.cache.output_scales,
        ranks=ranks,
    )


def recurrent_block(
    config: ModelConfig, shape: RecurrentConfig, weights: LayerWeights, own: DeltaRuleWeights, ranks: RankBoundary
) -> RecurrentBlock:
    """Return the recurrent block of a layer, with its ``own`` weights besides the large products."""
    assert weights.attention_norm is not None  # every recurrent layer has one
    return RecurrentBlock(
        norm=weights.attention_norm,
        eps=config.rms_eps,
        projections=_without_gates(weights.qkv, 2 * shape.value_heads),
        channels=shape.channels,
        rule=own,
        output=weights.output,
        output_bias=weights.output_bias,
        ranks=ranks,
    )


def _without_gates(projection: Weight, rows: int) -> tuple[Weight, ...]:
    """Return the input projection of a recurrent layer in one part; or in two parts, the second with the last ``rows`` rows
    (the gates b and a), if these are stored in another format than the other rows.
    """
    if not isinstance(projection, SplitWeight) or projection.parts[-1].shape[0] != rows:
        return (projection,)
    *large, gates = projection.parts
    return large[0] if len(large) == 1 else SplitWeight(tuple(large)), gates


def mlp_block(config: ModelConfig, weights: LayerWeights, ranks: RankBoundary) -> MlpBlock:
    """Return the MLP block of a layer with a dense MLP."""
    return MlpBlock(
        norm=weights.mlp_norm,
        eps=config.rms_eps,
        gate_up=weights.gate_up,
        gate_up_bias=weights.gate_up_bias,
        down=weights.down,
        down_bias=weights.down_bias,
        ranks=ranks,
    )


def experts_block(config: ModelConfig, weights: LayerWeights, router: Weight, ranks: ModelRanks, index: int) -> ExpertsBlock:
    """Return the block of experts of layer ``index``. Each rank holds a slice of every expert, or some of the experts.

    Raises :class:`ConfigError` for a config without experts, and for experts that are stored in different formats.
    """
    experts, gate_up, down = config.experts, weights.gate_up, weights.down
    if experts is None:
        raise ConfigError(f"layer {index} has a router, and the config has no experts; expected both or none")
    kinds = {
        (each.format, each.activations, each.activation_group) if isinstance(each, QuantizedWeight) else None
        for each in (gate_up, down)
    }
    if len(kinds) > 1 or any(isinstance(each, SplitWeight) for each in (gate_up, down)):
        raise ConfigError(
            f"layer {index}: its experts are stored as {label(gate_up)} (gate and up) and {label(down)} "
            "(down); expected all of them in one way, with one scale for all activations where these are static: load "
            "them as plain weights (--quantized dequantize)"
        )
    shared = None
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        shared = MlpBlock(norm=weights.mlp_norm, eps=config.rms_eps, gate_up=weights.shared_gate_up, down=weights.shared_down)
    biases = None
    if experts.biases is not None and weights.gate_up_bias is not None:
        down_bias = weights.gate_up_bias.new_zeros(plain(down).shape[:2]) if weights.down_bias is None else weights.down_bias
        biases = ExpertBiases(weights.gate_up_bias, down_bias, experts.biases)
    routing = None
    if experts.routing is not None and weights.router_correction is not None:
        routing = CorrectedRouting(weights.router_correction.flatten(), **asdict(experts.routing))
    return ExpertsBlock(
        norm=weights.mlp_norm,
        eps=config.rms_eps,
        router=router,
        router_bias=weights.router_bias,
        per_token=experts.per_token,
        renormalize=experts.renormalize,
        routing=routing,
        held=ranks.shards.held_experts(experts.count),
        gate_up=gate_up,
        down=down,
        biases=biases,
        activation=experts.activation,
        shared=shared,
        shared_gate=weights.shared_gate,
        ranks=ranks,
    )
