"""One request, read as its tokens come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from outrider.engine.requests.request import Request, StepOutput


class RequestStream(Iterator[StepOutput]):
    """The outputs of one request, from a queue of its own: other streams, ``generate`` and ``step`` between two outputs
    neither take them nor change their order.

    ``advance`` runs an iteration of the engine. ``close`` ends the request where it goes on, and is called once: when the
    request has ended and its outputs were read, by :meth:`close`, or when nobody refers to the stream any more.

    An error of an iteration comes out of ``next``; where the engine lives on, the stream may be read further.
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
        with suppress(Exception):  # nobody is there to hear of it
            self.close()
