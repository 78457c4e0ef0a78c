"""`python -m conformance.mutants.matrix`: generated mutants, judged by the default run, for several seeds.

`--json FILE` keeps every outcome; `--write` puts the matrix into the docs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import sys
from collections import Counter
from pathlib import Path

from conformance.mutants.bases import ROOT

PAGE = ROOT / "docs" / "reference" / "generated" / "conformance-mutations.md"
_BEGIN, _END = "<!-- made by python -m conformance.mutants.matrix --write -->", "<!-- end of the matrix -->"
KERNEL_TESTS = ("test_l4_kernels",)
LEVELS = (0, 1, 2, 3, 4)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.mutants.matrix", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="those with TEXT in their class or name")
    parser.add_argument("--without", metavar="TEXT", help="not those with TEXT in their class or name")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="run the kit with the seeds 0 to N-1")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing new after this long")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each Nth mutant alone")
    parser.add_argument("--known", action="store_true", help="each against the one test that the page names for it, seed 0")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep outcomes there; what it has isn't run again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome there")
    parser.add_argument(
        "--write", action="store_true", help="put the matrix into docs/reference/generated/conformance-mutations.md"
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    from conformance.mutants import generated, harness, table

    harness.warm_up()
    mutants = generated.mutants()
    chosen = {n: m for n, m in mutants.items() if options.only in f"{m.kind} {n}"}
    if options.without:
        chosen = {name: one for name, one in chosen.items() if options.without not in f"{one.kind} {name}"}
    known = read() if options.known else {}
    if options.known:
        # Not those that count the calls of the whole run, nor those that take many programs to show.
        chosen = {name: one for name, one in chosen.items() if "_programs" not in known.get(name, "_programs")}
        chosen = {name: one for name, one in chosen.items() if "from the" not in one.fault}
        options.seeds = 1
    chosen = dict(list(chosen.items())[:: options.every])
    outcomes: dict = {name: {} for name in chosen}
    jobs = [
        ((name, seed), (one.base, one.apply, one.level, _tests(one, known), True, seed, one.near))
        for seed in range(options.seeds)
        for name, one in chosen.items()
    ]
    for (name, seed), outcome in harness.Record(options.record).completed(jobs, options.jobs, options.seconds):
        outcomes[name][str(seed)] = entry = _entry(outcome)
        print(f"{_word(entry):<9} {seed} {chosen[name].kind} | {name} | {entry['by']} | {entry['seconds']} s", flush=True)
        if not outcome.ran or (outcome.broke and not outcome.failed):
            print(outcome.output[-1500:], flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(outcomes, indent=1, sort_keys=True), encoding="utf-8")
    text = render(outcomes, mutants, options.seeds)
    if not options.known:
        print(text)
    if options.write:
        table.write(text, _BEGIN, _END)
    return 1 if any(killed(found) != len(found) for found in outcomes.values()) else 0


def _entry(outcome):
    return {
        "level": outcome.level,
        "by": outcome.failed[0][0] if outcome.failed else "",
        "reason": outcome.failed[0][2][:300] if outcome.failed else outcome.broke,
        "reached": outcome.reached or bool(outcome.broke),
        "seconds": round(outcome.seconds, 1),
    }


def _word(entry):
    if convicts(entry):
        return "killed"
    return "SURVIVES" if entry["reached"] else "UNREACHED"


def convicts(entry) -> bool:
    """Whether a test failed by the fault: what fails before the fault took effect may fail for how the fault was put in."""
    return entry["level"] is not None and entry["reached"]


def _tests(one, known):
    """A mutant of a kernel passes L0 to L3 as the unbroken backend does; only what calls kernels is run."""
    if one.name in known:
        return (known[one.name].partition("[")[0],)  # pytest takes no parameters in a name that it looks up as a package
    return KERNEL_TESTS if one.kind.startswith("kernels") else ()


def read() -> dict[str, str]:
    """Mutant's name → the test that convicts it, from the page."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|`]+ \| `([^`]+)` \| (.*) \| ([^|]*) \| L\d \| `([^`]+)` \|$", text, re.MULTILINE)
    return {f"{rule}: {fault} ({base})": test for rule, fault, base, test in rows}


def killed(found) -> int:
    """In how many seeds."""
    return sum(map(convicts, found.values()))


def render(outcomes, table, seeds) -> str:
    """The matrix by class and level, and the survivors."""
    import torch

    kinds = Counter(table[name].kind for name in outcomes)
    total = sum(map(len, outcomes.values()))
    dead = sum(killed(found) for found in outcomes.values())
    when = datetime.datetime.now(datetime.UTC)
    lines = [
        _BEGIN,
        "",
        f"{when:%Y-%m-%d}, torch {torch.__version__}, {platform.system()} {platform.machine()}: "
        f"{len(outcomes)} mutants in {total} runs with the seeds 0 to {seeds - 1}; {dead} runs convict.",
        "",
        "| class | mutants | " + " | ".join(f"L{level}" for level in LEVELS) + " | convicted | by seed |",
        "|---|---|" + "---|" * len(LEVELS) + "---|---|",
    ]
    for kind, count in sorted(kinds.items()):
        mine = {name: found for name, found in outcomes.items() if table[name].kind == kind}
        first = Counter(min((e["level"] for e in found.values() if convicts(e)), default=None) for found in mine.values())
        by_seed = [[convicts(found[str(s)]) for found in mine.values() if str(s) in found] for s in range(seeds)]
        share = sum(map(sum, by_seed)) / max(sum(map(len, mine.values())), 1)
        per = " | ".join(str(first[level] or "") for level in LEVELS)
        lines.append(
            f"| {kind} | {count} | {per} | {share:.0%} | {', '.join(f'{sum(each)} of {len(each)}' for each in by_seed)} |"
        )
    lived = [name for name, found in outcomes.items() if killed(found) < len(found)]
    words = "Survivors, in some seed or all:" if lived else "There are no survivors."
    lines += ["", f"Columns L0 to L4: the first level that convicts. {words}", *([""] if lived else [])]
    for name in lived:
        seen = [seed for seed, entry in sorted(outcomes[name].items()) if not convicts(entry)]
        lines.append(f"- {name}, seeds {', '.join(seen)}")
    lines += ["", "| class | rule | fault | in | level | convicted by |", "|---|---|---|---|---|---|"]
    for name, found in outcomes.items():
        one = table[name]
        by = next((f"`{e['by']}`".replace("|", " ") for e in found.values() if convicts(e)), "survives")
        level = min((e["level"] for e in found.values() if convicts(e)), default=None)
        lines.append(
            f"| {one.kind} | `{one.verb}` | {one.fault} | {one.base} | {'' if level is None else f'L{level}'} | {by} |"
        )
    return "\n".join([*lines, "", _END])


if __name__ == "__main__":
    sys.exit(main())
