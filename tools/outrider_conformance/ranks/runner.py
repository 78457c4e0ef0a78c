"""Run a program on several ranks, each with a device of its own.

A *program* is a function that every rank runs concurrently, and that checks its own results. Ranks are threads if the device
is synchronous or simulated, and processes otherwise, since a driver may need one process per device. A simulated device runs
the program in several schedules.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.device import Backend, CollectiveError, ControllableDevice, Group, Stream
from outrider_conformance.lab import Lab, StreamDelay, raise_failed_schedule, run_concurrently
from outrider_conformance.ranks.processes import RankContext, RankTaskFailed, TaskProcesses

if TYPE_CHECKING:
    from outrider_conformance.kit import Kit

TIMEOUT_S = 4.0
"""Default time limit of a group, shorter than the kit's limit for a test."""
SCHEDULES = 8
_SERVE = f"{__name__}:serve"
_MAX_TASK_S = 60.0

Program = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class RankHandle:
    """One rank of a running program."""

    index: int
    size: int
    """Number of ranks."""
    backend: Backend
    store: Any
    """The store through which the ranks' groups are created."""
    timeout_s: float = TIMEOUT_S
    pace: StreamDelay = field(default_factory=StreamDelay)
    lost_calls: list[str] = field(default_factory=list)
    """Calls that the device never finishes, because a peer left. Nothing may wait for the device of this rank any more."""

    @property
    def lab(self) -> Lab:
        """The delays and test data of this rank's device."""
        return Lab(self.backend, self.pace)

    @property
    def asynchronous(self) -> bool:
        """True if work may be pending when its call returns."""
        return self.backend.capabilities.asynchronous

    def group(self, name: str = "all", ranks: Sequence[int] = ()) -> Group:
        """Create a group of these ranks, of all ranks by default."""
        return self.backend.create_group(
            name, ranks=ranks or range(self.size), rank=self.index, store=self.store, timeout_s=self.timeout_s
        )

    def stream(self, name: str = "main") -> Stream:
        """Create a stream on this rank's device."""
        return self.backend.create_stream(name)

    def release_waiters(self, word: str) -> None:
        """Release the ranks that wait in :meth:`wait_for_word` for this word."""
        self.store.set(f"said/{word}", "1")

    def wait_for_word(self, word: str) -> None:
        """Wait on the host until another rank has called :meth:`release_waiters` with this word."""
        self.store.wait([f"said/{word}"], timedelta(seconds=_MAX_TASK_S))


class RankRunner:
    """A runner of programs on ranks of the backend under test."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._processes: TaskProcesses | None = None

    def run_program(
        self, program: Program, *args: Any, size: int = 2, timeout_s: float = TIMEOUT_S, schedules: int = SCHEDULES
    ) -> list[Any]:
        """Run ``program(rank, *args)`` on every rank, and return each rank's result. ``args`` are plain data.

        Raises the error of a rank. A failed check takes precedence over a :class:`CollectiveError`, which may only follow
        from it.
        """
        first = self._kit.open()
        if first.control is not None:
            return self._simulated(first, first.control, program, args, size, timeout_s, schedules)
        if not first.capabilities.asynchronous:
            return self._threads(first, program, args, size, timeout_s)
        work = {"program": f"{program.__module__}:{program.__qualname__}", "args": args, "timeout_s": timeout_s}
        return self._in_processes(size).run_task(_SERVE, work, limit_s=_MAX_TASK_S + timeout_s)

    def run_leaving(self, program: Program, *args: Any, leaving: int, timeout_s: float) -> None:
        """Run a program on two rank processes, of which rank ``leaving`` ends its own process."""
        work = {"program": f"{program.__module__}:{program.__qualname__}", "args": args, "timeout_s": timeout_s}
        answers = self._in_processes(2).task_results(_SERVE, work, limit_s=_MAX_TASK_S + timeout_s)
        for rank, answer in enumerate(answers):
            if rank != leaving and answer.error:
                raise RankTaskFailed(f"rank {rank} of 2: {answer.error}")

    def in_processes(self) -> bool:
        """Return whether the ranks of this backend are processes."""
        first = self._kit.open()
        return first.control is None and first.capabilities.asynchronous

    def end_ranks(self) -> None:
        """Kill the rank processes that still run."""
        if self._processes is not None:
            self._processes.kill()
            self._processes = None

    def _in_processes(self, size: int) -> TaskProcesses:
        if self._processes is not None and self._processes.size != size:
            self.end_ranks()
        if self._processes is None:
            self._processes = TaskProcesses(str(self._kit.spec), size)
        return self._processes

    def _device(self, rank: int) -> Backend:
        """Open a further device of a simulated host. The options of the first device apply to all devices."""
        return self._kit.registry.create(replace(self._kit.spec, ordinal=rank, options={}))

    def _simulated(
        self,
        first: Backend,
        control: ControllableDevice,
        program: Program,
        args: Sequence[Any],
        size: int,
        timeout_s: float,
        schedules: int,
    ) -> list[Any]:
        devices = [first, *(self._device(rank) for rank in range(1, size))]
        results: list[Any] = [None] * size

        def whole(_: Backend) -> None:
            store = control.create_store()

            def one(index: int) -> None:
                rank = RankHandle(
                    index=index, size=size, backend=devices[index], store=store, timeout_s=timeout_s, pace=self._kit.pace
                )
                results[index] = program(rank, *args)
                devices[index].synchronize()

            control.run_threads(*(partial(one, index) for index in range(size)))

        failure = control.explore(whole, strategy="mixed", iterations=schedules, seed=0).failure
        if failure is not None:
            raise_failed_schedule(failure)
        return results

    def _threads(self, first: Backend, program: Program, args: Sequence[Any], size: int, timeout_s: float) -> list[Any]:
        from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's stubs don't list it

        store = HashStore()
        results: list[Any] = [None] * size

        def one(index: int) -> None:
            backend = first if index == 0 else self._kit.open()
            rank = RankHandle(index=index, size=size, backend=backend, store=store, timeout_s=timeout_s, pace=self._kit.pace)
            results[index] = program(rank, *args)

        errors = run_concurrently(*(partial(one, index) for index in range(size)))
        if errors:
            raise next((error for error in errors if not isinstance(error, CollectiveError)), errors[0])
        return results


def serve(place: RankContext, *, program: str, args: Sequence[Any], timeout_s: float) -> Any:
    """Run one rank's part of a program in its process, and return its result."""
    module, _, function = program.partition(":")
    rank = RankHandle(index=place.rank, size=place.size, backend=place.backend, store=place.store, timeout_s=timeout_s)
    result = getattr(importlib.import_module(module), function)(rank, *args)
    if not rank.lost_calls:
        place.backend.synchronize()
    return result


__all__ = ["Program", "RankHandle", "RankRunner", "RankTaskFailed", "serve"]
