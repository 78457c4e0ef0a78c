"""The standard streams of a command: open, able to print any text, and in JSON mode reserved for one object."""

from __future__ import annotations

import json
import logging
import os
import sys
import textwrap
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import IO, TextIO

_USUAL_WIDTH = 80


def prepare_streams() -> None:
    """Open each closed standard descriptor, and let the streams escape characters that their encoding lacks.

    The next file that is opened would get a closed descriptor, and with it the output of libraries. A write to a standard
    output that was closed still fails, like a write to a pipe without a reader.
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
    # A model may write characters that the terminal's encoding lacks; that must not end the command.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="outrider: %(message)s")


@contextmanager
def reserve_stdout_for_json(*, restore: bool) -> Generator[TextIO]:
    """Yield a stream to standard output for one JSON object, and redirect all other output to standard error.

    The redirection covers Python's stream and the file descriptor, to which libraries and child processes write. With
    ``restore=False`` it outlasts the scope, so that output at the end of the process goes to standard error too.
    """
    stdout = sys.stdout
    stdout.flush()
    descriptor = _descriptor(stdout)
    if descriptor is None:  # a test's own stream, say: there is no descriptor to keep
        with redirect_stdout(sys.stderr):
            yield stdout
        return
    saved = os.fdopen(os.dup(descriptor), "w", encoding=stdout.encoding, errors="backslashreplace")
    os.dup2(2, descriptor)
    sys.stdout = sys.stderr
    try:
        yield saved
    finally:
        sys.stdout = stdout
        with suppress(OSError):  # a failed write has been reported already
            if restore:
                stdout.flush()
                os.dup2(saved.fileno(), descriptor)
            saved.close()


def write_json(stream: TextIO, text: str) -> None:
    """Write a line of JSON, with JSON escapes for the characters that the stream's encoding lacks."""
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(json.loads(text))
    write(stream, text + "\n")


def write(stream: TextIO, text: str) -> None:
    """Write ``text`` to ``stream`` and flush the stream."""
    stream.write(text)
    stream.flush()


def terminal_width(stream: IO[str]) -> int | None:
    """Return the number of columns of a terminal, or None for another stream."""
    return os.get_terminal_size(stream.fileno()).columns or _USUAL_WIDTH if stream.isatty() else None


def wrap_words(text: str, stream: IO[str]) -> str:
    """Return ``text`` with line ends between words for a terminal, which would break words. Other streams change nothing."""
    width = terminal_width(stream)
    if width is None:
        return text

    def wrap(line: str) -> str:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

    return "\n".join(wrap(line) if len(line) > width else line for line in text.split("\n"))


def note(text: str) -> None:
    """Write ``text`` to standard error, or drop it if that fails: a note must not cost the result of a command."""
    try:
        write(sys.stderr, wrap_words(text, sys.stderr))
    except OSError:
        _drop_unwritten(sys.stderr)


def _drop_unwritten(stream: TextIO) -> None:
    """Discard buffered text that a stream could not write; Python would fail to flush it at exit and return code 120."""
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
