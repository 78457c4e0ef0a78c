"""Text of one choice, decoded from the engine's outputs, and the log-probabilities of its tokens in OpenAI's format."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.engine.requests.sampling import SamplingParams, TokenLogprobs
from outrider.model import Tokenizer
from outrider.serve.connection.engine_messages import SampleOutput


@dataclass(slots=True)
class ChoiceDelta:
    """The new text and new tokens of one choice since its previous delta."""

    index: int
    """Index of the choice in the response, from 0."""
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    drafted: int = 0
    """Number of ``tokens`` that are accepted draft tokens. They come first."""
    proposed: int = 0
    """Number of draft tokens that the engine verified in this iteration."""
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    """The text of each token, with True if the token was drafted. Empty unless the request asks for pieces."""
    stopped_by: str | int | None = None
    """The stop string or stop token of the request that ended the choice."""

    def followed_by(self, later: ChoiceDelta) -> ChoiceDelta:
        """Return one delta that has the content of this delta and then the content of ``later``, of the same choice."""
        return ChoiceDelta(
            self.index,
            self.text + later.text,
            self.tokens + later.tokens,
            self.logprobs + later.logprobs,
            later.finish_reason,
            self.drafted + later.drafted,
            self.proposed + later.proposed,
            self.pieces + later.pieces,
            later.stopped_by,
        )


class ChoiceText:
    """A decoder of one choice: turns the token ids of its outputs into text, output by output.

    With ``pieces`` each delta has the text of each of its tokens. The text continues that of the ``prompt`` tokens. ``ends``
    are the end-of-sequence tokens, which never have text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        index: int,
        params: SamplingParams,
        *,
        prompt: Sequence[int],
        ends: Collection[int],
        pieces: bool = False,
    ) -> None:
        self.index = index
        self._ends = ends
        # With stop strings the engine decodes the text itself, because it has to find them.
        self._text_from_engine = bool(params.stop)
        self._decoder = tokenizer.stream(spelled=params.spelled_tokens, prompt=prompt)
        self._has_pieces = pieces
        self.finish_reason: str | None = None
        """Finish reason of the outputs that have arrived, which :meth:`add` may not have decoded yet."""

    def add(self, output: SampleOutput) -> ChoiceDelta:
        """Decode the tokens of ``output`` and return the new text.

        The text of a token that ends inside a character is part of a later delta. The last output flushes the decoder.
        """
        decoder, tokens = self._decoder, output.tokens
        if output.finish_reason == "stop" and tokens and tokens[-1] in self._ends:
            tokens = tokens[:-1]
        pieces: list[str] = []
        if self._has_pieces:
            pieces = [decoder.push(token) for token in tokens]
        elif not self._text_from_engine and tokens:
            pieces = [decoder.push(*tokens)]
        if output.finish_reason is not None and (self._has_pieces or not self._text_from_engine):
            rest = decoder.flush()
            pieces = [*pieces[:-1], pieces[-1] + rest] if pieces else [rest]
        text = (output.text or "") if self._text_from_engine else "".join(pieces)
        delta = ChoiceDelta(
            self.index, text, output.tokens, output.logprobs, output.finish_reason, output.drafted, output.proposed
        )
        delta.stopped_by = output.stopped_by
        if self._has_pieces:
            delta.pieces = [(piece, index < output.drafted) for index, piece in enumerate(pieces) if piece]
        return delta


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], offset: int) -> tuple[dict[str, Any], int]:
    """Return the ``logprobs`` field of a completion, and the text offset after its last token.

    ``offset`` is the offset of the first token in the text of the choice, in characters.
    """
    offsets, tokens = [], []
    for entry in entries:
        offsets.append(offset)
        tokens.append(format_token(tokenizer, entry.token))
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {format_token(tokenizer, token): logprob for token, logprob in (*entry.top, (entry.token, entry.logprob))}
            for entry in entries
        ],
        "text_offset": offsets,
    }, offset


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return the ``logprobs`` field of a choice of a chat completion."""

    def token_entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.bytes_of(token)
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}

    content = [
        {**token_entry(entry.token, entry.logprob), "top_logprobs": [token_entry(token, value) for token, value in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def format_token(tokenizer: Tokenizer, token: int) -> str:
    """Return the token's text as OpenAI's completions show it. A part of a character is shown as its bytes."""
    data = tokenizer.bytes_of(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
