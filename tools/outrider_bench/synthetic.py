"""Synthetic acceptance, for measurements: how many drafted tokens pass is decided beforehand, and the text means nothing.

Nothing that serves requests knows of it: a model is made with such kernels by hand, and their name says so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.device import ConfigError, KernelSet, WrappedKernels

_PLACES = 0xFFFF
_APART = 257
"""Places between those of neighbouring requests; odd, so that no two of 65536 begin at the same one."""
_MANY = 1024
_ROUNDS = ((7, 0x2993), (5, 0xE877), (9, 0x0235))
"""A hash of 16 bits onto themselves without a pattern in neighbours: how far a step goes depends on the luck before it."""


class _Verdicts(NamedTuple):
    """What is decided beforehand, so that little is left to do between two iterations.

    ``by_place`` int64 [requests, positions, 2 K + 2]: how many are accepted; what each token of the result is that is no
    draft, -1 behind the decided one, and 0 where there is a draft; and there 1, to be multiplied by it. Requests see one and
    the same table, each from a place of its own on. ``requests`` [requests]: 0, 1, …
    """

    by_place: Tensor
    requests: Tensor


class _Synthetic(WrappedKernels):
    def __init__(self, inner: KernelSet, rates: tuple[float, ...], described: str, context: int) -> None:
        super().__init__(inner)
        self.name = f"{inner.name}, synthetic acceptance of {described}"
        self.rates, self.context = rates, context
        self.verdicts: dict[tuple[int, int, int, torch.device], _Verdicts] = {}

    def verify_chain(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        draft_probs: Tensor | None,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run the real verification, so that its cost is measured, then replace its result; two launches more."""
        super().verify_chain(target_logits, draft_tokens, draft_probs, temperature, seeds, positions)
        return self._replaced(target_logits, draft_tokens, positions)

    def verify_checked(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        found: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`verify_chain`; without a draft there is nothing to replace."""
        made = self.inner.verify_checked(target_logits, draft_tokens, temperature, seeds, positions, found)
        return self._replaced(target_logits, draft_tokens, positions) if draft_tokens.shape[1] else made

    def _replaced(self, logits: Tensor, draft_tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        batch, drafted = draft_tokens.shape
        most = max(_MANY, 1 << (batch - 1).bit_length())
        key = (most, drafted, logits.shape[-1], draft_tokens.device)
        if key not in self.verdicts:
            self.verdicts[key] = _decide(self.rates, self.context + drafted + 1, *key)
        decided = self.verdicts[key]
        made = decided.by_place[decided.requests[:batch], positions]
        tokens = made[:, 1 : drafted + 2]
        tokens[:, :drafted].addcmul_(made[:, drafted + 2 :], draft_tokens)
        return tokens, made[:, 0]


def _decide(
    rates: tuple[float, ...], length: int, most: int, drafted: int, vocabulary: int, device: torch.device
) -> _Verdicts:
    """For ``most`` requests and ``length`` positions. A request's luck at a place of its text, by a hash of both: it passes
    each place whose rate is above. The token behind the accepted ones is drawn beforehand as well, since any is as good.
    """
    luck = torch.arange(_PLACES + 1, device=device)
    for shift, factor in _ROUNDS:
        luck = (luck ^ luck >> shift) * factor & _PLACES
    luck ^= luck >> 10
    accepted = sum((luck < round(rate * 65536)).to(torch.int64) for rate in rates[:drafted]) + torch.zeros_like(luck)
    behind = luck.flip(0) * 40503 % vocabulary
    lane, count = torch.arange(drafted + 1, device=device), accepted.unsqueeze(1)
    others = torch.where(lane < count, 0, torch.where(lane == count, behind.unsqueeze(1), -1))
    drafts = (lane[:drafted] < count).to(torch.int64)
    once = torch.cat((count, others, drafts), dim=1)
    places, width = length + most * _APART, once.shape[1]
    table = once.repeat(-(-places // (_PLACES + 1)), 1)
    by_place = table.as_strided((most, length, width), (_APART * width, width, 1))
    return _Verdicts(by_place, torch.arange(most, device=device))


def rates_of_length(accept_length: float, draft_tokens: int) -> tuple[float, ...]:
    """The chance that at least so many drafted tokens pass, where each passes with one and the same chance, as far as the one
    before it did: the chance that makes ``accept_length`` tokens an iteration, the target's own included.

    Raises :class:`ConfigError` for a length that ``draft_tokens`` can't give.
    """
    if not 1 <= accept_length <= draft_tokens + 1:
        raise ConfigError(
            f"--accept-length is {accept_length:g}; with {draft_tokens} drafted tokens it is 1 to {draft_tokens + 1}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        chance = (low + high) / 2
        low, high = (chance, high) if sum(_powers(chance, draft_tokens)) < accept_length - 1 else (low, chance)
    return _powers(high, draft_tokens)


def _powers(chance: float, count: int) -> tuple[float, ...]:
    return tuple(chance**number for number in range(1, count + 1))


def with_synthetic_acceptance(kernels: KernelSet, accept_length: float, draft_tokens: int, *, context: int) -> KernelSet:
    """``kernels`` whose ``verify_chain`` accepts ``accept_length`` tokens of ``draft_tokens`` drafted ones on average, the
    target's own included, by the chances of :func:`rates_of_length` and a hash of request and position. For texts of
    ``context`` tokens at most.

    A shorter chain passes as far as those of the whole one do, so that it yields fewer. Trees are verified as ever. Raises
    :class:`ConfigError` as :func:`rates_of_length` does.
    """
    rates = rates_of_length(accept_length, draft_tokens)
    return _Synthetic(kernels, rates, f"{accept_length:g} ({'/'.join(f'{rate:.3g}' for rate in rates)})", context)
