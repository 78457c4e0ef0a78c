"""TorchDeviceBackend: the base for devices that torch already drives.

A device with a torch module (``torch.get_device_module``) that has streams, events and graphs in torch's usual form needs
little more than its capabilities: the device type is a constructor argument. Plugins override the differences.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from outrider.device.backend import Backend
from outrider.device.capabilities import Capabilities
from outrider.device.errors import (
    BackendLoadError,
    CapabilityError,
    DeviceError,
    DeviceLost,
    OutOfDeviceMemory,
)
from outrider.device.graph import CaptureContext, Graph, GraphCallable, GraphPool
from outrider.device.memory import MemoryInfo
from outrider.device.stream import Event, Stream
from outrider.device.sync import SpeculativeSync

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from outrider.device.collectives import Group
    from outrider.device.kernels.kernelset import KernelSet

_MAX_STREAM_CREATIONS = 64
"""Number of streams that torch creates in the search for one that is not in use."""
_LOW_MEMORY_DIVISOR = 4
"""A capture empties torch's memory cache if less than 1 / divisor of the memory is free."""


class TorchStream(Stream):
    """A stream made by the device's torch module."""

    def __init__(self, backend: Backend, name: str, priority: int, native: Any) -> None:
        super().__init__(backend, name, priority)
        self._native = native

    @property
    def native(self) -> Any:
        """The stream object of torch."""
        return self._native

    def _record(self, event: Event) -> None:
        cast(TorchEvent, event).native.record(self._native)

    def _wait(self, event: Event) -> None:
        self._native.wait_event(cast(TorchEvent, event).native)

    def _synchronize(self) -> None:
        self._native.synchronize()

    def _query(self) -> bool:
        return bool(self._native.query())


class TorchEvent(Event):
    """An event made by the device's torch module."""

    def __init__(self, backend: Backend, name: str, timing: bool, native: Any) -> None:
        super().__init__(backend, name, timing)
        self.native = native

    def _query(self) -> bool:
        return bool(self.native.query())

    def _synchronize(self) -> None:
        self.native.synchronize()

    def _elapsed_ms(self, end: Event) -> float:
        return float(self.native.elapsed_time(cast(TorchEvent, end).native))


class TorchGraph(Graph):
    """A graph object of torch's usual form: ``capture_begin``, ``capture_end``, ``replay``, ``reset``."""

    def __init__(self, backend: Backend, name: str, context: CaptureContext, native: Any) -> None:
        super().__init__(backend, name, context)
        self.native = native

    def _replay(self, stream: Stream) -> None:
        with self.backend.on(stream):
            self.native.replay()

    def _release(self) -> None:
        self.native.reset()


class _StreamScope:
    """Makes a stream and its device current, and restores the previous ones.

    The device module's own context manager takes several times as long: it looks up devices by name and reads each value
    twice.
    """

    __slots__ = ("_before", "_device", "_native")

    def __init__(self, native: Any) -> None:
        self._native = native

    def __enter__(self) -> None:
        index = self._native.device_index
        current = torch.accelerator.current_device_index()
        self._device = None if current == index else current
        self._before = torch.accelerator.current_stream(index)
        torch.accelerator.set_stream(self._native)  # and its device

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, error, traceback
        torch.accelerator.set_stream(self._before)
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)


class TorchDeviceBackend(Backend):
    """A backend on a torch device module. Subclasses pass capabilities, kernels and policy.

    Subclasses override the class attributes.
    """

    warmup_runs = 1
    """Number of runs of a callable before its capture. They keep lazy initialisation (library handles, kernel compilation)
    out of the graph."""
    graph_type: type[TorchGraph] = TorchGraph
    """Class of captured graphs."""
    sticky_faults: tuple[str, ...] = ()
    """Texts in a RuntimeError by which a driver names a fault after which every later call fails."""
    is_accelerator = False
    """``torch.accelerator`` refers to this device. Scopes then use it, which costs less host time than the device module's
    own scopes."""

    def __init__(
        self,
        name: str,
        device_type: str,
        ordinal: int,
        *,
        capabilities: Capabilities | None = None,
        kernels: KernelSet | Callable[[Any], KernelSet] | None = None,
        speculative_sync: Callable[[Any], SpeculativeSync] | None = None,
    ) -> None:
        super().__init__(
            name,
            torch.device(device_type, ordinal),
            capabilities=capabilities,
            kernels=kernels,
            speculative_sync=speculative_sync,
        )
        self.module: Any = torch.get_device_module(device_type)
        if not self.module.is_available():
            raise BackendLoadError(
                f"backend {name!r}: torch {torch.__version__} sees no {device_type} device; install a torch build for it, "
                "and check that the driver shows the device"
            )
        count = int(self.module.device_count())
        if ordinal >= count:
            raise BackendLoadError(f"backend {name!r}: device {ordinal} was asked for, this machine has {count}")

    # -- placement -------------------------------------------------------------------------------------------------

    def _on(self, stream: Stream) -> AbstractContextManager[None]:
        return _StreamScope(stream.native) if self.is_accelerator else self._module_scope(stream)

    @contextmanager
    def _module_scope(self, stream: Stream) -> Generator[None]:
        with self.module.device(self.device.index), self.module.stream(stream.native):
            yield

    def _create_stream(self, name: str, priority: int) -> Stream:
        native = self._distinct_stream(priority)
        if native is None:
            self._drop_unused_streams()
            native = self._distinct_stream(priority)
        if native is None:
            raise CapabilityError(f"{self.label} has no stream left that is distinct from the {len(self._streams)} in use")
        return TorchStream(self, name, priority, native)

    def _distinct_stream(self, priority: int) -> Any:
        """Return a stream that aliases none of this backend's streams, or None: torch reuses the streams of a small pool."""
        taken = {stream.native for stream in self._streams}
        candidates = []  # referenced until the end, so that torch returns none of them twice
        for _ in range(_MAX_STREAM_CREATIONS):
            candidates.append(self.module.Stream(device=self.device, priority=priority))
            if candidates[-1] not in taken:
                return candidates[-1]
        return None

    def _drop_unused_streams(self) -> None:
        """Drop streams that are empty and have no other reference, such as the streams of a deleted engine."""
        gc.collect()
        busy = [stream for stream in self._streams if not stream.query()]
        listed = [weakref.ref(stream) for stream in self._streams]
        self._streams.clear()
        self._streams.extend(stream for stream in (each() for each in listed) if stream is not None)
        del busy  # the list kept busy streams alive until here

    def _create_event(self, name: str, timing: bool) -> Event:
        return TorchEvent(self, name, timing, self.module.Event(enable_timing=timing))

    def _synchronize(self) -> None:
        self.module.synchronize(self.device)

    def _delay(self, stream: Stream, cycles: int) -> None:
        with self.on(stream):
            self.module._sleep(cycles)

    # -- memory ----------------------------------------------------------------------------------------------------

    def _empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            if self.translate_error(error, "pinning host memory") is not None:
                raise
            raise CapabilityError(
                f"torch pins no host memory for {self.label}: {error} Set the right device type, or override _empty_pinned"
            ) from error

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def memory_info(self) -> MemoryInfo:
        """Return the bytes that the device module reports."""
        free, total = self.module.mem_get_info(self.device)
        return MemoryInfo(total=int(total), free=int(free), allocated=int(self.module.memory_allocated(self.device)))

    # -- graphs ----------------------------------------------------------------------------------------------------

    def _empty_cache_if_low(self) -> None:
        """Empty torch's memory cache if little memory is free: a graph allocates its own memory and can't use the cache."""
        release = getattr(self.module, "empty_cache", None)
        info = self.memory_info() if self.capabilities.memory_limit else None
        if release is not None and info is not None and info.free < info.total // _LOW_MEMORY_DIVISOR:
            release()

    def _new_graph(self) -> Any:
        """Create a graph object of the device's torch module."""
        factory = getattr(getattr(torch, "accelerator", None), "Graph", None)
        if factory is None:
            raise CapabilityError(
                f"{self.label}: torch {torch.__version__} has no torch.accelerator.Graph; the plugin must override _new_graph"
            )
        return factory()

    def _new_pool(self) -> Any:
        """Create a memory pool handle for graphs."""
        return self.module.graph_pool_handle()

    def create_graph_pool(self, name: str) -> GraphPool:
        """Create a memory pool for graphs that never run at the same time."""
        return GraphPool(self, name, self._new_pool())

    def _capture(
        self, name: str, fn: GraphCallable, context: CaptureContext, stream: Stream, pool: GraphPool | None
    ) -> Graph:
        with self.on(stream), self.rehearsing(context, stream):
            for _ in range(self.warmup_runs):
                fn(context)
        stream.synchronize()
        self._empty_cache_if_low()
        native = self._new_graph()
        graph = self.graph_type(self, name, context, native)
        arguments: dict[str, Any] = {"capture_error_mode": "thread_local"}
        if pool is not None:
            arguments["pool"] = pool.native
        with self._on(stream):
            native.capture_begin(**arguments)
            try:
                with self.capturing(graph, stream):
                    fn(context)
            except BaseException:
                # End the broken capture, or the stream stays in capture mode; the first error is the one to report.
                with suppress(Exception):
                    native.capture_end()
                with suppress(Exception):
                    native.reset()
                raise
            native.capture_end()
        return graph

    # -- ranks -----------------------------------------------------------------------------------------------------

    def _create_group(self, name: str, ranks: tuple[int, ...], rank: int, store: Store, timeout_s: float) -> Group:
        from outrider.device.torch_collectives import TorchGroup

        return TorchGroup(self, name, ranks, rank, store, timeout_s)

    # -- errors and versions ---------------------------------------------------------------------------------------

    def translate_error(self, error: Exception, doing: str) -> DeviceError | None:
        """Return the typed error: the device survives out of memory; an accelerator error is sticky."""
        if isinstance(error, torch.OutOfMemoryError):
            return OutOfDeviceMemory(
                f"out of memory on {self.device} while {doing}: {error}; use a smaller batch, cache or bucket"
            )
        if isinstance(error, torch.AcceleratorError):
            return DeviceLost(f"{self.device} failed while {doing}: {error}; start a new process")
        if isinstance(error, RuntimeError) and any(text in str(error) for text in self.sticky_faults):
            return DeviceLost(f"{self.device} failed while {doing}: {error}; start a new process")
        return None

    def versions(self) -> Mapping[str, str]:
        """Return torch's version and the device's name."""
        return {**super().versions(), "device": str(self.module.get_device_name(self.device))}
