"""Try random programs on a backend, and shrink and explain the first one that fails.

Shrinking leaves out steps, unwraps nested steps, and shortens steps. A printed script repeats the failing program.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from types import MappingProxyType
from typing import NoReturn

import torch
from torch import Tensor

from outrider.device import Backend, ControllableDevice, DeviceError, ExplorationResult
from outrider.registry import Registry
from outrider_conformance.lab import Lab, StreamDelay
from outrider_conformance.programs import language as lang
from outrider_conformance.programs.execution import StepFailed, WrongProgramValue, run
from outrider_conformance.programs.generator import random_program
from outrider_conformance.programs.language import DeviceProgram, Step
from outrider_conformance.programs.model import (
    LAUNCH,
    ORDER,
    Cell,
    Effect,
    Expectation,
    ForbiddenStep,
    Key,
    Model,
    Node,
    Unordered,
    run_on_model,
)
from outrider_conformance.promises import Promise, first_sentence

_FIRST_SENTENCES = (
    *("Stream", "Stream.record", "Stream.wait", "Stream.synchronize", "Stream.query"),
    *("Event.synchronize", "Event.synchronize_within", "Event.query"),
    *("Backend.synchronize", "Backend.on", "Backend.delay", "Backend.empty_pinned", "Backend.capture"),
    *("Graph.update_params", "Flag.set", "Flag.wait", "Flag.reset"),
)
PROMISES: Mapping[str, Promise] = MappingProxyType(
    {verb: first_sentence(verb) for verb in _FIRST_SENTENCES}
    | {
        "Backend.copy_async": (
            "Backend.copy_async",
            "The bytes of the source are read, and those of the destination written, in stream order",
        ),
        "Backend.keep_alive": (
            "Backend.keep_alive",
            "Use it to pass memory to another stream: the allocator can't reuse memory that is held.",
        ),
        "Graph.replay": ("Graph", "``replay`` enqueues the whole graph on a stream like one operation."),
        "event": ("Event", "A wait that is enqueued stays valid when the Python object is dropped."),
        "graph": ("Graph", "An enqueued replay runs even if the Python object is dropped meanwhile."),
    }
)
"""The promise, as member and words, by the verb of an edge or node. A test compares the words with the docstrings."""

_WAITS = frozenset({"Stream.wait", "Stream.synchronize", "Event.synchronize", "Backend.synchronize", "Flag.wait"})
_STEPS: Mapping[type, str] = MappingProxyType(
    {
        lang.Lend: "Backend.keep_alive",
        lang.CaptureStep: "Backend.capture",
        lang.ReplayStep: "Graph.replay",
        lang.Update: "Graph.update_params",
        lang.Signal: "Flag.wait",
        lang.HostWrite: "Backend.empty_pinned",
        lang.HostRead: "Backend.empty_pinned",
    }
)


def broken_promise(model: Model, error: BaseException) -> Promise:
    """Return (member, words) of the promise that a program found broken.

    An older value blames the wait that should order the write before the read. A newer value blames the wait that should
    order the read before the later write. Any other value blames the verb that wrote it.
    """
    if isinstance(error, WrongProgramValue):
        return PROMISES[_blamed(model, error.expectation, error.found)]
    if isinstance(error, StepFailed):
        step = error.step
        if isinstance(step, lang.Synchronize):
            return PROMISES[lang.WAIT_VERBS[step.how]]
        if isinstance(step, lang.Query):
            return PROMISES["Event.query" if step.what == "event" else "Stream.query"]
        if isinstance(step, lang.EventStep):
            return PROMISES[f"Stream.{step.verb}"]
        if isinstance(step, lang.DropStep):
            return PROMISES[step.what]
        if isinstance(step, lang.WorkStep) and step.kind == "copy_async":
            return PROMISES["Backend.copy_async"]
        return PROMISES[_STEPS.get(type(step), "Backend.on")]
    return PROMISES["Stream"]


def _blamed(model: Model, expectation: Expectation, found: Tensor | None) -> str:
    reader, cell = expectation.reader, expectation.cell
    writer = cell.writer
    if found is None:
        return reader.verb if reader.verb in PROMISES else "Backend.on"
    if _cell_equals(cell.before, found) and writer is not None:  # the read found the memory before its last write
        before = cell.before.writer if cell.before is not None else None
        if before is not None and before.actor != writer.actor:  # or the last write came too early and the previous one late
            return _edge(writer, before)
        return _edge(reader, writer)
    if writer is None:
        return "Stream"
    effect = writer.effect
    if effect is None or effect.source is None or effect.seen is None or effect.span is None or writer.verb == "Graph.replay":
        return writer.verb
    part = found[effect.to.view] if effect.target == expectation.key else None
    if part is None or not len(part):
        return writer.verb
    return _blamed_for_copy(model, writer, effect, effect.source, effect.seen, part)


def _blamed_for_copy(model: Model, writer: Node, effect: Effect, source: Key, seen: Cell, part: Tensor) -> str:
    """Return the verb or edge to blame for the value ``part``, which ``writer`` copied from ``source`` while it should have
    ``seen`` another value there.
    """
    older = seen.before
    while older is not None:
        if _is_result_of(effect, older, part) and seen.writer is not None:
            return _edge(writer, seen.writer)
        older = older.before
    later = _later_cells(model, source, seen)
    for newer in later:
        if _is_result_of(effect, newer, part) and newer.writer is not None:
            return _edge(newer.writer, writer)
    before = seen.writer
    if before is not None and before.effect is not None and before.effect.source is not None:
        return _edge(writer, before)
    # The value is neither older nor newer: a later write came early and read this memory before this write; or the bytes are
    # wrong, or belong to other memory.
    for newer in later:
        if newer.writer is not None and (label := _edge(newer.writer, writer)) in _WAITS:
            return label
    return _edge(writer, before) if before is not None and before.verb == "Graph.replay" else writer.verb


def _cell_equals(cell: Cell | None, found: Tensor) -> bool:
    return cell is not None and cell.data is not None and torch.equal(lang.bits(cell.data), lang.bits(found))


def _is_result_of(effect: Effect, cell: Cell, part: Tensor) -> bool:
    if cell.data is None or effect.span is None:
        return False
    return torch.equal(lang.bits(effect.make(cell.data[effect.span.view]).contiguous()), lang.bits(part.contiguous()))


def _later_cells(model: Model, key: Key, seen: Cell) -> list[Cell]:
    cell: Cell | None = model.state.cells[key]
    found = []
    while cell is not None and cell is not seen and cell.data is not seen.data:
        found.append(cell)
        cell = cell.before
    return found[::-1]


def _edge(late: Node, early: Node) -> str:
    """Return the verb that orders node ``late`` after ``early`` on the shortest path, other than the order
    within a stream.
    """
    came: dict[Node, tuple[Node, str] | None] = {late: None}
    waiting = deque([late])
    while waiting:
        node = waiting.popleft()
        if node is early:
            break
        for cause, label in node.causes:
            if cause not in came:
                came[cause] = (node, label)
                waiting.append(cause)
    labels = []
    step = came.get(early)
    while step is not None:
        labels.append(step[1])
        step = came[step[0]]
    named = [label for label in labels if label not in (ORDER, LAUNCH) and label in PROMISES]
    if named:
        return named[0]
    verb = early.verb if early.verb in ("Graph.replay", "Backend.copy_async", "Graph.update_params") else late.verb
    return verb if verb in PROMISES and verb != "Backend.on" else "Stream"


def script(program: lang.DeviceProgram, backend: str) -> str:
    """Return the source of a script that runs the failing program by itself."""
    steps = "".join(f"        {step!r},\n" for step in program.steps)
    return (
        f'"""Run it: python failing.py --backend {backend}"""\n\n'
        f"from {lang.__name__} import *\n"
        f"from outrider_conformance.programs.trial import main\n\n"
        f"program = {lang.DeviceProgram.__name__}(\n    streams={program.streams},\n"
        f"    buffers={program.buffers!r},\n    slots={program.slots!r},\n"
        f"    events={program.events},\n    flags={program.flags},\n"
        f"    steps=(\n{steps}    ),\n)\n\n"
        f'if __name__ == "__main__":\n    main(program)\n'
    )


def report_text(model: Model, error: BaseException, backend: str) -> str:
    """Return the text of the report about a failing program."""
    member, words = broken_promise(model, error)
    kind = "device error" if isinstance(error.__cause__, DeviceError) else "outcome"
    count = sum(1 for _ in lang.walk(model.program.steps))
    return (
        f"{member} promises: “{words}” A random program of {count} steps ends in an {kind} that the contract doesn't "
        f"allow:\n{error}\n\nThe program, to be saved as failing.py:\n\n{script(model.program, backend)}"
    )


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
    if isinstance(step, lang.ScopeStep):
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
