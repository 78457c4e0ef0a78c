"""Incremental scanning and writing of JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_MARKS = re.compile(r'["\\{}\[\]]')
_TYPES: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
"""Types of JSON schema that a value may have, by its Python type."""
_PYTHON_LITERALS = {"True": True, "False": False, "None": None}
"""Values that some models write as Python does."""


class JsonScanner:
    """A scanner that finds the end of a JSON value. It remembers its place between two pieces of text."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        """Number of open objects and lists."""
        self._in_text = False
        self._escaped = False

    def advance(self, text: str, end_depth: int, start: int = 0) -> int | None:
        """Read ``text`` from ``start`` and return the position where the depth falls to ``end_depth``, or None."""
        while start < len(text):
            if self._escaped:
                self._escaped, start = False, start + 1
                continue
            mark = _MARKS.search(text, start)
            if mark is None:
                return None
            start, character = mark.end(), mark.group()
            if self._in_text:
                self._escaped, self._in_text = character == "\\", character != '"'
            elif character == '"':
                self._in_text = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth <= end_depth:
                    return start
        return None


def escape_text(text: str) -> str:
    """Return ``text`` as the inside of a JSON text."""
    return json.dumps(text)[1:-1]


def schema_types(schema: Any) -> frozenset[str]:
    """Return the types that a JSON schema names; none if it leaves the type open."""
    if not isinstance(schema, dict):
        return frozenset()
    named = schema.get("type")
    found = {named} if isinstance(named, str) else {each for each in named or () if isinstance(each, str)}
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key) or ():
            found |= schema_types(choice)
    return frozenset(found)


def value_to_json(text: str, types: frozenset[str]) -> str:
    """Return a tagged value as JSON: a value of ``types`` if the text is one, else the text."""
    stripped = text.strip()
    try:
        value = _PYTHON_LITERALS[stripped] if stripped in _PYTHON_LITERALS else json.loads(stripped)
        encoded = json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text)
    return encoded if not types or not types.isdisjoint(_TYPES[type(value)]) else json.dumps(text)
