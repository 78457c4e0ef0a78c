"""The set of test programs that check a mutant of the engine, and the child process that runs them."""

from __future__ import annotations

import os
import pkgutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from unittest.mock import patch

from forks import Fork, run_concurrently
from outrider.device import Graph, Stream
from outrider.device.errors import DeviceFault, OutriderError
from outrider_proof.engine_setups import (
    MODES,
    prompt_and_media,
    random_host_program,
    reference_tokens,
    without_schedule,
)
from outrider_proof.proposers import EXTREMES
from proof.mutants.line_tracer import Lines, lines_run
from proof.mutants.mutation_sites import MutationSite, apply
from proof.mutants.options import OPTIONED, judged
from proof.program_checks import run_once_checked
from proof.setups import PERSONALITIES, PROPOSERS, EngineSetup, engines_for, simulated_device, supports_mode


def modules() -> tuple[str, ...]:
    """Return the names of all modules of the engine and of the proposers, which are the modules to mutate."""
    found = []
    for name in ("outrider.engine", "outrider.speculative"):
        package = import_module(name)
        found += [each.name for each in pkgutil.walk_packages(package.__path__, f"{name}.") if not each.ispkg]
    return tuple(sorted(found))


def programs() -> list[tuple[EngineSetup, int]]:
    """Setups and numbers of host programs: one for each proposer, with modes and personalities in turn; a crowded program,
    one that moves requests between two engines, and any, in turn too. Then drafts that are all accepted, and none, in crowded
    programs, where prefixes are shared and requests are preempted.
    """
    moving = [number for number in range(1, 60, 2) if any(arrival.moves for arrival in random_host_program(number).arrivals)]
    found = []
    for i, proposer in enumerate(PROPOSERS):
        mode, turn = MODES[i % len(MODES)], i // len(MODES)  # each mode meets each personality and kind of program
        setup = EngineSetup(proposer, mode, PERSONALITIES[(i + turn) % len(PERSONALITIES)])
        if not supports_mode(setup):
            setup = EngineSetup(proposer, mode)
        found.append((setup, (2 * i, moving[i % len(moving)], 2 * i + 1)[(i + 2 * turn) % 3]))
    for i, proposer in enumerate(EXTREMES):
        found += [(EngineSetup(proposer, mode, PERSONALITIES[i]), 2 * (i + j) + 30) for j, mode in enumerate(MODES)]
    return found


FAULTY = (("eagle", "staged", "cuda", 12), ("ngram", "graphs", "npu", 14), ("none", "fused", "rocm", 16))
"""Setups and numbers of the programs in which operations fail."""


class BaselineFailure(OutriderError):
    """A program fails on the unchanged engine."""


def _judges() -> list[tuple[str, Callable[[], str]]]:
    judges: list[tuple[str, Callable[[], str]]] = [
        (f"{setup.name}, {number}", partial(_judged, setup, number)) for setup, number in programs()
    ]
    judges += [(f"options, {setup.name}, {number}", partial(judged, setup, number)) for setup, number in OPTIONED]
    judges += [(f"faults in {', '.join(map(str, each))}", partial(_faulted, *each)) for each in FAULTY]
    return judges


def _judged(setup: EngineSetup, number: int) -> str:
    with _replays() as replayed:
        outcome = run_once_checked(setup, random_host_program(number))
    if outcome.error:
        return outcome.error
    costs = outcome.counts | replayed
    return "" if costs == _costs.setdefault((setup, number), costs) else "OtherCosts"


@contextmanager
def _replays() -> Generator[Counter[str]]:
    """Count the replays of each graph by name: an eager stage has the same results, so tokens do not show it."""
    found: Counter[str] = Counter()
    replay = Graph.replay

    def counted(graph: Graph, stream: Stream) -> int:
        found[f"replays of {graph.name}"] += 1
        return replay(graph, stream)

    with patch.object(Graph, "replay", counted):
        yield found


_costs: dict[tuple[EngineSetup, int], dict[str, int]] = {}
"""What programs take on the engine as it is: launches, preemptions, prefix hits and the like."""


def _faulted(proposer: str, mode: str, like: str, number: int) -> str:
    """Run a program without aborts and moves in which operations of a stream fail in some steps.

    The engine must report each failure, and no token may be wrong.
    """
    setup = EngineSetup(proposer, mode, like)
    backend = simulated_device(like, None)
    program = random_host_program(number)
    arrivals = [without_schedule(arrival) for arrival in program.arrivals]
    (engine,) = engines_for(setup, replace(program, arrivals=tuple(arrivals)))
    free = engine.free_pages, engine.free_rows
    ids = [engine.add_request(prompt_and_media(proposer, arrival)[0], arrival.params) for arrival in arrivals]
    got: dict[int, list[int]] = {request: [] for request in ids}
    raised = steps = 0
    while engine.has_unfinished:
        steps += 1
        if steps in (3, 4, 8):
            backend.provoke_fault(backend.streams[(steps + number) % len(backend.streams)])
        try:
            for output in engine.step():
                got[output.request_id] += output.tokens
        except DeviceFault:
            raised += 1
    engine.drain()
    if [tuple(got[request]) for request in ids] != [reference_tokens(proposer, arrival) for arrival in arrivals]:
        return "WrongTokens"
    if (engine.free_pages, engine.free_rows) != free:
        return "Leak"
    costs = {"raised": raised, "steps": steps}
    return "" if costs == _costs.setdefault((setup, -number), costs) else "OtherCosts"


@dataclass(frozen=True)
class ProgramBaseline:
    """A program's baseline on the unchanged engine: its executed lines, and its traced process time in seconds."""

    name: str
    judge: Callable[[], str]
    lines: Lines
    seconds: float

    def reaches(self, site: MutationSite) -> bool:
        """Return True if the program runs a line of the statement that ``site`` changes."""
        first, last = site.span
        return any((site.module, line) in self.lines for line in range(first, last + 1))


def record_baselines(changed: Sequence[str]) -> list[ProgramBaseline]:
    """Load the models and record the tokens, costs and executed lines of ``changed`` modules on the unchanged engine.

    Returns the cheapest program first, because it detects most mutants. Raises :class:`BaselineFailure` if a program fails.
    """
    known = []
    for again in (
        False,
        True,
    ):  # the second run shows the lines that a child process runs: cached loading runs only the first time
        for name, judge_one in _judges():
            began = time.process_time()
            with lines_run(changed if again else ()) as lines:
                error = judge_one()
            if error:
                raise BaselineFailure(f"{name} fails without any change: {error}")
            if again:
                known.append(ProgramBaseline(name, judge_one, frozenset(lines), time.process_time() - began))
    return sorted(known, key=lambda each: each.seconds)


class Trial:
    """One mutant in a child process that runs the first ``most`` programs of ``known`` which reach the changed line.

    A program hangs if it takes several times its baseline CPU time, or if the child waits for ``patience`` seconds without
    output.
    """

    def __init__(self, site: MutationSite, known: Sequence[ProgramBaseline], patience: float, most: int) -> None:
        self.site = site
        self.programs = [each for each in known if each.reaches(site)][:most]
        self._patience, self._code, self._hangs = patience, 0, False
        self.fork = Fork(partial(_run_programs, site, self.programs))

    def outcome(self) -> Trial | None:
        """Return this trial if the child has ended or hangs, else None."""
        code = self.fork.exit_code()
        if code is not None:
            self._code, self._hangs = code, code == -signal.SIGPROF  # the limit of its CPU time
            return self
        if not self.fork.is_silent(self._patience):
            return None
        self.fork.kill()
        self._hangs = True
        return self

    def result(self) -> tuple[str | None, str | None]:
        """Return (reason, program) of the detection after the child has ended; (None, None) if the mutant survived."""
        *before, last = self.fork.lines or [""]
        if self._hangs:
            return "hang", last
        if last == "survived":
            return None, None
        _, tab, by = last.partition("\t")
        return (by, before[-1] if before else None) if tab else ("crash", last)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a run over mutants."""

    processes: int
    """Number of concurrent child processes."""
    seconds: float = 1e9
    """Time after which no trial begins, in seconds."""
    patience: float = 120.0
    """Time after which a waiting child without output counts as a hang, in seconds."""
    programs: int = 1_000
    """Maximum number of programs per mutant."""


def judge_all(sites: Sequence[MutationSite], known: Sequence[ProgramBaseline], limits: Limits) -> Iterator[Trial]:
    """Trials that are over, in the order in which they end."""
    starts = ((site, partial(Trial, site, known, limits.patience, limits.programs)) for site in sites)
    for _, trial in run_concurrently(starts, limits.processes, limits.seconds):
        yield trial


def _run_programs(site: MutationSite, known: Sequence[ProgramBaseline], writer: int) -> int:
    """Write the name of each program before it begins, and the result; return the exit code."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        apply(import_module(site.module), site)
        for each in known:
            os.write(writer, f"{each.name}\n".encode())
            signal.setitimer(signal.ITIMER_PROF, 3 * each.seconds + 3)
            error = each.judge()
            if error:
                os.write(writer, f"by\t{error}\n".encode())
                return 0
        os.write(writer, b"survived\n")
    except BaseException as error:
        os.write(writer, f"by\t{type(error).__name__}\n".encode())
    return 0
