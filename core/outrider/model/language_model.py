"""LanguageModel: what an engine and the heads that draft for it may ask of a target.

Letters: T new tokens, N rows of logits, H hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from outrider.device import KernelSet
from outrider.model.cache import KVCache
from outrider.model.config import ModelConfig
from outrider.model.inputs import ForwardInput


class LanguageModel(ABC):
    """A decoder on a device, over a paged cache.

    Every method enqueues on the stream whose scope the caller opened. ``native`` models may be captured and read no
    device value on the host; one that isn't native promises neither.
    """

    native: bool = True

    def __init__(self, config: ModelConfig, kernels: KernelSet) -> None:
        self.config = config
        self.kernels = kernels

    @property
    @abstractmethod
    def embedding(self) -> Tensor:
        """The table of embeddings [V, H]."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, hidden states and logits."""
        return self.embedding.dtype

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

        EAGLE-3 heads read three of them. Raises :class:`ConfigError` for a layer that doesn't exist.
        """

    def forward(self, inputs: ForwardInput, cache: KVCache) -> Tensor:
        """Hidden states [T, H] after the final norm; writes the tokens' keys and values to their slots."""
        return self.forward_with_aux_hidden_states(inputs, cache, ())[0]

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of ``hidden`` [N, H], any rows of :meth:`forward`'s result or of an EAGLE head's."""
