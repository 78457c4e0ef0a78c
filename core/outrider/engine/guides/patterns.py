"""Translation of Python regular expressions into the syntax of xgrammar.

The translated expression matches a subset of the texts that the pattern matches as a whole with Python's ``re``. Inside a
JSON string the subset excludes all characters that JSON escapes: quotation marks, backslashes and control characters.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from outrider.device.errors import ConfigError
from outrider.errors import shown

MAX_REPEAT = 1 << 16
_MAX_PARTS = 20_000
_MAX_UNROLLED_CHARS = 1 << 16  # length of a repetition that is unrolled into copies
_MAX_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_DIGITS, _SPACES = [(48, 57)], [(9, 13), (32, 32)]
_WORDS = [(48, 57), (65, 90), (95, 95), (97, 122)]
_CATEGORIES = {"DIGIT": _DIGITS, "SPACE": _SPACES, "WORD": _WORDS}
_ASCII = [(0, 127)]
_ESCAPED = [(0, 31), (34, 34), (92, 92)]
_LABEL = "[a-z0-9]{1,10}(?:-[a-z0-9]{1,10}){0,2}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_URI_TEXT = "(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-F]{2})*"
_URI = rf"[a-z][a-z0-9+-]{{1,9}}://{_HOST}(?::[1-9][0-9]{{0,3}})?/{_URI_TEXT}(?:#{_URI_TEXT})?"
_DATE = (
    r"[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_IPV6 = "[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){7}"
_EMAIL = rf"[A-Za-z0-9_+-]{{1,20}}(?:\.[A-Za-z0-9_+-]{{1,20}}){{0,2}}@(?:{_LABEL}\.){{1,3}}[a-z]{{2,8}}"
_UUID = "[0-9a-f]{8}-[0-9a-f]{4}-{}[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "duration": "P(?:[0-9]{1,4}[YMWD]|T[0-9]{1,4}[HMS])",
        **dict.fromkeys(("email", "idn-email"), _EMAIL),
        **dict.fromkeys(("hostname", "idn-hostname"), _HOST),
        **dict.fromkeys(("ipv4", "ipvanyaddress"), _IPV4),
        "ipv4interface": f"{_IPV4}/(?:[12]?[0-9]|3[0-2])",
        **dict.fromkeys(("ipv4network", "ipvanynetwork", "ipvanyinterface"), f"{_IPV4}/32"),
        "ipv6": _IPV6,
        **dict.fromkeys(("ipv6network", "ipv6interface"), f"{_IPV6}/128"),
        **dict.fromkeys(("uri", "uri-reference", "iri", "iri-reference"), _URI),
        "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
        **{f"uuid{version}": _UUID.replace("{}", str(version)) for version in (1, 3, 4, 5, 6, 7, 8)},
        "base64": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
        "json-pointer": "(?:/[A-Za-z0-9_-]*)*",
    }
)
"""JSON string formats, also pydantic's, as regular expressions. Each expression matches a subset of its standard."""
FREE_FORMATS = ("binary", "directory-path", "file-path", "password", "path")
"""JSON string formats that allow every text."""
IMPLIED_PATTERNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "duration": (r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",),
        "email": (
            r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
            r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        ),
        "hostname": (
            r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
            r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$",
        ),
    }
)
"""Patterns that Zod writes next to a format, and that all texts of :data:`FORMATS` match: the format alone is enforced."""
_REFUSED_ITEMS = {
    "GROUPREF": "a back reference",
    **dict.fromkeys(("ASSERT", "ASSERT_NOT"), "a look-ahead or a look-behind"),
}
Ranges = list[tuple[int, int]]
"""Code point ranges of a character set; both ends are included."""


@functools.lru_cache(maxsize=512)
def to_xgrammar_syntax(pattern: str, *, in_json: bool, lengths: tuple[int, int | None] = (0, None)) -> str:
    """Return ``pattern`` in xgrammar's syntax; with ``in_json``, for use inside a JSON string.

    ``lengths`` are the minimum and the maximum length of a text in characters; None means no maximum. Raises
    :class:`ConfigError` if Python's ``re`` rejects the pattern, or if xgrammar can't enforce it.
    """
    parser: Any = getattr(re, "_parser")  # noqa: B009  (private module of re; sre_parse before Python 3.11)
    try:
        try:
            parsed = parser.parse(pattern)
        except re.error:
            parsed = parser.parse(re.sub(r"(?<!\\)\(\?<(?=[A-Za-z_])", "(?P<", pattern))  # a named group of JavaScript
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"the pattern {shown(pattern)} isn't a regular expression: {error}") from None
    flags = parsed.state.flags & ~re.UNICODE.value
    writer = _Writer(pattern, in_json)
    if flags:
        raise writer.refused("flags")
    try:
        items = _limit_length(parsed, *lengths)
        if items is None:
            raise writer.refused("lengths next to it that none of its repetitions can keep")
        return writer.sequence(items, True, True)
    except RecursionError:
        raise writer.refused("that much nesting") from None


def _limit_length(parsed: Any, least: int, most: int | None) -> list[Any] | None:
    """Return the items of the expression ``parsed``, with narrower counts of its repetitions if a text could have less than
    ``least`` or more than ``most`` characters. Return None if that isn't enough.
    """

    def width(items: Iterable[Any]) -> Any:
        return type(parsed)(parsed.state, list(items)).getwidth()

    items = list(_flattened(parsed))
    repeats = {n: argument for n, (kind, argument) in enumerate(items) if str(kind) in ("MAX_REPEAT", "MIN_REPEAT")}
    widths = {n: inner.getwidth() for n, (_, _, inner) in repeats.items()}
    if most is not None and width(items)[1] > most:
        room = most - width(item for n, item in enumerate(items) if n not in repeats)[1]
        room -= sum(times * widths[n][1] for n, (times, _, _) in repeats.items())
        for place, (n, (low, high, inner)) in enumerate(repeats.items()):
            share = max(0, room) // (len(repeats) - place)
            more = min(high - low, share // max(1, widths[n][1]))
            room -= more * widths[n][1]
            repeats[n] = low, low + more, inner
        if room < 0:
            return None
    lacking = least - width(items)[0]
    for n, (low, high, inner) in repeats.items():
        shortest = widths[n][0]
        more = min(high - low, -(-max(0, lacking) // shortest)) if shortest else 0
        lacking -= more * shortest
        items[n] = items[n][0], (low + more, high, inner)
    return items if lacking <= 0 else None


def _flattened(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of a parsed expression, and those of a group without flags in place of the group."""
    for operator, argument in items:
        if str(operator) == "SUBPATTERN" and not (argument[1] or argument[2]):
            yield from _flattened(argument[3])
        else:
            yield operator, argument


class _Writer:
    def __init__(self, pattern: str, in_json: bool) -> None:
        self._pattern = pattern
        self._in_json = in_json
        self._parts = 0
        self._branches = 0  # nesting depth of alternatives around the current part

    def refused(self, feature: str) -> ConfigError:
        """Return the :class:`ConfigError` for a pattern with ``feature``, which xgrammar can't enforce."""
        return ConfigError(f"the pattern {shown(self._pattern)} has {feature}, which can't be enforced; write it otherwise")

    def sequence(self, items: Sequence[Any], first: bool, last: bool) -> str:
        """Translate a sequence of parsed items. ``first`` and ``last``: the sequence starts or ends the whole pattern."""
        parts: list[str] = []
        last_part = max((index for index, (operator, _) in enumerate(items) if str(operator) != "AT"), default=-1)
        for index, (operator, argument) in enumerate(items):
            is_first = first and not any(parts)
            parts.append(self._part(str(operator), argument, is_first, last and index >= last_part))
        return "".join(parts)

    def _part(self, name: str, argument: Any, first: bool, last: bool) -> str:
        """Translate one parsed item of a regular expression. ``name`` is its opcode in Python's ``re``."""
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise self.refused(f"more than {_MAX_PARTS} parts")
        if name == "LITERAL":
            return self._write_class([(argument, argument)])
        if name == "NOT_LITERAL":
            return self._write_class(_complement([(argument, argument)]))
        if name == "ANY":
            return self._write_class(_complement([(10, 10)]))
        if name == "IN":
            return self._write_class(self._class_ranges(argument))
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
            anchor = str(argument)
            matches_start = first and anchor in ("AT_BEGINNING", "AT_BEGINNING_STRING")
            if matches_start or (last and anchor in ("AT_END", "AT_END_STRING")):
                return ""
            raise self.refused("an anchor inside")
        raise self.refused(_REFUSED_ITEMS.get(name, f"{name.lower().replace('_', ' ')} in it"))

    def _repeat(self, least: int, most: Any, inner: Any) -> str:
        parser: Any = getattr(re, "_parser")  # noqa: B009
        unlimited = most == parser.MAXREPEAT
        if least > MAX_REPEAT or (not unlimited and most > MAX_REPEAT):
            raise self.refused(f"a repetition of more than {MAX_REPEAT} times")
        part = self.sequence(list(inner), False, False)
        if not part:
            return ""
        if self._in_json and self._branches:
            return self._unroll(part, least, None if unlimited else most)
        return f"(?:{part}){{{least},{'' if unlimited else most}}}"

    def _unroll(self, part: str, least: int, most: int | None) -> str:
        """Return a repetition of ``part`` as written-out copies: ``least`` times at least, ``most`` times at most (None:
        without limit).

        xgrammar 0.2.8 reads ``a|a{1,3}`` inside JSON as ``a|a*``: it drops the count if another alternative starts alike.
        """
        if (least if most is None else most) * (len(part) + 6) > _MAX_UNROLLED_CHARS:
            raise self.refused("a repetition that long in one of several alternatives")
        if most is None:
            return f"(?:{part * least}(?:{part})*)"
        optional = most - least
        return f"(?:{part * least}{f'(?:{part}' * optional}{')?' * optional})"

    def _class_ranges(self, members: Iterable[Any]) -> Ranges:
        """Return the code point ranges of a character class that ``re`` has parsed into ``members``."""
        ranges: Ranges = []
        negated = has_category = False
        for operator, argument in members:
            name = str(operator)
            if name == "NEGATE":
                negated = True
            elif name == "LITERAL":
                ranges.append((argument, argument))
            elif name == "RANGE":
                ranges.append(argument)
            else:
                category = str(argument).removeprefix("CATEGORY_")
                has_category = True
                members_of = _CATEGORIES[category.removeprefix("NOT_")]
                # Python's categories have members beyond ASCII, so their complement is exact for ASCII only.
                ranges += _intersection(_complement(members_of), _ASCII) if category.startswith("NOT_") else members_of
        if not negated:
            return _merge(ranges)
        return _intersection(_complement(ranges), _ASCII) if has_category else _complement(ranges)

    def _write_class(self, ranges: Ranges) -> str:
        """Return ``ranges`` as a character class of xgrammar, without surrogates and, inside JSON, without characters that
        JSON escapes.
        """
        allowed = _intersection(ranges, _complement([_SURROGATES]))
        if self._in_json:
            allowed = _intersection(allowed, _complement(_ESCAPED))
        if not allowed:
            raise self.refused("a character that JSON escapes" if self._in_json and ranges else "a set of no characters")
        return "[" + "".join(_escape(a) if a == b else f"{_escape(a)}-{_escape(b)}" for a, b in allowed) + "]"


def _escape(code_point: int) -> str:
    character = chr(code_point)
    return character if character.isascii() and character.isalnum() else f"\\u{{{code_point:x}}}"


def _merge(ranges: Ranges) -> Ranges:
    """Return the same set as sorted ranges without overlaps."""
    merged: Ranges = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _complement(ranges: Ranges) -> Ranges:
    gaps, gap_start = [], 0
    for start, end in _merge(ranges):
        if start > gap_start:
            gaps.append((gap_start, start - 1))
        gap_start = end + 1
    return [*gaps, (gap_start, _MAX_CODE_POINT)] if gap_start <= _MAX_CODE_POINT else gaps


def _intersection(one: Ranges, other: Ranges) -> Ranges:
    return _complement([*_complement(one), *_complement(other)])
