"""The proof of the engine's fences, at length: many host programs under many schedules, and each fence left out.

    python -m outrider_proof.proof -n 16 --out build/proof

It runs on the simulated device alone, over processes, and writes `proof.json` (every run) and `proof.md` (the tables for
docs/evidence). `--seconds` bounds it; what was done by then is written. The parts:

programs   distinct host programs (batch mixes, aborts, preemptions, prefix hits, hand-overs), each under as many schedules,
           over every proposer, mode and personality, text and images. Tokens equal plain greedy decoding, acceptance
           equals the synchronous engine's, no page or row is lost; the first two schedules are watched by the sanitizer.
fences     for each fence, consumer, half, mode and proposer: left out, it's found in one watched run and named from the
           finding (*live*), or nothing was left out in any program (*unused*).
rate       how often wrong tokens, acceptance, pages or an error alone would have shown a wait that is left out.

`--through outrider_npu` (or outrider_rocm) runs the plugin's own code on the emulation of its vendor's package instead.
`--resume proof.json` takes over what an earlier run recorded, on whatever machine, and runs the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

PARTS = ("programs", "fences", "rate")
DROPPED_IN = (1, 3, 7, 0, 4, 5)
"""Host programs that a fence is left out of, until one of them shows it."""
DIFFERENT = (
    "published",
    "lengths_on_host",
    "params_free",
    "params_bound",
    "results_ready",
    "results_taken",
    "results_copied",
)
"""Fences that another personality carries out, or leaves out, otherwise; the others are tried on one."""
RATED = (("eagle", "staged"), ("eagle-tree", "staged"), ("eagle", "graphs"), ("eagle", "fused"), ("none", "staged"))


def cells():
    """(fence, half, consumer) of every cell of the table."""
    from outrider.engine.fences import FENCES

    for fence in FENCES:
        for consumer in fence.consumers:
            yield fence.name, "wait", consumer.split()[0]
        yield fence.name, "record", None


def jobs(options):
    """(part, arguments) of everything that is to be run, the longest first."""
    from outrider_proof.setups import PERSONALITIES, PROPOSERS, Setup, all_setups

    wanted = options.proposers or PROPOSERS
    likes = (options.through,) if options.through else PERSONALITIES
    setups = [setup for setup in all_setups(likes) if setup.proposer in wanted]
    if "programs" in options.parts:
        for number in range(options.first, options.programs):
            yield "programs", (setups[number % len(setups)], number, options.schedules)
    if "fences" in options.parts:
        for setup in setups:
            for fence, half, consumer in cells():
                if options.through or setup.like == "cuda" or fence in DIFFERENT:
                    yield "fences", (setup, fence, half, consumer)
    if "rate" in options.parts and not options.through:
        for proposer, mode in [each for each in RATED if each[0] in wanted]:
            for fence, half, consumer in cells():
                if half == "wait":
                    for number in range(options.rate_programs):
                        yield "rate", (Setup(proposer, mode), fence, consumer, number, options.schedules)


NAMES = {"programs": (), "fences": ("fence", "half", "consumer"), "rate": ("fence", "consumer", "program")}
"""What a record of each part says of its job, beside the setup."""


def described(part, arguments):
    """A job as its record names it."""
    setup, *rest = arguments
    if part == "programs":
        return {"setup": setup.name, "program": rest[0]}
    of_setup = {"proposer": setup.proposer, "mode": setup.mode, "like": setup.like}
    return of_setup | dict(zip(NAMES[part], rest, strict=False))


def work(part, arguments):
    """One job, in a process of its own."""
    import torch

    torch.set_num_threads(1)
    from outrider_proof import checks

    setup, *rest = arguments
    if part == "programs":
        return checks.prove(setup, *rest)
    if part == "fences":
        return described(part, arguments) | checks.drop(setup, *rest, DROPPED_IN)
    return described(part, arguments) | checks.rate(setup, *rest)


def earlier(options, todo):
    """What earlier runs recorded of these jobs, by part, and the jobs that are left."""
    by_name = {str(sorted(described(*job).items(), key=str)): job for job in todo}
    records = defaultdict(list)
    for file in options.resume:
        for part, rows in json.loads(file.read_text()).items():
            for row in rows if part in PARTS else ():
                keys = ("setup", "program") if part == "programs" else ("proposer", "mode", "like", *NAMES[part])
                name = str(sorted(((key, row.get(key)) for key in keys), key=str))
                if by_name.pop(name, None) is not None:
                    records[part].append(row)
    return records, list(by_name.values())


def run(options):
    """Records by part, and how many jobs there were."""
    todo = list(jobs(options))
    planned = Counter(part for part, _ in todo)
    records, todo = earlier(options, todo)
    end = time.monotonic() + options.seconds
    queue = iter(todo)
    running = {}
    with ProcessPoolExecutor(options.n, mp_context=get_context("spawn")) as pool:
        while True:
            while len(running) < 2 * options.n and time.monotonic() < end:
                job = next(queue, None)
                if job is None:
                    break
                running[pool.submit(work, *job)] = job
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                part, arguments = running.pop(future)
                try:
                    records[part].append(future.result())
                except Exception as error:
                    records["broken"].append(
                        {"part": part, "job": repr(arguments), "error": f"{type(error).__name__}: {error}"}
                    )
                done = sum(map(len, records.values()))
                if done % 50 == 0:
                    print(f"{done} of {sum(planned.values())} jobs", flush=True)
    return records, planned


def reason(row):
    """Why a fence isn't used in a cell."""
    fence, mode, consumer = row["fence"], row["mode"], row["consumer"]
    like = row["like"].removeprefix("outrider_")
    if row.get("why"):
        return row["why"]
    if row.get("left_out"):
        return "what it orders is ordered by its stream or by other fences"
    if fence.startswith("params") and (like != "npu" or mode != "graphs"):
        return "no graph has host parameters"
    if fence == "lengths_on_host" and like != "npu":
        return "no attention takes host integers"
    if fence == "published" and consumer == "copy" and like != "npu":
        return "lengths don't go to the host"
    if fence.startswith("results_") and like == "rocm":
        return "results are copied on forward"
    if fence == "published" and consumer == "schedule" and like == "rocm":
        return "the host waits in its place"
    if fence == "handed_over" and consumer == "host":
        return "both engines have one backend"
    if mode == "fused":
        return "the iteration is one graph on forward"
    if fence in ("accept_ready", "extend_plan_ready") and row["proposer"] in ("none", "ngram", "ngram, images"):
        return "nothing runs behind verify"
    return "not reached by these programs"


def programs_table(rows, lines):
    from outrider_proof.setups import draw

    total = Counter()
    by = defaultdict(Counter)
    failures = []
    for row in rows:
        proposer = row["setup"].rsplit(", ", 2)[0]
        for key in (
            "requests",
            "aborted",
            "preempted",
            "prefix_hits",
            "moved",
            "compared",
            "iterations",
            "verified",
            "schedules",
        ):
            total[key] += row.get(key, 0)
            by[proposer][key] += row.get(key, 0)
        by[proposer]["programs"] += 1
        by[proposer]["failures"] += len(row["failures"])
        failures += [(row["setup"], row["program"], failure) for failure in row["failures"]]
    distinct = len({(row["setup"].rsplit(", ", 2)[0], draw(row["program"])) for row in rows})
    lines += [
        f"{len(rows)} host programs ({distinct} distinct with their proposer), {total['schedules']} runs, "
        f"{len(failures)} failures. In one run of each: {total['requests']} requests, {total['aborted']} aborted, "
        f"{total['preempted']} preempted, {total['prefix_hits']} with a prefix hit, {total['moved']} hand-overs; "
        f"acceptance of {total['compared']} compared with the synchronous engine.",
        "",
        "| proposer | programs | runs | requests | preempted | hand-overs | acceptance length | failures |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for proposer, sums in sorted(by.items()):
        length = sums["verified"] / sums["iterations"] if sums["iterations"] else 0.0
        lines.append(
            f"| {proposer} | {sums['programs']} | {sums['schedules']} | {sums['requests']} | {sums['preempted']} | "
            f"{sums['moved']} | {length:.2f} | {sums['failures']} |"
        )
    lines += ["", *(f"- {setup}, program {number}, seed {f['seed']}: {f['error']}" for setup, number, f in failures[:40])]


def fences_table(rows, lines):
    from outrider_proof.setups import MODES

    order = {mode: number for number, mode in enumerate(MODES)}
    columns = sorted({(row["like"], row["mode"]) for row in rows}, key=lambda column: (column[0], order[column[1]]))
    table = defaultdict(lambda: defaultdict(list))
    for row in rows:
        table[row["fence"], row["half"], row["consumer"]][row["like"], row["mode"]].append(row)
    lines += ["| fence | left out | at | " + " | ".join(f"{like}, {mode}" for like, mode in columns) + " |"]
    lines += ["|---" * (3 + len(columns)) + "|"]
    odd, why = [], {}
    for (fence, half, consumer), by_column in sorted(table.items(), key=lambda item: str(item[0])):
        texts = []
        for column in columns:
            found = by_column.get(column, [])
            live = sum(row["result"] == "live" for row in found)
            unused = [row for row in found if row["result"] == "unused"]
            odd += [row for row in found if row["result"] not in ("live", "unused")]
            parts = [f"{live} live"] if live else []
            for text, count in Counter(reason(row) for row in unused).items():
                parts.append(f"{count} unused ({why.setdefault(text, chr(97 + len(why)))})")
            texts.append(", ".join(parts))
        lines.append(f"| {fence} | {half} | {consumer or 'all'} | {' | '.join(texts)} |")
    lines += ["", "Numbers are proposers. " + "; ".join(f"({letter}) {text}" for text, letter in why.items()) + "."]
    lines += [f"Neither live nor unused: {len(odd)}." if odd else "None is neither live nor unused."]
    lines += [
        f"- {row['fence']} ({row['half']} at {row['consumer'] or 'all'}), {row['proposer']}, {row['like']}, {row['mode']}: "
        + row["result"]
        + (f", the finding implies {', '.join(row['implied'])}" if row.get("implied") else "")
        for row in odd
    ]


def rate_table(rows, lines):
    runs, shown, found = Counter(), Counter(), Counter()
    kinds = defaultdict(Counter)
    for row in rows:
        key = row["fence"], row["consumer"], f"{row['proposer']}, {row['mode']}"
        runs[key] += row["runs"]
        shown[key] += sum(row["shown"].values())
        found[key] += bool(row["shown"])
        kinds[key].update(row["shown"])
    setups = [f"{proposer}, {mode}" for proposer, mode in RATED]
    lines += ["", "| wait left out | at | " + " | ".join(setups) + " |", "|---|---|" + "---|" * len(setups)]
    for fence, consumer in dict.fromkeys((f, c) for f, c, _ in runs):
        texts = []
        for setup in setups:
            key = (fence, consumer, setup)
            texts.append(f"{shown[key]} of {runs[key]}" if runs[key] else "not run")
        lines.append(f"| {fence} | {consumer} | {' | '.join(texts)} |")
    total = Counter()
    for counts in kinds.values():
        total.update(counts)
    lines += ["", "By what: " + ", ".join(f"{name} {count}" for name, count in total.most_common()) + "."]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--programs", type=int, default=600, help="host programs, spread over the setups")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--schedules", type=int, default=20, help="schedules of each")
    parser.add_argument("--rate-programs", type=int, default=10, help="host programs for each rate")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after this long")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--through", choices=("outrider_npu", "outrider_rocm"), help="a plugin, on its emulation")
    parser.add_argument("--resume", type=Path, nargs="+", default=[], help="proof.json of earlier runs")
    parser.add_argument("--proposers", nargs="+", help="these alone")
    parser.add_argument("--out", type=Path, default=Path("build/proof"))
    options = parser.parse_args()
    start = time.monotonic()
    records, planned = run(options)
    spent = time.monotonic() - start
    options.out.mkdir(parents=True, exist_ok=True)
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
