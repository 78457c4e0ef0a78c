"""Anthropic's Messages API: its routes, its requests as chat requests, and its responses as one message or a stream."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from outrider.errors import shown
from outrider.model.media.chat_template import read_object
from outrider.serve.api.conversation import (
    BlockStep,
    Conversation,
    ConversationBuilder,
    ObjectList,
    OutputBlock,
    TranslatedRequest,
    TranslatedWriter,
    chat_request,
    compact_json,
    expect,
    expect_objects,
    function_tool,
    image_part,
    text_part,
)
from outrider.serve.api.request_fields import ChatRequest, ListOf, NestedObject, thinking_variables
from outrider.serve.api.responses import (
    MESSAGES_PATH,
    ApiError,
    bad_request,
    json_response,
    messages_error,
)
from outrider.serve.api.service import ChoiceDelta, Generation, Service


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
    refusal_codes = MappingProxyType({"thread": "thread_unsupported_request"})
    nested = MappingProxyType(
        {
            "output_config": ("effort", "format", "task_budget"),
            "output_config.format": ("type", "schema"),
            "thinking": ("type", "budget_tokens", "display", "block_binding"),
            "tool_choice": ("type", "name", "disable_parallel_tool_use"),
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
        form = expect(output["format"], dict, "output_config.format")
        _check_type(form, "output_config.format", ("json_schema",))
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema")}}
    variables: dict[str, Any] = {}
    if request.thinking is not None:
        _check_type(request.thinking, "thinking", ("enabled", "disabled", "adaptive", "between_tools"))
        variables = dict(thinking_variables(request.thinking.get("type") != "disabled"))
    last = conversation.messages[-1] if conversation.messages else {}
    if last.get("role") == "assistant" and "tool_calls" not in last:
        variables |= {"continue_final_message": True, "add_generation_prompt": False}
    fields["chat_template_kwargs"] = variables | (request.chat_template_kwargs or {}) or None
    fields |= _tool_fields(request)
    if isinstance(request, MessagesRequest):
        fields |= {name: getattr(request, name) for name in ("temperature", "top_k", "top_p", "seed")}
        fields |= {"stream": bool(request.stream), "max_tokens": request.max_tokens, "stop": request.stop_sequences}
    return chat_request(fields)


def _tool_fields(request: CountTokensRequest) -> dict[str, Any]:
    tools = []
    for name, tool in expect_objects(request.tools or [], "tools"):
        if "input_schema" in tool:
            schema = expect(tool["input_schema"], dict, f"{name}.input_schema")
            tools.append(function_tool(expect(tool.get("name"), str, f"{name}.name"), tool.get("description"), schema))
    choice = {"type": "auto", **(request.tool_choice or {})}
    kind = _check_type(choice, "tool_choice", ("auto", "any", "tool", "none"))
    chosen: Any = "required" if kind == "any" else kind
    if kind == "tool":
        chosen = {"type": "function", "function": {"name": choice.get("name")}}
    parallel = False if choice.get("disable_parallel_tool_use") else None
    has_no_choice = chosen == "auto" and not tools
    return {"tools": tools or None, "tool_choice": None if has_no_choice else chosen, "parallel_tool_calls": parallel}


def _check_type(fields: Mapping[str, Any], name: str, known: tuple[str, ...]) -> str:
    """Return the field ``type`` of ``fields``. Raises :class:`ApiError` for one that isn't ``known``."""
    kind = expect(fields.get("type"), str, f"{name}.type")
    if kind not in known:
        raise bad_request(
            f"{name} has the type {shown(kind)}; expected {' or '.join(known)}", f"{name}.type", "invalid_value"
        )
    return kind


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
                result = [text_part("Error:"), *result]
            conversation.add_result(call_id, result)
        else:
            parts += _parts(block_name, block)
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


def _content(name: str, content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [text_part(content)]
    return [part for part_name, block in expect_objects(content, name) for part in _parts(part_name, block)]


def _parts(name: str, block: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a content block of the user as parts of a chat message. Errors name ``name``."""
    kind, source = block.get("type"), block.get("source")
    texts = {"text": ("text",), "tool_reference": ("tool_name",), "search_result": ("title", "source")}.get(str(kind), ())
    parts = [text_part(expect(block.get(key), str, f"{name}.{key}")) for key in texts]
    if kind == "search_result":
        return parts + _content(f"{name}.content", block.get("content"))
    if parts:
        return parts
    if isinstance(source, dict) and kind == "image":
        if source.get("type") == "base64":
            return [image_part(f"data:{source.get('media_type')};base64,{source.get('data')}")]
        return [image_part(expect(source.get("url"), str, f"{name}.source.url"))]
    if isinstance(source, dict) and kind == "document" and (key := _DOCUMENT_KEYS.get(str(source.get("type")))):
        headings = [expect(block[key], str, f"{name}.{key}") for key in ("title", "context") if block.get(key) is not None]
        return [*map(text_part, headings), *_content(f"{name}.source.{key}", source.get(key))]
    raise bad_request(
        f"{name} is of the type {kind!r}, or has a source, that this server doesn't read; send its text", f"{name}.type"
    )


_DOCUMENT_KEYS = {"text": "data", "content": "content"}
"""For each source of a document that has text, the key of the text or of its content blocks."""
_DELTA_KEYS = {"reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
"""For each kind of block, the ``type`` of its deltas and the key of the text in them; a call has ``input_json_delta``."""


class MessagesWriter(TranslatedWriter):
    """The answer to one request of the Messages API, as one message or as server-sent events."""

    def __init__(self, request: MessagesRequest, generation: Generation) -> None:
        super().__init__(generation)
        self._max_tokens = request.max_tokens
        self.message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }

    def _answer(self) -> dict[str, Any]:
        return {**self.message, "content": [_content_block(block) for block in self._splitter.blocks]}

    def _error_event(self, error: ApiError) -> dict[str, Any]:
        return messages_error(error)

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        last: ChoiceDelta | None = None
        async for message, delta in self._message_deltas():
            if last is None:  # the first tokens are here, so the number of cached tokens is known
                self.message["usage"] = self._usage()
                yield {"type": "message_start", "message": dict(self.message)}
            last = delta
            for step in self._splitter.feed(message):
                for event in _step_events(step):
                    yield event
        for step in self._splitter.finish():
            for event in _step_events(step):
                yield event
        assert last is not None
        ended = self._stop_fields(last)
        self.message |= {**ended, "usage": self._usage()}
        yield {"type": "message_delta", "delta": ended, "usage": self._usage()}
        yield {"type": "message_stop"}

    def _stop_fields(self, last: ChoiceDelta) -> dict[str, Any]:
        if last.finish_reason == "length":
            reached = self._generation.usage["completion_tokens"] >= self._max_tokens
            return {"stop_reason": "max_tokens" if reached else "model_context_window_exceeded", "stop_sequence": None}
        if self._splitter.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        is_sequence = isinstance(last.stopped_by, str)
        return {
            "stop_reason": "stop_sequence" if is_sequence else "end_turn",
            "stop_sequence": last.stopped_by if is_sequence else None,
        }

    def _usage(self) -> dict[str, Any]:
        """Return the token counts so far. In this API, cached tokens aren't among the input tokens."""
        usage = self._generation.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        }


def _step_events(step: BlockStep) -> Iterator[dict[str, Any]]:
    block = step.block
    if step.action == "open":
        start = {**_content_block(block), "signature": ""} if block.kind == "reasoning" else _content_block(block)
        yield {"type": "content_block_start", "index": block.index, "content_block": start}
    elif step.action == "add":
        kind, key = _DELTA_KEYS.get(block.kind, ("input_json_delta", "partial_json"))
        yield {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, key: step.text}}
    else:
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": _content_block(block)["signature"]}
            yield {"type": "content_block_delta", "index": block.index, "delta": delta}
        yield {"type": "content_block_stop", "index": block.index}


def _content_block(block: OutputBlock) -> dict[str, Any]:
    """Return an output block in the form of Anthropic's API."""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": hashlib.sha256(block.text.encode()).hexdigest()}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    arguments = read_object(block.text) or {}  # none yet, or max_tokens truncated them
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def add_messages_routes(app: FastAPI, service: Service, responses: Mapping[int | str, dict[str, Any]]) -> None:
    """Add the routes to ``app``. ``responses`` describes the responses of a generating route for the API's schema."""

    @app.post(MESSAGES_PATH, responses=dict(responses), response_class=Response)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        service.check_accepting()
        service.check_model(body.model)
        generation = await service.start_chat(translate_messages_request(body), request, clamp=True)
        return MessagesWriter(body, generation).respond(service, stream=body.stream)

    @app.post(f"{MESSAGES_PATH}/count_tokens", responses=dict(responses))
    async def count_tokens(body: CountTokensRequest) -> Response:
        """Return the number of tokens that a message's conversation has."""
        service.check_model(body.model)
        chat = translate_messages_request(body)
        prompt = await service.build_prompts(lambda: service.prompter.chat(chat), size=None)
        return json_response({"input_tokens": prompt.length})
