"""Runs the suite on one mutant, in a forked process: torch is imported once, and each mutant breaks a copy of its own."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from conformance.mutants.bases import Base
from forks import RAISED, Fork, run_concurrently

PATIENCE = 8.0  # for one test: what hangs, hangs
LONGEST = 180.0  # for a process


@dataclass(frozen=True)
class Outcome:
    """What the suite said. `failed` are (test, level, reason), `ran` how many tests weren't skipped."""

    failed: tuple[tuple[str, int, str], ...]
    ran: int
    skipped: int
    seconds: float
    broke: str = ""  # how the process ended, where it didn't finish the run
    reached: bool = False  # whether a generated fault took effect
    promises: tuple[str, ...] = ()  # members whose promises the failed tests found broken
    causes: tuple[str, ...] = ()  # verbs that the report ranks, the first one first
    output: str = field(default="", repr=False)

    @property
    def level(self) -> int | None:
        """The first level that failed."""
        return min((level for _, level, _ in self.failed), default=None)


class Record:
    """Outcomes by key, in a file of lines of JSON, if one is named."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._known = {tuple(key): _outcome_of(fields) for key, fields in map(json.loads, lines)}

    def forget(self, wrong) -> None:
        """Drop those for which `wrong(key, outcome)`: they're run again."""
        self._known = {key: outcome for key, outcome in self._known.items() if not wrong(key, outcome)}

    def completed(self, jobs, *limits) -> Iterator:
        """Every job's outcome: known, or run now by `run_all` and noted."""
        yield from ((key, self._known[key]) for key, _ in jobs if key in self._known)
        for key, outcome in run_all([job for job in jobs if job[0] not in self._known], *limits):
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps([key, asdict(replace(outcome, output=""))]) + "\n")
            yield key, outcome


def _outcome_of(fields) -> Outcome:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Outcome(**fields | lists | {"failed": tuple(map(tuple, fields["failed"]))})


class _Watch:
    """Presets the kit and notes each verdict."""

    def __init__(self, base, fd: int, near: str) -> None:
        self._base = base
        self._near = near
        self._file = os.fdopen(fd, "w")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items) -> None:
        """Within a level, what is about the broken verb comes first, then programs: the run ends at the first failure."""
        if self._near:
            from outrider_conformance.levels import level_of

            def rank(item):
                near = self._near in item.nodeid
                return level_of(item.path) or 0, 0 if near else 1 if "_programs" in item.nodeid else 2

            items.sort(key=rank)

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config) -> None:
        from outrider_conformance.kit import KIT, Kit

        config.stash[KIT] = Kit(self._base.spec, self._base.registry())

    def pytest_runtest_logstart(self, nodeid, location) -> None:
        self.note({"started": f"{Path(location[0]).stem}::{nodeid.partition('::')[2]}"})

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report) -> None:
        verdict = dict(report.user_properties).get("verdict")
        if verdict is not None and (report.when == "call" or report.outcome != "passed"):
            promise = (verdict["promise"] or {}).get("member", "")
            self.note({key: verdict[key] for key in ("id", "level", "outcome", "reason")} | {"promise": promise})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session) -> None:
        from outrider_conformance.plugin import RECORDER

        if RECORDER in session.config.stash:
            self.note({"causes": [cause["verb"] for cause in session.config.stash[RECORDER].report()["causes"]]})

    def note(self, entry) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def run(base: str, apply: Callable, level: int, *more, tests: Iterable[str] = (), first: bool = True) -> Outcome:
    """The suite up to `level` on `base` after `apply(base)`; only `tests` if some are named; `first`: stop at a failure,
    or at that many."""
    process = _Process(base, apply, level, tuple(tests), first, *more)
    while (outcome := process.outcome()) is None:
        time.sleep(0.02)
    return outcome


def run_all(jobs, at_a_time: int, seconds: float = 1e9) -> Iterator:
    """`jobs` are (key, (base, apply, level, tests, first[, seed, near, patience])); yields (key, outcome). Nothing new begins
    after so many `seconds`. `patience` multiplies the limits.
    """
    starts = ((key, partial(_Process, *arguments)) for key, arguments in jobs)
    yield from run_concurrently(starts, at_a_time, seconds)


def warm_up() -> None:
    """Have torch and pytest import what they import late, the suite above all, once, before the processes part."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    import outrider_sanitizer.observation.sanitizer  # noqa: F401

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            func(*args, **{**(kwargs or {}), "device": torch.device("meta")})
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(4)
    (torch.ones(4, device="meta") @ torch.ones(4, 4, device="meta")).to(torch.float64)
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", scratch]
        arguments += ["-p", "outrider_conformance.plugin", "--backend", "cpu", "--pyargs", "outrider_conformance"]
        if pytest.main(arguments):
            raise RuntimeError("the suite can't be collected")
    gc.freeze()  # what is imported is looked through by none of the forks, nor are its pages copied


class _Process:
    """A fork that runs the suite on one mutant in a directory of its own."""

    def __init__(self, base, apply, level, tests, first, seed=0, near="", patience=1.0) -> None:
        self._longest = LONGEST * patience
        self._scratch = tempfile.TemporaryDirectory(prefix="outrider-mutant-")
        place = Path(self._scratch.name)
        self._output = place / "output"
        self._fork = Fork(partial(_run_suite, base, apply, level, tests, first, place, seed, near, patience), self._output)

    def outcome(self) -> Outcome | None:
        """None while it runs."""
        code = self._fork.exit_code()
        seconds = time.monotonic() - self._fork.began
        text = self._output.read_text(errors="replace") if self._output.exists() else ""
        if code == RAISED:
            raise RuntimeError(f"a broken plugin can't be made:\n{text[-2000:]}")
        broke = f"the process ended with {code}" if code else ""
        if code is None:
            if seconds <= self._longest:
                return None
            self._fork.kill()
            broke = "the process hung"
        self._scratch.cleanup()
        return _read([json.loads(line) for line in self._fork.lines], seconds, broke, text)


def _read(entries, seconds, broke, text) -> Outcome:
    verdicts = [entry for entry in entries if "id" in entry]
    failed = [(v["id"], v["level"], v["reason"]) for v in verdicts if v["outcome"] == "failed"]
    started = [entry["started"] for entry in entries if "started" in entry]
    if broke and started and not failed:  # what brought the process down counts as caught: a report would say so
        path, _, name = started[-1].partition("::")
        found = re.search(r"test_l(\d)_\w+", path)
        if found is not None:
            failed.append((f"{found[0]}::{name}", int(found[1]), broke))
    promises = tuple(dict.fromkeys(v["promise"] for v in verdicts if v["outcome"] == "failed" and v["promise"]))
    causes = next((tuple(entry["causes"]) for entry in entries if "causes" in entry), ())
    ran = [v for v in verdicts if v["outcome"] in ("passed", "failed")]
    reached = any(entry.get("reached") for entry in entries)
    return Outcome(tuple(failed), len(ran), len(verdicts) - len(ran), seconds, broke, reached, promises, causes, text)


def _run_suite(base, apply, level, tests, first, scratch, seed, near, patience, writer):
    """Run the suite on the mutant, and return the exit code of the process."""
    watch = _Watch(None, writer, near)
    made = Base(base)
    apply(made)
    watch._base = made
    (scratch / "pytest.ini").write_text("[pytest]\naddopts =\n")
    os.chdir(scratch)
    chosen = [f"outrider_conformance.suite.{test}" for test in tests]
    arguments = ["--rootdir", str(scratch), "-c", str(scratch / "pytest.ini"), "-p", "no:cacheprovider", "-q", "--tb=line"]
    arguments += ["-p", "outrider_conformance.plugin", "--backend", made.spec, "--level", f"L{level}"]
    arguments += ["--kit-timeout", str(patience * PATIENCE * (1 if level < 4 else 5))]
    arguments += [f"--maxfail={int(first)}"] if first else []
    arguments += ["--kit-seed", str(seed), "--pyargs", *(chosen or ["outrider_conformance"])]
    code = 0 if int(pytest.main(arguments, plugins=[watch])) in (0, 1) else 71
    from conformance.mutants.generated import REACHED

    watch.note({"reached": bool(REACHED)})
    return code
