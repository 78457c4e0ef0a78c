"""Which stage of an iteration a stretch of a stream belongs to, by the fences that the engine records and waits for.

The names are those of ``outrider fences``. A script without these fences has no stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider_trace.timeline import Mark, Timeline


@dataclass(frozen=True, slots=True)
class Edge:
    """One end of a stage: where its stream waits for a fence, or records it."""

    fence: str
    waited: bool


@dataclass(frozen=True, slots=True)
class Band:
    """A stage while it ran: from the start of its first operation to the end of its last, in microseconds."""

    stream: str
    name: str
    start: float
    end: float


def _waits(fence: str) -> Edge:
    return Edge(fence, True)


def _records(fence: str) -> Edge:
    return Edge(fence, False)


STAGES: tuple[tuple[str, str, Edge, Edge], ...] = (
    ("upload", "schedule", _records("inputs_ready"), _waits("shared_reads_done")),
    ("unpack", "schedule", _waits("shared_reads_done"), _waits("published")),
    ("resolve lengths", "schedule", _waits("published"), _records("inputs_ready")),
    ("gather", "forward", _waits("inputs_ready"), _records("shared_reads_done")),
    ("draft", "forward", _records("shared_reads_done"), _records("draft_outputs_ready")),
    ("verify", "forward", _waits("plan_ready"), _records("published")),
    ("extend", "forward", _waits("extend_plan_ready"), _records("results_ready")),
    ("plan 1", "plan", _waits("shared_reads_done"), _waits("draft_outputs_ready")),
    ("plan 2", "plan", _waits("draft_outputs_ready"), _records("plan_ready")),
    ("plan extend", "plan", _waits("accept_ready"), _records("extend_plan_ready")),
    ("copy lengths", "copy", _waits("published"), _records("lengths_on_host")),
    ("copy", "copy", _waits("results_ready"), _records("results_copied")),
)
"""(stage, stream, where it begins, where it ends) of a staged iteration."""

ITERATION = "iteration"
"""What gather is called where it's all there is: a fused iteration, or one of prompts alone."""


def bands(timeline: Timeline) -> list[Band]:
    """The stages that ran in ``timeline``, by stream; one that had no operation there is left out."""
    found: list[Band] = []
    for stream, lane in timeline.spans.items():
        marks = [mark for mark in timeline.marks if mark.stream == stream]
        for name, first, last in _stretches(stream, marks):
            if first < last <= len(lane):
                found.append(Band(stream, name, lane[first].start, lane[last - 1].end))
    return found


def _stretches(stream: str, marks: list[Mark]) -> Iterator[tuple[str, int, int]]:
    """(stage, its first span, the span after its last)."""
    for name, of, begins, ends in STAGES:
        if of != stream:
            continue
        since: int | None = None
        for number, mark in enumerate(marks):
            edge = Edge(mark.fence, mark.waited)
            if edge == ends and since is not None:
                yield (name if name != "gather" or _goes_on(marks[number:]) else ITERATION), since, mark.at
                since = None
            if edge == begins:
                since = mark.at


def _goes_on(marks: list[Mark]) -> bool:
    """Whether the iteration waits for a plan before the next one begins."""
    for mark in marks:
        if mark.waited and mark.fence in ("plan_ready", "inputs_ready"):
            return mark.fence == "plan_ready"
    return True
