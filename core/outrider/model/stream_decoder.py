"""Text as it comes, a token at a time, never half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """Turns tokens into pieces of text whose concatenation, with :meth:`flush`, is the decoding of all the tokens.

    A token's text depends on its neighbours: a character may be spread over several tokens, and some tokenizers drop
    the space in front of the first word. So a window of tokens is decoded at each step, which begins with the last
    piece that was complete, and only what is sure not to change is given out.

    ``decode`` gives the text of tokens; ``continues``, where there are such tokens, says that a token's text is open
    until a token of another kind follows. One stream, one thread.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], continues: Callable[[int], bool] | None = None) -> None:
        self._decode = decode
        self._continues = continues
        self._context: list[int] = []  # tokens of the last complete piece
        self._pending: list[int] = []  # tokens since
        self._given = 0  # characters of the window's text that were given out

    def push(self, *tokens: int) -> str:
        """Add tokens; returns the text that is certain now, which may be empty. Several at once take as long as one."""
        self._pending.extend(tokens)
        if self._is_open():
            return ""
        text = self._decode(self._context + self._pending)
        complete = not text.endswith(_REPLACEMENT)
        # A character that isn't complete yet decodes to one replacement character, and only the last one can be it.
        certain = text if complete else text[:-1]
        piece = certain[self._given :]
        if complete and piece:
            # Text without a context isn't certain: where this piece is a space, its decoding alone may be empty. What
            # follows is still cut at the right place, since both decodings drop the same space.
            self._context, self._pending = self._pending, []
            self._given = len(self._decode(self._context))
        else:
            self._given += len(piece)
        return piece

    def flush(self) -> str:
        """The rest of the text, an incomplete character included. The stream is over then."""
        piece = self._decode(self._context + self._pending)[self._given :]
        self._context, self._pending, self._given = [], [], 0
        return piece

    def _is_open(self) -> bool:
        """Whether the last token that has any text leaves a run of bytes open."""
        if self._continues is None:
            return False
        for token in reversed(self._pending):
            if self._continues(token):
                return True
            if self._decode([token]):
                return False
        return False
