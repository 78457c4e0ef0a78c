"""The EAGLE head: one decoder layer that predicts the target's next hidden state (Li et al. 2024, EAGLE-1 and -2).

Letters: T new tokens, N rows of logits, H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.device import QuantizedWeight
from outrider.model.cache import KVCache
from outrider.model.config import ModelConfig
from outrider.model.decoder import Decoder
from outrider.model.draft_head import BaseDraftHead
from outrider.model.inputs import ForwardInput
from outrider.model.language_model import LanguageModel
from outrider.model.layer import DecoderLayer, LayerWeights
from outrider.model.pending import Pending, add
from outrider.model.products import Weight, linear


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
    head: Weight | None = None
    """The head's own output head [V, H], or None for the target's."""


class EagleHead(BaseDraftHead):
    """Drafts one token at a time from the target's hidden states. Placement and capture follow :class:`LanguageModel`.

    At position i the head reads the hidden state of position i and the token of position i + 1. Its result predicts the
    hidden state of position i + 1, so its keys and values at position i depend on the following token. ``config`` is the
    head's own, with the target's vocabulary and context.
    """

    reads_hidden = True

    def __init__(self, config: ModelConfig, weights: EagleWeights, target: LanguageModel) -> None:
        super().__init__(config, target)
        self.weights = weights
        self._layers = tuple(
            DecoderLayer(config, layer, self.kernels, window=window, ranks=target.ranks)
            for layer, window in zip(weights.layers, config.windows, strict=True)
        )

    @property
    def draft_vocab_size(self) -> int:
        """Vd, the number of tokens that the output head covers."""
        return self.target.output_size if self.weights.head is None else self.config.vocab_size

    @property
    def target_ids(self) -> Tensor | None:
        """int64 [Vd] target token of each draft token, or None if both vocabularies are the same."""
        return self.target.output_ids if self.weights.head is None else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return draft logits [N, Vd] of ``hidden`` [N, H]."""
        if self.weights.head is None:
            return self.target.logits(hidden)
        return self.target.gather_logits(linear(self.kernels, hidden, self.weights.head), self.draft_vocab_size)

    def share_output_head(self, target: LanguageModel) -> bool:
        """Use the target's output head if the head's own one is a copy of ``target``'s. Return False if it differs."""
        own = self.weights.head
        if own is None:
            return True
        other = target.weights.head if isinstance(target, Decoder) else None
        if not (isinstance(own, Tensor) and isinstance(other, Tensor) and torch.equal(own, other)):
            return False
        self.weights = replace(self.weights, head=None)
        return True

    def condition(self, final: Tensor | None, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Return the target's final hidden states [T, H], which the head reads."""
        del aux_hidden_states
        assert final is not None  # required by reads_hidden
        return final

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
