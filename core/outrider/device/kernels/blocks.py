"""The blocks of a layer: attention, MLP, experts and the recurrent block, each composed of primitives by default.

A block takes the residual stream of the block before it and returns the stream with its own contribution pending. A backend
overrides a block to fuse its kernels.

Letters: T new tokens, S kept rows, H hidden size, Hq query heads, Hkv key heads, D head size, I intermediate size. E experts,
C channels and Hv value heads of size Ev of a recurrent layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.device.kernels.bookkeeping_kernels import BookkeepingKernels
from outrider.device.kernels.latent_kernels import LatentKernels
from outrider.device.kernels.metadata import (
    AttentionMetadata,
    CorrectedRouting,
    ExpertActivation,
    ExpertBiases,
    HeadNorms,
    RotaryArgs,
    composes,
)
from outrider.device.kernels.model_kernels import ModelKernels
from outrider.device.kernels.recurrent_kernels import DeltaRuleWeights, RecurrentBatch, RecurrentKernels
from outrider.device.kernels.residual import SINGLE_RANK, Computed, RankBoundary, ResidualStream
from outrider.device.kernels.weights import QuantizedWeight, Weight, linear, plain

Attend = Callable[..., Tensor]
"""A replacement of ``KernelSet.paged_attention``, with the same operands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBlock:
    """Weights and constants of an attention block, for a kernel set's :meth:`BlockKernels.attention_block`."""

    norm: Tensor | None
    """[H]: weight of the norm before the block. None if the block reads the residual stream itself."""
    eps: float
    qkv: Weight
    """[(Hq + 2 Hkv) D, H]: rows of queries, keys and values in this order; of a gated block then those of the gate
    [Hq D, H].
    """
    output: Weight
    """[H, Hq D]: weight of the product that follows attention."""
    scale: float
    """Factor of the dot products of queries and keys."""
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    window: int = 0
    """How many of the latest tokens, itself included, a token sees; 0: all."""
    sinks: Tensor | None = None
    """[Hq], in float32 or wider: see ``KernelSet.paged_attention``."""
    head_norms: HeadNorms | None = None
    gated: bool = False
    """True: the attention output is multiplied by the sigmoid of the last Hq D columns of the product with ``qkv``."""
    input_scales: Tensor | None = None
    """[Hq + 2 Hkv, 1]: factors of q, k and v before the rotation, of a quantised cache."""
    output_scales: Tensor | None = None
    """[Hq, 1]: factors of the attention output, of a quantised cache."""
    ranks: RankBoundary = SINGLE_RANK

    @property
    def attention_options(self) -> dict[str, Any]:
        """Return the keyword operands of ``KernelSet.paged_attention``; ``sinks`` only if the block has them."""
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        return {"scale": self.scale, "window": self.window, **sinks}


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpBlock:
    """Weights of an MLP block: a gated MLP with the norm before it."""

    norm: Tensor
    """[H]: weight of the norm before the block."""
    eps: float
    gate_up: Weight
    """[2 I, H]: rows of the gate, then rows of up."""
    down: Weight
    """[H, I]: weight of the product that follows ``silu_mul``."""
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    ranks: RankBoundary = SINGLE_RANK


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsBlock:
    """Weights of a block of routed experts, and of the expert that all tokens share, if there is one."""

    norm: Tensor
    """[H]: weight of the norm before the block."""
    eps: float
    router: Weight
    """[E, H]: weight of the product that gives the logits of the experts."""
    router_bias: Tensor | None = None
    """[E]: bias of the product with ``router``."""
    per_token: int
    """Number of experts that compute each token."""
    renormalize: bool
    """True if the weights of a token's experts are scaled to sum 1, as in ``KernelSet.route``."""
    routing: CorrectedRouting | None = None
    """The choice of experts by corrected scores; None for a choice by a softmax alone."""
    held: tuple[int, int] | None = None
    """First and last (exclusive) expert of this rank, if ranks divide the experts; E is their number in the stacks below."""
    gate_up: Weight
    """[E, 2 I, H], or quantised [E 2 I, H]: for each expert rows of the gate, then rows of up."""
    down: Weight
    """[E, H, I], or quantised [E H, I]: for each expert the weight of the product that follows ``silu_mul``."""
    biases: ExpertBiases | None = None
    """Biases of the routed experts, whose activation replaces ``silu_mul``."""
    activation: ExpertActivation = "silu"
    """The activation of routed experts without biases."""
    shared: MlpBlock | None = None
    """The shared expert. Its ``norm`` is the block's."""
    shared_gate: Weight | None = None
    """[1, H]: the sigmoid of its product with a token is the factor of the shared expert's output; None: the factor is 1."""
    ranks: RankBoundary = SINGLE_RANK

    @property
    def route_options(self) -> dict[str, Any]:
        """Return further keyword operands of ``KernelSet.route``: those that the block has, since kernels may not know
        others.
        """
        options = {"held": self.held, "routing": self.routing}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def expert_options(self) -> dict[str, Any]:
        """Return the keyword operands of both kernels of experts: those that the block has, since kernels may not know
        others.
        """
        activation = {} if self.activation == "silu" else {"activation": self.activation}
        return activation if self.biases is None else {"biases": self.biases}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentBlock:
    """Weights of a recurrent block, for a kernel set's :meth:`BlockKernels.recurrent_block`."""

    norm: Tensor
    """[H]: weight of the norm before the block."""
    eps: float
    projections: tuple[Weight, ...]
    """[C + Hv Ev + 2 Hv, H]: q, k, v, the output gate, b and a. As two weights, the second has the rows of b and a alone."""
    channels: int
    """Number C of channels of the short convolution: the columns of q, k and v together."""
    rule: DeltaRuleWeights
    output: Weight
    """[H, Hv Ev]: weight of the product that follows the gated norm."""
    output_bias: Tensor | None = None
    ranks: RankBoundary = SINGLE_RANK


class LayerRows(NamedTuple):
    """The rows of a layer's input that continue after attention, and the tensors that receive the input itself."""

    kept: Tensor | None = None
    """int64 [S]: indices, among the T rows, of the rows that continue; None: all T."""
    captured: tuple[Tensor, ...] = ()
    """[T, H] each: the block copies the complete residual stream at its input to them."""

    def select(self, kernels: BookkeepingKernels, x: Tensor) -> Tensor:
        """Return the rows of ``x`` [T, ...] that continue."""
        return x if self.kept is None else kernels.gather_rows(x, self.kept)

    def continued(self, kernels: BookkeepingKernels, rows: Tensor) -> Tensor:
        """Copy the complete residual stream ``rows`` [T, H] to ``captured``; return the rows that continue."""
        for out in self.captured:
            kernels.copy_rows(rows, out)
        return self.select(kernels, rows)


class AttentionTokens(NamedTuple):
    """The T tokens of an attention block: the batch, their rotation and cache slots, and the rows that continue."""

    attention: AttentionMetadata
    """Description of the batch, with the rows that continue as its new tokens."""
    rotary: RotaryArgs
    """Rotation and cache slots of all T tokens, because the keys and values of all are written."""
    rows: LayerRows
    query_scales: Tensor | None = None
    """[T, 1, 1]: factors of the rotated queries; None: no factors."""


class RecurrentWindow(NamedTuple):
    """At most N verified tokens of each of R rows of one recurrent layer (:class:`~outrider.device.RecurrentKernels`)."""

    inputs: Tensor
    """[R, N, C]: inputs of the short convolution."""
    updates: Tensor
    """[R, 2, N, Hk D + Hv Ev + Hv]: changes of the delta rule's state."""


class RecurrentTokens(NamedTuple):
    """The T tokens of a recurrent block, and the states of the B sequences, which the block reads and writes."""

    batch: RecurrentBatch
    convolution: Tensor
    """[R, K - 1, C]: in each of R state rows, the latest inputs of the short convolution, the oldest first."""
    delta: Tensor
    """[R, Hv, D, Ev]: in each of R state rows, the state of the delta rule."""
    rows: LayerRows = LayerRows()
    decodes: bool = False
    """True if each sequence has few tokens: the block then calls ``gated_delta_rule``, else ``chunk_gated_delta_rule``."""
    window: RecurrentWindow | None = None
    """The verified tokens that the states lack, which the block reads and writes; None: the block writes the states."""


PRODUCTS = ("linear", "linear_quantized")
NORMS = ("rms_norm", "add_rms_norm")
RECURRENCES = ("short_convolution", "gated_delta_rule", "chunk_gated_delta_rule")


class BlockKernels(LatentKernels, RecurrentKernels):
    """Blocks of a layer, which the forward pass of a model calls in order. The defaults compose primitives.

    Rules and letters: :class:`~outrider.device.KernelSet`. A block adds the pending contribution of its stream to ``rows``
    [T, H] in place. It returns a stream with its own contribution pending: [T, H], or [S, H] of the rows that continue.
    """

    @composes(*PRODUCTS, *NORMS, "rope_write_cache", "head_norm_rope_write_cache", "paged_attention", "sigmoid_mul")
    def attention_block(
        self, x: ResidualStream, block: AttentionBlock, tokens: AttentionTokens, *, attend: Attend | None = None
    ) -> ResidualStream:
        """Attend with the norm of the stream: project to queries, keys and values, rotate, write the cache, attend, project.

        ``attend`` computes attention in place of :meth:`paged_attention`: a wrapper of kernels passes its own.
        """
        normed = x.norm(block.norm, block.eps)
        qkv, gate = split_gate(linear(self, normed, block.qkv, block.qkv_bias), block)
        q = write_heads(self, qkv, block, tokens)
        attended = attended_rows(self, q, gate, block, tokens, attend or self.paged_attention)
        rows = tokens.rows.continued(self, x.rows)
        return contributed(self, rows, linear(self, attended, block.output, block.output_bias), block.ranks)

    @composes(*PRODUCTS, *NORMS, "silu_mul")
    def mlp_block(self, x: ResidualStream, block: MlpBlock) -> ResidualStream:
        """Multiply the norm of the stream by gate and up, apply :meth:`silu_mul`, multiply by down."""
        normed = block.ranks.gather_tokens(x.norm(block.norm, block.eps))
        value = self._mlp(normed, block)
        return contributed(self, x.rows, block.ranks.scatter_tokens(value, x.rows.shape[0]), block.ranks)

    @composes(*PRODUCTS, *NORMS, "silu_mul", "route", "experts", "experts_quantized")
    def experts_block(self, x: ResidualStream, block: ExpertsBlock) -> ResidualStream:
        """Route the norm of the stream to experts, and add the shared expert, weighted by the sigmoid of its gate."""
        return experts_stream(self, x, block, self._mlp)

    @composes(*PRODUCTS, *NORMS, *RECURRENCES, "gated_rms_norm")
    def recurrent_block(self, x: ResidualStream, block: RecurrentBlock, tokens: RecurrentTokens) -> ResidualStream:
        """Mix the norm of the stream with the states by a short convolution and a gated delta rule (Yang et al. 2024)."""
        normed = x.norm(block.norm, block.eps)
        projected = [linear(self, normed, each) for each in block.projections]
        heads = gated_heads(self, *recurrent_heads(self, projected, block, tokens), block, tokens)
        rows = tokens.rows.continued(self, x.rows)
        return contributed(self, rows, linear(self, heads, block.output, block.output_bias), block.ranks)

    def _add_gated(self, value: Tensor, result: Tensor, x: Tensor, gate: Weight) -> None:
        """Add a shared expert's ``result`` [T, H], times the sigmoid of the product of ``x`` [T, H] and ``gate`` [1, H], to
        ``value`` [T, H].
        """
        value.add_(torch.sigmoid(linear(self, x, gate)) * result)

    def _router_logits(self, x: Tensor, block: ExpertsBlock) -> Tensor:
        """Return the logits [T, E] of the experts for ``x`` [T, H], in the dtype of the router, which may be wider."""
        router = block.router
        return linear(self, x.to(router.dtype) if isinstance(router, Tensor) else x, router, block.router_bias)

    def _mlp(self, x: Tensor, block: MlpBlock) -> Tensor:
        gated = self.silu_mul(linear(self, x, block.gate_up, block.gate_up_bias))
        return linear(self, gated, block.down, block.down_bias)


def split_gate(made: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor | None]:
    """Split the product with ``block.qkv`` into queries, keys and values [T, (Hq + 2 Hkv) D] and the gate [T, Hq D]."""
    if not block.gated:
        return made, None
    width = block.output.shape[1]
    qkv, gate = made.split((made.shape[1] - width, width), dim=1)
    return qkv, gate


def write_heads(kernels: ModelKernels, qkv: Tensor, block: AttentionBlock, tokens: AttentionTokens) -> Tensor:
    """Normalise and scale the heads of ``qkv`` [T, (Hq + 2 Hkv) D], rotate them, write the cache → queries [T, Hq, D]."""
    scales, rotary = block.input_scales, tokens.rotary
    if scales is None:
        return kernels.head_norm_rope_write_cache(qkv, block.head_norms, rotary)
    if block.head_norms is None:
        qkv.unflatten(1, (-1, rotary.k_cache.shape[3])).mul_(scales)
        return kernels.head_norm_rope_write_cache(qkv, None, rotary)
    q, k, v = rotary.split(qkv)
    norms, normalize = block.head_norms, partial(block.head_norms.normalize, kernels.rms_norm)
    q, k = normalize(q, norms.queries), normalize(k, norms.keys)
    for heads, factors in zip((q, k, v), scales.split([each.shape[1] for each in (q, k, v)]), strict=True):
        heads.mul_(factors)
    kernels.rope_write_cache(q, k, v, *rotary)
    return q


def continued_queries(kernels: BlockKernels, q: Tensor, tokens: AttentionTokens) -> Tensor:
    """Return the rows of ``q`` [T, Hq, D] that continue, times ``tokens.query_scales`` if there are any → [S, Hq, D]."""
    return tokens.rows.select(kernels, q if tokens.query_scales is None else q * tokens.query_scales)


def attended_rows(
    kernels: BlockKernels, q: Tensor, gate: Tensor | None, block: AttentionBlock, tokens: AttentionTokens, attend: Attend
) -> Tensor:
    """Attend with the rows of ``q`` [T, Hq, D] that continue, scale and gate the result → [S, Hq D]."""
    q, caches = continued_queries(kernels, q, tokens), tokens.rotary[2:4]
    out = attend(q, *caches, tokens.attention, **block.attention_options)
    if block.output_scales is not None:
        out.mul_(block.output_scales)
    attended = out.reshape(q.shape[0], -1)
    if gate is None:
        return attended
    return kernels.sigmoid_mul(attended, tokens.rows.select(kernels, gate))


def routed(kernels: BlockKernels, x: ResidualStream, block: ExpertsBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised tokens [T, H], and the shares and numbers of each token's experts [T, C]."""
    normed = block.ranks.gather_tokens(x.norm(block.norm, block.eps))
    logits = kernels._router_logits(normed, block)
    return normed, *kernels.route(logits, block.per_token, renormalize=block.renormalize, **block.route_options)


def mixed_experts(kernels: ModelKernels, normed: Tensor, shares: Tensor, chosen: Tensor, block: ExpertsBlock) -> Tensor:
    """Return the sums [T, H] of the results of each token's experts for ``normed`` [T, H], weighted by ``shares`` [T, C]."""
    if isinstance(block.gate_up, QuantizedWeight) and isinstance(block.down, QuantizedWeight):
        return kernels.experts_quantized(normed, shares, chosen, block.gate_up, block.down, **block.expert_options)
    return kernels.experts(normed, shares, chosen, plain(block.gate_up), plain(block.down), **block.expert_options)


def experts_stream(
    kernels: BlockKernels, x: ResidualStream, block: ExpertsBlock, mlp: Callable[[Tensor, MlpBlock], Tensor]
) -> ResidualStream:
    """Compute a block of experts with the primitives of ``kernels``, and the shared expert, if there is one, with ``mlp``."""
    normed, shares, chosen = routed(kernels, x, block)
    value = mixed_experts(kernels, normed, shares, chosen, block)
    if block.shared is not None and block.shared_gate is not None:
        kernels._add_gated(value, mlp(normed, block.shared), normed, block.shared_gate)
    elif block.shared is not None:
        value.add_(mlp(normed, block.shared))
    return contributed(kernels, x.rows, block.ranks.scatter_tokens(value, x.rows.shape[0]), block.ranks)


def contributed(kernels: BlockKernels, rows: Tensor, value: Tensor, ranks: RankBoundary) -> ResidualStream:
    """Return the stream ``rows`` to which ``value``, or this rank's part of it, is to be added."""
    return ResidualStream(kernels, rows, Computed(kernels, value, ranks))


def recurrent_heads(
    kernels: BlockKernels, projected: Sequence[Tensor], block: RecurrentBlock, tokens: RecurrentTokens
) -> tuple[Tensor, Tensor]:
    """Return the results of the delta rule, and the gate of :func:`gated_heads`, each [T, Hv, Ev].

    ``projected`` has the product [T, ...] of the normalised rows and each weight of ``block.projections``.
    """
    sizes = block.channels, block.output.shape[1], 2 * block.rule.a_log.shape[0]
    mixed, gate, *rest = projected[0].split(sizes[: 4 - len(projected)], dim=1)
    gates = rest[0] if rest else projected[1]
    rule, (inputs, updates) = block.rule, tokens.window or (None, None)
    convolved = kernels.short_convolution(mixed, rule.convolution, tokens.convolution, tokens.batch, inputs)
    operands = convolved, gates, rule.a_log, rule.dt_bias, tokens.delta, tokens.batch
    heads = kernels.gated_delta_rule(*operands, updates) if tokens.decodes else kernels.chunk_gated_delta_rule(*operands)
    return heads, gate.unflatten(1, heads.shape[1:])


def gated_heads(kernels: BlockKernels, heads: Tensor, gate: Tensor, block: RecurrentBlock, tokens: RecurrentTokens) -> Tensor:
    """Return the gated norms of ``heads`` in the rows that continue [S, Hv Ev], before the output product."""
    return tokens.rows.select(kernels, kernels.gated_rms_norm(heads, gate, block.rule.norm, block.eps).flatten(1))
