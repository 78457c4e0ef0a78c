"""The handle by which tools control the schedule and inject faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from outrider.device import Backend, ConfigError, ProcessView, Stream
from outrider_sim.explore.exploration import SimExploration, explore
from outrider_sim.explore.strategies import Delay, ReplaySchedule, Schedule, ScheduleStep, Strategy
from outrider_sim.machine.queue import FREE, StreamQueue
from outrider_sim.options import FAULTS
from outrider_sim.ranks.divergent_operators import DIVERGENCES
from outrider_sim.ranks.rank_processes import SimStore

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

    from outrider_sim.backend import SimBackend


class SimControl:
    """Control of the schedule and of faults: implements and extends the backend interface's `ControllableDevice`."""

    def __init__(self, backend: SimBackend) -> None:
        self._backend = backend

    @property
    def _machine(self) -> Any:
        return self._backend.sim.machine

    def set_schedule(self, schedule: str) -> None:
        """Replay `schedule` from here on. Call it right after `reset`. Raises `ConfigError` for text that is
        not a schedule.
        """
        self.use(ReplaySchedule(Schedule.parse(schedule)))

    def use(self, strategy: Strategy) -> None:
        """Replace the strategy that picks which stream or host thread takes the next step."""
        self._machine.use(strategy)

    def schedule(self) -> str:
        """Return the deviations from program order since the last reset. A replay of them repeats the run exactly."""
        return str(self._machine.schedule())

    def reset(self, strategy: Strategy | None = None) -> None:
        """Drain the device, then reset indices, decisions, virtual time, errors and random numbers.

        Live tensors keep their memory. Free memory and unreferenced streams are dropped. A lost device is usable again.
        `strategy` decides from now on; None selects the strategy of the backend's options.
        """
        self._backend.start_over(strategy)

    def virtual_time(self) -> float:
        """Return the simulated seconds since the last reset, on the most advanced stream or thread."""
        machine = self._machine
        clocks = [stream.clock for stream in machine.scheduler.streams] + [thread.clock for thread in machine.threads]
        return float(max(clocks)) / 1e6

    def steps(self, stream: Stream | None) -> tuple[str, int]:
        """Return the name of `stream` in schedules and its number of enqueued operations.

        For None: the name of the calling thread and the number of steps that it has taken.
        """
        if stream is None:
            thread = self._machine.thread
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

        `DIVERGENCES` in `divergent_operators` lists the kinds. Raises `ConfigError` for an unknown kind.
        """
        if kind not in DIVERGENCES:
            raise ConfigError(f"there is no divergence {kind!r}; expected one of {', '.join(DIVERGENCES)}")
        if kind == "slow":
            self._machine.scheduler.slow.add(self._machine.thread)
        else:
            self._backend.sim.divergences |= {kind}

    def create_store(self) -> Store:
        """Create a key-value store for ranks that are host threads of this process. Its waits are points of the schedule."""
        return SimStore(self._machine.scheduler)

    def explore(
        self, program: Callable[[Backend], None], *, strategy: str = "mixed", iterations: int = 100, seed: int = 0
    ) -> SimExploration:
        """Run `program` under up to `iterations` schedules and return the result of `exploration.explore`."""
        return explore(self._backend, program, strategy=strategy, iterations=iterations, seed=seed)

    def run_ranks(self, bodies: Sequence[Callable[[], None]], views: Sequence[ProcessView] = ()) -> None:
        """Run body r as rank r, each in a host thread with its own process state; see `rank_processes`."""
        from outrider_sim.ranks.rank_processes import run_ranks  # torch.distributed costs, and most programs have one rank

        run_ranks(self._machine.scheduler, bodies, views)

    def run_threads(self, *bodies: Callable[[], None]) -> None:
        """Run the callables as interleaved host threads and join them. The strategy picks the one thread that runs.

        Each thread starts on the caller's current stream. Raises the error of the thread that failed first.
        """
        with self._backend.as_current():
            self._machine.hosts.run_threads(*bodies)

    def yield_(self) -> None:
        """Add a point of the schedule to host code, at which another thread or a stream may run."""
        self._machine.point(FREE)
