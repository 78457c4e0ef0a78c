"""Outputs of requests, by receiver: each stream has a queue of its own, the rest waits for the next step."""

from __future__ import annotations

from collections import deque

from outrider.engine.requests.request import StepOutput


class Outbox:
    """A request that is read alone (by a stream or ``generate``) has a queue of its own. Outputs of all others come from
    :meth:`take`, in order.
    """

    def __init__(self) -> None:
        self._rest: list[StepOutput] = []
        self._queues: dict[int, deque[StepOutput]] = {}

    @property
    def waiting(self) -> bool:
        """Whether :meth:`take` would return anything."""
        return bool(self._rest)

    def open(self, request_id: int) -> deque[StepOutput]:
        """Give the request a queue of its own, until :meth:`close` or :meth:`release`; returns the queue."""
        return self._queues.setdefault(request_id, deque())

    def close(self, request_id: int) -> None:
        """Drop the request's queue and its contents. Allowed for a request without one."""
        self._queues.pop(request_id, None)

    def put(self, output: StepOutput) -> None:
        """Add an output to the queue of its receiver."""
        queue = self._queues.get(output.request_id)
        if queue is None:
            self._rest.append(output)
        else:
            queue.append(output)

    def take(self) -> list[StepOutput]:
        """Return and remove the outputs of requests without a queue."""
        taken, self._rest = self._rest, []
        return taken

    def release(self, request_id: int) -> None:
        """Drop the request's queue, but keep its contents: :meth:`take` returns them."""
        self._rest.extend(self._queues.pop(request_id, ()))
