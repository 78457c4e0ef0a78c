"""Reader of a model's text: content, reasoning and tool calls by regions of its format, and the JSON of their arguments."""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import regex

from outrider.engine.requests.sampling import partial_match_length
from outrider.serve.api.model_formats import NAMED_ARGUMENTS, FormatRegion, ModelFormat

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


class ArgumentElement:
    """An open argument element in a tool call, which becomes an object, a list or a single value in JSON. Its methods return
    the next pieces of that JSON.
    """

    def __init__(self, name: str, schema: Any) -> None:
        self.name = name
        self._schema = schema if isinstance(schema, dict) else {}
        self._types = schema_types(schema)
        self._brackets = ""
        self._has_quote = False
        self.is_text = self._types == {"string"}
        """True if the schema allows only text, which is reported while the model writes it."""
        self.pending = ""
        """Text of a value that the schema doesn't restrict to text; it is reported when the element ends."""

    def add_text(self, text: str) -> str:
        """Append ``text`` to the element's value, and return the JSON that is certain now."""
        if not self.is_text or not text:
            self.pending += text
            return ""
        quote, self._has_quote = "" if self._has_quote else '"', True
        return quote + escape_text(text)

    def open_child(self, name: str) -> tuple[str, ArgumentElement]:
        """Begin an inner element. Return the JSON before it and the element. Elements with the name ``item`` make a list,
        others an object.
        """
        before = ", " if self._brackets else ""
        if not self._brackets:
            self._brackets = "[]" if name == "item" and self._types <= {"array", "null"} else "{}"
            before = self._brackets[0]
        if self._brackets == "[]":
            return before, ArgumentElement(name, self._schema.get("items"))
        properties = self._schema.get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        return f"{before}{json.dumps(name)}: ", ArgumentElement(name, schema)

    def close(self) -> str:
        """Return the JSON that ends the element: the whole value if no piece of it was returned before."""
        if self._brackets:
            return self._brackets[1]
        if self.is_text:
            return '"' if self._has_quote else '""'
        empty = {"array": "[]", "object": "{}"}
        if not self.pending.strip():
            return next((text for kind, text in empty.items() if kind in self._types), '""')
        return value_to_json(self.pending, self._types)


_PAIR_TOKEN = r"(?P<key>[^\s{}\[\],:<\"]+):|(?P<word>[^\s{}\[\],:<\"]+)(?=[\s{}\[\],<\"])|(?P<other>[\s{}\[\],:<\"])"
"""A regular expression for a key, another word, or a single character of a tool call in the form ``pairs``."""


class FormatReader:
    """A reader whose deltas, put together, don't depend on how the text is cut into pieces. It loses no text.

    Arguments are reported while they are written. A call whose name can't be read is content. What follows the name is
    reported as arguments even if it is no valid JSON. White space next to reasoning and calls is left out.
    """

    def __init__(
        self, model_format: ModelFormat, prompt: str, tools: Sequence[dict[str, Any]], *, max_calls: int | None = None
    ) -> None:
        """Create a reader for one answer.

        ``prompt`` is the text before the answer. Without ``tools`` all calls are content; ``max_calls`` limits them.
        """
        self._regions = [region for region in model_format.regions if tools or region.kind != "call"]
        self._properties = {
            tool["function"]["name"]: (tool["function"].get("parameters") or {}).get("properties") or {} for tool in tools
        }
        self._max_calls = max_calls
        self._reasoning = model_format.open_reasoning(prompt)
        self._buffer, self._last = "", False
        self._delta: dict[str, Any] = {}
        self._state: Callable[[], bool] = self._read_text
        self._count = 0
        self._has_text = self._reasoning is not None
        self._skips_space = self._has_text
        self._region = FormatRegion(kind="content", starts=(), head="")
        self._scanner = JsonScanner()
        self._tails: list[str] = []
        self._raw = ""
        self._scanned = 0
        self._name = ""
        self._is_first = self._value_is_text = self._at_value_start = False
        self._types: frozenset[str] = frozenset()
        self._elements: list[ArgumentElement] = []

    @property
    def has_calls(self) -> bool:
        """Return whether the text so far contains a tool call."""
        return self._count > 0

    def feed(self, text: str, *, last: bool) -> dict[str, Any]:
        """Return the message delta that ``text`` completes, possibly empty. ``last`` says that no more text follows."""
        self._buffer += text
        self._delta, self._last = {}, last
        while self._state():
            pass
        return self._delta

    # -- content and reasoning ---------------------------------------------------------------------------------------

    def _read_text(self) -> bool:
        if self._reasoning is not None:
            position, literal = self._find(self._reasoning.ends)
            self._emit_text("reasoning_content", self._take(position))
            if literal:
                self._take(len(literal))
                self._reasoning, self._skips_space = None, True
            return bool(literal)
        is_first = not (self._has_text or self.has_calls)
        regions = [region for region in self._regions if is_first or not region.only_first]
        position, literal = self._find([start for region in regions for start in region.starts])
        self._emit_text("content", self._take(position))
        if position or not literal:
            return bool(literal)
        for region in regions:
            if not self._buffer.startswith(region.starts):
                continue
            match = regex.match(region.head, self._buffer, partial=not self._last)
            if match is not None and match.partial:
                return False
            if match is not None:
                self._take(match.end())
                self._enter(region, match)
                return True
        self._emit_text("content", self._take(len(literal)))
        return True

    def _enter(self, region: FormatRegion, match: Any) -> None:
        if region.kind == "reasoning":
            self._reasoning, self._skips_space = region, True
            return
        if region.kind == "content":
            return
        self._region = region
        if region.body == "object":
            self._start_object(match.group())
        else:
            self._start_call(match.groupdict())

    def _start_call(self, groups: dict[str, str]) -> None:
        self._open_call(groups["name"], groups.get("id"))
        self._is_first, self._scanner = True, JsonScanner()
        self._elements = [ArgumentElement("invoke", {"type": "object", "properties": self._properties.get(self._name)})]
        states = {
            "json": self._read_json,
            "parameters": self._read_parameters,
            "elements": self._read_elements,
            "python": self._read_parameters,
            "pairs": self._read_pairs,
        }
        self._state = states[self._region.body]

    # -- JSON ----------------------------------------------------------------------------------------------------------

    def _start_object(self, raw: str) -> None:
        self._raw, self._scanned, self._scanner = raw, 0, JsonScanner()
        self._state = self._read_object

    def _read_object(self) -> bool:
        """Read a tool call's object up to its arguments, or as a whole if the name doesn't come first. Return False if more
        text is needed.
        """
        match = None if self._scanned else regex.match(NAMED_ARGUMENTS, self._buffer, partial=not self._last)
        if match is not None and match.partial:
            return False
        if match is not None:
            self._take(match.end())
            self._open_call(match["name"], None)
            self._scanner, self._state = JsonScanner(depth=1), self._read_json
            return True
        end = self._scanner.advance(self._buffer, 0, self._scanned)
        self._scanned = len(self._buffer)
        if end is None and not self._last:
            return False
        text = self._take(len(self._buffer) if end is None else end)
        call = _parsed_call(text)
        if call is None:
            self._emit_text("content", self._raw + text)
            self._state = self._read_text
        else:
            self._open_call(call[0], None)
            self._add_arguments(call[1])
            self._close_call()
        return True

    def _read_json(self) -> bool:
        """Report the JSON arguments of a tool call while the model writes them. Return False if more text is needed."""
        outer = 1 if self._region.body == "object" else 0
        end = self._scanner.advance(self._buffer, outer)
        self._add_arguments(self._take(len(self._buffer) if end is None else end))
        if end is None:
            return False
        self._state = self._read_object_rest if outer else self._close_call
        return True

    def _read_object_rest(self) -> bool:
        """Skip the text of a tool call's object after its arguments. Return False if more text is needed."""
        end = self._scanner.advance(self._buffer, 0)
        self._take(len(self._buffer) if end is None else end)
        return end is not None and self._close_call()

    # -- tagged values -----------------------------------------------------------------------------------------------

    def _read_parameters(self) -> bool:
        region = self._region
        parameter = regex.match(rf"\s*{region.parameter}", self._buffer, partial=not self._last)
        end = regex.match(rf"\s*(?:{region.ends[0]})", self._buffer, partial=not self._last)
        if parameter is not None and not parameter.partial:
            self._take(parameter.end())
            groups = parameter.groupdict()
            key = groups["key"].strip()
            self._types = schema_types(self._properties.get(self._name, {}).get(key))
            is_python = region.body == "python"
            self._value_is_text = not is_python and (bool(groups.get("text")) or self._types == {"string"})
            self._add_arguments(
                f"{'{' if self._is_first else ', '}{json.dumps(key)}: " + ('"' if self._value_is_text else "")
            )
            self._scanner, self._scanned = JsonScanner(1, python=True), 0
            self._is_first, self._at_value_start = False, True
            self._state = self._read_python_value if is_python else self._read_value
            return True
        if (parameter or end) is not None and (end is None or end.partial):
            return False
        self._add_arguments("{}" if self._is_first else "}")
        self._take(0 if end is None else end.end())
        return self._close_call()

    def _read_value(self) -> bool:
        ends = self._region.value_ends
        if self._at_value_start and ends[0].startswith("\n"):
            if not self._buffer and not self._last:
                return False
            if self._buffer.startswith("\n") and not self._buffer.startswith(ends):
                if any(end.startswith(self._buffer) for end in ends) and not self._last:
                    return False  # the line break may belong to the end
                self._take(1)
        self._at_value_start = False
        position, literal = self._find(ends)
        if self._value_is_text:
            self._add_arguments(escape_text(self._take(position)) + ('"' if literal else ""))
        elif literal:
            self._add_arguments(value_to_json(self._take(position), self._types))
        elif self._last:
            self._add_arguments(self._take(position))
        if literal:
            self._take(len(literal))
            self._state = self._read_parameters
        return bool(literal)

    def _read_python_value(self) -> bool:
        """Read an argument of a Python call, up to the comma or the bracket that ends it. Return False if more text is
        needed.
        """
        end = self._scanner.advance(self._buffer, 0, self._scanned)
        self._scanned = len(self._buffer)
        if end is None and not self._last:
            return False
        text = self._take(len(self._buffer) if end is None else end - 1)
        self._add_arguments(text if end is None else python_to_json(text))
        if end is not None and self._buffer.startswith(","):
            self._take(1)
        self._state = self._read_parameters
        return end is not None

    def _read_elements(self) -> bool:
        """Read up to the next tag of an argument, of an inner value or of the call, and report what the tag completes. Return
        False if more text is needed.
        """
        top, is_call = self._elements[-1], len(self._elements) == 1
        position, literal = self._find(self._region.value_ends)
        tag = regex.match(self._region.parameter, self._buffer, pos=position, partial=not self._last) if literal else None
        if tag is not None and tag.partial:
            return False
        is_end = tag is not None and tag["close"] is not None and tag["name"] == top.name
        is_child = tag is not None and tag["close"] is None and not top.is_text
        if is_call and (self._buffer[:position].strip() or (literal and not (is_end or is_child))):
            self._add_arguments(top.close())  # this text belongs to no argument
            return self._close_call()
        text = self._take(position)
        if not is_call:
            self._add_arguments(top.add_text(text))
        if tag is not None and is_child:
            self._take(tag.end() - position)
            text, child = top.open_child(tag["name"])
            self._add_arguments(text)
            self._elements.append(child)
        elif tag is not None and is_end:
            self._take(tag.end() - position)
            self._add_arguments(top.close())
            self._elements.pop()
            return bool(self._elements) or self._close_call()
        elif literal:
            self._add_arguments(top.add_text(self._take(len(literal))))  # the marker is a part of the value
        elif self._last:
            self._add_arguments(top.pending)
        return bool(literal)

    # -- pairs without quotes --------------------------------------------------------------------------------------------

    def _read_pairs(self) -> bool:
        """Read one token of a tool call's object whose keys have no quotes, and report it as JSON. Return False if more text
        is needed.
        """
        quote = self._region.ends[0]
        if self._value_is_text:
            position, literal = self._find((quote,))
            self._add_arguments(escape_text(self._take(position)) + ('"' if literal else ""))
            self._value_is_text = not literal
            self._take(len(literal))
            return bool(literal)
        if quote.startswith(self._buffer) and not self._last:
            return False
        if self._buffer.startswith(quote):
            self._take(len(quote))
            self._add_arguments('"')
            self._value_is_text = True
            return True
        match = regex.match(_PAIR_TOKEN, self._buffer, partial=not self._last)
        if match is None or match.partial:
            if self._last:
                self._add_arguments(self._take(len(self._buffer)))
            return False
        token = self._take(match.end())
        self._add_arguments(f"{json.dumps(match['key'])}:" if match["key"] else token)
        if match["other"] and self._scanner.advance(token, 0) is not None:
            return self._close_call()
        return True

    # -- the end of a call -------------------------------------------------------------------------------------------

    def _close_call(self) -> bool:
        self._tails = [*self._region.tails]
        self._value_is_text, self._state = False, self._read_tails
        return True

    def _read_tails(self) -> bool:
        """Skip the text that ends a tool call, or begin the next call of a list. Return False if more text is needed."""
        again = regex.match(self._region.again, self._buffer, partial=not self._last) if self._region.again else None
        if again is not None and again.partial:
            return False
        if again is not None:
            text = self._take(again.end())
            self._start_call(again.groupdict()) if self._region.body == "python" else self._start_object(text)
            return True
        while self._tails:
            tail = regex.match(self._tails[0], self._buffer, partial=not self._last)
            if tail is not None and tail.partial:
                return False
            if tail is not None:
                self._take(tail.end())
            del self._tails[0]
        self._skips_space, self._state = True, self._read_text
        return True

    # -- buffer and delta --------------------------------------------------------------------------------------------

    def _find(self, literals: Sequence[str]) -> tuple[int, str]:
        """Return position and text of the first of ``literals`` in the buffered text.

        If none is found: the length of the text that is certainly no part of a literal, and an empty string.
        """
        found = [(position, literal) for literal in literals if (position := self._buffer.find(literal)) >= 0]
        if found:
            return min(found, key=lambda each: (each[0], -len(each[1])))
        if self._last:
            return len(self._buffer), ""
        return len(self._buffer) - partial_match_length(self._buffer, literals), ""

    def _take(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text

    def _emit_text(self, field: str, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
        if text:
            self._delta[field] = self._delta.get(field, "") + text
            self._skips_space = False
            self._has_text = self._has_text or bool(text.strip())

    def _open_call(self, name: str, call_id: str | None) -> None:
        self._name = name
        self._count += 1
        self._put_call({"id": call_id or f"call_{secrets.token_hex(12)}", "type": "function"}, name=name, arguments="")

    def _add_arguments(self, text: str) -> None:
        if text:
            self._put_call({}, arguments=text)

    def _put_call(self, fields: dict[str, Any], **function: str) -> None:
        if self._max_calls is not None and self._count > self._max_calls:
            return
        calls = self._delta.setdefault("tool_calls", [])
        if not fields and calls and calls[-1]["index"] == self._count - 1:
            calls[-1]["function"]["arguments"] += function["arguments"]
        else:
            calls.append({"index": self._count - 1, **fields, "function": function})


def _parsed_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of a tool call that is one JSON object, or None for any other object."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", call.get("parameters"))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(name, str):
        return None
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments or {})
