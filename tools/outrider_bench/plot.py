"""Plots as SVG, without a library: milliseconds of an iteration against its limit, or of several engines side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 44, 52
_COLOURS = ("#3b6fb6", "#c2571a", "#3f8f4f", "#8a4fa3", "#b03a48", "#5c6670")
_TICKS = 6


def limits_svg(rows: Sequence[Mapping[str, Any]], *, title: str) -> str:
    """``rows`` of ``bench decode``: a colour for each prompt length, batch sizes along the axis; lines that are drawn are
    measured, dashed ones are the limit, where it's known.
    """
    batches = sorted({int(row["batch"]) for row in rows})
    prompts = sorted({int(row["prompt_tokens"]) for row in rows})
    top = _nice(max(max(row["iteration_ms"], row["limit_ms"] or 0.0) for row in rows))

    def x(batch: int) -> float:
        span = _WIDTH - _LEFT - _RIGHT
        return _LEFT + span * (batches.index(batch) + 0.5) / len(batches)

    def y(ms: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * ms / top

    parts = _frame(title, top, y)
    parts += [_text(x(batch), _HEIGHT - _BOTTOM + 18, str(batch), anchor="middle") for batch in batches]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, "batch size", anchor="middle"))
    parts.append(_text(_LEFT - 48, _TOP - 10, "ms an iteration"))
    for number, prompt in enumerate(prompts):
        colour = _COLOURS[number % len(_COLOURS)]
        of_prompt = sorted((row for row in rows if row["prompt_tokens"] == prompt), key=lambda row: int(row["batch"]))
        for key, dash in (("iteration_ms", ""), ("limit_ms", ' stroke-dasharray="5 4"')):
            line = " ".join(f"{x(row['batch']):.1f},{y(row[key]):.1f}" for row in of_prompt if row[key] is not None)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += [
            f'<circle cx="{x(row["batch"]):.1f}" cy="{y(row["iteration_ms"]):.1f}" r="3.5" fill="{colour}">'
            f"<title>batch {row['batch']}, prompt {prompt}: {row['iteration_ms']:.3f} ms{_of_limit(row)}</title></circle>"
            for row in of_prompt
        ]
        at = _TOP + 10 + 18 * number
        parts.append(f'<path d="M{_WIDTH - _RIGHT + 14} {at}h24" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(_WIDTH - _RIGHT + 44, at + 4, f"prompt {prompt}"))
    at = _TOP + 10 + 18 * len(prompts)
    parts.append(f'<path d="M{_WIDTH - _RIGHT + 14} {at}h24" stroke="#555555" stroke-width="2" stroke-dasharray="5 4"/>')
    parts.append(_text(_WIDTH - _RIGHT + 44, at + 4, "its limit"))
    return "\n".join([*parts, "</svg>", ""])


def _of_limit(row: Mapping[str, Any]) -> str:
    if row["limit_ms"] is None:
        return ""
    return f", limit {row['limit_ms']:.3f} ms, ratio {row['ratio_to_limit']:.2f}"


def series_svg(series: Mapping[str, Sequence[tuple[float, float]]], *, title: str, across: str, up: str) -> str:
    """A line for each name over values that stand apart evenly, whatever lies between them: batch sizes, context lengths."""
    places = sorted({across_value for points in series.values() for across_value, _ in points})
    top = _nice(max(value for points in series.values() for _, value in points))

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (places.index(value) + 0.5) / len(places)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top

    parts = _frame(title, top, y)
    parts += [_text(x(value), _HEIGHT - _BOTTOM + 18, f"{value:g}", anchor="middle") for value in places]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, across, anchor="middle"))
    parts.append(_text(_LEFT - 48, _TOP - 10, up))
    for number, (name, points) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value in sorted(points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(place):.1f}" cy="{y(value):.1f}" r="3.5" fill="{colour}">'
            f"<title>{escape(name)}, {place:g}: {value:.3f}</title></circle>"
            for place, value in sorted(points)
        ]
        at = _TOP + 10 + 18 * number
        parts.append(f'<path d="M{_WIDTH - _RIGHT + 14} {at}h24" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(_WIDTH - _RIGHT + 44, at + 4, name))
    return "\n".join([*parts, "</svg>", ""])


def stacked(drawings: Sequence[str]) -> str:
    """Drawings of this module, one below the other, as one."""
    if len(drawings) == 1:
        return drawings[0]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT * len(drawings)}">']
    for number, drawing in enumerate(drawings):
        place = f'<svg y="{_HEIGHT * number}" width="{_WIDTH}" height="{_HEIGHT}" '
        parts.append(drawing.replace("<svg ", place, 1).strip())
    return "\n".join([*parts, "</svg>", ""])


def _frame(title: str, top: float, y: Callable[[float], float]) -> list[str]:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 16, title, size=14),
    ]
    for step in range(_TICKS + 1):
        value = top * step / _TICKS
        parts.append(f'<path d="M{_LEFT} {y(value):.1f}H{_WIDTH - _RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 8, y(value) + 4, f"{value:g}", anchor="end"))
    return parts


def _nice(value: float) -> float:
    """The end of an axis that holds ``value`` and has six steps that read well."""
    power = 1e-6
    while True:
        for factor in (1.2, 1.8, 3.0, 6.0, 9.0):
            if factor * power >= value:
                return factor * power
        power *= 10


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#222222">{escape(text)}</text>'
