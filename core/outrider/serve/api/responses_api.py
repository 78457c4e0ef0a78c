"""OpenAI's Responses API: its routes, its requests as chat requests, and its responses as one object or a stream.

A later request continues a stored response by ``previous_response_id``.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import FastAPI, Query, Request
from pydantic import Field
from starlette.responses import Response

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
from outrider.serve.api.request_fields import ChatRequest, ListOf, NestedObject
from outrider.serve.api.responses import (
    SERVER,
    ApiError,
    bad_request,
    json_response,
)
from outrider.serve.api.service import Generation, Service

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
    nested = MappingProxyType(
        {
            "text": ("format", "verbosity"),
            "text.format": ("type", "name", "description", "schema", "strict"),
            "reasoning": ("context", "effort", "generate_summary", "mode", "summary"),
        }
    )
    ignored = frozenset(
        (
            *("access_programs", "background_options", "client_metadata", "max_tool_calls", "prompt_cache_key"),
            *("prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "stream_options"),
            "user",
        )
    )

    input: str | Conversation = Field(default_factory=list)
    instructions: str | None = None
    include: ListOf[str] | None = Field(None, description="Values for features that the server lacks have no effect.")
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
    """The tools that one request offers to the model, in the client's form and in that of the chat request.

    Tools that OpenAI's own servers run, such as ``web_search``, are left out: the model doesn't see them.
    """

    offered: list[dict[str, Any]] = field(default_factory=list)
    """The tools as the client sent them."""
    functions: list[dict[str, Any]] = field(default_factory=list)
    """The tools in the form of the chat request."""
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
        grammar = expect(tool.get("format") or {}, dict, f"{field_name}.format").get("definition")
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
    if "message.output_text.logprobs" in (request.include or ()):
        raise bad_request(f"log-probabilities aren't served here: {request.refused['top_logprobs']}", "include")
    tools = ResponsesTools()
    for name, tool in expect_objects(request.tools or [], "tools"):
        tools.add(name, tool)
    added = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    conversation = ConversationBuilder()
    if request.instructions:
        conversation.add_message("system", request.instructions)
    for name, item in (*expect_objects([*earlier], "previous_response_id"), *expect_objects(added, "input")):
        _add_item(conversation, name, item)
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
        "reasoning_effort": (request.reasoning or {}).get("effort"),
        "response_format": _response_format(text.get("format")),
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    fields |= _tool_fields(request.tool_choice, tools.functions)
    return chat_request(fields), tools, [*earlier, *added]


def _tool_fields(choice: str | dict[str, Any] | None, functions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields ``tools`` and ``tool_choice`` of the chat request for the client's ``choice`` among ``functions``."""
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "allowed_tools":
            names = [tool.get("name") for _, tool in expect_objects(choice.get("tools"), "tool_choice.tools")]
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
        return named
    return {"type": "json_schema", "json_schema": {"name": named.get("name"), "schema": named.get("schema")}}


def _add_item(conversation: ConversationBuilder, name: str, item: dict[str, Any]) -> None:
    kind = expect(item.get("type", "message"), str, f"{name}.type")
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
"""For each type of item, the function that adds the item to the conversation."""


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


MAX_STORED_RESPONSES = 1024
MAX_STORED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response, and the items of its conversation up to its end."""

    response: dict[str, Any]
    items: Sequence[dict[str, Any]]
    """Items of the input and the output, with those of earlier responses."""
    size: int
    """Length of response and items as JSON text, in bytes."""

    @property
    def input_items(self) -> list[dict[str, Any]]:
        """The items before the output, in the form of the API: with an id, and messages with a list of parts."""
        items = []
        for number, item in enumerate(self.items[: len(self.items) - len(self.response["output"])]):
            given = {name: value for name, value in item.items() if value is not None}
            item = {"id": f"item_{self.response['id']}_{number}", "type": "message", "status": "completed", **given}
            if isinstance(item.get("content"), str):
                kind = "output_text" if item.get("role") == "assistant" else "input_text"
                item["content"] = [_part(kind, item["content"])]
            items.append(item)
        return items


class ResponseStore:
    """A store of responses in memory. When it is full, the least recently used responses leave it. Use it in one thread."""

    def __init__(self, *, max_responses: int = MAX_STORED_RESPONSES, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[str, dict[str, Any]] = {}
        """Output items of the stored responses, by their ids."""
        self._size = 0

    def add(self, response: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
        """Store a response. A response that alone exceeds the limit is not stored."""
        size = len(compact_json([response, items]))
        self._stored[response["id"]] = StoredResponse(response, items, size)
        self._items |= {item["id"]: item for item in response.get("output", ())}
        self._size += size
        while len(self._stored) > self._max_responses or self._size > self._max_bytes:
            self._remove(next(iter(self._stored)))

    def find(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a stored response. Raises :class:`ApiError` if there is none; ``param`` is the request field at fault."""
        if response_id not in self._stored:
            message = (
                f"the response {response_id!r} isn't stored: it never was, or newer ones took its place; send the whole "
                "conversation as input"
            )
            code = None if param is None else "previous_response_not_found"
            raise ApiError(404 if param is None else 400, message, param=param, code=code)
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def remove(self, response_id: str) -> None:
        """Remove a stored response. Raises :class:`ApiError` if there is none."""
        self.find(response_id)
        self._remove(response_id)

    def _remove(self, response_id: str) -> None:
        stored = self._stored.pop(response_id)
        self._size -= stored.size
        for item in stored.response.get("output", ()):
            del self._items[item["id"]]

    def resolve(self, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return ``items`` with the stored item in place of each reference. Raises :class:`ApiError` if there is none."""
        resolved = []
        for number, item in enumerate(items):
            if item.get("type") == "item_reference":
                if (found := self._items.get(str(item.get("id")))) is None:
                    text = f"the item {item.get('id')!r} isn't stored; send the item itself"
                    raise bad_request(text, f"input[{number}].id", "item_not_found")
                item = found
            resolved.append(item)
        return resolved


class _ItemKind(NamedTuple):
    item_type: str
    id_prefix: str
    event: str
    """Prefix of the events that carry the item's text."""
    text_key: str
    """Key of the whole text in the event that ends the text, and in a call's item."""
    part_type: str | None
    """Type of the content part that has the text; None for a call, whose item has it."""


_ITEM_KINDS = {
    "reasoning": _ItemKind("reasoning", "rs", "response.reasoning_text", "text", "reasoning_text"),
    "text": _ItemKind("message", "msg", "response.output_text", "text", "output_text"),
    "call": _ItemKind("function_call", "fc", "response.function_call_arguments", "arguments", None),
    "custom": _ItemKind("custom_tool_call", "ctc", "response.custom_tool_call_input", "input", None),
}


class ResponsesWriter(TranslatedWriter):
    """The response to one request, as events. ``response`` is the response object so far.

    ``on_end`` is called with the response once it has ended without an error.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        tools: ResponsesTools,
        generation: Generation,
        on_end: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(generation)
        self._tools, self._on_end = tools, on_end
        self._items: list[dict[str, Any]] = []
        self._number = 0
        self.response: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": request.reasoning or {"effort": None, "summary": None},
            "store": request.store is not False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": tools.offered,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _answer(self) -> dict[str, Any]:
        return self.response

    def _error_event(self, error: ApiError) -> dict[str, Any]:
        kind = "server_error" if error.kind == SERVER else "invalid_prompt"
        self.response |= {"status": "failed", "error": {"code": error.code or kind, "message": error.message}}
        return self._event("response.failed", response=self.response)

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        finish_reason: str | None = None
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=dict(self.response))
        async for message, delta in self._message_deltas():
            for step in self._splitter.feed(message):
                for event in self._step_events(step):
                    yield event
            finish_reason = delta.finish_reason
        if finish_reason == "length" and self._items:
            self._items[-1]["status"] = "incomplete"
        for step in self._splitter.finish():
            for event in self._step_events(step):
                yield event
        status = "incomplete" if finish_reason == "length" else "completed"
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ended = {"status": status, "incomplete_details": details, "output": self._items, "usage": self._usage()}
        self.response |= ended
        self._on_end(self.response)
        yield self._event(f"response.{status}", response=self.response)

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        event = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    # -- items -------------------------------------------------------------------------------------------------------

    def _step_events(self, step: BlockStep) -> Iterator[dict[str, Any]]:
        block = step.block
        is_custom = block.name in self._tools.custom
        kind = _ITEM_KINDS["custom" if is_custom else block.kind]
        if step.action == "open":
            self._items.append(self._new_item(kind, block))
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": block.index}
        part_place = place if kind.part_type is None else {**place, "content_index": 0}
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if step.action == "open":
            yield self._event("response.output_item.added", output_index=block.index, item=item | {"status": "in_progress"})
            if kind.part_type is not None:
                yield self._event("response.content_part.added", **part_place, part=_part(kind.part_type, ""))
        elif step.action == "add" and not is_custom:
            yield self._event(f"{kind.event}.delta", **part_place, delta=step.text, **logprobs)
        elif step.action == "close":
            text = _custom_input(block.text) if is_custom else block.text
            if is_custom:
                yield self._event(f"{kind.event}.delta", **part_place, delta=text)
            yield self._event(f"{kind.event}.done", **part_place, **{kind.text_key: text}, **logprobs)
            if kind.part_type is None:
                item[kind.text_key] = text
            else:
                item["content"] = [_part(kind.part_type, text)]
                yield self._event("response.content_part.done", **part_place, part=item["content"][0])
            yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _new_item(self, kind: _ItemKind, block: OutputBlock) -> dict[str, Any]:
        item: dict[str, Any] = {
            "id": f"{kind.id_prefix}_{secrets.token_hex(12)}",
            "type": kind.item_type,
            "status": "completed",
        }
        if block.kind == "call":
            item |= {"call_id": block.call_id, "name": block.name, kind.text_key: ""}
            if block.name in self._tools.namespaces:
                item["namespace"] = self._tools.namespaces[block.name]
        else:
            own: dict[str, Any] = {"role": "assistant"} if block.kind == "text" else {"summary": []}
            item |= {**own, "content": []}
        return item


def _part(part_type: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": part_type, "text": text}
    return part | {"annotations": [], "logprobs": []} if part_type == "output_text" else part


def _custom_input(arguments: str) -> str:
    """Return the free text in the arguments of a custom tool's call. If ``arguments`` is no object with ``input``, return all
    of it.
    """
    return str((read_object(arguments) or {}).get("input", arguments))


def add_responses_routes(app: FastAPI, service: Service, responses: Mapping[int | str, dict[str, Any]]) -> None:
    """Add the routes to ``app``. ``responses`` describes the responses of a generating route for the API's schema."""
    store = ResponseStore()

    def translate(body: ResponsesRequest) -> tuple[ChatRequest, ResponsesTools, list[dict[str, Any]]]:
        previous = body.previous_response_id
        earlier = () if previous is None else store.find(previous, "previous_response_id").items
        body.input = body.input if isinstance(body.input, str) else store.resolve(body.input)
        return translate_responses_request(body, earlier)

    @app.post("/v1/responses", responses=dict(responses), response_class=Response)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Generate the next items of a conversation."""
        service.check_accepting()
        service.check_model(body.model)
        chat, tools, items = translate(body)

        def keep(response: dict[str, Any]) -> None:
            if body.store is not False:
                store.add(response, [*items, *response["output"]])

        generation = await service.start_chat(chat, request)
        return ResponsesWriter(body, tools, generation, keep).respond(service, stream=body.stream)

    @app.post("/v1/responses/input_tokens", responses=dict(responses))
    async def count_input_tokens(body: ResponsesRequest) -> Response:
        """Return the number of tokens of a response's conversation."""
        service.check_model(body.model)
        chat, _, _ = translate(body)
        prompt = await service.build_prompts(lambda: service.prompter.chat(chat), size=None)
        return json_response({"object": "response.input_tokens", "input_tokens": prompt.length})

    @app.get("/v1/responses/{response_id}", responses=dict(responses))
    async def stored_response(response_id: str, stream: bool = False) -> Response:
        """Return the response object of an earlier request."""
        if stream:
            raise bad_request("a stored response isn't streamed; leave stream out", "stream")
        return json_response(store.find(response_id).response)

    @app.get("/v1/responses/{response_id}/input_items", responses=dict(responses))
    async def input_items(
        response_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """List the items that a response was made of, also those of earlier responses."""
        items = store.find(response_id).input_items[:: 1 if order == "asc" else -1]
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise bad_request(f"the response has no input item {after!r}", "after")
        begin = 0 if after is None else ids.index(after) + 1
        end = begin + limit
        ends = {"first_id": ids[begin] if ids[begin:] else None, "last_id": ids[begin:end][-1] if ids[begin:] else None}
        return json_response({"object": "list", "data": items[begin:end], "has_more": end < len(items), **ends})

    @app.post("/v1/responses/{response_id}/cancel", responses=dict(responses))
    async def cancel_response(response_id: str) -> Response:
        """Refuse to cancel a response: only one of the background could run here."""
        store.find(response_id)
        raise bad_request("a stored response has ended; close the connection of a running one to cancel it")

    @app.delete("/v1/responses/{response_id}", responses=dict(responses))
    async def delete_response(response_id: str) -> Response:
        """Remove a stored response. Responses that continue it stay."""
        store.remove(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})
