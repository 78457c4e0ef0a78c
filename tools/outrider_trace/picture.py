"""An SVG picture of a timeline: a lane for each stream, bars for operations, brackets for stages and arrows for fences.

The picture has light and dark colours, and its text is readable at the width of a README. :func:`render_page` puts the
picture into a self-contained HTML page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import permutations
from pathlib import Path

from outrider_trace.timeline import FenceMark, OperationSpan, Timeline, WaitArrow

StageFence = tuple[str, bool]
"""The start or the end of a stage on a stream: a fence, and True if the stream waits for it there, False if it records it."""


def _waits(fence: str) -> StageFence:
    return fence, True


def _records(fence: str) -> StageFence:
    return fence, False


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


def stage_spans(timeline: Timeline) -> list[OperationSpan]:
    """Return the stages that ran in ``timeline``, stream by stream. A stage without an operation is left out.

    A span lasts from the start of the stage's first operation to the end of its last one.
    """
    stages: list[OperationSpan] = []
    for stream, spans in timeline.spans.items():
        marks = [mark for mark in timeline.marks if mark.stream == stream]
        for name, first, end in _stage_ranges(stream, marks):
            if first < end <= len(spans):
                stages.append(OperationSpan(stream, name, spans[first].start, spans[end - 1].end))
    return stages


def _stage_ranges(stream: str, marks: list[FenceMark]) -> Iterator[tuple[str, int, int]]:
    """Yield (stage, index of its first span, index after its last span) for each run of a stage."""
    for name, stage_stream, start_edge, end_edge in STAGES:
        if stage_stream != stream:
            continue
        first_span: int | None = None
        for number, mark in enumerate(marks):
            edge = (mark.fence, mark.waited)
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


_REPORT_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #f6f8fa; --text: #1f2328; --dim: #59636e; --back: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3d444d; --soft: #151b23; --text: #f0f6fc; --dim: #9198a1; --back: #0d1117; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1rem 4rem; color: var(--text); background: var(--back); overflow-wrap: anywhere;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.25rem 0 .5rem; }
p { margin: .25rem 0 .75rem; } .dim { color: var(--dim); }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .4rem .75rem .4rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; } th { font-weight: 600; overflow-wrap: normal; }
th:last-child, td:last-child { padding-right: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; } td.number { white-space: nowrap; }
code, pre { font: .875em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
"""
_MARKED = re.compile(r"(?::[a-z:]+:)?(`{1,2})(?:~(?:[\w.]*\.)?)?(?P<code>[^`]+)\1")
"""A pattern for code in a text between one or two backticks, after an optional docstring role and ``~`` with a module."""


def html_page(title: str, body: str, style: str = "") -> str:
    """Return a page. ``body`` is HTML below the title, ``style`` is CSS in addition to that of every page."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}<title>{escape(title)}</title>\n'
        f"<style>{_REPORT_STYLE}{style}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def prose(text: str) -> str:
    """Return ``text`` as HTML. Code between backticks becomes a ``code`` element."""
    return _MARKED.sub(r"<code>\g<code></code>", escape(text, quote=False))


WIDTH = 960
PAGE_WIDTHS = {"wide": 1248, "narrow": 368}
"""Width of a picture in pixels, alone and on a page, by the style class that selects it."""
_MIN_LEFT_MARGIN = 76
_RIGHT_MARGIN = 16
_TOP_MARGIN = 30
_STAGES_HEIGHT = 34
"""Pixels above the bars of a lane, for two rows of stage names and the brackets."""
_BAR_HEIGHT = 20
_FENCES_HEIGHT = 48
"""Pixels below the bars of a lane, for the names of fences."""
_LANE_HEIGHT = _STAGES_HEIGHT + _BAR_HEIGHT + _FENCES_HEIGHT
_LEGEND_HEIGHT = 30
_ROW_HEIGHT = 14
_CHARACTER_WIDTH = 6.9
_BOLD_CHARACTER_WIDTH = 7.2
"""Approximate width in pixels of a bold character in a font size of 12 pixels, and of a normal one."""
_TICK_DISTANCE = 120
_MAX_DRAWN = 20_000
"""Maximum number of bars and of arrows in a picture."""
_MAX_NAMED = 120
"""With more stages or fences than this, their names are only shown as tooltips."""
_MAX_SORTED_LANES = 6

_STYLE = """<style>
.paper{fill:#fff}.text{fill:#1f2328}.faint{fill:#656d76}.grid{stroke:#d8dee4}.fence{stroke:#cf222e}.head{fill:#cf222e}
.name{fill:#a40e26}.stage{stroke:#1f2328;fill:none}.over{stroke:#fff}.l0{fill:#0969da}.l1{fill:#bc4c00}.l2{fill:#1a7f37}
.l3{fill:#8250df}.l4{fill:#bf3989}.l5{fill:#6e7781}
text{font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
.in{fill:#fff;font-size:11px}.name,.text.of{paint-order:stroke;stroke-width:3px;stroke-linejoin:round}
@media(prefers-color-scheme:dark){.paper{fill:#0d1117}.text{fill:#e6edf3}.faint{fill:#8d96a0}.grid{stroke:#30363d}
.fence{stroke:#ff7b72}.head{fill:#ff7b72}.name{fill:#ffa198}.stage{stroke:#e6edf3}.over{stroke:#0d1117}.l0{fill:#58a6ff}
.l1{fill:#f0883e}.l2{fill:#3fb950}.l3{fill:#a371f7}.l4{fill:#f778ba}.l5{fill:#8b949e}.in{fill:#0d1117}}
</style>"""

_PAGE_STYLE = """
body { max-width: 80rem; font-size: .875rem; } h1 { font-size: 1.25rem; }
svg { max-width: 100%; height: auto; } .narrow { display: none; } rect.op:hover { stroke: currentColor; stroke-width: 1; }
@media (max-width: 56rem) { .wide { display: none; } .narrow { display: block; } }
"""


@dataclass(frozen=True, slots=True)
class _Arrow:
    """The arrow of a wait between two lanes, from (x1, y1) to (x2, y2) in pixels."""

    wait: WaitArrow
    x1: float
    y1: float
    x2: float
    y2: float

    def x_at(self, y: float) -> float:
        """Return the arrow's x coordinate at the height ``y``."""
        return self.x1 + (self.x2 - self.x1) * (y - self.y1) / (self.y2 - self.y1)

    def crosses(self, left: float, right: float, y: float) -> bool:
        """Return whether the arrow crosses a line of text from ``left`` to ``right`` with the baseline ``y``."""
        upper, lower = max(y - 11, min(self.y1, self.y2)), min(y + 3, max(self.y1, self.y2))
        if upper > lower:
            return False
        ends = sorted((self.x_at(upper), self.x_at(lower)))
        return ends[0] < right and left < ends[1]


def sort_lanes(timeline: Timeline) -> list[str]:
    """Return the streams from top to bottom, sorted so that arrows cross few lanes. More than six streams aren't sorted."""
    names = list(timeline.spans)
    pairs = {frozenset((wait.source, wait.stream)) for wait in timeline.waits}
    if len(names) > _MAX_SORTED_LANES:
        return names

    def total_distance(lanes: Sequence[str]) -> int:
        return sum(abs(lanes.index(a) - lanes.index(b)) for a, b in map(tuple, pairs) if a in lanes and b in lanes)

    return min(map(list, permutations(names)), key=total_distance)


def _relative_location(location: str) -> str:
    """Return a source location relative to the working directory."""
    return location.removeprefix(f"{Path.cwd()}/")


def render_svg(timeline: Timeline, width: int = WIDTH) -> str:
    """Return the picture as an SVG document, ``width`` pixels wide."""
    drawing = _PictureParts(timeline, width)
    parts = [*drawing.grid(), *drawing.lanes(), *drawing.stages(), *drawing.fences(), *drawing.legend()]
    size = f'width="{width}" height="{drawing.height}" viewBox="0 0 {width} {drawing.height}"'
    marker = (
        f'<defs><marker id="{drawing.head}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0,0 L8,4 L0,8 z" class="head"/></marker></defs>'
    )
    paper = f'<rect class="paper" width="{width}" height="{drawing.height}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{_STYLE}{marker}{paper}{"".join(parts)}</svg>'


class _PictureParts:
    """The parts of a picture, each a list of SVG elements."""

    def __init__(self, timeline: Timeline, width: int) -> None:
        self.timeline, self.width = timeline, width
        self.rows = {name: number for number, name in enumerate(sort_lanes(timeline))}
        self.bottom = _TOP_MARGIN + _LANE_HEIGHT * max(1, len(self.rows)) - _FENCES_HEIGHT // 2
        self.has_two_legend_lines = width < WIDTH
        self.height = self.bottom + _LEGEND_HEIGHT + _ROW_HEIGHT * self.has_two_legend_lines
        self.head = f"head{width}"
        longest = int(17 + _BOLD_CHARACTER_WIDTH * max(map(len, self.rows), default=0))
        self.left_margin = min(max(_MIN_LEFT_MARGIN, longest), width // 3)
        self.scale = (width - self.left_margin - _RIGHT_MARGIN) / (timeline.end_time or 1.0)
        self.arrows = [arrow for wait in timeline.waits[:_MAX_DRAWN] if (arrow := self._arrow(wait)) is not None]
        self.occupied: list[tuple[float, float, float]] = []
        """(left, right, baseline) of each placed name and of each bracket."""

    def x(self, time: float) -> float:
        """Return the x coordinate of a time in microseconds."""
        return self.left_margin + time * self.scale

    def top(self, stream: str) -> int:
        """Return the y coordinate of the upper edge of a stream's bars."""
        return _TOP_MARGIN + _STAGES_HEIGHT + self.rows[stream] * _LANE_HEIGHT

    def grid(self) -> list[str]:
        """Return the elements of the time axis: times at regular distances, each with a vertical line."""
        parts = []
        end = self.timeline.end_time or 1.0
        count = max(2, self.width // _TICK_DISTANCE)
        digits = 0 if end >= 2 * count else 2
        for tick in range(count + 1):
            x = self.x(end * tick / count)
            anchor = "end" if tick == count else "middle"
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="20" x2="{x:.1f}" y2="{self.bottom}"/>')
            label = f"{end * tick / count:.{digits}f} µs"
            parts.append(f'<text class="faint" x="{x:.1f}" y="14" text-anchor="{anchor}">{label}</text>')
        return parts

    def lanes(self) -> list[str]:
        """Return the elements of the lanes: the name of each stream and a bar for each of its operations."""
        parts = []
        num_drawn = 0
        for name, row in self.rows.items():
            top = self.top(name)
            room = int((self.left_margin - 16) / _BOLD_CHARACTER_WIDTH)
            label = escape(name) if len(name) <= room else f"{escape(name[: room - 1])}…<title>{escape(name)}</title>"
            parts.append(f'<text class="text" x="8" y="{top + 14}" font-weight="600">{label}</text>')
            for span in self.timeline.spans[name]:
                num_drawn += 1
                if num_drawn > _MAX_DRAWN:
                    break
                x, width = self.x(span.start), max((span.end - span.start) * self.scale - 0.6, 0.8)
                label = f"{span.name}: {span.start:.2f} to {span.end:.2f} us {_relative_location(span.location)}"
                parts.append(
                    f'<rect class="op l{row % 6}" x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_BAR_HEIGHT}" rx="1.5">'
                    f"<title>{escape(label)}</title></rect>"
                )
                base_name = span.name.split("::")[-1]
                if width > _CHARACTER_WIDTH * len(base_name) + 6:
                    parts.append(
                        f'<text class="in" x="{x + 3:.2f}" y="{top + 14}" pointer-events="none">{escape(base_name)}</text>'
                    )
        return parts

    def stages(self) -> list[str]:
        """Return the elements of the stages: a bracket above the bars of each stage, and its name."""
        parts = []
        shown = [band for band in stage_spans(self.timeline) if band.stream in self.rows]
        for band in shown:  # keep names off the brackets
            self.occupied.append((self.x(band.start), self.x(band.end), self.top(band.stream) + 4))
        # Short stages are placed first, because their names have the fewest positions.
        for band in sorted(shown, key=lambda each: each.end - each.start):
            y = self.top(band.stream) - 5
            left, right = self.x(band.start), max(self.x(band.end), self.x(band.start) + 3)
            parts.append(
                f'<path class="stage" d="M{left:.1f},{y + 3} V{y} H{right:.1f} V{y + 3}">'
                f"<title>{escape(band.name)}: {band.start:.1f} to {band.end:.1f} us</title></path>"
            )
            if len(shown) > _MAX_NAMED:
                continue
            middle = (left + right) / 2
            choices = [
                (x, y - 4 - row * _ROW_HEIGHT, anchor)
                for row in range(2)
                for x, anchor in ((middle, "middle"), (left, "start"), (right, "end"))
            ]
            choices += [(right + 4, y + 3, "start"), (left - 4, y + 3, "end")]
            position = self._place_name(band.name, choices)
            if position is not None:
                parts.append(self._name("text of", band.name, position))
        return parts

    def fences(self) -> list[str]:
        """Return the elements of the fences: an arrow for each wait, from the record to the first operation after the wait,
        and the fence's name.
        """
        lines, names = [], []
        for arrow in self.arrows:
            wait = arrow.wait
            label = f"{wait.event} generation {wait.generation}, waited for at {_relative_location(wait.location)}"
            lines.append(
                f'<line class="fence" x1="{arrow.x1:.2f}" y1="{arrow.y1}" x2="{arrow.x2:.2f}" y2="{arrow.y2}" '
                f'stroke-width="1.3" marker-end="url(#{self.head})"><title>{escape(label)}</title></line>'
            )
            if len(self.arrows) <= _MAX_NAMED:
                names += self._fence_name(arrow)
        return [*lines, *names]

    def _arrow(self, wait: WaitArrow) -> _Arrow | None:
        """Return the arrow of a wait, or None if one of its ends isn't in the timeline."""
        ends = self.timeline.wait_times(wait)
        if ends is None or wait.source not in self.rows:
            return None
        points_down = self.rows[wait.stream] > self.rows[wait.source]
        y1 = self.top(wait.source) + (_BAR_HEIGHT if points_down else 0)
        y2 = self.top(wait.stream) + (0 if points_down else _BAR_HEIGHT)
        return _Arrow(wait, self.x(ends[0]), y1, self.x(ends[1]), y2)

    def _fence_name(self, arrow: _Arrow) -> list[str]:
        """Return the elements of the fence's name next to the arrow, in the space below one of the lanes that the arrow
        passes.
        """
        wait = arrow.wait
        upper = min(self.rows[wait.source], self.rows[wait.stream])
        lower = max(self.rows[wait.source], self.rows[wait.stream])
        choices = []
        for row in range(upper, lower):
            base = _TOP_MARGIN + _STAGES_HEIGHT + row * _LANE_HEIGHT + _BAR_HEIGHT
            for y in (base + 16, base + 30, base + 44):
                x = arrow.x_at(y - 4)
                choices += [(x + 5, y, "start"), (x - 5, y, "end")]
        name = wait.event.partition("[")[0]
        position = self._place_name(name, choices)
        return [] if position is None else [self._name("name", name, position)]

    def _place_name(self, text: str, choices: Sequence[tuple[float, float, str]]) -> tuple[float, float, str] | None:
        """Choose a position (x, y, anchor) for ``text`` and mark it as occupied. Return None if no position is free.

        No name covers another one. Of the free ``choices``, the method chooses the first with the fewest crossing arrows.
        """
        text_width = len(text) * _CHARACTER_WIDTH + 4
        arrows = self.arrows if len(self.arrows) <= _MAX_NAMED else []
        best: tuple[int, tuple[float, float, str], float] | None = None
        for x, y, anchor in choices:
            left = x - {"start": 0.0, "middle": text_width / 2, "end": text_width}[anchor]
            right = left + text_width
            if left < self.left_margin - 10 or right > self.width:
                continue
            if any(right > a and b > left and abs(y - baseline) < _ROW_HEIGHT - 1 for a, b, baseline in self.occupied):
                continue
            num_crossings = sum(arrow.crosses(left, right, y) for arrow in arrows)
            if best is None or num_crossings < best[0]:
                best = num_crossings, (x, y, anchor), left
        if best is None:
            return None
        _, (x, y, anchor), left = best
        self.occupied.append((left, left + text_width, y))
        return x, y, anchor

    def legend(self) -> list[str]:
        """Return the elements of the legend: the meaning of bars, brackets and arrows."""
        x, y = 8 if self.has_two_legend_lines else self.left_margin, self.bottom + 18
        parts = [f'<rect class="l0" x="{x}" y="{y - 10}" width="12" height="12" rx="1.5"/>']
        parts.append(f'<text class="faint" x="{x + 18}" y="{y}">an operation</text>')
        stage = x + 120
        parts.append(f'<path class="stage" d="M{stage},{y - 3} V{y - 7} H{stage + 26} V{y - 3}"/>')
        parts.append(f'<text class="faint" x="{stage + 32}" y="{y}">a stage</text>')
        x, y = (x, y + _ROW_HEIGHT) if self.has_two_legend_lines else (x + 224, y)
        parts.append(
            f'<line class="fence" x1="{x}" y1="{y - 4}" x2="{x + 26}" y2="{y - 4}" stroke-width="1.3" '
            f'marker-end="url(#{self.head})"/>'
        )
        parts.append(f'<text class="faint" x="{x + 32}" y="{y}">a fence: from its record to the waiting work</text>')
        return parts

    @staticmethod
    def _name(kind: str, text: str, position: tuple[float, float, str]) -> str:
        x, y, anchor = position
        return f'<text class="{kind} over" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def render_page(timeline: Timeline, title: str) -> str:
    """Return an HTML page with the picture, and with a table of the costs of the waits."""
    summary = (
        f"{timeline.num_operations} operations on {len(timeline.spans)} streams in {timeline.end_time:.1f} us; "
        f"{len(timeline.waits)} waits between streams. Bars are operations, brackets stages, arrows fences; "
        "point at one to read it."
    )
    rows = "".join(
        f'<tr><td>{escape(cost.stream)}: {escape(cost.event)}<br><span class="dim">'
        f'{escape(_relative_location(cost.location))}</span></td><td class="number">{cost.count}</td>'
        f'<td class="number">{cost.stall_us:.1f}</td><td class="number">{cost.critical_us:.1f}</td></tr>'
        for cost in timeline.costs()[:100]
    )
    numbers = "".join(f'<th class="number">{title}</th>' for title in ("times", "stalled, µs", "critical, µs"))
    table = f"<table><tr><th>stream: what it waits for</th>{numbers}</tr>{rows}</table>" if rows else ""
    pictures = "".join(f'<div class="{name}">{render_svg(timeline, width)}</div>' for name, width in PAGE_WIDTHS.items())
    return html_page(title, f"<p>{escape(summary)}</p>{pictures}{table}", _PAGE_STYLE)
