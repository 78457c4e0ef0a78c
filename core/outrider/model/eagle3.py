"""The EAGLE-3 head: reads three of the target's hidden states, and has its own, smaller output head (Li et al. 2025).

Letters: T new tokens, N rows of logits, H hidden size of the head, Ht of the target, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import KernelSet
from outrider.model.cache import KVCache
from outrider.model.config import ModelConfig
from outrider.model.inputs import ForwardInput
from outrider.model.language_model import LanguageModel
from outrider.model.layer import DecoderLayer, LayerWeights
from outrider.model.pending import add, add_rms_norm
from outrider.model.products import Weight, linear
from outrider.model.rotary import rotary
from outrider.model.side_by_side import side_by_side


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Weights:
    """Tensors of a head: ``fusion`` [H, 3 Ht], ``embedding`` [V, H], ``head`` [Vd, H], ``norm`` and ``hidden_norm`` [H].

    The layer's attention reads embedding and hidden state side by side (``qkv`` [(Hq + 2 Hkv) D, 2 H]); its
    ``attention_norm`` is that of the embedding. ``target_ids`` int64 [Vd] names each draft token in the target's
    vocabulary, or is None where both are the same. ``input_norm`` [3 Ht] is that of the three states side by side,
    ``state_norms`` three of [Ht] those of each; a head has them or not. ``later`` are ordinary layers behind the first one.
    """

    fusion: Weight
    embedding: Tensor
    head: Weight
    norm: Tensor
    hidden_norm: Tensor
    layer: LayerWeights
    target_ids: Tensor | None
    input_norm: Tensor | None = None
    state_norms: tuple[Tensor, ...] = ()
    later: tuple[LayerWeights, ...] = ()


def fuse(weights: Eagle3Weights, states: tuple[Tensor, ...], eps: float, kernels: KernelSet) -> Tensor:
    """Three states of the target, [T, Ht] each, as the one [T, H] that a head reads."""
    if weights.state_norms:
        states = tuple(kernels.rms_norm(x, w, eps) for x, w in zip(states, weights.state_norms, strict=True))
    joined = side_by_side(states)
    if weights.input_norm is not None:
        joined = kernels.rms_norm(joined, weights.input_norm, eps)
    return linear(kernels, joined, weights.fusion)


class Eagle3Head:
    """Drafts from three intermediate states of the target. Placement and capture as for :class:`LanguageModel`.

    Used as :class:`EagleHead` is, but what the target computed passes through :meth:`condition` first, and draft logits
    are over the head's own vocabulary. ``aux_hidden_state_layers`` are the target's layers whose input it reads.
    ``norm_before_residual``: the layer adds to the normed state; ``norm_output``: its states are behind the final norm, for
    its next step as well.
    """

    reads_hidden = False
    """As :attr:`EagleHead.reads_hidden`."""

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
        self.config = config
        self.weights = weights
        self.target = target
        self.aux_hidden_state_layers = aux_hidden_state_layers
        self._norm_before_residual, self._norm_output = norm_before_residual, norm_output
        self.kernels: KernelSet = target.kernels
        context = max(config.max_context, target.config.max_context)
        self._rotary = rotary(
            config.rope, config.head_size, context, kernels=target.kernels, dtype=target.dtype, device=target.device
        )
        self._layer = DecoderLayer(config, weights.layer, self.kernels, window=config.windows[0], ranks=target.ranks)
        self._later = tuple(
            DecoderLayer(config, layer, self.kernels, window=window, ranks=target.ranks)
            for layer, window in zip(weights.later, config.windows[1:], strict=True)
        )

    @property
    def draft_vocab_size(self) -> int:
        """Vd."""
        ids = self.weights.target_ids
        return self.config.vocab_size if ids is None else ids.shape[0]

    @property
    def target_ids(self) -> Tensor | None:
        """int64 [Vd]: the target's id of each draft token; None where they're the same."""
        return self.weights.target_ids

    def condition(self, final: Tensor | None, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """What the head reads of the target [T, H], from :meth:`LanguageModel.forward_with_aux_hidden_states`'s result."""
        del final
        return fuse(self.weights, aux_hidden_states, self.config.rms_eps, self.kernels)

    def forward(self, inputs: ForwardInput, hidden: Tensor, cache: KVCache) -> Tensor:
        """The head's states [T, H] from ``inputs`` and ``hidden`` [T, H]: of :meth:`condition`, or an earlier result; [S, H]
        of kept rows.

        Tokens, positions and cache as for :meth:`EagleHead.forward`.
        """
        weights, kernels, eps = self.weights, self.kernels, self.config.rms_eps
        assert weights.layer.attention_norm is not None  # every EAGLE-3 head has one
        cos_sin = self._rotary.gather(inputs.positions, inputs.prompt_lens)
        self.target.begin_pass(inputs)
        embedded = self.target.embedded(inputs.tokens, weights.embedding)
        embedded = kernels.rms_norm(embedded, weights.layer.attention_norm, eps)
        normed = kernels.rms_norm(hidden, weights.hidden_norm, eps)
        first = inputs.whole if self._later else inputs
        attended = self._layer.attend(torch.cat((embedded, normed), dim=-1), first, cos_sin, cache.layers[0])
        residual = first.keep(normed if self._norm_before_residual else hidden.clone(), kernels)
        pending = self._layer.mlp(attended, residual)
        for layer, pages in zip(self._later[:-1], cache.layers[1:-1], strict=True):
            pending = layer.forward(pending, residual, inputs, cos_sin, pages)
        if self._later:
            pending, residual = self._later[-1].forward_last(pending, residual, inputs, cos_sin, cache.layers[-1])
        if self._norm_output:
            return add_rms_norm(pending, residual, weights.norm, eps, kernels)
        return add(pending, residual, kernels)

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits [N, Vd] of ``hidden`` [N, H]."""
        normed = hidden
        if not self._norm_output:
            normed = self.kernels.rms_norm(hidden, self.weights.norm, self.config.rms_eps)
        return self.target.whole_logits(linear(self.kernels, normed, self.weights.head), self.draft_vocab_size)
