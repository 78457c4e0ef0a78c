"""Worker: a stream, which is a thread that runs tasks from a queue in order."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable

import torch

Task = Callable[[], object]


class Mark:
    """A point in a worker's queue that is reached once, with its time. An event has one mark per generation."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.time = 0.0

    def reach(self) -> None:
        """Mark the point as reached. Called by the worker."""
        self.time = time.perf_counter()
        self._reached.set()

    def wait(self) -> None:
        """Block until the worker reaches the mark."""
        self._reached.wait()

    @property
    def reached(self) -> bool:
        """True if the worker has reached the mark."""
        return self._reached.is_set()


class Failures:
    """Errors of a device's tasks that have not been raised yet.

    They belong to the device, not to a stream, because a failed result may reach the waiting caller through other streams.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: list[Exception] = []

    def add(self, error: Exception) -> None:
        """Store an error. Called by a worker."""
        with self._lock:
            self._errors.append(error)

    def take(self) -> Exception | None:
        """Return the first stored error, or None, and clear all errors."""
        with self._lock:
            errors, self._errors = self._errors, []
        return errors[0] if errors else None


class _State:
    """State that a worker and its thread share."""

    def __init__(self, failures: Failures) -> None:
        self.tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.failures = failures
        self.finished = 0


class Worker:
    """A queue and its thread. Tasks keep their operands alive until they have run.

    A failed task doesn't stop later tasks. Its error is stored for the next synchronization.
    """

    def __init__(self, name: str, failures: Failures) -> None:
        self._state = _State(failures)
        self._lock = threading.Lock()
        self._enqueued = 0
        threading.Thread(target=_run, args=(self._state,), name=name, daemon=True).start()
        # The thread refers to the state and not to the worker, so it ends when the worker is collected.
        weakref.finalize(self, self._state.tasks.put, None)

    def put(self, task: Task) -> None:
        """Append a task to the queue."""
        with self._lock:
            self._enqueued += 1
            self._state.tasks.put(task)

    def mark(self) -> Mark:
        """Enqueue and return a new mark, which is reached when all earlier tasks have run."""
        mark = Mark()
        self.put(mark.reach)
        return mark

    @property
    def idle(self) -> bool:
        """True if all enqueued tasks have run."""
        return self._state.finished == self._enqueued


def _run(state: _State) -> None:
    with torch.no_grad():  # gradients are enabled in every new thread
        while (task := state.tasks.get()) is not None:
            try:
                task()
            except Exception as error:
                state.failures.add(error)
            del task  # otherwise an idle thread would keep the last task's tensors alive
            state.finished += 1
