"""Random calls of kernels: shapes, operands in poisoned memory, the call, and the expected results with rounding bounds.

Faults of kernels cluster at boundaries: one row, the last row of a tile, a page or a group, and numbers that 15 or 16 bits
can't hold. Random shapes rarely meet them, so each dimension of a shape names its boundaries, which every run includes, and
:func:`boundary_shapes` varies one dimension at a time. Other faults need two dimensions: a window in a long prompt, many
tokens of one expert. :func:`paired_shapes` combines small and large values of each two dimensions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from outrider.device import KernelSet
from outrider_conformance.random_kernels.bounds import Number

MANY = 2**16 + 3
"""A number of rows, pages or tokens that needs more than 16 bits."""
_MOST_ROWS = 257
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Dimension:
    """The values of one dimension of a random shape: random ones, and boundaries."""

    small: Sequence[int]
    """The smaller ones of the random values."""
    large: Sequence[int]
    """The larger ones; empty if there is one value."""
    boundaries: tuple[int, ...]
    """The values that every run includes."""


def powers_and_successors(high: int) -> list[int]:
    """Return the powers of two from 4 and their successors, below the power that follows ``high``: the sizes at which
    kernels change their tiling.
    """
    return [value for bit in range(2, high.bit_length()) for value in (1 << bit, (1 << bit) + 1)]


def row_counts(low: int, high: int, *more: int, rare: Sequence[int] = ()) -> Dimension:
    """Return the dimension of numbers of rows: as :func:`between`, with the powers of two and their successors up to 257 as
    boundaries.
    """
    powers = [value for value in powers_and_successors(_MOST_ROWS) if value > high]
    return between(low, high, *more, rare=[*powers, *rare])


def between(low: int, high: int, *more: int, rare: Sequence[int] = ()) -> Dimension:
    """Return the dimension of the values from ``low`` to ``high``, and ``more`` values above.

    Boundaries are the two lowest values, powers of two and their successors, the highest value, ``more``, and ``rare``, which
    is never random: a product of several large dimensions takes long.
    """
    near = [value for value in powers_and_successors(high) if low < value < high]
    middle = (low + high) // 2
    upper = range(middle + 1, high + 1)
    large = (*upper[:: max(len(upper) // len(more), 1)], *more) if more else upper
    return Dimension(
        range(low, middle + 1), large, tuple(dict.fromkeys((low, min(low + 1, high), *near, high, *more, *rare)))
    )


def among(*values: int, rare: Sequence[int] = ()) -> Dimension:
    """Return the dimension of these values. All are boundaries; ``rare`` values are boundaries that are never random."""
    ordered = sorted(set(values))
    half = max(len(ordered) // 2, 1)
    return Dimension(ordered[:half], ordered[half:], tuple(dict.fromkeys((*values, *rare))))


def smallest_shape(shapes: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    """Return the shape with the smallest product of dimensions."""
    return min(shapes, key=lambda shape: math.prod(1 + value for value in shape.values()))


def boundary_shapes(corners: Sequence[Mapping[str, int]], dimensions: Mapping[str, Dimension]) -> Iterator[Mapping[str, int]]:
    """Yield the smallest of ``corners`` with one dimension at a time set to each of its boundaries."""
    smallest = smallest_shape(corners)
    for name, dimension in dimensions.items():
        for value in dimension.boundaries:
            if smallest.get(name) != value:
                yield {**smallest, name: value}


_PAIRED_CANDIDATES = 24
"""Number of random shapes of which :func:`paired_shapes` takes the one with the most new pairs."""


def paired_shapes(dimensions: Mapping[str, Dimension], count: int, dice: RandomValues) -> Iterator[Mapping[str, int]]:
    """Yield ``count`` random shapes. They combine small and large values of each two dimensions, as far as ``count`` allows.

    Each shape has as many pairs as possible that no earlier shape has; about eight shapes have all pairs of ten dimensions.
    """
    names = tuple(dimensions)
    sides = [(False, True) if dimension.large else (False,) for dimension in dimensions.values()]
    seen: set[tuple[tuple[str, bool], ...]] = set()
    for _ in range(count):
        candidates = [[dice.one_of(each) for each in sides] for _ in range(_PAIRED_CANDIDATES)]
        pairs = [set(itertools.combinations(zip(names, each, strict=True), 2)) for each in candidates]
        best = max(range(len(candidates)), key=lambda number: len(pairs[number] - seen))
        seen |= pairs[best]
        yield {
            name: dice.one_of(dimensions[name].large if is_large else dimensions[name].small)
            for name, is_large in zip(names, candidates[best], strict=True)
        }


def shrink_shape(
    fails: Callable[[Shape], Exception | None], shape: Shape, smallest: Shape, error: Exception
) -> tuple[Shape, Exception]:
    """Return ``shape``, whose check raised ``error``, with as many dimensions as possible set to those of ``smallest``, and
    the error of its check. ``fails(shape)`` returns the error of a check, or None.
    """
    for name in shape:
        changed = {**shape, name: smallest.get(name, 0)}
        found = None if changed == shape else fails(changed)
        if found is not None:
            shape, error = changed, found
    return shape, error


Shape = Mapping[str, int]
Wanted = Number | Tensor
SENTINEL = 23130
_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of a kernel on the host, with its layout on the device."""

    tensor: Tensor
    layout: str = "rows"
    """``rows``: poison before and after the operand; ``wide``: also between its rows; ``columns``: the transpose of the last
    two dimensions; ``alone``: no poison.
    """


@dataclass(frozen=True, slots=True)
class Problem:
    """One call of a kernel with the conditions that its results meet."""

    operands: Mapping[str, Operand]
    call: Callable[[KernelSet, Mapping[str, Tensor]], Mapping[str, Tensor]]
    """Call the kernel, and return its results by name."""
    wanted: Mapping[str, Wanted]
    """Right results by name, and right contents of each written operand. Integers are compared for equality."""
    check: Callable[[Mapping[str, Tensor]], None] | None = None
    """The check of results of which several are right; None if there is one right result."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The operands on the host by name, in memory that no other call has written."""
        return {name: operand.tensor.clone() for name, operand in self.operands.items()}

    @property
    def changed(self) -> frozenset[str]:
        """Names of the operands that the kernel may write."""
        return frozenset(self.operands) & frozenset(self.wanted)


def kernel_call(
    method: str, *arguments: str | float | None, results: tuple[str, ...] = ("out",), **options: Any
) -> Callable[[KernelSet, Mapping[str, Tensor]], Mapping[str, Tensor]]:
    """Return a function that calls kernel ``method`` of a kernel set with a problem's operands, and returns its results by
    name.

    ``arguments`` are names of operands, or values. An operand that is absent is passed as None. ``results`` are the names of
    the kernel's results. A kernel that only writes its operands has no results.
    """

    def call(kernels: KernelSet, o: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        made = getattr(kernels, method)(*(o.get(each) if isinstance(each, str) else each for each in arguments), **options)
        made = () if made is None else made if isinstance(made, tuple) else (made,)
        return dict(zip(results[: len(made)], made, strict=True))

    return call


Make = Callable[[Shape, torch.dtype, "RandomValues"], Problem]


@dataclass(frozen=True, slots=True)
class KernelProblems:
    """A kernel with the random shapes and the fixed shapes of its problems."""

    kernel: str
    make: Make
    """The function that returns a problem of a given shape."""
    dimensions: Mapping[str, Dimension]
    """The random dimensions of a shape, by name."""
    corners: Sequence[Shape] = ()
    """Shapes that every run includes."""
    choices: bool = False
    """True if the kernel works only on integers or float32, so that one dtype is enough."""
    format: str | None = None
    """Format of quantised weights that the backend must declare."""
    cache: str | None = None
    """Format of a KV cache that the kernels must declare."""
    operand: str | None = None
    """Operand that the kernels must declare (``KernelSet.optional_operands``), and that every problem has."""

    def with_operand(self, operand: str, make: Make) -> KernelProblems:
        """Return the problems of the same shapes that ``make`` returns with ``operand``."""
        return replace(self, kernel=f"{self.kernel}, {operand}", make=make, operand=operand)


def in_formats(
    kernel: str,
    make: Callable[..., Problem],
    dimensions: Mapping[str, Dimension],
    corners: Sequence[Shape],
    *,
    weights: Iterable[str | None] = (None,),
    caches: Sequence[str | None] = (None,),
) -> tuple[KernelProblems, ...]:
    """Return a kernel's problems for each format of ``weights`` with each format of ``caches``; None stands for the model's
    dtype. ``make`` gets ``format`` and ``cache`` unless they are None.
    """
    found = []
    for format, cache in itertools.product(weights, caches):
        words = (kernel, format, None if cache is None else f"cache {cache}")
        given = {name: value for name, value in (("format", format), ("cache", cache)) if value is not None}
        name = ", ".join(word for word in words if word is not None)
        found.append(KernelProblems(name, partial(make, **given), dimensions, corners, format=format, cache=cache))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class RandomValues:
    """A source of random values on the host, the same for the same seed."""

    seed: int
    generator: torch.Generator = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "generator", torch.Generator().manual_seed(self.seed))

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Return a tensor of normal random numbers, rounded to ``dtype``."""
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype)

    def positive(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Return a tensor of random numbers from 0.5 to 1. Their sum stops growing in a dtype with too few mantissa bits."""
        return ((torch.rand(shape, generator=self.generator) * 0.5 + 0.5) * scale).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return a tensor of random integers from ``low`` (included) to ``high`` (excluded)."""
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def indices(self, limit: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return a tensor of indices below ``limit``. Half are next to 0, 2**15, 2**16 or the limit, where integers of few
        bits overflow.
        """
        edges = torch.tensor([0, 1, 2**15 - 1, 2**15, 2**16 - 1, 2**16, MANY, limit - 1])
        edges = edges[edges < limit]
        near = edges[self.integers(0, len(edges), *shape)]
        return torch.where(self.uniform(*shape) < 0.5, near, self.integers(0, limit, *shape)).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Return a float32 tensor of random numbers between 0 and 1."""
        return torch.rand(shape, generator=self.generator)

    def permutation(self, count: int) -> Tensor:
        """Return a random permutation of ``count`` indices."""
        return torch.randperm(count, generator=self.generator)

    def one_of(self, values: Sequence[_Value]) -> _Value:
        """Return one of ``values``, each with the same probability."""
        return values[int(self.integers(0, len(values), 1))]

    def coin(self) -> bool:
        """Return True or False with equal probability."""
        return self.one_of((False, True))

    def factors(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Return random operands of a sum, normal or all positive, with one large number at the end of each row. Of three or
        more rows, the second one is zero.
        """
        made = (
            self.normal(*shape, dtype=dtype, scale=scale) if self.coin() else self.positive(*shape, dtype=dtype, scale=scale)
        )
        made[..., -1] *= 4
        rows = made.view(-1, shape[-1])
        if len(rows) > 2:
            rows[1] = 0
        return made


class PlacedOperand:
    """An operand on the device, with the original contents of its whole memory."""

    def __init__(self, operand: Operand, device: torch.device) -> None:
        self._layout, self._tensor = operand.layout, operand.tensor
        if operand.layout == "columns":
            self._layout, self._tensor = "wide", operand.tensor.transpose(-1, -2)
        self._flipped = operand.layout == "columns"
        self._before = self._poisoned()
        self._inside(self._before).copy_(self._tensor)
        self._buffer = self._before.to(device, copy=True)

    def _poisoned(self) -> Tensor:
        shape = list(self._tensor.shape)
        dtype = self._tensor.dtype
        if self._layout != "alone" and shape:
            if self._layout == "wide" and len(shape) > 1:
                shape[-1] += 2 * _COLUMNS
            shape[0] += 2 * self._margin()
        fill = float("nan") if dtype.is_floating_point else (True if dtype is torch.bool else SENTINEL)
        return torch.full(shape, fill, dtype=dtype)

    def _margin(self) -> int:
        """Return the poisoned rows before and after the operand. The first element is aligned to 16 bytes, as in an
        allocation.
        """
        row = self._tensor.element_size()
        for size in self._tensor.shape[1:]:
            row *= size
        if self._layout == "wide" and self._tensor.dim() > 1:
            row = row // self._tensor.shape[-1] * (self._tensor.shape[-1] + 2 * _COLUMNS)
        return next(rows for rows in (1, 2, 4, 8, 16) if rows * row % 16 == 0)

    def _inside(self, buffer: Tensor) -> Tensor:
        if self._layout == "alone" or not self._tensor.dim():
            return buffer
        view = buffer.narrow(0, self._margin(), self._tensor.shape[0])
        if self._layout == "wide" and self._tensor.dim() > 1:
            view = view.narrow(view.dim() - 1, _COLUMNS, self._tensor.shape[-1])
        return view

    @property
    def view(self) -> Tensor:
        """The tensor that the kernel receives."""
        view = self._inside(self._buffer)
        return view.transpose(-1, -2) if self._flipped else view

    def read_back(self) -> tuple[Tensor, bool]:
        """Return the operand's contents on the host, and True if the memory around it is unchanged in every bit."""
        now = self._buffer.to("cpu", copy=True)  # a copy: results may share the operand's memory
        found = self._inside(now).clone()
        self._inside(now).copy_(self._tensor)
        kept = same_bits(now, self._before)
        return (found.transpose(-1, -2) if self._flipped else found), kept

    @property
    def before(self) -> Tensor:
        """The contents of the operand before the call."""
        return self._tensor.transpose(-1, -2) if self._flipped else self._tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two host tensors are equal in every bit, NaN included."""
    these, those = _bytes(one), _bytes(other)
    # A comparison of 8-byte words takes an eighth of the time.
    words = torch.int64 if these.numel() == those.numel() and these.numel() % 8 == 0 else torch.uint8
    return torch.equal(these.view(words), those.view(words))


def _bytes(x: Tensor) -> Tensor:
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.flatten()).view(torch.uint8)
