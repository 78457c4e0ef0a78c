"""What came of the conformance matrix: a table, and red unless everything that could run has passed.

    conformance_summary.py MATRIX REPORTS

MATRIX is a file with what `outrider ci-matrix --format github` printed. REPORTS is a folder with one folder
`conformance-JOB` for each that ran, and a `report.json` in it. A row without a runner is "not run", whatever else is
true; one that had a runner and left no report has failed. Writes Markdown to standard output. Exit code 1 when a row
failed or a plugin is broken.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BAD = ("failed", "broken")


@dataclass(frozen=True)
class Outcome:
    """One line of the table. ``backend``: of the job."""

    backend: str
    result: str
    detail: str


def outcome(row: Mapping[str, Any], reports: Path) -> Outcome:
    """What came of one row of the matrix."""
    backend = row["backend"]
    name = row.get("job") or backend
    if row["status"] != "runs":
        return Outcome(name, row["status"], row["reason"])
    path = reports / f"conformance-{name}" / "report.json"
    if not path.is_file():
        return Outcome(name, "failed", "its job left no report")
    report = json.loads(path.read_text(encoding="utf-8"))
    tier = report["tier"]
    where = f"{tier['kind']}, {tier['device']}, {tier['date']}" if tier["device"] else f"{tier['kind']}, {tier['date']}"
    wanted = int(row["level"][1:])
    wanted = 4 if wanted == 5 else wanted  # L5 is reported, not judged
    reached = -1 if report["reached"] is None else int(report["reached"][1:])
    if report["backend"]["name"] != backend:
        return Outcome(name, "failed", f"its report is about {report['backend']['name']}")
    if reached < wanted:
        return Outcome(name, "failed", f"{row['level']} was asked for, reached {report['reached'] or 'no level'} ({where})")
    waived = any(level["result"] == "passed with waivers" for level in report["levels"].values())
    return Outcome(name, "passed with waivers" if waived else "passed", f"{report['reached']} ({where})")


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown, the same for people and for the page of the run."""
    lines = ["| backend | conformance | |", "|---|---|---|"]
    lines += [f"| {o.backend} | **{o.result}** | {' '.join(o.detail.replace('|', '/').split())} |" for o in outcomes]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 when something that could run didn't pass, or when nothing ran at all."""
    matrix, reports = map(Path, arguments)
    outcomes = [outcome(row, reports) for row in json.loads(matrix.read_text(encoding="utf-8"))["include"]]
    print(table(outcomes))
    ran = [o for o in outcomes if o.result.startswith("passed")]
    if not ran:
        print("\nNothing passed.")
    return 1 if not ran or any(o.result in BAD for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
