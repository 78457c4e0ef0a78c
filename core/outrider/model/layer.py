"""One decoder layer: attention and a gated MLP, each with its norm, over a shared residual stream.

Letters: T new tokens, H hidden size, Hq query heads, Hkv key heads, D head size, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.device import AttentionShape, KernelSet
from outrider.model.config import ModelConfig
from outrider.model.inputs import ForwardInput


def attention_scale(config: ModelConfig) -> float:
    """What queries times keys are multiplied by."""
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
class LayerWeights:
    """Tensors of one layer. What is read together is stored together: q, k, v in ``qkv``, gate and up in ``gate_up``.

    ``qkv`` [(Hq + 2 Hkv) D, H], ``output`` [H, Hq D], ``gate_up`` [2 I, H], ``down`` [H, I], the norms [H], ``q_norm``
    and ``k_norm`` [D]. ``attention_norm`` is None in an EAGLE head that doesn't norm the input of its layer.
    """

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    mlp_norm: Tensor
    attention_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


class Pending(NamedTuple):
    """A product that is still to be made and added to the residual: ``x @ weight.T + bias``.

    The norm that follows takes it in, so that a backend may make product, sum and norm in fewer passes.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None

    def made(self, kernels: KernelSet) -> Tensor:
        """The product itself."""
        return kernels.linear(self.x, self.weight, self.bias)

    def add_norm(self, kernels: KernelSet, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add the product to ``residual`` [T, H] in place; returns its norm."""
        return kernels.linear_add_rms_norm(self.x, self.weight, self.bias, residual, norm, eps)


class DecoderLayer:
    """Attention and MLP over normed input. What each adds to the residual stream is left pending for the norm after it."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, kernels: KernelSet, *, window: int) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._window = window
        self._scale = attention_scale(config)

    def forward(
        self,
        pending: Pending | None,
        residual: Tensor,
        inputs: ForwardInput,
        cos_sin: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
    ) -> Pending:
        """Add ``pending`` (None at the first layer) and the attention to ``residual`` [T, H] in place.

        Returns what the MLP adds, pending.
        """
        weights, kernels, eps = self._weights, self._kernels, self._config.rms_eps
        if weights.attention_norm is None:
            normed = residual if pending is None else residual.add_(pending.made(kernels))
        elif pending is None:
            normed = kernels.rms_norm(residual, weights.attention_norm, eps)
        else:
            normed = pending.add_norm(kernels, residual, weights.attention_norm, eps)
        return self.mlp(self.attend(normed, inputs, cos_sin, cache), residual)

    def mlp(self, attended: Pending, residual: Tensor) -> Pending:
        """Add ``attended`` to ``residual`` [T, H] in place; returns what the MLP adds, pending."""
        weights, kernels = self._weights, self._kernels
        normed = attended.add_norm(kernels, residual, weights.mlp_norm, self._config.rms_eps)
        gated = kernels.linear_silu_mul(normed, weights.gate_up, weights.gate_up_bias)
        return Pending(gated, weights.down, weights.down_bias)

    def attend(
        self, normed: Tensor, inputs: ForwardInput, cos_sin: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor]
    ) -> Pending:
        """What attention adds for normed input [T, H], pending; writes keys and values to their slots."""
        config, weights, kernels = self._config, self._weights, self._kernels
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        qkv = kernels.linear(normed, weights.qkv, weights.qkv_bias).view(-1, heads + 2 * kv_heads, size)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)  # [T, heads, D] each
        if weights.q_norm is not None and weights.k_norm is not None:
            q = kernels.rms_norm(q, weights.q_norm, config.rms_eps)
            k = kernels.rms_norm(k, weights.k_norm, config.rms_eps)
        k_cache, v_cache = cache
        kernels.rope_write_cache(q, k, v, *cos_sin, k_cache, v_cache, inputs.slots)
        out = kernels.paged_attention(q, k_cache, v_cache, inputs.attention, scale=self._scale, window=self._window)
        return Pending(out.reshape(-1, heads * size), weights.output, weights.output_bias)
