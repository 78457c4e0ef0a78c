"""What an operator expects of its operands."""

from __future__ import annotations

from collections.abc import Callable


def expect(met: bool, told: Callable[[], str]) -> None:
    """Raise RuntimeError with what ``told`` says unless ``met``, as torch's own operators do.

    In place of torch's function for it, whose first call imports all of torch's symbolic shapes, and with them sympy: some
    500 modules, at the start of every process.
    """
    if not met:
        raise RuntimeError(told())
