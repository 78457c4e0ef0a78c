"""The standard streams of the command: there, safe to write any text to, and in JSON mode kept for one object."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TextIO


def prepare_streams() -> None:
    """Let every standard descriptor be open, and every text be written.

    A descriptor that is closed would be given to the next file that is opened, and that would get what libraries print. A
    closed standard output still fails when it's written to, as one that its reader has closed.
    """
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, flags)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
    # Python has None for a stream that was closed when it started.
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    # Text of a model may hold what the terminal's encoding lacks; that must not end the run.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="outrider: %(message)s")


@contextmanager
def kept_for_json(*, restore: bool) -> Generator[TextIO]:
    """A stream to standard output, for one object; all else that is written there meanwhile goes to standard error.

    That holds for Python's own stream and for the file descriptor, which libraries and child processes write to. With
    ``restore=False`` it goes on when the scope is left: what is written while the process ends goes to standard error too.
    """
    stdout = sys.stdout
    stdout.flush()
    descriptor = _descriptor(stdout)
    if descriptor is None:  # a test's own stream, say: there is no descriptor to keep
        with redirect_stdout(sys.stderr):
            yield stdout
        return
    kept = os.fdopen(os.dup(descriptor), "w", encoding=stdout.encoding, errors="backslashreplace")
    os.dup2(2, descriptor)
    sys.stdout = sys.stderr
    try:
        yield kept
    finally:
        sys.stdout = stdout
        with suppress(OSError):  # what couldn't be written has been reported
            if restore:
                stdout.flush()
                os.dup2(kept.fileno(), descriptor)
            kept.close()


def write_json(stream: TextIO, text: str) -> None:
    """Write a line of JSON. Characters that the stream's encoding lacks are written as JSON's escapes."""
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(json.loads(text))
    write(stream, text + "\n")


def write(stream: TextIO, text: str) -> None:
    """Write and flush."""
    stream.write(text)
    stream.flush()


def note(text: str) -> None:
    """Tell people ``text`` on standard error. Where it can't be written it's dropped: no result is lost for it."""
    try:
        write(sys.stderr, text)
    except OSError:
        _drop_unwritten(sys.stderr)


def _drop_unwritten(stream: TextIO) -> None:
    """Empty the buffer: it keeps what couldn't be written, and Python ends with 120 where it can't be flushed at exit."""
    with open(os.devnull, "w") as nowhere, suppress(OSError, ValueError):  # in a test it may be no real file
        descriptor = stream.fileno()
        kept = os.dup(descriptor)
        try:
            os.dup2(nowhere.fileno(), descriptor)
            stream.flush()
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)


def _descriptor(stream: TextIO) -> int | None:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None
    return descriptor if descriptor == 1 else None
