"""Graphs as command buffers (cl_khr_command_buffer).

A command buffer holds kernels and no native kernels. So a capture records bookkeeping kernels and elementwise operators, and
raises :class:`CaptureError` for any operator that torch computes on the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from outrider.device import BackendLoadError, CaptureContext, CaptureError, Graph, Stream, StreamOrderError
from outrider_opencl.driver import Kernel, OpenCLDevice, Queue, checked
from outrider_opencl.kernels import LAUNCHES, elementwise_launch

if TYPE_CHECKING:
    from outrider_opencl.backend import OpenCLBackend, OpenCLStream

EXTENSION = "cl_khr_command_buffer"
_FLAGS_PROPERTY = 0x1293
_SIMULTANEOUS_USE = 1


class CommandBufferFunctions:
    """The functions of the extension, which the platform returns by name."""

    def __init__(self, device: OpenCLDevice) -> None:
        if EXTENSION not in device.native.extensions.split():
            platform = device.native.platform.version.strip()
            raise BackendLoadError(
                f"backend 'opencl': {device.native.name.strip()} of {platform} has no {EXTENSION}, which "
                "graphs=command-buffers needs; install PoCL 3.1 or newer (Debian: apt install pocl-opencl-icd), or leave out "
                "the option"
            )
        pointer, number = ctypes.c_void_p, ctypes.c_uint

        def function(name: str, result: Any, *arguments: Any) -> Any:
            address = device.library.extension(device.native.platform.int_ptr, name.encode())
            return ctypes.CFUNCTYPE(result, *arguments)(address)

        self.create = function("clCreateCommandBufferKHR", pointer, number, *[pointer] * 3)
        self.finalize = function("clFinalizeCommandBufferKHR", ctypes.c_int, pointer)
        self.release = function("clReleaseCommandBufferKHR", ctypes.c_int, pointer)
        self.enqueue = function(
            "clEnqueueCommandBufferKHR", ctypes.c_int, *(number, pointer, pointer, number, pointer, pointer)
        )
        self.record_kernel = function(
            "clCommandNDRangeKernelKHR", ctypes.c_int, *[pointer] * 4, number, *[pointer] * 3, number, *[pointer] * 3
        )


class CommandBuffer:
    """A command buffer under construction, then ready for replays. Kernels run in the order in which they were recorded."""

    def __init__(self, functions: CommandBufferFunctions, queue: Queue) -> None:
        self._functions = functions
        self._queue = queue
        self.held: list[object] = []
        """The recorded kernels, and the tensors whose addresses they contain; they live as long as the command buffer."""
        properties = (ctypes.c_ulonglong * 3)(_FLAGS_PROPERTY, _SIMULTANEOUS_USE, 0)
        status = ctypes.c_int()
        self._handle = functions.create(1, self._queues(queue), properties, ctypes.byref(status))
        checked(status.value, "creating a command buffer")
        self._last: ctypes.c_uint | None = None

    def record(self, kernel: Kernel, size: int, arguments: tuple[Any, ...]) -> None:
        """Record a kernel over ``size`` work items."""
        point = ctypes.c_uint()
        waits = (0, None) if self._last is None else (1, ctypes.byref(self._last))
        with kernel.bound(arguments) as handle:
            status = self._functions.record_kernel(
                self._handle,
                None,
                None,
                handle,
                1,
                None,
                (ctypes.c_size_t * 1)(size),
                None,
                *waits,
                ctypes.byref(point),
                None,
            )
        checked(status, f"recording kernel {kernel.name!r}")
        self.held.append(kernel)
        self._last = point

    def finalize(self) -> None:
        """Make the command buffer executable: nothing more can be recorded."""
        checked(self._functions.finalize(self._handle), "finalizing a command buffer")

    def enqueue(self, queue: Queue) -> None:
        """Enqueue all recorded kernels on ``queue``."""
        queue.run_command_buffer(lambda *waits: self._functions.enqueue(1, self._queues(queue), self._handle, *waits), self)

    @staticmethod
    def _queues(queue: Queue) -> Any:
        return (ctypes.c_void_p * 1)(queue.native.int_ptr)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._functions.release(self._handle)


class Recorder:
    """The launcher of a capture: it records kernels in a command buffer, and refuses native kernels."""

    def __init__(self, backend: OpenCLBackend, buffer: CommandBuffer) -> None:
        self._backend = backend
        self._buffer = buffer
        self.is_empty = True

    def run_on_host(self, name: str, task: Callable[[], object]) -> None:
        """Raise :class:`CaptureError`: a command buffer can't hold the host task of operator ``name``."""
        del task
        raise CaptureError(
            f"operator {name!r} runs on {self._backend.label} as a native kernel, which a command buffer can't hold; leave "
            "the operator outside of the capture, or create the backend without graphs=command-buffers"
        )

    def copy(self, destination: Tensor, source: Tensor) -> bool:
        """Return False: the caller then records the copy as an elementwise kernel."""
        del destination, source
        return False

    def run_kernel(self, name: str, operands: tuple[Any, ...]) -> None:
        """Record the OpenCL kernel of the operator ``name``, whose ``operands`` end with the new results."""
        launch = LAUNCHES[name](*operands)
        self._record(self._backend.program.create_kernel(name), launch.size, launch.arguments)

    def run_elementwise(self, name: str, result: Tensor, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Record an elementwise kernel. Returns False if there is none for the operator, or for the memory."""
        launch = elementwise_launch(name, result, arguments, named)
        if launch is None or not all(map(self._backend.memory.owns, _tensors(launch.arguments))):
            return False
        self._record(
            self._backend.generated_program(launch.source).create_kernel("elementwise"), launch.size, launch.arguments
        )
        return True

    def spin(self, cycles: int) -> None:
        """Record a kernel that runs for about ``cycles`` device clocks."""
        scratch = self._backend.memory.allocate_contiguous((1,), torch.int64)
        self._record(self._backend.program.create_kernel("spin"), 1, (scratch, cycles))

    def allocate(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor in memory that host and device share. The graph keeps it alive."""
        made = self._backend.memory.allocate(shape, strides, dtype)
        self._buffer.held.append(made)
        return made

    def synchronize_for_value(self) -> None:
        """Raise :class:`StreamOrderError`: the host can't read a value during a capture."""
        raise StreamOrderError("a value was read on the host during a capture: nothing has run yet")

    def _record(self, kernel: Kernel, size: int, arguments: tuple[Any, ...]) -> None:
        if size:
            self._buffer.held.extend(_tensors(arguments))
            self._buffer.record(kernel, size, arguments)
            self.is_empty = False


class CommandBufferGraph(Graph):
    """A graph that replays a command buffer."""

    def __init__(self, backend: OpenCLBackend, name: str, context: CaptureContext, buffer: CommandBuffer) -> None:
        super().__init__(backend, name, context)
        self.buffer: CommandBuffer | None = buffer

    def _replay(self, stream: Stream) -> None:
        if self.buffer is not None:  # None: the callable enqueued no work
            self.buffer.enqueue(cast("OpenCLStream", stream).queue)

    def _release(self) -> None:
        self.buffer = None


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]
