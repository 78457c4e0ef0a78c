"""Acceptance by decree, for measuring alone: how many drafted tokens pass is decided beforehand, and the text is nonsense.

Nothing that serves requests knows of it: a model is made with such kernels by hand, and their name says so.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from outrider.device import ConfigError, KernelSet

if TYPE_CHECKING:
    _Base = KernelSet
else:
    _Base = object

_MULTIPLIER = 2654435761  # Knuth's, for hashing positions


class _Synthetic(_Base):
    accept_length: float

    def verify_chain(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        draft_probs: Tensor | None,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The real verification, whose cost so remains, and then another verdict."""
        tokens, _ = super().verify_chain(target_logits, draft_tokens, draft_probs, temperature, seeds, positions)
        drafted = draft_tokens.shape[1]
        whole, rest = divmod(min(self.accept_length - 1, drafted), 1)
        if not rest:  # the same for all: a few launches less in what is measured
            count = int(whole)
            nothing = tokens.new_full((tokens.shape[0], drafted - count), -1)
            passed = torch.cat((draft_tokens[:, :count], tokens[:, :1], nothing), dim=1)
            return passed, torch.full_like(positions, count)
        luck = ((positions + seeds) * _MULTIPLIER >> 16) & 0xFFFF
        accepted = (luck < round(rest * 65536)).to(torch.int64) + int(whole)
        lane = torch.arange(drafted + 1, device=tokens.device)
        real = tokens[:, :1]  # of the real verdict the first token alone is certain to be one
        passed = torch.cat((draft_tokens, real), dim=1)
        after = torch.where(lane == accepted.unsqueeze(1), real, -1)
        return torch.where(lane < accepted.unsqueeze(1), passed, after), accepted


def with_synthetic_acceptance(kernels: KernelSet, accept_length: float) -> KernelSet:
    """``kernels`` whose ``verify_chain`` lets ``accept_length`` tokens through on average, the decided one included.

    The lengths are the two whole numbers around it, by a hash of position and seed; more than a chain has is cut off. Trees
    are verified as ever. Raises :class:`ConfigError` for less than 1.
    """
    if not accept_length >= 1:
        raise ConfigError(f"an acceptance length of {accept_length} can't be: an iteration yields at least 1 token")
    made = copy.copy(kernels)
    made.__class__ = type("SyntheticAcceptance", (_Synthetic, type(kernels)), {})
    made.name = f"{kernels.name}, synthetic acceptance of {accept_length:g}"
    cast(_Synthetic, made).accept_length = accept_length
    return made
