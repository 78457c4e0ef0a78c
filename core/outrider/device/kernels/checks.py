"""Checks of operators on their operands."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def expect(condition: bool, message: Callable[[], str]) -> None:
    """Raise RuntimeError with ``message()`` unless ``condition``, as torch's own operators do.

    torch's own function isn't used: its first call imports torch's symbolic shapes and sympy, some 500 modules, at the
    start of every process.
    """
    if not condition:
        raise RuntimeError(message())


def check_copy(source: Tensor, out: Tensor) -> None:
    """Raise unless ``source`` and ``out`` are [T, H] of one dtype: a copy would otherwise repeat or convert values."""
    expect(
        source.dim() == 2 and source.shape == out.shape and source.dtype is out.dtype,
        lambda: (
            f"copy_rows: {tuple(source.shape)} in {source.dtype} to {tuple(out.shape)} in {out.dtype}; expected two [T, H] "
            "of one dtype"
        ),
    )
