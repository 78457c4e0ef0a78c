"""Handling of SIGINT and SIGTERM around code that must not be interrupted, such as creating a resource and its clean-up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager


def accepted_interruptions() -> tuple[signal.Signals, ...]:
    """Return SIGTERM and SIGINT without those that this process ignores.

    A shell without job control starts a background job with SIGINT ignored, because Ctrl-C is for the foreground job.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    return tuple(number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN)


@contextmanager
def interruptions_held() -> Generator[None]:
    """Delay the Python handlers of SIGINT and SIGTERM until the end of the scope.

    The scope should be short. A process that starts in the scope has the signals' default actions. Does nothing outside the
    main thread, in which no handlers run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    python_handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in python_handlers:
            signal.signal(number, lambda number, frame: received.append(number))
        yield
    finally:
        for number, handler in python_handlers.items():
            signal.signal(number, handler)
        for delayed in received:
            signal.raise_signal(delayed)
