"""LanguageModel: what an engine and the heads that draft for it may ask of a target.

Letters: T new tokens, S kept rows, N rows of logits, H hidden size, V vocabulary, Vd tokens that have logits:
all, but where drafts are drawn from some.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from outrider.device import KernelSet
from outrider.model.cache import KVCache
from outrider.model.config import ModelConfig
from outrider.model.inputs import ForwardInput
from outrider.model.ranks import ModelRanks
from outrider.model.shards import Shards


class LanguageModel(ABC):
    """A decoder on a device, over a paged cache.

    Every method enqueues on the stream whose scope the caller opened. ``native`` models may be captured and read no
    device value on the host; one that isn't native promises neither.

    ``ranks``: those that hold the other parts of the model, None where everything is here. ``config`` has the heads and the
    inner size that are here.
    """

    native: bool = True

    def __init__(self, config: ModelConfig, kernels: KernelSet, ranks: ModelRanks | None = None) -> None:
        self.config = config
        self.kernels = kernels
        self.ranks = ranks

    @property
    @abstractmethod
    def embedding(self) -> Tensor:
        """The table of embeddings [V, H], or this rank's part of it."""

    @property
    def shards(self) -> Shards:
        """Which parts of the model are here; heads that draft for it are shared out in the same way."""
        return Shards() if self.ranks is None else self.ranks.shards

    def embedded(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Rows [T, H] of a ``table`` of embeddings for int64 ``tokens`` [T]; each rank has a part of the table."""
        if self.ranks is None:
            return self.kernels.embedding(tokens, table)
        return self.ranks.embed(self.kernels, tokens, table)

    def whole_logits(self, own: Tensor, vocabulary: int) -> Tensor:
        """Logits [N, V] over ``vocabulary`` tokens, from those of this rank's part of an output head."""
        return own if self.ranks is None else self.ranks.logits(own, vocabulary)

    @property
    def output_ids(self) -> Tensor | None:
        """int64 [Vd], ascending: the token that each of :meth:`logits` is of, where some tokens have none; None: all have."""
        return None

    @property
    def output_size(self) -> int:
        """Vd: how many tokens have logits."""
        return self.config.vocab_size if self.output_ids is None else self.output_ids.shape[0]

    def begin_pass(self, inputs: ForwardInput) -> None:
        """A pass over ``inputs`` through layers of this model, or of a head that drafts for it, begins."""
        if self.ranks is not None:
            self.ranks.begin_pass(inputs.tokens.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, hidden states and logits."""
        return self.embedding.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of the pages that hold its keys and values."""
        return self.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [T, H] of int64 ``tokens`` [T]."""

    @abstractmethod
    def forward_with_aux_hidden_states(
        self, inputs: ForwardInput, cache: KVCache, layers: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """:meth:`forward`, and also the residual stream [T, H] as it enters each of ``layers``, in that order.

        EAGLE-3 heads read three of them, side by side: a model may return a :class:`SideBySide`, whose views are the states.
        Raises :class:`ConfigError` for a layer that doesn't exist.
        """

    def forward(self, inputs: ForwardInput, cache: KVCache) -> Tensor:
        """Hidden states [T, H] after the final norm, or [S, H] of the rows that ``inputs`` keep; writes the tokens' keys and
        values to their slots.
        """
        return self.forward_with_aux_hidden_states(inputs, cache, ())[0]

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, Vd] of ``hidden`` [N, H], any rows of :meth:`forward`'s result or of an EAGLE head's."""
