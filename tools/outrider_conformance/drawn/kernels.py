"""All kernels with random operands, by name."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from outrider_conformance.drawn.attention import ATTENTION
from outrider_conformance.drawn.bookkeeping import BOOKKEEPING
from outrider_conformance.drawn.choices import CHOICES
from outrider_conformance.drawn.dense import DENSE
from outrider_conformance.drawn.experts import EXPERTS
from outrider_conformance.drawn.logits import LOGITS
from outrider_conformance.drawn.problem import Dice, Drawn, Problem, Shape
from outrider_conformance.drawn.quantized import QUANTIZED

KERNELS: Mapping[str, Drawn] = MappingProxyType(
    {drawn.kernel: drawn for drawn in (*DENSE, *EXPERTS, *QUANTIZED, *ATTENTION, *CHOICES, *LOGITS, *BOOKKEEPING)}
)


def corners(drawn: Drawn, dtype: torch.dtype, seed: int) -> Iterator[tuple[Shape, Problem]]:
    """Yield the problems that every run includes, with values from ``seed``."""
    for number, shape in enumerate(drawn.corners):
        yield shape, problem(drawn, shape, dtype, seed + number)


def problem(drawn: Drawn, shape: Shape, dtype: torch.dtype, seed: int) -> Problem:
    """Return one problem, the same for the same arguments in every process."""
    return drawn.make(shape, dtype, Dice(zlib.crc32(f"{drawn.kernel} {dtype} {seed}".encode())))
