"""Expressions in configs: somebody else's, so only those that are matched in reasonable time."""

from __future__ import annotations

import re
from typing import Any

from outrider.device import ConfigError
from outrider.errors import shown

_MARK = "re:"
_LONGEST = 512
_REPEATS = 4
"""Open repeats in an expression at most. The time of a match may grow with the length of a name to this power."""


def pattern(target: str) -> str:
    """``target`` as it is: a name, or ``re:`` and an expression. :class:`ConfigError` for one that may take for ever.

    That is one with a repeat in a repeat, with a reference to a group, or with more than four open repeats.
    """
    if not target.startswith(_MARK):
        return target
    text = target.removeprefix(_MARK)
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"more than {_LONGEST} characters")
        parsed: Any = re.compile(text) and _parser().parse(text)
        if _repeats(parsed, inside=False) > _REPEATS:
            raise ValueError(f"more than {_REPEATS} open repeats")
    except (re.error, ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(f"the expression {shown(text)} of a config can't be used: {error}") from error
    return target


def _parser() -> Any:
    from re import _parser  # type: ignore[attr-defined]

    return _parser


def _repeats(parsed: Any, *, inside: bool) -> int:
    """Open repeats in a parsed expression."""
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
