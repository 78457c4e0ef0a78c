"""Stages of an iteration in a timeline. The fences that the engine records and waits for mark where a stage starts and ends.

The command ``outrider fences`` lists the fences. A script that doesn't use these fences has no stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider_trace.timeline import FenceMark, Timeline


@dataclass(frozen=True, slots=True)
class StageFence:
    """The start or the end of a stage: the position where its stream waits for a fence or records it."""

    fence: str
    waited: bool
    """True: the stream waits for the fence. False: the stream records it."""


@dataclass(frozen=True, slots=True)
class StageSpan:
    """One run of a stage, from the start of its first operation to the end of its last operation, in microseconds."""

    stream: str
    name: str
    start: float
    end: float


def _waits(fence: str) -> StageFence:
    return StageFence(fence, True)


def _records(fence: str) -> StageFence:
    return StageFence(fence, False)


STAGES: tuple[tuple[str, str, StageFence, StageFence], ...] = (
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
"""(stage, stream, start, end) of each stage of an iteration that isn't fused."""

ITERATION = "iteration"
"""Name of the stage *gather* in an iteration that has no further stage: a fused iteration, or a prefill iteration."""


def stage_spans(timeline: Timeline) -> list[StageSpan]:
    """Return the stages that ran in ``timeline``, stream by stream. A stage without an operation is left out."""
    stages: list[StageSpan] = []
    for stream, spans in timeline.spans.items():
        marks = [mark for mark in timeline.marks if mark.stream == stream]
        for name, first, end in _stage_ranges(stream, marks):
            if first < end <= len(spans):
                stages.append(StageSpan(stream, name, spans[first].start, spans[end - 1].end))
    return stages


def _stage_ranges(stream: str, marks: list[FenceMark]) -> Iterator[tuple[str, int, int]]:
    """Yield (stage, index of its first span, index after its last span) for each run of a stage."""
    for name, stage_stream, start_edge, end_edge in STAGES:
        if stage_stream != stream:
            continue
        first_span: int | None = None
        for number, mark in enumerate(marks):
            edge = StageFence(mark.fence, mark.waited)
            if edge == end_edge and first_span is not None:
                yield (name if name != "gather" or _has_planned_stages(marks[number:]) else ITERATION), first_span, mark.at
                first_span = None
            if edge == start_edge:
                first_span = mark.at


def _has_planned_stages(marks: list[FenceMark]) -> bool:
    """Return whether the iteration waits for a plan before the next iteration starts."""
    for mark in marks:
        if mark.waited and mark.fence in ("plan_ready", "inputs_ready"):
            return mark.fence == "plan_ready"
    return True
