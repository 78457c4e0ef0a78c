"""``outrider sanitize``: run a script and say which orderings it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from outrider.cli.environment import backend_from_environment
from outrider.cli.report import BackendOption, JsonOption, Report
from outrider.registry import BackendSpec, Registry
from outrider_sanitizer.scripts import run_script, script_path

if TYPE_CHECKING:
    from outrider.device import Backend
    from outrider_sanitizer import Finding
    from outrider_sanitizer import Report as Findings


def sanitize(
    script: Annotated[list[str], typer.Argument(metavar="-- SCRIPT [ARGS]...", help="The script and its arguments.")],
    backend: BackendOption = None,
    advice: Annotated[bool, typer.Option("--advice/--no-advice", help="List waits that order nothing new.")] = True,
    json_output: JsonOption = False,
) -> Report:
    """Run a Python script and report races, stale reads and lost flags. Exit code 1 when there are any."""
    del json_output
    path = script_path(script, "sanitize")
    registry = Registry()
    found, failure = _run(registry, registry.select(backend, backend_from_environment()), path, script)
    clean = all(report.clean for report in found)
    data = {"clean": clean, "script_error": failure, "reports": [report.as_dict() for report in found]}

    def render(console: Console) -> None:
        for report in found:
            show(console, report, advice)
        if failure:
            console.print(Text(f"the script ended with {failure}", style="bold red"))

    return Report(data=data, render=render, exit_code=0 if clean and failure is None else 1)


def _run(registry: Registry, spec: BackendSpec, path: Path, argv: Sequence[str]) -> tuple[list[Findings], str | None]:
    reports: list[Findings] = []
    code, failure = run_script(
        path, argv, registry.create(spec), lambda made, stack: reports.append(stack.enter_context(_watch(made)))
    )
    if failure is None and code:
        failure = f"exit code {code}"
    # A backend that nothing was done with has nothing to say, unless it's the only one.
    used = [report for report in reports if report.operations or not report.clean]
    return used or reports[:1], failure


def _watch(backend: Backend) -> AbstractContextManager[Findings]:
    from outrider_sanitizer import watch

    return watch(backend)


def show(console: Console, report: Findings, advice: bool) -> None:
    """Print a report for people."""
    total = f"{report.operations} operations on {report.backend}"
    if report.clean:
        console.print(Text(f"clean: {total}", style="green"))
    else:
        console.print(Text(f"{len(report)} finding{'s' if len(report) > 1 else ''} in {total}", style="bold red"))
    for number, finding in enumerate(report, 1):
        _show_finding(console, number, finding)
    if report.left_out:
        console.print(f"and {report.left_out} more that aren't listed")
    if advice and report.advice:
        console.print(Text("\nwaits that can be removed", style="bold"))
        for item in report.advice:
            console.print(f"  {item}")
    for spot in report.blind_spots:
        console.print(Text(f"not seen: {spot}", style="dim"))


def _show_finding(console: Console, number: int, finding: Finding) -> None:
    times = f" ({finding.count} times)" if finding.count > 1 else ""
    console.print(Text(f"\n{number}. {finding.kind.value}{times}", style="bold"))
    rows = (
        ("first", finding.first, ""),
        ("then" if finding.first else "at", finding.second, ""),
        ("memory", finding.memory, ""),
        ("now", finding.hint, ""),
        ("fix", finding.missing, "green"),
        ("replay", finding.schedule, "cyan"),
    )
    for title, text, style in rows:
        if text:
            console.print(Text(f"   {title:<7} ", style="dim") + Text(str(text), style=style))
