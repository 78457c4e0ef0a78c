"""The support page says what records show, and not a word more."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from outrider.device import Capabilities, ConfigError

ROOT = Path(__file__).resolve().parents[2]
REPORT = {
    "backend": {"name": "chip"},
    "tier": {"kind": "simulated", "device": "a model of the chip", "date": "2026-11-21"},
    "command": "outrider conform --backend chip",
    "host": {"python": "3.11.7"},
    "versions": {"torch": "2.13.0", "device": "a model of the chip"},
    "levels": {f"L{n}": {"result": "passed" if n != 3 else "failed", "counts": "7 passed"} for n in range(5)},
    "capabilities": {**Capabilities(captures_graphs=True, flags=True).as_dict()},
}


@pytest.fixture(scope="module")
def support():
    spec = importlib.util.spec_from_file_location("site_support", ROOT / "docs" / "_site" / "support.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_page_is_what_the_records_give(support):
    records = support.load_records(support.EVIDENCE)
    assert support.PAGE.read_text(encoding="utf-8") == support.render(records), "run: python docs/_site/support.py"
    assert {record.backend for record in records} >= {"cpu", "sim", "cuda", "rocm", "npu"}


def cell(page, capability):
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {capability} |")]
    return line.split("|")[2].strip()


def test_a_cell_says_what_its_record_shows(support):
    page = support.render([support.from_report(REPORT)])
    assert cell(page, "captures_graphs") == "simulated"
    assert cell(page, "flags") == "not shown"  # declared, and the level that tests it failed
    assert cell(page, "event_timing") == "no"
    assert cell(page, "overlapped speculative decoding") == "simulated"


def test_the_best_evidence_wins_and_static_evidence_shows_no_ability(support):
    simulated = support.from_report(REPORT)
    run = support.from_report(REPORT | {"tier": REPORT["tier"] | {"kind": "run on a device", "device": "Chip 9"}})
    static = support.EvidenceRecord(backend="chip", tier="static", device="its wheel", date="2026-11-21", command="pytest")
    assert cell(support.render([simulated, run, static]), "captures_graphs") == "run"
    alone = support.render([static, support.from_report(REPORT | {"backend": {"name": "other"}})])
    assert cell(alone, "captures_graphs") == "not run"


def test_a_tier_is_lowered_and_never_raised(support):
    run = REPORT | {"tier": REPORT["tier"] | {"kind": "run on a device"}}
    assert support.from_report(run).tier == "device"
    assert support.from_report(run, tier="stand-in").tier == "stand-in"
    with pytest.raises(ConfigError, match="which isn't 'stand-in'"):
        support.from_report(REPORT, tier="stand-in")
    with pytest.raises(ConfigError, match="is no evidence"):
        support.from_report(REPORT | {"tier": REPORT["tier"] | {"kind": "not run"}})


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"tier": "sworn"}', '{"tier": "static", "colour": "blue"}'])
def test_what_is_no_record(support, text):
    with pytest.raises(ConfigError, match=r"x\.json isn't a record of support"):
        support.parse_record(text, "x.json")


def test_records_survive_a_round_trip(support, tmp_path):
    record = support.from_report(REPORT, note="seen")
    (tmp_path / "chip.json").write_text(json.dumps(record.as_dict()))
    assert support.load_records(tmp_path) == [record]
    with pytest.raises(ConfigError, match="no directory"):
        support.load_records(tmp_path / "nothing")


def test_a_report_that_was_changed_is_not_added(support, tmp_path):
    report = tmp_path / "report.json"
    report.write_text(json.dumps(REPORT))
    with pytest.raises(ConfigError, match="doesn't hold"):
        support.add_record(report, "chip", directory=tmp_path)
    assert not (tmp_path / "chip.json").exists()


def test_a_sealed_report_is_added(support, tmp_path, monkeypatch):
    report = tmp_path / "report.json"
    report.write_text(json.dumps(REPORT))
    monkeypatch.setattr(support, "verify", lambda content: ["it was made by another suite"])
    added = support.add_record(report, "chip", note="seen", directory=tmp_path)
    assert support.parse_record(added.read_text(), "chip.json") == support.from_report(REPORT, note="seen")


def test_no_hardware_of_these_was_seen(support):
    """A record of a run needs a machine; for these makers there was none, whatever the table grows to."""
    ran = {record.backend for record in support.load_records(support.EVIDENCE) if record.tier == "device"}
    assert "npu" not in ran
    assert "rocm" not in ran
