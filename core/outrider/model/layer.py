"""One decoder layer: attention and a gated MLP, each with its norm, over a shared residual stream.

Letters: T new tokens, S kept rows, H hidden size, Hq query heads, Hkv key heads, D head size, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import AttentionShape, HeadNorms, KernelSet, Product, QuantizedWeight, RotaryArgs
from outrider.model.config import ModelConfig
from outrider.model.inputs import ForwardInput
from outrider.model.pending import Attended, Partial, Pending, add, add_rms_norm
from outrider.model.products import (
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
from outrider.model.ranks import ModelRanks


def attention_scale(config: ModelConfig) -> float:
    """The factor of the products of queries and keys."""
    return float(config.head_size**-0.5)


def attention_shapes(config: ModelConfig, dtype: torch.dtype, *, page_size: int) -> tuple[AttentionShape, ...]:
    """The attentions of the layers of ``config``, each kind once."""
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
    """What the pages of a layer hold in place of plain numbers: ``dtype``, one of ``CACHE_FORMATS``, and the scales.

    A cached number stands for itself times its key head's scale. ``before`` [Hq + 2 Hkv, 1] is what queries, keys and
    values are multiplied by ahead of rotation: queries by the scale of the keys that they meet, keys and
    values by one over theirs.
    ``after`` [Hq, 1] is what attention's result is multiplied by, the scale of the values. In float32 or wider; None where
    all of them are 1, and kernels that write the cache at the end of a product can be used.
    """

    dtype: torch.dtype
    before: Tensor | None = None
    after: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """Tensors of one layer. What is read together is stored together: q, k, v in ``qkv``, gate and up in ``gate_up``.

    ``qkv`` [(Hq + 2 Hkv) D, H], ``output`` [H, Hq D], ``gate_up`` [2 I, H], ``down`` [H, I], the norms [H], ``q_norm``
    and ``k_norm`` [D]. The first four may be quantised. ``attention_norm`` is None in an EAGLE head that doesn't norm the
    input of its layer.

    A mixture of E experts has a ``router`` [E, H], ``gate_up`` [E, 2 I, H] and ``down`` [E, H, I]; with a shared expert of
    inner size Is also ``shared_gate_up`` [2 Is, H], ``shared_down`` [H, Is] and ``shared_gate`` [1, H]. Quantised experts are
    [E 2 I, H] and [E H, I].

    ``cache``: how the layer's pages hold keys and values; None: plainly.
    """

    qkv: Weight
    output: Weight
    gate_up: Weight
    down: Weight
    mlp_norm: Tensor
    attention_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    router: Weight | None = None
    shared_gate_up: Weight | None = None
    shared_down: Weight | None = None
    shared_gate: Weight | None = None
    cache: CacheFormat | None = None


class DecoderLayer:
    """Attention and MLP over normed input. What each adds to the residual stream is left pending for the norm after it.

    ``ranks``: those that hold the other parts of the layer; ``config`` has the heads that are here.
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
        self._before = None if weights.cache is None else weights.cache.before
        self._after = None if weights.cache is None else weights.cache.after
        self._head_norms: HeadNorms | None = None
        if weights.q_norm is not None and weights.k_norm is not None:
            self._head_norms = HeadNorms(weights.q_norm, weights.k_norm, config.rms_eps)
        # Nothing comes between the product of queries, keys and values and their rotation: one kernel may do both.
        self._direct = self._before is None and self._head_norms is None
        # Nor between attention, the product of what it gives and the MLP's first.
        quantized = isinstance(weights.output, QuantizedWeight) and isinstance(weights.gate_up, QuantizedWeight)
        self._joined = quantized and self._after is None and ranks is None and weights.router is None

    def forward(
        self,
        pending: Pending | None,
        residual: Tensor,
        inputs: ForwardInput,
        cos_sin: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        entering: tuple[Tensor, ...] = (),
    ) -> Pending:
        """Add ``pending`` (None at the first layer) and the attention to ``residual`` [T, H] in place.

        Returns what the MLP adds, pending. Every row goes on, whichever ``inputs`` keep. ``entering``: where the stream as
        it enters the layer is copied to, [T, H] each: ``residual`` with ``pending`` and without the attention.
        """
        attended = self._attended(pending, residual, inputs.whole, cos_sin, cache)
        self._copy(residual, entering)
        return self.mlp(attended, residual)

    def forward_last(
        self,
        pending: Pending | None,
        residual: Tensor,
        inputs: ForwardInput,
        cos_sin: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        entering: tuple[Tensor, ...] = (),
    ) -> tuple[Pending, Tensor]:
        """:meth:`forward` of the last layer of a stack, with the residual stream behind it: the same tensor, or [S, H] of the
        rows that ``inputs`` keep. Keys and values of all T tokens are written, and what enters the layer.
        """
        attended = self._attended(pending, residual, inputs, cos_sin, cache)
        self._copy(residual, entering)
        residual = inputs.keep(residual, self._kernels)
        return self.mlp(attended, residual), residual

    def _copy(self, residual: Tensor, entering: tuple[Tensor, ...]) -> None:
        """Copy ``residual`` [T, H] between :meth:`_attended` and :meth:`mlp`: the kernel that began the one has added all
        that was pending, and what the attention adds is pending until the other. So nothing is computed for the copy.
        """
        for out in entering:
            self._kernels.copy_rows(residual, out)

    def _attended(
        self,
        pending: Pending | None,
        residual: Tensor,
        inputs: ForwardInput,
        cos_sin: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
    ) -> Attended:
        """Add ``pending`` to ``residual`` [T, H] in place; what attention adds to the rows that are kept, pending."""
        weights, kernels, eps = self._weights, self._kernels, self._config.rms_eps
        if weights.attention_norm is None:
            normed = residual if pending is None else add(pending, residual, kernels)
        elif pending is None:
            normed = kernels.rms_norm(residual, weights.attention_norm, eps)
        elif self._direct and isinstance(pending, Product) and isinstance(weights.qkv, Tensor):
            rotary = RotaryArgs(*cos_sin, *cache, inputs.slots)
            q = kernels.norm_linear_rope_write_cache(
                pending, residual, weights.attention_norm, eps, weights.qkv, weights.qkv_bias, rotary
            )
            return self._look_back(q, inputs, cache)
        else:
            added = quantized_product(pending)
            if added is not None and isinstance(weights.qkv, QuantizedWeight):
                own = residual, weights.attention_norm, eps, weights.qkv, weights.qkv_bias
                if self._direct:
                    rotary = RotaryArgs(*cos_sin, *cache, inputs.slots)
                    q = kernels.norm_linear_quantized_rope_write_cache(added, *own, rotary)
                    return self._look_back(q, inputs, cache)
                qkv = kernels.norm_linear_quantized(added, *own)
                return self._attend(qkv, inputs, cos_sin, cache)
            normed = add_rms_norm(pending, residual, weights.attention_norm, eps, kernels)
        return self.attend(normed, inputs, cos_sin, cache)

    def mlp(self, attended: Attended, residual: Tensor) -> Pending:
        """Add ``attended`` to ``residual`` [T, H] in place; returns what the MLP adds, pending."""
        weights = self._weights
        if isinstance(attended, Partial):
            return self._mlp_in_part(attended, residual)
        kernels, eps = self._kernels, self._config.rms_eps
        if isinstance(attended, Attending):
            assert isinstance(weights.gate_up, QuantizedWeight)  # else there is none
            own = residual, weights.mlp_norm, eps, weights.gate_up, weights.gate_up_bias
            operands = *attended.operands, attended.output, attended.bias, *own
            scale, window = self._scale, self._window
            if not isinstance(weights.down, QuantizedWeight):
                return self._gated(kernels.attention_norm_linear_quantized(*operands, scale=scale, window=window))
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
            both = kernels.norm_linear_quantized(
                added, residual, weights.mlp_norm, eps, weights.gate_up, weights.gate_up_bias
            )
            return self._gated(both)
        normed = add_rms_norm(attended, residual, weights.mlp_norm, eps, kernels)
        gated = linear_silu_mul(kernels, normed, weights.gate_up, weights.gate_up_bias)
        return product(gated, weights.down, weights.down_bias)

    def _gated(self, both: Tensor) -> Pending:
        """What the MLP adds for ``both`` [T, 2 I], gate and up, pending."""
        weights = self._weights
        if isinstance(weights.down, QuantizedWeight):
            return OtherProduct(both, weights.down, weights.down_bias, gated=True)
        return product(self._kernels.silu_mul(both), weights.down, weights.down_bias)

    def attend(
        self, normed: Tensor, inputs: ForwardInput, cos_sin: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor]
    ) -> Attended:
        """What attention adds for normed input [T, H] to the rows that ``inputs`` keep, pending; writes keys and values of
        all to their slots.
        """
        weights, kernels = self._weights, self._kernels
        made = product(normed, weights.qkv, weights.qkv_bias)
        if self._direct:
            rotary = RotaryArgs(*cos_sin, *cache, inputs.slots)
            return self._look_back(linear_rope_write_cache(kernels, made, rotary), inputs, cache)
        return self._attend(multiply(kernels, made), inputs, cos_sin, cache)

    def _attend(
        self, made: Tensor, inputs: ForwardInput, cos_sin: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor]
    ) -> Attended:
        """:meth:`attend` with queries, keys and values as the product made them, [T, (Hq + 2 Hkv) D]."""
        kernels, rotary = self._kernels, RotaryArgs(*cos_sin, *cache, inputs.slots)
        if self._head_norms is None:
            if self._before is not None:
                made.view(made.shape[0], -1, self._config.head_size).mul_(self._before)
            return self._look_back(rope_write_cache(kernels, made, rotary), inputs, cache)
        if self._before is None:
            return self._look_back(kernels.head_norm_rope_write_cache(made, self._head_norms, rotary), inputs, cache)
        q, k, v = rotary.split(made)
        of_queries, of_keys, eps = self._head_norms
        q, k = kernels.rms_norm(q, of_queries, eps), kernels.rms_norm(k, of_keys, eps)
        for each, factor in zip((q, k, v), self._before.split([each.shape[1] for each in (q, k, v)]), strict=True):
            each.mul_(factor)
        kernels.rope_write_cache(q, k, v, *rotary)
        return self._look_back(q, inputs, cache)

    def _look_back(self, q: Tensor, inputs: ForwardInput, cache: tuple[Tensor, Tensor]) -> Attended:
        """Attention of ``q`` [T, Hq, D] over the cache; what it adds to the rows that ``inputs`` keep, pending."""
        weights, q = self._weights, inputs.keep(q, self._kernels)
        attention = inputs.attention if inputs.kept is None else inputs.kept.attention
        if self._joined and isinstance(weights.output, QuantizedWeight):
            return Attending((q, *cache, attention), weights.output, weights.output_bias)
        out = self._kernels.paged_attention(q, *cache, attention, scale=self._scale, window=self._window)
        if self._after is not None:
            out.mul_(self._after)
        made = product(out.reshape(q.shape[0], -1), weights.output, weights.output_bias)
        return made if self._ranks is None else Partial(multiply(self._kernels, made), self._ranks)

    def _mlp_in_part(self, attended: Partial, residual: Tensor) -> Partial:
        """:meth:`mlp` with this rank's part of the inner size, over the tokens of all data-parallel groups."""
        weights, kernels, ranks = self._weights, self._kernels, attended.ranks
        normed = add_rms_norm(attended, residual, weights.mlp_norm, self._config.rms_eps, kernels)
        gathered = ranks.gather_tokens(normed)
        gated = linear_silu_mul(kernels, gathered, weights.gate_up, weights.gate_up_bias)
        made = linear(kernels, gated, weights.down, weights.down_bias)
        return Partial(ranks.scatter_tokens(made, normed.shape[0]), ranks)
