"""A stream: a thread that takes tasks from a queue, one after the other."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable

import torch

Task = Callable[[], object]


class Mark:
    """A point in a worker's order: reached once, with the time at which it was. One generation of an event."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.time = 0.0

    def reach(self) -> None:
        """Say so; called by the worker."""
        self.time = time.perf_counter()
        self._reached.set()

    def wait(self) -> None:
        """Block until it's reached."""
        self._reached.wait()

    @property
    def reached(self) -> bool:
        """Whether it is."""
        return self._reached.is_set()


class Failures:
    """Errors of a device's tasks that nobody has been told of.

    They belong to the device, not to a stream: what failed may have come to whoever waits by way of other streams.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: list[Exception] = []

    def add(self, error: Exception) -> None:
        """Called by a worker."""
        with self._lock:
            self._errors.append(error)

    def take(self) -> Exception | None:
        """The first of them; all are told with that."""
        with self._lock:
            errors, self._errors = self._errors, []
        return errors[0] if errors else None


class _State:
    """What a worker and its thread share."""

    def __init__(self, failures: Failures) -> None:
        self.tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.failures = failures
        self.finished = 0


class Worker:
    """The queue and its thread. Tasks keep what they use alive until they have run.

    A task that fails doesn't stop the ones after it: its error is kept for the next synchronisation.
    """

    def __init__(self, name: str, failures: Failures) -> None:
        self._state = _State(failures)
        self._lock = threading.Lock()
        self._enqueued = 0
        threading.Thread(target=_run, args=(self._state,), name=name, daemon=True).start()
        # The thread knows the state, not the worker, so it ends when nobody can give it work any more.
        weakref.finalize(self, self._state.tasks.put, None)

    def put(self, task: Task) -> None:
        """Enqueue a task."""
        with self._lock:
            self._enqueued += 1
            self._state.tasks.put(task)

    def mark(self) -> Mark:
        """Enqueue a new mark: it's reached when everything before it has run."""
        mark = Mark()
        self.put(mark.reach)
        return mark

    @property
    def idle(self) -> bool:
        """Whether everything enqueued so far has run."""
        return self._state.finished == self._enqueued


def _run(state: _State) -> None:
    with torch.no_grad():  # a thread starts with gradients on, whatever its maker had
        while (task := state.tasks.get()) is not None:
            try:
                task()
            except Exception as error:
                state.failures.add(error)
            del task  # or an idle thread would keep the last task's tensors alive
            state.finished += 1
