"""Try random programs on a backend, and shrink and explain the first one that fails."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from types import MappingProxyType
from typing import NoReturn

import torch

from outrider.device import Backend, ControllableDevice, ExplorationResult
from outrider_conformance.lab import Lab, StreamDelay
from outrider_conformance.programs.execution import SharedStreams, run
from outrider_conformance.programs.explanation import broken_promise, report_text, script
from outrider_conformance.programs.families import Abilities
from outrider_conformance.programs.generator import random_program
from outrider_conformance.programs.model import Model
from outrider_conformance.programs.shrinking import shrink

SECONDS_TO_SHRINK = 4.0
_SHARES: Mapping[str, int] = MappingProxyType(
    {"order": 50, "copies": 50, "memory": 45, "threads": 55, "graphs": 60, "bound": 40}
)
_PROGRAMS_PER_BACKEND = 50
_MIN_DELAY_MS, _MAX_DELAY_MS = 1.0, 8.0
_TIMED_OPERATIONS = 10
_SCHEDULES = 2


def program_count(family: str, total: int) -> int:
    """Return the number of programs of ``family`` among ``total`` programs."""
    return max(1, round(total * _SHARES[family] / sum(_SHARES.values())))


class ProgramFailed(AssertionError):
    """Raised when a backend did something that the contract does not allow. ``promise`` is the broken promise, (member,
    words).
    """

    def __init__(self, report_text: str, promise: tuple[str, str]) -> None:
        super().__init__(report_text)
        self.promise = promise


def try_program(stage: SharedStreams, model: Model, number: int = 0, *, brief: bool = False) -> None:
    """Run one program, in several schedules on a device that takes schedules. Raises the error of the first failing run.

    ``number`` is the program's number in the session, which selects its schedules. ``brief``: leave the failing schedule
    unshrunk, because shrinking takes many runs.
    """
    control = stage.lab.backend.control
    if control is None:
        run(stage, model)
        return
    # First the order of the program and the order with the host first, then two schedules of this program's own.
    for first in (0, 2 + _SCHEDULES * number):
        _explore(control, stage, model, first, brief)


def _explore(control: ControllableDevice, stage: SharedStreams, model: Model, first: int, brief: bool) -> None:
    def once(_: Backend) -> None:
        run(stage, model)

    explore: Callable[..., ExplorationResult] = control.explore
    if brief and "shrinking" in inspect.signature(explore).parameters:
        explore = partial(explore, shrinking=False)
    failure = explore(once, strategy="mixed", iterations=_SCHEDULES, seed=first).failure
    if failure is not None and brief:
        raise failure.error
    if failure is not None:
        error = failure.error
        orderings = "".join(f"\n  {sentence}" for sentence in failure.orderings)
        if orderings and isinstance(error, AssertionError):
            error.args = (f"{error}\nin the schedule {failure.shrunk}:{orderings}",)
        raise error


def try_programs(
    opened: Callable[[], Backend],
    *,
    backend: str,
    family: str,
    count: int,
    start: int = 0,
    alive: Callable[[], None] = lambda: None,
    pace: StreamDelay | None = None,
) -> int:
    """Try ``count`` programs of ``family``, generated from the seed ``start``; return the number of tried programs.

    ``opened`` returns a new backend, ``backend`` is its name in scripts, and ``alive`` is called before each program.
    ``pace`` is the length of the delays of streams; None: measure it. Raises :class:`ProgramFailed` for the first failing
    program, shrunk.
    """
    first = opened()
    abilities, pace = Abilities.declared_by(first), pace or _pace(first)
    stage = SharedStreams(Lab(first, pace))
    for number in range(count):
        if number and number % _PROGRAMS_PER_BACKEND == 0:
            stage = SharedStreams(Lab(opened(), pace))
        alive()
        model = random_program(Random(f"{start} {family} {number}"), abilities, family)
        try:
            try_program(stage, model, number, brief=True)
        except Exception as error:
            _explain(opened, pace, backend, alive, model, number, error)
        except BaseException:
            print(script(model.program, backend))  # a program that hangs is printed without shrinking
            raise
    return count


def _pace(backend: Backend) -> StreamDelay:
    """Return a stream delay of twice the host time of a few operations, which depends on the load of the host."""
    stream = backend.create_stream("pace")
    with backend.on(stream):
        x = torch.zeros(1, device=backend.device)
        began = time.perf_counter()
        for _ in range(_TIMED_OPERATIONS):
            x.fill_(1.0)
        took = 1e3 * (time.perf_counter() - began)
    backend.synchronize()
    return StreamDelay(target_ms=min(_MAX_DELAY_MS, max(_MIN_DELAY_MS, 2 * took)))


def _explain(
    opened: Callable[[], Backend],
    pace: StreamDelay,
    backend: str,
    alive: Callable[[], None],
    model: Model,
    number: int,
    error: Exception,
) -> NoReturn:
    def fails(smaller: Model) -> BaseException | None:
        # Each run gets a new device: the last one may be stuck or lost. Without schedules, chance decides, so try twice.
        for orders in (number, 0):
            alive()
            try:
                try_program(SharedStreams(Lab(opened(), pace)), smaller, orders, brief=True)
            except Exception as found:
                return found
        return None

    smallest, found = shrink(model, fails, SECONDS_TO_SHRINK)
    alive()
    try:  # run once more to find the smallest schedule
        try_program(SharedStreams(Lab(opened(), pace)), smallest, number)
    except Exception as explained:
        found = explained
    shown = found or error
    raise ProgramFailed(report_text(smallest, shown, backend), broken_promise(smallest, shown)) from None
