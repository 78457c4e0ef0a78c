"""The long run over ranks: clean runs of the corpus, programs of the engine, and each injected divergence.

    python -m outrider_proof.rank_proof -n 16 --corpus 10000 --engine 500 --seconds 170 --out build/rank-proof.json

Work is shared out over processes; `--seconds` bounds it, and what was done by then is written. Exit code 1 for a false alarm,
a wrong token, or a divergence that wasn't found.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

CHUNK = {"corpus": 100, "engine": 2, "injected": 1}
"""Runs that one job makes."""


def work(part: str, ranks: int, first: int, count: int) -> dict[str, Any]:
    """One job, in a process of the pool."""
    import torch

    torch.set_num_threads(1)
    from outrider.registry import Registry
    from outrider_proof.rank_exploration import EVERY, RanksWanted, explore_ranks

    wanted = RanksWanted(
        registry=Registry(),
        ranks=ranks,
        iterations=1 if part == "injected" else count,
        seed=first,
        inject=EVERY if part == "injected" else None,
        corrected=part == "corpus",
    )
    report = explore_ranks(wanted)
    data = report.data
    assert isinstance(data, dict)
    return {"part": part, "ranks": ranks, "first": first, "runs": data["runs"], "right": report.exit_code == 0, "told": data}


def jobs(options: argparse.Namespace) -> Iterator[tuple[str, int, int, int]]:
    """(part, ranks, first, runs) of everything, engines before the rest."""
    numbers = {"injected": 3, "engine": options.engine, "corpus": options.corpus}
    for part in ("injected", "engine", "corpus"):
        size = CHUNK[part]
        for place, first in enumerate(range(0, numbers[part], size)):
            ranks = (2, 3, 4)[place % 3] if part != "engine" else (2, 2, 4)[place % 3]
            yield part, ranks, options.seed + first, min(size, numbers[part] - first)


def main() -> int:
    """Run it all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", type=int, default=2, help="processes")
    parser.add_argument("--corpus", type=int, default=10_000, help="clean runs of corrected programs")
    parser.add_argument("--engine", type=int, default=500, help="programs of the engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=Path("build/rank-proof.json"))
    options = parser.parse_args()
    began = time.monotonic()
    queue = iter(list(jobs(options)))
    runs: Counter[str] = Counter()
    setups: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    running: set[Future[dict[str, Any]]] = set()
    with ProcessPoolExecutor(options.n, mp_context=get_context("spawn")) as pool:
        while True:
            while len(running) < 2 * options.n and time.monotonic() - began < options.seconds:
                job = next(queue, None)
                if job is None:
                    break
                running.add(pool.submit(work, *job))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                found = future.result()
                runs[found["part"]] += found["runs"]
                setups.update(each["setup"] for each in found["told"].get("outcomes", ()))
                if not found["right"]:
                    wrong.append(found)
    summary = {
        "runs": dict(runs),
        "wrong": len(wrong),
        "seconds": round(time.monotonic() - began, 1),
        "processes": options.n,
        "setups": dict(sorted(setups.items())),
        "failures": wrong,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(summary, indent=1))
    print(json.dumps({key: summary[key] for key in ("runs", "wrong", "seconds", "processes")}))
    for each in wrong[:3]:
        print(json.dumps(each)[:3000])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
