"""The support page of all backends, which shows each ability with the kind of its evidence.

A record is a small JSON file. :func:`from_report` makes one from a report of the suite; records of static checks are written
by hand. A capability counts if a record declares it and passed the level that tests it.

``python docs/_site/support.py`` rewrites the page; ``tests/docs/test_support.py`` compares it with the records.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from outrider.device.errors import ConfigError
from outrider_conformance.reporting.report import load_report, verify

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "docs" / "evidence" / "support"
PAGE = ROOT / "docs" / "reference" / "generated" / "support.md"

TIERS: Mapping[str, tuple[str, str]] = {
    "static": ("static", "names and calls were checked against the vendor's package, without running the plugin"),
    "simulated": ("simulated", "the plugin ran on a simulated device that follows the vendor's documentation"),
    "stand-in": ("stand-in", "the plugin ran on another vendor's device that has the same interface"),
    "device": ("run", "the plugin ran on the named device, on the given date, with the given versions"),
}
"""The kinds of evidence, with a word for the table and a meaning. A later tier is shown first and doesn't include the earlier
ones.
"""
_RANK: Mapping[str, int] = {tier: rank for rank, tier in enumerate(TIERS)}
_TIER_OF_REPORT: Mapping[str, str] = {"simulated": "simulated", "run on the host": "device", "run on a device": "device"}
"""Tiers by their names in reports. The host is the device of a backend that computes on it."""
_TESTED_IN: Mapping[str, str] = {
    "captures_graphs": "L2",
    "forks_in_capture": "L2",
    "waits_inside_graphs": "L2",
    "captures_in_part": "L4",
    "flags": "L3",
    "updates_graph_params": "L3",
    "collectives": "L6",
    "captures_collectives": "L6",
    "peer_memory": "L6",
}
"""The level whose tests show a capability. Capabilities without an entry belong to L1."""
_ENGINE = "overlapped speculative decoding"
_KERNELS = "kernels"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceRecord:
    """A record of evidence about a backend: a conformance run or a static check."""

    backend: str
    tier: str
    """A key of :data:`TIERS`."""
    device: str
    date: str
    command: str
    """The command line of the recorded run."""
    versions: Mapping[str, str] = field(default_factory=dict)
    levels: Mapping[str, str] = field(default_factory=dict)
    """Result of each conformance level, by the level's name."""
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    """Capabilities that the backend declared, by name."""
    figures: Mapping[str, int] = field(default_factory=dict)
    """Counts of a static check."""
    note: str = ""
    """A remark for readers of the support table."""

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the record's file, without empty fields."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name))}


def parse_record(text: str, where: str) -> EvidenceRecord:
    """Parse a record. ``where`` names the file in errors. Raises :class:`ConfigError` for other content."""
    try:
        record = EvidenceRecord(**json.loads(text))
        if record.tier not in TIERS:
            raise ValueError(f"tier is {record.tier!r}, expected one of {', '.join(TIERS)}")
        return record
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{where} isn't a record of support: {type(error).__name__}: {error}") from error


def load_records(directory: Path) -> list[EvidenceRecord]:
    """Return all records of a directory, ordered by file name.

    Raises :class:`ConfigError` if there is no such directory, or for an invalid record.
    """
    if not directory.is_dir():
        raise ConfigError(f"there is no directory {directory} with records of support")
    return [parse_record(path.read_text(encoding="utf-8"), str(path)) for path in sorted(directory.glob("*.json"))]


def from_report(report: Mapping[str, Any], *, tier: str | None = None, note: str = "") -> EvidenceRecord:
    """Return the record of a conformance report. ``tier`` may lower the report's own tier, and never raises it.

    Raises :class:`ConfigError` for a report whose tier is no evidence, and for a ``tier`` above the report's.
    """
    kind = _TIER_OF_REPORT.get(report["tier"]["kind"])
    if kind is None:
        raise ConfigError(f"the report's tier is {report['tier']['kind']!r}, which is no evidence")
    if tier is not None and _RANK[tier] > _RANK[kind]:
        raise ConfigError(f"the report says {report['tier']['kind']!r}, which isn't {TIERS[tier][0]!r}")
    return EvidenceRecord(
        backend=report["backend"]["name"],
        tier=tier or kind,
        device=report["tier"]["device"],
        date=report["tier"]["date"],
        command=report["command"],
        versions={"python": report["host"]["python"], **report["versions"]},
        levels={level: f"{found['result']}: {found['counts']}" for level, found in sorted(report["levels"].items())},
        capabilities=report["capabilities"],
        note=note,
    )


def _passed(record: EvidenceRecord, level: str) -> bool:
    return record.levels.get(level, "").startswith("passed")


def _shows(record: EvidenceRecord, capability: str) -> bool:
    if capability in (_ENGINE, _KERNELS):
        return _passed(record, "L4")
    return bool(record.capabilities.get(capability)) and _passed(record, _TESTED_IN.get(capability, "L1"))


def _cell(records: Sequence[EvidenceRecord], capability: str) -> str:
    """Return the table cell for ``capability``: the word of the best evidence among the records of a backend."""
    showing = [record for record in records if _shows(record, capability)]
    if showing:
        return TIERS[max((record.tier for record in showing), key=lambda tier: _RANK[tier])][0]
    ran = [record for record in records if record.capabilities]
    if not ran:
        return "not run"
    if capability in (_ENGINE, _KERNELS) or any(record.capabilities.get(capability) for record in ran):
        return "not shown"
    return "no"


def render(records: Sequence[EvidenceRecord]) -> str:
    """Return the support page in Markdown."""
    names = sorted({record.backend for record in records})
    in_order = sorted(records, key=lambda record: (-_RANK[record.tier], record.date))
    by_name = {name: [record for record in in_order if record.backend == name] for name in names}
    lines = [
        "# Support",
        "",
        "This page is made by `python docs/_site/support.py` from the records in `docs/evidence/support`; a test holds "
        "it against them.",
        "Nothing is claimed beyond what a record shows.",
        "",
        "| tier | meaning |",
        "|---|---|",
        *(f"| {word} | {meaning} |" for word, meaning in reversed(tuple(TIERS.values()))),
        "",
        "## What was seen",
        "",
        "| backend | tier | on | date | conformance | versions |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        for record in by_name[name]:
            reached = ", ".join(f"{level} {text.partition(':')[0]}" for level, text in record.levels.items())
            counted = ", ".join(f"{what} {count}" for what, count in record.figures.items())
            versions = ", ".join(f"{what} {version}" for what, version in record.versions.items() if what != "device")
            cells = (name, TIERS[record.tier][0], record.device, record.date, reached or counted, versions)
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Capabilities", ""]
    lines += [
        "The best evidence for each; `no` where the backend doesn't declare it, `not shown` where no record shows it.",
        "",
    ]
    lines += [f"| capability | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    known = {key for record in records for key, value in record.capabilities.items() if isinstance(value, bool)}
    for capability in [*sorted(known), _KERNELS, _ENGINE]:
        lines.append(f"| {capability} | {' | '.join(_cell(by_name[name], capability) for name in names)} |")
    dtypes = {
        name: next((", ".join(r.capabilities["dtypes"]) for r in by_name[name] if r.capabilities.get("dtypes")), "not run")
        for name in names
    }
    lines.append(f"| dtypes, as declared | {' | '.join(dtypes[name] for name in names)} |")
    lines += ["", "## Notes", ""]
    for name in names:
        for record in by_name[name]:
            note = f" {record.note}" if record.note else ""
            lines.append(f"- **{name}**, {TIERS[record.tier][0]}, {record.date}: `{record.command}`.{note}")
    return "\n".join(lines) + "\n"


def write_page() -> str:
    """Write the page and return its text."""
    page = render(load_records(EVIDENCE))
    PAGE.write_text(page, encoding="utf-8")
    return page


def add_record(report: Path, name: str, *, tier: str | None = None, note: str = "", directory: Path = EVIDENCE) -> Path:
    """Write the record of the conformance report in file ``report`` and return the record's file.

    Raises :class:`ConfigError` for a report that doesn't hold.
    """
    content = load_report(report.read_text(encoding="utf-8"), str(report))
    problems = [problem for problem in verify(content) if "suite" not in problem]
    if problems:
        raise ConfigError(f"{report} doesn't hold: {problems[0]}")
    record = from_report(content, tier=tier, note=note)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(record.as_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def main() -> None:
    """Rewrite the page, after adding the record of a report if one is given."""
    parser = argparse.ArgumentParser(description="Write the support page from the records, and add a record.")
    parser.add_argument("report", nargs="?", type=Path, help="A report.json of the conformance suite to make a record of.")
    parser.add_argument("name", nargs="?", help="Name of the record's file, without .json.")
    parser.add_argument("--note", default="", help="A remark for readers.")
    parser.add_argument("--stand-in", action="store_true", help="The run used another vendor's device with this interface.")
    given = parser.parse_args()
    if given.report is not None:
        if given.name is None or "/" in given.name:
            parser.error("a report needs the name of its record's file, without a directory")
        try:
            print(add_record(given.report, given.name, tier="stand-in" if given.stand_in else None, note=given.note))
        except (ConfigError, OSError) as error:
            parser.error(str(error))
    write_page()


if __name__ == "__main__":
    main()
