"""Tool calls in the text of a chat's choice: enforced by a guide, or found by a reader of the model's format."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from outrider.device import ConfigError
from outrider.engine import JsonSchema
from outrider.errors import one_line
from outrider.serve.api_errors import bad_request
from outrider.serve.formats.format_reader import FormatReader
from outrider.serve.formats.model_formats import ModelFormat
from outrider.serve.request_fields import ChatRequest, NamedTool

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Field names of response templates that the API reports as ``reasoning_content``."""


class ToolCallReader(Protocol):
    """An incremental parser: turns the text of one choice into deltas of a chat message."""

    def feed(self, text: str, *, last: bool) -> dict[str, Any]:
        """Return the message delta that ``text`` completes, possibly empty. ``last`` says that no more text follows."""

    @property
    def has_calls(self) -> bool:
        """Return whether the finish reason is ``tool_calls``."""


class ContentReader:
    """A reader that reports all text as message content."""

    has_calls = False

    def feed(self, text: str, *, last: bool) -> dict[str, Any]:
        """Return ``text`` as content."""
        del last
        return {"content": text} if text else {}


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


class CallListReader:
    """A reader for a JSON list of calls, whose schema a guide has enforced. It reports all calls at the end of the text."""

    def __init__(self) -> None:
        self._text = ""
        self.has_calls = False

    def feed(self, text: str, *, last: bool) -> dict[str, Any]:
        """Return nothing until the last text, then every call. A list that ``max_tokens`` truncated is content."""
        self._text += text
        if not last:
            return {}
        try:
            listed = json.loads(self._text)
            calls = [_call(call["name"], json.dumps(call["arguments"])) for call in listed]
        except (ValueError, KeyError, TypeError):  # max_tokens truncated the list
            return {"content": self._text}
        self.has_calls = bool(calls)
        return {"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}


class ParsedResponseReader:
    """A reader that uses transformers' response parser. After a parser error, all further text is content."""

    def __init__(self, template: Mapping[str, Any], prompt: str, tools: list[dict[str, Any]]) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._parser: Any = ResponseParser(dict(template), prefix=prompt, tools=[*tools])
        self._unreported = ""
        self._count = 0

    @property
    def has_calls(self) -> bool:
        """Return whether the parser has found at least one call."""
        return self._count > 0

    def feed(self, text: str, *, last: bool) -> dict[str, Any]:
        """Return content and reasoning as soon as the parser reports them, and each call when it is complete."""
        if self._parser is None:
            return {"content": text} if text else {}
        self._unreported += text
        try:
            events = self._parser.feed(text)
            if last:
                events = [*events, *self._parser.finalize()[1]]
            return self._delta_of(events)
        except Exception:  # the model may write text that doesn't match its template
            self._parser = None
            return {"content": self._unreported} if self._unreported else {}

    def _delta_of(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        for event in events:
            field, kind = event["field"], event["type"]
            name = "reasoning_content" if field in _REASONING_FIELDS else field
            if kind == "region_chunk" and name in ("content", "reasoning_content"):
                delta[name] = delta.get(name, "") + event["text"]
                self._unreported = ""
            elif kind == "region_close" and name == "tool_calls":
                value = event["value"]
                for call in value if isinstance(value, list) else [value]:
                    delta.setdefault("tool_calls", []).append(self._numbered_call(call))
                self._unreported = ""
        return delta

    def _numbered_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        index = self._count
        self._count += 1
        return {"index": index, **_call(str(function["name"]), text)}


class RequestToolCalls:
    """The tool calls of one chat request: the guide that enforces them, and the readers that find them in the text."""

    guide: JsonSchema | None
    """Schema that the text of each choice must follow; None if the text is free."""
    special_tokens: bool
    """Whether the readers need the spelling of special tokens in the text."""

    def __init__(self, request: ChatRequest, answer_format: Mapping[str, Any] | ModelFormat) -> None:
        """``answer_format`` is the model's: a ``response_template`` of transformers, or a format of its family.

        Raises :class:`~outrider.serve.api_errors.ApiError` for a ``tool_choice`` that contradicts the other fields.
        """
        self.guide = None
        self.special_tokens = False
        self._make_reader: Callable[[str], ToolCallReader] = lambda prompt: ContentReader()
        self._tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        choice, response_format = request.tool_choice, request.response_format
        if choice not in (None, "none") and not self._tools:
            raise bad_request("tool_choice is only allowed when tools are given", "tool_choice")
        if isinstance(choice, NamedTool):
            self._require_tool(choice.function.name)
        elif choice == "required":
            limit = {"maxItems": 1} if request.parallel_tool_calls is False else {}
            calls = {"type": "array", "minItems": 1, **limit, "items": {"anyOf": [*map(_call_schema, self._tools)]}}
            self.guide = self._make_guide(calls)
            self._make_reader = lambda prompt: CallListReader()
        elif isinstance(answer_format, ModelFormat):
            tools = [] if choice == "none" else self._tools
            limit_calls = 1 if request.parallel_tool_calls is False else None
            self.special_tokens = bool(answer_format.regions)
            self._make_reader = lambda prompt: FormatReader(answer_format, prompt, tools, max_calls=limit_calls)
        elif choice != "none":
            self.special_tokens = True
            self._make_reader = lambda prompt: ParsedResponseReader(answer_format, prompt, self._tools)
        if self.guide is not None and response_format is not None and response_format.get("type") != "text":
            raise bad_request("response_format doesn't go with a tool_choice that asks for a call", "response_format")

    def create_reader(self, prompt: str) -> ToolCallReader:
        """Create a reader for one choice. ``prompt`` is the text that the chat template made of the conversation."""
        return self._make_reader(prompt)

    def _require_tool(self, name: str) -> None:
        function = next((tool["function"] for tool in self._tools if tool["function"]["name"] == name), None)
        if function is None:
            raise bad_request(f"tool_choice names {name!r}, which isn't among the tools", "tool_choice")
        self.guide = self._make_guide(_parameters(function))
        self._make_reader = lambda prompt: NamedToolReader(name)

    @staticmethod
    def _make_guide(schema: dict[str, Any]) -> JsonSchema:
        try:
            return JsonSchema(schema)
        except ConfigError as error:
            raise bad_request(f"the tools' parameters can't be enforced: {one_line(str(error))}", "tools") from error


def _call_schema(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": _parameters(function)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
