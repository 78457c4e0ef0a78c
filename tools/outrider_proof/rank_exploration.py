"""``outrider explore ranks``: programs of several ranks on simulated devices, with injected divergences.

Without options the command runs the engine on random host programs (:mod:`outrider_proof.rank_engine`). ``--inject NAME``
runs the corpus program of that name or injection. ``--inject every`` runs each of them: the sanitizer must find the
divergence and name its first different decision, and the corrected program must be silent. With a layout (``--tensor``,
``--data``) some injections go into the engine instead.

``--corrected`` runs only the corrected programs, under random schedules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cli.terminal.report import CommandReport
from outrider.device.errors import ConfigError, OutriderError
from outrider.registry import Registry

if TYPE_CHECKING:
    from outrider.device import Backend
    from outrider_sanitizer import Report as Findings
    from outrider_sanitizer.races import RankRace

RANKS = "ranks"
EVERY = "every"


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksWanted:
    """Options of ``outrider explore ranks``."""

    registry: Registry
    iterations: int
    seed: int
    ranks: int = 2
    """Number of ranks of a corpus program, and of the engine."""
    tensor: int | None = None
    """Number of tensor-parallel ranks of the engine."""
    data: int | None = None
    """Number of data-parallel ranks of the engine."""
    inject: str | None = None
    corrected: bool = False
    strategy: str = "mixed"
    schedule: int = 0
    """Index of the schedule of each engine program."""

    def layout(self) -> tuple[int, int]:
        """Return (tensor-parallel, data-parallel) sizes. Raises :class:`ConfigError` if their product is not ``ranks``."""
        tensor = self.tensor or (self.ranks // (self.data or 1) if self.data else self.ranks)
        data = self.data or self.ranks // tensor
        if tensor * data != self.ranks:
            raise ConfigError(
                f"{tensor} tensor-parallel times {data} data-parallel ranks aren't {self.ranks}; give --ranks too"
            )
        return tensor, data


DevicesOfRanks: TypeAlias = "Callable[[RankRace, int], list[Backend]]"
"""A function that returns the devices of a program's ranks."""


def simulated_hosts(registry: Registry) -> DevicesOfRanks:
    """Return a function that opens the devices of a program's ranks, once for each set of options and number of ranks."""
    made: dict[tuple[object, ...], list[Backend]] = {}

    def devices_of(race: RankRace, ranks: int) -> list[Backend]:
        key = (ranks, *sorted(race.options.items()))
        if key not in made:
            made[key] = race.devices(registry, ranks)
        return made[key]

    return devices_of


def explore_ranks(wanted: RanksWanted) -> CommandReport:
    """Run ``outrider explore ranks``; the exit code is 0 if every result is as expected."""
    if wanted.ranks < 2:
        raise ConfigError(f"--ranks {wanted.ranks}: ranks come apart where there are two at least")
    from outrider_proof.rank_engine import NAMED, TOLERATED, explore_engine

    laid_out = wanted.tensor is not None or wanted.data is not None
    if not wanted.corrected and (wanted.inject is None or (laid_out and wanted.inject in (*TOLERATED, *NAMED))):
        return explore_engine(wanted)
    devices = simulated_hosts(wanted.registry)
    chosen = [] if wanted.inject is None else _chosen(wanted.inject)
    if wanted.inject not in (None, EVERY) and len(chosen) == 1 and not wanted.corrected:
        return _explore_one(devices, chosen[0], wanted)
    began = time.monotonic()
    from outrider_sanitizer.races import RANK_RACES
    from outrider_sanitizer.report import Report

    races = chosen or list(RANK_RACES.values())
    rows = [_row(race, *(_run_wrong(devices, race, wanted) if chosen else (None, Report()))) for race in races]
    for number in range(wanted.iterations):
        race, row = races[number % len(rows)], rows[number % len(rows)]
        if not row["alarm"]:
            row["alarm"] = _alarm(devices, race, wanted, wanted.seed + number // len(rows))
            row["corrected_runs"] += 1
    right = all((row["found"] or not chosen) and not row["alarm"] for row in rows)
    data = {
        "program": RANKS,
        "ranks": wanted.ranks,
        "inject": wanted.inject,
        "seed": wanted.seed,
        "runs": sum(row["corrected_runs"] for row in rows),
        "right": right,
        "seconds": round(time.monotonic() - began, 1),
        "programs": rows,
    }
    return CommandReport(data=data, render=lambda console: _render(console, data, bool(chosen)), exit_code=0 if right else 1)


def _chosen(name: str) -> list[RankRace]:
    from outrider_sanitizer.races import RANK_RACES

    if name == EVERY:
        return list(RANK_RACES.values())
    found = [race for race in RANK_RACES.values() if name in (race.inject, race.name)]
    if not found:
        known = ", ".join(race.inject for race in RANK_RACES.values())
        raise ConfigError(f"--inject {name}: expected every, the name of a program of the corpus, or one of {known}")
    return found


def _row(race: RankRace, error: OutriderError | None, report: Findings) -> dict[str, Any]:
    """Return a program's row of the report: the error and the findings of its run with the fault.

    ``found``: the sanitizer found the fault and named its decision. The caller sets ``alarm``, the error of the corrected
    program, and ``corrected_runs``.
    """
    from outrider_sanitizer.races import decision_named

    named = decision_named(report)
    return {
        "program": race.name,
        "class": race.category,
        "inject": race.inject,
        "found": race.kinds <= {finding.kind for finding in report} and named == race.decision,
        "decision": named,
        "findings": [finding.as_dict() for finding in report],
        "error": None if error is None else {"type": type(error).__name__, "message": str(error)},
        "corrected_runs": 0,
        "alarm": None,
    }


def _ranks(race: RankRace, wanted: RanksWanted) -> int:
    return max(wanted.ranks, race.ranks)


def _run_wrong(devices: DevicesOfRanks, race: RankRace, wanted: RanksWanted) -> tuple[OutriderError | None, Findings]:
    """Run the corpus program with its fault once, in program order, and return its error and the sanitizer's report."""
    from outrider_sanitizer import watch_ranks
    from outrider_sanitizer.races.race import control_of

    backends = devices(race, _ranks(race, wanted))
    control_of(backends[0]).reset()
    with watch_ranks(backends) as report:
        try:
            race.run_race(backends, fixed=False)
        except OutriderError as error:
            return error, report
    return None, report


def _alarm(devices: DevicesOfRanks, race: RankRace, wanted: RanksWanted, seed: int) -> str | None:
    """Run the corrected program under one random schedule and return its error, or None."""
    from outrider_sanitizer import watch_ranks
    from outrider_sanitizer.races.race import control_of

    backends = devices(race, _ranks(race, wanted))

    def program(_: object) -> None:
        with watch_ranks(backends) as report:
            race.run_race(backends, fixed=True)
        report.raise_if_any()

    found = control_of(backends[0]).explore(program, strategy=wanted.strategy, iterations=1, seed=seed)
    return None if found.failure is None else f"{found.failure.error} (schedule {found.failure.schedule}, seed {seed})"


# -- for people ---------------------------------------------------------------------------------------------------------


def _explore_one(devices: DevicesOfRanks, race: RankRace, wanted: RanksWanted) -> CommandReport:
    """Run one injected divergence and report it like a failing program."""
    error, report = _run_wrong(devices, race, wanted)

    def render(console: Console) -> None:
        console.print(Text(f"{race.name} on {_ranks(race, wanted)} ranks: {race.about}", style="bold"))
        console.print(str(report), markup=False, highlight=False)
        if error is not None:
            console.print(Text(f"it ended with {type(error).__name__}", style="bold red"))
            console.print(str(error), markup=False, highlight=False)
        console.print(f"corrected: outrider explore ranks --inject {race.name} --corrected", markup=False)

    data = {"program": RANKS, "ranks": wanted.ranks, "inject": wanted.inject, **_row(race, error, report)}
    return CommandReport(data=data, render=render, exit_code=1)


def _render(console: Console, data: Mapping[str, Any], injected: bool) -> None:
    table = Table(
        "class", "program", "found", "first different decision", "corrected runs", "alarm", box=None, pad_edge=False
    )
    for row in data["programs"]:
        found = "-" if not injected else "yes" if row["found"] else "NO"
        style = "green" if (row["found"] or not injected) and not row["alarm"] else "bold red"
        alarm = (row["alarm"] or "").splitlines()[:1]
        cells = (row["class"], row["program"], found, row["decision"], str(row["corrected_runs"]), *(alarm or [""]))
        table.add_row(*(Text(cell, style=style) for cell in cells))
    console.print(table)
    console.print(f"{data['runs']} runs of corrected programs on {data['ranks']} ranks, {data['seconds']} s")
