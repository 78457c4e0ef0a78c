"""Replacement of names of modules and classes for the duration of a watched run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

Replacement = tuple[Any, str, Callable[[Any], Any]]
"""A module or class, the name of its attribute, and a function that returns a wrapper of the attribute's value."""


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Generator[None]:
    """Replace each attribute by its wrapper in this scope."""
    with ExitStack() as stack:
        for owner, name, wrap in replacements:
            before = owner.__dict__[name] if name in owner.__dict__ else getattr(owner, name)
            stack.callback(setattr, owner, name, before)
            setattr(owner, name, wrap(before))
        yield
