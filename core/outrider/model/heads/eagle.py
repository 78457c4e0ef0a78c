"""The EAGLE head: one decoder layer that predicts the target's next hidden state (Li et al. 2024, EAGLE-1 and -2).

Letters: T new tokens, N rows of logits, H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import QuantizedWeight
from outrider.model.config.model_config import ModelConfig
from outrider.model.heads.draft_head import BaseDraftHead
from outrider.model.layers.cache import KVCache
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.language_model import LanguageModel
from outrider.model.layers.layer import DecoderLayer, LayerWeights
from outrider.model.layers.pending import Pending, add
from outrider.model.layers.products import Weight, linear


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleWeights:
    """Device tensors of an EAGLE head."""

    fusion: Weight
    """[H, 2 H]."""
    fusion_bias: Tensor | None
    """[H], or None."""
    embedding: Tensor
    """[V, H]. The head's own copy, or the target's tensor if the checkpoint has none."""
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
        super().__init__(config, target, head=head)
        self.weights = weights
        self._layers = tuple(
            DecoderLayer(config, layer, self.kernels, window=window, ranks=target.ranks)
            for layer, window in zip(weights.layers, config.windows, strict=True)
        )

    def forward(self, inputs: ForwardInput, hidden: Tensor, cache: KVCache) -> Tensor:
        """Return predicted hidden states [T, H], or [S, H] of the kept rows, without a final norm.

        ``inputs.tokens`` are one position ahead of ``hidden`` [T, H]; ``inputs.positions`` are the positions of ``hidden``.
        ``cache`` is the head's own KV cache.
        """
        cos_sin = self._rotary.gather(inputs.positions, inputs.prompt_lens)
        residual = self._fuse(inputs.tokens, hidden)
        pending: Pending | None = None
        self.target.begin_pass(inputs)
        for layer, pages in zip(self._layers[:-1], cache.layers[:-1], strict=True):
            pending = layer.forward(pending, residual, inputs, cos_sin, pages)
        pending, residual = self._layers[-1].forward_last(pending, residual, inputs, cos_sin, cache.layers[-1])
        return add(pending, residual, self.kernels)

    def _fuse(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the fusion [T, H] of the tokens' embeddings with ``hidden`` [T, H]."""
        fusion, bias = self.weights.fusion, self.weights.fusion_bias
        if self.target.ranks is None and isinstance(fusion, QuantizedWeight):
            return self.kernels.embed_beside_linear_quantized(tokens, self.weights.embedding, hidden, fusion, bias)
        return linear(self.kernels, self._embed_and_join(tokens, hidden), fusion, bias)

    def _embed_and_join(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return embeddings of ``tokens`` [T] and ``hidden`` [T, H] side by side, [T, 2 H]."""
        if self.target.ranks is None:
            return self.kernels.embed_beside(tokens, self.weights.embedding, hidden)
        return torch.cat((self.target.embed_from_table(tokens, self.weights.embedding), hidden), dim=-1)
