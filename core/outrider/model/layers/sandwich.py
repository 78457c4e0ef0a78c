"""A decoder layer with norms before and after its halves (Gemma 4): ``x += norm(attention(norm(x)))``, the same with an MLP.

Values are normalised too, the MLP's activation is GELU, and a factor scales the stream after the layer. Next to the MLP there
may be routed experts. A layer may read keys and values of an earlier layer, and have an input of its own for each token. The
layer composes primitives of its kernel set, whatever blocks that has.
Letters: T new tokens, H hidden size, Hq query heads, D head size, P size of the layer's own input.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from outrider.device import AttentionTokens, ExpertsBlock, KernelSet, ResidualStream
from outrider.device.kernels.blocks import attended_rows, mixed_experts, write_heads
from outrider.device.kernels.reference.experts import gelu_mul
from outrider.device.kernels.reference.model import rotate_heads
from outrider.device.kernels.weights import linear
from outrider.model.config.model_config import ModelConfig
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.layer_weights import (
    LayerWeights,
    SandwichExpertVectors,
    attention_block,
    experts_block,
    mlp_block,
)
from outrider.model.layers.ranks import or_single_rank


class SandwichBlock(NamedTuple):
    """One half of the layer: its name, its weights, and that this module composes it."""

    name: str
    weights: Any
    implementation: str = "composed"


class SandwichExperts:
    """Routed experts next to a layer's MLP: their ``block``, whose shared expert is the MLP, and their norms."""

    def __init__(self, block: ExpertsBlock, vectors: SandwichExpertVectors, kernels: KernelSet) -> None:
        self.block = replace(block, norm=vectors.input_norm)
        self._router_norm = vectors.router_norm * vectors.router_norm.shape[0] ** -0.5
        self._vectors, self._kernels = vectors, kernels

    def combine_with_mlp(self, rows: Tensor, result: Tensor) -> Tensor:
        """Return the norm of the MLP's ``result`` [T, H] plus the norm of the experts' result.

        ``rows`` [T, H] are the residual stream before the MLP, which experts and router read, each with a norm of its own.
        """
        kernels, block, vectors = self._kernels, self.block, self._vectors
        logits = linear(kernels, kernels.rms_norm(rows, self._router_norm, block.eps), block.router)
        shares, chosen = kernels.route(logits, block.per_token, renormalize=block.renormalize)
        normed = kernels.rms_norm(rows, block.norm, block.eps)
        mixed = mixed_experts(kernels, normed, shares * vectors.factors[chosen], chosen, block)
        mixed = kernels.rms_norm(mixed, vectors.output_norm, block.eps)
        return kernels.rms_norm(result, vectors.mlp_output_norm, block.eps) + mixed


class SandwichLayer:
    """A layer of a model on one rank. ``config`` is the model's, ``weights`` have the norms of results and the factor."""

    is_recurrent = False

    def __init__(self, config: ModelConfig, weights: LayerWeights, kernels: KernelSet, *, window: int, index: int) -> None:
        single = or_single_rank(None)
        self._attention = attention_block(config, weights, window, single)
        self._experts: SandwichExperts | None = None
        if weights.router is None or weights.sandwich_experts is None:
            self._mlp = mlp_block(config, weights, single)
            half = SandwichBlock("mlp_block", self._mlp)
        else:
            mixture = experts_block(config, weights, weights.router, single, index)
            assert mixture.shared is not None  # the MLP
            self._mlp, self._experts = mixture.shared, SandwichExperts(mixture, weights.sandwich_experts, kernels)
            half = SandwichBlock("experts_block", mixture)
        self.blocks = SandwichBlock("attention_block", self._attention), half
        assert weights.attention_output_norm is not None  # such a model's layers have both
        assert weights.mlp_output_norm is not None
        self._output_norms = weights.attention_output_norm, weights.mlp_output_norm
        self._output_scale = weights.output_scale
        own = config.of_layer(index)
        self._ones = torch.ones(own.head_size, dtype=weights.mlp_norm.dtype, device=weights.mlp_norm.device)
        self._query_norm = weights.q_norm if own.shares_keys else None
        self._input = weights.per_layer_input
        self._kernels, self._eps, self._index = kernels, config.rms_eps, index

    def forward(
        self,
        x: ResidualStream,
        inputs: ForwardInput,
        cos_sin: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        captured: tuple[Tensor, ...] = (),
    ) -> ResidualStream:
        """Return the residual stream after this layer: see :meth:`outrider.model.layers.layer.DecoderLayer.forward`."""
        kernels, eps, block, mlp = self._kernels, self._eps, self._attention, self._mlp
        tokens, rows = inputs.attention_tokens(cos_sin, cache, captured), x.add()
        projected = linear(kernels, ResidualStream(kernels, rows).norm(block.norm, eps), block.qkv, block.qkv_bias)
        q = self._queries(projected, tokens)
        attended = attended_rows(kernels, q, None, block, tokens, kernels.paged_attention)
        result = linear(kernels, attended, block.output, block.output_bias)
        rows = tokens.rows.continued(kernels, rows)
        rows.add_(kernels.rms_norm(result, self._output_norms[0], eps))
        gate_up = linear(kernels, kernels.rms_norm(rows, mlp.norm, eps), mlp.gate_up)
        result = linear(kernels, gelu_mul(gate_up), mlp.down)
        if self._experts is not None:
            result = self._experts.combine_with_mlp(rows, result)
        rows.add_(kernels.rms_norm(result, self._output_norms[1], eps))
        if self._input is not None:
            assert inputs.per_layer is not None  # the decoder sets it
            gate = gelu(linear(kernels, rows, self._input.gate), approximate="tanh")
            gated = gate.mul_(tokens.rows.select(kernels, inputs.per_layer[:, self._index]))
            rows.add_(kernels.rms_norm(linear(kernels, gated, self._input.projection), self._input.norm, eps))
        return ResidualStream(kernels, rows if self._output_scale is None else rows.mul_(self._output_scale))

    def _queries(self, projected: Tensor, tokens: AttentionTokens) -> Tensor:
        """Return the rotated queries [T, Hq, D] in ``projected``. Write the keys and values in it, if the layer has some."""
        kernels, block, rotary = self._kernels, self._attention, tokens.rotary
        if self._query_norm is None:
            values = rotary.split(projected)[2]
            values.copy_(kernels.rms_norm(values, self._ones, self._eps))
            return write_heads(kernels, projected, block, tokens)
        q = kernels.rms_norm(projected.unflatten(1, (-1, self._query_norm.shape[0])), self._query_norm, self._eps)
        if block.input_scales is not None:
            q.mul_(block.input_scales[: q.shape[1]])
        rotate_heads(q, rotary.cos, rotary.sin)
        return q
