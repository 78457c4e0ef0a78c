"""The sanitizer over random pairs: of races it reports the two lines, and of correct programs nothing."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.main import main
from sanitizer.generated_pairs import Pair, pairs

Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class Verdict:
    """The findings of both programs of a pair, and the errors of programs that didn't end."""

    pair: Pair
    found: tuple[Any, ...]
    alarms: tuple[Any, ...]
    failed: tuple[str, ...]

    @property
    def fault(self) -> str:
        """Return what is wrong with the report, or an empty string."""
        if self.failed:
            return "failed"
        if self.alarms:
            return "false alarm"
        if not self.found:
            return "missed"
        return "" if all(self.pair.expects(lines_of(finding)) for finding in self.found) else "wrong lines"


def lines_of(finding: Any) -> frozenset[int]:
    """Return the numbers of a finding's lines; 0 stands for a place outside the script."""
    locations = [site["location"].rpartition(":") for site in (finding["first"], finding["second"]) if site]
    return frozenset(int(number) if path.endswith("pair.py") else 0 for path, _, number in locations)


def check(pair: Pair, directory: Path, capture: Any) -> Verdict:
    """Run both programs through the command. `capture` has `readouterr`."""
    path, results, failed = directory / "pair.py", [], []
    for text in (pair.racy, pair.twin):
        path.write_text(text)
        main(["sanitize", "--json", "--no-advice", *pair.options, "--", str(path)])
        said = json.loads(capture.readouterr().out.strip().rpartition("\n")[2])
        results.append(tuple(finding for report in said["reports"] for finding in report["findings"]))
        failed += [error for error in [said["script_error"]] if error]
    return Verdict(pair, *results, tuple(failed))


def described(verdict: Verdict) -> str:
    """Return the program that is reported wrongly, and its report."""
    text, findings = (verdict.pair.twin, verdict.alarms) if verdict.alarms else (verdict.pair.racy, verdict.found)
    reported = [(finding["kind"], sorted(lines_of(finding)), finding["hint"]) for finding in findings]
    return f"--- {verdict.fault}: {verdict.pair.name}\n{text}\nreported: {reported} {verdict.failed}"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:index_reduce:UserWarning")  # torch says so of its own names
@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_races_are_reported_at_their_lines_and_twins_are_silent(count: int, tmp_path: Path, capsys: Capture) -> None:
    verdicts = [check(pair, tmp_path, capsys) for pair in pairs(count, seed=2026)]
    faults = Counter(verdict.fault for verdict in verdicts)
    report = "\n".join(described(verdict) for verdict in verdicts if verdict.fault)
    assert not faults["failed"], report
    assert faults["missed"] + faults["wrong lines"] <= count // 100, report
    assert faults["false alarm"] <= count // 100, report


def test_a_report_of_other_lines_or_of_a_twin_is_a_fault() -> None:
    racy, *_ = pairs(1, seed=1)
    site = {"location": "pair.py:1"}
    finding = {"kind": "read_after_write", "hint": "", "first": site, "second": site}
    assert Verdict(racy, (), (), ()).fault == "missed"
    assert Verdict(racy, (finding,), (), ()).fault == "wrong lines"
    assert Verdict(racy, (finding,), (finding,), ()).fault == "false alarm"
    assert Verdict(racy, (), (), ("stopped",)).fault == "failed"
