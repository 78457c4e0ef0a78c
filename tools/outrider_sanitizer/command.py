"""``outrider sanitize``: run a script under the sanitizer and print the orderings that the script lacks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from outrider.cli.options.option_values import one_of, option, whole
from outrider.cli.terminal.report import CommandReport
from outrider.device.errors import ConfigError
from outrider.registry import BackendSpec, Registry
from outrider_sanitizer.scripts import (
    ScriptBackendOption,
    ScriptEnd,
    run_rank_scripts,
    run_script,
    script_path,
    select_for_script,
)

if TYPE_CHECKING:
    from outrider.device import Backend
    from outrider_sanitizer import Finding
    from outrider_sanitizer import Report as Findings


_REQUIRED_COUNTS = ("operations", "streams", "replays")
"""Names of the counts of a report that ``--require`` accepts."""
_STYLES = MappingProxyType({"fix": "green", "replay": "cyan"})


def sanitize(
    script: Annotated[list[str], typer.Argument(metavar="-- SCRIPT [ARGS]...", help="The script and its arguments.")],
    backend: ScriptBackendOption = None,
    advice: Annotated[bool, option("--advice/--no-advice", help="List waits that order nothing new.")] = True,
    ranks: Annotated[
        int, option("--ranks", value=whole(1, 64), help="Run it as so many ranks of torch.distributed, on simulated devices.")
    ] = 1,
    require: Annotated[
        list[str] | None,
        option(
            "--require",
            value=one_of(*_REQUIRED_COUNTS),
            help="Fail unless some of these were watched; may be given again. Operations are always needed.",
        ),
    ] = None,
) -> CommandReport:
    """Run a Python script and report races, stale reads and lost flags. The exit code is 1 if there is a finding, if the
    script fails, or if no operation, or none of the kinds that --require names, was watched.

    With --ranks each rank is a host thread with its own simulated device, arguments, environment and torch.distributed. One
    report then also lists the calls and decisions in which ranks differ.
    """
    path = script_path(script, "sanitize")
    registry = Registry()
    spec = select_for_script(registry, backend)
    found, ends = _run_ranks(registry, spec, path, script, ranks) if ranks > 1 else _run(registry, spec, path, script)
    failures = [(f"rank {rank}: " if ranks > 1 else "") + end.failure for rank, end in enumerate(ends) if end.failure]
    counts = {name: sum(int(getattr(report, name)) for report in found) for name in _REQUIRED_COUNTS}
    missing = [name for name in dict.fromkeys(require or ()) if not counts[name]]
    clean = all(report.clean for report in found) and not failures and counts["operations"] > 0
    data = {
        "clean": clean,
        "script_error": "; ".join(failures) or None,
        "watched": counts,
        "not_watched": missing,
        "reports": [report.as_dict() for report in found],
    }

    def render(console: Console) -> None:
        for report in found:
            show(console, report, advice, bool(failures))
        for name in missing:
            console.print(Text(f"not watched: no {name}, which --require asked for", style="bold red"))
        for failure in failures:
            console.print(Text(f"the script failed: {failure}", style="bold red"))

    tracebacks = "\n".join(end.traceback for end in ends if end.traceback)
    return CommandReport(data=data, render=render, exit_code=0 if clean and not missing else 1, traceback=tracebacks)


def _run(registry: Registry, spec: BackendSpec, path: Path, argv: Sequence[str]) -> tuple[list[Findings], list[ScriptEnd]]:
    from outrider_sanitizer import watch

    reports: list[Findings] = []
    first = registry.create(spec)

    def attach(made: Backend, stack: ExitStack) -> None:
        # What torch tells of a device is told once: to who watches the backend that the script was given.
        reports.append(stack.enter_context(watch(made, torch_calls=made is first)))

    end = run_script(path, argv, first, attach)
    # A backend that nothing was done with has nothing to say, unless it's the only one.
    used = [report for report in reports if report.operations or not report.clean]
    return used or reports[:1], [end]


def _run_ranks(
    registry: Registry, spec: BackendSpec, path: Path, argv: Sequence[str], ranks: int
) -> tuple[list[Findings], list[ScriptEnd]]:
    from outrider_sanitizer import watching
    from outrider_sanitizer.detector.ranks import RankClocks

    if spec.ordinal:
        raise ConfigError(f"--ranks {ranks} takes devices 0 to {ranks - 1}; leave the number out of {str(spec)!r}")
    backends = [registry.create(replace(spec, ordinal=n, options=spec.options if n == 0 else {})) for n in range(ranks)]
    shared = RankClocks()

    def attach(made: Backend, stack: ExitStack) -> None:
        stack.enter_context(watching(made, ranks=shared))

    ends = run_rank_scripts(path, argv, backends, attach)
    # What torch.distributed does of itself is no advice to the script's author.
    shared.report.advice = [item for item in shared.report.advice if not item.event.startswith("torch ")]
    return [shared.report], ends


def show(console: Console, report: Findings, advice: bool, failed: bool) -> None:
    """Print a report as text on the console; with ``advice``, also the waits that can be removed. ``failed``: the script
    failed, so that a report without findings proves nothing.
    """
    if report.clean and report.operations and failed:
        console.print(Text(f"no finding before the script failed: {report.watched}", style="yellow"))
    else:
        console.print(Text(report.summary, style="green" if report.clean and report.operations else "bold red"))
    if not report.operations and not failed:
        console.print("does the script use another device? --backend names the one that is watched")
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
    console.print(Text(f"\n{number}. {finding.heading}", style="bold"))
    for title, text in finding.rows:
        console.print(Text(f"   {title:<7} ", style="dim") + Text(text, style=_STYLES.get(title, "")))
