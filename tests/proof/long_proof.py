"""The whole proof of the engine's fences: many host programs under many schedules, and each fence left out.

    python -m proof.long_proof -n 16 --out build/proof     # with `tests` in the import path

It runs on the simulated device alone, over processes, and writes `proof.json` (every run) and `proof.md` (the tables for
docs/evidence). `--seconds` bounds it; what was done by then is written. The parts:

programs   distinct host programs (batch mixes, aborts, preemptions, prefix hits, hand-overs), each under as many schedules,
           over every proposer, mode and personality, text and images, hybrids. Tokens equal plain greedy decoding, acceptance
           equals the synchronous engine's, no page or row is lost; the first two schedules are watched by the sanitizer.
fences     for each fence, consumer, half, mode and proposer: left out, it's found in one watched run and named from the
           finding (*live*), or nothing was left out in any program (*unused*).
rate       how often wrong tokens, acceptance, pages or an error alone would have shown a wait that is left out.

`--through outrider_npu --emulations DIR` (or outrider_rocm) runs the plugin's own code instead, on the emulation of its
vendor's package in that directory.
Each finished job is a line of `jobs.jsonl` in `--out`; a run with that file, from any machine, runs the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proof.job_pool import Job, run_jobs
from proof.proof_tables import RATED, Record, fences_table, programs_table, rate_table

PARTS = ("programs", "fences", "rate")
FENCE_PROGRAM_NUMBERS = (1, 3, 7, 0, 4, 5)
"""Numbers of the host programs that run without a fence, in this order, until one has a finding."""
PERSONALITY_DEPENDENT_FENCES = (
    "published",
    "lengths_on_host",
    "params_free",
    "params_bound",
    "results_ready",
    "results_copied",
)
"""Fences whose mechanism differs between personalities; other fences are dropped on one personality only."""


def fence_cells() -> Iterator[tuple[str, str, str | None]]:
    """Yield (fence, half, consumer) for every row of the table of fences."""
    from outrider.engine.fences import FENCES

    for fence in FENCES:
        for consumer in fence.consumers:
            yield fence.name, "wait", consumer.split()[0]
        yield fence.name, "record", None


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Yield the arguments of :func:`run_job` for every job, the longest jobs first: the part, then the fields of a setup."""
    from outrider_proof.engine_setups import HYBRID
    from outrider_proof.rank_engine import HYBRID_PROPOSERS
    from proof.setups import PERSONALITIES, PROPOSERS, all_setups

    hybrids = tuple(name + HYBRID for name in HYBRID_PROPOSERS)
    wanted = options.proposers or (*PROPOSERS, *hybrids)
    likes, place = (options.through,) if options.through else PERSONALITIES, options.emulations and str(options.emulations)
    drawn = all_setups(likes, options.emulations, proposers=wanted)
    setups = [(setup.proposer, setup.mode, setup.like, place) for setup in drawn]
    if "programs" in options.parts:
        for number in range(options.first, options.programs):
            yield "programs", *setups[number % len(setups)], number, options.schedules
    if "fences" in options.parts:
        for setup in (setup for setup in setups if setup[0] not in hybrids):
            for fence, half, consumer in fence_cells():
                if options.through or setup[2] == "cuda" or fence in PERSONALITY_DEPENDENT_FENCES:
                    yield "fences", *setup, fence, half, consumer
    if "rate" in options.parts and not options.through:
        for proposer, mode in [each for each in RATED if each[0] in wanted]:
            for fence, half, consumer in fence_cells():
                if half == "wait":
                    for number in range(options.rate_programs):
                        yield "rate", proposer, mode, "cuda", None, fence, consumer, number, options.schedules


JOB_FIELDS = {"fences": ("fence", "half", "consumer"), "rate": ("fence", "consumer", "program")}
"""Arguments of a job that its record names, by part, in addition to the setup."""


def run_job(part: str, proposer: str, mode: str, like: str, emulations: str | None, *rest: Any) -> Record:
    """Run one job in a pool process and return its record. An error outside a check is a record of the part "broken"."""
    import torch

    torch.set_num_threads(1)
    from proof import program_checks
    from proof.setups import EngineSetup

    job = {"job": [part, proposer, mode, like, emulations, *rest], "part": part}
    try:
        setup = EngineSetup(proposer, mode, like, None if emulations is None else Path(emulations))
        if part == "programs":
            return job | program_checks.prove_program(setup, *rest)
        fields = {"proposer": proposer, "mode": mode, "like": like} | dict(zip(JOB_FIELDS[part], rest, strict=False))
        if part == "fences":
            return job | fields | program_checks.drop_fence(setup, *rest, FENCE_PROGRAM_NUMBERS)
        return job | fields | program_checks.measure_rate(setup, *rest)
    except Exception as error:
        return job | {"part": "broken", "error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Parse the options, run, write proof.json and proof.md. Exit code 1 where a host program failed or a job broke."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes of the pool, before torch is imported
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--programs", type=int, default=600, help="host programs, spread over the setups")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--schedules", type=int, default=20, help="schedules of each")
    parser.add_argument("--rate-programs", type=int, default=10, help="host programs for each rate")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after this long")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--through", choices=("outrider_npu", "outrider_rocm"), help="a plugin, on its emulation")
    parser.add_argument("--emulations", type=Path, metavar="DIR", help="--through: where the emulations of packages are")
    parser.add_argument("--proposers", nargs="+", help="these alone")
    parser.add_argument("--out", type=Path, default=Path("build/proof"))
    options = parser.parse_args()
    if options.through and not options.emulations:
        parser.error("--through needs --emulations DIR, the directory with the emulation of the vendor's package")
    if options.emulations:
        options.emulations = options.emulations.resolve()
    start = time.monotonic()
    todo = list(jobs(options))
    planned = Counter(part for part, *_ in todo)
    out = options.out / "jobs.jsonl"
    records: defaultdict[str, list[Record]] = defaultdict(list)
    for record in run_jobs(run_job, todo, processes=options.n, seconds=options.seconds, out=out):
        records[record["part"]].append(record)
    spent = time.monotonic() - start
    (options.out / "proof.json").write_text(json.dumps(records, indent=1))
    lines = [f"{spent:.0f} s on {options.n} processes, {options.schedules} schedules a program."]
    for part, table in (("programs", programs_table), ("fences", fences_table), ("rate", rate_table)):
        if records[part]:
            missing = planned[part] - len(records[part])
            lines += [
                "",
                f"## {part.capitalize()}",
                "",
                *([f"{missing} of {planned[part]} jobs not run.", ""] if missing else []),
            ]
            table(records[part], lines)
    lines += [f"- broken: {each}" for each in records["broken"]]
    (options.out / "proof.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    failed = any(row["failures"] for row in records["programs"]) or records["broken"]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
