"""``outrider conform``: run the conformance suite for a backend."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from outrider.cli.options.option_values import (
    DIRECTORY,
    INPUT_FILE,
    BackendOption,
    JsonOption,
    UsageError,
    Value,
    option,
    parsed,
    text,
    whole,
)
from outrider.cli.terminal.environment import backend_from_environment
from outrider.cli.terminal.files import read_utf8
from outrider.cli.terminal.report import CommandReport
from outrider_conformance.levels import parse_level


def _report_file(given: Path) -> Path:
    return given / "report.json" if given.is_dir() else given


def _problem_of_report(given: Path) -> str | None:
    file = _report_file(given)
    return None if file.exists() else "there is no such report; check the name"


_REPORT = Value("FILE|DIR", _problem_of_report)


def conform(
    backend: BackendOption = None,
    level: Annotated[
        str, option("--level", value=parsed("LEVEL", parse_level), help="Run the levels up to this one, L0 to L6.")
    ] = "L4",
    report: Annotated[
        Path | None, option("--report", value=DIRECTORY, help="Write report.json, .xml, .html and badge.svg there.")
    ] = None,
    waivers: Annotated[
        Path | None, option("--waivers", value=INPUT_FILE, help="Known failures, each with reason, link and expiry.")
    ] = None,
    workers: Annotated[int, option("--workers", "-n", value=whole(0, 1024), help="Processes to spread the tests over.")] = 0,
    programs: Annotated[
        int | None, option("--programs", value=whole(1), help="Random programs to try over L1 to L3 (default 300).")
    ] = None,
    seed: Annotated[int, option("--seed", value=whole(0), help="Random seed of programs and operands.")] = 0,
    only: Annotated[
        str, option("--only", value=text("WORD"), help="Only tests with this word in their names. Passes no level.")
    ] = "",
    test: Annotated[
        list[str] | None,
        option("--test", value=text("ID"), help="Only the test with this id of a report; may be repeated. Passes no level."),
    ] = None,
    watch: Annotated[
        bool, option("--watch", help="Then run the failed tests again whenever a file of the plugin changes.")
    ] = False,
    verify: Annotated[
        Path | None,
        option("--verify", value=_REPORT, help="Check a report.json, or that of a directory, instead of running anything."),
    ] = None,
    json_output: JsonOption = False,
) -> CommandReport:
    """Run the conformance suite for a backend. The exit code is 1 unless all requested levels are passed. With --only or
    --test it is 1 if one of those tests fails.
    """
    if verify is not None:
        return _verify(verify)
    from outrider.registry import Registry
    from outrider_conformance import run

    registry = Registry()
    spec = registry.select(backend, backend_from_environment())
    if spec.name not in registry.backends.names:
        registry.backends.info(spec.name)  # raises for an unknown name. An installed plugin that is broken fails L0 instead.
    chosen = str(spec)
    wanted = f"L{parse_level(level)}"

    def conformed(tests: Sequence[str]) -> dict[str, Any]:
        return run.conform(
            backend or chosen,
            level=wanted,
            report=report,
            waivers=waivers,
            workers=workers,
            programs=programs,
            seed=seed,
            only=only,
            tests=tests or test or (),
            output=sys.stderr if json_output else None,
        )

    if watch:
        if json_output or report is not None:
            raise UsageError("--watch runs again and again: it goes with neither --json nor --report")
        candidates = registry.backends.candidates()
        place = run.directory_of(next(each.entry_point for each in candidates if each.name == spec.name))
        run.watch(conformed, place, lambda line: print(f"outrider: {line}", flush=True))
    return _result(conformed(()), chosen, wanted, f"with {only!r}" if only else "that were requested" if test else "", report)


def _result(data: Mapping[str, Any], backend: str, level: str, selection: str, directory: Path | None) -> CommandReport:
    """Return the outcome of a run. ``selection`` describes the tests of --only or --test, whose run passes no level."""
    from outrider_conformance.run import failing, passed

    def render(console: Console) -> None:
        if selection:
            console.print(f"{backend}: {'a test failed' if failing(data) else 'no test failed'} of those {selection}")
            return
        reached = f"passes up to {data['reached']}" if data["reached"] else "passes no level"
        console.print(f"{backend} {reached} ({level} was requested)")
        if directory is not None:
            console.print(f"report: {directory / 'report.html'}")

    good = not failing(data) if selection else passed(data)
    return CommandReport(data=data, render=render, exit_code=0 if good else 1)


def _verify(path: Path) -> CommandReport:
    from outrider_conformance.reporting.report import MOST_BYTES, load_report
    from outrider_conformance.reporting.report import verify as problems_of

    path = _report_file(path)
    data: Mapping[str, Any] = load_report(read_utf8(path, "a report of the suite", MOST_BYTES), str(path))
    problems = problems_of(data)

    def render(console: Console) -> None:
        if problems:
            console.print(f"{path} doesn't hold:")
            for problem in problems:
                console.print(f"  {problem}")
        else:
            console.print(
                f"{path} holds: {data['backend']['spec']} reached {data['reached']} on {data['tier']['date']} "
                f"({data['tier']['kind']}: {data['tier']['device']}), kit {data['kit']['version']}"
            )

    return CommandReport(
        data={"report": str(path), "holds": not problems, "problems": problems}, render=render, exit_code=bool(problems)
    )
