"""Texts of requests: the search for stop strings, and the text of a whole output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import AnyStr

from outrider.engine.requests.sampling import SamplingParams
from outrider.model import StreamDecoder, Tokenizer


class StopText:
    """The text of one request, which ends before the first stop string.

    The end of the text is held back while it may be the start of a stop string. A character that several tokens encode
    becomes part of the text with its last token.
    """

    def __init__(self, decoder: StreamDecoder, stops: Sequence[str], *, overlook: int = 0) -> None:
        """Create the search for stop strings. No stop string may begin in the text of the first ``overlook`` tokens."""
        self._decoder = decoder
        self._stops = tuple(stops)
        self._overlook = overlook
        self._num_tokens = 0
        self._held = ""
        self._ready = ""
        self.matched: str | None = None
        """The stop string that ended the text; None while there is none."""

    def push(self, token: int) -> bool:
        """Add a token and return True if a stop string is complete. The text after the stop string is dropped."""
        self._num_tokens += 1
        self._add(self._decoder.push(token))
        return self.matched is not None

    def finish(self) -> bool:
        """Release the text that is held back, at the end of the request. Return True if the released text contains a stop
        string.
        """
        if self.matched is None:
            self._add(self._decoder.flush())
            if self.matched is None:
                self._release(len(self._held))
        return self.matched is not None

    def pop_certain_text(self) -> str:
        """Return the text that became certain since the last call: no stop string can contain it any more."""
        text, self._ready = self._ready, ""
        return text

    def _add(self, piece: str) -> None:
        self._held += piece
        if self._num_tokens <= self._overlook:
            self._release(len(self._held))
            return
        found = [(start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            start, self.matched = min(found)
            self._release(start)
            self._held = ""
        else:
            self._release(len(self._held) - partial_match_length(self._held, self._stops))

    def _release(self, count: int) -> None:
        self._ready, self._held = self._ready + self._held[:count], self._held[count:]


def partial_match_length(text: AnyStr, literals: Sequence[AnyStr]) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of one of ``literals``.

    The text contains none of the literals as a whole.
    """
    longest = min(max(map(len, literals), default=1) - 1, len(text))
    suffixes = (text[len(text) - size :] for size in range(longest, 0, -1))
    return next((len(suffix) for suffix in suffixes if any(literal.startswith(suffix) for literal in literals)), 0)


def watch_stop_strings(
    tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int], output: Sequence[int] = ()
) -> StopText:
    """Return a :class:`StopText` for the stop strings of ``params`` that has read the request's ``output`` so far."""
    stop_text = StopText(
        tokenizer.stream(spelled=params.spelled_tokens, prompt=prompt), params.stop, overlook=params.min_tokens
    )
    for token in output:
        stop_text.push(token)
    return stop_text


class Transcript:
    """The tokens of a request's outputs in order, and their text.

    The engine appends in its thread without decoding. One reader, in any thread, decodes: text costs only what is read.
    """

    def __init__(self, make_decoder: Callable[[], StreamDecoder]) -> None:
        self._make_decoder = make_decoder
        self._decoder: StreamDecoder | None = None
        self._outputs: list[tuple[Sequence[int], bool]] = []
        self._texts: list[str] = []

    def append(self, tokens: Sequence[int], *, is_last: bool) -> int:
        """Append the tokens of one output and return the index of the output. ``is_last`` marks the request's last output."""
        self._outputs.append((tokens, is_last))
        return len(self._outputs) - 1

    def read_text(self, index: int) -> str:
        """Return the text that became certain with the output ``index``; all that remains with the last one."""
        decoder = self._decoder = self._decoder or self._make_decoder()
        while len(self._texts) <= index:
            tokens, is_last = self._outputs[len(self._texts)]
            text = decoder.push(*tokens) if tokens else ""
            self._texts.append(text + decoder.flush() if is_last else text)
        return self._texts[index]

    def read_all(self) -> str:
        """Return the text of all outputs so far."""
        return "".join(self.read_text(index) for index in range(len(self._outputs)))
