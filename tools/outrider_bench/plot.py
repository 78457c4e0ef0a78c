"""Plots as SVG without a library, and the files that a benchmark writes after its measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from outrider.cli.terminal.files import write_whole
from outrider.cli.terminal.report import note

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 44, 52
_COLOURS = ("#3b6fb6", "#c2571a", "#3f8f4f", "#8a4fa3", "#b03a48", "#5c6670")
_TICKS = 6

Points = Sequence[tuple[float, float, str]]
"""The points of a line: position, value and description of each."""


def write_output(option: str, path: Path, text: str) -> str | None:
    """Write a file of results and return None. If that fails, print the reason to standard error and return it, so that the
    command still prints its figures.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        reason = f"{option} {path} wasn't written: {error.strerror or error}"
        note(f"{reason}\n")
        return reason
    return None


def write_plot(path: Path, drawing: str | None, data: dict[str, object]) -> int:
    """Write the plot of ``--plot`` and return the exit code; ``drawing`` is None if nothing was measured.

    The reason of a failure goes to standard error and to ``data["plot_failed"]``.
    """
    if drawing is not None:
        failed = write_output("--plot", path, drawing)
    else:
        failed = "--plot has nothing to draw: nothing was measured"
        note(f"{failed}\n")
    if failed is None:
        return 0
    data["plot_failed"] = failed
    return 1


def limits_svg(rows: Sequence[Mapping[str, Any]], *, title: str) -> str:
    """Return an SVG of the rows of ``bench decode`` over batch sizes, with a colour for each prompt length.

    Solid lines are measured, dashed lines are the limits that are known.
    """
    measured: dict[str, Points] = {}
    limits: dict[str, Points] = {}
    for prompt in sorted({int(row["prompt_tokens"]) for row in rows}):
        name = f"prompt {prompt}"
        of_prompt = sorted((row for row in rows if row["prompt_tokens"] == prompt), key=lambda row: int(row["batch"]))
        measured[name] = [(row["batch"], row["iteration_ms"], _describe(row)) for row in of_prompt]
        limits[name] = [(row["batch"], row["limit_ms"], "") for row in of_prompt if row["limit_ms"] is not None]
    return _draw(measured, title=title, across="batch size", up="ms an iteration", dashed=limits)


def _describe(row: Mapping[str, Any]) -> str:
    limit = "" if row["limit_ms"] is None else f", limit {row['limit_ms']:.3f} ms, ratio {row['ratio_to_limit']:.2f}"
    return f"batch {row['batch']}, prompt {row['prompt_tokens']}: {row['iteration_ms']:.3f} ms{limit}"


def series_svg(series: Mapping[str, Sequence[tuple[float, float]]], *, title: str, across: str, up: str) -> str:
    """Return an SVG with a line for each name in ``series``. Values along the horizontal axis are evenly spaced: batch sizes,
    context lengths.
    """
    lines: dict[str, Points] = {
        name: [(place, value, f"{name}, {place:g}: {value:.3f}") for place, value in sorted(points)]
        for name, points in series.items()
    }
    return _draw(lines, title=title, across=across, up=up)


def stack_drawings(drawings: Sequence[str]) -> str:
    """Return one drawing that shows ``drawings`` one below the other."""
    if len(drawings) == 1:
        return drawings[0]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT * len(drawings)}">']
    for number, drawing in enumerate(drawings):
        place = f'<svg y="{_HEIGHT * number}" width="{_WIDTH}" height="{_HEIGHT}" '
        parts.append(drawing.replace("<svg ", place, 1).strip())
    return "\n".join([*parts, "</svg>", ""])


def _draw(
    lines: Mapping[str, Points], *, title: str, across: str, up: str, dashed: Mapping[str, Points] | None = None
) -> str:
    places = sorted({place for points in lines.values() for place, _, _ in points})
    every = [*lines.values(), *(dashed or {}).values()]
    top = _axis_end(max(value for points in every for _, value, _ in points))

    def x(place: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (places.index(place) + 0.5) / len(places)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top

    def line(points: Points, colour: str, style: str = "") -> str:
        corners = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value, _ in points)
        return f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="2"{style}/>'

    def legend(number: int, colour: str, name: str, style: str = "") -> list[str]:
        height = _TOP + 10 + 18 * number
        stroke = f'<path d="M{_WIDTH - _RIGHT + 14} {height}h24" stroke="{colour}" stroke-width="2"{style}/>'
        return [stroke, _text(_WIDTH - _RIGHT + 44, height + 4, name)]

    dash = ' stroke-dasharray="5 4"'
    parts = _frame(title, top, y)
    parts += [_text(x(place), _HEIGHT - _BOTTOM + 18, f"{place:g}", anchor="middle") for place in places]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, across, anchor="middle"))
    parts.append(_text(_LEFT - 48, _TOP - 10, up))
    for number, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(line(points, colour))
        if dashed is not None:
            parts.append(line(dashed[name], colour, dash))
        parts += [
            f'<circle cx="{x(place):.1f}" cy="{y(value):.1f}" r="3.5" fill="{colour}"><title>{escape(text)}</title></circle>'
            for place, value, text in points
        ]
        parts += legend(number, colour, name)
    if dashed is not None:
        parts += legend(len(lines), "#555555", "its limit", dash)
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


def _axis_end(value: float) -> float:
    """Return the end of an axis that contains ``value`` and has six round steps."""
    power = 1e-6
    while True:
        for factor in (1.2, 1.8, 3.0, 6.0, 9.0):
            if factor * power >= value:
                return factor * power
        power *= 10


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#222222">{escape(text)}</text>'
