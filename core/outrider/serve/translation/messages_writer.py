"""Responses in the format of Anthropic's Messages API: one message, or a stream of events."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

from outrider.serve.api.api_errors import ApiError, messages_error
from outrider.serve.api.asgi_responses import encode_named_event
from outrider.serve.api.choice_text import ChoiceDelta
from outrider.serve.api.response_writer import ResponseWriter
from outrider.serve.translation.messages_request import MessagesRequest
from outrider.serve.translation.output_blocks import BlockSplitter, BlockStep, OutputBlock

_DELTA_KEYS = {"reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
"""Type and key of the delta of each kind of block; a call has ``input_json_delta``."""


class MessagesWriter:
    """The answer to one request of the Messages API, as one message or as server-sent events."""

    def __init__(self, request: MessagesRequest, writer: ResponseWriter) -> None:
        self._max_tokens = request.max_tokens
        self._writer = writer
        self._splitter = BlockSplitter()
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

    async def write_whole(self) -> dict[str, Any]:
        """Return the message once it has ended. Raises :class:`ApiError` if the generation fails."""
        async for _ in self._events():
            pass
        return {**self.message, "content": [_content_block(block) for block in self._splitter.blocks]}

    async def write_events(self) -> AsyncIterator[bytes]:
        """Yield the encoded events. An error becomes the event ``error``."""
        try:
            async for event in self._events():
                yield encode_named_event(event)
        except ApiError as error:
            yield encode_named_event(messages_error(error))

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        last: ChoiceDelta | None = None
        async for message, delta in self._writer.message_deltas():
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
            reached = self._writer.usage["completion_tokens"] >= self._max_tokens
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
        usage = self._writer.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
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
    try:
        arguments = json.loads(block.text)
    except ValueError:  # no arguments yet, or max_tokens truncated them
        arguments = None
    arguments = arguments if isinstance(arguments, dict) else {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
