"""``outrider explore corpus``: run each corrected program of the corpus under random schedules, watched by the sanitizer.

A false alarm, a wrong value or a hang is a failure of the sanitizer, of the device or of the program.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cli.terminal.report import CommandReport
from outrider.device.errors import CapabilityError
from outrider.registry import Registry

if TYPE_CHECKING:
    from outrider.device import Backend, ControllableDevice
    from outrider_sanitizer.races import Race

CORPUS = "corpus"

_DEVICES = ("sim", "sim:like=npu")
"""Simulated devices that together have every capability that a program needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusWanted:
    """Options of ``outrider explore corpus``: number and strategy of the schedules, and the device."""

    registry: Registry
    iterations: int
    seed: int
    strategy: str = "mixed"
    backend: str | None = None
    """Device to use instead of the simulated ones; programs that need a capability that it lacks are skipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusResult:
    """The result of one corrected program."""

    program: str
    runs: int
    distinct: int
    """Number of different schedules among the runs."""
    alarm: str
    """Error and schedule of the first failure; empty if every run was silent."""
    seconds: float


def explore_corpus(wanted: CorpusWanted) -> CommandReport:
    """Run the corrected programs and return their report; exit code 0 if every program was silent."""
    began = time.monotonic()
    rows = list(_rows(wanted))
    alarms = sum(bool(row.alarm) for row in rows)
    data = {
        "program": CORPUS,
        "strategy": wanted.strategy,
        "seed": wanted.seed,
        "runs": sum(row.runs for row in rows),
        "distinct": sum(row.distinct for row in rows),
        "alarms": alarms,
        "seconds": round(time.monotonic() - began, 1),
        "programs": [asdict(row) for row in rows],
    }
    return CommandReport(data=data, render=lambda console: _render(console, data), exit_code=1 if alarms else 0)


def _rows(wanted: CorpusWanted) -> Iterator[CorpusResult]:
    from outrider_sanitizer.races import RACES

    waiting = dict(RACES)
    # Open one device at a time: a tensor created outside every stream scope belongs to the device opened last.
    for spec in (wanted.backend,) if wanted.backend else _DEVICES:
        device = wanted.registry.create(spec)
        control = device.control
        if control is None:
            raise CapabilityError(f"{device.label} decides its schedules itself; explore needs one such as 'sim'")
        for race in list(waiting.values()):
            if not race.needs or getattr(device.capabilities, race.needs):
                del waiting[race.name]
                yield _row(race, control, wanted)


def _row(race: Race, control: ControllableDevice, wanted: CorpusWanted) -> CorpusResult:
    from outrider_sanitizer import watch

    schedules: set[str] = set()

    def program(device: Backend) -> None:
        with watch(device) as report:
            race.right(device)
        device.synchronize()
        schedules.add(control.schedule())
        report.raise_if_any()

    began = time.monotonic()
    found = control.explore(program, strategy=wanted.strategy, iterations=wanted.iterations, seed=wanted.seed)
    failure = found.failure
    alarm = "" if failure is None else f"{type(failure.error).__name__}: {failure.error}\nschedule {failure.schedule}"
    seconds = round(time.monotonic() - began, 1)
    return CorpusResult(program=race.name, runs=found.runs, distinct=len(schedules), alarm=alarm, seconds=seconds)


def _render(console: Console, data: Mapping[str, Any]) -> None:
    table = Table("program", "schedules", "distinct", "seconds", box=None, pad_edge=False)
    for row in data["programs"]:
        style = "bold red" if row["alarm"] else "green"
        table.add_row(Text(row["program"], style=style), str(row["runs"]), str(row["distinct"]), f"{row['seconds']:.1f}")
    console.print(table)
    for row in data["programs"]:
        if row["alarm"]:
            console.print(Text(f"{row['program']}: {row['alarm']}", style="bold red"))
    console.print(
        f"{len(data['programs'])} programs, {data['runs']} schedules ({data['distinct']} distinct), {data['alarms']} alarms, "
        f"{data['seconds']} s"
    )
