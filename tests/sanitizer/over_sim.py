"""The sanitizer of plain torch programs, run over the simulated device: what torch's CUDA trace would tell, it is told."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.cuda import _gpu_trace as trace

from outrider.device import Capabilities, KernelSet, Observer, SpeculativeSync, TorchDeviceBackend
from outrider.device.torch_backend import TorchStream
from outrider_sanitizer.observation.hostsync import host_edges
from outrider_sanitizer.observation.storages import KnownStorage
from outrider_sanitizer.observation.torch_calls import TorchSanitizer
from outrider_sim.backend import SimBackend
from outrider_sim.machine.device_state import PinnedTensor
from outrider_sim.torch_device import torch_module
from outrider_sim.torch_device.tensor import SimTensor


def handle(stream: Any) -> int:
    """As CUDA has it: the default stream is 0."""
    if isinstance(stream, TorchStream):
        stream = stream.native.wrapped
    return 0 if stream.name == "default" else 1 + int(stream.queue_state.id)


class Storages:
    """Storages of simulated tensors, by their number on the device."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._known: dict[int, KnownStorage] = {}

    def known(self, tensor: Any) -> tuple[KnownStorage, bool] | None:
        if not isinstance(tensor, SimTensor | PinnedTensor):
            return None
        number = self._backend.locate(tensor).storage
        new = number not in self._known
        if new:
            pinned = isinstance(tensor, PinnedTensor)
            self._known[number] = KnownStorage(number, None, not pinned, pinned, "")
        return self._known[number], new

    def key(self, tensor: Any) -> int:
        if not isinstance(tensor, SimTensor | PinnedTensor):
            return int(tensor.untyped_storage()._cdata)
        return -int(self._backend.locate(tensor).storage)

    def note(self, tensor: Any) -> None:
        pass

    def gone(self) -> list[KnownStorage]:
        return []


class Trace(Observer):
    """Fires torch's callbacks as its C++ does. Queries aren't among them; the interface's own graphs and marks pass by."""

    def __init__(self, sanitizer: TorchSanitizer) -> None:
        self._events: dict[int, Any] = {}
        for name in ("stream_created", "memory_shared", "marked_stale", "marked_mirror", "renewed", "host_accessed"):
            setattr(self, name, getattr(sanitizer, name))
        self._sanitizer = sanitizer

    def _event(self, event: Any) -> int:
        self._events[id(event)] = event
        return id(event)

    def recorded(self, stream: Any, event: Any, generation: int) -> None:
        trace.EventRecordCallbacks.fire_callbacks(self._event(event), handle(stream))

    def waited(self, stream: Any, event: Any, generation: int) -> None:
        trace.EventWaitCallbacks.fire_callbacks(self._event(event), handle(stream))

    def event_synchronized(self, event: Any, generation: int) -> None:
        trace.EventSynchronizationCallbacks.fire_callbacks(self._event(event))

    def event_queried(self, event: Any, generation: int, done: bool) -> None:
        if done and not self._sanitizer.asked:
            trace.EventSynchronizationCallbacks.fire_callbacks(self._event(event))

    def stream_synchronized(self, stream: Any) -> None:
        trace.StreamSynchronizationCallbacks.fire_callbacks(handle(stream))

    def device_synchronized(self) -> None:
        trace.DeviceSynchronizationCallbacks.fire_callbacks()

    def freed(self, storage: int, stream: str) -> None:
        trace.MemoryDeallocationCallbacks.fire_callbacks(storage)

    def capture_began(self, graph: Any, stream: Any) -> None:
        if graph.name != "captured":
            self._sanitizer.capture_began(graph, stream)

    def capture_ended(self, graph: Any, failed: bool) -> None:
        if graph.name != "captured":
            self._sanitizer.capture_ended(graph, failed)

    def replayed(self, graph: Any, stream: Any, generation: int) -> None:
        if graph.name != "captured":
            self._sanitizer.replayed(graph, stream, generation)


class OverSim(TorchSanitizer):
    """Where torch's own is asked for a handle, the simulated device answers."""

    def __init__(self, sim: Any, backend: Any) -> None:
        super().__init__(backend, trace)
        self._storages = Storages(sim)  # type: ignore[assignment]
        self._module = SimpleNamespace(
            CUDAGraph=torch_module.CUDAGraph, Event=torch_module.SimTorchEvent, Stream=torch_module.SimTorchStream
        )
        self.asked = False  # a query by torch's name is seen there

    def _handle(self, stream: Any) -> int:
        return handle(stream)

    def _current(self, index: int) -> int:
        return handle(torch_module.current_stream().wrapped)

    def _event_asked(self, event: Any) -> None:
        self._event_over(id(event.wrapped))

    def _stream_asked(self, stream: Any) -> None:
        self._stream_synchronized(handle(stream.wrapped))

    def found(self, tensor: Any, known: KnownStorage) -> None:
        super().found(tensor, known)
        if known.number not in self._pooled:
            self._addresses[known.number] = known


@contextmanager
def watched(backend: Any, monkeypatch: Any, over: Any = None) -> Generator[TorchSanitizer]:
    """What `outrider sanitize` does on a GPU, here over the simulated device; `over`: the backend that it knows."""
    monkeypatch.setattr(torch._C, "_activate_gpu_trace", lambda: None)
    sanitizer = OverSim(backend, over or backend)
    backend.attach(Trace(sanitizer))
    try:
        with host_edges(sanitizer, sanitizer.thread_scope), sanitizer.scope(), sanitizer.thread_scope():
            yield sanitizer
    finally:
        backend.detach()
        sanitizer.finish()


class OverNames(TorchDeviceBackend):
    """A backend of the kind that GPUs have, on the simulated device's torch module."""

    def __init__(self) -> None:
        capabilities = Capabilities(
            asynchronous=True, concurrent_streams=True, captures_graphs=True, forks_in_capture=True, dtypes=frozenset()
        )
        super().__init__("over", "sim", 0, capabilities=capabilities, kernels=KernelSet(), speculative_sync=SpeculativeSync)

    def _new_graph(self) -> Any:
        return torch_module.CUDAGraph()


@contextmanager
def watched_names(monkeypatch: Any) -> Generator[tuple[OverNames, TorchSanitizer]]:
    """The same for a program of the backend interface, whose backend makes torch's streams, events and graphs."""
    sim, backend = SimBackend(), OverNames()
    with watched(sim, monkeypatch, backend) as sanitizer:
        backend.attach(sanitizer)
        yield backend, sanitizer
        backend.detach()
