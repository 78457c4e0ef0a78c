"""Change the engine in one place at a time and run random host programs on it, to find mutants that survive.

Each call writes one line per mutant:

    python -m proof.mutants -n 8 --seconds 600 --out build/mutations.jsonl
    python -m proof.mutants --sample 240 --seed 1
    python -m proof.mutants --modules outrider.engine.step --class fences

The parent process loads the models. It runs each program on the unchanged engine and records its tokens, costs and executed
lines. Each mutant runs in its own child process, forked from the parent. The child runs the programs that reach the changed
line, the cheapest first. A program detects the mutant by one of these: a wrong token, a race, a lost page or row, a different
acceptance or cost, lost batching or overlap, an error, or a hang. If a program fails on the unchanged engine, the command
ends at once. Mutants that no program reaches are counted and not run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from proof.mutants.mutation_sites import MutationSite


def main() -> int:
    """Run the mutants and write their records; exit code 1 if a mutant without a recorded reason survived."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    from proof.mutants import program_set
    from proof.mutants.classes import CLASSES, class_of, sample_sites
    from proof.mutants.mutation_sites import sites
    from proof.mutants.running import run
    from proof.mutants.survivors import explained

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument(
        "--modules", nargs="+", default=list(program_set.modules()), help="modules of the engine; all unless named"
    )
    parser.add_argument("--class", dest="kind", choices=[name for name, *_ in CLASSES], help="changes of this class")
    parser.add_argument("--sample", type=int, help="as many changes, drawn evenly from each class")
    parser.add_argument("--seed", type=int, default=0, help="of that draw")
    parser.add_argument("--only", help="changes whose name has this")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after this long")
    parser.add_argument("--programs", type=int, default=1_000, help="the most that judge one change; all unless named")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for a program that says nothing")
    parser.add_argument("--out", type=Path, help="a file for the records, lines of JSON; what it has is kept")
    options = parser.parse_args()
    every = [site for module in options.modules for site in sites(import_module(module))]
    asked = [site for site in every if options.only is None or options.only in site.name]
    asked = [site for site in asked if options.kind is None or class_of(site) == options.kind]
    known = program_set.record_baselines(options.modules)
    reached = [site for site in asked if any(each.reaches(site) for each in known)]
    todo = reached if options.sample is None else sample_sites(reached, options.sample, options.seed)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    limits = program_set.Limits(
        processes=options.n, seconds=options.seconds, patience=options.patience, programs=options.programs
    )
    records = run(todo, known, limits, options.out)
    _tell_unreached([site for site in asked if site not in set(reached)], len(asked))
    return _told(records, len(todo), explained)


def _tell_unreached(sites: list[MutationSite], asked: int) -> None:
    print(f"{len(sites)} of {asked} changes are in lines that no program runs; they aren't tried")
    for module, count in sorted(Counter(site.module for site in sites).items()):
        print(f"  not run: {count} of {module}")


def _told(records: list[dict[str, Any]], planned: int, explained: Callable[[str], str | None]) -> int:
    """Print the figures and the survivors, and return the exit code."""
    alive = [record for record in records if record["by"] is None]
    for key in ("class", "module"):
        for name, count in sorted(Counter(record[key] for record in records).items()):
            left = sum(record[key] == name for record in alive)
            print(f"{name}: {count - left} of {count} killed")
    print(Counter(record["by"] for record in records if record["by"] is not None).most_common())
    open_ones = [record for record in alive if explained(record["name"]) is None]
    print(f"{len(records)} of {planned} tried, {len(alive)} survived, {len(alive) - len(open_ones)} of these explained")
    for record in open_ones:
        print(f"survived: line {record['line']}: {record['name']}")
    return 1 if open_ones or len(records) < planned else 0


if __name__ == "__main__":
    sys.exit(main())
