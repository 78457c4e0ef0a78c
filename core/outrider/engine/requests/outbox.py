"""New tokens on their way to whoever asked for them: each stream has a queue of its own, the rest waits for the next step."""

from __future__ import annotations

from collections import deque

from outrider.engine.requests.request import StepOutput


class Outbox:
    """Outputs by receiver. A request that somebody reads alone (a stream, ``generate``) has a queue of its own; what others
    produce comes out of :meth:`take`, in order.
    """

    def __init__(self) -> None:
        self._rest: list[StepOutput] = []
        self._queues: dict[int, deque[StepOutput]] = {}

    @property
    def waiting(self) -> bool:
        """Whether :meth:`take` has anything to give."""
        return bool(self._rest)

    def open(self, request_id: int) -> deque[StepOutput]:
        """The request's outputs go into the queue that this returns, from now on until :meth:`close`."""
        return self._queues.setdefault(request_id, deque())

    def close(self, request_id: int) -> None:
        """Nobody reads the request's queue any more: it's dropped with what it holds. Allowed for a request without one."""
        self._queues.pop(request_id, None)

    def put(self, output: StepOutput) -> None:
        """Hand an output on."""
        queue = self._queues.get(output.request_id)
        if queue is None:
            self._rest.append(output)
        else:
            queue.append(output)

    def take(self) -> list[StepOutput]:
        """Everything that has no queue of its own, once."""
        taken, self._rest = self._rest, []
        return taken

    def release(self, request_id: int) -> None:
        """Nobody reads the request's queue any more, but what it holds isn't lost: it comes out of :meth:`take`."""
        self._rest.extend(self._queues.pop(request_id, ()))
