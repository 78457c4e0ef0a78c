"""Positions as the rope of a draft head or model takes them: on three axes, or plain."""

from __future__ import annotations

from torch import Tensor

from outrider.model import RopeConfig, speculative_positions
from outrider.speculative.proposer import ExtendInputs


def text_places(rope: RopeConfig, positions: Tensor, deltas: Tensor | None) -> Tensor:
    """Positions of new text tokens from their indices int64 [B * n] and their requests' ``deltas`` int64 [B].

    What was made for plain positions gets the indices, whatever the target's rope is. ``deltas`` None: the target's
    positions are plain.
    """
    if not rope.sections:
        return positions
    if deltas is None:
        return positions.expand(3, -1)
    each = deltas.unsqueeze(1).expand(-1, positions.shape[0] // deltas.shape[0]).flatten()
    return speculative_positions(positions, each)


def given_places(rope: RopeConfig, inputs: ExtendInputs) -> Tensor:
    """Positions of the tokens that draft-extend is given, media included."""
    if not rope.sections:
        return inputs.positions
    return inputs.rope_positions if inputs.rope_positions.dim() == 2 else inputs.positions.expand(3, -1)
