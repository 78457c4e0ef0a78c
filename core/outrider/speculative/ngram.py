"""NgramProposer: n-gram lookup, which drafts what followed the last tokens earlier in the same text (Saxena 2023, prompt
lookup).

It needs no model and no host work: a paged history of tokens is searched on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import Backend, ConfigError, KernelSet
from outrider.speculative.proposer import Draft, DraftInputs, ExtendInputs, Proposer, RelaySpec
from outrider.speculative.tree import Tree


class NgramProposer(Proposer):
    """A proposer that drafts T continuations of K tokens each, copied from where the longest suffix of the text occurred
    before, latest first.

    The history is paged like the target's cache: the slot of position i holds token i+1, and the token at position 0 is
    missing. Shared prefixes, chunks and preemption therefore need no further handling, and nothing is relayed. Continuations
    differ in their first token. One that reaches the end of the text continues periodically. Without a match, a chain repeats
    the last token, and a tree leaves its nodes unused.

    ``longest`` is the maximum and ``shortest`` the minimum length of a matching suffix, in tokens.
    """

    name = "ngram"
    accepts_padding = True
    extends = True
    reads_hidden = False
    relay: tuple[RelaySpec, ...] = ()
    host_lengths: Mapping[str, int] = MappingProxyType({})
    token_bytes = torch.int64.itemsize

    def __init__(self, *, vocab_size: int, draft_tokens: int, branches: int = 1, longest: int = 4, shortest: int = 1) -> None:
        if draft_tokens < 1 or branches < 1:
            raise ConfigError(f"n-gram lookup of {branches} continuations of {draft_tokens} tokens: expected at least 1 each")
        if not 1 <= shortest <= longest:
            raise ConfigError(f"n-gram lookup of {shortest} to {longest} tokens: expected 1 <= shortest <= longest")
        self._vocab_size = vocab_size
        self._draft_tokens = draft_tokens
        self._branches = branches
        self._longest = longest
        self._shortest = shortest
        self._page_size, self._kernels = 0, KernelSet()
        self._history = torch.empty(0, dtype=torch.int64)
        self._parents = torch.empty(0, dtype=torch.int64)

    @property
    def depth(self) -> int:
        """K, the number of tokens of one drafted continuation."""
        return self._draft_tokens

    @property
    def nodes(self) -> int:
        """T * K, the number of tokens of all drafted continuations."""
        return self._draft_tokens * self._branches

    @property
    def is_tree(self) -> bool:
        """True if there are several continuations."""
        return self._branches > 1

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """The history of token ids, one tensor [pages, page size]."""
        return (self._history.view(-1, self._page_size),)

    def prompt_passes(self, tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
        """Return no passes, because the lookup has no layers."""
        del tokens, sequences, longest
        return ()

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Allocate the history with one token per cache slot, and the constant parents of the tree."""
        self._page_size, self._kernels = page_size, backend.kernels_in_use
        self._history = torch.zeros(pages * page_size, dtype=torch.int64, device=backend.device)
        node = torch.arange(1, self.nodes + 1, device=backend.device)
        self._parents = torch.where((node - 1) % self._draft_tokens == 0, 0, node - 1)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Write the accepted tokens to the history and return an empty relay. Padding after the last valid token is
        overwritten before it is read.

        The rows of no request are all at page 0. Nothing is written for them: several would write one slot.
        """
        slots = torch.where(inputs.slots < self._page_size, 0, inputs.slots)
        self._kernels.scatter_rows(self._history, slots, inputs.tokens)
        return {}

    def draft(self, inputs: DraftInputs) -> Draft:
        """Search each request's token history for its last tokens, and return the tokens that followed them there."""
        text = self._text(inputs)
        match_lengths = self._match_lengths(text, inputs.seq_lens)
        seq_lens = inputs.seq_lens.unsqueeze(1)
        index = torch.arange(text.shape[1], device=text.device)
        following = text.gather(1, (index + 1).clamp(max=text.shape[1] - 1).expand_as(text))
        offsets = torch.arange(
            1, (inputs.count if inputs.count and not self.is_tree else self._draft_tokens) + 1, device=text.device
        )
        tokens, found = [], []
        # Prefer the longest match, then the latest one.
        score = torch.where(match_lengths >= self._shortest, match_lengths * text.shape[1] + index, -1)
        for _ in range(self._branches):
            best = score.max(dim=1, keepdim=True)
            # Without a match, repeat the last token: the slots after it belong to other requests.
            match_end = torch.where(best.values >= 0, best.indices, seq_lens - 2)
            period = (seq_lens - 1 - match_end).clamp(min=1)
            tokens.append(text.gather(1, (match_end + 1).clamp(min=0) + (offsets - 1) % period))
            found.append(best.values >= 0)
            first = tokens[-1][:, :1]
            score = torch.where(following == first, -1, score)
        drafted = torch.cat(tokens, dim=1)
        if not self.is_tree:
            # A deterministic draft is a one-point distribution.
            probs = F.one_hot(drafted, self._vocab_size).to(torch.float32) if inputs.sampling else None
            return Draft(drafted, probs)
        usable = torch.cat(found, dim=1).repeat_interleave(self._draft_tokens, dim=1)
        parents = torch.where(usable, self._parents, -1)
        root = parents.new_full((parents.shape[0], 1), -1)
        return Draft(drafted, None, Tree.from_parents(torch.cat((root, parents), dim=1), depth=self._draft_tokens))

    def _text(self, inputs: DraftInputs) -> Tensor:
        """Return the tokens of each request from its second on, int64 [B, S]. Values after a request's last token are
        meaningless.
        """
        pages = max(1, min(-(-inputs.max_kv // self._page_size), inputs.tables.shape[1]))
        first = inputs.tables[:, :pages].to(torch.int64) * self._page_size
        slots = first.unsqueeze(2) + torch.arange(self._page_size, device=first.device)
        return self._history[slots.flatten(1)]

    def _match_lengths(self, text: Tensor, seq_lens: Tensor) -> Tensor:
        """Return, for each position, how many tokens up to it equal those up to the request's last token, int64 [B, S]. 0
        from the last position on.
        """
        seq_lens = seq_lens.unsqueeze(1)
        index = torch.arange(text.shape[1], device=text.device)
        agrees = (index < seq_lens - 1).expand_as(text)
        length = torch.zeros_like(text)
        for back in range(self._longest):
            inside = (index >= back) & (seq_lens - 1 >= back)
            earlier = text.gather(1, (index - back).clamp(min=0).expand_as(text))
            latest = text.gather(1, (seq_lens - 1 - back).clamp(min=0))
            agrees = agrees & inside & (earlier == latest)
            length = length + agrees.to(torch.int64)
        return length
