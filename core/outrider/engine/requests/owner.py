"""Which thread an engine belongs to. A call from another one is an error at once, instead of wrong tokens later."""

from __future__ import annotations

import os
import threading

from outrider.device import OutriderError


class WrongThread(OutriderError):
    """An engine was used from a thread, or a forked process, that it doesn't belong to."""


class Owner:
    """The thread and the process that may call an engine: those that made it, or that :meth:`adopt` it."""

    def __init__(self) -> None:
        self._thread, self._name, self._process = _here()

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the owner."""
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
        """The calling thread is the owner from now on. Raises :class:`WrongThread` in a forked process."""
        if os.getpid() != self._process:
            self._thread = threading.get_ident()
            self.check()
        self._thread, self._name, _ = _here()


def _here() -> tuple[int, str, int]:
    return threading.get_ident(), threading.current_thread().name, os.getpid()
