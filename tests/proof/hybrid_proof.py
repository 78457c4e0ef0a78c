"""Run random programs over a tiny hybrid model and compare their tokens with those of non-speculative decoding.

    PYTHONPATH=tests python -m proof.hybrid_proof -n 16 --cpu 6000 --sim 3000 --ranks 500 --seconds 170

The parts:

cpu    programs on `cpu`, every proposer and mode in turn.
sim    programs on `sim`, every proposer, mode and personality in turn, under two schedules, both watched by the sanitizer.
ranks  programs on two simulated ranks, under one random schedule, watched by the sanitizer.

A pool of processes runs the jobs. Each finished job is a line of ``--out``; a second call with the same file runs the missing
jobs, so `--seconds` can split the proof over several calls. The exit code is 1 if a program had a wrong token or a finding.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider_proof.engine_setups import HYBRID, MODES, WIDE_HYBRID
from outrider_proof.rank_engine import HYBRID_PROPOSERS
from proof.job_pool import run_jobs

if TYPE_CHECKING:
    from outrider_proof.rank_engine import RankExplorer

PROGRAMS_PER_JOB = {"cpu": 20, "sim": 4, "ranks": 2}
SCHEDULES = 2

Job = tuple[str, int, int]
"""A job of the proof: part, first program number, number of programs."""


@functools.cache
def explorer() -> RankExplorer:
    """Return the explorer of ranks of this process, with its devices and reference models."""
    from outrider.registry import Registry
    from outrider_proof.rank_engine import RankExplorer

    return RankExplorer(Registry())


def run_on_cpu(number: int) -> dict[str, Any]:
    """Run one program on `cpu`."""
    from proof.hybrid_faults import wrong_requests

    round_, place = divmod(number, len(HYBRID_PROPOSERS))
    proposer, mode = HYBRID_PROPOSERS[place], MODES[round_ % len(MODES)]
    wrong, counts = wrong_requests(proposer, number, mode)
    return {"setup": f"{proposer}, {mode}", "wrong": wrong, "counts": counts}


def run_on_sim(number: int) -> dict[str, Any]:
    """Run one program on `sim` under :data:`SCHEDULES` schedules."""
    from proof.program_checks import prove_program
    from proof.setups import all_setups

    setups = all_setups(proposers=[name + HYBRID for name in HYBRID_PROPOSERS])
    setup = setups[number % len(setups)]
    record = prove_program(setup, number, SCHEDULES)
    names = ("requests", "aborted", "preempted", "prefix_hits", "moved")
    return {"setup": setup.name, "wrong": record["failures"], "counts": {name: record.get(name, 0) for name in names}}


def run_on_ranks(number: int) -> dict[str, Any]:
    """Run one program on two simulated ranks of a tiny hybrid model, under one random schedule."""
    from outrider_proof.engine_setups import random_host_program
    from outrider_proof.rank_engine import random_rank_setup
    from outrider_proof.rank_exploration import RanksWanted
    from outrider_sim.exploration import run_once
    from outrider_sim.strategies import make_strategy

    devices = explorer()
    proposer = HYBRID_PROPOSERS[number % len(HYBRID_PROPOSERS)] + WIDE_HYBRID
    drawn = random_rank_setup(number, RanksWanted(registry=devices.registry, ranks=2, iterations=1, seed=number))
    setup = replace(drawn, proposer=proposer, expert=False)
    counts: dict[str, int] = {}

    def run(_: object) -> None:
        counts.update(devices.run_program(setup, random_host_program(number)))

    error = run_once(devices.devices(setup)[0], run, make_strategy("mixed", number, {}))
    return {"setup": str(setup), "wrong": [] if error is None else [repr(error)[:2000]], "counts": counts}


def run_hybrid_job(part: str, first: int, count: int) -> dict[str, Any]:
    """Run one job in a pool process and return its record."""
    import torch

    torch.set_num_threads(1)
    began = time.process_time()
    run = {"cpu": run_on_cpu, "sim": run_on_sim, "ranks": run_on_ranks}[part]
    results = [{"number": number, **run(number)} for number in range(first, first + count)]
    counts: Counter[str] = Counter()
    for each in results:
        counts.update(each["counts"])
    return {
        "job": [part, first, count],
        "counts": dict(counts),
        "setups": sorted({each["setup"] for each in results}),
        "wrong": [each for each in results if each["wrong"]],
        "cpu_s": round(time.process_time() - began, 2),
    }


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Yield every job of the proof, the parts in turn."""
    parts = []
    for part, count in (("cpu", options.cpu), ("sim", options.sim), ("ranks", options.ranks)):
        size = PROGRAMS_PER_JOB[part]
        parts.append([(part, options.seed + n, min(size, count - n)) for n in range(0, count, size)])
    for row in itertools.zip_longest(*parts):
        yield from (job for job in row if job is not None)


def summary(done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the totals of all finished jobs by part."""
    totals: dict[str, Any] = {}
    for part in PROGRAMS_PER_JOB:
        records = [record for record in done if record["job"][0] == part]
        counts: Counter[str] = Counter()
        for record in records:
            counts.update(record["counts"])
        totals[part] = {
            "programs": sum(record["job"][2] for record in records),
            "wrong": sum(len(record["wrong"]) for record in records),
            "setups": len({setup for record in records for setup in record["setups"]}),
            "cpu_s": round(sum(record["cpu_s"] for record in records)),
            "counts": dict(counts),
        }
    return totals


def main() -> int:
    """Run the jobs that have no line in ``--out`` yet, and print the totals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", type=int, default=2, help="processes")
    parser.add_argument("--cpu", type=int, default=6000, help="programs on cpu")
    parser.add_argument("--sim", type=int, default=3000, help="programs on sim")
    parser.add_argument("--ranks", type=int, default=1000, help="programs on two simulated ranks")
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no job begins after so long")
    parser.add_argument("--out", type=Path, default=Path("build/hybrid-proof.jsonl"))
    options = parser.parse_args()
    done = run_jobs(run_hybrid_job, jobs(options), processes=options.n, seconds=options.seconds, out=options.out)
    totals = summary(done)
    print(json.dumps(totals))
    for record in [record for record in done if record["wrong"]][:3]:
        print(json.dumps(record["wrong"])[:3000])
    return 1 if any(part["wrong"] for part in totals.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
