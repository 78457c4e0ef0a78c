"""LanguageModel: the interface of a target model for the engine and the draft heads.

Letters: T new tokens, S kept rows, N rows of logits, H hidden size, V vocabulary, Vd tokens that the output head covers (all,
unless drafts are sampled from a draft vocabulary).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from outrider.device import KernelSet
from outrider.model.config.model_config import ModelConfig
from outrider.model.layers.cache import KVCache
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.ranks import ModelRanks, Shards, or_single_rank


class SideBySide(tuple[Tensor, ...]):
    """A tuple of A >= 1 hidden states [T, H] that are the columns of ``joined`` [T, A H].

    A head that multiplies all states by one weight reads ``joined`` (:func:`side_by_side`), without a copy.
    """

    joined: Tensor

    def __new__(cls, joined: Tensor, size: int) -> SideBySide:
        """Create the tuple of views [T, H] with ``size`` columns H each of ``joined`` [T, A H]."""
        states = super().__new__(cls, joined.split(size, dim=-1))
        states.joined = joined
        return states


def side_by_side(states: tuple[Tensor, ...]) -> Tensor:
    """Return the A ``states`` [T, H] as one tensor [T, A H]: without a copy for a SideBySide, else concatenated."""
    return states.joined if isinstance(states, SideBySide) else torch.cat(states, dim=-1)


class LanguageModel(ABC):
    """A decoder on a device, over a paged KV cache.

    Every method enqueues on the stream whose scope the caller opened. ``native`` models support graph capture and read no
    device value on the host; other models promise neither.

    ``ranks`` are the ranks that hold the other slices of the model, or None for a single rank. ``config`` has the number of
    heads and the intermediate size of this rank.
    """

    native: bool = True

    def __init__(self, config: ModelConfig, kernels: KernelSet, ranks: ModelRanks | None = None) -> None:
        self.config = config
        self.kernels = kernels
        self.ranks = or_single_rank(ranks)

    @property
    @abstractmethod
    def embedding(self) -> Tensor:
        """The embedding table [V, H], or this rank's slice of it."""

    @property
    def shards(self) -> Shards:
        """The slices of the model that this rank holds. Draft heads are split in the same way."""
        return self.ranks.shards

    def embed_from_table(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Return rows [T, H] of an embedding ``table`` for int64 ``tokens`` [T]. Each rank holds a slice of the table."""
        return self.ranks.embed(self.kernels, tokens, table)

    def implementations(self) -> dict[str, Any]:
        """Return the implementations of the ``blocks`` of each layer and of each of the ``primitives``, by name; empty for a
        model that isn't native.
        """
        return {"blocks": [], "primitives": {}}

    @property
    def output_ids(self) -> Tensor | None:
        """Tokens that the output head covers, int64 [Vd] ascending, or None if it covers the vocabulary."""
        return None

    @property
    def output_size(self) -> int:
        """Vd, the number of tokens that the output head covers."""
        return self.config.vocab_size if self.output_ids is None else self.output_ids.shape[0]

    def begin_pass(self, inputs: ForwardInput) -> None:
        """Set the width of the next collectives for a pass over ``inputs`` through layers of this model or of one of its
        draft heads. Called before the first layer.
        """
        self.ranks.begin_pass(inputs.tokens.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, hidden states and logits."""
        return self.embedding.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of the pages that hold keys and values."""
        return self.dtype

    @property
    def device(self) -> torch.device:
        """Device that holds the weights."""
        return self.embedding.device

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [T, H] of int64 ``tokens`` [T]."""

    def embed_inputs(self, inputs: ForwardInput) -> Tensor:
        """Return embeddings [T, H] of the tokens of ``inputs``, with media features in place of those of placeholders."""
        tokens = self.embed(inputs.tokens)
        if inputs.embeddings is None or inputs.embedded is None:
            return tokens
        return torch.where(inputs.embedded.unsqueeze(-1), inputs.embeddings[:, : self.config.hidden_size], tokens)

    @abstractmethod
    def forward_with_aux_hidden_states(
        self, inputs: ForwardInput, cache: KVCache, layers: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run :meth:`forward`, and also return the residual stream [T, H] at the input of each of ``layers``, in that order.

        A native model also takes its number of layers, for the output of the last layer before the final norm.

        EAGLE-3 heads read three of these states side by side, so a model may return a :class:`SideBySide`, whose views are
        the states. Raises :class:`ConfigError` for a layer that doesn't exist.
        """

    def forward(self, inputs: ForwardInput, cache: KVCache) -> Tensor:
        """Return hidden states [T, H] after the final norm, or [S, H] of the kept rows. Writes keys and values of all tokens
        to their slots.
        """
        return self.forward_with_aux_hidden_states(inputs, cache, ())[0]

    def settle(self, cache: KVCache, rows: Tensor) -> None:
        """Write the pending tokens of the windows of ``rows`` int64 [B] to the states, for a reader other than a pass over
        drafts. The default has no recurrent layers.
        """
        del cache, rows

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, Vd] of ``hidden`` [N, H]: any rows of :meth:`forward`'s result, or of an EAGLE head's."""
