"""One drawn call of a kernel: its operands with what lies around them, the call, and what must hold afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from outrider.device import KernelSet
from outrider_conformance.case import call_kernel
from outrider_conformance.drawn.bounds import Number

Shape = Mapping[str, int]
Wanted = Number | Tensor
SENTINEL = 23130
_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Operand:
    """``tensor``: values on the host. ``layout``: how it lies in memory that is poisoned around it.

    ``rows``: with poison before and behind; ``wide``: also between its rows; ``columns``: as the transpose of its last two
    dimensions; ``alone``: nothing around it.
    """

    tensor: Tensor
    layout: str = "rows"


@dataclass(frozen=True, slots=True)
class Problem:
    """``call`` gives results by name; ``wanted`` says of these, and of each operand that is written, what they are.

    A whole-number tensor is compared for equality. ``judge`` looks at results for which several answers are right.
    """

    operands: Mapping[str, Operand]
    call: Callable[[KernelSet, Mapping[str, Tensor]], Mapping[str, Tensor]]
    wanted: Mapping[str, Wanted]
    judge: Callable[[Mapping[str, Tensor]], None] | None = None

    @property
    def changed(self) -> frozenset[str]:
        """Operands that the kernel may write."""
        return frozenset(self.operands) & frozenset(self.wanted)


def kernel_call(
    method: str, *arguments: str | float | None, results: tuple[str, ...] = ("out",), **options: Any
) -> Callable[[KernelSet, Mapping[str, Tensor]], Mapping[str, Tensor]]:
    """Return the call of a problem: kernel ``method`` with operands by name, or with other values.

    ``results`` names what the kernel returns. A kernel that only writes its operands has no results.
    """

    def call(kernels: KernelSet, o: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        made = call_kernel(kernels, method, arguments, o, **options)
        return dict(zip(results[: len(made)], made, strict=True))

    return call


Make = Callable[[Shape, torch.dtype, "Dice"], Problem]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A kernel, the dimensions that are drawn for it, those that every run includes, and how a problem is made of them.

    ``choices``: it works on whole numbers or float32 alone, so one dtype is enough. ``format``: it's for backends that
    declare this format of quantised weights. ``cache``: for kernels that declare this format of a KV cache.
    """

    kernel: str
    make: Make
    dimensions: Mapping[str, SearchStrategy[int]]
    corners: Sequence[Shape] = ()
    choices: bool = False
    format: str | None = None
    cache: str | None = None


@dataclass(frozen=True, slots=True)
class Dice:
    """Random values on the host, the same for the same seed."""

    seed: int
    generator: torch.Generator = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "generator", torch.Generator().manual_seed(self.seed))

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Normal numbers, rounded to ``dtype``."""
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype)

    def positive(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Numbers between a half and one: what a sum in too narrow a dtype stops adding."""
        return ((torch.rand(shape, generator=self.generator) * 0.5 + 0.5) * scale).to(dtype)

    def whole(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Whole numbers from ``low`` to below ``high``."""
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Between 0 and 1, float32."""
        return torch.rand(shape, generator=self.generator)

    def order(self, count: int) -> Tensor:
        """A permutation."""
        return torch.randperm(count, generator=self.generator)

    def coin(self) -> bool:
        """Heads or tails."""
        return bool(self.whole(0, 2, 1))

    def factors(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Operands of a sum: of both signs, or all positive, the last one of each row large."""
        made = (
            self.normal(*shape, dtype=dtype, scale=scale) if self.coin() else self.positive(*shape, dtype=dtype, scale=scale)
        )
        made[..., -1] *= 4
        return made


class Placed:
    """An operand on the device, and its whole memory as it was."""

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
        """Rows before and behind; the first element lies at a multiple of 16 bytes, as an allocation does."""
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
        """What the kernel gets."""
        view = self._inside(self._buffer)
        return view.transpose(-1, -2) if self._flipped else view

    def read(self) -> tuple[Tensor, bool]:
        """What the operand holds now, on the host, and whether all around it is as it was, bit for bit."""
        now = self._buffer.to("cpu", copy=True)  # results may share the operand's memory, and stay as they are
        found = self._inside(now).clone()
        self._inside(now).copy_(self._tensor)
        kept = same_bits(now, self._before)
        return (found.transpose(-1, -2) if self._flipped else found), kept

    @property
    def before(self) -> Tensor:
        """What it held."""
        return self._tensor.transpose(-1, -2) if self._flipped else self._tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two host tensors are the same in every bit, NaN included."""
    these, those = _bytes(one), _bytes(other)
    # Words are compared in an eighth of the time.
    words = torch.int64 if these.numel() == those.numel() and these.numel() % 8 == 0 else torch.uint8
    return torch.equal(these.view(words), those.view(words))


def _bytes(x: Tensor) -> Tensor:
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.flatten()).view(torch.uint8)
