"""Checks of callers' arguments: token ids and whole numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Set, Sized
from itertools import islice
from typing import Any

from outrider.errors import RequestError, shown

_LIMIT = 2**62


def checked_tokens(given: Any, *, limit: int) -> tuple[int, ...]:
    """Token ids as whole numbers: from a sequence of them, a one-dimensional array or tensor. ``limit``: how many at most.

    Raises :class:`RequestError` for text, numbers with a fraction, truth values, mappings, sets, and for more than ``limit``.
    """
    listed = given.tolist() if callable(getattr(given, "tolist", None)) else given
    if isinstance(listed, str | bytes | bytearray | Mapping | Set) or not isinstance(listed, Iterable):
        raise RequestError(
            f"the prompt is {_named(given)}; expected token ids, a sequence of whole numbers (encode text first)"
        )
    tokens = tuple(islice(listed, limit + 1))
    # Nearly always they're whole numbers as they are; a long prompt is then checked without a call for each.
    if set(map(type, tokens)) != {int} or not (min(tokens) > -_LIMIT and max(tokens) < _LIMIT):
        tokens = tuple(checked_int(token, f"token {index} of the prompt") for index, token in enumerate(tokens))
    if len(tokens) > limit:
        count = len(listed) if isinstance(listed, Sized) else f"more than {limit}"
        raise RequestError(f"the prompt has {count} tokens: they don't fit in the context of {limit}; shorten the prompt")
    return tokens


def checked_int(given: Any, what: str) -> int:
    """A whole number within 63 bits; truth values don't count. Raises :class:`RequestError`."""
    try:
        value = None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        value = None
    if value is None or not -_LIMIT < value < _LIMIT:
        raise RequestError(f"{what} is {_named(given)}; expected a whole number")
    return value


def _named(given: object) -> str:
    return f"{shown(given)} (a {type(given).__name__})"
