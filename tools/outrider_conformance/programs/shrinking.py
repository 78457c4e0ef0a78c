"""Shrink a failing program: leave out steps, unwrap nested steps, and shorten steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from outrider_conformance.programs import language as lang
from outrider_conformance.programs.language import DeviceProgram, Step
from outrider_conformance.programs.model import Model, judge
from outrider_conformance.programs.nodes import ForbiddenStep, Unordered

Steps = tuple[Step, ...]


def shrink(
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
            smaller = _judged(replace(best.program, steps=steps))
            if smaller is None:
                continue
            found = fails(smaller)
            if found is not None:
                best, error, progress = smaller, found, True
                break
    return best, error


def _judged(program: DeviceProgram) -> Model | None:
    try:
        return judge(program)
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
        for less in _less(step):
            yield (*steps[:index], *less, *steps[index + 1 :])


def _less(step: Step) -> Iterator[Steps]:
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
