"""``outrider support``: the table says what records show, and not a word more."""

import json
import re
from pathlib import Path

import pytest

from outrider.device import Capabilities, ConfigError
from outrider_conformance.commands.support import EvidenceRecord, from_report, load_records, parse_record, render
from outrider_conformance.reporting.verdict import read_waivers

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "docs" / "evidence" / "support"
REPORT = {
    "backend": {"name": "chip"},
    "tier": {"kind": "simulated", "device": "a model of the chip", "date": "2026-11-21"},
    "command": "outrider conform --backend chip",
    "host": {"python": "3.11.7"},
    "versions": {"torch": "2.13.0", "device": "a model of the chip"},
    "levels": {f"L{n}": {"result": "passed" if n != 3 else "failed", "counts": "7 passed"} for n in range(5)},
    "capabilities": {**Capabilities(captures_graphs=True, flags=True).as_dict()},
}


def test_the_page_is_what_the_records_give(outrider, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert outrider("support", "--check", "docs/reference/generated/support.md").code == 0, (
        "run: outrider support --write docs/reference/generated/support.md"
    )
    assert "# Support" in outrider("support").out
    assert {r["backend"] for r in outrider("support", "--json").json["records"]} >= {"cpu", "sim", "cuda", "rocm", "npu"}


def test_a_page_that_is_not_up_to_date_is_told(outrider, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    page = tmp_path / "support.md"
    page.write_text((ROOT / "docs" / "reference" / "generated" / "support.md").read_text().replace("simulated", "run"))
    result = outrider("support", "--check", str(page))
    assert result.code == 1
    assert "isn't what the records give" in result.out


@pytest.mark.parametrize("option", ["--check", "--add"])
def test_the_page_replaces_no_file_that_is_read(outrider, tmp_path, option):
    page = tmp_path / "support.md"
    page.write_text("old")
    result = outrider("support", "--write", str(page), option, str(page))
    assert result.code == 2
    assert f"--write is '{page}', another file of this command" in result.err
    assert page.read_text() == "old"


def test_a_page_on_a_full_disk_is_named(outrider, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)

    def full(path, *_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    result = outrider("support", "--write", str(tmp_path / "support.md"))
    assert result.code == 1
    assert f"writing {tmp_path / 'support.md'} failed: no space left on the device" in result.err


def cell(page, capability):
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {capability} |")]
    return line.split("|")[2].strip()


def test_a_cell_says_what_its_record_shows():
    page = render([from_report(REPORT)], "command")
    assert cell(page, "captures_graphs") == "simulated"
    assert cell(page, "flags") == "not shown"  # declared, and the level that tests it failed
    assert cell(page, "event_timing") == "no"
    assert cell(page, "overlapped speculative decoding") == "simulated"


def test_the_best_evidence_wins_and_static_evidence_shows_no_ability():
    run = from_report(REPORT | {"tier": REPORT["tier"] | {"kind": "run on a device", "device": "Chip 9"}})
    static = EvidenceRecord(backend="chip", tier="static", device="its wheel", date="2026-11-21", command="pytest")
    assert cell(render([from_report(REPORT), run, static], "command"), "captures_graphs") == "run"
    alone = render([static, from_report(REPORT | {"backend": {"name": "other"}})], "command")
    assert cell(alone, "captures_graphs") == "not run"


def test_a_tier_is_lowered_and_never_raised():
    run = REPORT | {"tier": REPORT["tier"] | {"kind": "run on a device"}}
    assert from_report(run).tier == "device"
    assert from_report(run, tier="stand-in").tier == "stand-in"
    with pytest.raises(ConfigError, match="which isn't 'stand-in'"):
        from_report(REPORT, tier="stand-in")
    with pytest.raises(ConfigError, match="is no evidence"):
        from_report(REPORT | {"tier": REPORT["tier"] | {"kind": "not run"}})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tier": "sworn"}', '{"tier": "static", "colour": "blue"}'])
def test_what_is_no_record(text):
    with pytest.raises(ConfigError, match=r"x\.json isn't a record of support"):
        parse_record(text, "x.json")


BAD = [(b"\x8e\xff", "not UTF-8 text"), (b"[" * 100_000, "recursion"), (None, "expected a file with"), ("/dev/zero", "MiB")]


@pytest.mark.parametrize(("content", "said"), BAD, ids=["binary", "deep", "a directory", "without an end"])
def test_files_that_hold_anything_else_are_told(outrider, content, said, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider_conformance.reporting.report.MOST_BYTES", 1 << 20)
    file = tmp_path / "x.json"
    if content is None:
        file.mkdir()
        said = "a directory|No such file|no such report"
    elif isinstance(content, str):
        file.symlink_to(content)
    else:
        file.write_bytes(content)
    asked = [("conform", "--verify", str(file)), ("support", "--add", str(file), "--name", "y", "--evidence", str(tmp_path))]
    asked += [("support", "--evidence", str(tmp_path))]
    for arguments in asked:
        result = outrider(*arguments, "--json")
        assert (result.code, result.json["error"]["type"]) in ((1, "ConfigError"), (2, "UsageError")), result.out
        assert re.search(said, result.json["error"]["message"])
    with pytest.raises(ConfigError):
        read_waivers(file)
    if isinstance(content, bytes):
        result = outrider("support", "--check", str(file), "--evidence", str(EVIDENCE), "--json")
        assert (result.code, result.json["up_to_date"]) == (1, False)


def test_records_survive_a_round_trip(tmp_path):
    record = from_report(REPORT, note="seen")
    (tmp_path / "chip.json").write_text(json.dumps(record.as_dict()))
    assert load_records(tmp_path) == [record]
    with pytest.raises(ConfigError, match="no directory"):
        load_records(tmp_path / "nothing")


def test_a_report_that_was_changed_is_not_added(outrider, tmp_path):
    report = tmp_path / "report.json"
    report.write_text(json.dumps(REPORT))
    result = outrider("support", "--evidence", str(tmp_path), "--add", str(report), "--name", "chip")
    assert result.code == 1
    assert "doesn't hold" in result.err
    assert "--add needs --name" in outrider("support", "--add", str(report)).err


def test_no_hardware_of_these_was_seen():
    """A record of a run needs a machine; for these makers there was none, whatever the table grows to."""
    ran = {record.backend for record in load_records(EVIDENCE) if record.tier == "device"}
    assert "npu" not in ran
    assert "rocm" not in ran
