"""``outrider explore decode`` and ``corpus``: run random host programs of the engine, or the corpus of races, under random
schedules or in program order.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cli.terminal.report import CommandReport
from outrider.device.errors import CapabilityError, ConfigError
from outrider.registry import Registry
from outrider_proof.decode_program import (
    MOVING,
    Arrival,
    HostProgram,
    Serving,
    WrongTokens,
    check_tokens,
)
from outrider_proof.fence_log import FenceLog, Half
from outrider_proof.monitors import OverlapMonitor
from outrider_proof.rank_exploration import EVERY
from outrider_sanitizer.scripts import SIMULATED

if TYPE_CHECKING:
    from outrider.device import Backend, ControllableDevice, Fence
    from outrider.engine.engine import Engine
    from outrider_sanitizer import Finding
    from outrider_sanitizer import Report as Findings
    from outrider_sanitizer.races import Race


_FENCES_OF_MOVES = frozenset({"handed_over", "pages_ready", "pages_read", "pages_free", "pages_written"})
_FENCES_OF_GUIDES = frozenset({"draft_on_host", "masks_ready"})
PARAMETER_FENCES = frozenset({"lengths_on_host", "params_free", "params_bound"})
"""Names of fences that only a device with host lengths in its graphs has."""


class DecodeExplorer:
    """A runner of host programs with one model on one backend. It compares their tokens with the reference.

    The explorer loads the weights once, outside the schedule; each run builds a new engine. ``images`` selects the tiny
    vision-language model instead of the bundled model.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        speculate: str,
        draft_topk: int = 1,
        mode: str = "staged",
        graphs: bool = False,
        drop: str | None = None,
        half: str = "wait",
        consumer: str | None = None,
        images: bool = False,
    ) -> None:
        from outrider.engine.fences import FENCES
        from outrider_proof import engine_setups as setups

        if speculate not in ("eagle", "ngram", "none"):
            raise ConfigError(f"--speculate is {speculate!r}; decode explores eagle, ngram and none")
        if drop is not None and drop not in {fence.name for fence in FENCES}:
            raise ConfigError(f"there is no fence {drop!r}; `outrider fences` lists them")
        if half not in get_args(Half):
            raise ConfigError(f"--drop is {half!r}; expected wait or record")
        self.backend = backend
        self._topk, self._drop, self._half, self._consumer = draft_topk, drop, cast("Half", half), consumer
        self._mode = "graphs" if graphs and mode == "staged" else mode
        self._models = setups.Models(f"{speculate}{setups.IMAGES if images else setups.BUNDLED}", backend)
        self.findings: Findings | None = None
        self.log: FenceLog | None = None
        self.monitor = OverlapMonitor()
        self.checks_overlap = True
        """True if lost overlap, lost batching or a row freed too early fails a run."""

    def program(self, seed: int) -> HostProgram:
        """Return host program number ``seed``."""
        from outrider_proof import engine_setups as setups

        return HostProgram.draw(seed, setups.TEXT if self._models.vision is not None else len(setups.bundled_text()))

    @property
    def exercising_program(self) -> HostProgram:
        """A host program that exercises the dropped fence, if the device and the mode have the fence."""
        if self._drop in _FENCES_OF_MOVES:
            return MOVING
        return self.program(3 if self._drop in _FENCES_OF_GUIDES else 1)

    def expected(self, arrival: Arrival) -> tuple[int, ...]:
        """Return the non-speculative greedy tokens of a request on the host."""
        from outrider_proof.engine_setups import reference_tokens

        return reference_tokens(self._models.proposer, arrival)

    def run_program(self, program: HostProgram, backend: Backend) -> None:
        """Run a host program once on the engine, watched by the sanitizer and the overlap monitor.

        Raises :class:`RaceError` of the sanitizer, :class:`WrongTokens`, the faults of :class:`OverlapMonitor`, or the
        engine's error.
        """
        from outrider_sanitizer import watching

        expected = [self.expected(arrival) for arrival in program.arrivals]
        # The engine orders accesses to whole tensors of rows, not to single rows.
        with watching(backend, rows_apart=False) as sanitizer:
            self.findings = sanitizer.report
            self.log = FenceLog(sanitizer.position, drop=self._drop, half=self._half, consumer=self._consumer)
            self.monitor = OverlapMonitor()
            stop = self.monitor.observe(backend)
            problem: Exception | None = None
            try:
                self._serve(program, expected)
                backend.synchronize()
            except Exception as error:
                problem = error
            finally:
                stop()
        # A race explains wrong tokens, so the race is the error.
        self.findings.raise_if_any()
        if self.checks_overlap:
            self.monitor.raise_if_any(problem)
        if problem is not None:
            raise problem

    def implied(self) -> tuple[str, ...]:
        """Return the fences that the findings of the last run imply."""
        if self.findings is None or self.log is None:
            return ()
        return implied_by(self.findings.findings, self.log)

    def _engine(self, program: HostProgram) -> Engine:
        engine = self._models.engine(program, mode=self._mode, wrap=self.wrap, topk=self._topk)
        self.monitor.watch(engine, overlap=True)
        return engine

    def wrap(self, fence: Fence) -> Fence:
        """Wrap a fence for the log and the overlap monitor; the engine's ``wrap_fence``."""
        assert self.log is not None
        return self.monitor.wrap(self.log.wrap(fence))

    def _serve(self, program: HostProgram, expected: list[tuple[int, ...]]) -> None:
        """Serve all requests of the program and compare their tokens. Raises :class:`WrongTokens`."""
        from outrider_proof.engine_setups import prompt_and_media

        moves = any(arrival.moves for arrival in program.arrivals)
        engines = [self._engine(program) for _ in range(2 if moves else 1)]
        free = [(engine.free_pages, engine.free_rows) for engine in engines]
        serving = Serving(engines, program, partial(prompt_and_media, self._models.proposer))
        serving.step_until_idle()
        check_tokens(serving.tokens, serving.ended, expected)
        for engine, (pages, rows) in zip(engines, free, strict=True):
            if (engine.free_pages, engine.free_rows) != (pages, rows):
                raise WrongTokens(
                    f"{pages - engine.free_pages} pages and {rows - engine.free_rows} rows weren't given back at the end"
                )


def implied_by(findings: Iterable[Finding], log: FenceLog) -> tuple[str, ...]:
    """Return the fences that ``findings`` imply, by the positions of the fences in ``log``."""
    names: dict[str, None] = {}
    for finding in findings:
        if finding.first is not None:
            first, second = ("host" if site.host else site.actor for site in (finding.first, finding.second))
            names.update(dict.fromkeys(log.implied((first, finding.first.last), (second, finding.second.position))))
    return tuple(names)


DECODE = "decode"
ITERATIONS = 100
"""Default number of schedules that an exploration tries."""
_PROGRAM_ORDER = "program"
_WITH_PARAMETERS = "sim:like=npu"
"""Spec of a simulated device with host lengths in its graphs."""
_NOT_EXERCISED = 2
"""Exit code of a run that didn't exercise the fence that was left out, so that it says nothing about the fence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeExploration:
    """Options of the command, and the device."""

    registry: Registry
    backend: str | None
    """Spec of the device. None: *sim*, or for a dropped fence that it lacks, a simulated device that has the fence."""
    iterations: int | None
    """Number of host programs. None: 100, or 4 for each fence of *every*."""
    seed: int
    strategy: str | None = None
    """Strategy of the schedules. None: *mixed* on a controllable device, else *program*. The sanitizer misses a dropped fence
    in any order, so that *program* is the default there, too."""
    drop_fence: str | None = None
    """Name of the fence to leave out, or ``every`` for each fence in turn."""
    drop: str = "wait"
    """The half of the fence to leave out: ``wait`` or ``record``."""
    setup: Mapping[str, Any]
    """Further arguments of :class:`DecodeExplorer`, which are options of the same names."""
    progress: Callable[[int, int], None] = lambda done, total: None
    """The function that is called with the number of programs that have run, and the number of all programs."""

    def without(self, fence: str | None) -> DecodeExploration:
        """Return this exploration with ``fence`` dropped, on a device that has the fence if the caller named no device."""
        if self.backend is not None or fence not in PARAMETER_FENCES:
            return replace(self, drop_fence=fence, backend=self.backend or SIMULATED)
        return replace(self, drop_fence=fence, backend=_WITH_PARAMETERS, setup={**self.setup, "graphs": True})

    def open_device(self) -> Backend:
        """Open a fresh device: a real device has few streams, and each engine keeps its own."""
        assert self.backend is not None
        return self.registry.create(self.backend)

    def explorer(self, device: Backend) -> DecodeExplorer:
        """Return an explorer of these options on ``device``."""
        return DecodeExplorer(device, drop=self.drop_fence, half=self.drop, **self.setup)

    def command(self, number: int) -> str:
        """Return the command that runs host program ``number`` alone, in the same setup."""
        options = {"seed": number, "iterations": 1, "backend": self.backend, "strategy": self.strategy}
        options |= {"drop_fence": self.drop_fence, "drop": self.drop if self.drop_fence else None, **self.setup}
        words = [(f"--{name.replace('_', '-')}", value) for name, value in options.items() if value not in (None, False)]
        return shlex.join(["outrider", "explore", DECODE, *(n if v is True else f"{n}={v}" for n, v in words)])

    @property
    def described(self) -> dict[str, Any]:
        """Return the options of the exploration that a report repeats."""
        return {"program": DECODE, "strategy": self.strategy, "seed": self.seed, **self.setup}


def explore_decode(exploration: DecodeExploration) -> CommandReport:
    """Run host programs, each under a schedule of its own; stop at the first that fails.

    Raises :class:`CapabilityError` for a strategy or for images that the device can't run.
    """
    chosen = exploration.without(exploration.drop_fence)
    device = chosen.open_device()
    default = "mixed" if device.control is not None and chosen.drop_fence is None else _PROGRAM_ORDER
    iterations = chosen.iterations or (4 if chosen.drop_fence == EVERY else ITERATIONS)
    chosen = replace(chosen, strategy=chosen.strategy or default, iterations=iterations)
    if device.control is None and chosen.strategy != _PROGRAM_ORDER:
        raise CapabilityError(
            f"{device.label} decides its schedules itself: it runs decode in the order of the program alone; leave out "
            "--strategy and --replay, or use a backend such as 'sim'"
        )
    if chosen.setup["images"] and not device.capabilities.asynchronous:
        raise CapabilityError(
            f"{device.label} computes in the host's own memory, which a vision tower reads without asking: the sanitizer "
            "would call that a race; explore images on a device that runs beside the host, such as 'sim'"
        )
    with _one_thread():
        if chosen.drop_fence == EVERY:
            return _explore_every_fence(replace(chosen, backend=exploration.backend), device)
        found = _explored(chosen, device, chosen.explorer(device))
    left_out = found.pop("left_out")
    data = {
        **chosen.described,
        "dropped": f"{chosen.drop} of {chosen.drop_fence}" if chosen.drop_fence else None,
        "exercised": found["failed"] or left_out > 0 if chosen.drop_fence else None,
        **found,
    }
    code = 1 if data["failed"] else _NOT_EXERCISED if data["exercised"] is False else 0
    return CommandReport(data=data, render=lambda console: _render(console, chosen, data), exit_code=code)


@contextmanager
def _one_thread() -> Generator[None]:
    """Let torch compute with one thread in this scope: operands are tiny, and further threads would wait actively for each
    other.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _explored(chosen: DecodeExploration, device: Backend, explorer: DecodeExplorer) -> dict[str, Any]:
    """Run one program after the other and return the number of runs and the first failure.

    If a fence is dropped, the first program is one that exercises the fence. ``left_out`` counts waits or records that were
    left out in programs where no other fence gives their order.
    """
    found: dict[str, Any] = {"runs": 0, "failed": False, "left_out": 0}
    assert chosen.iterations is not None
    for number in range(chosen.seed, chosen.seed + chosen.iterations):
        if found["runs"] and device.control is None:
            device = chosen.open_device()
            explorer = chosen.explorer(device)
        is_exercising = chosen.drop_fence is not None and number == chosen.seed
        program = explorer.exercising_program if is_exercising else explorer.program(number)
        chosen.progress(found["runs"], chosen.iterations)
        error, schedule = _run(chosen, device, explorer, program, number)
        found["runs"] += 1
        if explorer.log is not None and not explorer.log.covered:
            found["left_out"] += explorer.log.left_out
        if error is not None:
            return found | {
                "failed": True,
                "run": number,
                "host_program": asdict(program),
                "error": {"type": type(error).__name__, "message": str(error)},
                "implied": list(explorer.implied()),
                **schedule,
            }
    return found


def _run(
    chosen: DecodeExploration, device: Backend, explorer: DecodeExplorer, program: HostProgram, number: int
) -> tuple[BaseException | None, dict[str, Any]]:
    """Run one host program once; return its error and, unless it ran in program order, the schedule that caused the error."""
    control = device.control
    if control is not None:
        control.reset()
    if control is None or chosen.strategy == _PROGRAM_ORDER:
        try:
            explorer.run_program(program, device)
        except Exception as error:
            return error, {"shrunk": None, "orderings": []}
        return None, {}
    result = control.explore(
        lambda backend: explorer.run_program(program, backend), strategy=str(chosen.strategy), iterations=1, seed=number
    )
    failure = result.failure
    if failure is None:
        return None, {}
    return failure.error, {"shrunk": str(failure.shrunk), "orderings": list(failure.orderings)}


def _explore_every_fence(chosen: DecodeExploration, device: Backend) -> CommandReport:
    """Run with every fence, then without each in turn: expect no finding first, then one per fence that is exercised.

    If the caller named neither a device, a mode nor a half of the fence, every fence must be exercised.
    """
    from outrider.engine.fences import FENCES

    is_complete = chosen.backend is None and chosen.setup["mode"] == "staged" and chosen.drop == "wait"
    rows: list[dict[str, Any]] = []
    last = chosen.without(None)
    for name in (None, *(fence.name for fence in FENCES)):
        one = chosen.without(name)
        if rows and (device.control is None or one.backend != last.backend):
            device = one.open_device()
        last = one
        found = _explored(one, device, one.explorer(device))
        races = found["failed"] and found["error"]["type"] == "RaceError"
        rows.append(
            {
                "dropped": name,
                "device": f"{one.backend}{', graphs' if one.setup['graphs'] else ''}",
                "used": name is None or races or found["left_out"] > 0,
                "runs": found["runs"],
                "found": races,
                "implied": found.get("implied", []),
                "error": found["error"] if found["failed"] and not races else None,
            }
        )
    right = all(_is_expected(row, is_complete) for row in rows)
    data = {**chosen.described, "drop": chosen.drop, "fences": rows, "right": right}
    return CommandReport(
        data=data, render=lambda console: _render_fences(console, data, is_complete), exit_code=0 if right else 1
    )


def _is_expected(row: Mapping[str, Any], is_complete: bool) -> bool:
    """Return True if a row is as expected: no finding with every fence, a race without a fence that is exercised.

    ``is_complete``: every fence must be exercised.
    """
    if row["dropped"] is None:
        return not row["found"] and row["error"] is None
    return bool(row["found"]) or (not row["used"] and not is_complete)


def _render(console: Console, chosen: DecodeExploration, data: Mapping[str, Any]) -> None:
    how = "in the order of the program" if data["strategy"] == _PROGRAM_ORDER else "each under a schedule of its own"
    ran = f"{data['runs']} host programs, {how}"
    if data["failed"]:
        console.print(Text(f"host program {data['run']} failed: {data['error']['type']}", style="bold red"))
        console.print(data["error"]["message"], markup=False)
        if data["implied"]:
            console.print(Text(f"the finding implies: {', '.join(data['implied'])}", style="bold yellow"))
        console.print(f"run it again with: {chosen.command(data['run'])}", markup=False)
    elif data["exercised"] is None:
        console.print(Text(f"{ran}: all right", style="green"))
    elif data["exercised"]:
        console.print(Text(f"{ran}: nothing missed the {data['dropped']}, although it was left out", style="bold red"))
    else:
        console.print(
            Text(f"{ran}: none exercised the {data['dropped']}, so that nothing is known about it", style="bold red")
        )
        console.print("this device and mode have no use for the fence, or another fence gives the same order")
        if chosen.drop_fence in PARAMETER_FENCES:
            console.print(f"a device with host lengths in its graphs has it: --backend {_WITH_PARAMETERS} --graphs")


def _render_fences(console: Console, data: Mapping[str, Any], is_complete: bool) -> None:
    console.print(f"decode, {data['mode']}: the {data['drop']} of each fence left out")
    table = Table("fence", "device", "result", box=None, pad_edge=False)
    for row in data["fences"]:
        result = "no finding" if row["error"] is None else row["error"]["type"]
        if row["found"]:
            named = row["implied"] == [row["dropped"]]
            result = "caught" if named else f"a race that implies {', '.join(row['implied']) or 'no fence'}"
        elif not row["used"]:
            result = "not exercised"
        text = Text(result, style="green" if _is_expected(row, is_complete) else "bold red")
        table.add_row(row["dropped"] or "(none left out)", row["device"], text)
    console.print(table)
    dropped = [row for row in data["fences"] if row["dropped"] is not None]
    caught = sum(row["found"] for row in dropped)
    console.print(f"{caught} of {len(dropped)} fences were missed when they were left out")


CORPUS = "corpus"

_DEVICES = ("sim", "sim:like=npu")
"""Specs of simulated devices that together have every capability that a program needs."""


def explore_corpus(
    registry: Registry, *, iterations: int, seed: int, strategy: str = "mixed", backend: str | None = None
) -> CommandReport:
    """Run the corrected programs and return their report; exit code 0 if every program was silent.

    ``backend`` is the device to use instead of the simulated ones; programs that need a capability that it lacks are skipped.
    """
    began = time.monotonic()
    explored = (
        _explore_corrected(race, control, iterations=iterations, seed=seed, strategy=strategy)
        for race, control in _programs_on_devices(registry, backend)
    )
    rows = list(explored)
    alarms = sum(bool(row["alarm"]) for row in rows)
    data = {
        "program": CORPUS,
        "strategy": strategy,
        "seed": seed,
        "runs": sum(row["runs"] for row in rows),
        "distinct": sum(row["distinct"] for row in rows),
        "alarms": alarms,
        "seconds": round(time.monotonic() - began, 1),
        "programs": rows,
    }
    return CommandReport(data=data, render=lambda console: _render_corpus(console, data), exit_code=1 if alarms else 0)


def _programs_on_devices(registry: Registry, backend: str | None) -> Iterator[tuple[Race, ControllableDevice]]:
    from outrider_sanitizer.races import RACES
    from outrider_sanitizer.races.race import control_of

    waiting = dict(RACES)
    # Open one device at a time: a tensor created outside every stream scope belongs to the device opened last.
    for spec in (backend,) if backend else _DEVICES:
        device = registry.create(spec)
        control = control_of(device)
        for race in list(waiting.values()):
            if not race.needs or getattr(device.capabilities, race.needs):
                del waiting[race.name]
                yield race, control


def _explore_corrected(
    race: Race, control: ControllableDevice, *, iterations: int, seed: int, strategy: str
) -> dict[str, Any]:
    """Explore one corrected program and return its row; ``alarm`` is the first failure with its schedule."""
    from outrider_sanitizer import watch

    schedules: set[str] = set()

    def program(device: Backend) -> None:
        with watch(device) as report:
            race.right(device)
        device.synchronize()
        schedules.add(control.schedule())
        report.raise_if_any()

    began = time.monotonic()
    found = control.explore(program, strategy=strategy, iterations=iterations, seed=seed)
    failure = found.failure
    alarm = "" if failure is None else f"{type(failure.error).__name__}: {failure.error}\nschedule {failure.schedule}"
    seconds = round(time.monotonic() - began, 1)
    return {"program": race.name, "runs": found.runs, "distinct": len(schedules), "alarm": alarm, "seconds": seconds}


def _render_corpus(console: Console, data: Mapping[str, Any]) -> None:
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
