"""The EAGLE head: one decoder layer that predicts the target's next hidden state (Li et al. 2024, EAGLE-1 and -2).

The EAGLE-3 head reads three of the target's hidden states and has its own, smaller output head (Li et al. 2025). The P-EAGLE
head is an EAGLE-3 head trained to draft several tokens in one pass (Hui et al. 2026, arXiv 2602.01469).

Letters: T new tokens, N rows of logits, H hidden size of the head, Ht of the target, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import KernelSet, ResidualStream, SeparateInput
from outrider.device.kernels.weights import Weight, linear, prepare
from outrider.model.config.model_config import ModelConfig
from outrider.model.heads.draft_head import BaseDraftHead
from outrider.model.layers.cache import KVCache
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.language_model import LanguageModel, side_by_side
from outrider.model.layers.layer_weights import LayerWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleWeights:
    """Device tensors of an EAGLE head, in the model's dtype."""

    fusion: Weight
    """Projection [H, 2 H] of a token's embedding and the hidden state side by side."""
    fusion_bias: Tensor | None
    """Bias [H] of the projection, or None."""
    embedding: Tensor
    """Embedding table [V, H]: the head's own, or the target's tensor if the checkpoint has none."""
    layers: tuple[LayerWeights, ...]


class EagleHead(BaseDraftHead):
    """Drafts one token at a time from the target's hidden states. Placement and capture follow :class:`LanguageModel`.

    At position i the head reads the hidden state of position i and the token of position i + 1. Its result predicts the
    hidden state of position i + 1, so its keys and values at position i depend on the following token. ``config`` is the
    head's own, with the target's vocabulary and context.
    """

    reads_hidden = True

    def __init__(
        self, config: ModelConfig, weights: EagleWeights, target: LanguageModel, *, head: Weight | None = None
    ) -> None:
        super().__init__(config, target, weights.layers, head=head)
        self.weights = weights
        prepare(self.kernels, weights.fusion)

    def forward(self, inputs: ForwardInput, hidden: Tensor, cache: KVCache) -> Tensor:
        """Return predicted hidden states [T, H], or [S, H] of the kept rows, without a final norm.

        ``inputs.tokens`` are one position ahead of ``hidden`` [T, H]; ``inputs.positions`` are the positions of ``hidden``.
        ``cache`` is the head's own KV cache.
        """
        cos_sin = self._rotary(inputs.positions, inputs.prompt_lens)
        x = ResidualStream(self.kernels, self._fuse(inputs.tokens, hidden))
        return self._forward_layers(x, inputs, cos_sin, cache).add()

    def _fuse(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the fusion [T, H] of the tokens' embeddings with ``hidden`` [T, H]."""
        fusion, bias = self.weights.fusion, self.weights.fusion_bias
        if self.target.ranks.is_single:
            return self.kernels.fuse_embedding(tokens, self.weights.embedding, hidden, fusion, bias)
        embedded = self.target.embed_from_table(tokens, self.weights.embedding)
        return linear(self.kernels, torch.cat((embedded, hidden), dim=-1), fusion, bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Weights:
    """Device tensors of an EAGLE-3 head, in the model's dtype."""

    fusion: Weight | None
    """Projection [H, 3 Ht] of the three target states side by side; None if the head reads the target's final state."""
    embedding: Tensor
    """Embedding table [V, H]."""
    head: Weight | None
    """The output head [Vd, H], or None for the target's."""
    norm: Tensor
    """Weight [H] of the final norm."""
    hidden_norm: Tensor
    """Weight [H] of the norm of the hidden state."""
    layers: tuple[LayerWeights, ...]
    """The layers. The first one's attention reads the normed embedding and hidden state side by side: ``qkv`` is
    [(Hq + 2 Hkv) D, 2 H]. Its ``attention_norm`` normalizes the embedding.
    """
    target_ids: Tensor | None
    """Target token of each draft token, int64 [Vd]; None if both vocabularies are the same."""
    input_norm: Tensor | None = None
    """Weight [3 Ht] of a norm over the three joined states, or None."""
    state_norms: tuple[Tensor, ...] = ()
    """Three weights [Ht], one norm for each state, or empty."""
    mask_state: Tensor | None = None
    """State [H] that a P-EAGLE head reads where the fused target states are unknown; None for other heads."""


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
        super().__init__(config, target, weights.layers, head=weights.head, ids=weights.target_ids)
        self.weights = weights
        prepare(self.kernels, weights.fusion)
        self.aux_hidden_state_layers = aux_hidden_state_layers
        self.reads_hidden = not aux_hidden_state_layers
        self._norm_before_residual, self._norm_output = norm_before_residual, norm_output

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
        embedding_norm = weights.layers[0].attention_norm
        assert embedding_norm is not None  # every EAGLE-3 head has one
        cos_sin = self._rotary(inputs.positions, inputs.prompt_lens)
        embedded = kernels.rms_norm(self.target.embed_from_table(inputs.tokens, weights.embedding), embedding_norm, eps)
        normed = kernels.rms_norm(hidden, weights.hidden_norm, eps)
        rows = normed if self._norm_before_residual else hidden.clone()
        x = ResidualStream(kernels, rows, SeparateInput(torch.cat((embedded, normed), dim=-1)))
        x = self._forward_layers(x, inputs, cos_sin, cache)
        return x.norm(weights.norm, eps) if self._norm_output else x.add()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, Vd] of the draft vocabulary for the head's states ``hidden`` [N, H]."""
        normed = hidden
        if not self._norm_output:
            normed = self.kernels.rms_norm(hidden, self.weights.norm, self.config.rms_eps)
        return super().logits(normed)


class PEagleHead(Eagle3Head):
    """Drafts several tokens in one pass. Positions without target states read ``mask_state`` and ``mask_token``.

    Such a position follows the last known token and depends on earlier positions only through their keys and values.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Eagle3Weights,
        target: LanguageModel,
        *,
        mask_token: int,
        aux_hidden_state_layers: tuple[int, ...],
        norm_before_residual: bool = False,
        norm_output: bool = False,
    ) -> None:
        super().__init__(
            config,
            weights,
            target,
            aux_hidden_state_layers=aux_hidden_state_layers,
            norm_before_residual=norm_before_residual,
            norm_output=norm_output,
        )
        assert weights.mask_state is not None  # every P-EAGLE head has one
        self.mask_token, self.mask_state = mask_token, weights.mask_state
