"""OpenCLBackend: the methods of the backend interface as calls of an OpenCL runtime."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from typing import Any, cast

import pyopencl as cl
import torch
from torch import Tensor

from outrider.device import (
    Backend,
    Capabilities,
    CapabilityError,
    CaptureContext,
    DeviceError,
    DeviceFault,
    DeviceLost,
    Event,
    Flag,
    Graph,
    GraphCallable,
    GraphPool,
    MemoryInfo,
    OutOfDeviceMemory,
    SpeculativeSync,
    Stream,
)
from outrider_opencl.command_buffers import CommandBuffer, CommandBufferFunctions, CommandBufferGraph, Recorder
from outrider_opencl.driver import COMPLETE, OpenCLDevice, Program, Queue, SharedMemory, has_run
from outrider_opencl.kernels import LAUNCHES, OpenCLKernels
from outrider_opencl.queueing import Queueing, ReadsOutsideOperators

CAPABILITIES = Capabilities(
    asynchronous=True,
    concurrent_streams=True,
    event_timing=True,
    flags=True,
    perturbs_timing=True,
    dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
)
WITH_COMMAND_BUFFERS = replace(CAPABILITIES, flags=False, captures_graphs=True, captures_in_part=True, forks_in_capture=True)
"""Declared capabilities in the mode with graphs. A command buffer can't hold flags, which native kernels set, so this mode
has no flags.
"""

_MEMORY_STATUSES = (cl.status_code.OUT_OF_RESOURCES, cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE)


class OpenCLStream(Stream):
    """A stream whose commands go to one queue."""

    def __init__(self, backend: OpenCLBackend, name: str) -> None:
        super().__init__(backend, name)
        self._backend = backend
        self.queue = Queue(backend.opencl)

    @property
    def native(self) -> cl.CommandQueue:
        """Return pyopencl's queue. In out-of-order mode all streams share it."""
        return self.queue.native

    def run_on_host(self, name: str, task: Callable[[], object]) -> None:
        """Enqueue the operator ``name``, computed by ``task`` on the host, as a native kernel of this stream."""
        del name
        self.queue.run_on_host(task)

    def copy(self, destination: Tensor, source: Tensor) -> bool:
        """Enqueue a copy by the OpenCL runtime. Returns False, without a copy, unless both tensors have equal shapes and
        dtypes and are contiguous in shared memory.
        """
        owns = self._backend.memory.owns
        alike = destination.shape == source.shape and destination.dtype == source.dtype
        dense = alike and destination.is_contiguous() and source.is_contiguous()
        if not dense or not owns(destination) or not owns(source) or _overlap(destination, source):
            return False
        if destination.numel():
            self.queue.copy(destination.data_ptr(), source.data_ptr(), destination.nbytes, (destination, source))
        return True

    def run_kernel(self, name: str, operands: tuple[Any, ...]) -> None:
        """Enqueue the OpenCL kernel of the operator ``name``, whose ``operands`` end with the new results."""
        launch = LAUNCHES[name](*operands)
        if launch.size:
            kernel = self._backend.program.shared_kernel(name)
            self.queue.run_kernel(kernel, (launch.size,), launch.arguments, operands)

    def run_elementwise(self, name: str, result: Tensor, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Return False: torch computes elementwise operators outside of captures."""
        del name, result, arguments, named
        return False

    def allocate(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor with undefined contents in memory that host and device share."""
        return self._backend.memory.allocate(shape, strides, dtype)

    def synchronize_for_value(self) -> None:
        """Block the host until this stream is idle, because the host reads a value of a tensor."""
        self._synchronize()

    def _record(self, event: Event) -> None:
        if self._backend.recorder is None:  # a command buffer keeps the order of the calls, so it needs no marks
            cast(OpenCLEvent, event).mark = self.queue.mark()

    def _wait(self, event: Event) -> None:
        if self._backend.recorder is None:
            self.queue.wait(cast(OpenCLEvent, event).mark)
        elif event.generation:
            raise CapabilityError(
                f"a command buffer of {self._backend.label} can't wait for event {event.name!r} outside of it"
            )

    def _synchronize(self) -> None:
        self.queue.mark().wait()
        self._backend.raise_failed(f"stream {self.name!r}")

    def _query(self) -> bool:
        if not self.queue.is_idle:
            return False
        self._backend.raise_failed(f"stream {self.name!r}")
        return True


class OpenCLEvent(Event):
    """An event that holds the marker of its latest record. A wait holds the marker itself, so it keeps its generation."""

    mark: cl.Event

    def _query(self) -> bool:
        if not has_run(self.mark):
            return False
        cast(OpenCLBackend, self.backend).raise_failed(f"event {self.name!r}")
        return True

    def _synchronize(self) -> None:
        self.mark.wait()
        cast(OpenCLBackend, self.backend).raise_failed(f"event {self.name!r}")

    def _elapsed_ms(self, end: Event) -> float:
        return float(cast(OpenCLEvent, end).mark.profile.end - self.mark.profile.end) / 1e6


class OpenCLFlag(Flag):
    """A resettable flag made of user events, which are set once: each wait has an event of its own.

    A native kernel on the waiting queue completes the event at once if the flag is up. Otherwise the next set completes it.
    """

    def __init__(self, backend: OpenCLBackend, name: str) -> None:
        super().__init__(backend, name)
        self._opencl = backend.opencl
        self._lock = threading.Lock()
        self._is_up = False
        self._waiters: list[cl.UserEvent] = []

    def _set(self, stream: Stream) -> None:
        cast(OpenCLStream, stream).queue.run_on_host(self._raise_up)

    def _wait(self, stream: Stream) -> None:
        waiter, queue = cl.UserEvent(self._opencl.context), cast(OpenCLStream, stream).queue
        queue.run_on_host(lambda: self._arrive(waiter))
        queue.wait(waiter)

    def _reset(self, stream: Stream) -> None:
        cast(OpenCLStream, stream).queue.run_on_host(self._lower)

    def _arrive(self, waiter: cl.UserEvent) -> None:
        """Complete ``waiter`` if the flag is up, else at the next set."""
        with self._lock:
            if not self._is_up:
                self._waiters.append(waiter)
                return
        waiter.set_status(COMPLETE)

    def _raise_up(self) -> None:
        with self._lock:
            self._is_up = True
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.set_status(COMPLETE)

    def _lower(self) -> None:
        with self._lock:
            self._is_up = False


class OpenCLBackend(Backend):
    """The backend of one OpenCL device that shares memory with the host."""

    def __init__(self, ordinal: int = 0, *, out_of_order: bool = False, command_buffers: bool = False) -> None:
        self.opencl = OpenCLDevice(ordinal, out_of_order=out_of_order)
        self.memory = SharedMemory(self.opencl)
        self.program = Program(self.opencl, files(__package__).joinpath("bookkeeping.cl").read_text())
        self._command_buffers = CommandBufferFunctions(self.opencl) if command_buffers else None
        self._generated: dict[str, Program] = {}
        self._thread = threading.local()
        super().__init__(
            "opencl",
            torch.device("cpu"),  # the name that torch gives to memory that the host addresses
            capabilities=WITH_COMMAND_BUFFERS if command_buffers else CAPABILITIES,
            kernels=OpenCLKernels,
            speculative_sync=SpeculativeSync,
        )

    def versions(self) -> Mapping[str, str]:
        """Return the versions of torch, of the platform and of the device."""
        return {**super().versions(), **self.opencl.versions}

    # -- errors -------------------------------------------------------------------------------------------------------

    def raise_failed(self, waiting_for: str) -> None:
        """Raise the first error of a native kernel since the last call, once."""
        error = self.opencl.take_first_failure()
        if error is not None:
            raise DeviceFault(f"work before {waiting_for} of {self.label} failed: {error}") from error

    def translate_error(self, error: Exception, doing: str) -> DeviceError | None:
        """Return the typed error for an error of pyopencl, or None for another error."""
        if not isinstance(error, cl.Error):
            return None
        code = getattr(error, "code", None)
        if code in _MEMORY_STATUSES:
            return OutOfDeviceMemory(f"{self.label} has no memory left while {doing}: {error}")
        lost = code == cl.status_code.DEVICE_NOT_AVAILABLE
        return (DeviceLost if lost else DeviceFault)(f"{self.label} failed while {doing}: {error}")

    def _provoke_fault(self, stream: Stream) -> None:
        def fail() -> None:
            raise RuntimeError("a fault was provoked")

        if self.recorder is not None:
            raise CapabilityError(f"{self.label} records no operation that fails: native kernels can't be recorded")
        cast(OpenCLStream, stream).run_on_host("provoke_fault", fail)

    # -- streams and placement ----------------------------------------------------------------------------------------

    @contextmanager
    def _on(self, stream: Stream) -> Generator[None]:
        before: Stream | None = getattr(self._thread, "stream", None)
        self._thread.stream = stream
        try:
            if before is not None:  # the outer scope's dispatch mode is active and asks for the current stream
                yield
            else:
                with ReadsOutsideOperators(self._current_launcher), Queueing(self._current_launcher):
                    yield
        finally:
            self._thread.stream = before

    def _current_launcher(self) -> OpenCLStream | Recorder:
        return self.recorder or cast(OpenCLStream, self._thread.stream)

    def _create_stream(self, name: str, priority: int) -> Stream:
        del priority  # not declared, so always 0
        return OpenCLStream(self, name)

    def _create_event(self, name: str, timing: bool) -> Event:
        return OpenCLEvent(self, name, timing)

    def _create_flag(self, name: str) -> Flag:
        if self._command_buffers is not None:
            raise CapabilityError(
                f"{self.label} has no flags with graphs=command-buffers, which can't record them ({name!r})"
            )
        return OpenCLFlag(self, name)

    def _synchronize(self) -> None:
        for mark in [cast(OpenCLStream, stream).queue.mark() for stream in self.streams]:
            mark.wait()
        self.raise_failed("the end of all streams")

    def _delay(self, stream: Stream, cycles: int) -> None:
        if self.recorder is not None:
            self.recorder.spin(cycles)
            return
        end, queue = cl.UserEvent(self.opencl.context), cast(OpenCLStream, stream).queue
        queue.run_on_host(threading.Timer(cycles / 1e9, lambda: end.set_status(COMPLETE)).start)
        queue.wait(end)  # a sleeping native kernel would occupy one of the runtime's few threads

    # -- memory -------------------------------------------------------------------------------------------------------

    def _empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.memory.allocate_contiguous(shape, dtype)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return self.memory.owns(tensor)

    def memory_info(self) -> MemoryInfo:
        """Return the allocated bytes. The runtime reports the host's memory, which is no limit of the device."""
        return MemoryInfo(total=0, free=0, allocated=self.memory.allocated)

    # -- graphs -------------------------------------------------------------------------------------------------------

    @property
    def recorder(self) -> Recorder | None:
        """Return the recorder of the capture that is open on the calling thread, or None."""
        return getattr(self._thread, "recorder", None)

    def generated_program(self, source: str) -> Program:
        """Return the program of a generated source, which is compiled once."""
        return self._generated.setdefault(source, Program(self.opencl, source))

    def _capture(
        self, name: str, fn: GraphCallable, context: CaptureContext, stream: Stream, pool: GraphPool | None
    ) -> Graph:
        del pool  # the memory of a graph is its own
        if self._command_buffers is None:
            raise CapabilityError(f"{self.label} captures {name!r} only with graphs=command-buffers")
        buffer = CommandBuffer(self._command_buffers, cast(OpenCLStream, stream).queue)
        graph = CommandBufferGraph(self, name, context, buffer)
        recorder = self._thread.recorder = Recorder(self, buffer)
        try:
            with self._on(stream), self.capturing(graph, stream):
                fn(context)
        finally:
            self._thread.recorder = None
        buffer.finalize()
        if recorder.is_empty:
            graph.buffer = None
        return graph


def _overlap(one: Tensor, other: Tensor) -> bool:
    start, other_start = one.data_ptr(), other.data_ptr()
    return start < other_start + other.nbytes and other_start < start + one.nbytes
