"""`outrider conform --watch`: what failed runs again at a change, then everything; `--test` runs one test alone."""

import os
import shlex
import subprocess
import sys
import threading
import time

import pytest

from outrider.device.errors import ConfigError
from outrider_conformance import run as suite_run
from outrider_conformance.run import ConformanceError, conform


class Ended(BaseException):
    """As Ctrl-C."""


def report(*failed):
    return {"tests": [{"id": name, "outcome": "failed" if name in failed else "passed"} for name in ("a", "b", "c")]}


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """``watched(*results)``: the tests of each run, and what was said. Each wait sees a change at once."""

    def run_all(*results):
        runs, said, answers = [], [], iter(results)

        def run(tests):
            runs.append(tuple(tests))
            result = next(answers, None)
            if result is None:
                raise Ended
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(suite_run, "wait_for_change", lambda *_, **__: ["backend.py"])
        with pytest.raises(Ended):
            suite_run.watch(run, tmp_path, said.append)
        return runs, said

    return run_all


def test_what_failed_runs_again_and_then_everything(watched):
    runs, said = watched(report("a", "b"), report("b"), report(), report(), report("c"))
    assert runs == [(), ("a", "b"), ("b",), (), (), ("c",)]
    assert said[0].startswith("2 failed: waiting for a change")
    assert said[1] == "changed: backend.py"
    assert "the failed tests pass now: running all tests" in said


def test_a_plugin_that_crashes_is_watched_on(watched):
    """As while it's edited: the next save runs everything."""
    runs, said = watched(report("a"), ConformanceError("the process ended with signal 11"), report("a"))
    assert runs == [(), ("a",), (), ("a",)]
    assert "signal 11" in " ".join(said)


def test_a_change_is_seen_once_it_is_over(tmp_path):
    source = tmp_path / "backend.py"
    source.write_text("1")
    (tmp_path / "backend.pyc").write_text("ignored")
    before = suite_run.state_of(tmp_path)
    assert list(before) == [source]
    writer = threading.Thread(target=lambda: (time.sleep(0.05), source.write_text("22"), (tmp_path / "new.py").touch()))
    writer.start()
    assert suite_run.wait_for_change(tmp_path, before, pause_s=0.02)[0] == "backend.py"
    writer.join()
    os.utime(source, ns=(0, 0))
    assert suite_run.wait_for_change(tmp_path, before, pause_s=0.001) == ["backend.py", "new.py"]


def test_the_directory_is_found_without_an_import(tmp_path, monkeypatch):
    (tmp_path / "outrider_acme").mkdir()
    (tmp_path / "outrider_acme" / "__init__.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert suite_run.directory_of("outrider_acme.plugin:x") == tmp_path / "outrider_acme"
    with pytest.raises(ConfigError, match="no directory that can be watched"):
        suite_run.directory_of("json_of_nobody.plugin")


def test_watching_goes_with_no_report(outrider, tmp_path):
    result = outrider("conform", "--backend", "cpu", "--watch", "--json")
    assert result.code == 2
    assert "neither --json nor --report" in result.json["error"]["message"]


@pytest.mark.slow
def test_a_test_that_does_not_exist_is_refused(outrider):
    result = outrider("conform", "--backend", "cpu", "--test", "test_l1_events::test_of_nobody")
    assert result.code == 1
    assert "refused the run" in result.err


def test_one_test_runs_alone():
    name = "test_l1_rules::test_stream_names_are_unique"
    found = conform("cpu", level="L1", tests=[name])
    assert [test["id"] for test in found["tests"] if test["outcome"] != "not run"] == [name]
    assert found["reached"] is None


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="not run: there is no /dev/full")
@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        (">/dev/full", 1, "outrider: writing the output failed: no space left on the device; free some or write elsewhere\n"),
        (">&-", 1, "outrider: standard output is closed; the output is lost\n"),
        ("| head -n 0 >&2; exit ${PIPESTATUS[0]}", 141, ""),
    ],
    ids=["full", "closed", "without reader"],
)
def test_a_standard_output_that_cannot_be_written_is_one_error(redirection, code, said):
    """The suite writes from a process of its own."""
    command = f"{shlex.quote(sys.executable)} -m outrider.cli.main conform --backend cpu --level L0 {redirection}"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.slow
def test_a_failed_test_that_runs_alone_says_why(tmp_path, monkeypatch):
    (tmp_path / "no_figures.py").write_text(
        "from outrider_cpu.backend import CpuBackend\nCpuBackend.memory_info = lambda self: None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    name = "test_l1_memory::test_memory_figures_are_numbers_of_bytes"
    with open(tmp_path / "output", "w") as output:
        conform("cpu", level="L1", tests=[name], extra=["-p", "no_figures"], output=output)
    said = (tmp_path / "output").read_text()
    assert f"1. 1 failed test: {name}" in said
    assert "NoneType" in said
