"""Measurements in a process of their own: what one engine does to memory, caches and libraries doesn't reach the next."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from outrider.device.errors import OutriderError
from outrider.registry.children import end_with_parent, started
from outrider_bench.environment import with_variables

_LINES = 6
_LONGEST = 400
_ERROR = re.compile(r"\b[\w.]*(?:Error|Exception): ?\S.*")


class ChildFailed(OutriderError):
    """A child process ended without a result; the message says how."""


def how_it_ended(name: str, code: int | None, told: Sequence[str]) -> str:
    """That ``name`` ended with ``code``, and what it said last, of the lines ``told``.

    The first error that it named earlier goes before that: an engine's process often says of another one that it failed,
    and only that one said why.
    """
    last = " | ".join(line.strip() for line in told[-_LINES:])
    first = next(filter(None, map(_ERROR.search, told[:-_LINES])), None)
    why = "" if first is None or first[0].strip() in last else f"{first[0].strip()[:_LONGEST]} | ... | "
    return f"{name} ended with exit code {code}: {why}{last or 'it said nothing'}"


def run_child(module: str, work: Mapping[str, object], *, variables: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    """Run ``python -m module`` on ``work`` and return what it hands back. Raises :class:`ChildFailed`.

    ``work`` reaches it as JSON, with ``started``: the time of the call, in seconds since the epoch. Whatever processes it
    has started are ended with it, so that they don't hold the device when the next one is measured.
    """
    given = json.dumps({**work, "started": time.time()})
    command = [sys.executable, "-m", module, given]
    # Into files: what the child leaves running would keep pipes open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with started(command, environment=with_variables(variables), stdout=out, stderr=err) as child:
            try:
                child.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                raise ChildFailed(f"{module} wasn't done within {limit_s:g} s; its processes were ended") from None
        lines, told = _lines(out), _lines(err)
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        found = None
    if isinstance(found, dict) and "failed" in found:
        raise ChildFailed(str(found["failed"]))
    if child.returncode or not isinstance(found, dict):
        raise ChildFailed(how_it_ended(module, child.returncode, told))
    return found


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


def answer(work: Callable[[Mapping[str, Any]], Mapping[str, object]]) -> None:
    """What such a child calls: one JSON object on the last line of standard output, also where it fails as it may."""
    end_with_parent()
    try:
        found = work(json.loads(sys.argv[1]))
    except OutriderError as error:
        found = {"failed": str(error)}
    print("\n" + json.dumps(found), flush=True)
