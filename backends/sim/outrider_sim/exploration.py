"""The control of a simulated device: tools set its schedule and inject faults, and run a program under many schedules.

An exploration stops at the first schedule that fails, and shrinks it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from outrider.device import Backend, ConfigError, ExplorationResult, ProcessView, ScheduleFailure, Stream
from outrider_sim.machine.queue import FREE, StreamQueue
from outrider_sim.options import FAULTS
from outrider_sim.ranks.rank_processes import SimStore
from outrider_sim.strategies import (
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
from outrider_sim.torch_device.replacements import DIVERGENCES

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

    from outrider_sim.backend import SimBackend
    from outrider_sim.machine.host_scheduler import HostScheduler
    from outrider_sim.machine.stream_machine import StreamMachine


Program = Callable[["SimBackend"], None]
"""A program to explore: it creates its tensors and streams on the backend, and raises an error if a result is wrong."""


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
) -> ExplorationResult:
    """Run `program` under up to `iterations` schedules and stop at the first failure, shrunk unless `shrinking` is off."""
    result = ExplorationResult()
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
        if error is not None:
            result.failure = _failure(backend, program, number, error, shrinking)
            return result
    result.exhausted = next(source, None) is None
    return result


def _failure(backend: SimBackend, program: Program, number: int, error: BaseException, shrinking: bool) -> ScheduleFailure:
    schedule = Schedule.parse(backend.control.schedule())
    shrunk = shrink_schedule(backend, program, schedule, type(error)) if shrinking else schedule
    return ScheduleFailure(
        run=number, error=error, schedule=schedule, shrunk=shrunk, orderings=tuple(explain(backend, program, shrunk))
    )


def shrink_schedule(backend: SimBackend, program: Program, schedule: Schedule, kind: type[BaseException]) -> Schedule:
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
    scheduler = backend.sim.machine.scheduler
    scheduler.names = names
    scheduler.update_mode()
    try:
        run_once(backend, program, ReplaySchedule(schedule))
    finally:
        scheduler.names = None
        scheduler.update_mode()

    def describe(step: ScheduleStep) -> str:
        return f"{step} ({names.get(str(step), 'not reached')})"

    return [f"{describe(delay.step)} runs only after {describe(delay.after)}" for delay in schedule]


class SimControl:
    """Control of the schedule and of faults: implements and extends the backend interface's `ControllableDevice`."""

    def __init__(self, backend: SimBackend) -> None:
        self._backend = backend

    @property
    def _machine(self) -> StreamMachine:
        return self._backend.sim.machine

    @property
    def _scheduler(self) -> HostScheduler:
        return self._backend.sim.machine.scheduler

    def set_schedule(self, schedule: str) -> None:
        """Replay `schedule` from here on. Call it right after `reset`. Raises `ConfigError` for text that is
        not a schedule.
        """
        self.use(ReplaySchedule(Schedule.parse(schedule)))

    def use(self, strategy: Strategy) -> None:
        """Replace the strategy that picks which stream or host thread takes the next step."""
        self._scheduler.use(strategy)

    def schedule(self) -> str:
        """Return the deviations from program order since the last reset. A replay of them repeats the run exactly."""
        return str(self._scheduler.schedule())

    def reset(self, strategy: Strategy | None = None) -> None:
        """Drain the device, then reset indices, decisions, virtual time, errors and random numbers.

        Live tensors keep their memory. Free memory and unreferenced streams are dropped. A lost device is usable again.
        `strategy` decides from now on; None selects the strategy of the backend's options.
        """
        self._backend.start_over(strategy)

    def virtual_time(self) -> float:
        """Return the simulated seconds since the last reset, on the most advanced stream or thread."""
        scheduler = self._scheduler
        clocks = [stream.clock for stream in scheduler.streams] + [thread.clock for thread in scheduler.threads]
        return float(max(clocks)) / 1e6

    def steps(self, stream: Stream | None) -> tuple[str, int]:
        """Return the name of `stream` in schedules and its number of enqueued operations.

        For None: the name of the calling thread and the number of steps that it has taken.
        """
        if stream is None:
            thread = self._scheduler.thread
            return thread.label, thread.step
        queue: StreamQueue = stream.native
        return queue.label, queue.issued

    def delaying(self, step: tuple[str, int], after: tuple[str, int]) -> str:
        """Return the schedule in which `step` runs only after the step `after` has run."""
        return str(Schedule([Delay(ScheduleStep(*step), ScheduleStep(*after))]))

    def inject(self, kind: str, number: int) -> None:
        """Inject fault `kind` into operation (for `oom`: allocation) `number`, counted from this call and from 1.

        The fault is the one of the option `fault=kind@number`. A reset removes it. Raises `ConfigError` for an unknown kind.
        """
        if kind not in FAULTS:
            raise ConfigError(f"there is no fault {kind!r}; expected one of {', '.join(FAULTS)}")
        if kind == "oom":
            memory = self._backend.sim.memory
            memory.faults.add(memory.count + number)
        else:
            self._machine.faults[self._machine.enqueued + number] = kind

    def diverge(self, kind: str) -> None:
        """Make this device, or for `slow` the calling host thread, differ from other ranks until the next reset.

        `DIVERGENCES` in `replacements` lists the kinds. Raises `ConfigError` for an unknown kind.
        """
        if kind not in DIVERGENCES:
            raise ConfigError(f"there is no divergence {kind!r}; expected one of {', '.join(DIVERGENCES)}")
        if kind == "slow":
            self._scheduler.slow.add(self._scheduler.thread)
        else:
            self._backend.sim.divergences |= {kind}

    def create_store(self) -> Store:
        """Create a key-value store for ranks that are host threads of this process. Its waits are points of the schedule."""
        return SimStore(self._scheduler)

    def explore(
        self,
        program: Callable[[Backend], None],
        *,
        strategy: str = "mixed",
        iterations: int = 100,
        seed: int = 0,
        shrinking: bool = True,
    ) -> ExplorationResult:
        """Run `program` under up to `iterations` schedules and return the result of `exploration.explore`."""
        return explore(self._backend, program, strategy=strategy, iterations=iterations, seed=seed, shrinking=shrinking)

    def run_ranks(self, bodies: Sequence[Callable[[], None]], views: Sequence[ProcessView] = ()) -> None:
        """Run body r as rank r, each in a host thread with its own process state; see `rank_processes`."""
        from outrider_sim.ranks.rank_processes import run_ranks  # torch.distributed costs, and most programs have one rank

        run_ranks(self._scheduler, bodies, views)

    def run_threads(self, *bodies: Callable[[], None]) -> None:
        """Run the callables as interleaved host threads and join them. The strategy picks the one thread that runs.

        Each thread starts on the caller's current stream. Raises the error of the thread that failed first.
        """
        with self._backend.as_current():
            self._scheduler.run_threads(*bodies)

    def yield_(self) -> None:
        """Add a point of the schedule to host code, at which another thread or a stream may run."""
        self._machine.point(FREE)
