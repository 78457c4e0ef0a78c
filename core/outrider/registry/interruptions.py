"""Moments that no signal may cut in two: something is made, and noted for being cleaned up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager


def accepted_interruptions() -> tuple[signal.Signals, ...]:
    """Return SIGTERM and SIGINT without those that this process ignores.

    A shell without job control starts a background job with SIGINT ignored: a Ctrl-C is meant for the job in the foreground.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    return tuple(number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN)


@contextmanager
def interruptions_held() -> Generator[None]:
    """Let SIGINT and SIGTERM wait until the scope is left, where they have Python handlers; these are called then.

    Keep it short. A process that is started meanwhile has the signals' usual actions. Does nothing in another thread than
    the main one: handlers don't run there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in held:
            signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)
