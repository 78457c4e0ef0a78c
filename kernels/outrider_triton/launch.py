"""Launching: block sizes from shapes, and the launch attribute of dependent kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_ahead = ContextVar("outrider_triton_ahead", default=False)


def power_of_two(value: int) -> int:
    """The least power of two that isn't below ``value``."""
    return 1 << max(value - 1, 0).bit_length()


def warps_for(block: int) -> int:
    """Warps for a block of so many numbers: about 8 a thread."""
    return min(max(block // 256, 1), 16)


def shares(rows: int, vocabulary: int, processors: int) -> int:
    """Among how many programs a vocabulary is shared out, so that with ``rows`` of them each processor has four or more: what
    one of them has asked memory for is far less than memory can have under way.
    """
    return max(1, min(64, power_of_two(-(-4 * processors // max(rows, 1))), power_of_two(vocabulary // 2048)))


@contextmanager
def ahead() -> Iterator[None]:
    """Until it's left, nothing that this thread launches runs: it is compiled for a later launch, and may be so meanwhile."""
    before = _ahead.set(True)
    try:
        yield
    finally:
        _ahead.reset(before)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, pdl: bool, warps: int, **settings: Any) -> None:
    """Enqueue a kernel on the ambient stream; an empty grid is no launch. Inside :func:`ahead`, have it compiled alone."""
    if min(grid) < 1:
        return
    if pdl:
        settings["launch_pdl"] = True
    kernel.run(*arguments, grid=grid, warmup=_ahead.get(), PDL=pdl, num_warps=warps, **settings)
