"""ThreadsBackend: the backend interface, implemented with worker threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from outrider.device import (
    Backend,
    Capabilities,
    CaptureContext,
    DeviceFault,
    Event,
    Flag,
    Graph,
    GraphCallable,
    GraphPool,
    KernelSet,
    MemoryInfo,
    SpeculativeSync,
    Stream,
    StreamOrderError,
)
from outrider_threads.queueing import Queueing
from outrider_threads.worker import Failures, Mark, Task, Worker

CAPABILITIES = Capabilities(
    asynchronous=True,
    concurrent_streams=True,
    event_timing=True,
    flags=True,
    captures_graphs=True,
    forks_in_capture=True,  # branches run in the order in which they were captured
    perturbs_timing=True,
    dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
)


class ThreadStream(Stream):
    """A stream whose work runs on one worker."""

    def __init__(self, backend: ThreadsBackend, name: str) -> None:
        super().__init__(backend, name)
        self._backend = backend
        self.worker = Worker(name, backend.failures)

    @property
    def native(self) -> Any:
        """The worker that runs the stream's tasks."""
        return self.worker

    def put(self, task: Task) -> None:
        """Enqueue a task, or append it to the graph that this thread captures."""
        program = self._backend.program
        if program is None:
            self.worker.put(task)
        else:
            program.append(task)

    def _record(self, event: Event) -> None:
        if self._backend.program is None:  # a capture preserves the order of calls, so it needs no marks
            cast(ThreadEvent, event).mark = self.worker.mark()

    def _wait(self, event: Event) -> None:
        if self._backend.program is None:
            self.worker.put(cast(ThreadEvent, event).mark.wait)

    def _synchronize(self) -> None:
        self.worker.mark().wait()
        self._backend.raise_failed(f"stream {self.name!r}")

    def _query(self) -> bool:
        if not self.worker.idle:
            return False
        self._backend.raise_failed(f"stream {self.name!r}")
        return True


class ThreadEvent(Event):
    """An event that holds the mark of its latest record. A queued wait holds the mark itself, so it keeps its generation."""

    mark: Mark

    def _query(self) -> bool:
        if not self.mark.reached:
            return False
        cast(ThreadsBackend, self.backend).raise_failed(f"event {self.name!r}")
        return True

    def _synchronize(self) -> None:
        self.mark.wait()
        cast(ThreadsBackend, self.backend).raise_failed(f"event {self.name!r}")

    def _elapsed_ms(self, end: Event) -> float:
        return (cast(ThreadEvent, end).mark.time - self.mark.time) * 1e3


class ThreadFlag(Flag):
    """A flag of the threading module that workers set and clear."""

    def __init__(self, backend: Backend, name: str) -> None:
        super().__init__(backend, name)
        self._flag = threading.Event()

    def _set(self, stream: Stream) -> None:
        cast(ThreadStream, stream).put(self._flag.set)

    def _wait(self, stream: Stream) -> None:
        cast(ThreadStream, stream).put(self._flag.wait)

    def _reset(self, stream: Stream) -> None:
        cast(ThreadStream, stream).put(self._flag.clear)


class ThreadGraph(Graph):
    """The tasks of a capture. Their results were allocated during the capture, so a replay fills the same memory."""

    program: list[Task]

    def _replay(self, stream: Stream) -> None:
        cast(ThreadStream, stream).put(self._run)

    def _run(self) -> None:
        for task in self.program:
            task()


class ThreadsBackend(Backend):
    """A device whose streams are threads of the host."""

    def __init__(self) -> None:
        super().__init__(
            "threads",
            torch.device("cpu"),
            capabilities=CAPABILITIES,
            kernels=KernelSet(),  # the torch references; each operator is one task
            speculative_sync=SpeculativeSync,  # the default policy
        )
        self._thread = threading.local()
        self.failures = Failures()

    # -- errors -------------------------------------------------------------------------------------------------------

    def raise_failed(self, waiting_for: str) -> None:
        """Raise the first error since the last call, once."""
        error = self.failures.take()
        if error is not None:
            raise DeviceFault(f"work before {waiting_for} of {self.label} failed: {error}") from error

    def _provoke_fault(self, stream: Stream) -> None:
        def fail() -> None:
            raise RuntimeError("a fault was provoked")

        cast(ThreadStream, stream).put(fail)

    # -- placement ----------------------------------------------------------------------------------------------------

    @property
    def program(self) -> list[Task] | None:
        """The tasks that the calling thread captures, or None."""
        return getattr(self._thread, "program", None)

    @contextmanager
    def _on(self, stream: Stream) -> Generator[None]:
        before: ThreadStream | None = getattr(self._thread, "stream", None)
        self._thread.stream = stream
        try:
            if before is not None:  # the outer scope's dispatch mode is active and looks up the current stream
                yield
            else:
                with Queueing(lambda task: self._thread.stream.put(task), self._synchronize_current):
                    yield
        finally:
            self._thread.stream = before

    def _synchronize_current(self) -> None:
        if self.program is not None:
            raise StreamOrderError("a value was read on the host during a capture: nothing has run yet")
        self._thread.stream._synchronize()

    def _create_stream(self, name: str, priority: int) -> Stream:
        return ThreadStream(self, name)

    def _create_event(self, name: str, timing: bool) -> Event:
        return ThreadEvent(self, name, timing)

    def _create_flag(self, name: str) -> Flag:
        return ThreadFlag(self, name)

    def _synchronize(self) -> None:
        for mark in [cast(ThreadStream, stream).worker.mark() for stream in self.streams]:
            mark.wait()
        self.raise_failed("the end of all streams")

    def _delay(self, stream: Stream, cycles: int) -> None:
        cast(ThreadStream, stream).put(lambda: time.sleep(cycles / 1e9))

    # -- memory -------------------------------------------------------------------------------------------------------

    def _empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return True  # the device is the host and can access all memory

    def memory_info(self) -> MemoryInfo:
        """Return zeros, because the device declares no limit."""
        return MemoryInfo(total=0, free=0, allocated=0)

    # -- graphs -------------------------------------------------------------------------------------------------------

    def _capture(
        self, name: str, fn: GraphCallable, context: CaptureContext, stream: Stream, pool: GraphPool | None
    ) -> Graph:
        graph = ThreadGraph(self, name, context)
        graph.program = self._thread.program = []
        try:
            with self._on(stream), self.capturing(graph, stream):
                fn(context)
        finally:
            self._thread.program = None
        return graph
