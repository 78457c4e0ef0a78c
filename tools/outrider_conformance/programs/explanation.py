"""Explain a failing program: the broken promise of the backend interface, and the program as a script."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.device import DeviceError
from outrider_conformance.programs import language as lang
from outrider_conformance.programs.execution import StepFailed, WrongProgramValue
from outrider_conformance.programs.model import LAUNCH, ORDER, Cell, Effect, Expectation, Key, Model, Node
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
        lang.RecordStep: "Stream.record",
        lang.WaitStep: "Stream.wait",
        lang.Lend: "Backend.keep_alive",
        lang.CaptureStep: "Backend.capture",
        lang.ReplayStep: "Graph.replay",
        lang.Update: "Graph.update_params",
        lang.DropGraph: "graph",
        lang.ReplaceEventStep: "event",
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
        if isinstance(step, lang.Copy) and step.asynchronous:
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
