"""Response bodies: the base of all writers, and those of completions and chat completions in OpenAI's format."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, ClassVar

from starlette.responses import Response
from starlette.types import Send

from outrider.model import Tokenizer
from outrider.serve.api.request_fields import ChatRequest, CompletionRequest
from outrider.serve.api.responses import DONE_EVENT, ConnectedResponse, encode_event, send_events, send_json
from outrider.serve.api.service import ChoiceDelta, Generation, Service, chat_logprobs, completion_logprobs


class ResponseWriter(ABC):
    """The response to one request, written from the deltas of its generation: one JSON object, or server-sent events."""

    end: ClassVar[bytes] = b""
    """The event that ends a stream, which follows errors too."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    @abstractmethod
    async def write_whole(self) -> dict[str, Any]:
        """Return the complete response once every choice has ended. Raises :class:`ApiError` if the generation fails."""

    @abstractmethod
    def write_events(self) -> AsyncIterator[bytes]:
        """Yield the response as encoded server-sent events, except for the one that ends the stream."""

    def respond(self, service: Service, *, stream: bool | None) -> Response:
        """Return the response, whole or streamed."""

        async def work(send: Send) -> None:
            if stream:
                await send_events(send, self.write_events(), write_s=service.config.write_timeout_s, end=self.end)
            else:
                await send_json(send, await self.write_whole())

        return ConnectedResponse(work, close=self._generation.close)


class CompletionWriter(ResponseWriter):
    """A response of ``/v1/completions``: one JSON object, or a stream of chunks."""

    end = DONE_EVENT
    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        request: CompletionRequest | ChatRequest,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        fingerprint: str,
        echoed: Sequence[str] = (),
    ) -> None:
        """Create the writer of one response.

        ``fingerprint`` identifies the server's configuration. ``echoed`` has, for each choice, the prompt text that precedes
        the generated text; it may be empty.
        """
        super().__init__(generation)
        self._request = request
        self._tokenizer = tokenizer
        self._echoed = echoed
        self._has_logprobs = request.logprobs is not None and request.logprobs is not False
        options = request.stream_options
        self._has_usage = options is not None and options.include_usage
        self._has_usage_in_each_chunk = self._has_usage and options is not None and options.continuous_usage_stats
        self._has_draft_details = options is not None and options.include_drafted
        self._head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "object": self.chunk_kind if request.stream else self.kind,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": fingerprint,
        }

    # -- what a chat completion has in other forms -------------------------------------------------------------------

    def _whole_content(self, index: int, contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the content of choice ``index``, which has ``contents`` in a stream."""
        return {"text": (self._echoed[index] if self._echoed else "") + "".join(content["text"] for content in contents)}

    def _first_choices(self) -> Iterator[dict[str, Any]]:
        """Yield the choices of the chunks that precede the first tokens."""
        for index, text in enumerate(self._echoed):
            yield {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _new_content(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the content of a chunk."""
        return {"text": delta.text}

    def _finish_reason(self, delta: ChoiceDelta) -> str | None:
        return delta.finish_reason

    def _format_logprobs(self, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        entries = [entry for delta in deltas for entry in delta.logprobs]
        return completion_logprobs(self._tokenizer, entries, [each for delta in deltas for each in delta.offsets])

    # -- one JSON object ---------------------------------------------------------------------------------------------

    async def write_whole(self) -> dict[str, Any]:
        """Return the complete response once every choice has ended. Raises :class:`ApiError` if the generation fails."""
        by_choice: dict[int, list[tuple[ChoiceDelta, dict[str, Any]]]] = {}
        async for deltas in self._generation.deltas():
            for delta in deltas:
                by_choice.setdefault(delta.index, []).append((delta, self._new_content(delta)))
        choices = [self._choice(index, *zip(*by_choice[index], strict=True)) for index in sorted(by_choice)]
        return {**self._head, "choices": choices, "usage": self._generation.usage}

    def _choice(self, index: int, deltas: Sequence[ChoiceDelta], contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
        choice = {
            "index": index,
            **self._whole_content(index, contents),
            "logprobs": self._format_logprobs(deltas) if self._has_logprobs else None,
            "finish_reason": self._finish_reason(deltas[-1]),
            "stop_reason": deltas[-1].stopped_by,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = [token for delta in deltas for token in delta.tokens]
        return choice

    # -- a stream of chunks ------------------------------------------------------------------------------------------

    async def write_events(self) -> AsyncIterator[bytes]:
        """Yield the response as encoded chunks."""
        head = json.dumps(self._head, separators=(",", ":"))[:-1].encode()
        tail = self._tail()
        for first in self._first_choices():
            yield self._chunk(head, first, tail)
        async for deltas in self._generation.deltas():
            tail = self._tail() if self._has_usage_in_each_chunk else tail
            chunks = [
                self._chunk(head, choice, tail, delta)
                for delta in _merge_by_choice(deltas)
                if self._has_content(choice := self._chunk_choice(delta), delta)
            ]
            if chunks:
                yield b"".join(chunks)
        if self._has_usage:
            yield encode_event({**self._head, "choices": [], "usage": self._generation.usage})

    def _tail(self) -> bytes:
        """Return the end of an encoded chunk after its choices: the ``usage`` field if the client asked for it, and the
        closing brace.
        """
        if self._has_usage_in_each_chunk:
            return b',"usage":%b}\n\n' % json.dumps(self._generation.usage, separators=(",", ":")).encode()
        return b',"usage":null}\n\n' if self._has_usage else b"}\n\n"

    def _has_content(self, choice: dict[str, Any], delta: ChoiceDelta) -> bool:
        """Return whether the client gets a chunk with ``choice`` for ``delta``. A token that ends inside a character, or text
        that may become a part of a tool call, has no content yet.
        """
        return bool(
            choice.get("text")
            or choice.get("delta")
            or delta.finish_reason
            or (self._has_logprobs and delta.logprobs)
            or (delta.tokens and (self._request.return_token_ids or self._has_draft_details))
        )

    def _chunk_choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        choice = {
            "index": delta.index,
            **self._new_content(delta),
            "logprobs": self._format_logprobs([delta]) if self._has_logprobs else None,
            "finish_reason": self._finish_reason(delta),
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stopped_by
        if self._request.return_token_ids:
            choice["token_ids"] = delta.tokens
        return choice

    def _chunk(self, head: bytes, choice: dict[str, Any], tail: bytes, delta: ChoiceDelta | None = None) -> bytes:
        draft_details = b""
        if self._has_draft_details and delta is not None:
            counts = {"tokens": delta.pieces, "proposed": delta.proposed, "accepted": delta.drafted}
            draft_details = b',"outrider":' + json.dumps(counts, separators=(",", ":")).encode()
        encoded = json.dumps(choice, separators=(",", ":")).encode()
        return b"".join((b"data: ", head, b',"choices":[', encoded, b"]", draft_details, tail))


class ChatWriter(CompletionWriter):
    """A response of ``/v1/chat/completions``. The generation's readers find tool calls and reasoning in the text."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _whole_content(self, index: int, contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
        del index
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        calls: list[dict[str, Any]] = []
        for delta in (content["delta"] for content in contents):
            for call in delta.pop("tool_calls", ()):
                if call.pop("index") == len(calls):
                    calls.append(call)
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            message |= {name: message.get(name, "") + text for name, text in delta.items()}
        return {"message": message | {"content": message["content"] or None, "tool_calls": calls} if calls else message}

    def _first_choices(self) -> Iterator[dict[str, Any]]:
        for index in range(self._generation.choices):
            yield {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def _new_content(self, delta: ChoiceDelta) -> dict[str, Any]:
        return {"delta": self._generation.read_message(delta)}

    def _finish_reason(self, delta: ChoiceDelta) -> str | None:
        called = self._generation.readers[delta.index].has_calls
        return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason

    def _format_logprobs(self, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, [entry for delta in deltas for entry in delta.logprobs])


def _merge_by_choice(deltas: Sequence[ChoiceDelta]) -> Sequence[ChoiceDelta]:
    """Return one delta for each choice, in order. ``deltas`` has several of a choice if the client reads slowly."""
    if len(deltas) == 1:
        return deltas
    merged: dict[int, ChoiceDelta] = {}
    for delta in deltas:
        earlier = merged.get(delta.index)
        merged[delta.index] = delta if earlier is None else earlier.followed_by(delta)
    return list(merged.values())
