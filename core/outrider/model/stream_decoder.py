"""StreamDecoder: incremental decoding of tokens to text, without partial characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """Decodes one stream of tokens to pieces of text. The pieces and :meth:`flush` together equal the decoding of all tokens.

    A token's text depends on its neighbours: a character may span several tokens, and some tokenizers drop the space before
    the first word. Each step therefore decodes a window of tokens that begins with the last complete piece, and returns only
    text that later tokens cannot change.

    ``decode`` returns the text of tokens. ``continues``, if given, returns True for a token whose text stays open until a
    token of another kind follows. A decoder belongs to one stream and one thread.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], continues: Callable[[int], bool] | None = None) -> None:
        self._decode = decode
        self._continues = continues
        self._context: list[int] = []  # tokens of the last complete piece
        self._pending: list[int] = []  # tokens since
        self._returned = 0  # characters of the window's text that were returned

    def push(self, *tokens: int) -> str:
        """Add tokens and return the text that is now certain, possibly empty. Several tokens at once cost as much as one."""
        self._pending.extend(tokens)
        if self._is_open():
            return ""
        text = self._decode(self._context + self._pending)
        complete = not text.endswith(_REPLACEMENT)
        # An incomplete character decodes to one replacement character, and only the last character can be incomplete.
        certain = text if complete else text[:-1]
        piece = certain[self._returned :]
        if complete and piece:
            # Text without a context isn't certain: the decoding of a piece that is a space may be empty. The next piece
            # still begins at the right character, because both decodings drop the same space.
            self._context, self._pending = self._pending, []
            self._returned = len(self._decode(self._context))
        else:
            self._returned += len(piece)
        return piece

    def flush(self) -> str:
        """Return the remaining text, an incomplete character included, and end the stream."""
        piece = self._decode(self._context + self._pending)[self._returned :]
        self._context, self._pending, self._returned = [], [], 0
        return piece

    def _is_open(self) -> bool:
        """Return True if the last token that has any text leaves a run of bytes open."""
        if self._continues is None:
            return False
        for token in reversed(self._pending):
            if self._continues(token):
                return True
            if self._decode([token]):
                return False
        return False
