"""Run the long proof of ranks: corrected corpus programs, engine programs and each injected divergence.

    PYTHONPATH=tests python -m proof.rank_proof -n 16 --corpus 10000 --engine 400 --seconds 170

A pool of processes runs the jobs. Each finished job is a line of ``--out``; a second call with the same file runs the missing
jobs, so `--seconds` can split the proof over several calls. The exit code is 1 if any job had a false alarm, a wrong token or
a divergence that was not found.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proof.job_pool import run_jobs

if TYPE_CHECKING:
    from outrider_proof.rank_engine import RankExplorer

RUNS_PER_JOB = {"corpus": 100, "engine": 2, "injected": 1}
"""Number of runs of one job, by part."""

Job = tuple[str, int, int, int, int]
"""A job of the proof: part, number of ranks, first seed, number of runs, and the index of the schedule of each program."""


@functools.cache
def explorer() -> RankExplorer:
    """Return the explorer of this process, with its devices and reference models."""
    import torch

    torch.set_num_threads(1)
    from outrider.registry import Registry
    from outrider_proof.rank_engine import RankExplorer

    return RankExplorer(Registry())


def run_rank_job(part: str, ranks: int, first: int, count: int, schedule: int) -> dict[str, Any]:
    """Run one job in a pool process and return its record."""
    devices = explorer()
    from outrider_proof.rank_engine import explore_engine
    from outrider_proof.rank_exploration import EVERY, RanksWanted, explore_ranks

    wanted = RanksWanted(
        registry=devices.registry,
        ranks=ranks,
        iterations=1 if part == "injected" else count,
        seed=first,
        inject=EVERY if part == "injected" else None,
        corrected=part == "corpus",
        schedule=schedule,
    )
    began = time.process_time()
    report = explore_engine(wanted, devices) if part == "engine" else explore_ranks(wanted)
    data = report.data
    assert isinstance(data, dict)
    return {
        "job": [part, ranks, first, count, schedule],
        "runs": data["runs"],
        "right": report.exit_code == 0,
        "cpu_s": round(time.process_time() - began, 2),
        "setups": [each["setup"] for each in data.get("outcomes", ())],
        "told": None if report.exit_code == 0 else data,
    }


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Yield every job of the proof: injected divergences first, then corpus jobs between engine jobs."""
    for place in range(3):
        yield "injected", (2, 3, 4)[place], options.seed + place, 1, 0
    size = RUNS_PER_JOB["engine"]
    engine: list[Job] = [
        ("engine", (2, 2, 4)[place % 3], options.seed + first, min(size, options.engine - first), schedule)
        for schedule in range(options.schedules)
        for place, first in enumerate(range(0, options.engine, size))
    ]
    size = RUNS_PER_JOB["corpus"]
    corpus: list[Job] = [
        ("corpus", (2, 3, 4)[place % 3], options.seed + first, min(size, options.corpus - first), 0)
        for place, first in enumerate(range(0, options.corpus, size))
    ]
    every = max(1, len(engine) // max(1, len(corpus)))
    while engine or corpus:
        yield from engine[:every]
        yield from corpus[:1]
        del engine[:every], corpus[:1]


def summary(done: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """Return the totals of all finished jobs."""
    runs: Counter[str] = Counter()
    cpu: Counter[str] = Counter()
    for each in done:
        runs[each["job"][0]] += each["runs"]
        cpu[each["job"][0]] += each["cpu_s"]
    return {
        "runs": dict(runs),
        "wrong": sum(not each["right"] for each in done),
        "cpu_s": {part: round(value) for part, value in cpu.items()},
        "setups": len({setup for each in done for setup in each["setups"]}),
        "seconds": round(seconds, 1),
    }


def main() -> int:
    """Run the jobs that have no line in ``--out`` yet, and print the totals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", type=int, default=2, help="processes")
    parser.add_argument("--corpus", type=int, default=10_000, help="clean runs of corrected programs")
    parser.add_argument("--engine", type=int, default=400, help="programs of the engine")
    parser.add_argument("--schedules", type=int, default=2, help="schedules of each program of the engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no job begins after so long")
    parser.add_argument("--out", type=Path, default=Path("build/rank-proof.jsonl"))
    options = parser.parse_args()
    began = time.monotonic()
    done = run_jobs(run_rank_job, jobs(options), processes=options.n, seconds=options.seconds, out=options.out)
    totals = summary(done, time.monotonic() - began)
    print(json.dumps(totals))
    for each in [each for each in done if not each["right"]][:3]:
        print(json.dumps(each)[:3000])
    return 1 if totals["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
