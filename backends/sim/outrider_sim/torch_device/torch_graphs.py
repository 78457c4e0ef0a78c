"""Graphs with the interface of torch's device modules: captured between two calls, on the current stream."""

from __future__ import annotations

from contextlib import ExitStack
from types import MappingProxyType, TracebackType
from typing import Any

from outrider.device import CaptureContext, CaptureError
from outrider_sim.backend import SimGraph, SimStream
from outrider_sim.machine.graphs import OpenCapture
from outrider_sim.machine.memory import Pool
from outrider_sim.torch_device.torch_module import SimTorchStream, _backend, current_stream, synchronize

_NONE: Any = MappingProxyType({})


def graph_pool_handle() -> Pool:
    """Return a memory pool for graphs that never run concurrently."""
    return Pool("graphs")


def is_current_stream_capturing() -> bool:
    """Return whether the calling thread captures a graph."""
    return _backend().active_capture is not None


class CUDAGraph:
    """A graph that is captured once and replayed. The caller keeps memory outside the graph's pool alive."""

    def __init__(self, keep_graph: bool = False) -> None:
        del keep_graph
        self._graph: SimGraph | None = None
        self._capture: OpenCapture | None = None
        self._open = ExitStack()

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global", **_: Any) -> None:
        """Start to capture the calling thread's work; the current stream is the graph's first stream.

        Raises `CaptureError` if this graph was already captured or the stream is in another capture.
        """
        del capture_error_mode
        if self._graph is not None:
            raise CaptureError("this graph has been captured; reset() it first, or make another")
        backend, stream = _backend(), current_stream().wrapped
        assert isinstance(stream, SimStream)
        graph = SimGraph(backend, "captured", CaptureContext(_NONE, _NONE, _NONE, _NONE), _not_again)
        graph.pool = pool or Pool("captured")
        graph.origin = stream
        capture = OpenCapture(backend.sim, graph.name, graph.pool, stream.queue_state)
        capture.begin()
        try:
            self._open.enter_context(backend.capturing(graph, stream))
        except BaseException:
            capture.close()
            raise
        self._graph, self._capture = graph, capture

    def capture_end(self) -> None:
        """End this graph's capture. Raises `CaptureError` if a stream was forked into the capture and not joined."""
        graph, capture = self._graph, self._capture
        if graph is None or capture is None:
            raise CaptureError("capture_end() without capture_begin()")
        self._capture = None
        try:
            graph.program = capture.finish()
        except BaseException as error:
            self._graph = None
            self._open.__exit__(type(error), error, error.__traceback__)
            raise
        else:
            self._open.close()
        finally:
            capture.close()

    def replay(self) -> None:
        """Enqueue the graph's captured operations on the current stream."""
        if self._graph is None or self._graph.program is None:
            raise CaptureError("replay() of a graph that wasn't captured")
        self._graph.replay(current_stream().wrapped)

    def reset(self) -> None:
        """Drop the graph's captured operations. Replays in flight still run."""
        self._graph = None

    def pool(self) -> Pool:
        """Return the graph's memory pool, for other graphs to share."""
        if self._graph is None or self._graph.pool is None:
            raise CaptureError("pool() of a graph that wasn't captured")
        return self._graph.pool


def _not_again(context: CaptureContext) -> None:
    raise CaptureError(f"a graph captured between two calls can't be captured again ({context})")


class graph:  # noqa: N801  # torch's name
    """Capture the block's work into `cuda_graph`, on `stream` or on a new stream."""

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: Pool | None = None,
        stream: SimTorchStream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._arguments = (pool, capture_error_mode)
        self._graph = cuda_graph
        self._stream = stream

    def __enter__(self) -> None:
        synchronize()
        self._stream = self._stream or SimTorchStream()
        self._stream.__enter__()
        try:
            self._graph.capture_begin(*self._arguments)
        except BaseException:
            self._stream.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._stream is not None
        try:
            self._graph.capture_end()
        finally:
            self._stream.__exit__(kind, error, traceback)
