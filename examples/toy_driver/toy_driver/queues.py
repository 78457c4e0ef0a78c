"""The device: streams are threads, each with a queue of kernels."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

Kernel = Callable[[], object]


class Point:
    """A point in a stream's queue. An event refers to the point of its latest record."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self.seconds = 0.0

    def pass_(self) -> None:
        """Mark the point as passed. Called by the stream's thread."""
        self.seconds = time.perf_counter()
        self._passed.set()

    @property
    def passed(self) -> bool:
        """True if the stream has passed the point."""
        return self._passed.is_set()

    def wait(self) -> None:
        """Block until the stream passes the point."""
        self._passed.wait()


class Failures:
    """Errors of kernels that have not been reported yet. They belong to the device: other streams may have waited for the
    kernel.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: list[Exception] = []

    def add(self, error: Exception) -> None:
        """Store the error of a kernel."""
        with self._lock:
            self._errors.append(error)

    def clear(self) -> bool:
        """Clear the errors. Return True if there were any."""
        with self._lock:
            errors, self._errors = self._errors, []
        return bool(errors)


class StreamState:
    """A queue and its thread. A failed kernel doesn't stop later ones; its error is stored for the next synchronization."""

    def __init__(self, failures: Failures) -> None:
        self.failures = failures
        self.kernels: queue.SimpleQueue[Kernel | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.enqueued = 0
        self.finished = 0
        threading.Thread(target=self._run, name="toy-stream", daemon=True).start()

    def enqueue(self, kernel: Kernel) -> None:
        """Append a kernel to the queue."""
        with self.lock:
            self.enqueued += 1
            self.kernels.put(kernel)

    def point(self) -> Point:
        """Enqueue and return a point after all kernels in the queue."""
        point = Point()
        self.enqueue(point.pass_)
        return point

    def _run(self) -> None:
        with torch.no_grad():
            while (kernel := self.kernels.get()) is not None:
                try:
                    kernel()
                except Exception as error:
                    self.failures.add(error)
                del kernel  # an idle stream must not keep memory alive
                self.finished += 1


class EventState:
    """The latest record of an event, if any, and the capture in which it was recorded, if any."""

    point: Point | None = None
    capture: CaptureState | None = None


class CaptureState:
    """Kernels that one thread has launched on one stream during a capture."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.kernels: list[Kernel] = []


class Handles:
    """Integer handles of objects, as in a C interface."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._objects: dict[int, Any] = {}
        self._lock = threading.Lock()

    def new(self, thing: object) -> int:
        """Return a new handle for an object. Handles are never reused."""
        with self._lock:
            number = next(self._numbers)
            self._objects[number] = thing
            return number

    def find(self, number: int, kind: type) -> Any:
        """Return the object of a handle, or None if it isn't a handle of that type."""
        thing = self._objects.get(number)
        return thing if isinstance(thing, kind) else None

    def drop(self, number: int, kind: type) -> Any:
        """Invalidate a handle. Return its object as `find` does."""
        thing = self.find(number, kind)
        if thing is not None:
            del self._objects[number]
        return thing
