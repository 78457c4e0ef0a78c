"""Positions as the rope of a draft head or model takes them: on three axes, or plain."""

from __future__ import annotations

from torch import Tensor

from outrider.model import RopeConfig, speculative_positions
from outrider.speculative.proposer import ExtendInputs


def text_places(rope: RopeConfig, positions: Tensor, mrope_position_deltas: Tensor | None) -> Tensor:
    """Positions of new text tokens from their indices int64 [B * n] and ``mrope_position_deltas`` int64 [B].

    What was made for plain positions gets the indices, whatever the target's rope is. ``mrope_position_deltas`` None: the
    target's positions are plain.
    """
    if not rope.sections:
        return positions
    if mrope_position_deltas is None:
        return positions.expand(3, -1)
    return speculative_positions(positions, mrope_position_deltas)


def given_places(rope: RopeConfig, inputs: ExtendInputs) -> Tensor:
    """Positions of the tokens that draft-extend is given, media included."""
    if not rope.sections:
        return inputs.positions
    return inputs.rope_positions if inputs.rope_positions.dim() == 2 else inputs.positions.expand(3, -1)
