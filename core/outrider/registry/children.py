"""Child processes that end with their parent, and their reaction to SIGINT and SIGTERM."""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
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


_CALL_CODE = (
    "import os, sys; from multiprocessing.connection import Connection; pipe = Connection(os.dup(0), writable=False); "
    "sys.path[:] = pipe.recv(); pipe.recv()()"
)


def start_call(
    call: Callable[[], object], *, stdout: int | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a child process that runs ``call``, a function that ``multiprocessing`` can send.

    The child ends once this process has ended. A process of ``multiprocessing`` would import this process's main module.

    A terminal sends SIGINT and SIGTERM to the whole process group. The child ignores both from its first moment, since its
    parent has to end it. ``stdout`` and ``pass_fds`` are arguments of :class:`subprocess.Popen`.
    """
    from multiprocessing.connection import Connection

    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTIONS)  # the child inherits the mask
    try:
        command = [sys.executable, "-c", _CALL_CODE]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, pass_fds=pass_fds)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    assert child.stdin is not None
    with suppress(BrokenPipeError), Connection(os.dup(child.stdin.fileno()), readable=False) as pipe:
        pipe.send(list(map(str, sys.path)))
        pipe.send(partial(_run_call, call))
    return child


def _run_call(call: Callable[[], object]) -> None:
    """Run the function of :func:`start_call` in the child process."""
    ignore_interruptions()
    end_with_pipe(0)
    call()


class JsonLines:
    """A reader of the JSON lines that a child process writes, with a time limit for each line."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = b""

    def read_line(self, limit_s: float) -> dict[str, Any] | None:
        """Return the next line; an empty object at the end of the file, or None after ``limit_s`` seconds."""
        end = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._descriptor, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                remaining_s = end - time.monotonic()
                if remaining_s <= 0 or not selector.select(remaining_s):
                    return None
                data = os.read(self._descriptor, 65536)
                if not data:
                    return {}
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        parsed: dict[str, Any] = json.loads(line)
        return parsed


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


def end_with_pipe(descriptor: int) -> None:
    """End this process once the other end of the pipe at ``descriptor`` is closed: the starter has ended."""

    def wait() -> None:
        while os.read(descriptor, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="outrider-starter", daemon=True).start()
