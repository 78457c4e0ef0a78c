"""Collect verdicts while the suite runs, in one process or in pytest-xdist's workers, and write the report."""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from outrider_conformance.kernel_calls import merged
from outrider_conformance.kit import Kit, host_facts
from outrider_conformance.levels import LEVELS, REPORTED, parse_level
from outrider_conformance.reporting.causes import grouped, ranked_causes, summary_lines
from outrider_conformance.reporting.report import FORMAT, levels_of, reached, seal, suite_hash
from outrider_conformance.reporting.verdict import VERDICT, Verdict, verdict_entry
from outrider_conformance.run import UNWRITTEN

VERBS_CALLED = "verbs"
"""The user property of a test that holds the verbs of the plugin that it called."""
CALLS = "kernel calls"
"""The user property of a test that holds its counted kernel calls."""
_WORST_LAST = ("passed", "not applicable", "not declared", "waived", "not run", "failed")


class ReportRecorder:
    """The collector of one pytest process. The process that isn't an xdist worker writes the report."""

    def __init__(self, config: pytest.Config, kit: Kit) -> None:
        self._config = config
        self._kit = kit
        self._worker = hasattr(config, "workerinput")
        self._started = datetime.datetime.now(datetime.UTC)
        self._clock = time.perf_counter()
        self._records: dict[str, dict[str, Any]] = {}
        self._calls: list[list[dict[str, Any]]] = []
        self._verbs: dict[str, list[str]] = {}
        self.stops = True
        """True if a failed level ends the run."""
        self.broken_level: int | None = None
        """The first level with a failed test, above which nothing runs."""
        self._requested: set[str] = set()
        self._facts: dict[str, Any] = {}
        directory = config.getoption("--report")
        self._directory = Path(directory).absolute() if directory else None
        self._journal: Path | None = None
        if self._directory is not None and not self._worker:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._journal = self._directory / "journal.jsonl"
            self._journal.write_text("", encoding="utf-8")

    def requested(self, tests: Iterable[str]) -> None:
        """Store the tests of the requested levels, before pytest deselects any."""
        self._requested = set(tests)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Write the running test to the journal, so that the message about a crash can name it."""
        self._write_journal({"started": f"{Path(location[0]).stem}::{nodeid.partition('::')[2]}"})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record one phase of a test. The worst phase decides the test's outcome."""
        properties = report.user_properties
        calls: list[Any] = [value for key, value in properties if key == CALLS]
        verbs: list[Any] = [value for key, value in properties if key == VERBS_CALLED]
        verdicts: list[Any] = [value for key, value in properties if key == VERDICT]
        if self._worker or not verdicts:
            return
        verdict: dict[str, Any] = verdicts[-1]
        record = self._records.setdefault(verdict["id"], {**verdict, "seconds": 0.0, "figures": []})
        record["seconds"] = round(record["seconds"] + report.duration, 4)
        if verdict["outcome"] == "failed" and self.stops:
            self.broken_level = min(verdict["level"], verdict["level"] if self.broken_level is None else self.broken_level)
        if _WORST_LAST.index(verdict["outcome"]) > _WORST_LAST.index(record["outcome"]):
            record.update(verdict)
        if report.when == "call":
            record["figures"] = [value for key, value in properties if key == "figure"]
        if report.when == "teardown":
            self._calls += calls
            kernels = {f"KernelSet.{row['kernel']}" for rows in calls for row in rows}
            self._verbs[verdict["id"]] = sorted(kernels.union(*verbs))
            self._write_journal({"finished": record})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the recorded facts to the controller from a pytest-xdist worker, or write the report."""
        del session
        if self._worker:
            self._config.workeroutput["outrider_facts"] = dict(self._kit.facts)  # type: ignore[attr-defined]
            self._config.workeroutput["outrider_requested"] = sorted(self._requested)  # type: ignore[attr-defined]
        elif self._directory is not None and self._records:
            from outrider_conformance.reporting.page import publish

            try:
                publish(self.report(), self._directory)
            except OSError as error:
                self._end_run(error, self._directory)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take over the facts of a pytest-xdist worker that has finished."""
        del error
        output = getattr(node, "workeroutput", {})
        self._facts = self._facts or output.get("outrider_facts", {})
        self._requested |= set(output.get("outrider_requested", []))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the result of each level, the figures, and the path of the report."""
        if self._worker or not self._records:
            return
        terminalreporter.section(f"conformance of {self._kit.spec}")
        for level, result in levels_of(list(self._tests()), self._level()).items():
            terminalreporter.write_line(f"{level}  {result['result']:<24}{result['counts']:<59} {LEVELS[int(level[1:])]}")
        if any(record["outcome"] == "failed" for record in self._records.values()):
            terminalreporter.section("what failed")
            for line in summary_lines(self.report()):
                terminalreporter.write_line(line)
            terminalreporter.write_line("")
        for test in self._records.values():
            for name, value, unit in test["figures"] if test["level"] != REPORTED else ():
                terminalreporter.write_line(f"{name}: {value:g} {unit}")
        if (
            self._directory is not None and self._directory != self._config.rootpath
        ):  # the scratch directory is deleted after the run
            terminalreporter.write_line(f"report: {self._directory / 'report.html'}")

    # -- the report ------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the report of all recorded tests with its seal."""
        facts, host, level = self._facts or dict(self._kit.facts), host_facts(), self._level()
        tests = sorted(self._tests(), key=lambda test: (test["level"], test["id"]))
        tier = {**facts.get("tier", {"kind": "not run", "device": ""}), "date": self._started.date().isoformat()}
        return seal(
            {
                "format": FORMAT,
                "kit": {"version": host["outrider"], "suite": suite_hash()},
                "backend": self._kit.described(),
                "host": host,
                "tier": tier,
                **{key: facts.get(key) for key in ("device", "versions", "capabilities", "kernels")},
                "command": self._config.getoption("--kit-command") or " ".join(["pytest", *sys.argv[1:]]),
                "started": self._started.isoformat(timespec="seconds"),
                "seconds": round(time.perf_counter() - self._clock, 2),
                "level": f"L{level}",
                "reached": reached(tests, level),
                "levels": levels_of(tests, level),
                "kernel_calls": merged(self._calls),
                "figures": [figure for test in tests for figure in test["figures"]],
                "causes": ranked_causes(tests, self._verbs),
                "failures": grouped(tests),
                "tests": tests,
            }
        )

    def _level(self) -> int:
        return parse_level(self._config.getoption("--level"))

    def _tests(self) -> Iterable[dict[str, Any]]:
        for test in sorted(self._requested - set(self._records)):
            level, reason = int(test.removeprefix("test_l")[0]), "deselected, or the run ended before it"
            yield {**verdict_entry(test, level, Verdict.NOT_RUN, reason), "seconds": 0.0, "figures": []}
        yield from self._records.values()

    def _write_journal(self, entry: dict[str, Any]) -> None:
        if self._journal is not None:
            try:
                with self._journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
            except OSError as error:
                self._end_run(error, self._journal)

    def _end_run(self, error: OSError, path: Path) -> NoReturn:
        """End the run without a report, because a file of the report can't be written."""
        if self._journal is not None:
            with suppress(OSError):
                self._journal.unlink(missing_ok=True)
        self._directory = self._journal = None
        message = f"writing {error.filename or path} failed: {error.strerror or error}"
        pytest.exit(message, returncode=UNWRITTEN + (error.errno or 0))
