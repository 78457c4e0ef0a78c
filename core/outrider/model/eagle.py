"""The EAGLE head: one decoder layer that guesses the target's next hidden state (Li et al. 2024, EAGLE-1 and -2).

Letters: T new tokens, N rows of logits, H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import QuantizedWeight
from outrider.model.cache import KVCache
from outrider.model.config import ModelConfig
from outrider.model.inputs import ForwardInput
from outrider.model.language_model import LanguageModel
from outrider.model.layer import DecoderLayer, LayerWeights
from outrider.model.pending import Pending, add
from outrider.model.products import Weight, linear
from outrider.model.rotary import rotary


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleWeights:
    """Tensors of a head: ``fusion`` [H, 2 H] with ``fusion_bias`` [H] or None, and its layers.

    ``embedding`` [V, H] is the head's own copy, or the target's tensor where the checkpoint ships none.
    """

    fusion: Weight
    fusion_bias: Tensor | None
    embedding: Tensor
    layers: tuple[LayerWeights, ...]


class EagleHead:
    """Drafts one token at a time from the target's hidden states. Placement and capture as for :class:`LanguageModel`.

    At position i the head reads the hidden state of position i and the token of position i + 1, and what it returns
    stands for the hidden state of position i + 1: its keys and values at position i so depend on the token after it.
    ``config`` is the head's own, with the target's vocabulary and context.
    """

    reads_hidden = True
    """Whether :meth:`condition` reads the target's final hidden states."""

    def __init__(self, config: ModelConfig, weights: EagleWeights, target: LanguageModel) -> None:
        self.config = config
        self.weights = weights
        self.target = target
        self.kernels = target.kernels
        context = max(config.max_context, target.config.max_context)
        self._rotary = rotary(
            config.rope, config.head_size, context, kernels=target.kernels, dtype=target.dtype, device=target.device
        )
        self._layers = tuple(
            DecoderLayer(config, layer, self.kernels, window=window, ranks=target.ranks)
            for layer, window in zip(weights.layers, config.windows, strict=True)
        )

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """Layers of the target whose input the head reads: none."""
        return ()

    @property
    def draft_vocab_size(self) -> int:
        """Vd, the tokens that drafts come from: as many as the target's output head has."""
        return self.target.output_size

    @property
    def target_ids(self) -> Tensor | None:
        """int64 [Vd]: the target's id of each draft token; None where they're the same."""
        return self.target.output_ids

    def condition(self, final: Tensor | None, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """What the head reads of the target [T, H]: its final hidden states."""
        del aux_hidden_states
        assert final is not None  # it says that it reads them
        return final

    def forward(self, inputs: ForwardInput, hidden: Tensor, cache: KVCache) -> Tensor:
        """Guessed hidden states [T, H] from ``inputs`` and ``hidden`` [T, H], or [S, H] of kept rows; no final norm.

        ``inputs.tokens`` are one position ahead of ``hidden`` (see the class); ``inputs.positions`` are those of
        ``hidden``. ``cache`` is the head's own, with its layers and heads.
        """
        cos_sin = self._rotary.gather(inputs.positions, inputs.prompt_lens)
        residual = self._fused(inputs.tokens, hidden)
        pending: Pending | None = None
        self.target.begin_pass(inputs)
        for layer, pages in zip(self._layers[:-1], cache.layers[:-1], strict=True):
            pending = layer.forward(pending, residual, inputs, cos_sin, pages)
        pending, residual = self._layers[-1].forward_last(pending, residual, inputs, cos_sin, cache.layers[-1])
        return add(pending, residual, self.kernels)

    def _fused(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The product of the fusion with :meth:`_beside` [T, H]."""
        fusion, bias = self.weights.fusion, self.weights.fusion_bias
        if self.target.ranks is None and isinstance(fusion, QuantizedWeight):
            return self.kernels.embed_beside_linear_quantized(tokens, self.weights.embedding, hidden, fusion, bias)
        return linear(self.kernels, self._beside(tokens, hidden), fusion, bias)

    def _beside(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings of ``tokens`` [T], and ``hidden`` [T, H] behind them → [T, 2 H]."""
        if self.target.ranks is None:
            return self.kernels.embed_beside(tokens, self.weights.embedding, hidden)
        return torch.cat((self.target.embedded(tokens, self.weights.embedding), hidden), dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, Vd] of ``hidden`` [N, H] by the target's output head."""
        return self.target.logits(hidden)
