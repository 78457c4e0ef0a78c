"""The run over all mutants, with one record per mutant."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from proof.mutants.classes import class_of
from proof.mutants.mutation_sites import MutationSite
from proof.mutants.program_set import Limits, ProgramBaseline, Trial, judge_all


def run(
    todo: Sequence[MutationSite], known: Sequence[ProgramBaseline], limits: Limits, out: Path | None = None
) -> list[dict[str, Any]]:
    """A record of each change that was tried: the site, ``by`` what it was killed (None: it survived) and where.

    ``out`` is a file of JSON lines to which each record is appended. Mutants with a record there are skipped, unless they
    survived fewer programs than ``limits`` allows.
    """
    had = {record["name"]: record for record in _lines(out)}
    records = {site.name: had[site.name] for site in todo if site.name in had}
    missing = [site for site in todo if site.name not in had or _falls_short(had[site.name], site, known, limits.programs)]
    for trial in judge_all(missing, known, limits):
        record = records[trial.site.name] = _record(trial)
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    return sorted(records.values(), key=lambda record: (record["module"], record["number"]))


def _falls_short(record: dict[str, Any], site: MutationSite, known: Sequence[ProgramBaseline], most: int) -> bool:
    return record["by"] is None and record["programs"] < min(most, sum(each.reaches(site) for each in known))


def _lines(out: Path | None) -> list[dict[str, Any]]:
    if out is None or not out.exists():
        return []
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def _record(trial: Trial) -> dict[str, Any]:
    by, at = trial.result()
    more = {"name": trial.site.name, "class": class_of(trial.site), "programs": len(trial.programs)}
    return asdict(trial.site) | more | {"by": by, "at": at, "seconds": round(time.monotonic() - trial.fork.began, 2)}
