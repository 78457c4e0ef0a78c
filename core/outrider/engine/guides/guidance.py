"""Guidance: the host state of one guided request.

It computes the masks of the tokens that the grammar allows, after the output and after each node of a draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.requests.stop_text import partial_match_length

ALLOW_ALL_WORD = -1
"""A mask word that allows all of its 32 tokens."""
MASK_TIME_LIMIT_S = 1.0
"""CPU-time limit for the masks of one request in one iteration, in seconds.

All other requests of the batch wait for these masks. Ambiguous grammars take longer with each token.
"""


def mask_words(vocabulary: int) -> int:
    """Return W, the number of int32 words of a mask with one bit for each of ``vocabulary`` tokens."""
    return -(-vocabulary // 32)


def mask_of_tokens(tokens: Iterable[int], vocabulary: int) -> Tensor:
    """Return a mask int32 [W] that allows ``tokens`` and no other token."""
    allowed = torch.zeros(mask_words(vocabulary) * 32, dtype=torch.int64)
    allowed[torch.tensor(sorted(tokens), dtype=torch.int64)] = 1
    bits = (allowed.view(-1, 32) << torch.arange(32)).sum(dim=1)
    return bits.to(torch.int32)


class Matcher(Protocol):
    """A position in a grammar, which advances with each output token. Grammar libraries and test tools implement this
    protocol.
    """

    def accept(self, token: int) -> bool:
        """Advance by ``token`` and return True, or return False without a change if the grammar doesn't allow it."""

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens that the matcher has accepted."""

    def fill(self, words: Tensor, index: int) -> None:
        """Write the mask of allowed tokens into row ``index`` of ``words`` int32 [N, W].

        Bit i of word w stands for token 32w+i. Not called if the matcher is :attr:`is_complete`.
        """

    @property
    def is_complete(self) -> bool:
        """Return True if the text is complete, so that no token may follow."""


class UnrestrictedMatcher:
    """A matcher that allows every token and whose text is never complete; requests of the warm-up use it."""

    is_complete = False

    def accept(self, token: int) -> bool:
        """Return True for every token."""
        del token
        return True

    def rollback(self, count: int) -> None:
        """Do nothing: the matcher has no position."""
        del count

    def fill(self, words: Tensor, index: int) -> None:
        """Write :data:`ALLOW_ALL_WORD` to every word of row ``index``."""
        words[index].fill_(ALLOW_ALL_WORD)


class DelayedMatcher:
    """A matcher for the text after the first occurrence of ``marker``. Until then every token but ``ends`` is allowed.

    ``bytes_of`` returns a token's text. ``crossing`` are the tokens, with their texts, that may complete the marker and begin
    the constrained text at once: they aren't allowed where they would.
    """

    def __init__(
        self,
        matcher: Matcher,
        marker: bytes,
        bytes_of: Callable[[int], bytes],
        *,
        crossing: Sequence[tuple[int, bytes]],
        ends: frozenset[int],
        vocabulary: int,
    ) -> None:
        self._matcher = matcher
        self._marker = marker
        self._bytes_of = bytes_of
        self._crossing = crossing
        self._ends = ends
        self._vocabulary = vocabulary
        self._waiting_mask = ~mask_of_tokens(ends, vocabulary)
        self._seen: bytes | None = b""  # the beginning of the marker that the text ends with; None after the marker
        self._history: list[bytes | None] = []  # the value before each accepted token

    def accept(self, token: int) -> bool:
        """Append the token's text and look for the marker in it. After the marker, pass the token to the matcher. Returns
        False if the token isn't allowed.
        """
        if self._seen is None:
            if not self._matcher.accept(token):
                return False
            self._history.append(None)
            return True
        text = self._seen + self._bytes_of(token)
        before, marker, rest = text.partition(self._marker)
        if token in self._ends or rest.strip():
            return False
        self._history.append(self._seen)
        self._seen = None if marker else before[len(before) - partial_match_length(before, (self._marker,)) :]
        return True

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens: first those after the marker, then those before."""
        for _ in range(count):
            self._seen = self._history.pop()
            if self._seen is None:
                self._matcher.rollback(1)

    def fill(self, words: Tensor, index: int) -> None:
        """After the marker, write the matcher's mask to row ``index`` of ``words``. Before it, write a mask without the
        ``ends`` and the crossing tokens that would violate the guide.
        """
        if self._seen is None:
            self._matcher.fill(words, index)
            return
        words[index] = self._waiting_mask
        crossing = [token for token, text in self._crossing if (self._seen + text).partition(self._marker)[2].strip()]
        if crossing:
            words[index] &= ~mask_of_tokens(crossing, self._vocabulary)

    @property
    def is_complete(self) -> bool:
        """True if the marker has come and the text after it is complete."""
        return self._seen is None and self._matcher.is_complete


class Guidance:
    """The matcher of one request. Between calls the matcher has accepted exactly the request's output."""

    def __init__(
        self,
        matcher: Matcher,
        *,
        vocabulary: int,
        held_back: Sequence[tuple[frozenset[int], int]] = (),
        banned: frozenset[int] = frozenset(),
    ) -> None:
        """Create the guidance of one request from its matcher.

        ``held_back`` are pairs of a token set and the number of output tokens before which the set is masked, unless the
        grammar allows no other token. ``banned`` are tokens that the request's ``logit_bias`` bans.
        """
        self._matcher = matcher
        self._output_length = 0
        self._draft_depth = 0  # draft tokens that the matcher has accepted after the output
        self._late = False
        self._unheld = [(~mask_of_tokens(held, vocabulary), until) for held, until in held_back if held and until]
        self._unbanned = ~mask_of_tokens(banned, vocabulary) if banned else None

    @property
    def exceeded_time_limit(self) -> bool:
        """Return True if masks took longer than :data:`MASK_TIME_LIMIT_S`. :meth:`accept_token` then rejects every token."""
        return self._late

    @property
    def is_complete(self) -> bool:
        """Return True if the output is complete and no token may follow."""
        return self._matcher.is_complete

    def accept_token(self, token: int) -> str | None:
        """Advance by an output token. Return None, or the reason if the guide doesn't allow the token."""
        self._roll_back_to(0)
        if self._late:
            return (
                f"finding what its guide allows behind {self._output_length} tokens took more than {MASK_TIME_LIMIT_S:g} s; "
                "write the guide with fewer ways to read a text"
            )
        if not self._matcher.accept(token):
            return (
                f"token {token} at {self._output_length} of the output isn't allowed by the guide, and nothing that is was "
                "left to choose; a logit_bias may ban it"
            )
        self._output_length += 1
        return None

    def fill_next_mask(self, words: Tensor, index: int) -> None:
        """Write the mask of the token after the output into row ``index`` of ``words`` int32 [N, W]."""
        self._roll_back_to(0)
        began = time.thread_time()
        self._fill(words, index)
        self._late |= time.thread_time() - began > MASK_TIME_LIMIT_S

    def fill_draft_masks(self, tokens: Sequence[int], parents: Sequence[int], words: Tensor) -> None:
        """Write the masks of the tokens after the output and after each draft node into ``words`` int32 [N, W].

        ``tokens``: the tokens of nodes 1 to N-1. ``parents``: the parent of each of the N nodes, -1 for the root and for
        unused nodes. Nodes after a disallowed token get a mask of all tokens, because the target rejects them.
        """
        words.fill_(ALLOW_ALL_WORD)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            if node and parent >= 0:
                children.setdefault(parent, []).append(node)
        began = time.thread_time()
        self._fill(words, 0)
        stack = [(node, 0) for node in reversed(children.get(0, ()))]
        while stack:
            node, depth = stack.pop()
            self._roll_back_to(depth)
            self._late |= time.thread_time() - began > MASK_TIME_LIMIT_S
            if self._late:
                break
            if self._matcher.is_complete or not self._matcher.accept(tokens[node - 1]):
                continue
            self._draft_depth += 1
            self._fill(words, node)
            stack += [(child, depth + 1) for child in reversed(children.get(node, ()))]
        self._late |= time.thread_time() - began > MASK_TIME_LIMIT_S
        self._roll_back_to(0)

    def _roll_back_to(self, depth: int) -> None:
        """Roll the matcher back to ``depth`` tokens of the draft, also from tokens that an interrupted call left."""
        if self._draft_depth > depth:
            self._matcher.rollback(self._draft_depth - depth)
            self._draft_depth = depth

    def _fill(self, words: Tensor, index: int) -> None:
        row = words[index]
        if self._matcher.is_complete:
            row.fill_(ALLOW_ALL_WORD)
            return
        self._matcher.fill(words, index)
        for unheld, until in self._unheld:
            if self._output_length + self._draft_depth < until and bool((row & unheld).any()):
                row &= unheld
        if self._unbanned is not None and not bool((row & self._unbanned).any()):
            row.fill_(ALLOW_ALL_WORD)  # the guide allows banned tokens only: accept_token() rejects the sampled one
