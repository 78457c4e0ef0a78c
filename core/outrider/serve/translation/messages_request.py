"""Requests of Anthropic's Messages API: their fields, and the chat requests that they become."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from outrider.serve.api.api_errors import bad_request
from outrider.serve.api.request_fields import ChatRequest, ListOf, NestedObject
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


class CountTokensRequest(TranslatedRequest):
    """The body of ``POST /v1/messages/count_tokens``."""

    refused = MappingProxyType(
        {
            "container": "this server runs no code",
            "mcp_servers": "connect to them in the client, and send their tools",
            "fallbacks": "this server has one model",
            "thread": "send the whole conversation as messages",
            "compaction": "the server drops no part of a conversation",
        }
    )
    ignored = frozenset(
        (
            *("betas", "billing_policy", "cache_control", "context_management", "diagnostics", "fallback_credit_token"),
            *("inference_geo", "metadata", "service_tier", "speed", "user_profile_id", "workspace_id"),
        )
    )

    messages: Annotated[Conversation, Field(min_length=1)]
    system: str | ObjectList | None = None
    thinking: NestedObject | None = None
    tools: ObjectList | None = None
    tool_choice: NestedObject | None = None
    output_config: NestedObject | None = None


class MessagesRequest(CountTokensRequest):
    """The body of ``POST /v1/messages``."""

    max_tokens: int
    stream: bool | None = False
    stop_sequences: ListOf[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = Field(None, description="A field of this server.")


def translate_messages_request(request: CountTokensRequest) -> ChatRequest:
    """Return the chat request for ``request``. Raises :class:`ApiError`.

    Tools that Anthropic's own servers run, such as ``web_search``, are left out: the model doesn't see them.
    """
    conversation = ConversationBuilder()
    if request.system:
        conversation.add_message("system", _content("system", request.system))
    for name, message in expect_objects(request.messages, "messages"):
        _add_message(conversation, name, message)
    fields: dict[str, Any] = {"model": request.model, "messages": conversation.messages}
    output = request.output_config or {}
    fields["reasoning_effort"] = output.get("effort")
    if output.get("format") is not None:
        schema = expect(output["format"], dict, "output_config.format").get("schema")
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    variables: dict[str, Any] = {}
    if request.thinking is not None:
        variables = dict(thinking_variables(request.thinking.get("type") != "disabled"))
    if conversation.messages[-1]["role"] == "assistant" and "tool_calls" not in conversation.messages[-1]:
        variables |= {"continue_final_message": True, "add_generation_prompt": False}
    fields["chat_template_kwargs"] = variables | (request.chat_template_kwargs or {}) or None
    fields |= _tool_fields(request)
    if isinstance(request, MessagesRequest):
        fields |= {name: getattr(request, name) for name in ("temperature", "top_k", "top_p", "seed")}
        fields |= {"stream": bool(request.stream), "max_tokens": request.max_tokens, "stop": request.stop_sequences}
    return chat_request(fields)


def _tool_fields(request: CountTokensRequest) -> dict[str, Any]:
    tools = [
        function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))
        for _, tool in expect_objects(request.tools or [], "tools")
        if "input_schema" in tool
    ]
    choice = request.tool_choice or {}
    kind = choice.get("type", "auto")
    chosen: Any = {"auto": "auto", "any": "required", "none": "none"}.get(kind)
    if kind == "tool":
        chosen = {"type": "function", "function": {"name": choice.get("name")}}
    elif chosen is None:
        raise bad_request(f"tool_choice has the type {kind!r}; expected auto, any, tool or none", "tool_choice.type")
    parallel = False if choice.get("disable_parallel_tool_use") else None
    has_no_choice = chosen == "auto" and not tools
    return {"tools": tools or None, "tool_choice": None if has_no_choice else chosen, "parallel_tool_calls": parallel}


def _add_message(conversation: ConversationBuilder, name: str, message: dict[str, Any]) -> None:
    role, content = expect(message.get("role"), str, f"{name}.role"), message.get("content")
    if isinstance(content, str):
        content = [text_part(content)]
    parts: list[dict[str, Any]] = []
    for block_name, block in expect_objects(content, f"{name}.content"):
        kind = block.get("type")
        if role == "assistant":
            _add_assistant_block(conversation, block_name, block)
        elif kind == "tool_result":
            call_id = expect(block.get("tool_use_id"), str, f"{block_name}.tool_use_id")
            result = _content(f"{block_name}.content", block.get("content") or "")
            if block.get("is_error"):
                result = [text_part("Error:"), *([text_part(result)] if isinstance(result, str) else result)]
            conversation.add_result(call_id, result)
        else:
            parts.append(_part(block_name, block))
    if parts:
        conversation.add_message(role, parts)


def _add_assistant_block(conversation: ConversationBuilder, name: str, block: dict[str, Any]) -> None:
    kind = block.get("type")
    if kind == "text":
        conversation.add_answer(expect(block.get("text"), str, f"{name}.text"))
    elif kind == "thinking":
        conversation.add_reasoning(expect(block.get("thinking"), str, f"{name}.thinking"))
    elif kind == "tool_use":
        call_id, called = (expect(block.get(key), str, f"{name}.{key}") for key in ("id", "name"))
        conversation.add_call(call_id, called, compact_json(expect(block.get("input"), dict, f"{name}.input")))
    elif kind != "redacted_thinking":  # encrypted by another server
        raise bad_request(f"{name} is of the type {kind!r}, which this server doesn't read", f"{name}.type")


def _content(name: str, content: Any) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_part(part_name, part) for part_name, part in expect_objects(content, name)]


def _part(name: str, block: dict[str, Any]) -> dict[str, Any]:
    """Return a block of text, an image or a document in plain text as a part of a chat message."""
    kind = block.get("type")
    if kind == "text":
        return text_part(expect(block.get("text"), str, f"{name}.text"))
    source = block.get("source")
    if isinstance(source, dict) and kind == "image":
        if source.get("type") == "base64":
            return image_part(f"data:{source.get('media_type')};base64,{source.get('data')}")
        return image_part(expect(source.get("url"), str, f"{name}.source.url"))
    if isinstance(source, dict) and kind == "document" and source.get("type") == "text":
        return text_part(expect(source.get("data"), str, f"{name}.source.data"))
    raise bad_request(f"{name} is of the type {kind!r}, or has a source, that this server doesn't read", f"{name}.type")
