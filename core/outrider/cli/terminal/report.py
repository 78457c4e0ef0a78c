"""Output of a command: its report for people and for scripts, the standard streams, and notes about its start.

A report is data for scripts, and a function that renders the data for people. The standard streams are open, accept any text,
and are reserved for one object with ``--json``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import textwrap
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, TextIO

import typer
from rich import filesize
from rich.color import ColorSystem
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.style import Style

from outrider.device.errors import OutriderError


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandReport:
    """The result of a command, which the dispatcher prints; a command itself prints only text that it streams.

    ``streamed``: standard output has the text of a model, so ``render`` writes to standard error. ``traceback``: of a program
    that the command ran and that failed; printed on standard error with ``--debug``. A follower rank has no report: it prints
    nothing, not even with ``--json``.
    """

    data: Mapping[str, object]
    render: Callable[[Console], None]
    exit_code: int = 0
    traceback: str = ""
    streamed: bool = False


class PartialResultError(OutriderError):
    """An error of a command that has partial results: ``data``, for scripts. People have already seen the results."""

    def __init__(self, error: OutriderError, data: Mapping[str, object]) -> None:
        super().__init__(str(error))
        self.kind = type(error).__name__
        self.data = data


class SilentExit(typer.Exit):
    """Raised to end a rank without output, because another process reports the reason."""


class Interrupted(KeyboardInterrupt):
    """Raised for an interrupted command with the results so far; ``render`` prints results that the user hasn't seen yet."""

    def __init__(self, message: str, data: Mapping[str, object], render: Callable[[Console], None] | None = None) -> None:
        super().__init__(message)
        self.data = data
        self.render = render


def exit_code(error: SystemExit) -> int:
    """Return the exit code of a process that raises ``error``: its number modulo 256, 0 for None, or 1 for a text."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def to_json(data: Mapping[str, object]) -> str:
    """Return ``data`` as one line of JSON; infinite numbers and NaN become null."""
    return json.dumps(_finite(data), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


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
            os.set_inheritable(descriptor, True)  # else the next file that a child process opens gets the descriptor
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
        drop_unwritten(sys.stderr)


def drop_unwritten(stream: TextIO) -> None:
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


Tell = Callable[[str, int, int], None]


LOADING = "loading weights"
"""Name of the progress task whose amounts are bytes; other tasks count items."""


@contextmanager
def show_progress(shown: bool = True) -> Generator[Tell]:
    """Show a progress bar on a terminal for each task that is reported as ``(task, done, total)``, if ``shown``.

    Total 0: the amount of work is unknown.
    """
    console = Console(stderr=True)
    amount = TextColumn("{task.fields[amount]}", markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), amount, TimeElapsedColumn())
    # rich also counts a file or a pipe as a terminal where FORCE_COLOR is set.
    with Progress(*columns, console=console, transient=True, disable=not (shown and sys.stderr.isatty())) as bars:
        bar_of: dict[str, TaskID] = {}

        def tell(task: str, done: int, total: int) -> None:
            if task not in bar_of:
                bar_of[task] = bars.add_task(task, total=None, amount="")
            form = filesize.decimal if task == LOADING else str
            bars.update(
                bar_of[task], completed=done, total=total or None, amount=f"{form(done)} of {form(total)}" if total else ""
            )

        yield tell


def sum_of_loads(tell: Tell) -> Tell:
    """Return a progress callback for the engine's loads of target and draft, which shows both as one task through
    ``tell``.
    """
    before, last = 0, (0, 0)

    def progress(tensor: str, done: int, total: int) -> None:
        nonlocal before, last
        del tensor
        if total != last[1] or done < last[0]:  # the next load has begun
            before += last[1]
        last = done, total
        tell(LOADING, before + done, before + total)

    return progress


def highlighter() -> Callable[[str], str]:
    """Return the function that makes text green on standard output; unchanged where that isn't a terminal with colours."""
    console = Console(file=sys.stdout)
    if not sys.stdout.isatty() or console.no_color or console.color_system is None:
        return str
    return partial(Style(color="green").render, color_system=ColorSystem.STANDARD)
