"""Early end of a command: SIGTERM and SIGINT raise an exception in it, so that its processes and files are cleaned up."""

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
"""Seconds within which a second signal counts as the same request: ``timeout`` signals the process and then its group."""
_TWICE_S = 0.3
"""The same limit for an interrupt that doesn't end the command, in seconds: a person may press Ctrl-C again after
a second.
"""
_AGAIN_S = 0.02
"""Seconds after which an exception that Python dropped is raised again."""
_PATIENCE_S = 8.0
"""Seconds that an operation of a compiled library may keep Python from handling a signal. Then the process is ended."""
_LAST_S = 2.0
"""Seconds that a command has to finish its report after a signal: its output may have no reader."""


class Stopped(KeyboardInterrupt):
    """Raised in a command when a signal requests its end.

    SIGINT raises this class too. After a plain KeyboardInterrupt has passed through ``exec`` of a text, as in ``dataclass``,
    ``python -m`` ends by the signal itself, even if the exception was caught and another exit code was requested.
    """


class SignalStop:
    """The signal handling of a command. Signals are deferred until :meth:`ready`, and raise :class:`Stopped` from then on.

    ``done``: the command reports its end, and a signal doesn't change the report. It is an attribute, not a method, because
    Python handles signals at function calls, and not at an assignment.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """Number of the signal that requested the end of the command, or None."""
        self.done = False
        self.last_words: Callable[[int], None] | None = None
        """The function that reports, in the form of the command's output, that the signal with a given number ended the
        process.
        """
        self.handled_at = float("-inf")
        """Time of the last handled signal, by ``time.monotonic``."""
        self._ready = False
        self._instead: Callable[[], bool] | None = None
        self._taken_at = float("-inf")
        self._hook = sys.unraisablehook

    def ready(self) -> None:
        """Raise :class:`Stopped` at signals from now on, and at once if a signal was deferred."""
        self._ready = True
        if self.signal is not None:
            self._raise()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle signal ``number``: defer it, raise :class:`Stopped`, or call the replacement for interrupts."""
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
        """Record the time at which another handler has handled a signal, so that the watcher thread doesn't end
        the process.
        """
        self.handled_at = time.monotonic()

    @classmethod
    def of_process(cls, number: int = signal.SIGINT) -> SignalStop | None:
        """Return the instance that handles the signal in this process; None if the signal is ignored or handled otherwise."""
        handler = getattr(signal.getsignal(number), "__self__", None)
        return handler if isinstance(handler, cls) else None

    @contextmanager
    def interrupts(self, instead: Callable[[], bool]) -> Generator[None]:
        """Call ``instead`` at SIGINT inside the scope, instead of ending the command.

        The command ends only if ``instead`` returns False. ``instead`` may raise.
        """
        self._instead = instead
        try:
            yield
        finally:
            self._instead = None

    def unraisable(self, found: Any) -> None:
        """Raise a dropped :class:`Stopped` again; pass other exceptions to the previous ``sys.unraisablehook``.

        Python drops an exception that a signal handler raises in a destructor or while a module's lock is released.
        """
        if self.signal is not None and isinstance(found.exc_value, KeyboardInterrupt):
            _after(_AGAIN_S, self._raise)
        else:
            self._hook(found)

    def _raise(self) -> None:
        if self.done:
            return
        if _is_being_imported("torch"):  # its compiled part imports numpy, and drops exceptions of that import
            _after(_AGAIN_S, self._raise)
            return
        raise Stopped("terminated" if self.signal == signal.SIGTERM else "interrupted")


def _is_being_imported(name: str) -> bool:
    """Return True while Python is importing the module ``name``."""
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def _watch(stop: SignalStop, numbers: Collection[int]) -> None:
    """Start a thread that ends the process if Python can't handle a signal in time.

    Python handles signals between operations, and an operation of a compiled library may take minutes. Files of the command
    are not cleaned up then; its child processes end with it.
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
    """Duplicate the descriptor to a number above 2 and close the original.

    A standard stream that was closed at the start leaves its number (0 to 2) free for other files.
    """
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved


def _after(seconds: float, action: Callable[[], object]) -> None:
    signal.signal(signal.SIGALRM, lambda number, frame: action())
    signal.setitimer(signal.ITIMER_REAL, seconds)


@contextmanager
def until_stopped(*, process_ends: bool) -> Generator[SignalStop]:
    """Handle SIGTERM and SIGINT in the scope by :class:`SignalStop`, except a signal that is ignored or handled already.

    Outside the main thread no signal is handled. ``process_ends``: only the end of the process follows the scope; the
    handlers stay, so that a late signal doesn't change the exit code.
    """
    stop = SignalStop()
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
        # Called last: afterwards Python restores the default actions, while libraries may still take time to end.
        atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in taken])
    sys.unraisablehook = stop.unraisable
    try:
        yield stop
    finally:
        if not process_ends:
            sys.unraisablehook = stop._hook
            for number, handler in taken.items():
                signal.signal(number, handler)
