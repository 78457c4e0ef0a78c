"""Responses in the format of OpenAI's Responses API: one object, or a stream of events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

from outrider.serve.api.api_errors import SERVER, ApiError
from outrider.serve.api.asgi_responses import encode_named_event
from outrider.serve.api.response_writer import ResponseWriter
from outrider.serve.translation.output_blocks import BlockSplitter, BlockStep, OutputBlock
from outrider.serve.translation.responses_request import ResponsesRequest, ResponsesTools


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


class ResponsesWriter:
    """The response to one request, as events. ``response`` is the response object so far.

    ``on_end`` is called with the response once it has ended without an error.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        tools: ResponsesTools,
        writer: ResponseWriter,
        on_end: Callable[[dict[str, Any]], None],
    ) -> None:
        self._tools, self._writer, self._on_end = tools, writer, on_end
        self._splitter = BlockSplitter()
        self._items: list[dict[str, Any]] = []
        self._number = 0
        self._reasoning_tokens = 0
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

    async def write_whole(self) -> dict[str, Any]:
        """Return the response once it has ended. Raises :class:`ApiError` if the generation fails."""
        async for _ in self._events():
            pass
        return self.response

    async def write_events(self) -> AsyncIterator[bytes]:
        """Yield the encoded events. An error becomes the event ``response.failed``."""
        try:
            async for event in self._events():
                yield encode_named_event(event)
        except ApiError as error:
            kind = "server_error" if error.kind == SERVER else "invalid_prompt"
            self.response |= {"status": "failed", "error": {"code": error.code or kind, "message": error.message}}
            yield encode_named_event(self._event("response.failed", response=self.response))

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        finish_reason: str | None = None
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=dict(self.response))
        async for message, delta in self._writer.message_deltas():
            for step in self._splitter.feed(message):
                for event in self._step_events(step):
                    yield event
            self._reasoning_tokens += len(delta.tokens) if self._splitter.is_reasoning else 0
            finish_reason = delta.finish_reason
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
        usage = self._writer.usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens, **usage["completion_tokens_details"]},
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
    """Return the free text of a custom tool's call; of arguments that aren't an object with ``input`` all text."""
    try:
        return str(json.loads(arguments)["input"])
    except (ValueError, KeyError, TypeError):
        return arguments
