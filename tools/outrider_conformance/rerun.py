"""Run failed tests again when files of the plugin change: ``outrider conform --watch``."""

from __future__ import annotations

import importlib.machinery
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from outrider.device.errors import ConfigError

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
        while (later := _after(directory, pause_s)) != now:
            now = later
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
    from outrider_conformance.run import ConformanceError

    try:
        return failing(run(tests))
    except ConformanceError as error:
        say(str(error))
        return None


def _after(directory: Path, pause_s: float) -> State:
    time.sleep(pause_s)
    return state_of(directory)
