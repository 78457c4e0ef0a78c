"""A timeline as a picture: a lane for each stream, bars for operations, brackets for stages, arrows for fences.

The picture has its own light and dark colours, and its text is readable in the column of a README. :func:`page` puts it into
a self-contained page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import permutations
from pathlib import Path

from outrider_trace.stages import bands
from outrider_trace.timeline import Timeline, Wait

WIDTH = 960
PAGE_WIDTH = 1400
_LEFT = 76
_RIGHT = 16
_TOP = 30
_NAMES = 34
"""Height above the bars of a lane: two rows of stages' names and a bracket."""
_BAR = 20
_GAP = 48
"""Height below the bars of a lane, for the names of fences."""
_LANE = _NAMES + _BAR + _GAP
_LEGEND = 30
_ROW = 14
_CHARACTER = 6.4
"""Width of a character of 12 pixels, about."""
_MOST = 20_000
_MOST_NAMED = 120
"""More stages or fences than this are named where one points at them, and not in the picture."""
_LANES_SORTED = 6

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
    """A wait between two lanes, in pixels."""

    wait: Wait
    x1: float
    y1: float
    x2: float
    y2: float

    def at(self, y: float) -> float:
        """Where it is at a height."""
        return self.x1 + (self.x2 - self.x1) * (y - self.y1) / (self.y2 - self.y1)

    def crosses(self, left: float, right: float, y: float) -> bool:
        """Whether it runs through a line of text."""
        upper, lower = max(y - 11, min(self.y1, self.y2)), min(y + 3, max(self.y1, self.y2))
        if upper > lower:
            return False
        ends = sorted((self.at(upper), self.at(lower)))
        return ends[0] < right and left < ends[1]


@dataclass
class _Names:
    """Places names so that none covers another, and arrows run through few of them."""

    width: int
    arrows: list[_Arrow]
    taken: list[tuple[float, float, float]] = field(default_factory=list)

    def place(self, text: str, choices: Sequence[tuple[float, float, str]]) -> tuple[float, float, str] | None:
        """The best of ``choices``, (x, y, anchor), where ``text`` fits, the first of equals; None where it fits nowhere."""
        long = len(text) * _CHARACTER + 4
        best: tuple[int, tuple[float, float, str], float] | None = None
        for x, y, anchor in choices:
            left = x - {"start": 0.0, "middle": long / 2, "end": long}[anchor]
            if left < _LEFT - 10 or left + long > self.width:
                continue
            if any(left + long > a and b > left and abs(y - at) < _ROW - 1 for a, b, at in self.taken):
                continue
            crossed = sum(arrow.crosses(left, left + long, y) for arrow in self.arrows)
            if best is None or crossed < best[0]:
                best = crossed, (x, y, anchor), left
        if best is None:
            return None
        _, (x, y, anchor), left = best
        self.taken.append((left, left + long, y))
        return x, y, anchor


def order(timeline: Timeline) -> list[str]:
    """The streams from top to bottom, so that fences cross few lanes between; up to six are sorted."""
    names = list(timeline.spans)
    pairs = {frozenset((wait.source, wait.stream)) for wait in timeline.waits}
    if len(names) > _LANES_SORTED:
        return names

    def crossed(lanes: Sequence[str]) -> int:
        return sum(abs(lanes.index(a) - lanes.index(b)) for a, b in map(tuple, pairs) if a in lanes and b in lanes)

    return min(map(list, permutations(names)), key=crossed)


def _short(location: str) -> str:
    """A place in the source, from the working directory."""
    return location.removeprefix(f"{Path.cwd()}/")


def svg(timeline: Timeline, width: int = WIDTH) -> str:
    """The picture alone, ``width`` pixels wide."""
    drawing = _Drawing(timeline, width)
    parts = [*drawing.grid(), *drawing.lanes(), *drawing.stages(), *drawing.fences(), *drawing.legend()]
    size = f'width="{width}" height="{drawing.height}" viewBox="0 0 {width} {drawing.height}"'
    marker = (
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" class="head"/></marker></defs>'
    )
    paper = f'<rect class="paper" width="{width}" height="{drawing.height}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{_STYLE}{marker}{paper}{"".join(parts)}</svg>'


class _Drawing:
    """The parts of a picture, each a list of elements."""

    def __init__(self, timeline: Timeline, width: int) -> None:
        self.timeline, self.width = timeline, width
        self.rows = {name: number for number, name in enumerate(order(timeline))}
        self.height = _TOP + _LANE * max(1, len(self.rows)) - _GAP // 2 + _LEGEND
        self.scale = (width - _LEFT - _RIGHT) / (timeline.end or 1.0)
        self.arrows = [arrow for wait in timeline.waits[:_MOST] if (arrow := self._arrow(wait)) is not None]
        self.names = _Names(width, self.arrows if len(self.arrows) <= _MOST_NAMED else [])

    def x(self, time: float) -> float:
        """Where a time in microseconds is."""
        return _LEFT + time * self.scale

    def top(self, stream: str) -> int:
        """The upper edge of a lane's bars."""
        return _TOP + _NAMES + self.rows[stream] * _LANE

    def grid(self) -> list[str]:
        """Times, and a line for each."""
        parts = []
        end = self.timeline.end or 1.0
        for tick in range(9):
            x = self.x(end * tick / 8)
            anchor = "end" if tick == 8 else "middle"
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="20" x2="{x:.1f}" y2="{self.height - _LEGEND}"/>')
            parts.append(f'<text class="faint" x="{x:.1f}" y="14" text-anchor="{anchor}">{end * tick / 8:.0f} µs</text>')
        return parts

    def lanes(self) -> list[str]:
        """A bar for each operation."""
        parts = []
        drawn = 0
        for name, row in self.rows.items():
            top = self.top(name)
            parts.append(f'<text class="text" x="8" y="{top + 14}" font-weight="600">{escape(name)}</text>')
            for span in self.timeline.spans[name]:
                drawn += 1
                if drawn > _MOST:
                    break
                x, wide = self.x(span.start), max((span.end - span.start) * self.scale - 0.6, 0.8)
                label = f"{span.name}: {span.start:.2f} to {span.end:.2f} us {_short(span.location)}"
                parts.append(
                    f'<rect class="op l{row % 6}" x="{x:.2f}" y="{top}" width="{wide:.2f}" height="{_BAR}" rx="1.5">'
                    f"<title>{escape(label)}</title></rect>"
                )
                short = span.name.split("::")[-1]
                if wide > 6.5 * len(short):
                    parts.append(
                        f'<text class="in" x="{x + 3:.2f}" y="{top + 14}" pointer-events="none">{escape(short)}</text>'
                    )
        return parts

    def stages(self) -> list[str]:
        """A bracket over the bars of each stage, and its name."""
        parts = []
        found = [band for band in bands(self.timeline) if band.stream in self.rows]
        for band in found:  # no name lies on a bracket
            self.names.taken.append((self.x(band.start), self.x(band.end), self.top(band.stream) + 4))
        # The short ones have the fewest places for their names.
        for band in sorted(found, key=lambda each: each.end - each.start):
            y = self.top(band.stream) - 5
            left, right = self.x(band.start), max(self.x(band.end), self.x(band.start) + 3)
            parts.append(
                f'<path class="stage" d="M{left:.1f},{y + 3} V{y} H{right:.1f} V{y + 3}">'
                f"<title>{escape(band.name)}: {band.start:.1f} to {band.end:.1f} us</title></path>"
            )
            if len(found) > _MOST_NAMED:
                continue
            middle = (left + right) / 2
            choices = [
                (x, y - 4 - row * _ROW, anchor)
                for row in range(2)
                for x, anchor in ((middle, "middle"), (left, "start"), (right, "end"))
            ]
            choices += [(right + 4, y + 3, "start"), (left - 4, y + 3, "end")]
            place = self.names.place(band.name, choices)
            if place is not None:
                parts.append(self._name("text of", band.name, place))
        return parts

    def fences(self) -> list[str]:
        """An arrow for each wait, from the record to what ran behind the wait, and the name of the fence."""
        lines, named = [], []
        for arrow in self.arrows:
            wait = arrow.wait
            label = f"{wait.event} generation {wait.generation}, waited for at {_short(wait.location)}"
            lines.append(
                f'<line class="fence" x1="{arrow.x1:.2f}" y1="{arrow.y1}" x2="{arrow.x2:.2f}" y2="{arrow.y2}" '
                f'stroke-width="1.3" marker-end="url(#a)"><title>{escape(label)}</title></line>'
            )
            if len(self.arrows) <= _MOST_NAMED:
                named += self._fence_name(arrow)
        return [*lines, *named]

    def _arrow(self, wait: Wait) -> _Arrow | None:
        """The arrow of a wait; None where one of its ends isn't in the timeline."""
        ends = self.timeline.ends(wait)
        if ends is None or wait.source not in self.rows:
            return None
        down = self.rows[wait.stream] > self.rows[wait.source]
        y1 = self.top(wait.source) + (_BAR if down else 0)
        y2 = self.top(wait.stream) + (0 if down else _BAR)
        return _Arrow(wait, self.x(ends[0]), y1, self.x(ends[1]), y2)

    def _fence_name(self, arrow: _Arrow) -> list[str]:
        """The name beside the arrow, in the space below a lane that the arrow passes."""
        wait = arrow.wait
        upper = min(self.rows[wait.source], self.rows[wait.stream])
        lower = max(self.rows[wait.source], self.rows[wait.stream])
        choices = []
        for row in range(upper, lower):
            base = _TOP + _NAMES + row * _LANE + _BAR
            for y in (base + 16, base + 30, base + 44):
                x = arrow.at(y - 4)
                choices += [(x + 5, y, "start"), (x - 5, y, "end")]
        name = wait.event.partition("[")[0]
        place = self.names.place(name, choices)
        return [] if place is None else [self._name("name", name, place)]

    def legend(self) -> list[str]:
        """What bars, brackets and arrows are."""
        y = self.height - 12
        parts = [f'<rect class="l0" x="{_LEFT}" y="{y - 10}" width="12" height="12" rx="1.5"/>']
        parts.append(f'<text class="faint" x="{_LEFT + 18}" y="{y}">an operation</text>')
        x = _LEFT + 120
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
    def _name(kind: str, text: str, place: tuple[float, float, str]) -> str:
        x, y, anchor = place
        return f'<text class="{kind} over" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def page(timeline: Timeline, title: str) -> str:
    """The whole page: picture, and a table of what the waits cost."""
    count = sum(len(lane) for lane in timeline.spans.values())
    summary = (
        f"{count} operations on {len(timeline.spans)} streams in {timeline.end:.1f} us; {len(timeline.waits)} waits between "
        "streams. Bars are operations, brackets stages, arrows fences; point at one to read it."
    )
    rows = "".join(
        f"<tr><td>{escape(cost.stream)}</td><td>{escape(cost.event)}</td><td>{escape(cost.location)}</td>"
        f'<td class="n">{cost.count}</td><td class="n">{cost.stall_us:.1f}</td><td class="n">{cost.critical_us:.1f}</td></tr>'
        for cost in timeline.costs()[:100]
    )
    head = "<tr><th>stream</th><th>waits for</th><th>at</th><th>times</th><th>stalled, us</th><th>critical, us</th></tr>"
    table = f"<table>{head}{rows}</table>" if rows else ""
    return _PAGE.format(title=escape(title), summary=escape(summary), svg=svg(timeline, PAGE_WIDTH), table=table)
