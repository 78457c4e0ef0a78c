"""The table after the matrix: what had no machine is "not run", and nothing but a report makes a row pass."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".github" / "scripts" / "conformance_summary.py"


@pytest.fixture
def summary(tmp_path):
    def run(rows, reports):
        (tmp_path / "matrix.json").write_text(json.dumps({"include": rows}))
        for name, report in reports.items():
            folder = tmp_path / "reports" / f"conformance-{name}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "report.json").write_text(json.dumps(report))
        command = [sys.executable, SCRIPT, str(tmp_path / "matrix.json"), str(tmp_path / "reports")]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    return run


def row(name, status="runs", level="L4", reason=""):
    return {"backend": name, "status": status, "level": level, "reason": reason}


def report(name, reached="L4", result="passed"):
    tier = {"kind": "run on a device", "device": "chip 9", "date": "2026-11-21"}
    return {"backend": {"name": name}, "reached": reached, "tier": tier, "levels": {"L0": {"result": result}}}


def test_what_ran_and_what_did_not(summary):
    done = summary([row("cpu"), row("chip", "not run", reason="no runner with the labels chip")], {"cpu": report("cpu")})
    assert done.returncode == 0
    assert "| cpu | **passed** | L4 (run on a device, chip 9, 2026-11-21) |" in done.stdout
    assert "| chip | **not run** | no runner with the labels chip |" in done.stdout


def test_a_report_left_over_makes_nothing_pass_that_had_no_machine(summary):
    done = summary([row("cpu"), row("chip", "not run")], {"cpu": report("cpu"), "chip": report("chip")})
    assert "| chip | **not run** |" in done.stdout


@pytest.mark.parametrize(
    ("rows", "reports", "says"),
    [
        ([row("cpu")], {}, "| cpu | **failed** | its job left no report |"),
        ([row("cpu")], {"cpu": report("cpu", "L2")}, "L4 was asked for, reached L2"),
        ([row("cpu")], {"cpu": report("cpu", None)}, "reached no level"),
        ([row("cpu")], {"cpu": report("sim")}, "its report is about sim"),
        (
            [row("cpu"), row("bad", "broken", reason="no | module")],
            {"cpu": report("cpu")},
            "| bad | **broken** | no / module |",
        ),
        ([row("chip", "not run")], {}, "Nothing passed."),
        ([], {}, "Nothing passed."),
    ],
)
def test_red(summary, rows, reports, says):
    done = summary(rows, reports)
    assert done.returncode == 1
    assert says in done.stdout


def test_the_level_of_figures_is_not_judged(summary):
    assert summary([row("cpu", level="L5")], {"cpu": report("cpu")}).returncode == 0


def test_a_second_job_has_a_report_of_its_own(summary):
    ranks = row("chip", level="L6") | {"job": "chip-ranks"}
    done = summary([row("chip"), ranks], {"chip": report("chip"), "chip-ranks": report("chip", "L6")})
    assert done.returncode == 0, done.stdout
    assert "| chip-ranks | **passed** | L6" in done.stdout
    assert "L6 was asked for, reached L4" in summary([row("chip"), ranks], {"chip-ranks": report("chip")}).stdout


def test_waivers_show(summary):
    assert "**passed with waivers**" in summary([row("cpu")], {"cpu": report("cpu", result="passed with waivers")}).stdout


@pytest.mark.slow
def test_a_real_report(summary, tmp_path):
    from outrider_conformance.run import conform

    found = conform("cpu", level="L0")
    done = summary([row("cpu", level="L0")], {"cpu": found})
    assert done.returncode == 0, done.stdout
    assert "| cpu | **passed** | L0 (" in done.stdout
