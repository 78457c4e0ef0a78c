"""Two proposers as one: what is found word for word goes first, where enough of it agrees; else a head or a model drafts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import AttentionShape, Backend, ConfigError
from outrider.speculative.proposer import Draft, DraftInputs, ExtendInputs, Proposer, RelaySpec
from outrider.speculative.suffix import SuffixProposer

LEAST = 4
"""Tokens of a suffix that must agree for what followed it to be drafted."""


class CombinedProposer(Proposer):
    """A chain of K tokens: for each request those that ``lookup`` found behind a suffix of ``least`` tokens or more, else
    those of ``other``.

    Which one drafts is decided on the device, so both are at work in every iteration: the gain is in accepted tokens, not in
    the time of ``other``. What travels in the relay is ``other``'s; both have their own caches.
    """

    def __init__(self, lookup: SuffixProposer, other: Proposer, *, least: int = LEAST) -> None:
        if other.is_tree or not other.nodes:
            what = "drafts trees" if other.is_tree else "drafts nothing"
            raise ConfigError(
                f"the proposer {other.name!r} {what}; expected one that drafts chains, to go with {lookup.name!r}"
            )
        if lookup.depth != other.depth:
            raise ConfigError(
                f"{lookup.name!r} drafts {lookup.depth} tokens and {other.name!r} {other.depth}; expected the same number"
            )
        if not 1 <= least <= lookup.longest:
            raise ConfigError(f"a suffix of at least {least} tokens; expected 1 to {lookup.longest}")
        self.name = f"{lookup.name}+{other.name}"
        self.takes_padding = lookup.takes_padding and other.takes_padding
        self.remembers = lookup.remembers or other.remembers
        self._lookup = lookup
        self._other = other
        self._least = least

    @property
    def parts(self) -> tuple[SuffixProposer, Proposer]:
        """Both, the first one first."""
        return self._lookup, self._other

    @property
    def depth(self) -> int:
        """K."""
        return self._other.depth

    @property
    def slots(self) -> int:
        """The more of both."""
        return max(self._lookup.slots, self._other.slots)

    @property
    def max_context(self) -> int | None:
        """The other's."""
        return self._other.max_context

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The other's."""
        return self._other.aux_hidden_state_layers

    @property
    def reads_hidden(self) -> bool:
        """Whether one of them does."""
        return self._lookup.reads_hidden or self._other.reads_hidden

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """The other's."""
        return self._other.relay

    @property
    def extends(self) -> bool:
        """The lookup takes the accepted tokens in."""
        return True

    @property
    def lookahead(self) -> int:
        """The more of both."""
        return max(self._lookup.lookahead, self._other.lookahead)

    @property
    def host_lengths(self) -> Mapping[str, int] | None:
        """The other's: the lookup has no attention."""
        return self._other.host_lengths

    def host_lengths_of(self, count: int) -> Mapping[str, int] | None:
        """The other's, which drafts as many."""
        return self._other.host_lengths_of(count)

    @property
    def host_widths(self) -> Mapping[str, int]:
        """The other's."""
        return self._other.host_widths

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """The other's."""
        return self._other.prompt_passes(tokens, sequences, longest)

    def attention_shapes(self, page_size: int) -> tuple[AttentionShape, ...]:
        """The other's."""
        return self._other.attention_shapes(page_size)

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """The history, then the other's."""
        return (*self._lookup.caches, *self._other.caches)

    @property
    def token_bytes(self) -> int:
        """Of both."""
        return self._lookup.token_bytes + self._other.token_bytes

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Both."""
        for part in self.parts:
            part.allocate(backend=backend, pages=pages, page_size=page_size)

    def draft(self, inputs: DraftInputs) -> Draft:
        """Both draft; each request has one of them."""
        found, other = self._lookup.continuation(inputs), self._other.draft(inputs)
        count = min(found.tokens.shape[1], other.tokens.shape[1])
        sure = (found.matched >= self._least).unsqueeze(1)
        tokens = torch.where(sure, found.tokens[:, :count], other.tokens[:, :count])
        if other.probs is None:
            return Draft(tokens, None)
        probs = other.probs[:, :count]
        certain = F.one_hot(found.tokens[:, :count], probs.shape[-1]).to(probs.dtype)
        return Draft(tokens, torch.where(sure.unsqueeze(2), certain, probs))

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Both take the tokens in."""
        self._lookup.extend(inputs)
        return self._other.extend(inputs)
