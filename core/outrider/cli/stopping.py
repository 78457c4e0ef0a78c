"""Ending early: SIGTERM ends a command as Ctrl-C does, so that what it has started and made is cleaned up."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_REPEAT_S = 2.0
"""A SIGTERM that follows within this time is the same request: ``timeout`` sends it to the process and to its group."""


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


class Stop:
    """Whether SIGTERM has come; :func:`until_terminated` sets it."""

    def __init__(self) -> None:
        self.terminated = False
        self._ignored = False
        self._last = float("-inf")

    def ignore(self) -> None:
        """From now on SIGTERM changes nothing: the command is at its end."""
        self._ignored = True

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        del number, frame
        if self._ignored:
            return
        self.terminated = True
        last, self._last = self._last, time.monotonic()
        if self._last - last > _REPEAT_S:
            raise Terminated("terminated")


@contextmanager
def until_terminated() -> Generator[Stop]:
    """Raise :class:`Terminated` in the scope when SIGTERM comes. Where it's ignored, or in another thread than the main one,
    it stays as it is.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield stop
        return
    signal.signal(signal.SIGTERM, stop.handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
