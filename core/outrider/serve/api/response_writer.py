"""Response bodies of completions and chat completions in OpenAI's format: one JSON object, or a stream of chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from outrider.engine.requests.sampling import TokenLogprobs
from outrider.model import Tokenizer
from outrider.serve.api.request_fields import ChatRequest, SamplingFields
from outrider.serve.api.responses import encode_event
from outrider.serve.api.service import ChoiceDelta, Generation, chat_logprobs, completion_logprobs
from outrider.serve.api.tool_calls import ToolCallReader


class ResponseWriter:
    """The response to one request, written from the deltas of its generation."""

    def __init__(
        self,
        request: SamplingFields,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        fingerprint: str,
        readers: Sequence[ToolCallReader] = (),
    ) -> None:
        """Create the writer of one response.

        ``fingerprint`` identifies the server's configuration. ``readers`` has one tool-call reader for each choice of a chat;
        it is empty for a completion.
        """
        self._readers = readers
        self._request = request
        self.generation = generation
        self._tokenizer = tokenizer
        self._chat = isinstance(request, ChatRequest)
        logprobs = getattr(request, "logprobs", None)
        self._logprobs = bool(logprobs) if self._chat else logprobs is not None
        kind = "chat.completion" if self._chat else "text_completion"
        options = request.stream_options
        self._has_usage = options is not None and options.include_usage
        self._has_usage_in_each_chunk = self._has_usage and options is not None and options.continuous_usage_stats
        self._has_draft_details = options is not None and options.include_drafted
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if self._chat and request.stream else kind,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": fingerprint,
        }

    # -- one JSON object ---------------------------------------------------------------------------------------------

    async def write_whole(self, echoed: Sequence[str] = ()) -> dict[str, Any]:
        """Return the complete response once every choice has ended.

        ``echoed`` has, for each choice, the prompt text to put before the generated text; it may be empty.
        """
        by_choice: dict[int, list[ChoiceDelta]] = {}
        async for deltas in self.generation.deltas():
            for delta in deltas:
                by_choice.setdefault(delta.index, []).append(delta)
        choices = [self._choice(index, by_choice[index], echoed[index] if echoed else "") for index in sorted(by_choice)]
        return {**self._head, "choices": choices, "usage": self.usage}

    def _choice(self, index: int, deltas: Sequence[ChoiceDelta], echoed: str) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        entries = [entry for delta in deltas for entry in delta.logprobs]
        choice: dict[str, Any] = {"index": index}
        if self._chat:
            choice["message"] = self._message(index, text)
        else:
            choice["text"] = echoed + text
        choice["logprobs"] = self._format_logprobs(entries, {index: len(echoed)}, index)
        choice["finish_reason"] = self._finish_reason(deltas[-1])
        choice["stop_reason"] = deltas[-1].stopped_by
        if self._request.return_token_ids:
            choice["token_ids"] = [token for delta in deltas for token in delta.tokens]
        return choice

    def _message(self, index: int, text: str) -> dict[str, Any]:
        fields = self._readers[index].feed(text, last=True)
        calls = [{name: value for name, value in call.items() if name != "index"} for call in fields.pop("tool_calls", ())]
        content = fields.pop("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None, **fields}
        return {**message, "tool_calls": calls} if calls else message

    def _finish_reason(self, delta: ChoiceDelta) -> str | None:
        called = self._chat and self._readers[delta.index].has_calls
        return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason

    def _format_logprobs(
        self, entries: Sequence[TokenLogprobs], offsets: dict[int, int], index: int
    ) -> dict[str, Any] | None:
        """Return the ``logprobs`` field of choice ``index``, or None if the client didn't ask for it.

        ``offsets`` has the text offset of the next token by choice; a completion advances its own entry.
        """
        if not self._logprobs:
            return None
        if self._chat:
            return chat_logprobs(self._tokenizer, entries)
        logprobs, offsets[index] = completion_logprobs(self._tokenizer, entries, offsets.get(index, 0))
        return logprobs

    @property
    def usage(self) -> dict[str, Any]:
        """The ``usage`` field: prompt tokens and the output tokens received so far, over all choices."""
        prompt_tokens, output_tokens = self.generation.prompt_tokens, self.generation.output_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": min(self.generation.cached_tokens, prompt_tokens)},
            "completion_tokens_details": {
                "accepted_draft_tokens": self.generation.accepted_draft_tokens,
                "proposed_draft_tokens": self.generation.proposed_draft_tokens,
            },
        }

    # -- other APIs --------------------------------------------------------------------------------------------------

    async def message_deltas(self) -> AsyncIterator[tuple[dict[str, Any], ChoiceDelta]]:
        """Yield, for a chat with one choice, each delta of the message and the delta of the choice that it comes from."""
        async for deltas in self.generation.deltas():
            for delta in deltas:
                yield self._readers[delta.index].feed(delta.text, last=delta.finish_reason is not None), delta

    # -- a stream of chunks ------------------------------------------------------------------------------------------

    async def write_chunks(self, echoed: Sequence[str] = ()) -> AsyncIterator[bytes]:
        """Yield the response as encoded server-sent events, except the final ``[DONE]`` event.

        ``echoed`` has, for each choice, the prompt text of its first chunk; it may be empty.
        """
        head = json.dumps(self._head, separators=(",", ":"))[:-1].encode()
        tail = self._tail()
        offsets: dict[int, int] = {}
        generation = self.generation
        if self._chat:
            for index in range(generation.choices):
                first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield self._chunk(head, first, tail)
        for index, text in enumerate(echoed):
            yield self._chunk(head, {"index": index, "text": text, "logprobs": None, "finish_reason": None}, tail)
            offsets[index] = len(text)
        async for deltas in generation.deltas():
            tail = self._tail() if self._has_usage_in_each_chunk else tail
            chunks = [
                self._chunk(head, self._chunk_choice(delta, offsets), tail, delta)
                for delta in _merge_by_choice(deltas)
                if self._has_content(delta)
            ]
            if chunks:
                yield b"".join(chunks)
        if self._has_usage:
            yield encode_event({**self._head, "choices": [], "usage": self.usage})

    def _tail(self) -> bytes:
        """Return the end of an encoded chunk after its choices: the ``usage`` field if the client asked for it, and the
        closing brace.
        """
        if self._has_usage_in_each_chunk:
            return b',"usage":%b}\n\n' % json.dumps(self.usage, separators=(",", ":")).encode()
        return b',"usage":null}\n\n' if self._has_usage else b"}\n\n"

    def _has_content(self, delta: ChoiceDelta) -> bool:
        """Return whether the client gets a chunk for ``delta``. A token that ends inside a character has no text yet."""
        return bool(
            delta.text
            or delta.finish_reason
            or (self._logprobs and delta.logprobs)
            or (delta.tokens and (self._request.return_token_ids or self._has_draft_details))
        )

    def _chunk_choice(self, delta: ChoiceDelta, offsets: dict[int, int]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": delta.index}
        if self._chat:
            choice["delta"] = self._readers[delta.index].feed(delta.text, last=delta.finish_reason is not None)
        else:
            choice["text"] = delta.text
        choice["logprobs"] = self._format_logprobs(delta.logprobs, offsets, delta.index)
        choice["finish_reason"] = self._finish_reason(delta)
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


def _merge_by_choice(deltas: Sequence[ChoiceDelta]) -> Sequence[ChoiceDelta]:
    """Return one delta for each choice, in order. ``deltas`` has several of a choice if the client reads slowly."""
    if len(deltas) == 1:
        return deltas
    merged: dict[int, ChoiceDelta] = {}
    for delta in deltas:
        earlier = merged.get(delta.index)
        merged[delta.index] = delta if earlier is None else earlier.followed_by(delta)
    return list(merged.values())
