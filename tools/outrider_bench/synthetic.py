"""Synthetic acceptance, for measurements: how many drafted tokens pass is decided beforehand, and the text means nothing.

Nothing that serves requests knows of it: a model is made with such kernels by hand, and their name says so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.device import ConfigError, KernelSet, WrappedKernels

_PLACES = 0xFFFF
_APART = 40503  # between the places of neighbouring requests; odd, so that no two of 65536 coincide
_ROUNDS = ((7, 0x2993), (5, 0xE877), (9, 0x0235))
"""A hash of 16 bits onto themselves without a pattern in neighbours: how far a step goes depends on the luck before it."""


class _Verdicts(NamedTuple):
    """What is decided beforehand, int64: ``by_place`` [K+2, 2**16], by a hash of the place how many are accepted, and
    where each token of the result then comes from: a draft, the real token behind them, or the -1 behind that; ``none``
    [B, 1]; ``offsets`` [B] sets the requests of a batch apart.
    """

    by_place: Tensor
    none: Tensor
    offsets: Tensor


class _Synthetic(WrappedKernels):
    def __init__(self, inner: KernelSet, rates: tuple[float, ...], described: str) -> None:
        super().__init__(inner)
        self.name = f"{inner.name}, synthetic acceptance of {described}"
        self.rates = rates
        self.verdicts: dict[tuple[int, int, torch.device], _Verdicts] = {}

    def verify_chain(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        draft_probs: Tensor | None,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run the real verification, so that its cost is measured, then replace its result; a few launches more."""
        tokens, _ = super().verify_chain(target_logits, draft_tokens, draft_probs, temperature, seeds, positions)
        batch, drafted = draft_tokens.shape
        key = (batch, drafted, tokens.device)
        if key not in self.verdicts:
            self.verdicts[key] = _decide(self.rates, *key)
        decided = self.verdicts[key]
        verdicts = decided.by_place.index_select(1, positions + decided.offsets & _PLACES)
        # Of the real verdict the first token alone is certain to be one.
        known = torch.cat((draft_tokens, tokens[:, :1], decided.none), dim=1)
        return known.gather(1, verdicts[1:].t()), verdicts[0]


def _decide(rates: tuple[float, ...], batch: int, drafted: int, device: torch.device) -> _Verdicts:
    """A request's luck at a place of its text, by a hash of both: it passes each place whose rate is above."""
    luck = torch.arange(_PLACES + 1, device=device)
    for shift, factor in _ROUNDS:
        luck = (luck ^ luck >> shift) * factor & _PLACES
    luck ^= luck >> 10
    accepted = sum((luck < round(rate * 65536)).to(torch.int64) for rate in rates[:drafted]) + torch.zeros_like(luck)
    lane, count = torch.arange(drafted + 1, device=device), torch.arange(drafted + 1, device=device).unsqueeze(1)
    sources = torch.where(lane < count, lane, torch.where(lane == count, drafted, drafted + 1))
    by_place = torch.cat((accepted.unsqueeze(0), sources[accepted].t()))
    offsets = torch.arange(batch, device=device) * _APART & _PLACES
    return _Verdicts(by_place, torch.full((batch, 1), -1, device=device), offsets)


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


def with_synthetic_acceptance(kernels: KernelSet, accept_length: float, draft_tokens: int) -> KernelSet:
    """``kernels`` whose ``verify_chain`` accepts ``accept_length`` tokens of ``draft_tokens`` drafted ones on average, the
    target's own included, by the chances of :func:`rates_of_length` and a hash of request and position.

    A shorter chain passes as far as those of the whole one do, so that it yields fewer. Trees are verified as ever. Raises
    :class:`ConfigError` as :func:`rates_of_length` does.
    """
    rates = rates_of_length(accept_length, draft_tokens)
    return _Synthetic(kernels, rates, f"{accept_length:g} ({'/'.join(f'{rate:.3g}' for rate in rates)})")
