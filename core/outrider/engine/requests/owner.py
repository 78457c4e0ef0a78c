"""Owner: the thread that may call an engine. A call from another thread raises instead of corrupting tokens."""

from __future__ import annotations

import os
import threading

from outrider.device import OutriderError


class WrongThread(OutriderError):
    """A thread or a forked process called an engine that it doesn't own."""


class Owner:
    """The thread and the process that own an engine: its creator, or the last caller of :meth:`adopt`."""

    def __init__(self) -> None:
        self._thread, self._name, self._process = _current_thread()

    @property
    def is_here(self) -> bool:
        """Return True if the calling thread is the owner."""
        return threading.get_ident() == self._thread and os.getpid() == self._process

    def check(self) -> None:
        """Raise :class:`WrongThread` unless the calling thread is the owner."""
        if threading.get_ident() != self._thread:
            raise WrongThread(
                f"this engine belongs to thread {self._name!r} and was called from {threading.current_thread().name!r}: an "
                "engine is used by one thread; use outrider.AsyncEngine for several, or call Engine.adopt() in the new one "
                "once the old one is done with it"
            )
        if os.getpid() != self._process:
            raise WrongThread(
                f"this engine was made in process {self._process} and was called in {os.getpid()}, a fork of it; devices "
                "don't survive a fork: make the backend and the engine in the new process"
            )

    def adopt(self) -> None:
        """Make the calling thread the owner. Raises :class:`WrongThread` in a forked process."""
        if os.getpid() != self._process:
            self._thread = threading.get_ident()
            self.check()
        self._thread, self._name, _ = _current_thread()


def _current_thread() -> tuple[int, str, int]:
    return threading.get_ident(), threading.current_thread().name, os.getpid()
