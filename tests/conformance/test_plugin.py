"""The suite as pytest runs it: options, selection, skips, waivers, xdist, crashes."""

import functools
import json
import os
import re
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from outrider_conformance import run
from outrider_conformance.run import ConformanceError, _post_mortem, check, conform, passed

FEW = ("--programs", "3")
"""Where it's about how the suite is run. All programs run on the reference for the report of test_report.py."""
MEMORY_ALONE = ("-k", "memory_figures")
"""Where one failure is the point; what is left out keeps no failed level from being told."""


def outcomes(report):
    return {test["id"]: test for test in report["tests"]}


@pytest.mark.slow
def test_runs_from_outside_with_plain_pytest(run_suite, tmp_path):
    done = run_suite("--backend", "cpu", "--level", "L0", "--report", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conformance of cpu:0" in done.stdout
    collected = re.search(r"collected (\d+) items\n", done.stdout)
    assert collected is not None, "modules above the level were collected, or the count names deselected tests"
    assert int(collected[1]) == len(json.loads((tmp_path / "out" / "report.json").read_text())["tests"])
    assert json.loads((tmp_path / "out" / "report.json").read_text())["reached"] == "L0"


@pytest.mark.slow
def test_runs_with_xdist(run_suite, tmp_path):
    pytest.importorskip("xdist", reason="not run: pytest-xdist isn't installed")
    done = run_suite("--backend", "cpu", "--level", "L2", "--report", "out", "-n", "2", *FEW)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["reached"] == "L2"
    assert report["capabilities"] is not None
    assert {test["outcome"] for test in report["tests"]} == {"passed", "not declared", "not applicable"}


@pytest.mark.slow
def test_one_module_of_the_suite_can_be_named(run_suite, tmp_path):
    """Outside its root pytest gives such tests no path; the report names them all the same."""
    done = run_suite(
        "--backend",
        "cpu",
        "--level",
        "L0",
        "--rootdir",
        ".",
        "--report",
        "out",
        module="outrider_conformance.suite.test_l0_plugin",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {test["id"].partition("::")[0] for test in json.loads((tmp_path / "out" / "report.json").read_text())["tests"]}
    assert "test_l0_plugin" in found


REFUSED = (
    (("--level", "L0"), "needs --backend"),
    (("--backend", "cpu", "--level", "L9"), "level 'L9'"),
    (("--backend", "cpu", "--waivers", "none.toml"), "none.toml"),
)
ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys, pytest
told = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        code = int(pytest.main(["-p", "outrider_conformance.plugin", "-p", "no:cacheprovider", *arguments]))
    told.append((code, said.getvalue()))
print(json.dumps(told))
"""


@pytest.mark.slow
def test_wrong_options_are_usage_errors(tmp_path):
    """All in one process, which takes longer to start than to refuse them."""
    asked = [["--rootdir", str(tmp_path), "--pyargs", "outrider_conformance", *arguments] for arguments, _ in REFUSED]
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps(asked)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    for (code, said), (arguments, message) in zip(json.loads(done.stdout), REFUSED, strict=True):
        assert code == 4, (arguments, said)
        assert message in said, arguments


@pytest.mark.slow
def test_a_skip_by_the_plugin_is_a_failure(sick):
    sick(
        """
        def _create_event(self, name, timing):
            pytest.skip("we don't feel like it")
        """
    )
    report = conform("sick", level="L1", extra=["-k", "a_wait_orders_two_streams"])
    assert report["levels"]["L1"]["result"] == "failed"
    reason = outcomes(report)["test_l1_events::test_a_wait_orders_two_streams"]["reason"]
    assert "may not be skipped" in reason


@pytest.mark.sample(1)
@pytest.mark.parametrize("code", [42, 128])
@pytest.mark.slow
def test_a_crash_is_told(sick, code):
    sick(
        f"""
        def memory_info(self):
            os._exit({code})
        """
    )
    with pytest.raises(ConformanceError, match=rf"exit code {code} while running test_l1_memory::test_memory_figures"):
        conform("sick", level="L1", extra=MEMORY_ALONE)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["journal.jsonl", ".report.json."])
@pytest.mark.slow
def test_a_full_disk_is_told(sick, tmp_path, capfd, name):
    sick(
        f"""
        def memory_info(self):
            from pathlib import Path
            honest = Path.open
            def full(path, *arguments, **options):
                if path.name.startswith({name!r}):
                    raise OSError(28, "No space left on device")
                return honest(path, *arguments, **options)
            Path.open = full
            return super().memory_info()
        """
    )
    with pytest.raises(ConformanceError, match="can't be written: No space left on device; free some") as caught:
        conform("sick", level="L1", report=tmp_path, extra=MEMORY_ALONE)
    assert str(tmp_path) in str(caught.value)
    said = "".join(capfd.readouterr())
    assert f"writing {tmp_path / name.strip('.')}".rstrip(".") in said
    assert "INTERNALERROR" not in said
    assert "Traceback" not in said


def test_a_journal_that_was_cut_off_still_names_the_test(tmp_path):
    (tmp_path / "journal.jsonl").write_text('{"started": "test_l1_x::a"}\n{"fini')
    assert "while running test_l1_x::a" in _post_mortem(tmp_path / "journal.jsonl", -9, "chip")


@pytest.mark.slow
def test_a_hang_is_told(sick):
    sick(
        """
        def memory_info(self):
            import threading
            threading.Event().wait()
        """
    )
    report = conform("sick", level="L1", extra=["--kit-timeout", "1", *MEMORY_ALONE])
    reason = outcomes(report)["test_l1_memory::test_memory_figures_are_numbers_of_bytes"]["reason"]
    assert "still running after 1 s" in reason


BROKEN = """
    def memory_info(self):
        from outrider.device import MemoryInfo
        return MemoryInfo(total=0, free=0, allocated=-1)
"""
WAIVER = """
    [[waiver]]
    test = "test_l1_memory::test_memory_figures_*"
    reason = "the driver counts backwards"
    link = "https://example.org/issues/1"
    expires = {expires}
"""


def waivers(tmp_path, expires="2999-01-01"):
    path = tmp_path / "waivers.toml"
    path.write_text(textwrap.dedent(WAIVER.format(expires=expires)))
    return path


@pytest.mark.slow
def test_a_waiver_explains_a_failure(sick, tmp_path, monkeypatch):
    sick(BROKEN)
    monkeypatch.setattr("outrider_conformance.run.conform", functools.partial(conform, extra=MEMORY_ALONE))
    with pytest.raises(ConformanceError, match="test_memory_figures_are_numbers"):
        check("sick", level="L1")
    report = conform("sick", level="L1", waivers=waivers(tmp_path), extra=FEW)
    assert report["levels"]["L1"]["result"] == "passed with waivers"
    assert report["reached"] == "L1"
    assert passed(report)


@pytest.mark.slow
def test_an_expired_waiver_excuses_nothing(sick, tmp_path):
    sick(BROKEN)
    report = conform("sick", level="L1", waivers=waivers(tmp_path, "2001-01-01"), extra=MEMORY_ALONE)
    assert report["levels"]["L1"]["result"] == "failed"
    assert "expired on 2001-01-01" in outcomes(report)["test_l1_memory::test_memory_figures_are_numbers_of_bytes"]["reason"]


@pytest.mark.slow
def test_a_waiver_that_is_not_needed_is_a_failure(tmp_path):
    report = conform("cpu", level="L1", waivers=waivers(tmp_path), extra=MEMORY_ALONE)
    assert report["levels"]["L1"]["result"] == "failed"
    reason = outcomes(report)["test_l1_memory::test_memory_figures_are_numbers_of_bytes"]["reason"]
    assert "remove the waiver" in reason


@pytest.mark.parametrize(("given", "threads"), [(None, "1"), ("4", "4")])
def test_the_suite_runs_with_one_thread_of_torch_unless_the_caller_sets_a_number(monkeypatch, given, threads):
    """Several threads wait actively after each small operation, which takes ten times as long on a busy host."""
    found = []

    @contextmanager
    def started(command, *, environment, **options):
        found.append((environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]))
        yield SimpleNamespace(wait=lambda: 4)

    monkeypatch.setattr(run, "child_session", started)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if given is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, given)
    with pytest.raises(ConformanceError, match="pytest refused"):
        conform("cpu", level="L0")
    assert found == [(threads, threads)]
