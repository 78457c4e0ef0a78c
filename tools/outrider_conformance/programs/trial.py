"""Programs tried on a backend: drawn, carried out, and where one fails made smaller and explained."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from outrider.device import Backend, ControllableDevice, ExplorationResult
from outrider_conformance.lab import Lab, Pace
from outrider_conformance.programs.drawing import programs
from outrider_conformance.programs.families import Abilities
from outrider_conformance.programs.judging import broken, said, script
from outrider_conformance.programs.model import Model
from outrider_conformance.programs.running import Stage, run
from outrider_conformance.programs.shrinking import shrink

SECONDS_TO_SHRINK = 4.0
_SHARES: Mapping[str, int] = MappingProxyType(
    {"order": 50, "copies": 50, "memory": 45, "threads": 55, "graphs": 60, "bound": 40}
)
_AT_A_TIME = 50
_DELAY_MS, _LONGEST_DELAY_MS = 1.0, 8.0
_ENQUEUED = 10
_SCHEDULES = 2


def share(family: str, total: int) -> int:
    """How many of ``total`` programs are of ``family``."""
    return max(1, round(total * _SHARES[family] / sum(_SHARES.values())))


class Convicted(AssertionError):
    """A backend did what the contract doesn't allow. ``promise``: which one broke, (member, words)."""

    def __init__(self, said: str, promise: tuple[str, str]) -> None:
        super().__init__(said)
        self.promise = promise


class _Caught(Exception):
    """Leaves hypothesis's loop at the first failure."""


def try_program(stage: Stage, model: Model, number: int = 0, *, brief: bool = False) -> None:
    """One program, in several orders where the device takes schedules. Raises what it found wrong.

    ``brief``: the schedule that shows it isn't made smaller, which takes many runs, where the device leaves the choice.
    """
    control = stage.lab.backend.control
    if control is None:
        run(stage, model)
        return
    # In the order of the program, and the host first; then two orders that no other program has.
    for first in (0, 2 + _SCHEDULES * number):
        _explore(control, stage, model, first, brief)


def _explore(control: ControllableDevice, stage: Stage, model: Model, first: int, brief: bool) -> None:
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


def convict(
    opened: Callable[[], Backend],
    *,
    backend: str,
    family: str,
    count: int,
    start: int = 0,
    alive: Callable[[], None] = lambda: None,
    pace: Pace | None = None,
) -> int:
    """Try ``count`` programs of ``family``, drawn from the seed ``start``; returns how many were tried.

    ``opened`` gives a fresh backend, ``backend`` names it in scripts, ``alive`` is called before each program. Raises
    :class:`Convicted` for the first program that fails, made smaller.
    """
    numbers = itertools.count()
    stages: list[Stage] = []
    caught: list[tuple[Model, int, Exception]] = []
    hung: list[BaseException] = []
    first = opened()
    abilities, pace = Abilities.of(first), pace or _pace(first)

    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(abilities, family))
    def each(model: Model) -> None:
        number = next(numbers)
        if number % _AT_A_TIME == 0:
            stages[:] = [Stage(Lab(opened(), pace))]
        alive()
        try:
            try_program(stages[0], model, number, brief=True)
        except Exception as error:
            caught.append((model, number, error))
            raise _Caught from None
        except BaseException as error:
            print(script(model.program, backend))  # what hangs is shown as it is
            hung.append(error)
            raise
        finally:
            alive()

    try:
        each()
    except BaseException:
        if hung:
            raise hung[0] from None
        if not caught:
            raise
    if caught:
        _explain(opened, pace, backend, alive, *caught[0])
    return next(numbers)


def _pace(backend: Backend) -> Pace:
    """Delays behind which a host gets something done: twice what a few operations take it, which depends on its load."""
    stream = backend.create_stream("pace")
    with backend.on(stream):
        x = torch.zeros(1, device=backend.device)
        began = time.perf_counter()
        for _ in range(_ENQUEUED):
            x.fill_(1.0)
        took = 1e3 * (time.perf_counter() - began)
    backend.synchronize()
    return Pace(target_ms=min(_LONGEST_DELAY_MS, max(_DELAY_MS, 2 * took)))


def _explain(
    opened: Callable[[], Backend],
    pace: Pace,
    backend: str,
    alive: Callable[[], None],
    model: Model,
    number: int,
    error: Exception,
) -> None:
    def fails(smaller: Model) -> BaseException | None:
        # A fresh device each time: the last one may be stuck or lost. Where time decides, twice.
        for orders in (number, 0):
            alive()
            try:
                try_program(Stage(Lab(opened(), pace)), smaller, orders, brief=True)
            except Exception as found:
                return found
        return None

    smallest, found = shrink(model, fails, SECONDS_TO_SHRINK)
    alive()
    try:  # once more, for the smallest schedule too
        try_program(Stage(Lab(opened(), pace)), smallest, number)
    except Exception as explained:
        found = explained
    shown = found or error
    raise Convicted(said(smallest, shown, backend), broken(smallest, shown)) from None
