"""The EAGLE head: one decoder layer that predicts the target's next hidden state (Li et al. 2024, EAGLE-1 and -2).

Letters: T new tokens, N rows of logits, H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import ResidualStream, Weight
from outrider.device.kernels.weights import linear
from outrider.model.cache import KVCache
from outrider.model.config import ModelConfig
from outrider.model.draft_head import BaseDraftHead
from outrider.model.inputs import ForwardInput
from outrider.model.language_model import LanguageModel
from outrider.model.layer import DecoderLayer
from outrider.model.layer_weights import LayerWeights


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
        x = ResidualStream(self.kernels, self._fuse(inputs.tokens, hidden))
        self.target.begin_pass(inputs)
        for layer, pages in zip(self._layers[:-1], cache.layers[:-1], strict=True):
            x = layer.forward(x, inputs.whole, cos_sin, pages)
        return self._layers[-1].forward(x, inputs, cos_sin, cache.layers[-1]).add()

    def _fuse(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the fusion [T, H] of the tokens' embeddings with ``hidden`` [T, H]."""
        fusion, bias = self.weights.fusion, self.weights.fusion_bias
        if self.target.ranks is None:
            return self.kernels.fuse_embedding(tokens, self.weights.embedding, hidden, fusion, bias)
        embedded = self.target.embed_from_table(tokens, self.weights.embedding)
        return linear(self.kernels, torch.cat((embedded, hidden), dim=-1), fusion, bias)
