"""The EAGLE-3 head: reads three of the target's hidden states and has its own, smaller output head (Li et al. 2025).

Letters: T new tokens, N rows of logits, H hidden size of the head, Ht of the target, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import KernelSet, ResidualStream, SeparateInput, Weight
from outrider.device.kernels.weights import linear
from outrider.model.cache import KVCache
from outrider.model.config import ModelConfig
from outrider.model.draft_head import BaseDraftHead
from outrider.model.inputs import ForwardInput
from outrider.model.language_model import LanguageModel, side_by_side
from outrider.model.layer import DecoderLayer
from outrider.model.layer_weights import LayerWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Weights:
    """Device tensors of an EAGLE-3 head."""

    fusion: Weight | None
    """[H, 3 Ht], or None if the head reads the target's final state."""
    embedding: Tensor
    """[V, H]."""
    head: Weight | None
    """The output head [Vd, H], or None for the target's."""
    norm: Tensor
    """Weight [H] of the final norm."""
    hidden_norm: Tensor
    """Weight [H] of the norm of the hidden state."""
    layer: LayerWeights
    """The first layer. Its attention reads the normed embedding and hidden state side by side: ``qkv`` is [(Hq + 2 Hkv) D, 2
    H]. ``attention_norm`` normalizes the embedding.
    """
    target_ids: Tensor | None
    """int64 [Vd] target token of each draft token, or None if both vocabularies are the same."""
    input_norm: Tensor | None = None
    """Weight [3 Ht] of a norm over the three joined states, or None."""
    state_norms: tuple[Tensor, ...] = ()
    """Three weights [Ht], one norm for each state, or empty."""
    later: tuple[LayerWeights, ...] = ()
    """Ordinary layers after the first one."""


def fuse(weights: Eagle3Weights, states: tuple[Tensor, ...], eps: float, kernels: KernelSet) -> Tensor:
    """Fuse three of the target's states, each [T, Ht], into the state [T, H] that the head reads."""
    if weights.state_norms:
        states = tuple(kernels.rms_norm(x, w, eps) for x, w in zip(states, weights.state_norms, strict=True))
    assert weights.fusion is not None  # a head that reads intermediate states fuses them
    joined = side_by_side(states)
    if weights.input_norm is not None:
        joined = kernels.rms_norm(joined, weights.input_norm, eps)
    return linear(kernels, joined, weights.fusion)


class Eagle3Head(BaseDraftHead):
    """Drafts from three intermediate states of the target. Placement and capture follow :class:`LanguageModel`.

    The interface is that of :class:`EagleHead`, but :meth:`condition` fuses the target's states first, and draft logits cover
    the head's own vocabulary. ``aux_hidden_state_layers`` are the target's layers whose inputs the head reads; a head without
    any reads the target's final state. With
    ``norm_before_residual`` the layer's residual is the normed state. With ``norm_output`` the states include the final norm,
    also as input of the next draft step.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Eagle3Weights,
        target: LanguageModel,
        *,
        aux_hidden_state_layers: tuple[int, ...],
        norm_before_residual: bool = False,
        norm_output: bool = False,
    ) -> None:
        super().__init__(config, target, head=weights.head, ids=weights.target_ids)
        self.weights = weights
        self.aux_hidden_state_layers = aux_hidden_state_layers
        self.reads_hidden = not aux_hidden_state_layers
        self._norm_before_residual, self._norm_output = norm_before_residual, norm_output

        self._layer = DecoderLayer(config, weights.layer, self.kernels, window=config.windows[0], ranks=target.ranks)
        self._later = tuple(
            DecoderLayer(config, layer, self.kernels, window=window, ranks=target.ranks)
            for layer, window in zip(weights.later, config.windows[1:], strict=True)
        )

    def condition(self, final: Tensor | None, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Fuse ``aux_hidden_states`` of the target into the state [T, H] that the head reads, or return ``final``."""
        if self.reads_hidden:
            return super().condition(final, aux_hidden_states)
        return fuse(self.weights, aux_hidden_states, self.config.rms_eps, self.kernels)

    def forward(self, inputs: ForwardInput, hidden: Tensor, cache: KVCache) -> Tensor:
        """Return the head's states [T, H], or [S, H] of the kept rows.

        ``hidden`` [T, H] is the result of :meth:`condition`, or of an earlier forward. Tokens, positions and cache follow
        :meth:`EagleHead.forward`.
        """
        weights, kernels, eps = self.weights, self.kernels, self.config.rms_eps
        assert weights.layer.attention_norm is not None  # every EAGLE-3 head has one
        cos_sin = self._rotary.gather(inputs.positions, inputs.prompt_lens)
        self.target.begin_pass(inputs)
        embedded = self.target.embed_from_table(inputs.tokens, weights.embedding)
        embedded = kernels.rms_norm(embedded, weights.layer.attention_norm, eps)
        normed = kernels.rms_norm(hidden, weights.hidden_norm, eps)
        rows = normed if self._norm_before_residual else hidden.clone()
        x = ResidualStream(kernels, rows, SeparateInput(torch.cat((embedded, normed), dim=-1)))
        layers, whole = (self._layer, *self._later), inputs.whole
        for layer, pages in zip(layers, cache.layers, strict=True):
            x = layer.forward(x, inputs if layer is layers[-1] else whole, cos_sin, pages)
        return x.norm(weights.norm, eps) if self._norm_output else x.add()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return draft logits [N, Vd] of ``hidden`` [N, H]."""
        normed = hidden
        if not self._norm_output:
            normed = self.kernels.rms_norm(hidden, self.weights.norm, self.config.rms_eps)
        return super().logits(normed)
