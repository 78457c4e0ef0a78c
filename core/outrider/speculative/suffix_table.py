"""SuffixTable: the token that followed each context in past outputs, as a depth-bounded trie in a fixed-size device table.

Letters: B requests, M new tokens, L lengths of context, C the longest of them, Z slots of the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
        """Record that ``tokens`` int64 [M] followed ``contexts`` int64 [M, C], where ``counts`` bool [M] is true.

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
        """Return slot and mark of each context for each length, both int64 [M, L]. A mark is never 0."""
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
    """Wrap ``value`` to the range of int64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
