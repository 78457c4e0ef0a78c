"""Validation of regular expressions in configs: untrusted expressions must be matched in bounded time."""

from __future__ import annotations

import re
from typing import Any

from outrider.device import ConfigError
from outrider.errors import shown

_EXPRESSION_PREFIX = "re:"
_MAX_CHARACTERS = 512
_MAX_OPEN_REPEATS = 4
"""Maximum number of open repeats in an expression. The matching time can grow with the name's length to this power."""


def checked_pattern(target: str) -> str:
    """Return ``target`` unchanged: a name, or ``re:`` and an expression.

    Raises :class:`ConfigError` for an expression whose matching time may explode: one with nested repeats, with a group
    reference, or with more than four open repeats.
    """
    if not target.startswith(_EXPRESSION_PREFIX):
        return target
    text = target.removeprefix(_EXPRESSION_PREFIX)
    try:
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"more than {_MAX_CHARACTERS} characters")
        parsed: Any = re.compile(text) and _parser().parse(text)
        if _repeats(parsed, inside=False) > _MAX_OPEN_REPEATS:
            raise ValueError(f"more than {_MAX_OPEN_REPEATS} open repeats")
    except (re.error, ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(f"the expression {shown(text)} of a config can't be used: {error}") from error
    return target


def _parser() -> Any:
    from re import _parser  # type: ignore[attr-defined]

    return _parser


def _repeats(parsed: Any, *, inside: bool) -> int:
    """Return the number of open repeats in a parsed expression."""
    found = 0
    for operator, argument in parsed:
        name = str(operator)
        if name.startswith("GROUPREF"):
            raise ValueError("it refers to a group")
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            open_ended = argument[1] > 1
            if open_ended and inside:
                raise ValueError("a repeat in a repeat")
            found += open_ended
            found += _repeats(argument[2], inside=inside or open_ended)
        elif name == "BRANCH":
            found += sum(_repeats(branch, inside=inside) for branch in argument[1])
        elif name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT", "ATOMIC_GROUP"):
            inner = argument if name == "ATOMIC_GROUP" else argument[-1]
            found += _repeats(inner, inside=inside)
    return found
