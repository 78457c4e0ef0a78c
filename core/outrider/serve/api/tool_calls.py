"""Tool calls in the text of a chat's choice: enforced by a guide, or found by a reader of the model's format."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.device import ConfigError
from outrider.engine import Guide, JsonSchema
from outrider.engine.requests.sampling import partial_match_length
from outrider.errors import one_line, shown
from outrider.serve.api.format_reader import FormatReader
from outrider.serve.api.model_formats import ModelFormat
from outrider.serve.api.request_fields import ChatRequest, NamedTool, format_guide
from outrider.serve.api.responses import bad_request

_CONTENT = ModelFormat("none", "none")
_CALL_LIST = ModelFormat("json", "none")
"""The format of text that a guide enforces: all of it is content, or a JSON list of calls."""
_NAMED_SCHEMAS = ("properties", "$defs", "definitions")
"""Keywords of JSON Schema whose values map names to schemas."""
_VALUE_KEYWORDS = ("const", "enum", "default", "examples")
"""Keywords of JSON Schema that hold values, in which ``$ref`` is no reference."""
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Field names of response templates that the API reports as ``reasoning_content``."""


class NamedToolReader:
    """A reader for a named tool: all text is the arguments of one call. A guide has enforced their schema."""

    has_calls = False  # OpenAI's finish reason of a named tool is "stop"

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str, *, last: bool) -> dict[str, Any]:
        """Return ``text`` as arguments. The first delta also has the id and the name of the call."""
        del last
        if self._name is None:
            return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]} if text else {}
        if not text:
            return {}
        name, self._name = self._name, None
        return {"tool_calls": [{"index": 0, **_call(name, text)}]}


class ParsedResponseReader:
    """A reader that uses transformers' response parser. A call that can't be read, with its markers, is content.

    Calls after the first ``max_calls`` are dropped.
    """

    def __init__(
        self, template: Mapping[str, Any], prompt: str, tools: list[dict[str, Any]], *, max_calls: int | None = None
    ) -> None:
        from outrider.serve.api.recovering_parser import RecoveringParser

        self._parser = RecoveringParser(template, prompt, tools)
        self._max_calls = max_calls
        self._count = 0

    @property
    def has_calls(self) -> bool:
        """Return whether the parser has found at least one call."""
        return self._count > 0

    def feed(self, text: str, *, last: bool) -> dict[str, Any]:
        """Return content and reasoning as soon as the parser reports them, and each call when it is complete."""
        events = [*self._parser.feed(text), *(self._parser.finish() if last else ())]
        delta: dict[str, Any] = {}
        for event in events:
            field, kind = event["field"], event["type"]
            name = "reasoning_content" if field in _REASONING_FIELDS else field
            if kind == "region_chunk" and name in ("content", "reasoning_content"):
                delta[name] = delta.get(name, "") + event["text"]
            elif name == "tool_calls" and kind in ("region_close", "region_failed"):
                calls = _calls_of(event["value"])
                if not calls:
                    delta["content"] = delta.get("content", "") + event["raw"]
                for call in calls if self._max_calls is None else calls[: self._max_calls - self._count]:
                    delta.setdefault("tool_calls", []).append({"index": self._count, **call})
                    self._count += 1
        return delta


class ReasoningReader:
    """A reader for text that begins with reasoning: passes the text after the first ``end`` to another reader."""

    def __init__(self, end: str, inner: ToolCallReader) -> None:
        self._end = end
        self._inner = inner
        self._held = ""
        self._has_ended = False
        self._has_content = False

    @property
    def has_calls(self) -> bool:
        """Return whether the reader of the text after the reasoning has found tool calls."""
        return self._inner.has_calls

    def feed(self, text: str, *, last: bool) -> dict[str, Any]:
        """Return text before ``end`` as reasoning, and pass the text after ``end`` to the other reader and
        return its delta.
        """
        delta: dict[str, Any] = {}
        if not self._has_ended:
            reasoning, end, text = (self._held + text).partition(self._end)
            self._has_ended = bool(end)
            held = 0 if last or end else partial_match_length(reasoning, (self._end,))
            reasoning, self._held = reasoning[: len(reasoning) - held], reasoning[len(reasoning) - held :]
            if reasoning:
                delta["reasoning_content"] = reasoning
        if not self._has_content:
            text = text.lstrip()
            self._has_content = bool(text)
        return delta | self._inner.feed(text, last=last)


ToolCallReader = NamedToolReader | FormatReader | ParsedResponseReader | ReasoningReader
"""An incremental parser: turns the text of one choice into deltas of a chat message."""


class RequestToolCalls:
    """The tool calls and the reasoning of one chat request: the guide of the text, and the readers of the text."""

    guide: Guide | None
    """Guide for calls that must come, or for ``response_format``; None if the text is free."""
    guide_field: str
    """The request's field that the guide is made from."""

    def __init__(self, request: ChatRequest, answer_format: Mapping[str, Any] | ModelFormat) -> None:
        """Derive the guide and the readers of a chat request from its fields.

        ``answer_format`` is that of the model: a ``response_template`` of transformers, or a format of its family. Raises
        :class:`~outrider.serve.api.responses.ApiError` for a ``tool_choice`` that contradicts the other fields.
        """
        self._answer_format = answer_format
        self._tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        self._choice = request.tool_choice
        self._max_calls = 1 if request.parallel_tool_calls is False else None
        response_format = format_guide(request)
        if self._choice not in (None, "none") and not self._tools:
            raise bad_request("tool_choice is only allowed when tools are given", "tool_choice")
        schema = self._schema_of_calls()
        self.guide_field = "response_format" if schema is None else "tools"
        try:
            self.guide = response_format if schema is None else JsonSchema(schema)
        except ConfigError as error:
            raise bad_request(f"the tools' parameters can't be enforced: {one_line(str(error))}", "tools") from error
        if schema is None and response_format is not None and self._tools and self._choice != "none":
            self.guide = replace(response_format, unless=_call_starts(answer_format))

    def read_prompt(self, prompt: str) -> None:
        """Let the guide begin after the reasoning, if the prompt opens it.

        ``prompt`` is the text that the chat template made of the conversation.
        """
        if self.guide is not None and (end := _reasoning_end(self._answer_format, prompt)) is not None:
            self.guide = replace(self.guide, after=end)

    def create_reader(self, prompt: str) -> ToolCallReader:
        """Create a reader for one choice. ``prompt`` is the text that was passed to :meth:`read_prompt`."""
        if self.guide is None:
            tools = [] if self._choice == "none" else self._tools
            return _format_reader(self._answer_format, prompt, tools, self._max_calls)
        reader: ToolCallReader
        if isinstance(self._choice, NamedTool):
            reader = NamedToolReader(self._choice.function.name)
        elif self._choice == "required":
            reader = FormatReader(_CALL_LIST, prompt, self._tools, only_calls=True)
        elif self.guide.unless:
            reader = _format_reader(self._answer_format, "", self._tools, self._max_calls, calls_first=True)
        else:
            reader = FormatReader(_CONTENT, prompt, [])
        return ReasoningReader(self.guide.after, reader) if self.guide.after else reader

    def _schema_of_calls(self) -> dict[str, Any] | None:
        """Return the JSON schema of a text that is the required calls, or None if no call is required."""
        if isinstance(self._choice, NamedTool):
            name = self._choice.function.name
            function = next((tool["function"] for tool in self._tools if tool["function"]["name"] == name), None)
            if function is None:
                raise bad_request(f"tool_choice names {name!r}, which isn't among the tools", "tool_choice")
            return _parameters(function)
        if self._choice != "required":
            return None
        limit = {} if self._max_calls is None else {"maxItems": self._max_calls}
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": {"$ref": f"#/$defs/tool{index}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for index, tool in enumerate(self._tools)
        ]
        parameters = [_parameters(tool["function"]) for tool in self._tools]
        definitions = {f"tool{index}": _moved(each, index) for index, each in enumerate(parameters)}
        return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}, "$defs": definitions}


def _format_reader(
    answer_format: Mapping[str, Any] | ModelFormat,
    prompt: str,
    tools: list[dict[str, Any]],
    max_calls: int | None,
    *,
    calls_first: bool = False,
) -> ToolCallReader:
    """Return a reader of the model's format. Without ``tools`` all calls are content."""
    if isinstance(answer_format, ModelFormat):
        return FormatReader(answer_format, prompt, tools, max_calls=max_calls, calls_first=calls_first)
    fields = {name: field for name, field in answer_format["fields"].items() if tools or name != "tool_calls"}
    return ParsedResponseReader({**answer_format, "fields": fields}, prompt, tools, max_calls=max_calls)


def _call_starts(answer_format: Mapping[str, Any] | ModelFormat) -> tuple[str, ...]:
    """Return the texts that begin tool calls and nothing else. Texts that may begin JSON or another region aren't among
    them.
    """
    if isinstance(answer_format, ModelFormat):
        regions = answer_format.regions
        others = {start for region in regions if region.kind != "call" for start in region.starts}
        starts = [start for region in regions if region.kind == "call" for start in region.starts if start not in others]
    else:
        starts = [answer_format["fields"].get("tool_calls", {}).get("open")]
    return tuple(each for each in starts if isinstance(each, str) and each == each.strip() and each not in ("[", "{", ""))


def _reasoning_end(answer_format: Mapping[str, Any] | ModelFormat, prompt: str) -> str | None:
    """Return the text that ends the reasoning in which ``prompt`` ends, or None if it doesn't end in reasoning."""
    if isinstance(answer_format, ModelFormat):
        region = answer_format.open_reasoning(prompt)
        return None if region is None else region.ends[0]
    from outrider.serve.api.recovering_parser import RecoveringParser

    events = RecoveringParser(answer_format, prompt, []).initial_events
    opened = [event for event in events if event["type"] != "region_chunk"][-1:]
    if not opened or opened[0]["type"] != "region_open" or opened[0]["field"] not in _REASONING_FIELDS:
        return None
    close = answer_format["fields"][opened[0]["field"]].get("close")
    return close if isinstance(close, str) or close is None else str(close[0])


def _calls_of(value: Any) -> list[dict[str, Any]]:
    """Return the tool calls in ``value``, which a parser has read; an empty list if one of them can't be read."""
    try:
        functions = [call["function"] for call in (value if isinstance(value, list) else [value])]
        named = [(str(function["name"]), function["arguments"]) for function in functions]
        return [_call(name, each if isinstance(each, str) else json.dumps(each)) for name, each in named]
    except (KeyError, TypeError, ValueError):
        return []


def _moved(schema: Any, index: int) -> Any:
    """Return the schema of a tool's parameters, rewritten for entry ``index`` of ``$defs``: its references still point into
    the tool's own schema.
    """
    if isinstance(schema, list):
        return [_moved(each, index) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = f"#/$defs/tool{index}{value[1:]}"
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            moved[key] = {name: _moved(each, index) for name, each in value.items()}
        else:
            moved[key] = value if key in _VALUE_KEYWORDS else _moved(value, index)
    return moved


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the arguments of a call, which are a JSON object."""
    schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    declared = schema.get("type", "object")
    if "object" not in (declared if isinstance(declared, list | tuple) else [declared]):
        text = f"the parameters of the tool {function['name']!r} have the type {shown(declared)}; expected 'object'"
        raise bad_request(text, "tools")
    return {**schema, "type": "object"}


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
