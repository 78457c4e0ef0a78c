"""Run a program on several ranks, each with a device of its own.

A *program* is a function that every rank runs concurrently, and that checks its own results. Ranks are threads if the device
is synchronous or simulated, and processes otherwise, since a driver may need one process per device. A simulated device runs
the program in several schedules.

Each rank process opens its own device and runs tasks until it is killed.
"""

from __future__ import annotations

import importlib
import multiprocessing
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from outrider.device import Backend, CollectiveError, Group, OutriderError, Stream
from outrider_conformance.lab import Lab, StreamDelay, raise_failed_schedule, run_concurrently

if TYPE_CHECKING:
    from outrider_conformance.kit import Kit

_HOST = "127.0.0.1"
_START_S = 120.0
TIMEOUT_S = 4.0
"""Default time limit of a group, shorter than the kit's limit for a test."""
_MAX_TASK_S = 60.0


@dataclass(frozen=True, kw_only=True)
class RankHandle:
    """One rank of a running task or program."""

    index: int
    size: int
    """Number of ranks."""
    backend: Backend
    """The backend of the rank's own device."""
    store: Any
    """A store that only the ranks of this task use, for their groups."""
    timeout_s: float = TIMEOUT_S
    pace: StreamDelay = field(default_factory=StreamDelay)
    lost_calls: list[str] = field(default_factory=list)
    """Calls that the device never finishes, because a peer left. Nothing may wait for the device of this rank any more."""

    @property
    def lab(self) -> Lab:
        """The delays and test data of this rank's device."""
        return Lab(self.backend, self.pace)

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


@dataclass(frozen=True, slots=True)
class RankResult:
    """The result of a task on one rank."""

    value: Any = None
    """The value that the task returned."""
    error: str = ""
    """The error that the task raised, as text; empty if the task returned."""
    ended: bool = False
    """True if the rank's process has ended or must be killed."""


class TaskProcesses:
    """``size`` processes, of which process i opens device i of ``spec``. Leaving the scope kills them.

    A task is ``"module:function"``, called as ``function(rank, *args, **work)`` on every rank concurrently. Arguments and
    results are plain data. The next task starts a new process for each one that has died.
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

    def run_task(
        self,
        task: str,
        work: Mapping[str, Any] | None = None,
        *,
        args: Sequence[Any] = (),
        timeout_s: float = TIMEOUT_S,
        limit_s: float,
        leaving: int | None = None,
    ) -> list[Any]:
        """Run a task and return each rank's value. ``timeout_s`` is the time limit of its groups.

        Raises :class:`OutriderError` if a rank other than ``leaving``, which may end its process, fails or exceeds
        ``limit_s`` seconds. The message names all failed ranks: one rank's timeout may follow from another rank's error.
        """
        answers = self._results((task, args, dict(work or {}), timeout_s), limit_s)
        failed = [(rank, answer.error) for rank, answer in enumerate(answers) if answer.error and rank != leaving]
        wrong = [f"rank {rank} of {self.size}: {error}" for rank, error in failed]
        if wrong:
            self.kill()
            raise OutriderError("; ".join(wrong))
        return [answer.value for answer in answers]

    def _results(self, task: tuple[str, Sequence[Any], dict[str, Any], float], limit_s: float) -> list[RankResult]:
        """Run a task and return each rank's result. A rank beyond ``limit_s`` is killed."""
        started = [self._started(rank) for rank in range(self.size)]
        self._tasks += 1
        for _, pipe in started:
            pipe.send((self._tasks, *task))
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
    count = Registry().backends.info(parsed.name).device_count
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
            number, task, args, work, timeout_s = pipe.recv()
        except EOFError:
            return
        own = PrefixStore(f"task/{number}", store)
        handle = RankHandle(index=rank, size=size, backend=backend, store=own, timeout_s=timeout_s)
        try:
            answer = RankResult(value=call_task(task, handle, *args, **work))
        except CollectiveError as error:
            answer = RankResult(error=str(error))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            answer = RankResult(error=f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")
        pipe.send(answer)


def call_task(task: str, rank: RankHandle, *args: Any, **work: Any) -> Any:
    """Run one rank's part of a task, wait for its device unless a call there never ends, and return the result."""
    module, _, function = task.partition(":")
    result = getattr(importlib.import_module(module), function)(rank, *args, **work)
    if not rank.lost_calls:
        rank.backend.synchronize()
    return result


SCHEDULES = 8

Program = Callable[..., Any]


def _needs_processes(backend: Backend) -> bool:
    """Return True if ranks on devices like this one are processes."""
    return backend.control is None and backend.capabilities.asynchronous


class RankRunner:
    """A runner of programs on ranks of the backend under test."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._processes: TaskProcesses | None = None

    def run_program(
        self,
        program: Program,
        *args: Any,
        size: int = 2,
        timeout_s: float = TIMEOUT_S,
        schedules: int = SCHEDULES,
        leaving: int | None = None,
    ) -> list[Any]:
        """Run ``program(rank, *args)`` on every rank, and return each rank's result. ``args`` are plain data. The rank
        ``leaving`` ends its own process.

        Raises the error of a rank. A failed check takes precedence over a :class:`CollectiveError`, which may only follow
        from it.
        """
        first = self._kit.open()
        control = first.control
        if leaving is not None or _needs_processes(first):
            task, limit_s = f"{program.__module__}:{program.__qualname__}", _MAX_TASK_S + timeout_s
            return self._in_processes(size).run_task(task, args=args, timeout_s=timeout_s, limit_s=limit_s, leaving=leaving)
        kit = self._kit
        # The options of a simulated host's first device apply to all of its devices.
        further = [replace(kit.spec, ordinal=rank, options={}) for rank in range(1, size)]
        devices = [first, *(kit.open() if control is None else kit.registry.create(spec) for spec in further)]
        results: list[Any] = [None] * size

        def bodies(store: Any) -> list[Callable[[], None]]:
            def one(index: int) -> None:
                rank = RankHandle(
                    index=index, size=size, backend=devices[index], store=store, timeout_s=timeout_s, pace=self._kit.pace
                )
                results[index] = program(rank, *args)
                devices[index].synchronize()

            return [partial(one, index) for index in range(size)]

        if control is not None:

            def whole(_: Backend) -> None:
                control.run_threads(*bodies(control.create_store()))

            failure = control.explore(whole, strategy="mixed", iterations=schedules, seed=0).failure
            if failure is not None:
                raise_failed_schedule(failure)
            return results
        from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's stubs don't list it

        errors = run_concurrently(*bodies(HashStore()))
        if errors:
            raise next((error for error in errors if not isinstance(error, CollectiveError)), errors[0])
        return results

    def in_processes(self) -> bool:
        """Return whether the ranks of this backend are processes."""
        return _needs_processes(self._kit.open())

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


__all__ = ["Program", "RankHandle", "RankRunner", "call_task"]
