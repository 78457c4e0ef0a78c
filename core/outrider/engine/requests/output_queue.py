"""The output queue: each streamed request has its own queue, all other requests share one."""

from __future__ import annotations

from collections import deque

from outrider.engine.requests.request import StepOutput


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
