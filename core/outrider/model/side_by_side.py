"""SideBySide: hidden states that a head reads together, as views of one tensor."""

from __future__ import annotations

import torch
from torch import Tensor


class SideBySide(tuple[Tensor, ...]):
    """A tuple of A >= 1 hidden states [T, H] that are the columns of ``joined`` [T, A H].

    A head that multiplies all states by one weight reads ``joined`` (:func:`side_by_side`), without a copy.
    """

    joined: Tensor

    def __new__(cls, joined: Tensor, size: int) -> SideBySide:
        """Split ``joined`` into views of ``size`` columns, H."""
        states = super().__new__(cls, joined.split(size, dim=-1))
        states.joined = joined
        return states


def side_by_side(states: tuple[Tensor, ...]) -> Tensor:
    """Return the A ``states`` [T, H] as one tensor [T, A H]: without a copy for a SideBySide, else concatenated."""
    return states.joined if isinstance(states, SideBySide) else torch.cat(states, dim=-1)
