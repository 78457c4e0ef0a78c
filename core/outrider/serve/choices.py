"""The text of one sample as it comes, and the log-probabilities of its tokens as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.engine.requests.logprobs import TokenLogprobs
from outrider.engine.requests.sampling import SamplingParams
from outrider.model import Tokenizer
from outrider.serve.messages import Output


@dataclass(slots=True)
class Delta:
    """What is new of one choice. ``drafted``: how many of the tokens, the first ones, a draft had; it had ``proposed``."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    drafted: int = 0
    proposed: int = 0
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    """The text of each token, and whether it was drafted; only where they were asked for."""


class ChoiceText:
    """Makes the text of one sample from its outputs. ``special_tokens``: their spelling is part of the text, for a parser.
    ``pieces``: deltas have the text of each token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        index: int,
        params: SamplingParams,
        *,
        ends: Collection[int],
        special_tokens: bool = False,
        pieces: bool = False,
    ) -> None:
        self.index = index
        self._ends = ends  # these have no text, even where special tokens do
        self._by_engine = bool(params.stop)  # it decides where the text ends
        self._decoder = tokenizer.stream(special_tokens=special_tokens)
        self._pieces = pieces
        self.finish_reason: str | None = None
        self.count = 0

    def add(self, output: Output) -> Delta:
        """Take an output in. Tokens whose text isn't certain give it later."""
        decoder, tokens = self._decoder, output.tokens
        self.count += len(tokens)
        self.finish_reason = output.finish_reason
        if output.finish_reason == "stop" and tokens and tokens[-1] in self._ends:
            tokens = tokens[:-1]
        pieces: list[str] = []
        if self._pieces:
            pieces = [decoder.push(token) for token in tokens]
        elif not self._by_engine and tokens:
            pieces = [decoder.push(*tokens)]
        if output.finish_reason is not None and (self._pieces or not self._by_engine):
            rest = decoder.flush()
            pieces = [*pieces[:-1], pieces[-1] + rest] if pieces else [rest]
        text = (output.text or "") if self._by_engine else "".join(pieces)
        delta = Delta(self.index, text, output.tokens, output.logprobs, output.finish_reason, output.drafted, output.proposed)
        if self._pieces:
            delta.pieces = [(piece, place < output.drafted) for place, piece in enumerate(pieces) if piece]
        return delta


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], offset: int) -> tuple[dict[str, Any], int]:
    """``logprobs`` of a completion, with the offset in its text of each token; the second result is where the next begins."""
    offsets, tokens = [], []
    for entry in entries:
        offsets.append(offset)
        tokens.append(spelled(tokenizer, entry.token))
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {spelled(tokenizer, token): logprob for token, logprob in (*entry.top, (entry.token, entry.logprob))}
            for entry in entries
        ],
        "text_offset": offsets,
    }, offset


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """``logprobs`` of a chat's choice."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.bytes_of(token)
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}

    content = [
        {**shown(entry.token, entry.logprob), "top_logprobs": [shown(token, value) for token, value in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token as OpenAI's completions show it: its text, or its bytes where it's a part of a character."""
    data = tokenizer.bytes_of(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
