"""Mark a test with the promise that it checks, quoted from the docstrings of the backend interface."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

import outrider.device

Promise = tuple[str, str]
"""A promise of the backend interface: the name of a member, and a passage of its docstring."""

_Test = TypeVar("_Test", bound=Callable[..., Any])


def promise(member: str, words: str = "") -> Callable[[_Test], _Test]:
    """Mark a test with the promise that it checks.

    ``member`` is a name of ``outrider.device`` (``Stream.wait``). ``words`` is a passage of its docstring, by default the
    first sentence. A test of the kit compares the two, so that a report quotes only words of the backend interface.
    """
    checked = (member, words) if words else first_sentence(member)

    def mark(test: _Test) -> _Test:
        return pytest.mark.promise(*checked)(test)  # type: ignore[no-any-return]

    return mark


def needs(*abilities: str) -> Callable[[_Test], _Test]:
    """Mark a test with the abilities that it needs. The test may not skip itself on a backend that declares them."""

    def mark(test: _Test) -> _Test:
        return pytest.mark.needs(*abilities)(test)  # type: ignore[no-any-return]

    return mark


@contextmanager
def blamed_on(member: str) -> Generator[None]:
    """Let a failed check inside the scope name the first sentence of ``member`` as the broken promise, instead of the
    promise of its test.
    """
    try:
        yield
    except AssertionError as error:
        error.promise = first_sentence(member)  # type: ignore[attr-defined]
        raise


def first_sentence(member: str) -> Promise:
    """Return a member with the first sentence of its docstring; the words are empty if it has none."""
    sentence = re.split(r"(?<! al)\. ", docstring(member))[0].rstrip(".")
    return member, f"{sentence}." if sentence else ""


def docstring(member: str) -> str:
    """Return the docstring of a member of the backend interface on one line. A field's docstring is the string after it."""
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
