"""Child processes that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from outrider.registry.interruptions import interruptions_held

_PR_SET_PDEATHSIG = 1
_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def started(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
) -> Generator[subprocess.Popen[bytes]]:
    """A child in a session of its own. Leaving the scope kills what is left of the session, however it is left.

    A process that the child has moved to another session isn't found. ``options`` are those of :class:`subprocess.Popen`.
    """
    with ExitStack() as stack:
        with interruptions_held():
            child = stack.enter_context(subprocess.Popen(command, env=environment, start_new_session=True, **options))
            stack.callback(kill_session, child)
        yield child


@contextmanager
def deaf_from_the_start() -> Generator[None]:
    """Processes of ``multiprocessing`` that are started in the scope don't see SIGINT and SIGTERM, which come to a whole
    group of processes, until they call :func:`stay_deaf`: who starts them tells them to end. Keep it short.
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # where it's started later, it lets what is blocked through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTIONS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stay_deaf() -> None:
    """Ignore SIGINT and SIGTERM from now on, those too that came since the process was started. For its main thread."""
    for number in _INTERRUPTIONS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTIONS)


def kill_session(child: subprocess.Popen[bytes]) -> None:
    """End a child of :func:`started` and what it has started, now."""
    # The process group has the child's id until the child is waited for, and for as long as it has members.
    with interruptions_held(), suppress(ProcessLookupError, PermissionError):  # macOS: "not permitted" for zombies
        os.killpg(child.pid, signal.SIGKILL)


def end_with_parent() -> None:
    """On Linux, let the kernel kill this process when the thread that started it ends, whatever ended that.

    Other systems have no such call: there, a parent that is killed outright leaves this process behind.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
