"""Results of several engines: medians of their runs, and the ratios between engines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from outrider_bench.peers.work import PeerWork

OURS = "outrider"
_FIGURES = (
    *("iteration_ms", "first_token_ms", "seconds", "tokens_per_s", "prompt_tokens_per_s"),
    *("acceptance_length", "drafted", "limit_ms"),
)


@dataclass(kw_only=True, slots=True)
class EngineRuns:
    """The runs of one engine with one proposer, by phase and case, and the reasons of failures."""

    engine: str
    speculate: str
    status: str = "not measured"
    about: Mapping[str, Any] = field(default_factory=dict)
    runs: dict[tuple[str, Any], list[dict[str, Any]]] = field(default_factory=dict)
    failures: dict[tuple[str, Any], str] = field(default_factory=dict)

    @property
    def has_result(self) -> bool:
        """True if the engine has figures, or a reason for having none."""
        return bool(self.runs or self.failures) or self.status not in ("not measured", "measured")

    def row(self, phase: str, case: Any) -> dict[str, Any] | None:
        """Return the medians of the runs' figures, and the runs; None without runs."""
        runs = self.runs.get((phase, case))
        if not runs:
            return None
        return {key: statistics.median(run[key] for run in runs) for key in _FIGURES if key in runs[0]} | {"runs": runs}


def compare_engines(found: Sequence[EngineRuns], work: PeerWork) -> dict[str, object]:
    """Return the results of the engines, and this engine's ratios to each of the others; above 1 this engine is faster."""
    engines = [_engine(each, work) for each in found]
    ours = {each["speculate"]: each for each in engines if each["engine"] == OURS}
    ratios = [
        ratio
        for each in engines
        if each["engine"] != OURS and each["speculate"] in ours
        for ratio in _ratios(ours[each["speculate"]], each, work.rates)
    ]
    return {"engines": engines, "ratios": ratios}


def _engine(each: EngineRuns, work: PeerWork) -> dict[str, Any]:
    status = each.status
    if status == "measured" and each.failures:
        reasons = "; ".join(dict.fromkeys(each.failures.values()))
        status = f"measured in part: {reasons}" if each.runs else f"failed: {reasons}"
    latency = each.runs.get(("mixed", "latency"))
    return {
        "engine": each.engine,
        "speculate": each.speculate,
        "status": status,
        **{name: each.about.get(name) for name in ("version", "settings", "versions", "start_s", "tuned_s")},
        **{results: _rows(each, phase, column, work) for phase, (results, column, *_) in _TABLES.items()},
        "mixed": each.row("mixed", "seconds"),
        "latency": latency[0] if latency else None,
    }


def _rows(each: EngineRuns, phase: str, column: str, work: PeerWork) -> list[dict[str, Any]]:
    """Return the results of the measured cases of a phase, each with its case as ``column``."""
    found = []
    for case in work.cases(phase):
        row = each.row(phase, case)
        if row is None:
            continue
        if phase == "decode":
            row |= {"speculate": each.speculate}
            row |= {"ratio_to_limit": row["iteration_ms"] / row["limit_ms"]} if "limit_ms" in row else {}
        elif phase == "context":
            row["batch"] = 1
        found.append({column: "{} x {}".format(*case) if phase == "batch-prefill" else case, **row})
    return found


def expected_tokens(drafted: float, rates: Sequence[float]) -> float:
    """Return the mean number of tokens of an iteration with ``drafted`` draft tokens.

    ``rates`` are the chances of each draft token. A fractional number of draft tokens is a mixture of two whole numbers.
    """
    whole = int(drafted)
    return 1.0 + sum(rates[:whole]) + ((drafted - whole) * rates[whole] if whole < len(rates) else 0.0)


def _ratios(ours: Mapping[str, Any], theirs: Mapping[str, Any], rates: Sequence[float]) -> list[dict[str, Any]]:
    """Return the ratios of tokens a second, ours over theirs; for first tokens, their time over ours.

    ``at_equal_acceptance`` is the ratio of tokens a second if the drafted tokens yield their expected number of tokens.
    """

    def rate(row: Mapping[str, Any]) -> float:
        return expected_tokens(row.get("drafted", 0.0), rates) / float(row["iteration_ms"])

    base = {"engine": theirs["engine"], "speculate": theirs["speculate"]}
    found: list[dict[str, Any]] = []
    for phase, (rows, name, _, figures) in _TABLES.items():
        by_case = {row[name]: row for row in theirs[rows]}
        for row in ours[rows]:
            other = by_case.get(row[name])
            if other is None:
                continue
            if "tokens_per_s" in figures:
                equal = rate(row) / rate(other)
                ratios = {"ratio": row["tokens_per_s"] / other["tokens_per_s"], "at_equal_acceptance": equal}
            else:
                time = next(iter(figures))
                ratios = {"ratio": other[time] / row[time]}
            found.append(base | {"phase": phase, "case": row[name], **ratios})
    if ours["mixed"] and theirs["mixed"]:
        ratio = ours["mixed"]["tokens_per_s"] / theirs["mixed"]["tokens_per_s"]
        found.append(base | {"phase": "mixed", "case": None, "ratio": ratio})
    return found


def plot_points(found: Sequence[EngineRuns], phase: str) -> dict[str, list[tuple[float, float]]]:
    """Return the points of a plot for each engine and proposer.

    The points are milliseconds of an iteration over batch sizes (``decode``) or prompt lengths (``context``), or milliseconds
    to the first token over prompt lengths (``prefill``).
    """
    timed = "first_token_ms" if phase == "prefill" else "iteration_ms"
    return {
        f"{each.engine}, {'non-speculative' if each.speculate == 'none' else each.speculate}": [
            (case, statistics.median(run[timed] for run in runs))
            for (measured, case), runs in each.runs.items()
            if measured == phase
        ]
        for each in found
        if any(measured == phase for measured, _ in each.runs)
    }


def render_engines(console: Console, data: Mapping[str, Any]) -> None:
    """Print a table of each phase's results of all engines."""
    console.print(
        f"random weights of {data['shape']} on {data['backend']} ({data['device']}), {data['dtype']}, "
        f"{data['prompt_tokens']} prompt and {data['new_tokens']} new tokens, {data['draft_tokens']} draft tokens, "
        f"median of {data['repeat']}"
    )
    if data["quantized"] is not None:
        console.print(f"quantised: {data['quantized']}")
    console.print(
        f"ACCEPTANCE IS {str(data['acceptance']).upper()}: tokens/s are those of this acceptance, the text is nonsense\n"
    )
    engines: list[dict[str, Any]] = data["engines"]
    for phase, columns in _TABLES.items():
        if phase in data["phases"]:
            _render_phase(console, engines, *columns)
    if "mixed" in data["phases"]:
        _render_mixed(console, engines, data["mixed"])
    if data["ratios"]:
        table = Table("against", "speculate", "phase", "case", "ratio", "at equal acceptance", box=None, pad_edge=False)
        for each in data["ratios"]:
            equal = each.get("at_equal_acceptance")
            case = "" if each["case"] is None else str(each["case"])
            shown = (f"{each['ratio']:.3f}", "" if equal is None else f"{equal:.3f}")
            table.add_row(each["engine"], each["speculate"], each["phase"], case, *shown)
        console.print("\nhow many times as fast this engine is:")
        console.print(table)
    for each in engines:
        if each["status"].startswith(("failed", "measured in part")):
            console.print(f"{each['engine']}, {each['speculate']}: {each['status']}")
    for engine, settings in {(each["engine"], each["settings"]): None for each in engines if each["settings"]}:
        console.print(f"{engine}: {settings}")
    versions = {each["engine"]: each["versions"] for each in engines if each["versions"]}
    for engine, installed in versions.items():
        console.print(f"{engine} ran with " + ", ".join(f"{name} {number}" for name, number in installed.items()))
    for each in engines:
        if each["start_s"] is not None:
            tuned = f", after {each['tuned_s']:.1f} s of tuning" if each["tuned_s"] else ""
            console.print(f"{each['engine']}, {each['speculate']}: started in {each['start_s']:.1f} s{tuned}")


def _name(each: Mapping[str, Any]) -> str:
    return str(each["engine"]) if each["version"] is None else f"{each['engine']} {each['version']}"


_ITERATION = {"iteration_ms": "iteration, ms", "tokens_per_s": "tokens/s"}
_TABLES: Mapping[str, tuple[str, str, str, Mapping[str, str]]] = {
    "decode": ("results", "batch", "batch", {**_ITERATION, "acceptance_length": "accepted", "drafted": "drafted"}),
    "context": ("context", "prompt_tokens", "context", _ITERATION),
    "prefill": ("prefill", "prompt_tokens", "prompt", {"first_token_ms": "first token, ms"}),
    "batch-prefill": ("batch_prefill", "prompts", "prompts", {"seconds": "s", "prompt_tokens_per_s": "prompt tokens/s"}),
}
"""For each phase the key of its results, the key and heading of a case, and the headings of its figures by key.

Without tokens a second among the figures, the first one is the time by which engines are compared.
"""


def _render_phase(
    console: Console,
    engines: Sequence[Mapping[str, Any]],
    results: str,
    case: str,
    heading: str,
    figures: Mapping[str, str],
) -> None:
    table = Table("engine", "speculate", heading, *figures.values(), box=None, pad_edge=False)
    for each in engines:
        if results == "results" and not each[results]:
            table.add_row(_name(each), each["speculate"], "", each["status"].split(":")[0])
        for row in each[results]:
            shown = (f"{row[key]:.3f}" if key in row else "" for key in figures)
            table.add_row(_name(each), each["speculate"], str(row[case]), *shown)
    console.print(table)


def _render_mixed(console: Console, engines: Sequence[Mapping[str, Any]], load: Mapping[str, Any]) -> None:
    console.print(
        f"\nmixed: {load['requests']} requests, {load['prompt_tokens']} tokens in, {load['output_tokens']} out, "
        f"{load['distribution']}, seed {load['seed']}"
    )
    headings = ("engine", "speculate", "s", "tokens/s", "first token p50/p95/p99, ms", "between tokens p50/p95/p99/max, ms")
    table = Table(*headings, box=None, pad_edge=False)
    for each in engines:
        row, seen = each["mixed"], each["latency"]
        if row is not None:
            firsts = "n/a" if seen is None else _format_quantiles(seen["first_token_ms"])
            gaps = "n/a" if seen is None else _format_quantiles(seen["between_tokens_ms"], largest=True)
            table.add_row(_name(each), each["speculate"], f"{row['seconds']:.2f}", f"{row['tokens_per_s']:.0f}", firsts, gaps)
    console.print(table)


def _format_quantiles(found: Mapping[str, float] | None, *, largest: bool = False) -> str:
    if found is None:
        return "n/a"
    return " / ".join(f"{found[key]:.1f}" for key in ("p50", "p95", "p99", *(("max",) if largest else ())))
