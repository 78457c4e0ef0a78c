"""The dimensions of random shapes: random values, and boundary values that every run includes.

Faults of kernels cluster at boundaries: one row, the last row of a tile, a page or a group, and numbers that 15 or 16 bits
can't hold. Random shapes rarely meet them, so each dimension names its boundaries, and :func:`boundary_shapes` varies one
dimension at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

MANY = 2**16 + 3
"""A number of rows, pages or tokens that needs more than 16 bits."""
_MOST_ROWS = 257


@dataclass(frozen=True, slots=True)
class Dimension:
    """The values of one dimension of a random shape: random ones, and boundaries."""

    values: st.SearchStrategy[int]
    """The strategy that generates the random values."""
    boundaries: tuple[int, ...]
    """The values that every run includes."""


def powers_and_successors(high: int) -> list[int]:
    """Return the powers of two from 4 and their successors, below the power that follows ``high``: the sizes at which
    kernels change their tiling.
    """
    return [value for bit in range(2, high.bit_length()) for value in (1 << bit, (1 << bit) + 1)]


def row_counts(low: int, high: int, *more: int) -> Dimension:
    """Return the dimension of numbers of rows: as :func:`between`, with the powers of two and their successors up to 257 as
    boundaries.
    """
    return between(low, high, *more, rare=[value for value in powers_and_successors(_MOST_ROWS) if value > high])


def between(low: int, high: int, *more: int, rare: Sequence[int] = ()) -> Dimension:
    """Return the dimension of the values from ``low`` to ``high``, and ``more`` values above.

    Boundaries are the two lowest values, powers of two and their successors, the highest value, ``more``, and ``rare``, which
    is never random: a product of several large dimensions takes long.
    """
    near = [value for value in powers_and_successors(high) if low < value < high]
    random = st.integers(low, high)
    values = st.one_of(random, st.sampled_from(more)) if more else random
    return Dimension(values, tuple(dict.fromkeys((low, min(low + 1, high), *near, high, *more, *rare))))


def among(*values: int, rare: Sequence[int] = ()) -> Dimension:
    """Return the dimension of these values. All are boundaries; ``rare`` values are boundaries that are never random."""
    return Dimension(st.sampled_from(values), tuple(dict.fromkeys((*values, *rare))))


def boundary_shapes(corners: Sequence[Mapping[str, int]], dimensions: Mapping[str, Dimension]) -> Iterator[Mapping[str, int]]:
    """Yield the smallest of ``corners`` with one dimension at a time set to each of its boundaries."""
    smallest = min(corners, key=lambda shape: math.prod(1 + value for value in shape.values()))
    for name, dimension in dimensions.items():
        for value in dimension.boundaries:
            if smallest.get(name) != value:
                yield {**smallest, name: value}
