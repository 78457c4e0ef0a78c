"""Run a program under many schedules; shrink the first one that fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider_sim.explore.strategies import (
    Delay,
    Exhaustive,
    Pruned,
    ReplaySchedule,
    Schedule,
    ScheduleStep,
    Strategy,
    make_strategy,
    parse_strategy,
)

if TYPE_CHECKING:
    from outrider_sim.backend import SimBackend

Program = Callable[["SimBackend"], None]
"""A program to explore: it creates its tensors and streams on the backend, and raises an error if a result is wrong."""


@dataclass(frozen=True, kw_only=True)
class FailedRun:
    """A run that failed. `schedule` replays it, `shrunk` has only the delays that the failure needs, `orderings` describes
    them.
    """

    run: int
    error: BaseException
    schedule: Schedule
    shrunk: Schedule
    orderings: tuple[str, ...]


@dataclass(kw_only=True)
class SimExploration:
    """The result of an exploration.

    `runs` counts complete runs, `pruned` counts runs aborted as repetitions. `exhausted` means that every schedule ran.
    """

    runs: int = 0
    pruned: int = 0
    exhausted: bool = False
    failure: FailedRun | None = None
    distinct: set[str] = field(default_factory=set)


def strategies(spec: str, seed: int = 0) -> Iterator[Strategy]:
    """Yield one strategy for each run: `pct:d=3`, `random`, `exhaustive`, `mixed`, `replay:STRING`, …

    Ends with the last path of `exhaustive`, and after one run of a strategy that has only one. Raises `ConfigError` for a
    name or option that doesn't exist.
    """
    name, options = parse_strategy(spec)
    first = make_strategy(name, seed, options)
    if isinstance(first, Exhaustive):
        while not first.exhausted:
            yield first
        return
    yield first
    if name in ("random", "pct", "mixed"):
        while True:
            seed += 1
            yield make_strategy(name, seed, options)


def run_once(backend: SimBackend, program: Program, strategy: Strategy) -> BaseException | None:
    """Reset the device, run `program` once, drain the device; return the error that the program or the device raised, or
    None.

    `Pruned` is returned like a failure; KeyboardInterrupt and SystemExit pass through.
    """
    backend.control.reset(strategy)
    try:
        program(backend)
        backend.synchronize()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # Frames would keep the run's tensors, and with them memory, from the next run.
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__
        return error
    finally:
        strategy.end()
    return None


def explore(
    backend: SimBackend,
    program: Program,
    *,
    strategy: str = "mixed",
    iterations: int = 100,
    seed: int = 0,
    shrinking: bool = True,
    count_distinct: bool = False,
) -> SimExploration:
    """Run `program` under up to `iterations` schedules and stop at the first failure, shrunk unless `shrinking` is off.

    `count_distinct` keeps the schedules seen, as strings.
    """
    result = SimExploration()
    source = strategies(strategy, seed)
    for number in range(iterations):
        chosen = next(source, None)
        if chosen is None:
            break
        error = run_once(backend, program, chosen)
        if isinstance(error, Pruned):
            result.pruned += 1
            continue
        result.runs += 1
        if count_distinct:
            result.distinct.add(backend.control.schedule())
        if error is not None:
            result.failure = _failure(backend, program, number, error, shrinking)
            return result
    result.exhausted = next(source, None) is None
    return result


def _failure(backend: SimBackend, program: Program, number: int, error: BaseException, shrinking: bool) -> FailedRun:
    schedule = Schedule.parse(backend.control.schedule())
    shrunk = shrink(backend, program, schedule, type(error)) if shrinking else schedule
    return FailedRun(
        run=number, error=error, schedule=schedule, shrunk=shrunk, orderings=tuple(explain(backend, program, shrunk))
    )


def shrink(backend: SimBackend, program: Program, schedule: Schedule, kind: type[BaseException]) -> Schedule:
    """Return a minimal subset of `schedule`'s delays with which the program still raises a `kind`.

    Delta debugging removes delays until each remaining one is necessary: without it the program passes or raises another
    error. If the failure doesn't recur (a nondeterministic program), `schedule` is returned unchanged.
    """

    def fails(delays: list[Delay]) -> bool:
        return isinstance(run_once(backend, program, ReplaySchedule(Schedule(delays))), kind)

    delays = list(schedule)
    if not fails(delays):
        return schedule
    if fails([]):
        return Schedule()
    pieces = 2
    while len(delays) > 1:
        size = max(1, len(delays) // pieces)
        for start in range(0, len(delays), size):
            rest = delays[:start] + delays[start + size :]
            if rest and fails(rest):
                delays, pieces = rest, max(2, pieces - 1)
                break
        else:
            if size == 1:
                break
            pieces = min(len(delays), pieces * 2)
    return Schedule(_tighten(delays, fails))


def _tighten(delays: list[Delay], fails: Callable[[list[Delay]], bool]) -> list[Delay]:
    """Weaken each delay while the program still fails: hold the latest possible step until after the
    earliest possible step.
    """
    tries = _TIGHTEN
    for place in range(len(delays)):
        for step, after in ((0, -1), (1, 0)):
            while tries > 0:
                tries -= 1
                now = delays[place]
                if now.after.number + after < 0:
                    break
                narrower = Delay(
                    now.step._replace(number=now.step.number + step), now.after._replace(number=now.after.number + after)
                )
                changed = [*delays[:place], narrower, *delays[place + 1 :]]
                if not fails(changed):
                    break
                delays = changed
    return delays


_TIGHTEN = 64  # runs spent on it


def explain(backend: SimBackend, program: Program, schedule: Schedule) -> list[str]:
    """Run the program once more and return one sentence per delay of `schedule`, with operation names and source lines."""
    names: dict[str, str] = {}
    machine = backend.sim.machine
    machine.names = names
    machine.update_mode()
    try:
        run_once(backend, program, ReplaySchedule(schedule))
    finally:
        machine.names = None
        machine.update_mode()

    def say(step: ScheduleStep) -> str:
        return f"{step} ({names.get(str(step), 'not reached')})"

    return [f"{say(delay.step)} runs only after {say(delay.after)}" for delay in schedule]
