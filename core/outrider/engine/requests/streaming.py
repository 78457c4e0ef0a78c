"""One request, read as its tokens come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from outrider.engine.requests.request import Request, StepOutput


class RequestStream(Iterator[StepOutput]):
    """The outputs of one request, from a queue of its own. Other streams, ``generate`` and ``step`` neither take them nor
    change their order.

    ``advance`` runs an iteration of the engine. ``close`` ends the request if it hasn't ended. It's called once: when all
    outputs were read, by :meth:`close`, or when the stream is garbage-collected.

    ``next`` raises the error of an iteration. The stream may be read further if the engine still works.
    """

    def __init__(
        self,
        request: Request,
        outputs: deque[StepOutput],
        *,
        advance: Callable[[], None],
        close: Callable[[Request], None],
    ) -> None:
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
        """End the request unless it has ended. What is unread is dropped. Allowed more than once."""
        close, self._close = self._close, None
        if close is not None:
            close(self._request)

    def __del__(self) -> None:
        with suppress(Exception):  # there is no caller to raise it to
            self.close()
