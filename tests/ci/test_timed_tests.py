"""The runner of `make test`: it fails above the limit, and scales the limit by the speed of the machine."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "timed_tests.py"
RUNNER = runpy.run_path(str(SCRIPT))
CpuClock, main, run_within, scaled_limit = (RUNNER[name] for name in ("CpuClock", "main", "run_within", "scaled_limit"))
REFERENCE_LOOP_S = RUNNER["REFERENCE_LOOP_S"]
SPIN = [sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"]


def exits(code):
    return [sys.executable, "-c", f"raise SystemExit({code})"]


def loops(*times_s):
    """A calibration that returns one of ``times_s`` per call."""
    return iter(times_s).__next__


def test_fails_above_the_limit(capfd):
    assert run_within([SPIN], 0.01, loops(REFERENCE_LOOP_S, REFERENCE_LOOP_S)) == 1
    assert "over the limit" in capfd.readouterr().out


def test_passes_below_the_limit(capfd):
    assert run_within([SPIN], 60, loops(REFERENCE_LOOP_S, REFERENCE_LOOP_S)) == 0
    out = capfd.readouterr().out
    assert "limit: 60.0 s" in out
    assert "over the limit" not in out


def test_the_faster_calibration_counts(capfd):
    assert run_within([exits(0)], 60, loops(4 * REFERENCE_LOOP_S, 2 * REFERENCE_LOOP_S)) == 0
    assert "limit: 120.0 s" in capfd.readouterr().out


@pytest.mark.parametrize(("loop_s", "limit_s"), [(1, 480), (2, 960), (0.75, 360), (0.25, 240)])
def test_the_limit_follows_the_machine_down_to_half(loop_s, limit_s):
    assert scaled_limit(480, loop_s * REFERENCE_LOOP_S) == pytest.approx(limit_s)


def test_the_share_of_other_processes_excludes_descendants():
    start = CpuClock(own_s=5, busy_s=100, total_s=1000)
    assert start.share_of_others(CpuClock(own_s=65, busy_s=200, total_s=1200)) == pytest.approx(0.2)
    assert start.share_of_others(CpuClock(own_s=105, busy_s=200, total_s=1200)) == 0
    assert CpuClock(own_s=0).share_of_others(CpuClock(own_s=9)) == 0, "a system that does not report busy cores"


def test_time_of_descendants_is_own_time():
    start = CpuClock.now()
    subprocess.run(SPIN, check=True)
    assert CpuClock.now().own_s - start.own_s >= 0.5


def test_the_first_failure_is_the_exit_status_and_other_commands_run(tmp_path):
    touch = [sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"]
    assert run_within([exits(3), exits(4), touch], 60, loops(1, 1)) == 3
    assert (tmp_path / "ran").exists()


def test_commands_run_at_the_same_time_and_outputs_are_whole(tmp_path, capfd):
    """Each of two commands waits for a file of the other; the first one's output follows the last one's."""
    waits = (
        "import pathlib, sys, time; a, b, text = sys.argv[1:]; pathlib.Path(a).touch()\nwhile not pathlib.Path(b).exists(): "
    )
    command = [sys.executable, "-c", waits + "time.sleep(0.01)\nprint(text)"]
    paths = [str(tmp_path / "first"), str(tmp_path / "last")]
    assert run_within([[*command, *paths, "linted"], [*command, *paths[::-1], "tested"]], 60, loops(1, 1)) == 0
    assert capfd.readouterr().out.split("\n")[:2] == ["tested", "linted"]


def test_a_command_line_without_commands_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["--limit-s", "5", "--", "--"])
    assert "at least one command" in capsys.readouterr().err


def test_commands_are_split_and_the_limit_is_passed(capfd, monkeypatch):
    given = []
    monkeypatch.setitem(main.__globals__, "run_within", lambda commands, limit_s: given.append((commands, limit_s)) or 7)
    assert main(["--limit-s", "5", "--", "make", "check", "--", "pytest", "-m", "not slow"]) == 7
    assert main(["--", "true"]) == 7
    assert given == [([["make", "check"], ["pytest", "-m", "not slow"]], 5), ([["true"]], RUNNER["LIMIT_S"])]
