"""Incremental scanning and writing of JSON text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_MARKS = re.compile(r'["\\{}\[\]]')
_PYTHON_MARKS = re.compile(r"""["'\\{}\[\](),]""")
_TYPES: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
"""Types of JSON Schema that a decoded value fits, by its Python type."""


class JsonScanner:
    """A scanner that finds the end of a JSON value. It remembers its place between two pieces of text.

    With ``python`` it scans an argument of a Python call instead, which a comma or the closing bracket ends.
    """

    def __init__(self, depth: int = 0, *, python: bool = False) -> None:
        self.depth = depth
        """Number of open objects and lists."""
        self._marks = _PYTHON_MARKS if python else _MARKS
        self._quote = ""
        self._escaped = False

    def advance(self, text: str, end_depth: int, start: int = 0) -> int | None:
        """Read ``text`` from ``start`` and return the position where the depth falls to ``end_depth``, or None."""
        while start < len(text):
            if self._escaped:
                self._escaped, start = False, start + 1
                continue
            mark = self._marks.search(text, start)
            if mark is None:
                return None
            start, character = mark.end(), mark.group()
            if self._quote:
                self._escaped = character == "\\"
                if character == self._quote:
                    self._quote = ""
            elif character in ("'", '"'):
                self._quote = character
            elif character in "{[(":
                self.depth += 1
            elif character in "}])":
                self.depth -= 1
                if self.depth <= end_depth:
                    return start
            elif character == "," and self.depth <= end_depth + 1:
                return start
        return None


def escape_text(text: str) -> str:
    """Return ``text`` escaped for the inside of a JSON string, without the quotes."""
    return json.dumps(text)[1:-1]


def schema_types(schema: Any) -> frozenset[str]:
    """Return the types that a JSON schema names, or an empty result if the schema allows any type."""
    if not isinstance(schema, dict):
        return frozenset()
    named = schema.get("type")
    found = {named} if isinstance(named, str) else {each for each in named or () if isinstance(each, str)}
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key) or ():
            found |= schema_types(choice)
    return frozenset(found)


def value_to_json(text: str, types: frozenset[str]) -> str:
    """Return a tagged value as JSON: a value of ``types`` if the text is one, else the text.

    Some models write lists, objects, booleans and null as Python does.
    """
    stripped = text.strip()
    for read, accepted in ((json.loads, _TYPES), (ast.literal_eval, (bool, list, dict, type(None)))):
        value, encoded = _encoded(stripped, read)
        if encoded and type(value) in accepted and (not types or not types.isdisjoint(_TYPES[type(value)])):
            return encoded
    return json.dumps(text)


def python_to_json(text: str) -> str:
    """Return an argument of a Python call as JSON. Text that is no literal in Python or JSON stays text."""
    stripped = text.strip()
    return next(
        (encoded for read in (ast.literal_eval, json.loads) if (encoded := _encoded(stripped, read)[1])), json.dumps(text)
    )


def _encoded(text: str, read: Callable[[str], Any]) -> tuple[Any, str]:
    """Return the value that ``read`` parses from ``text``, and its JSON. The JSON is empty if ``text`` is no such value."""
    try:
        value = read(text)
        return value, json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None, ""
