"""Streams, events and flags, and the scopes that a backend opens around work: placement on a stream, translation of errors.

The classes here check the rules, count generations and tell the observer; a vendor implements the underscored verbs.
Core passes streams explicitly and never asks which one is current.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from outrider.device.errors import CapabilityError, OutriderError, StreamOrderError

if TYPE_CHECKING:
    from outrider.device.backend import Backend

_BUSY_POLL_S = 0.02
"""Seconds of polling without a pause, except to yield to other threads: most iterations end within this time."""
_MAX_PAUSE_S = 0.01
_PAUSE_FRACTION = 1 / 500
"""Length of a pause as a fraction of the time waited so far: this bounds the relative delay of a wait."""


def poll(done: Callable[[], bool], seconds: float) -> bool:
    """Poll ``done`` until it returns True or ``seconds`` have passed; return its last result.

    The pause between two polls grows with the time waited, so that the caller learns of the end soon after it.
    """
    start = time.monotonic()
    pause = 0.0
    while not done():
        spent = time.monotonic() - start
        if spent >= seconds:
            return done()  # the caller's thread may have slept through the end
        if spent > _BUSY_POLL_S:
            pause = min(spent * _PAUSE_FRACTION, _MAX_PAUSE_S, seconds - spent)
        time.sleep(pause)
    return True


class Stream(ABC):
    """A queue of device work that runs in the order in which it was enqueued.

    *Ordering.* Work on one stream runs in order. Nothing orders two streams but a record on one and a wait on the
    other. A new stream is not ordered after work that other streams hold.

    *Lifetime.* A stream lives as long as its backend; dropping the object neither cancels nor waits for its work. If a
    device has a limited number of streams, an empty stream without references is reused.

    *Threads.* Any thread may use any stream; enqueueing on one stream from two threads at a time needs a lock of the
    caller's, or the order of the two is undefined.

    *Capture.* While this thread captures, ``record`` and ``wait`` become edges of the graph; ``synchronize`` and
    ``query`` raise :class:`StreamOrderError`.
    """

    def __init__(self, backend: Backend, name: str, priority: int = 0) -> None:
        self.backend = backend
        self.name = name
        self.priority = priority

    def record(self, event: Event) -> int:
        """Complete a new generation of ``event`` after everything that was enqueued on this stream so far.

        Returns the generation, counted from 1. An event may be recorded again at any time, on any stream; waits that
        were enqueued before keep the generation that they took. Never blocks. In a capture the record is an edge of
        the graph, makes no generation and returns 0; such an event can't be used outside that capture.

        Raises :class:`StreamOrderError` for an event of another backend, or one that is an edge of a graph.
        """
        self._check_ours(event)
        capture = self.backend.active_capture
        if capture is not None:
            capture.check_edge_record(event)
            self._record(event)
            event._captured_by = capture
            self.backend.listener.recorded(self, event, 0)
            return 0
        event._check_not_captured()
        self._record(event)
        event._generation += 1
        self.backend.listener.recorded(self, event, event._generation)
        return event._generation

    def wait(self, event: Event) -> None:
        """Run what is enqueued on this stream from now on after the event's generation that is visible now.

        Never blocks the host. A record after this call doesn't change what is waited for.

        Raises :class:`StreamOrderError` when the event was never recorded (a wait for nothing is a bug in the caller,
        even where a driver lets it pass), for an event of another backend, and in a capture for an event recorded
        outside it unless the backend declares ``waits_inside_graphs``.
        """
        self._check_ours(event)
        capture = self.backend.active_capture
        if capture is not None:
            capture.check_edge_wait(event)
            self._wait(event)
            self.backend.listener.waited(self, event, 0 if event._captured_by is capture else event._generation)
            return
        event._check_not_captured()
        event._check_recorded(f"stream {self.name!r} can't wait for it")
        self._wait(event)
        self.backend.listener.waited(self, event, event._generation)

    def synchronize(self) -> None:
        """Block the calling thread until everything enqueued on this stream so far has run.

        Orders this thread, and only this one, after that work. Errors of queued work surface here, typed.
        """
        self.backend.check_not_capturing(f"synchronize stream {self.name!r}")
        with self.backend.guard(f"synchronizing stream {self.name!r}"):
            self._synchronize()
        self.backend.listener.stream_synchronized(self)

    def query(self) -> bool:
        """Return True if everything enqueued on this stream so far has run. Never blocks.

        Errors of queued work surface here, typed, at the latest when the query would return True.
        """
        self.backend.check_not_capturing(f"query stream {self.name!r}")
        with self.backend.guard(f"asking stream {self.name!r}"):
            done = self._query()
        self.backend.listener.stream_queried(self, done)
        return done

    def _check_ours(self, event: Event) -> None:
        if event.backend is not self.backend:
            raise StreamOrderError(
                f"event {event.name!r} belongs to {event.backend.label}, stream {self.name!r} to {self.backend.label}: "
                "events order streams of one backend object; create the event with the same backend"
            )

    @property
    @abstractmethod
    def native(self) -> Any:
        """Return the vendor's stream object, for kernels that are launched by handle. Core never uses it."""

    @abstractmethod
    def _record(self, event: Event) -> None:
        """Carry out :meth:`record` on the vendor's device; in a capture, an edge."""

    @abstractmethod
    def _wait(self, event: Event) -> None:
        """Carry out :meth:`wait` on the vendor's device; takes the generation that is visible now."""

    @abstractmethod
    def _synchronize(self) -> None:
        """Carry out :meth:`synchronize` on the vendor's device."""

    @abstractmethod
    def _query(self) -> bool:
        """Carry out :meth:`query` on the vendor's device.

        True says that the work ran, and ran well. What failed is raised: the driver's own exception where
        ``Backend.translate_error`` knows it, or a :class:`DeviceError`. A status that is neither "done" nor "pending" is
        never an answer, and an error that is raised here isn't raised again elsewhere, unless the device is lost.
        """

    def __repr__(self) -> str:
        return f"<Stream {self.name!r} of {self.backend.label}>"


class Event(ABC):
    """A point in a stream's order that other streams and the host can wait for, again and again.

    Each record is a *generation*: 0 before the first, then counted up. The event completes generation by generation;
    ``query`` and ``synchronize`` speak of the latest.

    *Lifetime.* A wait that is enqueued stays valid when the Python object is dropped.
    *Threads.* Any thread may wait, query or synchronize.
    """

    def __init__(self, backend: Backend, name: str, timing: bool) -> None:
        self.backend = backend
        self.name = name
        self.timing = timing
        self._generation = 0
        self._captured_by: object | None = None

    @property
    def generation(self) -> int:
        """Return how often the event was recorded outside captures."""
        return self._generation

    def query(self) -> bool:
        """Return True if the latest generation has completed. Never blocks.

        Errors of queued work surface here, typed, at the latest when the query would return True. Raises
        :class:`StreamOrderError` when the event was never recorded, or in a capture.
        """
        self._check_host_call("query", "there is nothing to query")
        with self.backend.guard(f"asking event {self.name!r}"):
            done = self._query()
        self.backend.listener.event_queried(self, self._generation, done)
        return done

    def synchronize(self) -> None:
        """Block the calling thread until the latest generation has completed.

        Orders this thread, and only this one, after what the record covers. Errors of queued work surface here, typed.
        Raises :class:`StreamOrderError` when the event was never recorded, or in a capture.
        """
        self._check_host_call("synchronize", "the host can't wait for it")
        generation = self._generation
        with self.backend.guard(f"waiting for event {self.name!r}"):
            self._synchronize()
        self.backend.listener.event_synchronized(self, generation)

    def synchronize_within(self, seconds: float) -> bool:
        """Wait like :meth:`synchronize` for at most ``seconds``; return True if the generation has completed.

        After False, the calling thread is ordered after nothing. Errors of queued work surface here, typed.

        The default polls the event, often at first. Only the calling thread uses the device, so the wait is legal while
        other threads capture. A device whose schedule a tool decides has no clock and never returns False: it waits, and
        raises :class:`DeadlockError` at once if the generation can't complete any more.
        """
        self._check_host_call("synchronize", "the host can't wait for it")
        generation = self._generation
        with self.backend.guard(f"waiting for event {self.name!r}"):
            done = self._synchronize_within(seconds)
        if done:
            self.backend.listener.event_synchronized(self, generation)
        return done

    def elapsed_ms(self, end: Event) -> float:
        """Device milliseconds between the latest generations of this event and of ``end``; both have completed.

        ``end`` completed later, on any stream. The result has a fraction: the clock is finer than a millisecond.
        Raises :class:`CapabilityError` unless both were made with ``timing=True`` on a backend with ``event_timing``.
        """
        if not (self.timing and end.timing):
            raise CapabilityError(
                f"events {self.name!r} and {end.name!r} can't measure time: create both with timing=True on a backend "
                "that declares event_timing"
            )
        return self._elapsed_ms(end)

    def _check_host_call(self, action: str, consequence: str) -> None:
        self.backend.check_not_capturing(f"{action} event {self.name!r}")
        self._check_not_captured()
        self._check_recorded(consequence)

    def _check_recorded(self, consequence: str) -> None:
        if self._generation == 0:
            raise StreamOrderError(
                f"event {self.name!r} was never recorded: {consequence}; record it on the producing stream first"
            )

    def _check_not_captured(self) -> None:
        if self._captured_by is not None:
            raise StreamOrderError(
                f"event {self.name!r} is an edge inside a captured graph and has no generation outside it; "
                "use another event around the replay"
            )

    @abstractmethod
    def _query(self) -> bool:
        """Carry out :meth:`query` on the vendor's device.

        True says that the work before the record ran, and ran well. What failed is raised: the driver's own exception where
        ``Backend.translate_error`` knows it, or a :class:`DeviceError`. A status that is neither "done" nor "pending" is
        never an answer, and an error that is raised here isn't raised again elsewhere, unless the device is lost.
        """

    @abstractmethod
    def _synchronize(self) -> None:
        """Carry out :meth:`synchronize` on the vendor's device: raises what failed, as :meth:`_query` does."""

    def _synchronize_within(self, seconds: float) -> bool:
        """Carry out :meth:`synchronize_within` on the vendor's device.

        The default polls :meth:`_query`, and then calls :meth:`_synchronize`, which returns at once. That call also raises
        failures that a driver's query can't report.
        """
        if not poll(self._query, seconds):
            return False
        self._synchronize()
        return True

    def _elapsed_ms(self, end: Event) -> float:
        raise CapabilityError(f"{self.backend.label} measures no device time between {self.name!r} and {end.name!r}")

    def __repr__(self) -> str:
        return f"<Event {self.name!r} generation {self._generation} of {self.backend.label}>"


class Flag(ABC):
    """A resettable flag on the device: not an event, since a wait may be enqueued before the set that it consumes.

    ``set``, ``wait`` and ``reset`` are device operations in the order of their stream. A wait passes when the flag is
    up at the time it runs. A set of a flag that is already up is lost. A reset while a waiter has yet to see the flag
    makes that waiter wait for the next set: order each reset after the waits of its round.

    *Lifetime.* The object must outlive every operation enqueued on it.
    *Capture.* All three may be captured where the backend declares ``flags`` and ``captures_graphs``. In a warm-up before
    a capture they do nothing: the other side of the flag runs with the replay.
    """

    def __init__(self, backend: Backend, name: str) -> None:
        self.backend = backend
        self.name = name

    def set(self, stream: Stream) -> None:
        """Raise the flag after everything enqueued on ``stream`` so far. The set is lost if the flag is up by then."""
        if self.backend.is_rehearsing:
            return
        self._set(stream)
        self.backend.listener.flag_set(stream, self)

    def wait(self, stream: Stream) -> None:
        """Hold ``stream`` until the flag is up. Never blocks the host. The stream hangs if the flag is never set."""
        if self.backend.is_rehearsing:
            return
        self._wait(stream)
        self.backend.listener.flag_waited(stream, self)

    def reset(self, stream: Stream) -> None:
        """Lower the flag, in the order of ``stream``."""
        if self.backend.is_rehearsing:
            return
        self._reset(stream)
        self.backend.listener.flag_reset(stream, self)

    @abstractmethod
    def _set(self, stream: Stream) -> None:
        """Carry out :meth:`set` on the vendor's device."""

    @abstractmethod
    def _wait(self, stream: Stream) -> None:
        """Carry out :meth:`wait` on the vendor's device."""

    @abstractmethod
    def _reset(self, stream: Stream) -> None:
        """Carry out :meth:`reset` on the vendor's device."""

    def __repr__(self) -> str:
        return f"<Flag {self.name!r} of {self.backend.label}>"


class StreamScope:
    """The scope that :meth:`Backend.on` returns: it places torch work on one stream.

    This scope and :class:`Guard` are classes and not generators, which take twice as long: a step opens dozens of scopes.
    """

    __slots__ = ("_backend", "_observer", "_placed", "_stream")

    def __init__(self, backend: Backend, stream: Stream) -> None:
        self._backend = backend
        self._stream = stream

    def __enter__(self) -> None:
        backend, stream = self._backend, self._stream
        if stream.backend is not backend:
            raise StreamOrderError(f"{stream!r} isn't a stream of {backend.label}")
        capture = backend.active_capture
        if capture is not None:
            capture.check_fork(stream)
        self._observer = backend.observer
        self._placed = backend._on(stream)
        self._placed.__enter__()
        if self._observer is not None:
            try:
                self._observer.scope_entered(stream)
            except BaseException:
                self._placed.__exit__(None, None, None)
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._observer is not None:
                self._observer.scope_left(self._stream)
        finally:
            self._placed.__exit__(kind, error, traceback)


class Guard:
    """The scope that :meth:`Backend.guard` returns: it translates exceptions of the device."""

    __slots__ = ("_backend", "_doing")

    def __init__(self, backend: Backend, doing: str) -> None:
        self._backend = backend
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, OutriderError) or not isinstance(error, Exception):
            return
        if isinstance(error, NotImplementedError):
            raise CapabilityError(
                f"{self._backend.label} has no operator that is needed, while {self._doing}: {error}"
            ) from error
        translated = self._backend.translate_error(error, self._doing)
        if translated is not None:
            raise translated from error


@contextmanager
def uncollected() -> Generator[None]:
    """Turn garbage collection off inside the scope.

    During a capture, a driver may report the destruction of an unreachable graph as a fault of the capture. During start-up
    no object is garbage, and each full collection visits every object that torch has imported.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
