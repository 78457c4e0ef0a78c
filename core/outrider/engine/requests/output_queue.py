"""The outputs of requests for their receivers: queues, and iterators over them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from outrider.engine.requests.request import Request, StepOutput


class OutputQueue:
    """Queues of step outputs that no caller has received yet.

    A request that a stream or ``generate`` reads has a separate queue. All other requests use the shared queue.
    """

    def __init__(self) -> None:
        self._shared: list[StepOutput] = []
        self._queues: dict[int, deque[StepOutput]] = {}

    @property
    def has_outputs(self) -> bool:
        """Return True if the shared queue has outputs."""
        return bool(self._shared)

    def open(self, request_id: int) -> deque[StepOutput]:
        """Return the request's separate queue, created if needed. It lasts until :meth:`close` or :meth:`release`."""
        return self._queues.setdefault(request_id, deque())

    def close(self, request_id: int) -> None:
        """Drop the request's separate queue and its contents. Does nothing for a request without one."""
        self._queues.pop(request_id, None)

    def put(self, output: StepOutput) -> None:
        """Append an output to the separate queue of its request, or else to the shared queue."""
        queue = self._queues.get(output.request_id)
        if queue is None:
            self._shared.append(output)
        else:
            queue.append(output)

    def pop_outputs(self) -> list[StepOutput]:
        """Return and remove all outputs of the shared queue, in order."""
        outputs, self._shared = self._shared, []
        return outputs

    def release(self, request_id: int) -> None:
        """Move the outputs of the request's separate queue to the shared queue and drop the separate queue."""
        self._shared.extend(self._queues.pop(request_id, ()))


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
