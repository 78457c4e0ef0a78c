"""Moments that no signal may cut in two: something is made, and noted for being cleaned up."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path


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


def write_whole(path: Path, text: str) -> None:
    """Write a file, all of it or nothing: a regular one is written beside its place first and then moved there."""
    if path.is_symlink() or (path.exists() and not path.is_file()):  # a device, a pipe, or a link to something
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        if path.exists():
            beside.chmod(path.stat().st_mode & 0o7777)
        beside.replace(path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is not None:
            raise type(error)(error.errno, error.strerror, str(path)) from None
        raise


@contextmanager
def scratch_directory(prefix: str) -> Generator[Path]:
    """A temporary directory that is gone behind the scope, whenever a signal comes."""
    with ExitStack() as stack:
        with interruptions_held():
            made = tempfile.TemporaryDirectory(prefix=prefix)
            stack.callback(_remove, made)
        yield Path(made.name)


def _remove(made: tempfile.TemporaryDirectory[str]) -> None:
    with interruptions_held():
        made.cleanup()
