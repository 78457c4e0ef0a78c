"""A timeline as one self-contained page: a lane for each stream, a bar for each operation, an arrow for each fence."""

from __future__ import annotations

from html import escape

from outrider_trace.timeline import Timeline

_WIDTH = 1400
_LEFT = 120
_LANE = 46
_BAR = 26
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#edc948", "#9c755f")
_MOST = 20_000

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font:13px sans-serif;margin:16px;color:#222}}table{{border-collapse:collapse;margin-top:16px}}
td,th{{padding:2px 10px;text-align:left;border-bottom:1px solid #ddd}}td.n{{text-align:right}}svg text{{font:11px sans-serif}}
rect.op:hover{{stroke:#000;stroke-width:1}}</style></head>
<body><h1 style="font-size:16px">{title}</h1><p>{summary}</p><div style="overflow-x:auto">{svg}</div>{table}</body></html>
"""


def svg(timeline: Timeline) -> str:
    """The picture alone."""
    end = timeline.end or 1.0
    scale = (_WIDTH - _LEFT - 20) / end
    rows = {name: number for number, name in enumerate(timeline.spans)}
    height = 40 + _LANE * max(1, len(rows))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">',
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#c00"/></marker></defs>',
    ]
    for tick in range(11):
        x = _LEFT + (_WIDTH - _LEFT - 20) * tick / 10
        parts.append(f'<line x1="{x:.1f}" y1="20" x2="{x:.1f}" y2="{height - 10}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="14" text-anchor="middle" fill="#777">{end * tick / 10:.1f} us</text>')
    drawn = 0
    for name, row in rows.items():
        top = 28 + row * _LANE
        colour = _COLOURS[row % len(_COLOURS)]
        parts.append(f'<text x="8" y="{top + _BAR * 0.65:.0f}">{escape(name)}</text>')
        for span in timeline.spans[name]:
            drawn += 1
            if drawn > _MOST:
                break
            x, width = _LEFT + span.start * scale, max((span.end - span.start) * scale, 0.8)
            label = f"{span.name}: {span.start:.2f} to {span.end:.2f} us {span.location}"
            parts.append(
                f'<rect class="op" x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}" fill="{colour}" rx="2">'
                f"<title>{escape(label)}</title></rect>"
            )
            short = span.name.split("::")[-1]
            if width > 6.5 * len(short):
                parts.append(f'<text x="{x + 3:.2f}" y="{top + 17}" fill="#fff" pointer-events="none">{escape(short)}</text>')
    for wait in timeline.waits[:_MOST]:
        ends = timeline.ends(wait)
        if ends is None or wait.source not in rows:
            continue
        x1, x2 = _LEFT + ends[0] * scale, _LEFT + ends[1] * scale
        down = rows[wait.stream] > rows[wait.source]
        y1 = 28 + rows[wait.source] * _LANE + (_BAR if down else 0)
        y2 = 28 + rows[wait.stream] * _LANE + (0 if down else _BAR)
        label = f"{wait.event} generation {wait.generation}, waited for at {wait.location}"
        parts.append(
            f'<line x1="{x1:.2f}" y1="{y1}" x2="{x2:.2f}" y2="{y2}" stroke="#c00" stroke-width="1.2" opacity="0.7" '
            f'marker-end="url(#a)"><title>{escape(label)}</title></line>'
        )
    parts.append("</svg>")
    return "".join(parts)


def page(timeline: Timeline, title: str) -> str:
    """The whole page: picture, and a table of what the waits cost."""
    count = sum(len(lane) for lane in timeline.spans.values())
    summary = (
        f"{count} operations on {len(timeline.spans)} streams in {timeline.end:.1f} us; {len(timeline.waits)} waits between "
        "streams. Bars are operations, arrows fences; point at one to read it."
    )
    rows = "".join(
        f"<tr><td>{escape(cost.stream)}</td><td>{escape(cost.event)}</td><td>{escape(cost.location)}</td>"
        f'<td class="n">{cost.count}</td><td class="n">{cost.stall_us:.1f}</td><td class="n">{cost.critical_us:.1f}</td></tr>'
        for cost in timeline.costs()[:100]
    )
    head = "<tr><th>stream</th><th>waits for</th><th>at</th><th>times</th><th>stalled, us</th><th>critical, us</th></tr>"
    table = f"<table>{head}{rows}</table>" if rows else ""
    return _PAGE.format(title=escape(title), summary=escape(summary), svg=svg(timeline), table=table)
