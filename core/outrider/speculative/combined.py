"""CombinedProposer: drafts by suffix lookup if a long enough suffix matches, and by a head or a draft model otherwise."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import AttentionShape, Backend, ConfigError
from outrider.speculative.proposer import Draft, DraftInputs, ExtendInputs, Proposer, RelaySpec
from outrider.speculative.suffix import SuffixProposer

MIN_SUFFIX_TOKENS = 4
"""Default length of a matching suffix, in tokens, from which the lookup drafts."""


class CombinedProposer(Proposer):
    """A chain of K tokens per request: from ``lookup`` if it matches a suffix of at least ``least`` tokens, else from
    ``other``.

    The device selects the draft, so both proposers run in every iteration. The combination raises the number of accepted
    tokens; it doesn't save the time of ``other``. The relay is that of ``other``. Both have their own caches.
    """

    extends = True

    def __init__(self, lookup: SuffixProposer, other: Proposer, *, least: int = MIN_SUFFIX_TOKENS) -> None:
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
        self.accepts_padding = lookup.accepts_padding and other.accepts_padding
        self.depends_on_other_requests = lookup.depends_on_other_requests or other.depends_on_other_requests
        self._lookup = lookup
        self._other = other
        self._least = least

    @property
    def parts(self) -> tuple[SuffixProposer, Proposer]:
        """The two combined proposers: the lookup, then the other one."""
        return self._lookup, self._other

    @property
    def depth(self) -> int:
        """K, the number of drafted tokens."""
        return self._other.depth

    @property
    def slots(self) -> int:
        """Number of slots that an iteration writes: the larger of the lookup's and the other proposer's."""
        return max(self._lookup.slots, self._other.slots)

    @property
    def max_context(self) -> int | None:
        """The context limit in tokens of the other proposer, or None if it has none."""
        return self._other.max_context

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The target's layers that the other proposer reads."""
        return self._other.aux_hidden_state_layers

    @property
    def reads_hidden(self) -> bool:
        """True if the other proposer reads the target's hidden states."""
        return self._other.reads_hidden

    @property
    def relay(self) -> tuple[RelaySpec, ...]:
        """The tensors that the other proposer relays; the lookup relays none."""
        return self._other.relay

    @property
    def lookahead(self) -> int:
        """The larger of the lookup's and the other proposer's lookahead."""
        return max(self._lookup.lookahead, self._other.lookahead)

    @property
    def host_lengths(self) -> Mapping[str, int] | None:
        """The host parameters of the other proposer's attention lengths, or None; the lookup has no attention."""
        return self._other.host_lengths

    def host_lengths_of(self, count: int) -> Mapping[str, int] | None:
        """Return the host lengths of the other proposer for a draft of ``count`` tokens, or None if it has none."""
        return self._other.host_lengths_of(count)

    @property
    def host_widths(self) -> Mapping[str, int]:
        """Host parameters of the other proposer's passes whose length is at least their number of tokens."""
        return self._other.host_widths

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """Return the number of tokens of each prompt pass of the other proposer; the lookup makes none."""
        return self._other.prompt_passes(tokens, sequences, longest)

    def attention_shapes(self, page_size: int) -> tuple[AttentionShape, ...]:
        """Return the planned attention shapes of the other proposer; the lookup has no attention."""
        return self._other.attention_shapes(page_size)

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """The token history of the lookup, then the other proposer's caches."""
        return (*self._lookup.caches, *self._other.caches)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the caches of both proposers."""
        return self._lookup.token_bytes + self._other.token_bytes

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Allocate the caches of both proposers with the target's page numbers."""
        for part in self.parts:
            part.allocate(backend=backend, pages=pages, page_size=page_size)

    def draft(self, inputs: DraftInputs) -> Draft:
        """Draft with both proposers, and select for each request, on the device, the lookup's chain if its match is long
        enough.
        """
        found, other = self._lookup.continuation(inputs), self._other.draft(inputs)
        count = min(found.tokens.shape[1], other.tokens.shape[1])
        uses_lookup = (found.matched >= self._least).unsqueeze(1)
        tokens = torch.where(uses_lookup, found.tokens[:, :count], other.tokens[:, :count])
        if other.probs is None:
            return Draft(tokens, None)
        probs = other.probs[:, :count]
        one_hot = F.one_hot(found.tokens[:, :count], probs.shape[-1]).to(probs.dtype)
        return Draft(tokens, torch.where(uses_lookup.unsqueeze(2), one_hot, probs))

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Run draft-extend of both proposers over the accepted tokens, and return the relay of the other proposer."""
        self._lookup.extend(inputs)
        return self._other.extend(inputs)
