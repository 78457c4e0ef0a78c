"""Suffix decoding (Oliaro et al. 2024): what followed a request's longest known suffix, in its own text or in past outputs.

No model and no host. The own text is searched as :mod:`outrider.speculative.ngram` does; past outputs are in a
:class:`~outrider.speculative.suffixes.SuffixTable` on the device, written by draft-extend and read by the next draft, both on
the forward stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import Backend, ConfigError
from outrider.model import LanguageModel
from outrider.speculative.ngram import NgramProposer
from outrider.speculative.proposer import Draft, DraftInputs, ExtendInputs
from outrider.speculative.slots import slots_of
from outrider.speculative.suffixes import SuffixTable

LENGTHS = (1, 2, 3, 4, 6, 8)
"""Lengths of context that past outputs are looked up by."""

_SLOTS = 1 << 20  # 8 MiB: each token of an output takes one for each length at most


@dataclass(frozen=True, slots=True)
class Continuation:
    """What was found for each request: ``tokens`` int64 [B, K], and ``matched`` int64 [B], how long the suffix is that they
    follow; 0: none was found, and the tokens mean nothing.
    """

    tokens: Tensor
    matched: Tensor


class SuffixProposer(NgramProposer):
    """A chain of K tokens. Past outputs, of all requests and of this one, count where a longer suffix is found in them than
    in the request's own prompt and output.

    ``slots``: places of the table of past outputs, a power of two; it never grows. A request that draws isn't drafted for
    from past outputs: what it draws depends on its drafts, and must not depend on what ran before it. Other requests' tokens
    never come out: a draft is only a guess, which the target verifies.
    """

    name = "suffix"
    remembers = True

    def __init__(self, *, vocab_size: int, draft_tokens: int, slots: int = _SLOTS) -> None:
        if draft_tokens < 1:
            raise ConfigError(f"suffix decoding of {draft_tokens} tokens: expected at least 1")
        if slots < 2 or slots & (slots - 1):
            raise ConfigError(f"a table of past outputs of {slots} places: expected a power of two")
        if vocab_size > 1 << 24:
            raise ConfigError(f"suffix decoding over a vocabulary of {vocab_size} tokens: expected at most {1 << 24}")
        super().__init__(vocab_size=vocab_size, draft_tokens=draft_tokens, longest=max(LENGTHS))
        self._slots = slots
        self._past: SuffixTable | None = None

    @classmethod
    def of(cls, target: LanguageModel, draft_tokens: int) -> SuffixProposer:
        """For a target, of the usual size."""
        return cls(vocab_size=target.config.vocab_size, draft_tokens=draft_tokens)

    @property
    def longest(self) -> int:
        """The most tokens of a suffix that are looked at."""
        return self._longest

    @property
    def past(self) -> SuffixTable:
        """Past outputs; exist from :meth:`allocate` on."""
        if self._past is None:
            raise ConfigError("the proposer 'suffix' has no table yet; the engine allocates it")
        return self._past

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """One token a slot, and the table."""
        super().allocate(backend=backend, pages=pages, page_size=page_size)
        self._past = SuffixTable(slots=self._slots, lengths=LENGTHS, device=backend.device)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Write the tokens down; those that were decoded also as past output."""
        relayed = super().extend(inputs)
        if inputs.prompt is None:
            self._learn(inputs)
        return relayed

    def draft(self, inputs: DraftInputs) -> Draft:
        """Look up and copy."""
        tokens = self.continuation(inputs).tokens
        # The draft is certain of its token: a distribution of one point.
        return Draft(tokens, F.one_hot(tokens, self._vocab_size).to(torch.float32) if inputs.sampling else None)

    def continuation(self, inputs: DraftInputs) -> Continuation:
        """What follows the longest suffix of each request. Where nothing is found, the last token again."""
        count = inputs.count or self._draft_tokens
        text = self._text(inputs)
        own, matched = self._own(text, inputs.seq_lens, count)
        past, length = self._from_past(text, own, inputs.seq_lens)
        better = (length > matched) & (inputs.temperature <= 0)
        return Continuation(torch.where(better.unsqueeze(1), past, own), torch.where(better, length, matched))

    def _own(self, text: Tensor, seq_lens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """From the request's own text [B, S]: the longest suffix, the latest place of it. [B, count] tokens, [B] lengths."""
        index = torch.arange(text.shape[1], device=text.device)
        best = (self._agreement(text, seq_lens) * text.shape[1] + index).max(dim=1, keepdim=True).values
        matched, place = best // text.shape[1], best % text.shape[1]
        last = seq_lens.unsqueeze(1) - 1
        place = torch.where(matched > 0, place, last - 1)
        ahead = torch.arange(count, device=text.device)
        tokens = text.gather(1, (place + 1).clamp(min=0) + ahead % (last - place).clamp(min=1))
        return tokens, matched.squeeze(1)

    def _from_past(self, text: Tensor, own: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        """From past outputs, token by token [B, count]; where none goes on, that of ``own``. And the first length."""
        past = self.past
        back = torch.arange(past.longest, device=text.device)
        context = text.gather(1, (seq_lens.unsqueeze(1) - 1 - back).clamp(min=0))
        known = seq_lens.clamp(max=past.longest)
        tokens, first = [], torch.zeros_like(seq_lens)
        for step in range(own.shape[1]):
            token, length = past.follow(context, known)
            token = torch.where(length > 0, token, own[:, step])
            first = length if step == 0 else first
            tokens.append(token)
            context = torch.cat((token.unsqueeze(1), context[:, :-1]), dim=1)
            known = (known + 1).clamp(max=past.longest)
        return torch.stack(tokens, dim=1), first

    def _learn(self, inputs: ExtendInputs) -> None:
        """The decoded tokens, each behind those before it. Padding isn't learnt, nor what nobody asked for (page 0)."""
        past, tables = self.past, inputs.attention.block_table
        batch = inputs.last.shape[0]
        positions = inputs.positions.view(batch, -1)
        width = positions.shape[1]
        # The slot of position i holds token i + 1, so that of i - 1 the token at i, which is the first of its context.
        places = positions.unsqueeze(2) - 1 - torch.arange(past.longest, device=positions.device)
        slots = slots_of(places.clamp(min=0).flatten(1), tables, self._page_size)
        contexts = self._history[slots].view(batch * width, -1)
        valid = torch.arange(batch * width, device=positions.device).view(batch, width) <= inputs.last.unsqueeze(1)
        valid = valid & (tables[:, :1] > 0)
        past.learn(contexts, positions.flatten(), inputs.tokens, valid.flatten())
