"""One OpenCL device: queues, native kernels, programs, and its shared virtual memory as torch tensors.

pyopencl makes contexts, queues, events and programs. Native kernels, shared virtual memory and command buffers are called
through ctypes, because pyopencl does not offer them as this backend needs them.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyopencl as cl
import torch
from torch import Tensor

from outrider.device import BackendLoadError, DeviceFault, OutOfDeviceMemory

Task = Callable[[], object]
"""A function that the host runs in a queue's order. It references its tensors, so their memory lives until it has run."""

COMPLETE = cl.command_execution_status.COMPLETE
_FINE_GRAIN = cl.device_svm_capabilities.FINE_GRAIN_BUFFER
_NATIVE = cl.device_exec_capabilities.NATIVE_KERNEL
_HOW_TO_INSTALL = "install PoCL: pip install 'outrider-opencl[pocl]', or on Debian: apt install pocl-opencl-icd"


def _run(argument: int) -> None:
    """Run the task that was passed as the argument of a native kernel, and drop the reference that the queue held."""
    reference = ctypes.cast(argument, ctypes.POINTER(ctypes.py_object)).contents
    task, device = reference.value
    ctypes.pythonapi.Py_DecRef(reference)
    try:
        with torch.no_grad():  # gradients are enabled in every thread of the runtime
            task()
    except Exception as error:
        device.add_failure(error)


_run_task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_run)


def _do_nothing() -> None:
    """Run as the task of a native kernel that is only a point in the order."""


class Library:
    """The functions of the OpenCL library that pyopencl has loaded, with their ctypes signatures."""

    def __init__(self) -> None:
        native = ctypes.CDLL(sys.modules["pyopencl._cl"].__file__)  # resolves symbols of the library that it links
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        events = (number, pointer, pointer)

        def function(name: str, result: Any, *arguments: Any) -> Any:
            found = getattr(native, name)
            found.restype, found.argtypes = result, arguments
            return found

        self.native_kernel = function(
            "clEnqueueNativeKernel", ctypes.c_int, *(pointer, pointer, pointer, size, number, pointer, pointer), *events
        )
        self.svm_alloc = function("clSVMAlloc", pointer, pointer, ctypes.c_ulonglong, size, number)
        self.svm_free = function("clSVMFree", None, pointer, pointer)
        self.svm_copy = function("clEnqueueSVMMemcpy", ctypes.c_int, *(pointer, number, pointer, pointer, size), *events)
        self.kernel_pointer = function("clSetKernelArgSVMPointer", ctypes.c_int, pointer, number, pointer)
        self.kernel_value = function("clSetKernelArg", ctypes.c_int, pointer, number, size, pointer)
        self.range_kernel = function(
            "clEnqueueNDRangeKernel", ctypes.c_int, *(pointer, pointer, number, pointer, pointer, pointer), *events
        )
        self.extension = function("clGetExtensionFunctionAddressForPlatform", pointer, pointer, ctypes.c_char_p)


def checked(status: int, doing: str) -> None:
    """Raise :class:`DeviceFault` that names ``doing`` unless ``status`` means success."""
    if status:
        raise DeviceFault(f"OpenCL: {doing} failed with status {status}; the codes are listed in CL/cl.h")


def _unsuitable(device: cl.Device) -> str:
    """Return the ability that the backend needs and ``device`` lacks; empty if the device is suitable."""
    if not device.execution_capabilities & _NATIVE:
        return "it runs no native kernels"
    try:
        fine_grained = device.svm_capabilities & _FINE_GRAIN
    except cl.Error:
        fine_grained = 0
    return "" if fine_grained else "it shares no fine-grained virtual memory with the host"


def find_devices() -> list[cl.Device]:
    """Return the suitable devices of all platforms. Raises :class:`BackendLoadError` if there is none."""
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        raise BackendLoadError(f"backend 'opencl': no OpenCL platform was found ({error}); {_HOW_TO_INSTALL}") from error
    devices = [device for platform in platforms for device in platform.get_devices()]
    suitable = [device for device in devices if not _unsuitable(device)]
    if not suitable:
        found = "; ".join(f"{device.name}: {_unsuitable(device)}" for device in devices) or "no platform has a device"
        raise BackendLoadError(f"backend 'opencl': no OpenCL device can be used ({found}); {_HOW_TO_INSTALL}")
    return suitable


class OpenCLDevice:
    """A device with its context, and the queue that all streams share in out-of-order mode.

    OpenCL has no status with which a native kernel fails. An error therefore belongs to the device, not to a queue: the
    result may reach the waiting caller through other queues.
    """

    def __init__(self, ordinal: int, *, out_of_order: bool) -> None:
        devices = find_devices()
        if ordinal >= len(devices):
            raise BackendLoadError(f"backend 'opencl': device {ordinal} was asked for, usable are {len(devices)}")
        self.native = devices[ordinal]
        self.context = cl.Context([self.native])
        self.library = Library()
        self._lock = threading.Lock()
        self._failures: list[Exception] = []
        self.shared_queue = self.create_queue(out_of_order=True) if out_of_order else None

    def create_queue(self, *, out_of_order: bool = False) -> cl.CommandQueue:
        """Create a queue on this device that records the times of its commands. With ``out_of_order``, only events order its
        commands.
        """
        properties = cl.command_queue_properties
        order = properties.OUT_OF_ORDER_EXEC_MODE_ENABLE if out_of_order else 0
        return cl.CommandQueue(self.context, self.native, properties=properties.PROFILING_ENABLE | order)

    def add_failure(self, error: Exception) -> None:
        """Store the error of a failed native kernel, until a wait of the host raises it."""
        with self._lock:
            self._failures.append(error)

    def take_first_failure(self) -> Exception | None:
        """Return the first stored error, or None, and clear all errors."""
        with self._lock:
            errors, self._failures = self._failures, []
        return errors[0] if errors else None

    @property
    def versions(self) -> dict[str, str]:
        """Return platform, device and pyopencl versions."""
        return {
            "OpenCL": f"{self.native.platform.name} {self.native.platform.version}".strip(),
            "device": self.native.name.strip(),
            "pyopencl": ".".join(map(str, cl.VERSION)),
        }


def has_run(event: cl.Event) -> bool:
    """Return True if the command of ``event`` has run. Raises :class:`DeviceFault` if it or a command before it failed."""
    status = event.command_execution_status
    if status < 0:
        raise DeviceFault(f"OpenCL: a command was aborted with status {status}; a command that it waited for failed")
    return bool(status == COMPLETE)


class Queue:
    """A stream: an in-order queue of its own, or a chain of events in the out-of-order queue that all streams share."""

    def __init__(self, device: OpenCLDevice) -> None:
        self.device = device
        self._is_chain = device.shared_queue is not None
        self.native = device.shared_queue or device.create_queue()
        self._lock = threading.RLock()
        self._last: cl.Event | None = None

    def run_on_host(self, task: Task, *also_after: cl.Event) -> None:
        """Enqueue ``task`` as a native kernel of this queue. The kernel also waits for the events ``also_after``."""
        argument = ctypes.py_object((task, self.device))
        library, pointer = self.device.library, ctypes.byref(argument)
        ctypes.pythonapi.Py_IncRef(argument)  # the queue's reference, which the native kernel drops
        self._enqueue(
            "a native kernel",
            lambda *waits: library.native_kernel(self._handle, _run_task, pointer, 8, 0, None, None, *waits),
            *also_after,
        )

    def copy(self, destination: int, source: int, nbytes: int, held: object) -> None:
        """Enqueue a copy between two addresses. ``held`` lives until the copy has run."""
        library = self.device.library
        self._enqueue("a copy", lambda *waits: library.svm_copy(self._handle, 0, destination, source, nbytes, *waits))
        self._hold(held)

    def run_kernel(self, kernel: Kernel, sizes: Sequence[int], arguments: Sequence[Any], held: object) -> None:
        """Enqueue a kernel over a range of ``sizes``. ``held`` lives until the kernel has run."""
        library, shape = self.device.library, (ctypes.c_size_t * len(sizes))(*sizes)
        with kernel.bound(arguments) as handle:
            self._enqueue(
                f"kernel {kernel.name!r}",
                lambda *waits: library.range_kernel(self._handle, handle, len(sizes), None, shape, None, *waits),
            )
        self._hold(held)

    def run_command_buffer(self, call: Callable[..., int], held: object) -> None:
        """Enqueue a command buffer by ``call``. ``held`` lives until the command buffer has run."""
        self._enqueue("a command buffer", call)
        self._hold(held)

    def mark(self) -> cl.Event:
        """Enqueue a marker command, and return its event: a point in the queue's order that is reached once."""
        with self._lock:
            if self._is_chain:  # PoCL's markers wait for all commands of an out-of-order queue
                self.run_on_host(_do_nothing)
            else:
                self._last = cl.enqueue_marker(self.native)
                self.native.flush()
            assert self._last is not None
            return self._last

    def wait(self, event: cl.Event) -> None:
        """Run later commands of this queue after ``event``. Never blocks the host."""
        with self._lock:
            if self._is_chain:
                self.run_on_host(_do_nothing, event)
            else:
                self._last = cl.enqueue_barrier(self.native, wait_for=[event])
                self.native.flush()

    @property
    def is_idle(self) -> bool:
        """Return True if every command so far has run."""
        last = self._last
        return last is None or has_run(last)

    @property
    def _handle(self) -> int:
        return int(self.native.int_ptr)

    def _enqueue(self, what: str, call: Callable[..., int], *also_after: cl.Event) -> None:
        """Enqueue the command ``what`` by ``call``, which takes the events that the command waits for and returns the
        command's own event. In the shared queue, the command also waits for the previous command of this stream.
        """
        made = ctypes.c_void_p()
        with self._lock:
            after = [*also_after, self._last] if self._is_chain and self._last is not None else also_after
            waits = (ctypes.c_void_p * len(after))(*(each.int_ptr for each in after)) if after else None
            checked(call(len(after), waits, ctypes.byref(made)), f"enqueueing {what}")
            self._last = cl.Event.from_int_ptr(made.value, retain=False)
            self.native.flush()  # another queue may wait for the command

    def _hold(self, held: object) -> None:
        """Keep ``held`` alive until the commands enqueued so far have run: the runtime knows addresses, not tensors."""
        self.run_on_host(lambda: held)


class Kernel:
    """A kernel object. Its arguments are part of its state, so one thread at a time binds and enqueues it."""

    def __init__(self, library: Library, native: cl.Kernel, name: str) -> None:
        self.name = name
        self._library = library
        self._native = native
        self._lock = threading.Lock()

    @contextmanager
    def bound(self, arguments: Sequence[Any]) -> Generator[int]:
        """Bind tensors as pointers, integers as ``long`` and floats as ``double``; return the handle for the scope."""
        handle = int(self._native.int_ptr)
        with self._lock:
            for index, argument in enumerate(arguments):
                if isinstance(argument, Tensor):
                    status = self._library.kernel_pointer(handle, index, argument.data_ptr())
                else:
                    value = ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_longlong(argument)
                    status = self._library.kernel_value(handle, index, 8, ctypes.byref(value))
                checked(status, f"binding argument {index} of kernel {self.name!r}")
            yield handle


class Program:
    """Kernels of one OpenCL C source, compiled on first use. PoCL keeps compiled kernels on disk."""

    def __init__(self, device: OpenCLDevice, source: str) -> None:
        self._device = device
        self._source = source
        self._lock = threading.Lock()
        self._built: cl.Program | None = None
        self._kernels: dict[str, Kernel] = {}

    def shared_kernel(self, name: str) -> Kernel:
        """Return the kernel object ``name`` for direct launches, which take its arguments when they are enqueued."""
        with self._lock:
            if name not in self._kernels:
                self._kernels[name] = self._create(name)
            return self._kernels[name]

    def create_kernel(self, name: str) -> Kernel:
        """Create a kernel object for a recorded launch: PoCL 3.1 reads its arguments again at each replay."""
        with self._lock:
            return self._create(name)

    def _create(self, name: str) -> Kernel:
        if self._built is None:
            self._built = cl.Program(self._device.context, self._source).build()
        return Kernel(self._device.library, cl.Kernel(self._built, name), name)


_READ_WRITE_FINE_GRAIN = (1 << 0) | (1 << 10)
_ALIGNMENT = 64
"""Alignment in bytes of an allocation, that of torch's own host memory."""


class _Block:
    """One allocation of shared memory, freed with the last tensor over it."""

    def __init__(self, memory: SharedMemory, nbytes: int) -> None:
        library, context = memory.device.library, memory.device.context
        address = library.svm_alloc(context.int_ptr, _READ_WRITE_FINE_GRAIN, nbytes, _ALIGNMENT)
        if not address:
            raise OutOfDeviceMemory(
                f"OpenCL: {nbytes} bytes of shared memory don't fit; {memory.allocated} bytes are allocated; use a smaller "
                "model, cache or batch"
            )
        self.address = int(address)
        self._memory = memory
        memory.blocks[self.address] = nbytes
        self.__array_interface__: dict[str, Any] = {
            "data": (self.address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        if hasattr(self, "_memory") and self._memory.blocks.pop(self.address, None) is not None:
            device = self._memory.device
            device.library.svm_free(device.context.int_ptr, self.address)


class SharedMemory:
    """The allocations of one context that device and host address alike."""

    def __init__(self, device: OpenCLDevice) -> None:
        self.device = device
        self.blocks: dict[int, int] = {}
        """Bytes of each allocation by address."""

    @property
    def allocated(self) -> int:
        """Number of bytes that are allocated now."""
        return sum(list(self.blocks.values()))

    def allocate(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor with undefined contents in shared memory. Raises :class:`OutOfDeviceMemory`."""
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        block = _Block(self, extent * dtype.itemsize)
        return torch.from_numpy(np.asarray(block)).view(dtype).as_strided(shape, strides)

    def allocate_contiguous(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new contiguous tensor with undefined contents in shared memory. Raises :class:`OutOfDeviceMemory`."""
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return self.allocate(shape, strides, dtype)

    def owns(self, tensor: Tensor) -> bool:
        """Return True if the memory of ``tensor`` was allocated here."""
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in self.blocks
