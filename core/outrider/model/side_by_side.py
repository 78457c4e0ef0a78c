"""States that a head reads together: views of one tensor, in which they lie side by side."""

from __future__ import annotations

import torch
from torch import Tensor


class SideBySide(tuple[Tensor, ...]):
    """States [T, H] of A layers, which are the columns of ``joined`` [T, A H]: a tuple of A views. A is at least 1.

    A head that multiplies all of them by one weight takes ``joined`` as it is (:func:`side_by_side`), and nothing is copied.
    """

    joined: Tensor

    def __new__(cls, joined: Tensor, size: int) -> SideBySide:
        """Views of ``size`` columns each, H."""
        states = super().__new__(cls, joined.split(size, dim=-1))
        states.joined = joined
        return states


def side_by_side(states: tuple[Tensor, ...]) -> Tensor:
    """``states`` [T, H], A of them, as [T, A H]: the tensor where they lie so, or a copy."""
    return states.joined if isinstance(states, SideBySide) else torch.cat(states, dim=-1)
