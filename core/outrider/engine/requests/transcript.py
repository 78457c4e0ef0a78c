"""Transcript: the text of one request's outputs, decoded when it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.model import StreamDecoder


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
        """Add the tokens of an output and return its index."""
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
