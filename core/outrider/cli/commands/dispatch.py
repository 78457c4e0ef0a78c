"""Dispatch of a command line, and its errors in forms for people and for scripts.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted (SIGINT), 141 the reader of standard output ended (the command
ends silently), 143 terminated (SIGTERM). With ``--json`` standard
output gets one JSON object in each of these cases, and nothing else.
"""

from __future__ import annotations

import errno
import importlib.metadata
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from types import MappingProxyType
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from outrider.cli.commands.table import commands, group
from outrider.cli.options.option_values import UsageError
from outrider.cli.terminal.report import (
    CommandReport,
    Interrupted,
    PartialResultError,
    SilentExit,
    drop_unwritten,
    exit_code,
    note,
    prepare_streams,
    reserve_stdout_for_json,
    terminal_width,
    to_json,
    wrap_words,
    write,
    write_json,
)
from outrider.cli.terminal.stopping import SignalStop
from outrider.device.errors import OutriderError

_HELP = "Overlapped speculative decoding of LLMs behind a small hardware-backend interface."
_OUTPUT_CLOSED = 128 + signal.SIGPIPE
_MAX_TABLE_WIDTH = 10_000
_ADVICE_BY_ERRNO: Mapping[int, str] = MappingProxyType(
    {
        errno.ENOENT: "check the name and the directories before it",
        errno.ENOTDIR: "a part of that path is a file; name another path",
        errno.EISDIR: "name a file, not a directory",
        errno.EEXIST: "name something that isn't there yet",
        errno.EACCES: "give yourself the right to it, or name another place",
        errno.EPERM: "give yourself the right to it, or name another place",
        errno.EROFS: "what lies there can't be changed; name another place",
        errno.ENAMETOOLONG: "choose a shorter name",
        errno.ELOOP: "links there lead to each other; name the file itself",
        errno.EMFILE: "let processes open more files: ulimit -n",
        errno.EDQUOT: "free some of what is yours there, or write elsewhere",
        errno.EIO: "the disk or its connection fails; use another one",
    }
)
"""Advice by error number of the operating system, whose own messages have none."""


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """Print ``objects``. No word is broken: a truncated number would be another number.

        A table in a file is as wide as its longest words need. On a terminal that is narrower, each row becomes a paragraph.
        """
        for each in objects:
            if isinstance(each, Table) and not self._fits(each):
                for line in _paragraphs(each):
                    super().print(wrap_words(line, self.file), **options)
            else:
                super().print(wrap_words(each, self.file) if isinstance(each, str) else each, **options)
        if not objects:
            super().print(**options)

    def _fits(self, table: Table) -> bool:
        """Make the table's columns wide enough for their longest words. Return False if the terminal is narrower
        than that.
        """
        wide = self.options.update(max_width=_MAX_TABLE_WIDTH)
        for column in table.columns:
            words = (Measurement.get(self, wide, cell).minimum for cell in (column.header, *column.cells))
            column.min_width = max(column.min_width or 0, *words)
        needed = Measurement.get(self, wide, table).minimum
        if needed > self.width and self.file.isatty():
            return False
        self.width = max(self.width, needed)
        return True

    def on_broken_pipe(self) -> None:
        """Raise the error again so that it is reported; rich would end the process silently. Called by rich."""
        raise BrokenPipeError


def _paragraphs(table: Table) -> Iterator[str]:
    """Yield the lines of a table as paragraphs: the first cell of a row, and its other cells with their headers."""
    headers = [str(column.header) for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        yield f"{cells[0]}"
        for header, cell in zip(headers[1:], cells[1:], strict=True):
            if str(cell):
                yield f"  {header}: {cell}" if header else f"  {cell}"


def dispatch(arguments: Sequence[str] | None, stop: SignalStop) -> int:
    """Run the command line and return the exit code. Takes ``sys.argv`` unless ``arguments`` are given."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = given[: given.index("--")] if "--" in given else given
    debug = "--debug" in options
    line = [item for item in given if item != "--debug"] if debug else given
    prepare_streams()
    with ExitStack() as stack:
        stack.callback(note, "")  # a failed write of a library to standard error must not decide the exit code
        stdout = stack.enter_context(reserve_stdout_for_json(restore=arguments is not None)) if "--json" in options else None
        if stdout is not None:
            stop.last_words = lambda number: _say_ended(stdout, number)
        try:
            stop.ready()
            return _run(line or ["--help"], stdout, stop, debug)
        except BaseException as error:
            stop.done = True
            if debug and not isinstance(error, typer.Exit):
                note(traceback.format_exc())
            return _report_failure(error, stdout, asked=stop.signal)


def _run(arguments: Sequence[str], json_out: TextIO | None, stop: SignalStop, debug: bool) -> int:
    """Run a command, write its report to ``json_out`` as one object, or to standard output for people if that is None, and
    return the exit code.
    """
    if [item for item in arguments if item != "--json"] == ["--version"]:
        version = importlib.metadata.version("outrider")
        if json_out is not None:
            stop.done = True
            write_json(json_out, to_json({"outrider": version}))
        else:
            write(sys.stdout, f"outrider {version}\n")
        return 0
    command = typer.main.get_command(group(commands(), help=_HELP, completion=True))
    # Not command.main(): that turns Ctrl-C and a closed pipe into exits of its own.
    try:
        command._main_shell_completion(ctx_args={}, prog_name="outrider")  # exits if a shell asks for completions
        context = command.make_context("outrider", list(arguments), obj=tuple(arguments))
    except SystemExit as error:
        return exit_code(error)
    with context:
        report = command.invoke(context)
    if debug and isinstance(report, CommandReport) and report.traceback:
        note(report.traceback)
    if isinstance(report, CommandReport):
        if json_out is not None:
            text = to_json(report.data)
            stop.done = True  # a later signal would write a second object
            write_json(json_out, text)
        else:
            with suppress(OSError) if report.streamed else nullcontext():  # a note must not cost the result of a command
                _show(report.render, sys.stderr if report.streamed else sys.stdout)
    sys.stdout.flush()
    return report.exit_code if isinstance(report, CommandReport) else 0


def _show(render: Callable[[Console], None], stream: TextIO) -> None:
    width = terminal_width(stream)
    height = None if width is None else _MAX_TABLE_WIDTH  # rich ignores a width without a height on a dumb terminal
    console = _Console(file=stream, width=width, height=height, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.width = max(console.width, 1)  # rich prints nothing if the variable COLUMNS is 0
    render(console)


def _say_ended(json_out: TextIO, number: int) -> None:
    """Write the command's JSON object after signal ``number`` ended it in the middle of an operation."""
    kind = "Terminated" if number == signal.SIGTERM else "Interrupted"
    message = f"{kind.lower()} in the middle of an operation that didn't end"
    with suppress(OSError):
        write_json(json_out, to_json({"error": {"type": kind, "message": message}}))


def _report_failure(error: BaseException, json_out: TextIO | None, *, asked: int | None) -> int:
    """Report the error on standard error or as a JSON object, and return the exit code.

    ``asked``: number of the signal that requested the end of the command, or None.
    """
    ending = ("Terminated", 143) if asked == signal.SIGTERM else ("Interrupted", 130)
    data: dict[str, object] = {}
    match error:
        case typer.Exit():  # --help, which has been written; with --json to standard error
            if json_out is not None and not isinstance(error, SilentExit):
                with suppress(OSError):
                    write_json(json_out, to_json({"exit_code": error.exit_code}))
            return _finish(error.exit_code)
        case KeyboardInterrupt() | typer.Abort():
            kind, code = ending
            message = str(error) or kind.lower()
            data = dict(error.data) if isinstance(error, Interrupted) else {}
        case _ if asked is not None:  # compiled libraries turn what is raised in a signal handler into errors of their own
            kind, code = ending
            message = kind.lower()
        case SystemExit():
            kind, code = "Exit", exit_code(error)
            message = f"the command ended itself with exit code {code}: {error.code}"
        case PartialResultError():
            kind, message, code, data = error.kind, str(error), 1, dict(error.data)
        case UsageError():
            kind, message, code = "UsageError", str(error), 2
        case OutriderError():
            kind, message, code = type(error).__name__, str(error), 1
        case NotImplementedError():
            kind, code = "NotImplementedError", 1
            said = str(error).partition("\n")[0] or "it isn't named"
            message = f"the backend has no operator that is needed: {said}; use another model, dtype or backend"
        case MemoryError() | RuntimeError() if isinstance(error, MemoryError) or "allocate memory" in str(error):
            kind, code = "OutOfMemory", 1
            message = f"the host has too little memory: {str(error)[:200]}; use a smaller batch, cache or model"
        case BrokenPipeError() if _has_no_reader(json_out or sys.stdout):
            return _finish(_OUTPUT_CLOSED)
        case OSError():
            kind, message, code = type(error).__name__, _os_error(error), 1
        case _ if callable(getattr(error, "format_message", None)):
            # typer's own errors; their module has moved between its versions, their shape hasn't.
            kind, message, code = "UsageError", _usage_error(error), 2
        case _:
            kind, code = type(error).__name__, 1
            message = (
                f"internal error: {kind}: {error}; this is a bug in outrider or in the plugin that was used: please report "
                "it there with the output of --debug"
            )
    if json_out is not None:
        try:
            write_json(json_out, to_json({"error": {"type": kind, "message": message}, **data}))
            return _finish(code)
        except OSError:
            pass  # standard output can't be written: use standard error
    if isinstance(error, Interrupted) and error.render is not None and json_out is None:
        with suppress(OSError):
            _show(error.render, sys.stdout)
            sys.stdout.flush()
    note(f"outrider: {message}\n")
    return _finish(code)


def _has_no_reader(stream: TextIO) -> bool:
    """Return True for a pipe whose reader has ended."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):  # a stream without a descriptor
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _os_error(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return f"writing {error.filename or 'the output'} failed: no space left on the device; free some or write elsewhere"
    if error.errno == errno.EBADF and error.filename is None:
        return "standard output is closed; the output is lost"
    said = f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror or error}"
    todo = _ADVICE_BY_ERRNO.get(error.errno or 0)
    return said if todo is None else f"{said}; {todo}"


def _usage_error(error: Any) -> str:
    context = getattr(error, "ctx", None)
    hint = f"; run `{context.command_path} --help`" if context is not None else ""
    return f"{error.format_message().rstrip('.')}{hint}"


def _finish(code: int) -> int:
    """Flush standard output. If that fails, drop the text, since Python flushes it again at exit."""
    try:
        sys.stdout.flush()
    except OSError as error:
        drop_unwritten(sys.stdout)
        if code == 0:
            note(f"outrider: {_os_error(error)}\n")
            return 1
    return code
