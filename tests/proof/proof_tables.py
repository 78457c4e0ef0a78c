"""Markdown tables of a proof, from the records of its runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]
"""The record of a job in proof.json."""

RATED = (("eagle", "staged"), ("eagle-tree", "staged"), ("eagle", "graphs"), ("eagle", "fused"), ("none", "staged"))
"""(proposer, mode) of the setups whose rates are measured."""

_COUNTS = (
    "requests",
    "aborted",
    "preempted",
    "prefix_hits",
    "moved",
    "compared",
    "iterations",
    "verified",
    "schedules",
)


def unused_reason(row: Record) -> str:
    """Return why the setup of a row does not use the fence."""
    fence, mode, consumer = row["fence"], row["mode"], row["consumer"]
    like = row["like"].removeprefix("outrider_")
    if row.get("why"):
        return str(row["why"])
    if row.get("left_out"):
        return "its stream or other fences give the same order"
    if fence.startswith("params") and (like != "npu" or mode != "graphs"):
        return "no graph has host parameters"
    if fence == "lengths_on_host" and like != "npu":
        return "no attention takes host integers"
    if fence == "published" and consumer == "copy" and like != "npu":
        return "lengths don't go to the host"
    if fence.startswith("results_") and like == "rocm":
        return "results are copied on forward"
    if fence == "published" and consumer == "schedule" and like == "rocm":
        return "the host waits instead"
    if fence.startswith("pages_"):
        return "no request moves by the network card, or none at such a moment"
    if fence == "handed_over" and consumer == "host":
        return "both engines have one backend"
    if mode == "fused":
        return "the iteration is one graph on forward"
    if fence in ("accept_ready", "extend_plan_ready") and row["proposer"] in ("none", "ngram", "ngram, images"):
        return "no stage runs after verify"
    return "not reached by these programs"


def programs_table(rows: Sequence[Record], lines: list[str]) -> None:
    """Append the totals of all host programs, one row per proposer, and the failures."""
    from outrider_proof.engine_setups import random_host_program

    total: Counter[str] = Counter()
    by: defaultdict[str, Counter[str]] = defaultdict(Counter)
    failures: list[tuple[str, int, Record]] = []
    for row in rows:
        proposer = row["setup"].rsplit(", ", 2)[0]
        for key in _COUNTS:
            total[key] += row.get(key, 0)
            by[proposer][key] += row.get(key, 0)
        by[proposer]["programs"] += 1
        by[proposer]["failures"] += len(row["failures"])
        failures += [(row["setup"], row["program"], failure) for failure in row["failures"]]
    distinct = len({(row["setup"].rsplit(", ", 2)[0], random_host_program(row["program"])) for row in rows})
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


def fences_table(rows: Sequence[Record], lines: list[str]) -> None:
    """Append one row per dropped half of a fence, with one column per device and mode."""
    from outrider_proof.engine_setups import MODES

    order = {mode: number for number, mode in enumerate(MODES)}
    columns = sorted({(row["like"], row["mode"]) for row in rows}, key=lambda column: (column[0], order[column[1]]))
    table: defaultdict[tuple[str, str, str | None], defaultdict[tuple[str, str], list[Record]]]
    table = defaultdict(lambda: defaultdict(list))
    for row in rows:
        table[row["fence"], row["half"], row["consumer"]][row["like"], row["mode"]].append(row)
    lines += ["| fence | left out | at | " + " | ".join(f"{like}, {mode}" for like, mode in columns) + " |"]
    lines += ["|---" * (3 + len(columns)) + "|"]
    odd: list[Record] = []
    why: dict[str, str] = {}
    for (fence, half, consumer), by_column in sorted(table.items(), key=lambda item: str(item[0])):
        texts = []
        for column in columns:
            found = by_column.get(column, [])
            live = sum(row["result"] == "live" for row in found)
            unused = [row for row in found if row["result"] == "unused"]
            odd += [row for row in found if row["result"] not in ("live", "unused")]
            parts = [f"{live} live"] if live else []
            for text, count in Counter(unused_reason(row) for row in unused).items():
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


def rate_table(rows: Sequence[Record], lines: list[str]) -> None:
    """Append the number of runs without a wait that failed, and their errors."""
    runs: Counter[tuple[str, str, str]] = Counter()
    shown: Counter[tuple[str, str, str]] = Counter()
    kinds: Counter[str] = Counter()
    for row in rows:
        key = row["fence"], row["consumer"], f"{row['proposer']}, {row['mode']}"
        runs[key] += row["runs"]
        shown[key] += sum(row["shown"].values())
        kinds.update(row["shown"])
    setups = [f"{proposer}, {mode}" for proposer, mode in RATED]
    lines += ["", "| wait left out | at | " + " | ".join(setups) + " |", "|---|---|" + "---|" * len(setups)]
    for fence, consumer in dict.fromkeys((f, c) for f, c, _ in runs):
        texts = []
        for setup in setups:
            key = (fence, consumer, setup)
            texts.append(f"{shown[key]} of {runs[key]}" if runs[key] else "not run")
        lines.append(f"| {fence} | {consumer} | {' | '.join(texts)} |")
    lines += ["", "Errors: " + ", ".join(f"{name} {count}" for name, count in kinds.most_common()) + "."]
