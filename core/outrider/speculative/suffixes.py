"""What followed the last tokens in past outputs: a trie of bounded depth, kept as a table of fixed size on the device.

Letters: B requests, M new tokens, L lengths of context, C the longest of them, Z slots of the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_TOKEN_BITS, _STRENGTH_BITS = 24, 8
_MOST = (1 << _STRENGTH_BITS) - 1
_MARK_BITS = 63 - _TOKEN_BITS - _STRENGTH_BITS
_PRIME = 0x9E3779B97F4A7C1 | 1  # of contexts' polynomial; products wrap around
_MIX = 0xFF51AFD7ED558CC | 1


class SuffixTable:
    """For each context of one of the ``lengths``, the token that most often followed it lately, and how firmly.

    A context is a node of the trie of all past outputs; its slot is found by its hash, which is checked by a mark. A slot
    that another context needs is taken over, so that memory is bounded: new text takes the place of old text. The token of a
    node is a majority with one counter (Boyer and Moore): the same token counts up, another one counts down and takes the
    place at zero.

    A slot is one int64: mark, strength and token. So a slot is never half written, and of several writes in one call the
    largest number stays, in whatever order they come. Everything is on the device, enqueues on the ambient stream and may be
    captured.
    """

    def __init__(self, *, slots: int, lengths: Sequence[int], device: torch.device) -> None:
        """``slots``: Z, a power of two. One more takes what is thrown away."""
        self._slots = slots
        self._lengths = torch.tensor(sorted(lengths), dtype=torch.int64, device=device)
        self._longest = max(lengths)
        powers = [1]
        for _ in range(self._longest):
            powers.append(_wrapped(powers[-1] * _PRIME))
        self._powers = torch.tensor(powers[: self._longest], dtype=torch.int64, device=device)
        self._table = torch.zeros(slots + 1, dtype=torch.int64, device=device)

    @property
    def longest(self) -> int:
        """C."""
        return self._longest

    def learn(self, contexts: Tensor, known: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """``tokens`` int64 [M] followed ``contexts`` int64 [M, C], the last token of each first; where ``counts`` bool [M].

        ``known`` int64 [M]: how many tokens of its context there are.
        """
        index, mark = self._find(contexts)
        found = self._table[index]
        token, strength = self._token(found), self._strength(found)
        new = tokens.unsqueeze(1).expand_as(token)
        ours = found >> (_TOKEN_BITS + _STRENGTH_BITS) == mark
        same = ours & (token == new)
        stays = ours & ~same & (strength > 1)
        kept = torch.where(same | stays, token, new)
        firm = torch.where(same, (strength + 1).clamp(max=_MOST), torch.where(stays, strength - 1, 1))
        packed = (((mark << _STRENGTH_BITS) | firm) << _TOKEN_BITS) | kept
        goes = counts.unsqueeze(1) & (self._lengths <= known.unsqueeze(1))
        index = torch.where(goes, index, self._slots)
        self._table.scatter_reduce_(0, index.flatten(), packed.flatten(), "amax", include_self=False)

    def follow(self, contexts: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """What most likely comes behind ``contexts`` int64 [B, C], of which ``known`` int64 [B] tokens are there: that of the
        longest context that was seen, int64 [B], and that length, 0 where none was.
        """
        index, mark = self._find(contexts)
        found = self._table[index]
        seen = (found >> (_TOKEN_BITS + _STRENGTH_BITS) == mark) & (self._lengths <= known.unsqueeze(1))
        best = torch.where(seen, self._lengths, 0).max(dim=1, keepdim=True)
        return self._token(found).gather(1, best.indices).squeeze(1), best.values.squeeze(1)

    def _find(self, contexts: Tensor) -> tuple[Tensor, Tensor]:
        """Slot and mark of each context, for each length: int64 [M, L] both. A mark isn't 0."""
        sums = ((contexts + 1) * self._powers).cumsum(1)[:, self._lengths - 1]
        mixed = (sums + self._lengths) * _MIX
        mixed = (mixed ^ (mixed >> 29)) * _PRIME
        mixed = mixed ^ (mixed >> 32)
        return mixed & (self._slots - 1), ((mixed >> 20) & ((1 << _MARK_BITS) - 1)).clamp(min=1)

    @staticmethod
    def _token(found: Tensor) -> Tensor:
        return found & ((1 << _TOKEN_BITS) - 1)

    @staticmethod
    def _strength(found: Tensor) -> Tensor:
        return (found >> _TOKEN_BITS) & _MOST


def _wrapped(value: int) -> int:
    """As int64 arithmetic wraps."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
