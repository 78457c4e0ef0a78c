"""Change the engine in one place at a time and run drawn host programs on it: what survives isn't checked by them.

    python -m outrider_proof.mutations -n 8 --seconds 600 --out build/mutations.jsonl
    python -m outrider_proof.mutations --modules outrider.engine.step --sample 20

Each change runs in a process of its own, forked from one that has loaded the models and knows the right tokens from the
engine as it is. A program tells by a wrong token, a race, a lost page or row, another acceptance, lost batching or overlap,
an error, or by not ending. Without a change every program passes, or the command ends at once.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from outrider_proof.mutations.running import run
from outrider_proof.mutations.sites import Site

LIMIT_S = 120.0
"""What a change may take before it counts as one that hangs."""


def main() -> int:
    """Parse the options, run, write. Exit code 1 where a change survived that isn't explained."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from outrider_proof.mutations.deck import MODULES
    from outrider_proof.mutations.survivors import explained

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--modules", nargs="+", default=list(MODULES), help="modules of the engine")
    parser.add_argument("--sample", type=int, help="as many changes, drawn from all")
    parser.add_argument("--seed", type=int, default=0, help="of that draw")
    parser.add_argument("--only", help="changes whose name has this")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after this long")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one change")
    parser.add_argument("--out", type=Path, help="a file for the records, lines of JSON; what it has is kept")
    options = parser.parse_args()
    todo = chosen(options.modules, options.only, options.sample, options.seed)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    records = run(todo, processes=options.n, seconds=options.seconds, limit=options.limit, out=options.out)
    return told(records, len(todo), explained)


def chosen(modules: list[str], only: str | None, sample: int | None, seed: int) -> list[Site]:
    """The changes to be tried."""
    from importlib import import_module

    from outrider_proof.mutations.sites import sites

    every = [site for module in modules for site in sites(import_module(module))]
    some = [site for site in every if only is None or only in site.name]
    return some if sample is None else random.Random(seed).sample(some, min(sample, len(some)))


def told(records: list[dict[str, Any]], planned: int, explained: Any) -> int:
    """Print the figures and the survivors; the exit code."""
    by_module = Counter(record["module"] for record in records)
    alive = [record for record in records if record["by"] is None]
    for module, count in by_module.items():
        left = sum(record["module"] == module for record in alive)
        print(f"{module}: {count - left} of {count} killed")
    print(Counter(record["by"] for record in records if record["by"] is not None).most_common())
    open_ones = [record for record in alive if explained(record["name"]) is None]
    print(f"{len(records)} of {planned} tried, {len(alive)} survived, {len(alive) - len(open_ones)} of these explained")
    for record in open_ones:
        print(f"survived: line {record['line']}: {record['name']}")
    return 1 if open_ones or len(records) < planned else 0


if __name__ == "__main__":
    sys.exit(main())
