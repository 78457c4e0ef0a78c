"""Which promise of the interface a test holds a backend to, in the words of the interface's own docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

import outrider.device

_Test = TypeVar("_Test", bound=Callable[..., Any])


def promise(member: str, words: str) -> Callable[[_Test], _Test]:
    """Mark a test with the promise that it checks.

    ``member`` is a name of ``outrider.device`` (``Stream.wait``), ``words`` a passage of its docstring. A test of the
    kit's own compares the two, so that a report never quotes what the backend interface doesn't say.
    """

    def mark(test: _Test) -> _Test:
        return pytest.mark.promise(member, words)(test)  # type: ignore[no-any-return]

    return mark


def needs(*abilities: str) -> Callable[[_Test], _Test]:
    """Mark a test as being about declared abilities: where they're declared it may not be skipped."""

    def mark(test: _Test) -> _Test:
        return pytest.mark.needs(*abilities)(test)  # type: ignore[no-any-return]

    return mark


def docstring(member: str) -> str:
    """The docstring of a name of the backend interface, in one line. A field's is the string that follows it."""
    owner, _, attribute = member.partition(".")
    thing: Any = getattr(outrider.device, owner)
    if attribute and not callable(inspect.getattr_static(thing, attribute, None)):
        found = inspect.getattr_static(thing, attribute, None)
        if isinstance(found, property):
            return _flat(found.__doc__ or "")
        source = inspect.getsource(thing)
        return _flat(source[source.index(f"{attribute}:") :].split('"""')[1])
    return _flat(inspect.getdoc(getattr(thing, attribute) if attribute else thing) or "")


def _flat(text: str) -> str:
    return " ".join(text.split())
