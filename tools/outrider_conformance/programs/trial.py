"""Try random programs on a backend, and shrink and explain the first one that fails.

Shrinking leaves out steps, unwraps nested steps, and shortens steps. A printed script repeats the failing program.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from types import MappingProxyType
from typing import NoReturn

import torch

from outrider.device import Backend, ControllableDevice, ExplorationResult
from outrider.registry import Registry
from outrider_conformance.lab import Lab, StreamDelay
from outrider_conformance.programs import language as lang
from outrider_conformance.programs.execution import run
from outrider_conformance.programs.explanation import broken_promise, report_text, script
from outrider_conformance.programs.generator import random_program
from outrider_conformance.programs.language import DeviceProgram, Step
from outrider_conformance.programs.model import ForbiddenStep, Model, Unordered, run_on_model

Steps = tuple[Step, ...]


def shrink_program(
    model: Model, fails: Callable[[Model], BaseException | None], seconds: float
) -> tuple[Model, BaseException | None]:
    """Return the smallest program found within ``seconds`` for which ``fails`` returns an error, and that error."""
    until = time.monotonic() + seconds
    best, error = model, None
    progress = True
    while progress and time.monotonic() < until:
        progress = False
        for steps in _smaller(best.program.steps):
            if time.monotonic() >= until:
                break
            smaller = _valid_model(replace(best.program, steps=steps))
            if smaller is None:
                continue
            found = fails(smaller)
            if found is not None:
                best, error, progress = smaller, found, True
                break
    return best, error


def _valid_model(program: DeviceProgram) -> Model | None:
    try:
        return run_on_model(program)
    except (ForbiddenStep, Unordered):
        return None


def _smaller(steps: Steps) -> Iterator[Steps]:
    """Yield the steps without halves, quarters and so on to single steps, the last first; then with one step replaced by
    smaller ones.
    """
    size = max(1, len(steps) // 2)
    while True:
        for start in range(len(steps) - size, -1, -size):
            yield steps[:start] + steps[start + size :]
        if size == 1:
            break
        size //= 2
    for index, step in enumerate(steps):
        for less in _smaller_replacements(step):
            yield (*steps[:index], *less, *steps[index + 1 :])


def _smaller_replacements(step: Step) -> Iterator[Steps]:
    if isinstance(step, lang.ScopeStep | lang.Elsewhere):
        yield step.steps
        for steps in _smaller(step.steps):
            if steps:
                yield (replace(step, steps=steps),)
    elif isinstance(step, lang.ThreadsStep):
        yield (*step.first, *step.second)
        for first in _smaller(step.first):
            yield (replace(step, first=first),)
        for second in _smaller(step.second):
            yield (replace(step, second=second),)
    elif isinstance(step, lang.ReplayStep) and step.times > 1:
        yield (replace(step, times=1),)
        yield (replace(step, times=step.times // 2),)
    elif isinstance(step, lang.CaptureStep):
        if step.fork is not None:
            yield (replace(step, fork=None, branch=(), tail=()),)
        for number in range(len(step.body)):
            if len(step.body) > 1:
                yield (replace(step, body=step.body[:number] + step.body[number + 1 :]),)


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


def try_program(lab: Lab, model: Model, number: int = 0, *, brief: bool = False) -> None:
    """Run one program, in several schedules on a device that takes schedules. Raises the error of the first failing run.

    ``number`` is the program's number in the session, which selects its schedules. ``brief``: leave the failing schedule
    unshrunk, because shrinking takes many runs.
    """
    control = lab.backend.control
    if control is None:
        run(lab, model)
        return
    # First the order of the program and the order with the host first, then two schedules of this program's own.
    for first in (0, 2 + _SCHEDULES * number):
        _explore(control, lab, model, first, brief)


def _explore(control: ControllableDevice, lab: Lab, model: Model, first: int, brief: bool) -> None:
    def once(_: Backend) -> None:
        run(lab, model)

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
) -> int:
    """Try ``count`` programs of ``family``, generated from the seed ``start``; return the number of tried programs.

    ``opened`` returns a new backend, ``backend`` is its name in scripts, and ``alive`` is called before each program.
    Raises :class:`ProgramFailed` for the first failing program, shrunk.
    """
    first = opened()
    declared, pace = first.capabilities, _measured_delay(first)
    lab = Lab(first, pace)
    for number in range(count):
        if number and number % _PROGRAMS_PER_BACKEND == 0:
            lab = Lab(opened(), pace)
        alive()
        model = random_program(Random(f"{start} {family} {number}"), declared, family)
        try:
            try_program(lab, model, number, brief=True)
        except Exception as error:
            _explain(opened, pace, backend, alive, model, number, error)
        except BaseException:
            print(script(model.program, backend))  # a program that hangs is printed without shrinking
            raise
    return count


def _measured_delay(backend: Backend) -> StreamDelay:
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
                try_program(Lab(opened(), pace), smaller, orders, brief=True)
            except Exception as found:
                return found
        return None

    smallest, found = shrink_program(model, fails, SECONDS_TO_SHRINK)
    alive()
    try:  # run once more to find the smallest schedule
        try_program(Lab(opened(), pace), smallest, number)
    except Exception as explained:
        found = explained
    shown = found or error
    raise ProgramFailed(report_text(smallest, shown, backend), broken_promise(smallest, shown)) from None


def main(program: DeviceProgram) -> None:
    """Run ``program`` on the backend that the command line names. The exit code is 1 if a run fails."""
    parser = argparse.ArgumentParser(description="One program over the interface, checked by the model of its contract.")
    parser.add_argument("--backend", required=True, help="as `outrider backends` lists them")
    parser.add_argument("--times", type=int, default=20, help="how often, where time decides")
    options = parser.parse_args()
    registry = Registry()
    model, pace = run_on_model(program), StreamDelay(target_ms=1.0)

    def opened() -> Backend:
        return registry.create(registry.select(options.backend))

    failed = 0
    for number in range(options.times):
        try:
            try_program(Lab(opened(), pace), model, number)
        except Exception as error:
            failed += 1
            if failed == 1:
                member, words = broken_promise(model, error)
                print(f"{member} promises: “{words}”\n{error}")
    print(f"failed in {failed} of {options.times} runs")
    sys.exit(1 if failed else 0)
