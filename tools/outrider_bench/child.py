"""Child processes of benchmarks: an engine's effects on memory, caches and libraries end with its process.

``python -m outrider_bench.child MODULE:FUNCTION JSON`` calls one function and prints its result (:func:`run_child`). ``python
-m MODULE JSON`` keeps an engine that answers one request after another (:func:`open_session`).
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

    ``started`` is the wall-clock time of the start in seconds. ``variables`` extend the environment. The processes that the
    child has started end with the child, so that the device is free for the next measurement. Raises :class:`BenchFailed`
    if the child fails or takes longer than ``limit_s`` seconds.
    """
    given = json.dumps({**work, "started": time.time()})
    command = [sys.executable, "-m", __name__, function, given]
    # Files, not pipes: processes that outlive the child would keep pipes open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        environment = {**os.environ, **(variables or {})}
        with child_session(command, environment=environment, stdout=out, stderr=err) as child:
            try:
                child.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                raise BenchFailed(f"{function} wasn't done within {limit_s:g} s; its processes were ended") from None
        lines, errors = printed_lines(out), printed_lines(err)
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        found = None
    if isinstance(found, dict) and "failed" in found:
        raise BenchFailed(str(found["failed"]))
    if child.returncode or not isinstance(found, dict):
        raise BenchFailed(how_it_ended(function, child.returncode, errors))
    return found


def main() -> None:
    """Call the function that the command line names; print its result as the last line, as JSON."""
    end_with_parent()
    module, _, function = sys.argv[1].partition(":")
    try:
        found = getattr(import_module(module), function)(json.loads(sys.argv[2]))
    except OutriderError as error:
        found = {"failed": str(error)}
    print("\n" + json.dumps(found), flush=True)


# -- sessions ----------------------------------------------------------------------------------------------------------


class ChildSession:
    """A child process that answers requests, one JSON line each. Between two answers the child does nothing."""

    def __init__(self, module: str, child: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self.module = module
        self.about: Mapping[str, Any] = {}
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
            raise BenchFailed(f"{self.module} didn't answer within {limit_s:g} s; it was ended")
        if not found:
            self._fail()
        if "failed" in found:
            raise BenchFailed(str(found["failed"]))
        return found

    def _fail(self) -> None:
        code = self._child.wait()
        raise BenchFailed(how_it_ended(self.module, code, printed_lines(self._errors)))


@contextmanager
def open_session(
    module: str,
    work: Mapping[str, object],
    *,
    variables: Mapping[str, str],
    limit_s: float,
    log: Path | None = None,
    python: str = sys.executable,
) -> Generator[ChildSession]:
    """Start ``python -m module`` and wait until its engine is ready; on exit end it and the processes that it started.

    The child gets ``work`` and ``scratch``, a directory that is removed on exit. ``log`` is a file for the child's output,
    ``python`` the interpreter. Raises :class:`BenchFailed`.
    """
    with (
        scratch_directory("outrider-peers-") as scratch,
        tempfile.TemporaryFile() if log is None else log.open("w+b") as errors,
        child_session(
            [python, "-m", module, json.dumps({**work, "scratch": str(scratch)})],
            environment={**os.environ, **variables},
            stderr=errors,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as child,
    ):
        session = ChildSession(module, child, errors)
        session.about = session.answer(limit_s=limit_s)
        yield session


if __name__ == "__main__":
    main()
