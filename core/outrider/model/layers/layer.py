"""One decoder layer: attention and a gated MLP, each with its norm, over a shared residual stream.

Letters: T new tokens, S kept rows, H hidden size, Hq query heads, Hkv KV heads, D head size, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import AttentionShape, DeltaRuleWeights, HeadNorms, KernelSet, Product, QuantizedWeight, RotaryArgs
from outrider.model.config.model_config import ModelConfig
from outrider.model.layers.cache import LayerState
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.pending import Attended, Partial, Pending, add, add_rms_norm
from outrider.model.layers.products import (
    Attending,
    OtherProduct,
    Weight,
    linear,
    linear_rope_write_cache,
    linear_silu_mul,
    multiply,
    product,
    quantized_product,
    rope_write_cache,
)
from outrider.model.layers.ranks import ModelRanks
from outrider.model.layers.recurrent import RecurrentBlock


def attention_scale(config: ModelConfig) -> float:
    """Return the factor of the dot products of queries and keys."""
    return float(config.head_size**-0.5)


def attention_shapes(config: ModelConfig, dtype: torch.dtype, *, page_size: int) -> tuple[AttentionShape, ...]:
    """Return the attention shapes of the layers of ``config``, without duplicates."""
    return tuple(
        AttentionShape(
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            page_size=page_size,
            dtype=dtype,
            scale=attention_scale(config),
            window=window,
        )
        for window in dict.fromkeys(config.windows)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFormat:
    """Format of a layer's KV pages if it isn't the model's dtype. A cached number is multiplied by the scale of its KV head.

    The scale tensors are float32 or wider. They are None if all scales are 1; kernels that write the cache at the end of a
    product can then be used.
    """

    dtype: torch.dtype
    """Dtype of the pages, one of ``CACHE_FORMATS``."""
    input_scales: Tensor | None = None
    """[Hq + 2 Hkv, 1]: factors of q, k and v before the rotary embedding. Queries are multiplied by the scale of their keys,
    keys and values by the inverse of theirs.
    """
    output_scales: Tensor | None = None
    """[Hq, 1]: factors of the attention output, the scales of the values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """Device tensors of one layer. The matrices ``qkv``, ``output``, ``gate_up`` and ``down`` may be quantized.

    A mixture of E experts has a router and stacked expert weights; quantized expert weights are [E 2 I, H] and [E H, I].
    """

    qkv: Weight
    """[(Hq + 2 Hkv) D, H]: q, k and v concatenated, then the rows [Hq D, H] of the attention's gate if the config has one. Of
    a recurrent layer: see :class:`~outrider.model.recurrent.RecurrentBlock`.
    """
    output: Weight
    """[H, Hq D]. Of a recurrent layer: [H, Hv E] for Hv value heads of size E."""
    gate_up: Weight
    """[2 I, H], or [E, 2 I, H] for experts."""
    down: Weight
    """[H, I], or [E, H, I] for experts."""
    mlp_norm: Tensor
    """[H]."""
    attention_norm: Tensor | None = None
    """[H]. None in an EAGLE head that doesn't norm its input."""
    recurrent: DeltaRuleWeights | None = None
    """Further weights of a recurrent layer. None for a layer with attention."""
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    """[D]."""
    k_norm: Tensor | None = None
    """[D]."""
    router: Weight | None = None
    """[E, H]."""
    shared_gate_up: Weight | None = None
    """[2 Is, H] of a shared expert with intermediate size Is."""
    shared_down: Weight | None = None
    """[H, Is]."""
    shared_gate: Weight | None = None
    """[1, H]."""
    cache: CacheFormat | None = None
    """Format of the layer's KV pages. None means the model's dtype."""


class DecoderLayer:
    """Attention and MLP over normed inputs. Their contributions to the residual stream stay pending until the next norm adds
    them.

    ``ranks`` hold the other slices of the layer; ``config`` has the number of heads of this rank.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        kernels: KernelSet,
        *,
        window: int,
        ranks: ModelRanks | None = None,
    ) -> None:
        self._ranks = ranks
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._window = window
        self._scale = attention_scale(config)
        self._scales_before = None if weights.cache is None else weights.cache.input_scales
        self._scales_after = None if weights.cache is None else weights.cache.output_scales
        self._head_norms: HeadNorms | None = None
        if weights.q_norm is not None and weights.k_norm is not None:
            self._head_norms = HeadNorms(weights.q_norm, weights.k_norm, config.rms_eps)
        # Without norms and scales between the qkv product and the rotary embedding, one kernel can do both.
        self._can_fuse_rope_write = self._scales_before is None and self._head_norms is None and not config.attention_gate
        # Without a reduction or scales between attention, output product and gate-up product, one kernel can do all three.
        quantized = isinstance(weights.output, QuantizedWeight) and isinstance(weights.gate_up, QuantizedWeight)
        self._can_defer_attention = quantized and self._scales_after is None and ranks is None and weights.router is None
        self.recurrent: RecurrentBlock | None = None
        if weights.recurrent is not None and config.recurrent is not None:
            self.recurrent = RecurrentBlock(config.recurrent, weights.qkv, weights.recurrent, kernels, eps=config.rms_eps)
        self._can_defer_attention = self._can_defer_attention and self.recurrent is None and not config.attention_gate

    def forward(
        self,
        pending: Pending | None,
        residual: Tensor,
        inputs: ForwardInput,
        cos_sin: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        captured: tuple[Tensor, ...] = (),
    ) -> Pending:
        """Add ``pending`` (None at the first layer) and the attention to ``residual`` [T, H] in place. Return the MLP's
        pending contribution.

        All rows are processed, whatever ``inputs.kept`` is. Each tensor [T, H] of ``captured`` receives the layer's input:
        ``residual`` with ``pending``, without the attention.
        """
        attended = self._run_attention(pending, residual, inputs.whole, cos_sin, cache)
        self._copy_residual(residual, captured)
        return self.mlp(attended, residual)

    def forward_last(
        self,
        pending: Pending | None,
        residual: Tensor,
        inputs: ForwardInput,
        cos_sin: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        captured: tuple[Tensor, ...] = (),
    ) -> tuple[Pending, Tensor]:
        """Run :meth:`forward` as the last layer of a stack, and also return the residual stream.

        The residual stream is the same tensor, or [S, H] of the kept rows. Keys and values of all T tokens are written, and
        ``captured`` receives all T rows.
        """
        attended = self._run_attention(pending, residual, inputs, cos_sin, cache)
        self._copy_residual(residual, captured)
        residual = inputs.select_rows(residual, self._kernels)
        return self.mlp(attended, residual), residual

    def _copy_residual(self, residual: Tensor, captured: tuple[Tensor, ...]) -> None:
        """Copy ``residual`` [T, H] to each of ``captured``.

        Called between :meth:`_run_attention` and :meth:`mlp`: all earlier contributions have been added then, and the
        attention's contribution is still pending. The copy therefore needs no extra computation.
        """
        for out in captured:
            self._kernels.copy_rows(residual, out)

    def _run_attention(
        self,
        pending: Pending | None,
        residual: Tensor,
        inputs: ForwardInput,
        cos_sin: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
    ) -> Attended:
        """Add ``pending`` to ``residual`` [T, H] in place. Return the pending attention contribution of the kept rows."""
        weights, kernels, eps = self._weights, self._kernels, self._config.rms_eps
        if weights.attention_norm is None:
            normed = residual if pending is None else add(pending, residual, kernels)
        elif pending is None:
            normed = kernels.rms_norm(residual, weights.attention_norm, eps)
        elif self.recurrent is not None:
            normed = add_rms_norm(pending, residual, weights.attention_norm, eps, kernels)
        elif self._can_fuse_rope_write and isinstance(pending, Product) and isinstance(weights.qkv, Tensor):
            rotary = RotaryArgs(*cos_sin, *cache, inputs.slots)
            q = kernels.norm_linear_rope_write_cache(
                pending, residual, weights.attention_norm, eps, weights.qkv, weights.qkv_bias, rotary
            )
            return self._attend_to_cache(q, inputs, cache)
        else:
            added = quantized_product(pending)
            if added is not None and isinstance(weights.qkv, QuantizedWeight):
                norm_and_weight = residual, weights.attention_norm, eps, weights.qkv, weights.qkv_bias
                if self._can_fuse_rope_write:
                    rotary = RotaryArgs(*cos_sin, *cache, inputs.slots)
                    q = kernels.norm_linear_quantized_rope_write_cache(added, *norm_and_weight, rotary)
                    return self._attend_to_cache(q, inputs, cache)
                qkv = kernels.norm_linear_quantized(added, *norm_and_weight)
                return self._attend_projected(qkv, inputs, cos_sin, cache)
            normed = add_rms_norm(pending, residual, weights.attention_norm, eps, kernels)
        return self.attend(normed, inputs, cos_sin, cache)

    def mlp(self, attended: Attended, residual: Tensor) -> Pending:
        """Add ``attended`` to ``residual`` [T, H] in place. Return the MLP's pending contribution."""
        weights = self._weights
        if isinstance(attended, Partial):
            return self._mlp_on_ranks(attended, residual)
        kernels, eps = self._kernels, self._config.rms_eps
        if isinstance(attended, Attending):
            assert isinstance(weights.gate_up, QuantizedWeight)  # required by _can_defer_attention
            norm_and_weight = residual, weights.mlp_norm, eps, weights.gate_up, weights.gate_up_bias
            operands = *attended.operands, attended.output, attended.bias, *norm_and_weight
            scale, window = self._scale, self._window
            if not isinstance(weights.down, QuantizedWeight):
                return self._down_product(kernels.attention_norm_linear_quantized(*operands, scale=scale, window=window))
            down = weights.down, weights.down_bias
            joined = kernels.attention_norm_linear_silu_mul_quantized(*operands, *down, scale=scale, window=window)
            return OtherProduct(*joined)
        if isinstance(attended, Product) and isinstance(weights.gate_up, Tensor):
            gated = kernels.norm_linear_silu_mul(
                attended, residual, weights.mlp_norm, eps, weights.gate_up, weights.gate_up_bias
            )
            return product(gated, weights.down, weights.down_bias)
        added = quantized_product(attended)
        if added is not None and isinstance(weights.gate_up, QuantizedWeight):
            gate_up = kernels.norm_linear_quantized(
                added, residual, weights.mlp_norm, eps, weights.gate_up, weights.gate_up_bias
            )
            return self._down_product(gate_up)
        normed = add_rms_norm(attended, residual, weights.mlp_norm, eps, kernels)
        gated = linear_silu_mul(kernels, normed, weights.gate_up, weights.gate_up_bias)
        return product(gated, weights.down, weights.down_bias)

    def _down_product(self, gate_up: Tensor) -> Pending:
        """Return the MLP's pending contribution for ``gate_up`` [T, 2 I], the results of both projections."""
        weights = self._weights
        if isinstance(weights.down, QuantizedWeight):
            return OtherProduct(gate_up, weights.down, weights.down_bias, gated=True)
        return product(self._kernels.silu_mul(gate_up), weights.down, weights.down_bias)

    def attend(
        self, normed: Tensor, inputs: ForwardInput, cos_sin: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor]
    ) -> Attended:
        """Return the pending attention contribution of the kept rows for normed input [T, H].

        Writes keys and values of all rows to their slots. ``cache`` of a recurrent layer are its states.
        """
        weights, kernels = self._weights, self._kernels
        if self.recurrent is not None:
            return self._contribute(self.recurrent.forward(normed, inputs, LayerState(*cache)))
        qkv = product(normed, weights.qkv, weights.qkv_bias)
        if self._can_fuse_rope_write:
            rotary = RotaryArgs(*cos_sin, *cache, inputs.slots)
            return self._attend_to_cache(linear_rope_write_cache(kernels, qkv, rotary), inputs, cache)
        return self._attend_projected(multiply(kernels, qkv), inputs, cos_sin, cache)

    def _attend_projected(
        self,
        qkv: Tensor,
        inputs: ForwardInput,
        cos_sin: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
    ) -> Attended:
        """Run :meth:`attend` from the product with ``qkv``: queries, keys, values and perhaps the output's gate."""
        kernels, rotary, gate = self._kernels, RotaryArgs(*cos_sin, *cache, inputs.slots), None
        if self._config.attention_gate:
            width = self._config.num_heads * self._config.head_size
            qkv, gate = qkv.split((qkv.shape[1] - width, width), dim=1)
        if self._head_norms is None:
            if self._scales_before is not None:
                qkv.unflatten(1, (-1, self._config.head_size)).mul_(self._scales_before)
            return self._attend_to_cache(rope_write_cache(kernels, qkv, rotary), inputs, cache, gate)
        if self._scales_before is None:
            q = kernels.head_norm_rope_write_cache(qkv, self._head_norms, rotary)
            return self._attend_to_cache(q, inputs, cache, gate)
        q, k, v = rotary.split(qkv)
        q_norm, k_norm, eps = self._head_norms
        q, k = kernels.rms_norm(q, q_norm, eps), kernels.rms_norm(k, k_norm, eps)
        for each, factor in zip((q, k, v), self._scales_before.split([each.shape[1] for each in (q, k, v)]), strict=True):
            each.mul_(factor)
        kernels.rope_write_cache(q, k, v, *rotary)
        return self._attend_to_cache(q, inputs, cache, gate)

    def _attend_to_cache(
        self, q: Tensor, inputs: ForwardInput, cache: tuple[Tensor, Tensor], gate: Tensor | None = None
    ) -> Attended:
        """Attend with ``q`` [T, Hq, D] to the cache. Return the pending contribution of the kept rows, multiplied by the
        sigmoid of ``gate`` [T, Hq D] before the output product.
        """
        if inputs.query_scales is not None:
            q = q * inputs.query_scales
        weights, q = self._weights, inputs.select_rows(q, self._kernels)
        attention = inputs.attention if inputs.kept is None else inputs.kept.attention
        if self._can_defer_attention and isinstance(weights.output, QuantizedWeight):
            return Attending((q, *cache, attention), weights.output, weights.output_bias)
        out = self._kernels.paged_attention(q, *cache, attention, scale=self._scale, window=self._window)
        if self._scales_after is not None:
            out.mul_(self._scales_after)
        attended = out.reshape(q.shape[0], -1)
        if gate is not None:
            kept = gate if inputs.kept is None else inputs.select_rows(gate.contiguous(), self._kernels)
            attended = self._kernels.sigmoid_mul(attended, kept)
        return self._contribute(attended)

    def _contribute(self, attended: Tensor) -> Product | OtherProduct | Partial:
        """Return the pending output product of ``attended`` [S, Hq D]."""
        contribution = product(attended, self._weights.output, self._weights.output_bias)
        return contribution if self._ranks is None else Partial(multiply(self._kernels, contribution), self._ranks)

    def _mlp_on_ranks(self, attended: Partial, residual: Tensor) -> Partial:
        """Run :meth:`mlp` with this rank's slice of the intermediate size, over the tokens of all data-parallel groups."""
        weights, kernels, ranks = self._weights, self._kernels, attended.ranks
        normed = add_rms_norm(attended, residual, weights.mlp_norm, self._config.rms_eps, kernels)
        gathered = ranks.gather_tokens(normed)
        gated = linear_silu_mul(kernels, gathered, weights.gate_up, weights.gate_up_bias)
        partial = linear(kernels, gated, weights.down, weights.down_bias)
        return Partial(ranks.scatter_tokens(partial, normed.shape[0]), ranks)
