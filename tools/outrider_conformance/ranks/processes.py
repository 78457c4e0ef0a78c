"""Ranks as processes: each process opens its own device and runs tasks until it is killed."""

from __future__ import annotations

import importlib
import multiprocessing
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from outrider.device.errors import CollectiveError, OutriderError

if TYPE_CHECKING:
    from outrider.device import Backend

_HOST = "127.0.0.1"
_START_S = 120.0


class RankTaskFailed(OutriderError):
    """A rank failed or exceeded its time limit. The message names the rank and the error."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """The surroundings of a task on one rank: its device, its place among the ranks, and their store."""

    backend: Backend
    """The backend of the rank's own device."""
    rank: int
    size: int
    """Number of ranks."""
    store: Any
    """A store that only the ranks of this task use."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """The result of a task on one rank."""

    value: Any = None
    """The value that the task returned."""
    error: str = ""
    """The error that the task raised, as text; empty if the task returned."""
    collective: tuple[str, int, int, str] | None = None
    """Group, rank, sequence number and kind of a :class:`CollectiveError`."""
    ended: bool = False
    """True if the rank's process has ended or must be killed."""


class TaskProcesses:
    """``size`` processes, of which process i opens device i of ``spec``. Leaving the scope kills them.

    A task is ``"module:function"``, called as ``function(place, **work)`` on every rank concurrently. Arguments and results
    are plain data. The next task starts a new process for each one that has died.
    """

    def __init__(self, spec: str, size: int) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs don't list it

        self.spec, self.size = spec, size
        self._context = multiprocessing.get_context("spawn")
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
        self._ranks: list[tuple[Any, Connection] | None] = [None] * size
        self._tasks = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill all running processes and close their pipes."""
        for rank, process in enumerate(self._ranks):
            if process is not None:
                process[0].kill()
                process[0].join()
                process[1].close()
                self._ranks[rank] = None

    def run_task(self, task: str, work: Mapping[str, Any] | None = None, *, limit_s: float) -> list[Any]:
        """Run a task and return each rank's value. Raises :class:`RankTaskFailed` if a rank fails or exceeds ``limit_s``
        seconds.
        """
        answers = self.task_results(task, work, limit_s=limit_s)
        wrong = [(rank, answer) for rank, answer in enumerate(answers) if answer.error]
        if wrong:  # the message names all failed ranks: one rank's timeout may follow from another rank's error
            self.kill()
            raise RankTaskFailed("; ".join(f"rank {rank} of {self.size}: {answer.error}" for rank, answer in wrong))
        return [answer.value for answer in answers]

    def task_results(self, task: str, work: Mapping[str, Any] | None = None, *, limit_s: float) -> list[RankResult]:
        """Run a task that may fail on some ranks, and return each rank's result. A rank beyond ``limit_s`` is killed."""
        started = [self._started(rank) for rank in range(self.size)]
        self._tasks += 1
        for _, pipe in started:
            pipe.send((task, dict(work or {}), self._tasks))
        deadline = time.monotonic() + limit_s
        answers: list[RankResult] = []
        for rank, (process, pipe) in enumerate(started):
            answer = RankResult(error=f"wasn't done within {limit_s:g} s", ended=True)
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    answer = pipe.recv()
            except (EOFError, OSError):
                process.join()
                answer = RankResult(error=f"the process ended with exit code {process.exitcode}", ended=True)
            if answer.ended:
                process.kill()
                process.join()
                pipe.close()
                self._ranks[rank] = None
            answers.append(answer)
        return answers

    def _started(self, rank: int) -> tuple[Any, Connection]:
        found = self._ranks[rank]
        if found is None or not found[0].is_alive():
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(there, self.spec, rank, self.size, self._store.port), daemon=True, name=f"rank {rank}"
            )
            process.start()
            there.close()
            found = self._ranks[rank] = (process, here)
        return found


def on_device(spec: str, rank: int) -> str:
    """Return ``spec`` with this rank's device (``cuda`` becomes ``cuda:1``), unchanged for a backend with one device."""
    from outrider.registry import Registry
    from outrider.registry.backends import parse_spec

    parsed = parse_spec(spec)
    count = Registry().info(parsed.name).device_count
    return spec if count == 1 or rank == 0 else str(replace(parsed, ordinal=rank))


def _serve(pipe: Connection, spec: str, rank: int, size: int, port: int) -> None:
    """Run tasks from ``pipe`` until it is closed. The main function of a process."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch's stubs don't list it

    from outrider.registry import Registry
    from outrider.registry.children import end_with_parent

    end_with_parent()
    try:
        backend = Registry().create(Registry().select(on_device(spec, rank)))
        store = TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=_START_S))
    except Exception as error:
        pipe.send(RankResult(error=f"{type(error).__name__}: {error}", ended=True))
        return
    while True:
        try:
            task, work, number = pipe.recv()
        except EOFError:
            return
        module, _, function = task.partition(":")
        try:
            place = RankContext(backend, rank, size, PrefixStore(f"task/{number}", store))
            answer = RankResult(value=getattr(importlib.import_module(module), function)(place, **work))
        except CollectiveError as error:
            answer = RankResult(error=str(error), collective=(error.group, error.rank, error.sequence, error.kind))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            answer = RankResult(error=f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")
        pipe.send(answer)
