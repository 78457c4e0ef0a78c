"""The device itself: streams are threads, each with a queue of kernels."""

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
    """A place in a stream's order. An event points at the latest one that was recorded."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self.seconds = 0.0

    def pass_(self) -> None:
        """Called by the stream when it gets here."""
        self.seconds = time.perf_counter()
        self._passed.set()

    @property
    def passed(self) -> bool:
        """Whether it got here."""
        return self._passed.is_set()

    def wait(self) -> None:
        """Block until it does."""
        self._passed.wait()


class Failures:
    """Errors of kernels that nobody has been told of. They are the device's: other streams may have waited for the kernel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: list[Exception] = []

    def add(self, error: Exception) -> None:
        """A kernel failed."""
        with self._lock:
            self._errors.append(error)

    def taken(self) -> bool:
        """Whether there are any; they are forgotten."""
        with self._lock:
            errors, self._errors = self._errors, []
        return bool(errors)


class StreamState:
    """The queue and its thread. A kernel that fails stops nothing: its error is kept for whoever waits next."""

    def __init__(self, failures: Failures) -> None:
        self.failures = failures
        self.kernels: queue.SimpleQueue[Kernel | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.enqueued = 0
        self.finished = 0
        threading.Thread(target=self._run, name="toy-stream", daemon=True).start()

    def enqueue(self, kernel: Kernel) -> None:
        """At the end of the queue."""
        with self.lock:
            self.enqueued += 1
            self.kernels.put(kernel)

    def point(self) -> Point:
        """A point behind everything that is in the queue."""
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
                del kernel  # an idle stream holds nobody's memory
                self.finished += 1


class EventState:
    """The latest record, if there is one, and the capture in which it was made, if it was made in one."""

    point: Point | None = None
    capture: CaptureState | None = None


class CaptureState:
    """Kernels that are noted instead of run, on one stream, by one thread."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.kernels: list[Kernel] = []


class Handles:
    """Numbers for objects, as a C interface has them."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._objects: dict[int, Any] = {}
        self._lock = threading.Lock()

    def new(self, thing: object) -> int:
        """A number that no other object had."""
        with self._lock:
            number = next(self._numbers)
            self._objects[number] = thing
            return number

    def find(self, number: int, kind: type) -> Any:
        """The object, or None where the number isn't that of one of this kind."""
        thing = self._objects.get(number)
        return thing if isinstance(thing, kind) else None

    def drop(self, number: int, kind: type) -> Any:
        """Forget the number; returns the object as `find` does."""
        thing = self.find(number, kind)
        if thing is not None:
            del self._objects[number]
        return thing
