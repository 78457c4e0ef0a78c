"""Answers of completions and chats, whole and in chunks, as OpenAI writes them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from outrider.engine.requests.logprobs import TokenLogprobs
from outrider.model import Tokenizer
from outrider.serve.calls import Reader
from outrider.serve.choices import Delta, chat_logprobs, completion_logprobs
from outrider.serve.fields import ChatRequest, Sampling
from outrider.serve.sending import event
from outrider.serve.service import Generation


class Writer:
    """Writes the answer to one request. ``model``: as the client named it; ``fingerprint``: of the server's configuration."""

    def __init__(
        self,
        asked: Sampling,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        fingerprint: str,
        readers: Sequence[Reader] = (),
    ) -> None:
        """``readers``: of each choice of a chat."""
        self._readers = readers
        self._asked = asked
        self._generation = generation
        self._tokenizer = tokenizer
        self._chat = isinstance(asked, ChatRequest)
        logprobs = getattr(asked, "logprobs", None)
        self._logprobs = bool(logprobs) if self._chat else logprobs is not None
        kind = "chat.completion" if self._chat else "text_completion"
        options = asked.stream_options
        self._usage = options is not None and options.include_usage
        self._usage_always = options is not None and options.include_usage and options.continuous_usage_stats
        self._drafted = options is not None and options.include_drafted
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if self._chat and asked.stream else kind,
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": fingerprint,
        }

    # -- whole -----------------------------------------------------------------------------------------------------

    async def whole(self, echoed: Sequence[str] = ()) -> dict[str, Any]:
        """The whole answer. ``echoed``: for each choice, text to put before its own."""
        found: dict[int, list[Delta]] = {}
        async for deltas in self._generation.deltas():
            for delta in deltas:
                found.setdefault(delta.index, []).append(delta)
        choices = [self._choice(index, found[index], echoed[index] if echoed else "") for index in sorted(found)]
        return {**self._head, "choices": choices, "usage": self.usage}

    def _choice(self, index: int, deltas: Sequence[Delta], echoed: str) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        entries = [entry for delta in deltas for entry in delta.logprobs]
        choice: dict[str, Any] = {"index": index}
        if self._chat:
            choice["message"] = self._message(index, text)
        else:
            choice["text"] = echoed + text
        choice["logprobs"] = self._shown(entries, {index: len(echoed)}, index)
        choice["finish_reason"] = self._reason(deltas[-1])
        if self._asked.return_token_ids:
            choice["token_ids"] = [token for delta in deltas for token in delta.tokens]
        return choice

    def _message(self, index: int, text: str) -> dict[str, Any]:
        said = self._readers[index].feed(text, last=True)
        calls = [{name: value for name, value in call.items() if name != "index"} for call in said.pop("tool_calls", ())]
        message = {"role": "assistant", "content": said.pop("content", None if calls else ""), "refusal": None, **said}
        return {**message, "tool_calls": calls} if calls else message

    def _reason(self, delta: Delta) -> str | None:
        """Why a choice ended, as OpenAI says it."""
        called = self._chat and self._readers[delta.index].called
        return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason

    def _shown(self, entries: Sequence[TokenLogprobs], offsets: dict[int, int], index: int) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        if self._chat:
            return chat_logprobs(self._tokenizer, entries)
        shown, offsets[index] = completion_logprobs(self._tokenizer, entries, offsets.get(index, 0))
        return shown

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        read, written = self._generation.prompt_tokens, self._generation.output_tokens
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "completion_tokens_details": {"accepted_draft_tokens": self._generation.accepted},
        }

    # -- in chunks -------------------------------------------------------------------------------------------------

    async def chunks(self, echoed: Sequence[str] = ()) -> AsyncIterator[bytes]:
        """The answer as server-sent events, but for the last one, which says that it's done."""
        head = json.dumps(self._head, separators=(",", ":"))[:-1].encode()
        tail = self._tail()
        offsets: dict[int, int] = {}
        generation = self._generation
        if self._chat:
            for index in range(generation.choices):
                first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield self._chunk(head, first, tail)
        for index, text in enumerate(echoed):
            yield self._chunk(head, {"index": index, "text": text, "logprobs": None, "finish_reason": None}, tail)
            offsets[index] = len(text)
        async for deltas in generation.deltas():
            tail = self._tail() if self._usage_always else tail
            pieces = [
                self._chunk(head, self._part(delta, offsets), tail, delta) for delta in _merged(deltas) if self._says(delta)
            ]
            if pieces:
                yield b"".join(pieces)
        if self._usage:
            yield event({**self._head, "choices": [], "usage": self.usage})

    def _tail(self) -> bytes:
        """What ends a chunk: the usage so far where each one has it."""
        if self._usage_always:
            return b',"usage":%b}\n\n' % json.dumps(self.usage, separators=(",", ":")).encode()
        return b',"usage":null}\n\n' if self._usage else b"}\n\n"

    def _says(self, delta: Delta) -> bool:
        """Whether there is anything to tell. A token whose character isn't complete has no text yet."""
        return bool(
            delta.text
            or delta.finish_reason
            or (self._logprobs and delta.logprobs)
            or (delta.tokens and (self._asked.return_token_ids or self._drafted))
        )

    def _part(self, delta: Delta, offsets: dict[int, int]) -> dict[str, Any]:
        part: dict[str, Any] = {"index": delta.index}
        if self._chat:
            part["delta"] = self._readers[delta.index].feed(delta.text, last=delta.finish_reason is not None)
        else:
            part["text"] = delta.text
        part["logprobs"] = self._shown(delta.logprobs, offsets, delta.index)
        part["finish_reason"] = self._reason(delta)
        if self._asked.return_token_ids:
            part["token_ids"] = delta.tokens
        return part

    def _chunk(self, head: bytes, part: dict[str, Any], tail: bytes, delta: Delta | None = None) -> bytes:
        said = b""
        if self._drafted and delta is not None:
            told = {"tokens": delta.pieces, "proposed": delta.proposed, "accepted": delta.drafted}
            said = b',"outrider":' + json.dumps(told, separators=(",", ":")).encode()
        choice = json.dumps(part, separators=(",", ":")).encode()
        return b"".join((b"data: ", head, b',"choices":[', choice, b"]", said, tail))


def _merged(deltas: Sequence[Delta]) -> Sequence[Delta]:
    """One delta for each choice, where a slow reader gets several at once."""
    if len(deltas) == 1:
        return deltas
    merged: dict[int, Delta] = {}
    for delta in deltas:
        before = merged.get(delta.index)
        if before is None:
            merged[delta.index] = delta
            continue
        merged[delta.index] = Delta(
            delta.index,
            before.text + delta.text,
            before.tokens + delta.tokens,
            before.logprobs + delta.logprobs,
            delta.finish_reason,
            before.drafted + delta.drafted,
            before.proposed + delta.proposed,
            before.pieces + delta.pieces,
        )
    return list(merged.values())
