"""All kernels with random operands, by name."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from outrider_conformance.random_kernels.attention import ATTENTION
from outrider_conformance.random_kernels.blocks import BLOCKS
from outrider_conformance.random_kernels.bookkeeping import BOOKKEEPING
from outrider_conformance.random_kernels.dense import DENSE
from outrider_conformance.random_kernels.experts import EXPERTS
from outrider_conformance.random_kernels.logits import LOGITS
from outrider_conformance.random_kernels.problem import KernelProblems, Problem, RandomValues, Shape
from outrider_conformance.random_kernels.quantized import QUANTIZED
from outrider_conformance.random_kernels.recurrent import RECURRENT
from outrider_conformance.random_kernels.token_choices import CHOICES

KERNELS: Mapping[str, KernelProblems] = MappingProxyType(
    {
        drawn.kernel: drawn
        for part in (BLOCKS, DENSE, EXPERTS, RECURRENT, QUANTIZED, ATTENTION, CHOICES, LOGITS, BOOKKEEPING)
        for drawn in part
    }
)


def corners(drawn: KernelProblems, dtype: torch.dtype, seed: int) -> Iterator[tuple[Shape, Problem]]:
    """Yield the problems that every run includes, with values from ``seed``."""
    for number, shape in enumerate(drawn.corners):
        yield shape, problem(drawn, shape, dtype, seed + number)


def problem(drawn: KernelProblems, shape: Shape, dtype: torch.dtype, seed: int) -> Problem:
    """Return one problem, the same for the same arguments in every process."""
    return drawn.make(shape, dtype, RandomValues(zlib.crc32(f"{drawn.kernel} {dtype} {seed}".encode())))
