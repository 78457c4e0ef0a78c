"""Reader of a model's text: content, reasoning and tool calls by regions of its format, and the JSON of their arguments."""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import regex

from outrider.engine.guides.schemas import resolve_reference
from outrider.engine.requests.sampling import partial_match_length
from outrider.serve.api.model_formats import NAMED_ARGUMENTS, FormatRegion, ModelFormat

T = TypeVar("T")
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


def schema_types(schema: Any, root: Any, seen: set[int] | None = None) -> frozenset[str]:
    """Return the types that a JSON schema allows, or an empty result if it allows any type.

    References point into ``root``. Schemas whose ids are in ``seen`` have been counted.
    """
    schema, seen = resolve_reference(schema, root), set() if seen is None else seen
    if id(schema) in seen:
        return frozenset()
    seen.add(id(schema))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    found = {each for each in _listed(schema.get("type")) if isinstance(each, str)}
    found = found or {name for each in _listed(values) for name in _TYPES[type(each)]}
    for key in ("anyOf", "oneOf", "allOf"):
        for choice in _listed(schema.get(key)):
            found |= schema_types(choice, root, seen)
    return frozenset(found)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _properties(schema: Any, root: Any) -> Mapping[str, Any]:
    """Return the properties of an object's schema by their names, or an empty mapping if the schema has none."""
    properties = resolve_reference(schema, root).get("properties")
    return properties if isinstance(properties, dict) else {}


def value_to_json(text: str, types: frozenset[str]) -> str:
    """Return a tagged value as JSON: a value of ``types`` if the text is one, else the text.

    Models write texts without quotation marks. Some write lists, objects, booleans and null as Python does.
    """
    stripped = text.strip()
    for read, accepted in ((json.loads, _TYPES), (ast.literal_eval, (bool, list, dict, type(None)))):
        value, encoded = _encoded(stripped, read)
        is_allowed = not types or (type(value) is not str and not types.isdisjoint(_TYPES[type(value)]))
        if encoded and type(value) in accepted and is_allowed:
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

    def __init__(self, name: str, schema: Any, root: Any) -> None:
        """Create the element of the argument or call ``name``. References in ``schema`` point into ``root``."""
        self.name = name
        self._schema, self._root = resolve_reference(schema, root), root
        self._types = schema_types(schema, root)
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
            return before, ArgumentElement(name, self._schema.get("items"), self._root)
        schema = _properties(self._schema, self._root).get(name)
        return f"{before}{json.dumps(name)}: ", ArgumentElement(name, schema, self._root)

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


_MAX_MATCH_CHARACTERS = 1024
"""Maximum length of the text that one regular expression matches: names and white space between the parts of a call.

A model may repeat white space up to its limit, and each of its tokens would repeat the match.
"""

Waiting = Generator[None, None, T]
"""A part of a reader that returns a T. It stops at each ``yield`` until there is more text; after the last text, it stays
there.
"""


class FormatReader:
    """A reader whose deltas, put together, don't depend on how the text is cut into pieces. It loses no text.

    Arguments are reported while they are written. A call whose name can't be read is content. What follows the name is
    reported as arguments even if it is no valid JSON. White space next to reasoning and calls is left out.
    """

    def __init__(
        self,
        model_format: ModelFormat,
        prompt: str,
        tools: Sequence[dict[str, Any]],
        *,
        max_calls: int | None = None,
        calls_first: bool = False,
        only_calls: bool = False,
    ) -> None:
        """Create a reader for one answer.

        ``prompt`` is the text before the answer. Without ``tools`` all calls are content; ``max_calls`` limits them. With
        ``calls_first`` the first call begins the answer. With ``only_calls`` text after a call is left out: it is the start
        of a call that a limit cut off.
        """
        self._calls_first, self._only_calls = calls_first, only_calls
        self._regions = [region for region in model_format.regions if tools or region.kind != "call"]
        self._parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._max_calls = max_calls
        reasoning = model_format.open_reasoning(prompt)
        self._buffer, self._last = "", False
        self._delta: dict[str, Any] = {}
        self._count = 0
        self._has_text = reasoning is not None
        self._skips_space = self._has_text or calls_first
        self._space = ""
        """White space at the end of the content so far; :meth:`feed` reports it once text follows."""
        self._drops_space = False
        """True if a call or reasoning follows :attr:`_space`, so that at the end of the answer it is left out."""
        self._parts = self._read_answer(reasoning)

    @property
    def has_calls(self) -> bool:
        """Return whether the text so far contains a tool call."""
        return self._count > 0

    def feed(self, text: str, *, last: bool) -> dict[str, Any]:
        """Return the message delta that ``text`` completes, possibly empty. ``last`` says that no more text follows."""
        self._buffer += text
        self._delta, self._last = {}, last
        next(self._parts)
        if last and self._space and not self._drops_space:
            self._delta["content"] = self._delta.get("content", "") + self._space
        if self._only_calls and self.has_calls:
            self._delta.pop("content", None)
        return self._delta

    # -- content and reasoning ---------------------------------------------------------------------------------------

    def _read_answer(self, reasoning: FormatRegion | None) -> Waiting[None]:
        """Read the whole answer, which begins inside the region ``reasoning`` unless that is None."""
        while True:
            if reasoning is not None:
                yield from self._read_reasoning(reasoning)
            region, head = yield from self._read_content()
            reasoning = region if region.kind == "reasoning" else None
            if region.kind == "call":
                yield from self._read_calls(region, head)

    def _read_reasoning(self, region: FormatRegion) -> Waiting[None]:
        """Read reasoning through its end. Some models leave the end out before a call: the answer's end shows that a call
        that begins in the reasoning is one, and not a draft.
        """
        self._skips_space = self._drops_space = True
        calls = [each for each in self._regions if each.kind == "call" and not each.only_first]
        starts = [start for each in calls for start in each.starts]
        while True:
            position, literal = self._find((*region.ends, *starts))
            self._emit_text("reasoning_content", self._take(position))
            if literal in region.ends:
                break
            if not literal:
                yield
            elif not position:
                call, head = self._match_head(calls)
                if call is None:
                    self._emit_text("reasoning_content", self._take(len(literal)))
                elif head.partial:
                    yield
                else:
                    while not (found := self._find(region.ends))[1]:
                        if self._last:
                            return
                        yield
                    self._emit_text("reasoning_content", self._take(found[0]))
        self._take(len(literal))
        self._skips_space = True

    def _read_content(self) -> Waiting[tuple[FormatRegion, Any]]:
        """Read up to the next region and through its head. Return the region and the match of the head."""
        while True:
            is_first = not (self._has_text or self.has_calls)
            has_only_text = self._calls_first and self._has_text and not self.has_calls
            regions = [region for region in self._regions if is_first or not (region.only_first or has_only_text)]
            position, literal = self._find([start for region in regions for start in region.starts])
            self._emit_text("content", self._take(position))
            if not literal:
                yield
            elif not position:
                region, head = self._match_head(regions)
                if region is None:
                    self._emit_text("content", self._take(len(literal)))
                elif head.partial:
                    yield
                else:
                    self._take(head.end())
                    return region, head

    def _match_head(self, regions: Sequence[FormatRegion]) -> tuple[FormatRegion | None, Any]:
        """Return the first region whose head the buffer begins with, or may begin with, and the match of the head."""
        for region in regions:
            if self._buffer.startswith(region.starts) and (head := self._match(region.head)) is not None:
                return region, head
        return None, None

    # -- calls -------------------------------------------------------------------------------------------------------

    def _read_calls(self, region: FormatRegion, head: Any) -> Waiting[None]:
        """Read a tool call after its ``head``, the following calls of a list, and the text that ends them."""
        while head is not None:
            if region.body != "object":
                yield from self._read_call(region, head)
            elif not (yield from self._read_object(head.group())):
                return
            head = (yield from self._read_match(region.again)) if region.again else None
        for tail in region.tails:
            yield from self._read_match(tail)
        self._skips_space = True

    def _read_call(self, region: FormatRegion, head: Any) -> Waiting[None]:
        name, call_id = head["name"], head.groupdict().get("id")
        self._open_call(name, call_id)
        parameters = self._parameters.get(name)
        match region.body:
            case "json":
                yield from self._read_json(JsonScanner(), 0, self._add_arguments)
            case "parameters" | "python":
                yield from self._read_parameters(region, parameters)
            case "elements":
                schema = {"type": "object", "properties": _properties(parameters, parameters)}
                yield from self._read_elements(region, ArgumentElement("invoke", schema, parameters))
            case "pairs":
                yield from self._read_pairs(region.ends[0])

    # -- JSON ----------------------------------------------------------------------------------------------------------

    def _read_object(self, raw: str) -> Waiting[bool]:
        """Read a tool call that is one object: as a whole if the name doesn't come first. ``raw`` is the text before it.

        Return False for another object, which is content.
        """
        named = yield from self._read_match(NAMED_ARGUMENTS)
        if named is not None:
            self._open_call(named["name"], None)
            scanner = JsonScanner(depth=1)
            yield from self._read_json(scanner, 1, self._add_arguments)
            yield from self._read_json(scanner, 0, lambda text: None)  # the fields after the arguments
            return True
        end = yield from self._find_end(JsonScanner())
        text = self._take(end)
        call = _parsed_call(text)
        if call is None:
            self._emit_text("content", raw + text)
            return False
        self._open_call(call[0], None)
        self._add_arguments(call[1])
        return True

    def _read_json(self, scanner: JsonScanner, end_depth: int, report: Callable[[str], None]) -> Waiting[None]:
        """Pass JSON to ``report`` while the model writes it, up to the end of the value at ``end_depth``."""
        while (end := scanner.advance(self._buffer, end_depth)) is None:
            report(self._take(None))
            yield
        report(self._take(end))

    def _find_end(self, scanner: JsonScanner) -> Waiting[int | None]:
        """Return the position after the value that begins the buffer, or None if the last text ends before it."""
        scanned = 0
        while (end := scanner.advance(self._buffer, 0, scanned)) is None and not self._last:
            scanned = len(self._buffer)
            yield
        return end

    # -- tagged values -----------------------------------------------------------------------------------------------

    def _read_parameters(self, region: FormatRegion, schema: Any) -> Waiting[None]:
        """Read the arguments of a call, whose ``schema`` is that of the tool's parameters."""
        properties, names = _properties(schema, schema), set[str]()

        def is_next(name: str) -> bool:
            return name not in names and (not properties or name in properties)

        while True:
            parameter, end = self._match(rf"\s*{region.parameter}"), self._match(rf"\s*(?:{region.ends[0]})")
            if parameter is not None and not parameter.partial:
                self._take(parameter.end())
                key = parameter["key"].strip()
                self._add_arguments(f"{', ' if names else '{'}{json.dumps(key)}: ")
                types = schema_types(properties.get(key), schema)
                names.add(key)
                if region.body == "python":
                    yield from self._read_python_value()
                else:
                    is_text = bool(parameter.groupdict().get("text")) or types == {"string"}
                    yield from self._read_value(region, None if is_text else types, is_next)
            elif (parameter or end) is not None and (end is None or end.partial):
                yield
            else:
                self._add_arguments("}" if names else "{}")
                self._take(0 if end is None else end.end())
                return

    def _read_value(
        self, region: FormatRegion, types: frozenset[str] | None, is_next: Callable[[str], bool]
    ) -> Waiting[None]:
        """Read a tagged value. ``types`` are those that its schema allows; None stands for a text, which is reported while
        the model writes it. ``is_next`` tells if a parameter of a name may follow.
        """
        ends = region.value_ends + region.value_limits
        if types is None:
            self._add_arguments('"')
        if ends[0].startswith("\n"):
            while not self._last and not self._buffer.startswith(ends) and any(end.startswith(self._buffer) for end in ends):
                yield  # a line break may belong to the end
            if self._buffer.startswith("\n") and not self._buffer.startswith(ends):
                self._take(1)
        if types is None:
            yield from self._read_string(ends, region, is_next)
            return
        pieces: list[str] = []
        if (yield from self._read_until(ends, pieces.append, region, is_next)):
            self._add_arguments(value_to_json("".join(pieces), types))
        else:
            self._add_arguments("".join(pieces))
            yield

    def _read_string(
        self, ends: tuple[str, ...], region: FormatRegion | None = None, is_next: Callable[[str], bool] = bool
    ) -> Waiting[None]:
        """Report text up to one of ``ends`` as the inside of a JSON string, and the quote that ends the string."""
        if (yield from self._read_until(ends, lambda text: self._add_arguments(escape_text(text)), region, is_next)):
            self._add_arguments('"')
        else:
            yield

    def _read_until(
        self,
        ends: tuple[str, ...],
        report: Callable[[str], object],
        region: FormatRegion | None,
        is_next: Callable[[str], bool],
    ) -> Waiting[bool]:
        """Pass text to ``report`` up to one of ``ends``, and take the end unless it is a value limit of ``region``.

        Return False if the last text has none of them.
        """
        while True:
            position, literal = self._find(ends)
            report(self._take(position))
            if literal and (region is None or literal not in region.value_limits):
                self._take(len(literal))
                return True
            limit = self._match(region.limit) if region is not None and literal else None
            if literal and (limit is None or not (limit.partial or limit["key"] is None or is_next(limit["key"]))):
                report(self._take(len(literal)))
            elif limit is not None and not limit.partial:
                return True
            elif self._last:
                return False
            else:
                yield

    def _read_python_value(self) -> Waiting[None]:
        """Read an argument of a Python call, up to the comma or the bracket that ends it."""
        end = yield from self._find_end(JsonScanner(1, python=True))
        if end is None:
            self._add_arguments(self._take(None))
            yield
        else:
            self._add_arguments(python_to_json(self._take(end - 1)))
            if self._buffer.startswith(","):
                self._take(1)

    def _read_elements(self, region: FormatRegion, call: ArgumentElement) -> Waiting[None]:
        """Read the elements in ``call`` tag by tag: of an argument, of an inner value, or of the call. Each tag reports what
        it completes.
        """
        elements = [call]
        while elements:
            top, is_call = elements[-1], len(elements) == 1
            position, literal = self._find(region.value_ends)
            tag = self._match(region.parameter, position) if literal else None
            if tag is not None and tag.partial:
                yield
                continue
            is_end = tag is not None and tag["close"] is not None and tag["name"] == top.name
            is_child = tag is not None and tag["close"] is None and not top.is_text
            if is_call and (self._buffer[:position].strip() or (literal and not (is_end or is_child))):
                self._add_arguments(top.close())  # this text belongs to no argument
                return
            text = self._take(position)
            if not is_call:
                self._add_arguments(top.add_text(text))
            if tag is not None and is_child:
                self._take(tag.end() - position)
                text, child = top.open_child(tag["name"])
                self._add_arguments(text)
                elements.append(child)
            elif tag is not None and is_end:
                self._take(tag.end() - position)
                self._add_arguments(top.close())
                elements.pop()
            elif literal:
                self._add_arguments(top.add_text(self._take(len(literal))))  # the marker is a part of the value
            else:
                if self._last:
                    self._add_arguments(top.pending)
                yield

    def _read_pairs(self, quote: str) -> Waiting[None]:
        """Read a tool call's object whose keys have no quotes and whose texts stand between ``quote``."""
        scanner = JsonScanner()
        while True:
            if self._buffer.startswith(quote):
                self._take(len(quote))
                self._add_arguments('"')
                yield from self._read_string((quote,))
                continue
            may_be_quote = quote.startswith(self._buffer) and not self._last
            token = None if may_be_quote else self._match(_PAIR_TOKEN)
            if token is None or token.partial:
                if self._last:
                    self._add_arguments(self._take(None))
                yield
                continue
            text = self._take(token.end())
            self._add_arguments(f"{json.dumps(token['key'])}:" if token["key"] else text)
            if token["other"] and scanner.advance(text, 0) is not None:
                return

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

    def _match(self, pattern: str | regex.Pattern[str], position: int = 0) -> Any:
        """Return the match of ``pattern`` at ``position`` of the buffer, which is partial if more text may complete it. The
        pattern sees :data:`_MAX_MATCH_CHARACTERS` at most, and doesn't match a longer name.
        """
        end = position + _MAX_MATCH_CHARACTERS
        may_grow = not self._last and len(self._buffer) <= end
        return regex.match(pattern, self._buffer, pos=position, endpos=end, partial=may_grow)

    def _read_match(self, pattern: str | regex.Pattern[str]) -> Waiting[Any]:
        """Take the text that ``pattern`` matches from the buffer, and return the match, or None if there is none."""
        while (match := self._match(pattern)) is not None and match.partial:
            yield
        if match is not None:
            self._take(match.end())
        return match

    def _take(self, count: int | None) -> str:
        """Remove and return the first ``count`` characters of the buffer; None: all of them."""
        text = self._buffer[:count]
        self._buffer = self._buffer[len(text) :]
        return text

    def _emit_text(self, field: str, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
        if not text:
            return
        self._skips_space, is_visible = False, bool(text.strip())
        self._has_text = self._has_text or is_visible
        if field == "content":
            self._drops_space = self._drops_space and not is_visible
            text = self._space + text
            text, self._space = text[: len(text.rstrip())], text[len(text.rstrip()) :]
        if text:
            self._delta[field] = self._delta.get(field, "") + text

    def _open_call(self, name: str, call_id: str | None) -> None:
        self._count += 1
        self._drops_space = True
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
