"""The interface of a proposer, and plain decoding as the proposer that drafts nothing.

Letters: B requests of a batch, K draft tokens, N rows of a flat token batch, H hidden size, V vocabulary, P pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, Backend


@dataclass(frozen=True, slots=True)
class RelaySpec:
    """One tensor that a proposer relays from an iteration to the next, for each request."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """What a draft works on; every tensor is private to the draft, on the stream that it runs on.

    ``lens`` int64 [B]: tokens in the target's cache. ``last_tokens`` int64 [B]: the token after them, not cached yet.
    ``tables`` int32 [B, P]. ``temperature`` float32 [B], ``seeds`` int64 [B]. ``relay``: what the iteration before
    relayed, each [B, ...]. ``max_kv``: host bound of cached tokens after this iteration. ``sampling``: some row has a
    temperature above 0, so that draft distributions are needed.
    """

    lens: Tensor
    last_tokens: Tensor
    tables: Tensor
    temperature: Tensor
    seeds: Tensor
    relay: Mapping[str, Tensor]
    max_kv: int
    sampling: bool


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain for each request: ``tokens`` int64 [B, K]; ``probs`` float32 [B, K, V], the distribution that each was
    drawn from, None when no row samples.
    """

    tokens: Tensor
    probs: Tensor | None


@dataclass(frozen=True, slots=True)
class ExtendInputs:
    """Newly accepted tokens, with the target's hidden states, for the draft to catch up with.

    Flat over N tokens: ``tokens`` int64 [N], the token *after* each position; ``hidden`` [N, H], the target's hidden
    state at it; ``positions`` and ``slots`` int64 [N]; ``attention`` over the draft's own cache. Per request: ``last``
    int64 [B], the index into N of its last valid token (what comes later is padding, never read); ``next_positions``
    int64 [B], the position of the token to draft.
    """

    tokens: Tensor
    hidden: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionMetadata
    last: Tensor
    next_positions: Tensor
    temperature: Tensor
    seeds: Tensor
    sampling: bool


class Proposer(ABC):
    """Drafts tokens for a batch. Stateless between calls but for its cache: state per request travels in the relay.

    The engine calls it inside the scope of the forward stream and orders everything around it; a proposer opens no
    scope, waits for nothing and reads no device value on the host.
    """

    name: str

    @property
    @abstractmethod
    def draft_tokens(self) -> int:
        """K: how many tokens it drafts in an iteration; 0 for plain decoding."""

    @property
    @abstractmethod
    def relay(self) -> tuple[RelaySpec, ...]:
        """What it relays from one iteration to the next."""

    @property
    def extends(self) -> bool:
        """Whether it must see the accepted tokens (``extend``) before it can draft again."""
        return bool(self.relay)

    @property
    def lookahead(self) -> int:
        """How many tokens after a position its cache entry depends on: a shared prefix must agree on those too."""
        return 1 if self.extends else 0

    @abstractmethod
    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Make its own cache, if it has one, with the page numbers that the target's cache uses."""

    @abstractmethod
    def draft(self, inputs: DraftInputs) -> Draft:
        """Draft K tokens for each request."""

    @abstractmethod
    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Take in accepted tokens; returns the relay of each request, [B, ...] by name."""


class PlainProposer(Proposer):
    """Drafts nothing: an iteration is one plain decoding step."""

    name = "none"

    @property
    def draft_tokens(self) -> int:
        """0."""
        return 0

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """Nothing but the last token, which the engine relays for every proposer."""
        return ()

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """There is no cache."""
        del backend, pages, page_size

    def draft(self, inputs: DraftInputs) -> Draft:
        """An empty chain."""
        batch = inputs.lens.shape[0]
        tokens = inputs.lens.new_empty((batch, 0))
        return Draft(tokens=tokens, probs=None)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Nothing to take in."""
        del inputs
        return {}
