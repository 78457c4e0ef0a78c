"""Calls of tools in what a model writes: asked for by a guide, or found by transformers' parser of responses."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from outrider.device import ConfigError
from outrider.engine import JsonSchema
from outrider.errors import one_line
from outrider.serve.errors import bad_request
from outrider.serve.fields import ChatRequest, NamedTool

_CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
_THINKING = {"open": "<think>", "close": "</think>", "repeats": False}
FORMATS: Mapping[str, Mapping[str, Any]] = {
    "hermes": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": _THINKING,
            "content": {},
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": _CALL,
            },
        },
    },
    "mistral": {
        "start_anchor": "[/INST]",
        "fields": {
            "content": {},
            "tool_calls": {
                "open": "[TOOL_CALLS]",
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
                "transform_each": True,
            },
        },
    },
    "llama3-json": {
        "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "fields": {
            "content": {},
            "tool_calls": {
                "open_pattern": r"(?:<\|python_tag\|>)?(?=\{\s*\"(?:type|name)\")",
                "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
                },
            },
        },
    },
}
"""Ways in which families of models write calls, as transformers' ``response_template``: Hermes and Qwen; Mistral; Llama 3."""
_REASONING = ("reasoning_content", "reasoning", "thinking")


class Reader(Protocol):
    """Turns the text of one choice into deltas of a message, as it comes."""

    def feed(self, text: str, *, last: bool) -> dict[str, Any]:
        """What is new; ``last``: no more text follows."""

    @property
    def called(self) -> bool:
        """Whether a tool was called."""


class PlainReader:
    """Text is content."""

    called = False

    def feed(self, text: str, *, last: bool) -> dict[str, Any]:
        """See :class:`Reader`."""
        del last
        return {"content": text} if text else {}


class NamedReader:
    """The text is the arguments of one call, which a guide made sure of."""

    called = False  # OpenAI's finish reason is then stop

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str, *, last: bool) -> dict[str, Any]:
        """See :class:`Reader`."""
        del last
        if self._name is None:
            return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]} if text else {}
        if not text:
            return {}
        name, self._name = self._name, None
        return {"tool_calls": [{"index": 0, **_call(name, text)}]}


class ListReader:
    """The text is a list of calls, which a guide made sure of; they come when it's whole."""

    def __init__(self) -> None:
        self._text = ""
        self.called = False

    def feed(self, text: str, *, last: bool) -> dict[str, Any]:
        """See :class:`Reader`."""
        self._text += text
        if not last:
            return {}
        try:
            calls = json.loads(self._text)
            made = [_call(call["name"], json.dumps(call["arguments"])) for call in calls]
        except (ValueError, KeyError, TypeError):  # cut off by max_tokens
            return {"content": self._text}
        self.called = bool(made)
        return {"tool_calls": [{"index": index, **call} for index, call in enumerate(made)]}


class ParsedReader:
    """The text is read by transformers' parser. Where it can't be, it's content as it stands, from there on."""

    def __init__(self, template: Mapping[str, Any], prompt: str, tools: list[dict[str, Any]]) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._parser: Any = ResponseParser(dict(template), prefix=prompt, tools=[*tools])
        self._held = ""
        self._count = 0

    @property
    def called(self) -> bool:
        """See :class:`Reader`."""
        return self._count > 0

    def feed(self, text: str, *, last: bool) -> dict[str, Any]:
        """See :class:`Reader`."""
        if self._parser is None:
            return {"content": text} if text else {}
        self._held += text
        try:
            events = self._parser.feed(text)
            if last:
                events = [*events, *self._parser.finalize()[1]]
            return self._read(events)
        except Exception:  # what a model writes needn't be what its template says
            self._parser = None
            return {"content": self._held} if self._held else {}

    def _read(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        for event in events:
            field, kind = event["field"], event["type"]
            name = "reasoning_content" if field in _REASONING else field
            if kind == "region_chunk" and name in ("content", "reasoning_content"):
                delta[name] = delta.get(name, "") + event["text"]
                self._held = ""
            elif kind == "region_close" and name == "tool_calls":
                value = event["value"]
                for call in value if isinstance(value, list) else [value]:
                    delta.setdefault("tool_calls", []).append(self._called(call))
                self._held = ""
        return delta

    def _called(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        made = {"index": self._count, **_call(str(function["name"]), text)}
        self._count += 1
        return made


class Calls:
    """How calls of one request are asked for, and read. ``guide``: what the text must be, or None. ``special_tokens``:
    whether readers need their spelling.
    """

    def __init__(self, asked: ChatRequest, template: Mapping[str, Any] | None) -> None:
        """Raises :class:`~outrider.serve.errors.ApiError` for a choice of tools that can't be."""
        self.guide: JsonSchema | None = None
        self.special_tokens = False
        self._make: Callable[[str], Reader] = lambda prompt: PlainReader()
        self._tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
        choice = asked.tool_choice
        if choice not in (None, "none") and not self._tools:
            raise bad_request("tool_choice is only allowed when tools are given", "tool_choice")
        if isinstance(choice, NamedTool):
            self._named(choice.function.name)
        elif choice == "required":
            most = {"maxItems": 1} if asked.parallel_tool_calls is False else {}
            calls = {"type": "array", "minItems": 1, **most, "items": {"anyOf": [*map(_one, self._tools)]}}
            self.guide = self._guide(calls)
            self._make = lambda prompt: ListReader()
        elif template is not None and choice != "none":
            self.special_tokens = True
            self._make = lambda prompt: ParsedReader(template, prompt, self._tools)
        if self.guide is not None and asked.response_format is not None and asked.response_format.get("type") != "text":
            raise bad_request("response_format doesn't go with a tool_choice that asks for a call", "response_format")

    def reader(self, prompt: str) -> Reader:
        """A reader for one choice, behind a prompt as the template wrote it."""
        return self._make(prompt)

    def _named(self, name: str) -> None:
        found = next((tool["function"] for tool in self._tools if tool["function"]["name"] == name), None)
        if found is None:
            raise bad_request(f"tool_choice names {name!r}, which isn't among the tools", "tool_choice")
        self.guide = self._guide(_parameters(found))
        self._make = lambda prompt: NamedReader(name)

    @staticmethod
    def _guide(schema: dict[str, Any]) -> JsonSchema:
        try:
            return JsonSchema(schema)
        except ConfigError as error:
            raise bad_request(f"the tools' parameters can't be enforced: {one_line(str(error))}", "tools") from error


def _one(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call of this tool."""
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
