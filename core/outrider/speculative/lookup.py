"""Proposers that look their drafts up in text, without a model and without host work.

NgramProposer drafts what followed the last tokens earlier in the text of the request (Saxena 2023, prompt lookup).

SuffixProposer (Oliaro et al. 2024) drafts what followed the longest matching suffix, in the request's own text and in past
outputs. Past outputs are in a :class:`SuffixTable` on the device, which draft-extend writes and the next draft reads, both on
the forward stream.

CombinedProposer drafts by suffix lookup if a long enough suffix matches, and by a head or a draft model otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import AttentionShape, Backend, ConfigError, KernelSet
from outrider.model import LanguageModel
from outrider.speculative.proposer import Draft, DraftInputs, ExtendInputs, Proposer, RelaySpec, slots_of
from outrider.speculative.tree import Tree


class NgramProposer(Proposer):
    """A proposer that drafts T continuations of K tokens each, copied from where the longest suffix of the text occurred
    before, latest first.

    The history is paged like the target's cache: the slot of position i holds token i+1, and the token at position 0 is
    missing. Shared prefixes, chunks and preemption therefore need no further handling, and nothing is relayed. Continuations
    differ in their first token. One that reaches the end of the text continues periodically. Without a match, a chain repeats
    the last token, and a tree leaves its nodes unused.

    ``longest`` is the maximum length of a matching suffix, in tokens.
    """

    name = "ngram"
    accepts_padding = looks_up = True
    extends = True
    reads_hidden = False
    relay: tuple[RelaySpec, ...] = ()
    host_lengths: Mapping[str, int] = MappingProxyType({})
    token_bytes = torch.int64.itemsize

    def __init__(self, *, vocab_size: int, draft_tokens: int, branches: int = 1, longest: int = 4) -> None:
        if draft_tokens < 1 or branches < 1:
            raise ConfigError(f"n-gram lookup of {branches} continuations of {draft_tokens} tokens: expected at least 1 each")
        if longest < 1:
            raise ConfigError(f"n-gram lookup of at most {longest} tokens: expected at least 1")
        self._vocab_size = vocab_size
        self._draft_tokens = draft_tokens
        self._branches = branches
        self._longest = longest
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
        score = torch.where(match_lengths > 0, match_lengths * text.shape[1] + index, -1)
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


_TOKEN_BITS, _STRENGTH_BITS = 24, 8
_MAX_STRENGTH = (1 << _STRENGTH_BITS) - 1
_MARK_BITS = 63 - _TOKEN_BITS - _STRENGTH_BITS
_HASH_FACTOR = 0x9E3779B97F4A7C1 | 1  # base of the polynomial hash of a context; products wrap around
_MIX_FACTOR = 0xFF51AFD7ED558CC | 1


class SuffixTable:
    """For each context of one of ``lengths``, the token that most often followed it recently, and a strength.

    A context is a node of the trie of all past outputs. Its hash gives the slot and a mark that identifies it. A different
    context with the same slot replaces it, so memory is bounded and new text displaces old text. A node's token is a majority
    vote with one counter (Boyer and Moore): the same token counts up, another token counts down and replaces it at zero.

    A slot is one int64 with mark, strength and token, so it is never half written. If one call writes a slot several times,
    the largest number stays, whatever the order. All tensors are on the device; every method enqueues on the current stream
    and supports capture.
    """

    def __init__(self, *, slots: int, lengths: Sequence[int], device: torch.device) -> None:
        """Allocate Z = ``slots`` slots, a power of two, and one more for discarded writes."""
        self._slots = slots
        self._lengths = torch.tensor(sorted(lengths), dtype=torch.int64, device=device)
        self._longest = max(lengths)
        powers = [1]
        for _ in range(self._longest):
            powers.append(_wrap_int64(powers[-1] * _HASH_FACTOR))
        self._powers = torch.tensor(powers[: self._longest], dtype=torch.int64, device=device)
        self._table = torch.zeros(slots + 1, dtype=torch.int64, device=device)

    @property
    def longest(self) -> int:
        """C, the longest context in tokens."""
        return self._longest

    def learn(self, contexts: Tensor, known: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Record that ``tokens`` int64 [M] followed ``contexts`` int64 [M, C], for the rows in which ``counts`` bool [M] is
        true.

        A context begins with its last token. ``known`` int64 [M] is the number of valid tokens of each context.
        """
        index, mark = self._find(contexts)
        found = self._table[index]
        token, strength = self._token(found), self._strength(found)
        new = tokens.unsqueeze(1).expand_as(token)
        is_same_context = found >> (_TOKEN_BITS + _STRENGTH_BITS) == mark
        confirms = is_same_context & (token == new)
        weakens = is_same_context & ~confirms & (strength > 1)
        token_after = torch.where(confirms | weakens, token, new)
        strength_after = torch.where(confirms, (strength + 1).clamp(max=_MAX_STRENGTH), torch.where(weakens, strength - 1, 1))
        packed = (((mark << _STRENGTH_BITS) | strength_after) << _TOKEN_BITS) | token_after
        is_written = counts.unsqueeze(1) & (self._lengths <= known.unsqueeze(1))
        index = torch.where(is_written, index, self._slots)
        self._table.scatter_reduce_(0, index.flatten(), packed.flatten(), "amax", include_self=False)

    def most_likely_token(self, contexts: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most likely token after ``contexts`` int64 [B, C], and the length of the longest known context, both
        int64 [B].

        ``known`` int64 [B] is the number of valid tokens of each context. The length is 0 if no context is known.
        """
        index, mark = self._find(contexts)
        found = self._table[index]
        is_known = (found >> (_TOKEN_BITS + _STRENGTH_BITS) == mark) & (self._lengths <= known.unsqueeze(1))
        best = torch.where(is_known, self._lengths, 0).max(dim=1, keepdim=True)
        return self._token(found).gather(1, best.indices).squeeze(1), best.values.squeeze(1)

    def _find(self, contexts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slot and the mark of each context of ``contexts`` for each context length, both int64 [M, L]. A mark is
        never 0.
        """
        sums = ((contexts + 1) * self._powers).cumsum(1)[:, self._lengths - 1]
        mixed = (sums + self._lengths) * _MIX_FACTOR
        mixed = (mixed ^ (mixed >> 29)) * _HASH_FACTOR
        mixed = mixed ^ (mixed >> 32)
        return mixed & (self._slots - 1), ((mixed >> 20) & ((1 << _MARK_BITS) - 1)).clamp(min=1)

    @staticmethod
    def _token(found: Tensor) -> Tensor:
        return found & ((1 << _TOKEN_BITS) - 1)

    @staticmethod
    def _strength(found: Tensor) -> Tensor:
        return (found >> _TOKEN_BITS) & _MAX_STRENGTH


def _wrap_int64(value: int) -> int:
    """Return ``value`` modulo 2**64 as a signed 64-bit integer, which torch's int64 arithmetic accepts."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


CONTEXT_LENGTHS = (1, 2, 3, 4, 6, 8)
"""Lengths of the contexts by which past outputs are looked up, in tokens."""

_TABLE_SLOTS = 1 << 20  # a power of two, 8 MiB; each output token uses at most one slot per length


class SuffixProposer(NgramProposer):
    """A chain of K tokens. Past outputs of all requests are used if they match a longer suffix than the request's own text.

    Requests that sample don't use past outputs: their tokens depend on their drafts, and must not depend on earlier requests.
    Other requests' tokens can't leak: a draft is only a guess, which the target verifies.
    """

    name = "suffix"
    depends_on_other_requests = True

    def __init__(self, *, vocab_size: int, draft_tokens: int) -> None:
        if draft_tokens < 1:
            raise ConfigError(f"suffix decoding of {draft_tokens} tokens: expected at least 1")
        if vocab_size > 1 << 24:
            raise ConfigError(f"suffix decoding over a vocabulary of {vocab_size} tokens: expected at most {1 << 24}")
        super().__init__(vocab_size=vocab_size, draft_tokens=draft_tokens, longest=max(CONTEXT_LENGTHS))
        self._past: SuffixTable | None = None

    @classmethod
    def for_target(cls, target: LanguageModel, draft_tokens: int) -> SuffixProposer:
        """Return a proposer for ``target`` with a table of the default size."""
        return cls(vocab_size=target.config.vocab_size, draft_tokens=draft_tokens)

    @property
    def longest(self) -> int:
        """Maximum number of last tokens of a request that a lookup compares."""
        return self._longest

    @property
    def past_outputs(self) -> SuffixTable:
        """The table of past outputs. It exists from :meth:`allocate` on. Raises :class:`ConfigError` before."""
        if self._past is None:
            raise ConfigError("the proposer 'suffix' has no table yet; the engine allocates it")
        return self._past

    def allocate(self, *, backend: Backend, pages: int, page_size: int) -> None:
        """Allocate the token history and the table of past outputs on the device."""
        super().allocate(backend=backend, pages=pages, page_size=page_size)
        self._past = SuffixTable(slots=_TABLE_SLOTS, lengths=CONTEXT_LENGTHS, device=backend.device)

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Write the accepted tokens to the history, and decoded tokens also to the table of past outputs. Returns an empty
        relay.
        """
        relayed = super().extend(inputs)
        if inputs.prompt is None:
            self._store_contexts(inputs)
        return relayed

    def draft(self, inputs: DraftInputs) -> Draft:
        """Look up each request's last tokens in its own text and in past outputs, and return the continuation of the longer
        match.
        """
        tokens, _ = self.continuation(inputs)
        # A deterministic draft is a one-point distribution.
        return Draft(tokens, F.one_hot(tokens, self._vocab_size).to(torch.float32) if inputs.sampling else None)

    def continuation(self, inputs: DraftInputs) -> tuple[Tensor, Tensor]:
        """Return the continuation int64 [B, K] of each request's longest matching suffix, and that suffix's length int64 [B].

        Length 0 means no match: the continuation then repeats the last token.
        """
        count = inputs.count or self._draft_tokens
        text = self._text(inputs)
        from_text, matched = self._find_in_text(text, inputs.seq_lens, count)
        from_past, length = self._find_in_past(text, from_text, inputs.seq_lens)
        better = (length > matched) & (inputs.temperature <= 0)
        return torch.where(better.unsqueeze(1), from_past, from_text), torch.where(better, length, matched)

    def _find_in_text(self, text: Tensor, seq_lens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return continuations [B, count] and match lengths [B] from each request's own ``text`` [B, S]. The longest match
        wins, then the latest.
        """
        index = torch.arange(text.shape[1], device=text.device)
        best = (self._match_lengths(text, seq_lens) * text.shape[1] + index).max(dim=1, keepdim=True).values
        matched, match_end = best // text.shape[1], best % text.shape[1]
        last = seq_lens.unsqueeze(1) - 1
        match_end = torch.where(matched > 0, match_end, last - 1)
        offsets = torch.arange(count, device=text.device)
        tokens = text.gather(1, (match_end + 1).clamp(min=0) + offsets % (last - match_end).clamp(min=1))
        return tokens, matched.squeeze(1)

    def _find_in_past(self, text: Tensor, fallback: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [B, K] from past outputs and the first match length [B]. Tokens without a match are those of
        ``fallback``.
        """
        past = self.past_outputs
        back = torch.arange(past.longest, device=text.device)
        context = text.gather(1, (seq_lens.unsqueeze(1) - 1 - back).clamp(min=0))
        known = seq_lens.clamp(max=past.longest)
        tokens, first = [], torch.zeros_like(seq_lens)
        for step in range(fallback.shape[1]):
            token, length = past.most_likely_token(context, known)
            token = torch.where(length > 0, token, fallback[:, step])
            first = length if step == 0 else first
            tokens.append(token)
            context = torch.cat((token.unsqueeze(1), context[:, :-1]), dim=1)
            known = (known + 1).clamp(max=past.longest)
        return torch.stack(tokens, dim=1), first

    def _store_contexts(self, inputs: ExtendInputs) -> None:
        """Add the decoded tokens with their contexts to the table, except for padding and requests of captures (page 0)."""
        past, tables = self.past_outputs, inputs.attention.block_table
        batch = inputs.last.shape[0]
        positions = inputs.positions.view(batch, -1)
        width = positions.shape[1]
        # The slot of position i holds token i + 1. The context of the token after position i begins with the token at i.
        context_positions = positions.unsqueeze(2) - 1 - torch.arange(past.longest, device=positions.device)
        slots = slots_of(context_positions.clamp(min=0).flatten(1), tables, self._page_size)
        contexts = self._history[slots].view(batch * width, -1)
        valid = torch.arange(batch * width, device=positions.device).view(batch, width) <= inputs.last.unsqueeze(1)
        valid = valid & (tables[:, :1] > 0)
        past.learn(contexts, positions.flatten(), inputs.tokens, valid.flatten())


MIN_SUFFIX_TOKENS = 4
"""Default length of a matching suffix, in tokens, from which the lookup drafts."""


def _of_other(name: str) -> Any:
    """Return the property of a :class:`CombinedProposer` that has the value of the other proposer's property ``name``."""
    return property(attrgetter(f"_other.{name}"))


class CombinedProposer(Proposer):
    """A chain of K tokens per request: from ``lookup`` if it matches a suffix of at least ``least`` tokens, else from
    ``other``.

    The device selects the draft, so both proposers run in every iteration. The combination raises the number of accepted
    tokens; it doesn't save the time of ``other``. The relay is that of ``other``. Both have their own caches.
    """

    extends = True
    depth = _of_other("depth")
    max_context = _of_other("max_context")
    aux_hidden_state_layers = _of_other("aux_hidden_state_layers")
    reads_hidden = _of_other("reads_hidden")
    relay = _of_other("relay")
    host_lengths = _of_other("host_lengths")
    host_widths = _of_other("host_widths")
    recurrent = _of_other("recurrent")
    states = _of_other("states")
    state_bytes = _of_other("state_bytes")
    request_bytes = _of_other("request_bytes")

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
    def slots(self) -> int:
        """Number of slots that an iteration writes: the larger of the lookup's and the other proposer's."""
        return max(self._lookup.slots, self._other.slots)

    @property
    def lookahead(self) -> int:
        """The larger of the lookup's and the other proposer's lookahead."""
        return max(self._lookup.lookahead, self._other.lookahead)

    def host_lengths_of(self, count: int) -> Mapping[str, int] | None:
        """Return the host lengths of the other proposer for a draft of ``count`` tokens, or None if it has none."""
        return self._other.host_lengths_of(count)

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

    def allocate_states(self, *, backend: Backend, rows: int, requests: int) -> None:
        """Allocate the states of the other proposer."""
        self._other.allocate_states(backend=backend, rows=rows, requests=requests)

    def draft(self, inputs: DraftInputs) -> Draft:
        """Draft with both proposers, and select for each request, on the device, the lookup's chain if its match is long
        enough.
        """
        (found, matched), other = self._lookup.continuation(inputs), self._other.draft(inputs)
        count = min(found.shape[1], other.tokens.shape[1])
        uses_lookup = (matched >= self._least).unsqueeze(1)
        tokens = torch.where(uses_lookup, found[:, :count], other.tokens[:, :count])
        if other.probs is None:
            return Draft(tokens, None)
        probs = other.probs[:, :count]
        one_hot = F.one_hot(found[:, :count], probs.shape[-1]).to(probs.dtype)
        return Draft(tokens, torch.where(uses_lookup.unsqueeze(2), one_hot, probs))

    def extend(self, inputs: ExtendInputs) -> Mapping[str, Tensor]:
        """Run draft-extend of both proposers over the accepted tokens, and return the relay of the other proposer."""
        self._lookup.extend(inputs)
        return self._other.extend(inputs)
