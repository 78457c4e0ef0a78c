"""``outrider trace``: run a script, and write a timeline and a picture of its streams."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.options.option_values import UsageError, checking_options, number, option, output_file
from outrider.cli.terminal.files import check_distinct, output_problem, write_whole
from outrider.cli.terminal.report import CommandReport
from outrider.registry import Registry
from outrider_sanitizer.scripts import ScriptBackendOption, run_script, script_path, select_for_script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.device import Backend
    from outrider_trace.timeline import Timeline, WaitCost


def _wait_table(costs: Sequence[WaitCost]) -> Table:
    table = Table("stream", "waits for", "at", "times", "stalled, us", "critical, us", box=None, pad_edge=False)
    for cost in costs:
        times = str(cost.count), f"{cost.stall_us:.1f}", f"{cost.critical_us:.1f}"
        table.add_row(cost.stream, cost.event, cost.location, *times)
    return table


def trace(
    script: Annotated[list[str], typer.Argument(metavar="-- SCRIPT [ARGS]...", help="The script and its arguments.")],
    backend: ScriptBackendOption = None,
    out: Annotated[Path, option("--out", value=output_file(), help="File for the timeline, in Perfetto's format.")] = Path(
        "trace.json"
    ),
    picture: Annotated[
        Path | None,
        option(
            "--picture",
            value=output_file(".svg", ".html"),
            help="File for the picture: FILE.svg, or an HTML page. Default: --out with the ending .html.",
        ),
    ] = None,
    start: Annotated[float, option("--from", value=number(0), help="Start of the picture, in microseconds.")] = 0.0,
    end: Annotated[float | None, option("--to", value=number(0), help="End of the picture. Default: of the run.")] = None,
) -> CommandReport:
    """Run a Python script and write a timeline of its streams, operations and fences, and a picture of it.

    Times are the device's own, or virtual ones on a simulated device. The exit code is the script's, or 1 if there was no
    operation to draw.
    """
    path = script_path(script, "trace")
    target = picture or out.with_suffix(".html")
    with checking_options():
        check_distinct("--out", out, [path])
        check_distinct("--picture" if picture else "the picture next to --out", target, [path, out])
    if end is not None and end <= start:
        raise UsageError(f"--to is {end:g} and --from {start:g}; the picture ends after it starts")
    if picture is None and (problem := output_problem(target)):
        raise UsageError(f"the picture next to --out is {str(target)!r}; {problem}")
    from outrider_trace.picture import render_page, render_svg
    from outrider_trace.timeline import record_timeline

    registry = Registry()
    timelines: list[tuple[Backend, Timeline]] = []
    first = registry.create(select_for_script(registry, backend))
    ended = run_script(
        path, script, first, lambda made, stack: timelines.append((made, stack.enter_context(record_timeline(made))))
    )
    # A script may create several devices. The picture shows the one with the most operations.
    device, timeline = max(timelines, key=lambda pair: pair[1].num_operations)
    shown = timeline.part_between(start, timeline.end_time if end is None else end)
    written = [file for file, part in ((out, timeline), (target, shown)) if part.num_operations]
    if timeline.num_operations:
        write_whole(out, json.dumps(timeline.to_perfetto()))
    if shown.num_operations:
        title = f"{path.name} on {device.label}"
        write_whole(target, render_svg(shown) if target.suffix == ".svg" else render_page(shown, title))
    costs = timeline.costs()
    data = {
        "trace": str(out) if out in written else None,
        "picture": str(target) if target in written else None,
        "operations": timeline.num_operations,
        "streams": list(timeline.spans),
        "end_us": timeline.end_time,
        "waits": [asdict(cost) for cost in costs],
        "script_exit_code": ended.exit_code,
        "script_error": ended.failure or None,
    }

    def render(console: Console) -> None:
        console.print(f"{data['operations']} operations on {len(timeline.spans)} streams in {timeline.end_time:.1f} us")
        if out in written:
            console.print(f"{out} (open it at ui.perfetto.dev){f', {target}' if target in written else ''}")
        if target not in written:
            where = "between --from and --to" if out in written else f"on {device.label}, so that no file was written"
            console.print(f"no picture: no operation ran {where}")
        if costs:
            console.print(_wait_table(costs[:20]))
        if ended.failure:
            console.print(f"the script failed: {ended.failure}")

    code = ended.exit_code or int(target not in written)
    return CommandReport(data=data, render=render, exit_code=code, traceback=ended.traceback)
