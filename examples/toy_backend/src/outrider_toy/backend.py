"""The backend `toy`: the methods of the backend interface, implemented with calls of the driver."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import toy_driver as toy
from torch import Tensor

from outrider.device import (
    Backend,
    Capabilities,
    CaptureContext,
    DeviceError,
    DeviceFault,
    Event,
    Graph,
    GraphCallable,
    GraphPool,
    KernelSet,
    MemoryInfo,
    SpeculativeSync,
    Stream,
)

CAPABILITIES = Capabilities(
    asynchronous=True,
    concurrent_streams=True,
    event_timing=True,
    perturbs_timing=True,
    captures_graphs=True,
    dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
)


def check(status: int, doing: str) -> None:
    """Raise DeviceFault for a failed status. Every call of the driver is checked, so that no error is lost."""
    if status != toy.SUCCESS:
        raise DeviceFault(f"toy: {doing} failed: {toy.toy_error_string(status)}")


def ready(status: int, doing: str) -> bool:
    """Return whether the work is done, for calls that return SUCCESS or NOT_READY."""
    if status == toy.NOT_READY:
        return False
    check(status, doing)
    return True


class ToyStream(Stream):
    """A stream of the driver, destroyed with this object."""

    def __init__(self, backend: Backend, name: str) -> None:
        super().__init__(backend, name)
        status, self.handle = toy.toy_stream_create()
        check(status, f"creating stream {name!r}")
        weakref.finalize(self, toy.toy_stream_destroy, self.handle)

    @property
    def native(self) -> Any:
        """The stream handle of the driver."""
        return self.handle

    def _record(self, event: Event) -> None:
        check(toy.toy_event_record(cast(ToyEvent, event).handle, self.handle), "a record")

    def _wait(self, event: Event) -> None:
        check(toy.toy_stream_wait_event(self.handle, cast(ToyEvent, event).handle), "a wait")

    def _synchronize(self) -> None:
        check(toy.toy_stream_synchronize(self.handle), f"work on stream {self.name!r}")

    def _query(self) -> bool:
        return ready(toy.toy_stream_query(self.handle), "a query")


class ToyEvent(Event):
    """An event of the driver. Each record is a snapshot, so the driver itself keeps generations apart."""

    def __init__(self, backend: Backend, name: str, timing: bool) -> None:
        super().__init__(backend, name, timing)
        status, self.handle = toy.toy_event_create()
        check(status, f"creating event {name!r}")
        weakref.finalize(self, toy.toy_event_destroy, self.handle)

    def _query(self) -> bool:
        return ready(toy.toy_event_query(self.handle), "a query")

    def _synchronize(self) -> None:
        check(toy.toy_event_synchronize(self.handle), f"waiting for event {self.name!r}")

    def _elapsed_ms(self, end: Event) -> float:
        status, milliseconds = toy.toy_event_elapsed_ms(self.handle, cast(ToyEvent, end).handle)
        check(status, "measuring")
        return milliseconds


class ToyGraph(Graph):
    """A graph of the driver, replayed by handle."""

    handle: int

    def _replay(self, stream: Stream) -> None:
        check(toy.toy_graph_launch(self.handle, stream.native), f"replaying {self.name!r}")


class ToyBackend(Backend):
    """The single device of the driver."""

    def __init__(self) -> None:
        super().__init__(
            "toy",
            torch.device("cpu"),  # the device computes in host memory
            capabilities=CAPABILITIES,
            kernels=KernelSet(),  # the torch references
            speculative_sync=SpeculativeSync,  # the default policy
        )

    def translate_error(self, error: Exception, doing: str) -> DeviceError | None:
        """Convert an error of the torch layer to a DeviceError."""
        return DeviceFault(f"toy: {doing}: {error}") if isinstance(error, toy.ToyError) else None

    def _on(self, stream: Stream) -> AbstractContextManager[None]:
        return toy.placed(stream.native)

    def _create_stream(self, name: str, priority: int) -> Stream:
        return ToyStream(self, name)

    def _create_event(self, name: str, timing: bool) -> Event:
        return ToyEvent(self, name, timing)

    def _synchronize(self) -> None:
        ended = [toy.toy_stream_synchronize(stream.native) for stream in self.streams]
        for status in ended:  # wait for all streams before raising an error
            check(status, "work on the device")

    def _delay(self, stream: Stream, cycles: int) -> None:
        check(toy.toy_spin(stream.native, cycles), "a delay")

    def _provoke_fault(self, stream: Stream) -> None:
        check(toy.toy_fail(stream.native), "a launch")

    def _empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return True  # the device can access all host memory

    def memory_info(self) -> MemoryInfo:
        """Return zeros, because the driver declares no limit."""
        return MemoryInfo(total=0, free=0, allocated=0)

    def _capture(
        self, name: str, fn: GraphCallable, context: CaptureContext, stream: Stream, pool: GraphPool | None
    ) -> Graph:
        graph = ToyGraph(self, name, context)
        check(toy.toy_capture_begin(stream.native), "beginning a capture")
        try:
            with self._on(stream), self.capturing(graph, stream):
                fn(context)
        finally:  # end the capture also after an error
            status, graph.handle = toy.toy_capture_end(stream.native)
            weakref.finalize(graph, toy.toy_graph_destroy, graph.handle)
        check(status, "ending a capture")
        return graph
