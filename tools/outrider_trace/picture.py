"""An SVG picture of a timeline: a lane for each stream, bars for operations, brackets for stages and arrows for fences.

The picture has light and dark colours, and its text is readable at the width of a README. :func:`render_page` puts the
picture into a self-contained HTML page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import permutations
from pathlib import Path

from outrider_trace.stages import stage_spans
from outrider_trace.timeline import Timeline, WaitArrow

WIDTH = 960
PAGE_WIDTH = 1400
"""Widths of a picture, alone and on a page. All sizes are in pixels."""
_LEFT_MARGIN = 76
_RIGHT_MARGIN = 16
_TOP_MARGIN = 30
_STAGES_HEIGHT = 34
"""Height above the bars of a lane, for two rows of stage names and the brackets."""
_BAR_HEIGHT = 20
_FENCES_HEIGHT = 48
"""Height below the bars of a lane, for the names of fences."""
_LANE_HEIGHT = _STAGES_HEIGHT + _BAR_HEIGHT + _FENCES_HEIGHT
_LEGEND_HEIGHT = 30
_ROW_HEIGHT = 14
_CHARACTER_WIDTH = 6.4
"""Approximate width of a character in a font size of 12 pixels."""
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

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark"><title>{title}</title>
<style>body{{font:13px sans-serif;margin:16px}}table{{border-collapse:collapse;margin-top:16px}}
td,th{{padding:2px 10px;text-align:left;border-bottom:1px solid #8886}}td.n{{text-align:right}}
rect.op:hover{{stroke:currentColor;stroke-width:1}}</style></head>
<body><h1 style="font-size:16px">{title}</h1><p>{summary}</p><div style="overflow-x:auto">{svg}</div>{table}</body></html>
"""


@dataclass(frozen=True, slots=True)
class _Arrow:
    """The arrow of a wait between two lanes, in pixels: from (x1, y1) to (x2, y2)."""

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


@dataclass
class _NamePlacement:
    """Positions of names. No name covers another one, and few arrows cross a name."""

    width: int
    """Width of the picture."""
    arrows: list[_Arrow]
    occupied: list[tuple[float, float, float]] = field(default_factory=list)
    """(left, right, baseline) of each placed name and of each bracket."""

    def place(self, text: str, choices: Sequence[tuple[float, float, str]]) -> tuple[float, float, str] | None:
        """Choose a position (x, y, anchor) for ``text`` and mark it as occupied. Return None if no position is free.

        Of the free ``choices``, the method chooses the first with the fewest crossing arrows.
        """
        text_width = len(text) * _CHARACTER_WIDTH + 4
        best: tuple[int, tuple[float, float, str], float] | None = None
        for x, y, anchor in choices:
            left = x - {"start": 0.0, "middle": text_width / 2, "end": text_width}[anchor]
            right = left + text_width
            if left < _LEFT_MARGIN - 10 or right > self.width:
                continue
            if any(right > a and b > left and abs(y - baseline) < _ROW_HEIGHT - 1 for a, b, baseline in self.occupied):
                continue
            num_crossings = sum(arrow.crosses(left, right, y) for arrow in self.arrows)
            if best is None or num_crossings < best[0]:
                best = num_crossings, (x, y, anchor), left
        if best is None:
            return None
        _, (x, y, anchor), left = best
        self.occupied.append((left, left + text_width, y))
        return x, y, anchor


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
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" class="head"/></marker></defs>'
    )
    paper = f'<rect class="paper" width="{width}" height="{drawing.height}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{_STYLE}{marker}{paper}{"".join(parts)}</svg>'


class _PictureParts:
    """The parts of a picture. Each part is a list of SVG elements."""

    def __init__(self, timeline: Timeline, width: int) -> None:
        self.timeline, self.width = timeline, width
        self.rows = {name: number for number, name in enumerate(sort_lanes(timeline))}
        self.height = _TOP_MARGIN + _LANE_HEIGHT * max(1, len(self.rows)) - _FENCES_HEIGHT // 2 + _LEGEND_HEIGHT
        self.scale = (width - _LEFT_MARGIN - _RIGHT_MARGIN) / (timeline.end_time or 1.0)
        self.arrows = [arrow for wait in timeline.waits[:_MAX_DRAWN] if (arrow := self._arrow(wait)) is not None]
        self.names = _NamePlacement(width, self.arrows if len(self.arrows) <= _MAX_NAMED else [])

    def x(self, time: float) -> float:
        """Return the x coordinate of a time in microseconds."""
        return _LEFT_MARGIN + time * self.scale

    def top(self, stream: str) -> int:
        """Return the y coordinate of the upper edge of a stream's bars."""
        return _TOP_MARGIN + _STAGES_HEIGHT + self.rows[stream] * _LANE_HEIGHT

    def grid(self) -> list[str]:
        """Draw nine times, each with a vertical line."""
        parts = []
        end = self.timeline.end_time or 1.0
        for tick in range(9):
            x = self.x(end * tick / 8)
            anchor = "end" if tick == 8 else "middle"
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="20" x2="{x:.1f}" y2="{self.height - _LEGEND_HEIGHT}"/>')
            parts.append(f'<text class="faint" x="{x:.1f}" y="14" text-anchor="{anchor}">{end * tick / 8:.0f} µs</text>')
        return parts

    def lanes(self) -> list[str]:
        """Draw the name of each stream and a bar for each of its operations."""
        parts = []
        num_drawn = 0
        for name, row in self.rows.items():
            top = self.top(name)
            parts.append(f'<text class="text" x="8" y="{top + 14}" font-weight="600">{escape(name)}</text>')
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
                if width > 6.5 * len(base_name):
                    parts.append(
                        f'<text class="in" x="{x + 3:.2f}" y="{top + 14}" pointer-events="none">{escape(base_name)}</text>'
                    )
        return parts

    def stages(self) -> list[str]:
        """Draw a bracket above the bars of each stage, and its name."""
        parts = []
        shown = [band for band in stage_spans(self.timeline) if band.stream in self.rows]
        for band in shown:  # keep names off the brackets
            self.names.occupied.append((self.x(band.start), self.x(band.end), self.top(band.stream) + 4))
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
            position = self.names.place(band.name, choices)
            if position is not None:
                parts.append(self._name("text of", band.name, position))
        return parts

    def fences(self) -> list[str]:
        """Draw an arrow for each wait, from the record to the first operation after the wait, and the fence's name."""
        lines, names = [], []
        for arrow in self.arrows:
            wait = arrow.wait
            label = f"{wait.event} generation {wait.generation}, waited for at {_relative_location(wait.location)}"
            lines.append(
                f'<line class="fence" x1="{arrow.x1:.2f}" y1="{arrow.y1}" x2="{arrow.x2:.2f}" y2="{arrow.y2}" '
                f'stroke-width="1.3" marker-end="url(#a)"><title>{escape(label)}</title></line>'
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
        """Draw the fence's name next to the arrow, in the space below one of the lanes that the arrow passes."""
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
        position = self.names.place(name, choices)
        return [] if position is None else [self._name("name", name, position)]

    def legend(self) -> list[str]:
        """Draw the meaning of bars, brackets and arrows."""
        y = self.height - 12
        parts = [f'<rect class="l0" x="{_LEFT_MARGIN}" y="{y - 10}" width="12" height="12" rx="1.5"/>']
        parts.append(f'<text class="faint" x="{_LEFT_MARGIN + 18}" y="{y}">an operation</text>')
        x = _LEFT_MARGIN + 120
        parts.append(f'<path class="stage" d="M{x},{y - 3} V{y - 7} H{x + 26} V{y - 3}"/>')
        parts.append(f'<text class="faint" x="{x + 32}" y="{y}">a stage</text>')
        x += 104
        parts.append(
            f'<line class="fence" x1="{x}" y1="{y - 4}" x2="{x + 26}" y2="{y - 4}" stroke-width="1.3" marker-end="url(#a)"/>'
        )
        parts.append(
            f'<text class="faint" x="{x + 32}" y="{y}">a fence: from its record to the work that waited for it</text>'
        )
        return parts

    @staticmethod
    def _name(kind: str, text: str, position: tuple[float, float, str]) -> str:
        x, y, anchor = position
        return f'<text class="{kind} over" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def render_page(timeline: Timeline, title: str) -> str:
    """Return an HTML page with the picture, and with a table of the costs of the waits."""
    count = sum(len(lane) for lane in timeline.spans.values())
    summary = (
        f"{count} operations on {len(timeline.spans)} streams in {timeline.end_time:.1f} us; {len(timeline.waits)} waits "
        "between streams. Bars are operations, brackets stages, arrows fences; point at one to read it."
    )
    rows = "".join(
        f"<tr><td>{escape(cost.stream)}</td><td>{escape(cost.event)}</td><td>{escape(cost.location)}</td>"
        f'<td class="n">{cost.count}</td><td class="n">{cost.stall_us:.1f}</td><td class="n">{cost.critical_us:.1f}</td></tr>'
        for cost in timeline.costs()[:100]
    )
    head = "<tr><th>stream</th><th>waits for</th><th>at</th><th>times</th><th>stalled, us</th><th>critical, us</th></tr>"
    table = f"<table>{head}{rows}</table>" if rows else ""
    return _PAGE.format(title=escape(title), summary=escape(summary), svg=render_svg(timeline, PAGE_WIDTH), table=table)
