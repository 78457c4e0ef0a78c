"""Regular expressions: Python's, checked and written as the library that compiles guides takes them.

What is written matches a part of what was given, and each of its texts is matched as a whole by Python's ``re``. Inside of a
JSON string that part has no characters that JSON escapes: quotation marks, backslashes, control characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from outrider.device.errors import ConfigError
from outrider.errors import shown

MAX_REPEAT = 1 << 16
_MAX_PARTS = 20_000
_MAX_COPIES = 1 << 16  # characters of a repetition that is written out
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_DIGITS, _SPACES = [(48, 57)], [(9, 13), (32, 32)]
_WORDS = [(48, 57), (65, 90), (95, 95), (97, 122)]
_CATEGORIES = {"DIGIT": _DIGITS, "SPACE": _SPACES, "WORD": _WORDS}
_ASCII = [(0, 127)]
_ESCAPED = [(0, 31), (34, 34), (92, 92)]
_HOST = r"[a-z0-9](?:[a-z0-9-]{0,20}[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]{0,20}[a-z0-9])?){0,3}"
_DATE = (
    r"[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "duration": "P(?:[0-9]{1,4}[YMWD]|T[0-9]{1,4}[HMS])",
        "email": r"[A-Za-z0-9_%+-]{1,32}(?:\.[A-Za-z0-9_%+-]{1,32}){0,2}@" + _HOST,
        "hostname": _HOST,
        "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
        "ipv6": "[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){7}",
        "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    }
)
"""Formats of JSON strings, as expressions; each gives a part of what its standard allows."""

Ranges = list[tuple[int, int]]


def written(pattern: str, *, in_json: bool) -> str:
    """The expression for the compiler. Raises :class:`ConfigError` for one that isn't, or that can't be enforced."""
    parser: Any = getattr(re, "_parser")  # noqa: B009  (re's own; sre_parse before Python 3.11)
    try:
        parsed = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"the pattern {shown(pattern)} isn't a regular expression: {error}") from None
    flags = parsed.state.flags & ~re.UNICODE.value
    writer = _Writer(pattern, in_json)
    if flags:
        raise writer.refused("flags")
    try:
        return writer.sequence(list(parsed), True, True)
    except RecursionError:
        raise writer.refused("that much nesting") from None


class _Writer:
    def __init__(self, pattern: str, in_json: bool) -> None:
        self._pattern = pattern
        self._in_json = in_json
        self._parts = 0
        self._branches = 0  # alternatives around what is being written

    def refused(self, what: str) -> ConfigError:
        """Why the pattern isn't taken."""
        return ConfigError(f"the pattern {shown(self._pattern)} has {what}, which can't be enforced; write it otherwise")

    def sequence(self, items: Sequence[Any], first: bool, last: bool) -> str:
        """Parts behind each other. ``first``, ``last``: nothing comes before it, behind it."""
        parts: list[str] = []
        final = max((index for index, (operator, _) in enumerate(items) if str(operator) != "AT"), default=-1)
        for index, (operator, argument) in enumerate(items):
            begins = first and not any(parts)
            parts.append(self._part(str(operator), argument, begins, last and index >= final))
        return "".join(parts)

    def _part(self, name: str, argument: Any, first: bool, last: bool) -> str:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise self.refused(f"more than {_MAX_PARTS} parts")
        if name == "LITERAL":
            return self._set([(argument, argument)])
        if name == "NOT_LITERAL":
            return self._set(_without([(argument, argument)]))
        if name == "ANY":
            return self._set(_without([(10, 10)]))
        if name == "IN":
            return self._set(self._members(argument))
        if name == "BRANCH":
            self._branches += 1
            branches = [self.sequence(list(branch), first, last) for branch in argument[1]]
            self._branches -= 1
            return "(?:" + "|".join(branches) + ")"
        if name == "SUBPATTERN":
            _, added, removed, inner = argument
            if added or removed:
                raise self.refused("flags")
            return "(?:" + self.sequence(list(inner), first, last) + ")"
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeat(*argument)
        if name == "AT":
            where = str(argument)
            if (where in ("AT_BEGINNING", "AT_BEGINNING_STRING") and first) or (where == "AT_END_STRING" and last):
                return ""
            if where == "AT_END" and last:
                return ""
            raise self.refused("an anchor inside")
        raise self.refused({"GROUPREF": "a back reference"}.get(name, f"{name.lower().replace('_', ' ')} in it"))

    def _repeat(self, least: int, most: Any, inner: Any) -> str:
        parser: Any = getattr(re, "_parser")  # noqa: B009
        unlimited = most == parser.MAXREPEAT
        if least > MAX_REPEAT or (not unlimited and most > MAX_REPEAT):
            raise self.refused(f"a repetition of more than {MAX_REPEAT} times")
        part = self.sequence(list(inner), False, False)
        if not part:
            return ""
        if self._in_json and self._branches:
            return self._copies(part, least, None if unlimited else most)
        return f"(?:{part}){{{least},{'' if unlimited else most}}}"

    def _copies(self, part: str, least: int, most: int | None) -> str:
        """A repetition without a count. xgrammar 0.2.8 takes ``a|a{1,3}`` inside of JSON for ``a|a*``: a count beside an
        alternative that begins alike doesn't end.
        """
        if (least if most is None else most) * (len(part) + 6) > _MAX_COPIES:
            raise self.refused("a repetition that long in one of several alternatives")
        if most is None:
            return f"(?:{part * least}(?:{part})*)"
        rest = most - least
        return f"(?:{part * least}{f'(?:{part}' * rest}{')?' * rest})"

    def _members(self, members: Iterable[Any]) -> Ranges:
        found: Ranges = []
        negated = broad = False
        for operator, argument in members:
            name = str(operator)
            if name == "NEGATE":
                negated = True
            elif name == "LITERAL":
                found.append((argument, argument))
            elif name == "RANGE":
                found.append(argument)
            else:
                kind = str(argument).removeprefix("CATEGORY_")
                broad = True
                ranges = _CATEGORIES[kind.removeprefix("NOT_")]
                # Python's categories go beyond ASCII: of what isn't in them, ASCII alone is certain.
                found += _both(_without(ranges), _ASCII) if kind.startswith("NOT_") else ranges
        if not negated:
            return _joined(found)
        return _both(_without(found), _ASCII) if broad else _without(found)

    def _set(self, ranges: Ranges) -> str:
        """One character of a set."""
        kept = _both(ranges, _without([_SURROGATES]))
        if self._in_json:
            kept = _both(kept, _without(_ESCAPED))
        if not kept:
            what = "a character that JSON escapes" if self._in_json and ranges else "a set of no characters"
            raise self.refused(what)
        return "[" + "".join(_code(a) if a == b else f"{_code(a)}-{_code(b)}" for a, b in kept) + "]"


def _code(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\u{{{code:x}}}"


def _joined(ranges: Ranges) -> Ranges:
    """The same set, in order and without overlaps."""
    found: Ranges = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _without(ranges: Ranges) -> Ranges:
    """Every other character."""
    found, begin = [], 0
    for start, end in _joined(ranges):
        if start > begin:
            found.append((begin, start - 1))
        begin = end + 1
    return [*found, (begin, _LAST)] if begin <= _LAST else found


def _both(one: Ranges, other: Ranges) -> Ranges:
    """What is in both."""
    return _without([*_without(one), *_without(other)])
