"""The table in the docs: every mutant, where it must die and what killed it; every legal backend, and that it lives."""

from __future__ import annotations

import platform
import re

from conformance.mutants import (
    faults_collectives,
    faults_declared,
    faults_flags,
    faults_graphs,
    faults_kernels,
    faults_memory,
    faults_queues,
    faults_verbs,
)
from conformance.mutants.bases import ROOT
from conformance.mutants.legal import legal

PAGE = ROOT / "docs" / "reference" / "generated" / "conformance-mutations.md"
_BEGIN, _END = "<!-- made by python -m conformance.mutants --write -->", "<!-- end -->"


def mutants():
    """All of them, by name."""
    modules = (
        faults_queues,
        faults_memory,
        faults_graphs,
        faults_flags,
        faults_verbs,
        faults_declared,
        faults_kernels,
        faults_collectives,
    )
    made = [mutant for module in modules for mutant in module.mutants()]
    found = {mutant.name: mutant for mutant in made}
    assert len(found) == len(made), "two mutants have one name"
    return found


def legals():
    return {one.name: one for one in legal()}


def render(results, lived, when, seconds, cores):
    """`results`: name → Outcome of mutants, `lived`: the same of legal ones."""
    table = mutants()
    killed = [name for name, outcome in results.items() if outcome.level is not None]
    expected = [name for name in killed if results[name].level == table[name].level]
    passed = [name for name, outcome in lived.items() if outcome.level is None and not outcome.broke]
    faults = {(table[name].verb, table[name].fault) for name in results}
    lines = [
        _BEGIN,
        "",
        f"{when}, torch {_torch()}, {platform.system()} {platform.machine()}; {seconds / 60:.0f} minutes of processes, "
        f"{cores} at a time on a machine with other work.",
        "",
        "| | number |",
        "|---|---|",
        f"| mutants | {len(results)} ({len(faults)} different faults; some in two backends) |",
        f"| killed | {len(killed)} |",
        f"| killed at the expected level | {len(expected)} |",
        f"| survivors | {len(results) - len(killed)} |",
        f"| legal backends | {len(lived)} |",
        f"| legal backends that pass | {len(passed)} |",
        "",
        "### Broken backends",
        "",
        "| verb | fault | in | level | killed by |",
        "|---|---|---|---|---|",
    ]
    for name, outcome in results.items():
        mutant = table[name]
        by = f"`{outcome.failed[0][0]}`" if outcome.failed else "**survives**"
        lines.append(f"| `{mutant.verb}` | {mutant.fault} | {mutant.base} | L{mutant.level} | {by.replace('|', ' ')} |")
    lines += ["", "### Legal backends", "", "| behaviour | from | passes | tests that ran |", "|---|---|---|---|"]
    for name, outcome in lived.items():
        one = legals()[name]
        how = (
            f"L{one.level}" if name in passed else f"**fails** `{outcome.failed[0][0] if outcome.failed else outcome.broke}`"
        )
        lines.append(f"| {one.what} | {one.base} | {how} | {outcome.ran} |")
    return "\n".join([*lines, "", _END])


def write(text, begin=_BEGIN, end=_END):
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.index(begin), page.index(end) + len(end)
    PAGE.write_text(page[:before] + text + page[after:], encoding="utf-8")


def read():
    """(mutant's name → (level, the test that kills it), names of legal backends), from the page."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \| ([^|]*) \| L(\d) \| `([^`]+)` \|$", text, re.MULTILINE)
    kills = {f"{verb}: {fault} ({base})": (int(level), test) for verb, fault, base, level, test in rows}
    rows = re.findall(r"^\| ([^|`]*) \| ([^|]*) \| L\d \| \d+ \|$", text, re.MULTILINE)
    return kills, [f"{what} ({base})" for what, base in rows]


def _torch():
    import torch

    return torch.__version__
