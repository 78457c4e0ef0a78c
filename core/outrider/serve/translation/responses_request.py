"""Requests of OpenAI's Responses API: their fields, and the chat requests that they become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pydantic import Field

from outrider.serve.api.api_errors import bad_request
from outrider.serve.api.request_fields import ChatRequest, NestedObject
from outrider.serve.translation.conversation import (
    Conversation,
    ConversationBuilder,
    ObjectList,
    TranslatedRequest,
    chat_request,
    compact_json,
    expect,
    expect_objects,
    function_tool,
    image_part,
    text_part,
    thinking_variables,
)

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of the function that stands for a custom tool, whose input is free text."""


class ResponsesRequest(TranslatedRequest):
    """The body of ``POST /v1/responses``."""

    refused = MappingProxyType(
        {
            "background": "the answer is written while the client is connected",
            "conversation": "use previous_response_id, or send the conversation as input",
            "prompt": "this server has no stored prompts; send instructions and input",
            "context_management": "the server drops no part of a conversation",
            "image": "the model answers in text alone",
            "moderation": "the server moderates nothing",
            "top_logprobs": "use /v1/chat/completions for log-probabilities",
        }
    )
    ignored = frozenset(
        (
            *("access_programs", "background_options", "client_metadata", "include", "max_tool_calls", "prompt_cache_key"),
            *("prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "stream_options"),
            "user",
        )
    )

    input: str | Conversation = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="False: no later request can name this response.")
    stream: bool | None = False
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: ObjectList | None = None
    tool_choice: str | NestedObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning: NestedObject | None = None
    text: NestedObject | None = None
    metadata: NestedObject | None = None
    truncation: str | None = None
    seed: int | None = Field(None, description="A field of this server.")


@dataclass
class ResponsesTools:
    """The tools that the model is offered.

    Tools that OpenAI's own servers run, such as ``web_search``, are left out: the model doesn't see them.
    """

    offered: list[dict[str, Any]] = field(default_factory=list)
    """The tools as the client sent them."""
    functions: list[dict[str, Any]] = field(default_factory=list)
    """Tools of the chat request."""
    custom: set[str] = field(default_factory=set)
    """Names of custom tools."""
    namespaces: dict[str, str] = field(default_factory=dict)
    """Namespace of each function that has one, by name."""

    def add(self, field_name: str, tool: dict[str, Any]) -> None:
        """Add one tool of the request. Raises :class:`ApiError` for a tool without a name."""
        kind = tool.get("type")
        if kind == "namespace":
            self.offered.append(tool)
            for name, each in expect_objects(tool.get("tools"), f"{field_name}.tools"):
                self._add_function(name, each)
                self.namespaces[str(each["name"])] = str(tool.get("name"))
        elif kind in ("function", "custom"):
            self.offered.append(tool)
            self._add_function(field_name, tool)

    def _add_function(self, field_name: str, tool: dict[str, Any]) -> None:
        name, description = expect(tool.get("name"), str, f"{field_name}.name"), tool.get("description")
        if tool.get("type") != "custom":
            self.functions.append(function_tool(name, description, tool.get("parameters")))
            return
        self.custom.add(name)
        grammar = (tool.get("format") or {}).get("definition")
        if grammar:
            description = f"{description or ''}\n\nThe input follows this grammar:\n{grammar}".strip()
        self.functions.append(function_tool(name, description, _CUSTOM_PARAMETERS))


def translate_responses_request(
    request: ResponsesRequest, earlier: Sequence[dict[str, Any]]
) -> tuple[ChatRequest, ResponsesTools, list[dict[str, Any]]]:
    """Return the chat request for ``request``, its tools, and all items of the conversation.

    ``earlier`` has the items of the response that ``previous_response_id`` names. Raises :class:`ApiError`.
    """
    if request.truncation not in (None, "disabled"):
        raise bad_request("truncation isn't served: the server drops no part of a conversation", "truncation")
    tools = ResponsesTools()
    for name, tool in expect_objects(request.tools or [], "tools"):
        tools.add(name, tool)
    added = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    conversation = ConversationBuilder()
    if request.instructions:
        conversation.add_message("system", request.instructions)
    for name, item in (*expect_objects([*earlier], "previous_response_id"), *expect_objects(added, "input")):
        _add_item(conversation, name, item)
    effort = (request.reasoning or {}).get("effort")
    variables = {**({} if effort != "none" else thinking_variables(False)), **(request.chat_template_kwargs or {})}
    text = request.text or {}
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": conversation.messages,
        "stream": bool(request.stream),
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": effort,
        "response_format": _response_format(text.get("format")),
        "chat_template_kwargs": variables or None,
    }
    fields |= _tool_fields(request.tool_choice, tools.functions)
    return chat_request(fields), tools, [*earlier, *added]


def _tool_fields(choice: str | dict[str, Any] | None, functions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields ``tools`` and ``tool_choice`` of the chat request."""
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "allowed_tools":
            names = {tool.get("name") for _, tool in expect_objects(choice.get("tools"), "tool_choice.tools")}
            functions = [each for each in functions if each["function"]["name"] in names]
            choice = choice.get("mode", "auto")
        elif kind in ("function", "custom"):
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        else:
            raise bad_request(f"tool_choice names a tool of the type {kind!r}, which this server doesn't run", "tool_choice")
    if not functions and choice == "auto":
        choice = None
    return {"tools": functions or None, "tool_choice": choice}


def _response_format(text_format: Any) -> dict[str, Any] | None:
    if text_format is None:
        return None
    named = expect(text_format, dict, "text.format")
    if named.get("type") != "json_schema":
        return {"type": named.get("type")}
    return {"type": "json_schema", "json_schema": {"name": named.get("name"), "schema": named.get("schema")}}


def _add_item(conversation: ConversationBuilder, name: str, item: dict[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind not in _ITEM_ADDERS:
        raise bad_request(f"{name} is of the type {kind!r}, which this server doesn't read", f"{name}.type")
    _ITEM_ADDERS[kind](conversation, name, item)


def _add_message(conversation: ConversationBuilder, name: str, item: dict[str, Any]) -> None:
    role = expect(item.get("role"), str, f"{name}.role")
    content = _content(f"{name}.content", item.get("content"))
    if role == "assistant":
        conversation.add_answer(_text(content))
    else:
        conversation.add_message(role, content)


def _add_reasoning(conversation: ConversationBuilder, name: str, item: dict[str, Any]) -> None:
    texts = [_text(_content(f"{name}.{part}", item.get(part) or [])) for part in ("content", "summary")]
    if reasoning := next(filter(None, texts), ""):
        conversation.add_reasoning(reasoning)


def _add_call(conversation: ConversationBuilder, name: str, item: dict[str, Any]) -> None:
    call_id, called = (expect(item.get(key), str, f"{name}.{key}") for key in ("call_id", "name"))
    if item["type"] == "custom_tool_call":
        arguments = compact_json({"input": expect(item.get("input"), str, f"{name}.input")})
    else:
        arguments = expect(item.get("arguments"), str, f"{name}.arguments")
    conversation.add_call(call_id, called, arguments)


def _add_result(conversation: ConversationBuilder, name: str, item: dict[str, Any]) -> None:
    call_id = expect(item.get("call_id"), str, f"{name}.call_id")
    conversation.add_result(call_id, _content(f"{name}.output", item.get("output")))


_ITEM_ADDERS: Mapping[str, Callable[[ConversationBuilder, str, dict[str, Any]], None]] = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "custom_tool_call": _add_call,
    "function_call_output": _add_result,
    "custom_tool_call_output": _add_result,
}
"""Function that adds an item to the conversation, by the item's type."""


def _content(name: str, content: Any) -> str | list[dict[str, Any]]:
    """Return the content of an item as content of a chat message."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part_name, part in expect_objects(content, name):
        kind = part.get("type")
        if kind in _TEXT_PARTS:
            parts.append(text_part(expect(part.get("text"), str, f"{part_name}.text")))
        elif kind == "refusal":
            parts.append(text_part(expect(part.get("refusal"), str, f"{part_name}.refusal")))
        elif kind == "input_image":
            parts.append(image_part(expect(part.get("image_url"), str, f"{part_name}.image_url")))
        else:
            raise bad_request(f"{part_name} is of the type {kind!r}, which this server doesn't read", f"{part_name}.type")
    return parts


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
