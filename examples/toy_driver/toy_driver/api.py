"""The C-like interface of the driver: every call returns a status, alone or before its result.

Work on a stream runs in order, concurrently with other streams and with the caller. An event can be recorded repeatedly. A
wait or query refers to its latest record; an event that was never recorded is complete. During a thread's capture, its
launches on the captured stream are stored and not run, and it may not use other streams. After a kernel has failed, the next
call that would report completed work returns KERNEL_FAILED instead, once.
"""

from __future__ import annotations

import threading
import time

from toy_driver.queues import CaptureState, EventState, Failures, Handles, Kernel, Point, StreamState

SUCCESS, NOT_READY, INVALID_HANDLE, INVALID_VALUE, KERNEL_FAILED, CAPTURE_ERROR = range(6)
_TEXTS = (
    "success",
    "work is pending",
    "no such handle",
    "a value that can't be used",
    "a kernel failed",
    "not possible during a capture",
)
_handles = Handles()
_failures = Failures()
_thread = threading.local()


def toy_driver_version() -> int:
    """Return the version: 1000 times the major version plus the minor version."""
    return 1002


def toy_device_count() -> int:
    """Return the number of devices, 1."""
    return 1


def toy_error_string(status: int) -> str:
    """Return the description of a status."""
    return _TEXTS[status] if 0 <= status < len(_TEXTS) else f"unknown status {status}"


# -- streams ------------------------------------------------------------------------------------------------------------


def toy_stream_create() -> tuple[int, int]:
    """Create a stream. Return (status, stream)."""
    return SUCCESS, _handles.new(StreamState(_failures))


def toy_stream_destroy(stream: int) -> int:
    """Invalidate the handle. Queued kernels still run."""
    state = _handles.drop(stream, StreamState)
    if state is None:
        return INVALID_HANDLE
    state.kernels.put(None)
    return SUCCESS


def toy_launch(stream: int, kernel: Kernel) -> int:
    """Enqueue `kernel()` on the stream and return immediately. During a capture the kernel is stored instead."""
    state = _handles.find(stream, StreamState)
    if state is None:
        return INVALID_HANDLE
    capture = _capture()
    if capture is None:
        state.enqueue(kernel)
    elif capture.stream == stream:
        capture.kernels.append(kernel)
    else:
        return CAPTURE_ERROR
    return SUCCESS


def toy_spin(stream: int, nanoseconds: int) -> int:
    """Launch a kernel that keeps the stream busy."""
    return toy_launch(stream, lambda: time.sleep(nanoseconds / 1e9))


def toy_fail(stream: int) -> int:
    """Launch a kernel that fails, to test the reporting of errors."""
    return toy_launch(stream, _fail)


def toy_stream_query(stream: int) -> int:
    """Return NOT_READY, or SUCCESS or KERNEL_FAILED if the work is done."""
    state = _handles.find(stream, StreamState)
    if state is None:
        return INVALID_HANDLE
    if _capture() is not None:
        return CAPTURE_ERROR
    return _completion_status() if state.finished == state.enqueued else NOT_READY


def toy_stream_synchronize(stream: int) -> int:
    """Block until the stream is empty. Return SUCCESS or KERNEL_FAILED."""
    state = _handles.find(stream, StreamState)
    if state is None:
        return INVALID_HANDLE
    if _capture() is not None:
        return CAPTURE_ERROR
    state.point().wait()
    return _completion_status()


def toy_stream_wait_event(stream: int, event: int) -> int:
    """Make later launches on the stream wait for the event's latest record."""
    state, marked = _handles.find(stream, StreamState), _handles.find(event, EventState)
    if state is None or marked is None:
        return INVALID_HANDLE
    capture = _capture()
    if capture is not None:  # a captured stream is in order, so a wait for its own event adds no edge
        return SUCCESS if marked.capture is capture and capture.stream == stream else CAPTURE_ERROR
    if marked.point is not None:
        state.enqueue(marked.point.wait)
    return SUCCESS


# -- events -------------------------------------------------------------------------------------------------------------


def toy_event_create() -> tuple[int, int]:
    """Create an event. Return (status, event)."""
    return SUCCESS, _handles.new(EventState())


def toy_event_destroy(event: int) -> int:
    """Invalidate the handle. Queued waits stay valid."""
    return INVALID_HANDLE if _handles.drop(event, EventState) is None else SUCCESS


def toy_event_record(event: int, stream: int) -> int:
    """Record the event after all launches on the stream so far."""
    state, marked = _handles.find(stream, StreamState), _handles.find(event, EventState)
    if state is None or marked is None:
        return INVALID_HANDLE
    capture = _capture()
    if capture is not None and capture.stream != stream:
        return CAPTURE_ERROR
    marked.capture = capture
    if capture is None:
        marked.point = state.point()
    return SUCCESS


def toy_event_query(event: int) -> int:
    """Return NOT_READY, or SUCCESS or KERNEL_FAILED if the latest record is complete."""
    marked = _handles.find(event, EventState)
    if marked is None:
        return INVALID_HANDLE
    return _completion_status() if marked.point is None or marked.point.passed else NOT_READY


def toy_event_synchronize(event: int) -> int:
    """Block until the latest record is complete. Return SUCCESS or KERNEL_FAILED."""
    marked = _handles.find(event, EventState)
    if marked is None:
        return INVALID_HANDLE
    if marked.point is not None:
        marked.point.wait()
    return _completion_status()


def toy_event_elapsed_ms(start: int, end: int) -> tuple[int, float]:
    """Return (status, milliseconds between the two records)."""
    points: list[Point] = []
    for event in (start, end):
        marked = _handles.find(event, EventState)
        if marked is None or marked.point is None:
            return INVALID_HANDLE, 0.0
        points.append(marked.point)
    if not all(point.passed for point in points):
        return NOT_READY, 0.0
    return SUCCESS, (points[1].seconds - points[0].seconds) * 1e3


# -- graphs -------------------------------------------------------------------------------------------------------------


def toy_capture_begin(stream: int) -> int:
    """Store this thread's later launches on `stream` instead of running them."""
    if _handles.find(stream, StreamState) is None:
        return INVALID_HANDLE
    if _capture() is not None:
        return CAPTURE_ERROR
    _thread.capture = CaptureState(stream)
    return SUCCESS


def toy_capture_end(stream: int) -> tuple[int, int]:
    """End the capture. Return (status, graph)."""
    capture = _capture()
    if capture is None or capture.stream != stream:
        return CAPTURE_ERROR, 0
    _thread.capture = None
    return SUCCESS, _handles.new(capture)


def toy_graph_launch(graph: int, stream: int) -> int:
    """Run all captured kernels in order, as one kernel."""
    captured = _handles.find(graph, CaptureState)
    if captured is None:
        return INVALID_HANDLE
    return toy_launch(stream, lambda: [kernel() for kernel in captured.kernels])


def toy_graph_destroy(graph: int) -> int:
    """Invalidate the handle. Queued launches still run."""
    return INVALID_HANDLE if _handles.drop(graph, CaptureState) is None else SUCCESS


def _completion_status() -> int:
    return KERNEL_FAILED if _failures.clear() else SUCCESS


def _fail() -> None:
    raise RuntimeError("a kernel that was made to fail")


def _capture() -> CaptureState | None:
    return getattr(_thread, "capture", None)
