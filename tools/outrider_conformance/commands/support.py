"""``outrider support``: the support table of all backends, which shows each ability with the kind of its evidence.

A record is a small JSON file. :func:`from_report` makes one from a report of the suite; records of static checks are written
by hand. A capability counts if a record declares it and passed the level that tests it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from outrider.cli.options.option_values import DIRECTORY, INPUT_FILE, checking_options, option, output_file, text
from outrider.cli.terminal.files import check_distinct, read_utf8, write_whole
from outrider.cli.terminal.report import CommandReport
from outrider.device.errors import ConfigError

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
    return [parse_record(read_utf8(path, "a record"), str(path)) for path in sorted(directory.glob("*.json"))]


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


def render(records: Sequence[EvidenceRecord], command: str) -> str:
    """Return the support page in Markdown. ``command`` is the command that writes it."""
    names = sorted({record.backend for record in records})
    in_order = sorted(records, key=lambda record: (-_RANK[record.tier], record.date))
    by_name = {name: [record for record in in_order if record.backend == name] for name in names}
    lines = [
        "# Support",
        "",
        f"This page is made by `{command}` from the records in `docs/evidence/support`; a test holds it against them.",
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


EVIDENCE = Path("docs/evidence/support")
COMMAND = "outrider support --write docs/reference/generated/support.md"


def support(
    evidence: Annotated[Path, option("--evidence", value=DIRECTORY, help="Directory of the records.")] = EVIDENCE,
    write: Annotated[Path | None, option("--write", value=output_file(), help="Write the page to this file.")] = None,
    check: Annotated[
        Path | None,
        option("--check", value=INPUT_FILE, help="Fail unless this file equals the page made from the records."),
    ] = None,
    add: Annotated[
        Path | None,
        option("--add", value=INPUT_FILE, help="Add a record made from a report.json of the suite."),
    ] = None,
    name: Annotated[
        str, option("--name", value=text("NAME"), help="With --add: name of the record's file, without .json.")
    ] = "",
    note: Annotated[str, option("--note", value=text(), help="With --add: a remark for readers.")] = "",
    stand_in: Annotated[
        bool, option("--stand-in", help="With --add: the run used another vendor's device with the same interface.")
    ] = False,
) -> CommandReport:
    """Print the support table made from recorded evidence. Options write it, check it, or add a record."""
    from outrider_conformance.reporting.report import MOST_BYTES, load_report, verify

    if write is not None:
        with checking_options():
            check_distinct("--write", write, filter(None, (check, add)))
    if add is not None:
        if not name:
            raise ConfigError("--add needs --name, the name of the record's file")
        report = load_report(read_utf8(add, "a report of the suite", MOST_BYTES), str(add))
        problems = [problem for problem in verify(report) if "suite" not in problem]
        if problems:
            raise ConfigError(f"{add} doesn't hold: {problems[0]}")
        record = from_report(report, tier="stand-in" if stand_in else None, note=note)
        evidence.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record.as_dict(), indent=2, ensure_ascii=False) + "\n"
        write_whole(evidence / f"{name}.json", text)
    records = load_records(evidence)
    page = render(records, COMMAND)
    if write is not None:
        write_whole(write, page)
    same = check is None or (check.is_file() and check.read_bytes() == page.encode())

    def show(console: Console) -> None:
        if write is not None:
            console.print(f"{write}: {len(records)} records")
        elif check is not None:
            console.print(f"{check} is up to date" if same else f"{check} isn't what the records give; run `{COMMAND}`")
        else:
            console.print(page, markup=False, highlight=False, soft_wrap=True)

    data: dict[str, object] = {"records": [record.as_dict() for record in records], "up_to_date": same}
    return CommandReport(data=data, render=show, exit_code=0 if same else 1)
