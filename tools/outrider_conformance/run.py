"""Running the suite in a child process, so that a plugin that crashes takes no report with it."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from outrider.device.errors import ConfigError, OutriderError
from outrider.registry.children import started
from outrider_conformance.levels import judged
from outrider_sanitizer.files import scratch_directory

# `python -m pytest`, in a process that ends with this one.
_PYTEST = (
    "import sys; from outrider.registry.children import end_with_parent; end_with_parent(); "
    "import pytest; sys.exit(pytest.main())"
)

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""The suite's operands are small. With several threads, torch waits actively at the end of each operation: on a busy host, or
one with fewer free cores than torch counts, that takes ten times as long. The environment of the caller takes precedence.
"""

UNWRITTEN = 100
"""Where a file of the report can't be written, pytest ends with this plus the system's error number, and without a journal: a
crash leaves one, whatever the exit code.
"""


class ConformanceError(OutriderError):
    """The suite couldn't be run, or a backend didn't pass it."""


def conform(
    backend: str,
    *,
    level: str = "L4",
    report: Path | None = None,
    waivers: Path | None = None,
    workers: int = 0,
    programs: int | None = None,
    seed: int = 0,
    only: str = "",
    tests: Sequence[str] = (),
    extra: Sequence[str] = (),
    command: str | None = None,
    output: TextIO | None = None,
) -> dict[str, Any]:
    """Run the suite for ``backend`` and return the report.

    Progress goes to ``output`` (standard output without it). ``workers`` spreads the tests over that many processes with
    pytest-xdist. ``programs``: how many random programs are tried, drawn from ``seed``; ``only``: of the tests those with
    this word in their names; ``tests``: those with these ids. Either of the two passes nothing. Raises
    :class:`ConformanceError` where no report comes about.
    """
    for needed in ("pytest", "hypothesis", *(["xdist"] if workers else [])):
        if importlib.util.find_spec(needed) is None:
            raise ConformanceError(f"the suite needs {needed}: pip install 'outrider[conformance]'")
    with scratch_directory("outrider-conform-") as scratch:
        directory = (report or scratch).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "report.json").unlink(missing_ok=True)
        given = command or shlex.join(["outrider", "conform", "--backend", backend, "--level", level])
        arguments = [
            *("-p", "outrider_conformance.plugin", "--pyargs", "outrider_conformance", "-p", "no:cacheprovider"),
            *("--backend", backend, "--level", level, "--report", str(directory), "--kit-command", given),
            *("--tb=short", "-rN", "-W", "error::pytest.PytestUnhandledThreadExceptionWarning"),
            *(["-p", "xdist", "-n", str(workers)] if workers else []),
            *(["--programs", str(programs)] if programs is not None else []),
            *(["--kit-seed", str(seed)] if seed else []),
            *(["-k", only] if only else []),
            *(f"--kit-test={test}" for test in tests),
            *(["--waivers", str(waivers.absolute())] if waivers is not None else []),
            *extra,
        ]
        # Away from the caller's project: its pytest settings and conftest files are none of the suite's business, and no
        # more are plugins of pytest that happen to be installed: they change orders, or take a second to import.
        # What tests write goes with it, also when the run is ended early.
        environment = {**_ONE_THREAD, **os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        place = [
            "-p",
            "hypothesispytest",
            "--rootdir",
            str(scratch),
            "-c",
            _settings(scratch),
            "--basetemp",
            str(scratch / "tests"),
        ]
        suite = [sys.executable, "-c", _PYTEST, *place, *arguments]
        with started(suite, environment=environment, cwd=scratch, stdout=output) as child:
            code = child.wait()
        if code == 4:
            raise ConformanceError(f"pytest refused the run for backend {backend!r}; it said why above")
        journal = directory / "journal.jsonl"
        if code >= UNWRITTEN and not journal.exists():
            raise ConformanceError(
                f"the suite ended early, since its report in {directory} can't be written: {os.strerror(code - UNWRITTEN)}; "
                "free some space, or name another directory"
            )
        found = directory / "report.json"
        if not found.exists():
            raise ConformanceError(_post_mortem(journal, code, backend))
        data: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
        journal.unlink(missing_ok=True)
        return data


def check(backend: str, *, level: str = "L4", waivers: Path | None = None) -> None:
    """The whole conformance test of a plugin, in one line of its test suite: raises unless every level is passed."""
    report = conform(backend, level=level, waivers=waivers)
    if not passed(report):
        failed = [f"\n  {test['id']}: {test['reason']}" for test in report["tests"] if test["outcome"] == "failed"]
        raise ConformanceError(f"backend {backend!r} doesn't pass {level}:{''.join(failed) or ' tests were left out'}")


def passed(report: Mapping[str, Any]) -> bool:
    """Whether every level that was asked for is passed; L5 reports and isn't judged."""
    asked = judged(int(report["level"][1:]))
    return report["reached"] is not None and int(report["reached"][1:]) >= asked


def failed(report: Mapping[str, Any]) -> bool:
    """Whether a test failed, whatever was left out."""
    return any(test["outcome"] == "failed" for test in report["tests"])


def _settings(scratch: Path) -> str:
    path = scratch / "pytest.ini"
    path.write_text("[pytest]\naddopts =\n", encoding="utf-8")
    return str(path)


def _post_mortem(journal: Path, code: int, backend: str) -> str:
    """What was running when the process ended without a report."""
    if not journal.exists():
        return f"the suite didn't start for backend {backend!r} (pytest ended with {code})"
    running = ""
    for line in journal.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break  # the last line, cut off where the process ended
        running = entry.get("started", running)
        if "finished" in entry and entry["finished"]["id"] == running:
            running = ""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    where = f" while running {running}" if running else ""
    return f"the process ended with {how}{where}, without a report: a plugin that crashes passes nothing"


__all__ = ["ConfigError", "ConformanceError", "check", "conform", "failed", "passed"]
