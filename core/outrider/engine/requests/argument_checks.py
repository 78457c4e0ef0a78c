"""Checks of caller arguments: token ids and whole numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Set, Sized
from itertools import islice
from typing import Any

from outrider.errors import RequestError, shown

_MAX_ABS_INT = 2**62


def checked_tokens(prompt: Any, *, limit: int) -> tuple[int, ...]:
    """Return token ids as Python ints, from a sequence, a one-dimensional array or a one-dimensional tensor.

    Raises :class:`RequestError` for text, fractions, booleans, mappings, sets, and for more than ``limit`` tokens.
    """
    listed = prompt.tolist() if callable(getattr(prompt, "tolist", None)) else prompt
    if isinstance(listed, str | bytes | bytearray | Mapping | Set) or not isinstance(listed, Iterable):
        raise RequestError(
            f"the prompt is {_describe(prompt)}; expected token ids, a sequence of whole numbers (encode text first)"
        )
    tokens = tuple(islice(listed, limit + 1))
    # A prompt usually consists of ints alone: this check of the whole tuple avoids one call per token.
    if set(map(type, tokens)) != {int} or not (min(tokens) > -_MAX_ABS_INT and max(tokens) < _MAX_ABS_INT):
        tokens = tuple(checked_int(token, f"token {index} of the prompt") for index, token in enumerate(tokens))
    if len(tokens) > limit:
        count = len(listed) if isinstance(listed, Sized) else f"more than {limit}"
        raise RequestError(f"the prompt has {count} tokens: they don't fit in the context of {limit}; shorten the prompt")
    return tokens


def checked_int(argument: Any, name: str) -> int:
    """Return ``argument`` as an int within 63 bits. Raises :class:`RequestError`, also for booleans."""
    try:
        value = None if isinstance(argument, bool) else operator.index(argument)
    except TypeError:
        value = None
    if value is None or not -_MAX_ABS_INT < value < _MAX_ABS_INT:
        raise RequestError(f"{name} is {_describe(argument)}; expected a whole number")
    return value


def _describe(argument: object) -> str:
    return f"{shown(argument)} (a {type(argument).__name__})"
