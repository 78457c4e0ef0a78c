"""Child processes of benchmarks: an engine's effects on memory, caches and libraries end with its process.

``python -m outrider_bench.child MODULE:FUNCTION JSON`` calls a function with an object and prints its answers as JSON lines:
the object that the function returns, or each object of an iterator.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from outrider.device.errors import OutriderError
from outrider.registry.children import JsonLines, child_session, end_with_parent, kill_session
from outrider_sanitizer.scratch_files import scratch_directory

_LAST_LINES = 6
_MAX_ERROR_CHARACTERS = 400
_ERROR = re.compile(r"\b[\w.]*(?:Error|Exception): ?\S.*")


class BenchFailed(OutriderError):
    """Raised if a measured process or server ends or answers without a result; the message says how."""


def how_it_ended(name: str, code: int | None, lines: Sequence[str]) -> str:
    """Return a message: the process ``name`` ended with ``code``, and the last of the ``lines`` that it printed.

    The first error among the earlier lines comes first: an engine's process often reports only that another one failed.
    """
    last = " | ".join(line.strip() for line in lines[-_LAST_LINES:])
    first = next(filter(None, map(_ERROR.search, lines[:-_LAST_LINES])), None)
    cause = "" if first is None or first[0].strip() in last else f"{first[0].strip()[:_MAX_ERROR_CHARACTERS]} | ... | "
    return f"{name} ended with exit code {code}: {cause}{last or 'it said nothing'}"


def printed_lines(file: IO[bytes]) -> list[str]:
    """Return the lines that a process has written to ``file``, decoded, without empty ones at the end."""
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


def run_child(
    function: str, work: Mapping[str, object], *, variables: Mapping[str, str] | None = None, limit_s: float
) -> dict[str, Any]:
    """Call ``function`` (``MODULE:FUNCTION``) with ``work`` and ``started`` in a new process, and return its result.

    ``started`` is the wall-clock time of the start in seconds. ``variables`` extend the environment. The child and the
    processes that it has started end before the return, so that the device is free for the next measurement. Raises
    :class:`BenchFailed` if the child fails or takes longer than ``limit_s`` seconds.
    """
    given = {**work, "started": time.time()}
    with open_session(function, given, variables=variables or {}, limit_s=limit_s) as session:
        return session.about


def main() -> None:
    """Call the function that the command line names, and print its answers. Its own output goes to standard error."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(found: Mapping[str, object]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    module, _, function = sys.argv[1].partition(":")
    try:
        found = getattr(import_module(module), function)(json.loads(sys.argv[2]))
        for each in [found] if isinstance(found, Mapping) else found or ():
            say(each)
    except OutriderError as error:
        say({"failed": str(error)})


class ChildSession:
    """A child process that answers requests, one JSON line each. Between two answers the child does nothing."""

    def __init__(self, function: str, child: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self.function = function
        self.about: dict[str, Any] = {}
        self._child = child
        self._errors = errors
        assert child.stdout is not None
        self._answers = JsonLines(child.stdout.fileno())

    def ask(self, request: Mapping[str, object], *, limit_s: float) -> dict[str, Any]:
        """Send a request and return the answer. Raises :class:`BenchFailed` if the run or the child fails."""
        assert self._child.stdin is not None
        if self._child.poll() is not None:
            self._fail()
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            self._fail()
        return self.answer(limit_s=limit_s)

    def answer(self, *, limit_s: float) -> dict[str, Any]:
        """Return the next answer line of the child. Raises :class:`BenchFailed` if no line arrives within ``limit_s``
        seconds.
        """
        found = self._answers.read_line(limit_s)
        if found is None:
            # A late answer would be taken for that of the next run, and the other engines need the device.
            kill_session(self._child)
            self._child.wait()
            raise BenchFailed(f"{self.function} didn't answer within {limit_s:g} s; its processes were ended")
        if not found:
            self._fail()
        if "failed" in found:
            raise BenchFailed(str(found["failed"]))
        return found

    def _fail(self) -> None:
        code = self._child.wait()
        raise BenchFailed(how_it_ended(self.function, code, printed_lines(self._errors)))


@contextmanager
def open_session(
    function: str,
    work: Mapping[str, object],
    *,
    variables: Mapping[str, str],
    limit_s: float,
    log: Path | None = None,
    python: str = sys.executable,
) -> Generator[ChildSession]:
    """Call ``function`` (``MODULE:FUNCTION``) in a new process and wait for its first answer; on exit end the process and
    those that it started.

    The child gets ``work`` and ``scratch``, a directory that is removed on exit. ``log`` is a file for the child's output,
    ``python`` the interpreter. Raises :class:`BenchFailed`.
    """
    with (
        scratch_directory("outrider-bench-") as scratch,
        tempfile.TemporaryFile() if log is None else log.open("w+b") as errors,
        child_session(
            [python, "-m", __name__, function, json.dumps({**work, "scratch": str(scratch)})],
            environment={**os.environ, **variables},
            stderr=errors,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as child,
    ):
        session = ChildSession(function, child, errors)
        session.about = session.answer(limit_s=limit_s)
        yield session


if __name__ == "__main__":
    main()
