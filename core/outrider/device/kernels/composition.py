"""Methods of a kernel set whose default is a composition of primitives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Method = TypeVar("Method", bound=Callable[..., object])


def composes(*parts: str) -> Callable[[Method], Method]:
    """Mark a default as a composition of the primitives ``parts``.

    A subclass that overrides one of them gets the default back, so that its primitive is called, unless the subclass also
    overrides the composed method.
    """

    def mark(method: Method) -> Method:
        method.parts = frozenset(parts)  # type: ignore[attr-defined]
        return method

    return mark


def parts_of(method: Callable[..., object]) -> frozenset[str]:
    """Return the primitives that the default ``method`` composes; none for a primitive."""
    parts: frozenset[str] = getattr(method, "parts", frozenset())
    return parts
