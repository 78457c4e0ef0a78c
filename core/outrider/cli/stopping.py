"""Ending early: SIGTERM and SIGINT end a command where it stands, so that what it has started and made is cleaned up."""

from __future__ import annotations

import atexit
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_REPEAT_S = 2.0
"""A signal that follows within this time is the same request: ``timeout`` sends it to the process and to its group."""
_TWICE_S = 0.3
"""The same for an interrupt that doesn't end the command: people press Ctrl-C again after a second."""
_AGAIN_S = 0.02
"""So long after it was lost, the request is made again."""
_PATIENCE_S = 8.0
"""So long an operation of a compiled library may keep Python from handling a signal."""
_LAST_S = 2.0
"""So long a command at its end may take for it once a signal has come: nobody may read what it writes."""


class Stopped(KeyboardInterrupt):
    """A signal has come.

    A class of its own also for SIGINT: where a plain KeyboardInterrupt has passed through ``exec`` of a text, as in
    ``dataclass``, ``python -m`` ends by the signal itself, even if it was caught and another exit code was asked for.
    """


class Stop:
    """What the signals do to a command. At first they wait; once it is :meth:`ready` they end it; ``done`` says that its
    end is being reported, and then they change nothing.

    ``done`` is an attribute, not a method: Python handles signals where functions are called, not where one is set.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """The signal that asked the command to end."""
        self.done = False
        self.last_words: Callable[[int], None] | None = None
        """Says in the command's own form that the signal with this number ended it, where nothing else could."""
        self.handled_at = float("-inf")
        """When a signal was handled last, by ``time.monotonic``."""
        self._ready = False
        self._instead: Callable[[], bool] | None = None
        self._taken_at = float("-inf")
        self._hook = sys.unraisablehook

    def ready(self) -> None:
        """From now on a signal raises. Raises at once where one has come."""
        self._ready = True
        if self.signal is not None:
            self._raise()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        del frame
        if self.done:
            _after(_LAST_S, lambda: os._exit(128 + number))
            return
        last, self.handled_at = self.handled_at, time.monotonic()
        if number == signal.SIGINT and self._instead is not None:
            if self.handled_at - self._taken_at <= _TWICE_S:
                return
            self._taken_at = self.handled_at
            if self._instead():
                return
        elif self.handled_at - last <= _REPEAT_S and self.handled_at - self._taken_at > _REPEAT_S:
            return
        self.signal = number
        if self._ready:
            self._raise()

    def handled(self) -> None:
        """Another handler has taken a signal: the process needn't be ended for it."""
        self.handled_at = time.monotonic()

    @classmethod
    def of_process(cls, number: int = signal.SIGINT) -> Stop | None:
        """The one that handles the signal here; None where it's ignored, or handled otherwise."""
        handler = getattr(signal.getsignal(number), "__self__", None)
        return handler if isinstance(handler, cls) else None

    @contextmanager
    def interrupts(self, instead: Callable[[], bool]) -> Generator[None]:
        """In this scope SIGINT calls ``instead``, and ends the command only if that returns False. It may raise."""
        self._instead = instead
        try:
            yield
        finally:
            self._instead = None

    def unraisable(self, found: Any) -> None:
        """Instead of ``sys.unraisablehook``. Python drops what is raised in a destructor, or where a module's lock is given
        back. A request to end must not get lost there.
        """
        if self.signal is not None and isinstance(found.exc_value, KeyboardInterrupt):
            _after(_AGAIN_S, self._raise)
        else:
            self._hook(found)

    def _raise(self) -> None:
        if self.done:
            return
        if _is_being_imported("torch"):  # its compiled part imports numpy, and drops what is raised there
            _after(_AGAIN_S, self._raise)
            return
        raise Stopped("terminated" if self.signal == signal.SIGTERM else "interrupted")


def _is_being_imported(name: str) -> bool:
    """Whether an import of the module has begun and not ended."""
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def _watch(stop: Stop, numbers: Collection[int]) -> None:
    """End the process where Python doesn't get to handle a signal: it does so between operations alone, and one of a compiled
    library may take minutes. What the command has made lies where it is then; processes that it has started end with it.
    """
    read, written = map(_above_standard, os.pipe())
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)

    def watch() -> None:
        while number := next(iter(os.read(read, 1)), 0):
            if number not in numbers:
                continue
            came = time.monotonic()
            time.sleep(_PATIENCE_S)
            if stop.signal is None and not stop.done and stop.handled_at < came - _AGAIN_S:
                if stop.last_words is not None:
                    stop.last_words(number)
                os._exit(128 + number)

    threading.Thread(target=watch, name="outrider-signals", daemon=True).start()


def _above_standard(descriptor: int) -> int:
    """The descriptor, moved away from 0 to 2, which are free where a standard stream was closed, and are taken later."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved


def _after(seconds: float, action: Callable[[], object]) -> None:
    signal.signal(signal.SIGALRM, lambda number, frame: action())
    signal.setitimer(signal.ITIMER_REAL, seconds)


@contextmanager
def until_stopped(*, process_ends: bool) -> Generator[Stop]:
    """Handle SIGTERM and SIGINT in the scope as :class:`Stop` says. Where one is ignored or handled already, or in another
    thread than the main one, it stays as it is.

    ``process_ends``: nothing follows the scope but the end of the process. Then the handlers stay: the exit code stands.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        stop.ready()
        yield stop
        return
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    taken = {number: handler for number, handler in usual.items() if signal.getsignal(number) == handler}
    for number in taken:
        signal.signal(number, stop.handle)
    if process_ends:
        _watch(stop, taken)
        # Called last. Behind it Python gives the signals their default actions back, and libraries take their time to end.
        atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in taken])
    sys.unraisablehook = stop.unraisable
    try:
        yield stop
    finally:
        if not process_ends:
            sys.unraisablehook = stop._hook
            for number, handler in taken.items():
                signal.signal(number, handler)
