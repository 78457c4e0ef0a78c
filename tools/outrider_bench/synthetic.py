"""Synthetic acceptance, for measurements: how many drafted tokens pass is decided beforehand, and the text means nothing.

Nothing that serves requests knows of it: a model is made with such kernels by hand, and their name says so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.device import ConfigError, KernelSet, WrappedKernels

_MULTIPLIER = 2654435761  # Knuth's, for hashing positions


class _Verdicts(NamedTuple):
    """What is decided beforehand, int64: ``by_place`` [K+2, 2**16], by a hash of the position how many are accepted, and
    where each token of the result then comes from: a draft, the real token behind them, or the -1 behind that; ``none``
    [B, 1].
    """

    by_place: Tensor
    none: Tensor


class _Synthetic(WrappedKernels):
    def __init__(self, inner: KernelSet, accept_length: float) -> None:
        super().__init__(inner)
        self.name = f"{inner.name}, synthetic acceptance of {accept_length:g}"
        self.accept_length = accept_length
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
            self.verdicts[key] = _decide(self.accept_length, *key)
        decided = self.verdicts[key]
        verdicts = decided.by_place.index_select(1, positions & 0xFFFF)
        # Of the real verdict the first token alone is certain to be one.
        known = torch.cat((draft_tokens, tokens[:, :1], decided.none), dim=1)
        return known.gather(1, verdicts[1:].t()), verdicts[0]


def _decide(length: float, batch: int, drafted: int, device: torch.device) -> _Verdicts:
    """Lengths are the two whole numbers around ``length``."""
    whole, rest = divmod(min(length - 1, drafted), 1)
    luck = (torch.arange(1 << 16, device=device) * _MULTIPLIER >> 16) & 0xFFFF
    accepted = (luck < round(rest * 65536)).to(torch.int64) + int(whole)
    lane, count = torch.arange(drafted + 1, device=device), torch.arange(drafted + 1, device=device).unsqueeze(1)
    sources = torch.where(lane < count, lane, torch.where(lane == count, drafted, drafted + 1))
    by_place = torch.cat((accepted.unsqueeze(0), sources[accepted].t()))
    return _Verdicts(by_place, torch.full((batch, 1), -1, device=device))


def with_synthetic_acceptance(kernels: KernelSet, accept_length: float) -> KernelSet:
    """``kernels`` whose ``verify_chain`` accepts ``accept_length`` tokens on average, the target's own included.

    The lengths are the two whole numbers around it, by a hash of the position; more than a chain has is cut off. Trees are
    verified as ever. Raises :class:`ConfigError` for less than 1.
    """
    if not accept_length >= 1:
        raise ConfigError(f"an acceptance length of {accept_length} can't be: an iteration yields at least 1 token")
    return _Synthetic(kernels, accept_length)
