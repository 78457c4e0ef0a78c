"""Running again what failed, when the plugin's files change: ``outrider conform --watch``."""

from __future__ import annotations

import importlib.machinery
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from outrider.device.errors import ConfigError

_SUFFIXES = (".py", ".so", ".pyd", ".toml", ".json")
_PAUSE_S = 0.3

State = Mapping[Path, tuple[int, int]]
"""Of each file the time of its last change, in ns, and its size."""
Run = Callable[[Sequence[str]], dict[str, Any]]
"""Runs the tests of these ids, or all where there are none, and returns the report."""


def directory_of(entry_point: str) -> Path:
    """Where the package of an entry point (``package.module:name``) lies; nothing is imported.

    Raises :class:`ConfigError` where it has no directory.
    """
    package = entry_point.partition(":")[0].partition(".")[0].strip()
    found = importlib.machinery.PathFinder.find_spec(package)
    for place in (found.submodule_search_locations or ()) if found is not None else ():
        return Path(place)
    raise ConfigError(f"{package} has no directory that can be watched: install the plugin as a package, with pip install -e")


def state_of(directory: Path) -> State:
    """The files whose change counts. One that vanishes meanwhile is left out."""
    found = {}
    for path in directory.rglob("*"):
        if path.suffix in _SUFFIXES:
            try:
                stat = path.stat()
            except OSError:
                continue
            found[path] = (stat.st_mtime_ns, stat.st_size)
    return found


def wait_for_change(directory: Path, before: State, *, pause_s: float = _PAUSE_S) -> Sequence[str]:
    """Block until files differ from ``before`` and then stay the same for ``pause_s``; returns their names."""
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
    """The ids of the tests that failed."""
    return tuple(test["id"] for test in report["tests"] if test["outcome"] == "failed")


def watch(run: Run, directory: Path, say: Callable[[str], None], *, pause_s: float = _PAUSE_S) -> NoReturn:
    """Run everything; then, at each change, what failed, and everything again once that passes. Until it's interrupted.

    A run that ends in no report (the plugin can't be loaded, the process died) is told by ``say``, and counts as failed as
    a whole.
    """
    failed: tuple[str, ...] = ()
    while True:
        before = state_of(directory)  # what is saved during a run is seen after it
        found = _failing(run, failed, say)
        if failed and found == ():
            say("what failed passes now: running everything")
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
