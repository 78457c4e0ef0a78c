"""Exceptions that a test raises inside the backend under test, and those that come back."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from contextlib import suppress


def builtin_exceptions() -> Sequence[BaseException]:
    """Return an exception of each builtin type that takes a message alone, in the order of their names."""
    made = []
    for kind in {kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)}:
        with suppress(TypeError):
            made.append(kind("of the test"))
    return sorted(made, key=repr)


def error_of(act: Callable[[], object]) -> BaseException | None:
    """Return the exception that ``act`` raises, of any type; None if it raises nothing."""
    try:
        act()
    except BaseException as error:
        return error
    return None
