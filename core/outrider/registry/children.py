"""Child processes that end with their parent, and their reaction to SIGINT and SIGTERM."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any


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


_PR_SET_PDEATHSIG = 1
_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def child_session(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
) -> Generator[subprocess.Popen[bytes]]:
    """Start a child process in a new session. The end of the scope kills all processes of the session.

    ``options``: further arguments of :class:`subprocess.Popen`. A process that has moved to another session survives.
    """
    with ExitStack() as stack:
        with interruptions_held():
            child = stack.enter_context(subprocess.Popen(command, env=environment, start_new_session=True, **options))
            stack.callback(kill_session, child)
        yield child


@contextmanager
def interruptions_blocked_in_children() -> Generator[None]:
    """Block SIGINT and SIGTERM in ``multiprocessing`` processes that start in the scope, until they call
    :func:`ignore_interruptions`.

    A terminal sends these signals to the whole process group, but the parent has to end such a child itself. The scope
    blocks the signals in this process too, so it should be short.
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # its start would unblock the signals
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTIONS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def ignore_interruptions() -> None:
    """Ignore SIGINT and SIGTERM, including blocked ones that are pending. Call it in the child's main thread."""
    for number in _INTERRUPTIONS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTIONS)


def kill_session(child: subprocess.Popen[bytes]) -> None:
    """Kill a child of :func:`child_session` and all processes of its session."""
    # The process group keeps the child's id until the parent has waited for the child and all members have ended.
    with interruptions_held(), suppress(ProcessLookupError, PermissionError):  # macOS: PermissionError for zombies
        os.killpg(child.pid, signal.SIGKILL)


def end_with_parent() -> None:
    """Let the Linux kernel kill this process once the thread that started it ends.

    Does nothing on other systems: a killed parent then leaves this process running.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
