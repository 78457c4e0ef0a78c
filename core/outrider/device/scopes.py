"""Scopes that a backend opens around work: placement on a stream, and translation of errors.

The scopes are classes and not generators, which take twice as long: a step opens dozens of scopes.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from outrider.device.errors import CapabilityError, OutriderError, StreamOrderError

if TYPE_CHECKING:
    from outrider.device.backend import Backend
    from outrider.device.stream import Stream


class StreamScope:
    """The scope that :meth:`Backend.on` returns: it places torch work on one stream."""

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
