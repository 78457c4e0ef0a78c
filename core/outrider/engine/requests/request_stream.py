"""RequestStream: an iterator over the outputs of one request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from outrider.engine.requests.request import Request, StepOutput


class RequestStream(Iterator[StepOutput]):
    """The outputs of one request, in order, from its separate queue. Other streams, ``generate`` and ``step`` skip them.

    ``next`` raises the error of an iteration. The caller may read on if the engine still works.
    """

    def __init__(
        self,
        request: Request,
        outputs: deque[StepOutput],
        *,
        advance: Callable[[], None],
        close: Callable[[Request], None],
    ) -> None:
        """Create the stream of one request.

        ``advance`` runs one iteration of the engine. ``close`` ends the request if needed; it is called once, after the last
        output, by :meth:`close` or at garbage collection.
        """
        self._request = request
        self._outputs = outputs
        self._advance = advance
        self._close: Callable[[Request], None] | None = close

    @property
    def request_id(self) -> int:
        """The request's id, for :meth:`Engine.abort`."""
        return self._request.id

    def __next__(self) -> StepOutput:
        while self._close is not None and not self._outputs:
            if self._request.finished:
                self.close()
            else:
                self._advance()
        if self._close is None:
            raise StopIteration
        return self._outputs.popleft()

    def close(self) -> None:
        """End the request unless it has ended, and drop its unread outputs. Further calls do nothing."""
        close, self._close = self._close, None
        if close is not None:
            close(self._request)

    def __del__(self) -> None:
        with suppress(Exception):  # no caller could handle the exception
            self.close()
