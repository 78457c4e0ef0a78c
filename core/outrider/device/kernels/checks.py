"""What an operator expects of its operands."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def expect(met: bool, told: Callable[[], str]) -> None:
    """Raise RuntimeError with what ``told`` says unless ``met``, as torch's own operators do.

    In place of torch's function for it, whose first call imports all of torch's symbolic shapes, and with them sympy: some
    500 modules, at the start of every process.
    """
    if not met:
        raise RuntimeError(told())


def check_copy(source: Tensor, out: Tensor) -> None:
    """Raise where ``source`` isn't what ``out`` [T, H] is to hold: a copy would repeat or convert it."""
    expect(
        source.dim() == 2 and source.shape == out.shape and source.dtype is out.dtype,
        lambda: (
            f"copy_rows: {tuple(source.shape)} in {source.dtype} to {tuple(out.shape)} in {out.dtype}; expected two [T, H] "
            "of one dtype"
        ),
    )
