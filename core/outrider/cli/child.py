"""Measurements in a process of their own: what one engine does to memory, caches and libraries doesn't reach the next."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from outrider.cli.environment import with_variables
from outrider.device.errors import OutriderError

_LINES = 6


class ChildFailed(OutriderError):
    """A child process ended without a result; the message says how."""


def run_child(module: str, work: Mapping[str, object], *, variables: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    """Run ``python -m module`` on ``work`` and return what it hands back. Raises :class:`ChildFailed`.

    ``work`` reaches it as JSON, with ``started``: the time of the call, in seconds since the epoch.
    """
    given = json.dumps({**work, "started": time.time()})
    command = [sys.executable, "-m", module, given]
    try:
        done = subprocess.run(
            command, env=with_variables(variables), capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"{module} wasn't done within {limit_s:g} s; its process was ended") from None
    lines = done.stdout.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        found = None
    if isinstance(found, dict) and "failed" in found:
        raise ChildFailed(str(found["failed"]))
    if done.returncode or not isinstance(found, dict):
        told = " | ".join(line.strip() for line in done.stderr.strip().splitlines()[-_LINES:])
        raise ChildFailed(f"{module} ended with exit code {done.returncode}: {told or 'it said nothing'}")
    return found


def answer(work: Callable[[Mapping[str, Any]], Mapping[str, object]]) -> None:
    """What such a child calls: one JSON object on the last line of standard output, also where it fails as it may."""
    try:
        found = work(json.loads(sys.argv[1]))
    except OutriderError as error:
        found = {"failed": str(error)}
    print("\n" + json.dumps(found), flush=True)
