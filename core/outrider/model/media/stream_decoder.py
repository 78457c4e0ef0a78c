"""StreamDecoder: incremental decoding of tokens to text, without partial characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """Decodes one stream of tokens to pieces of text. The pieces and :meth:`flush` together equal the decoding of all tokens.

    ``context`` are tokens before the stream: the pieces are then the text that the stream adds to theirs.

    A token's text depends on its neighbours: a character may span several tokens, and some tokenizers drop the space before
    the first word. Each step therefore decodes a window of tokens that begins with the last complete piece, and returns only
    text that later tokens cannot change.

    ``decode`` returns the text of tokens. ``continues``, if given, returns True for a token whose text stays open until a
    token of another kind follows. A decoder belongs to one stream and one thread.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        continues: Callable[[int], bool] | None = None,
        context: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._continues = continues
        self._lead = decode(context) if context else ""  # text of the given context, until a piece was returned
        self._context = list(context)  # then the tokens of the last complete piece
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
        start = self._start_of_new(text)
        piece = certain[start:]
        if piece:
            self._lead, self._returned = "", start + len(piece)
        if complete and piece:
            # Text without a context isn't certain: the decoding of a piece that is a space may be empty. The next piece
            # still begins at the right character, because both decodings drop the same space.
            self._context, self._pending = self._pending, []
            self._returned = len(self._decode(self._context))
        return piece

    def flush(self) -> str:
        """Return the remaining text, an incomplete character included, and end the stream."""
        text = self._decode(self._context + self._pending)
        piece = text[self._start_of_new(text) :]
        self._lead = ""
        self._context, self._pending, self._returned = [], [], 0
        return piece

    def _start_of_new(self, text: str) -> int:
        """Return the number of characters of the window's ``text`` that were returned or belong to the given context.

        The first tokens may complete a character that the context leaves incomplete.
        """
        if not self._lead:
            return self._returned
        differing = (index for index, (old, new) in enumerate(zip(self._lead, text, strict=False)) if old != new)
        return next(differing, min(len(self._lead), len(text)))

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
