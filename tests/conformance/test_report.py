"""The report: its levels follow from its tests, its seal shows every change, and each file of it is well-formed."""

import copy
import json
import re
from xml.etree import ElementTree

import pytest

from outrider.device import ConfigError
from outrider_conformance.reporting.page import FILES, badge, junit, page
from outrider_conformance.reporting.report import levels_of, seal, verify
from outrider_conformance.reporting.verdict import read_waivers, text_of
from outrider_conformance.run import passed
from outrider_trace.picture import prose


def test_the_reference_passes_and_its_report_holds(cpu_run):
    directory, report = cpu_run
    assert report["reached"] == "L3"
    assert passed(report)
    assert verify(report) == []
    assert sorted(path.name for path in directory.iterdir()) == sorted(FILES)
    assert json.loads((directory / "report.json").read_text()) == report


def test_the_command_checks_a_file_and_its_directory(cpu_run, outrider):
    directory, _ = cpu_run
    for named in (directory, directory / "report.json"):
        assert outrider("conform", "--verify", str(named)).code == 0
    missing = outrider("conform", "--verify", str(directory / "other"))
    assert missing.code == 2
    assert "there is no such report" in missing.err


BAD = [(b"\x8e\xff", "not UTF-8 text"), (b"[" * 100_000, "recursion"), (None, "no such report"), ("/dev/zero", "MiB")]


@pytest.mark.parametrize(("content", "said"), BAD, ids=["binary", "deep", "a directory", "without an end"])
def test_files_that_hold_anything_else_are_named(outrider, content, said, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider_conformance.reporting.report.MOST_BYTES", 1 << 20)
    file = tmp_path / "x.json"
    if content is None:
        file.mkdir()
    elif isinstance(content, str):
        file.symlink_to(content)
    else:
        file.write_bytes(content)
    result = outrider("conform", "--verify", str(file), "--json")
    assert (result.code, result.json["error"]["type"]) in ((1, "ConfigError"), (2, "UsageError")), result.out
    assert re.search(said, result.json["error"]["message"])
    with pytest.raises(ConfigError):
        read_waivers(file)


def test_a_report_says_what_ran(cpu_run):
    _, report = cpu_run
    assert report["command"] == "outrider conform --backend cpu --level L3"
    assert report["tier"]["kind"] == "run on the host"
    assert report["backend"]["name"] == "cpu"
    assert report["versions"]["torch"] == report["host"]["torch"]
    assert report["capabilities"]["captures_graphs"] is False


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda r: r["host"].update(torch="9.9"), "seal"),
        (lambda r: r.update(reached="L4"), "claims L4"),
        (lambda r: r["levels"]["L1"].update(result="failed"), "don't follow"),
        (lambda r: r["tests"].pop(), "is missing"),
        (lambda r: r["capabilities"].update(captures_graphs=True), "though the backend declares"),
        (lambda r: r["tests"][0].update(outcome="waived"), "without reason"),
        (
            lambda r: r["tests"][0].update(
                outcome="waived", waiver={"reason": "x", "link": "https://x", "expires": "2001-01-01"}
            ),
            "had expired",
        ),
        (lambda r: r["kit"].update(suite="0"), "another suite"),
        (lambda r: r.update(format=99), "format 99"),
        (lambda r: r.pop("tests"), "not a report"),
    ],
)
def test_catches_a_changed_report(cpu_run, change, problem):
    """Also where whoever changed it sealed it again, except for plain facts, which only the seal protects."""
    changed = copy.deepcopy(cpu_run[1])
    change(changed)
    assert any("seal" in found for found in verify(changed)) or problem in ("format 99", "not a report")
    if problem != "seal":
        changed = seal(changed)
    assert any(problem in found for found in verify(changed)), verify(changed)


def record(outcome, level=1):
    return {"outcome": outcome, "level": level}


@pytest.mark.parametrize(
    ("outcomes", "result"),
    [
        (["passed", "not declared", "not applicable"], "passed"),
        (["not declared"], "passed"),
        (["passed", "waived"], "passed with waivers"),
        (["passed", "not run"], "not run"),
        ([], "not run"),
        (["passed", "waived", "not run", "failed"], "failed"),
    ],
)
def test_a_levels_result(outcomes, result):
    assert levels_of([record(outcome) for outcome in outcomes], 1)["L1"]["result"] == result


def test_junit_counts(cpu_run):
    root = ElementTree.fromstring(junit(cpu_run[1]).encode())
    suites = {suite.get("name"): suite for suite in root}
    assert list(suites) == ["L0", "L1", "L2", "L3"]
    assert sum(int(s.get("tests")) for s in root) == len(cpu_run[1]["tests"]) == len(root.findall(".//testcase"))
    assert not root.findall(".//failure")


def test_the_page_stands_alone_and_escapes(cpu_run):
    report = copy.deepcopy(cpu_run[1])
    report["tests"][0].update(outcome="failed", reason="<script>alert(1)</script>\x07")
    text = page(report)
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert report["command"] in text
    assert "Promises that were broken (1)" in text
    assert "``" not in text
    assert "raises <code>ConfigError</code>" in text
    ElementTree.fromstring(junit(report).encode())


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("``wait`` and `signal(1)`", "<code>wait</code> and <code>signal(1)</code>"),
        (":class:`~outrider.device.Stream`, :meth:`wait`", "<code>Stream</code>, <code>wait</code>"),
        ("`a<b` & a lone ` stays", "<code>a&lt;b</code> &amp; a lone ` stays"),
    ],
)
def test_code_in_prose_is_marked(text, html):
    assert prose(text) == html


def test_the_badge_says_the_level_and_the_tier(cpu_run):
    text = badge(cpu_run[1])
    ElementTree.fromstring(text)
    assert "L3 run on the host" in text


def test_the_reason_of_a_failure_has_the_notes_of_the_error():
    """A kernel's own error says nothing of the kit's operands."""
    error = RuntimeError("invalid size")
    error.add_note("raised by rms_norm in torch.float32 of {'hidden': 37}")
    assert text_of(error) == "invalid size\nraised by rms_norm in torch.float32 of {'hidden': 37}"


def test_the_page_is_green_only_if_all_requested_levels_are_passed(cpu_run):
    green, red = '<span class="reached" style="--c:#1a7f37">', '<span class="reached" style="--c:#cf222e">'
    assert green in page(cpu_run[1])
    assert red in page({**cpu_run[1], "level": "L6", "reached": "L4"})
