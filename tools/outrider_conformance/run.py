"""Run the suite in a child process, so that a crashing plugin can't end the caller, once or after each change.

``outrider conform --watch`` runs failed tests again when files of the plugin change.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from outrider.device.errors import ConfigError, OutriderError
from outrider.registry.children import child_session
from outrider_conformance.levels import required_level
from outrider_sanitizer.scratch_files import scratch_directory

# `python -m pytest`, in a process that ends with this one, and with the first failed write to standard output.
_PYTEST = (
    "import sys; from outrider.registry.children import end_with_parent; end_with_parent(); "
    "from outrider_conformance.run import OutputOfSuite; sys.stdout = OutputOfSuite(sys.stdout); "
    "import pytest; sys.exit(pytest.main())"
)

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of the suite, whose operands are small; the caller's environment takes precedence.

With several threads torch waits actively at the end of each operation. On a busy host the suite then takes ten times as long.
"""

UNWRITTEN = 100
"""Exit code, plus the system's error number, of a run that can't write its report. Such a run leaves no journal, a crash
does.
"""


OUTPUT_LOST = 99
"""Exit code of a run whose standard output can't be written."""


class OutputOfSuite:
    """Standard output of the suite's process. A failed write ends the process; pytest would report each failure to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text``, or end the process."""
        try:
            return self._stream.write(text)
        except OSError:
            os._exit(OUTPUT_LOST)

    def flush(self) -> None:
        """Flush the stream, or end the process."""
        try:
            self._stream.flush()
        except OSError:
            os._exit(OUTPUT_LOST)


class ConformanceError(OutriderError):
    """Raised when the suite didn't run, or when a backend failed it."""


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
    output: TextIO | None = None,
) -> dict[str, Any]:
    """Run the suite for ``backend`` and return the report.

    Progress is written to ``output``, by default standard output. ``workers`` is the number of pytest-xdist processes.
    ``programs`` is the number of random programs, generated from ``seed``. ``only`` selects tests with this word in their
    names, ``tests`` those with these ids; a run with either of them passes no level. Raises :class:`ConformanceError` if the
    run ends without a report.
    """
    for needed in ("pytest", *(["xdist"] if workers else [])):
        if importlib.util.find_spec(needed) is None:
            raise ConformanceError(f"the suite needs {needed}: pip install 'outrider[conformance]'")
    with scratch_directory("outrider-conform-") as scratch:
        directory = (report or scratch).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "report.json").unlink(missing_ok=True)
        command = ["outrider", "conform", "--backend", backend, "--level", level]
        command += ["--waivers", str(waivers)] if waivers is not None else []
        command += ["--programs", str(programs)] if programs is not None else []
        command += ["--seed", str(seed)] if seed else []
        command += ["--only", only] if only else []
        command += [word for each in tests for word in ("--test", each)]
        arguments = [
            *("-p", "outrider_conformance.plugin", "--pyargs", "outrider_conformance", "-p", "no:cacheprovider"),
            *("--backend", backend, "--level", level, "--report", str(directory), "--kit-command", shlex.join(command)),
            *("--tb=no", "-rN", "-W", "error::pytest.PytestUnhandledThreadExceptionWarning"),
            *(["-p", "xdist", "-n", str(workers)] if workers else []),
            *(["--programs", str(programs)] if programs is not None else []),
            *(["--kit-seed", str(seed)] if seed else []),
            *(["-k", only] if only else []),
            *(f"--kit-test={test}" for test in tests),
            *(["--waivers", str(waivers.absolute())] if waivers is not None else []),
            *extra,
        ]
        # The suite runs in a scratch directory, without the caller's pytest settings and conftest files, and without other
        # installed pytest plugins, which may change the order of tests or take a second to import. Files that tests write
        # are deleted with the directory, also after an interrupt.
        environment = {**_ONE_THREAD, **os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        place = ["--rootdir", str(scratch), "-c", _settings(scratch), "--basetemp", str(scratch / "tests")]
        suite = [sys.executable, "-c", _PYTEST, *place, *arguments]
        with child_session(suite, environment=environment, cwd=scratch, stdout=output) as child:
            code = child.wait()
        if code == OUTPUT_LOST:
            print(file=output, flush=True)  # raises the error of the operating system, which the command line reports
            raise ConformanceError("the suite ended early, since a write to standard output failed; write it to another file")
        if code == 4:
            raise ConformanceError(f"pytest refused the run for backend {backend!r}; the reason stands above")
        if code == 5:
            raise ConformanceError(f"no test up to {level} has {only!r} in its name; choose another word, or a higher level")
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
    """Run the suite for ``backend`` inside a test of a plugin. Raises :class:`ConformanceError` unless it passes up to
    ``level``.
    """
    report = conform(backend, level=level, waivers=waivers)
    if not passed(report):
        failed = [f"\n  {test['id']}: {test['reason']}" for test in report["tests"] if test["outcome"] == "failed"]
        raise ConformanceError(f"backend {backend!r} doesn't pass {level}:{''.join(failed) or ' tests were left out'}")


def passed(report: Mapping[str, Any]) -> bool:
    """Return True if the report shows that all requested levels are passed. L5 only reports figures."""
    asked = required_level(int(report["level"][1:]))
    return report["reached"] is not None and int(report["reached"][1:]) >= asked


def _settings(scratch: Path) -> str:
    path = scratch / "pytest.ini"
    path.write_text("[pytest]\naddopts =\n", encoding="utf-8")
    return str(path)


def _post_mortem(journal: Path, code: int, backend: str) -> str:
    """Return a message about a process that ended with ``code`` and without a report. It names the test that was running, by
    the journal.
    """
    if not journal.exists():
        return f"the suite didn't start for backend {backend!r} (pytest ended with {code})"
    running = ""
    for line in journal.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break  # the process ended while it wrote this line
        running = entry.get("started", running)
        if "finished" in entry and entry["finished"]["id"] == running:
            running = ""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    where = f" while running {running}" if running else ""
    return f"the process ended with {how}{where}, without a report: a plugin that crashes passes nothing"


_SUFFIXES = (".py", ".so", ".pyd", ".toml", ".json")
_POLL_INTERVAL_S = 0.3

State = Mapping[Path, tuple[int, int]]
"""Time of the last change, in ns, and size in bytes of each watched file."""
Run = Callable[[Sequence[str]], dict[str, Any]]
"""The function that runs the tests with the given ids, or all tests for an empty sequence, and returns the report."""


def directory_of(entry_point: str) -> Path:
    """Return the directory of the package of an entry point (``package.module:name``), without importing it.

    Raises :class:`ConfigError` if the package has no directory.
    """
    package = entry_point.partition(":")[0].partition(".")[0].strip()
    found = importlib.machinery.PathFinder.find_spec(package)
    for place in (found.submodule_search_locations or ()) if found is not None else ():
        return Path(place)
    raise ConfigError(f"{package} has no directory that can be watched: install the plugin as a package, with pip install -e")


def state_of(directory: Path) -> State:
    """Return the watched files of ``directory`` with their times and sizes."""
    found = {}
    for path in directory.rglob("*"):
        if path.suffix in _SUFFIXES:
            try:
                stat = path.stat()
            except OSError:
                continue
            found[path] = (stat.st_mtime_ns, stat.st_size)
    return found


def wait_for_change(directory: Path, before: State, *, pause_s: float = _POLL_INTERVAL_S) -> Sequence[str]:
    """Block until files differ from ``before`` and stay unchanged for ``pause_s`` seconds; return the names of changed
    files.
    """
    while True:
        time.sleep(pause_s)
        now = state_of(directory)
        if now == before:
            continue
        time.sleep(pause_s)
        while (later := state_of(directory)) != now:
            now = later
            time.sleep(pause_s)
        changed = {path for path in {*now, *before} if now.get(path) != before.get(path)}
        if changed:
            return sorted(str(path.relative_to(directory)) for path in changed)


def failing(report: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ids of the failed tests of ``report``."""
    return tuple(test["id"] for test in report["tests"] if test["outcome"] == "failed")


def watch(run: Run, directory: Path, say: Callable[[str], None], *, pause_s: float = _POLL_INTERVAL_S) -> NoReturn:
    """Run all tests, then the failed tests after each change, and all tests again once those pass, until an interrupt.

    ``say`` prints the reason if a run ends without a report (the plugin can't be loaded, the process died). The next run
    then runs all tests.
    """
    failed: tuple[str, ...] = ()
    while True:
        before = state_of(directory)  # a change during the run counts after it
        found = _failing(run, failed, say)
        if failed and found == ():
            say("the failed tests pass now: running all tests")
            failed = ()
            continue
        failed = found or ()
        what = f"{len(failed)} failed" if failed else "there is no report" if found is None else "nothing failed"
        say(f"{what}: waiting for a change in {directory} (Ctrl-C ends it)")
        say(f"changed: {', '.join(wait_for_change(directory, before, pause_s=pause_s))}")


def _failing(run: Run, tests: Sequence[str], say: Callable[[str], None]) -> tuple[str, ...] | None:
    try:
        return failing(run(tests))
    except ConformanceError as error:
        say(str(error))
        return None
