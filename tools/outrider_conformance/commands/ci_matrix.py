"""``outrider ci-matrix``: the matrix of a workflow, from what installed plugins declare."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.report import JsonOption, Report
from outrider.device.errors import ConfigError
from outrider.device.plugin import BackendInfo, CiDeclaration
from outrider.registry import Candidate, Registry

_HOSTED = re.compile(r"(ubuntu|windows|macos)-[\w.-]+")
"""Labels of machines that GitHub lends to everybody."""


class Format(StrEnum):
    """What is printed instead of a table."""

    github = "github"
    json = "json"


def ci_matrix(
    format: Annotated[  # the option is called so
        Format | None,
        typer.Option("--format", help="github: {include: […]} on one line, for strategy.matrix; json: the rows as a list."),
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option("--select", metavar="NAME", help="Only this backend, or those with this marker. Repeatable."),
    ] = None,
    runners: Annotated[
        str,
        typer.Option(
            "--runners",
            metavar="LABELS",
            help="The runners of your own that exist: labels joined by commas, runners apart by spaces.",
        ),
    ] = "",
    json_output: JsonOption = False,
) -> Report:
    """List how a CI runs each installed backend. One that can't be loaded is listed as broken and stops no other."""
    del json_output
    exist = [frozenset(filter(None, runner.split(","))) for runner in runners.split()]
    rows = _selected([row(candidate, exist) for candidate in Registry().candidates()], select or ())
    data: dict[str, object] = {"rows": rows, "broken": [r["backend"] for r in rows if r["status"] == "broken"]}

    def render(console: Console) -> None:
        if format is Format.github:
            console.print(json.dumps({"include": rows}))
        elif format is Format.json:
            console.print(json.dumps(rows, indent=2))
        else:
            _render(console, rows)

    return Report(data=data, render=render)


def row(candidate: Candidate[BackendInfo], runners: Iterable[frozenset[str]]) -> dict[str, Any]:
    """One backend as flat data. ``status``: ``runs``, ``not run`` (with the reason), or ``broken`` (with the reason)."""
    ci = candidate.info.ci if candidate.info is not None else CiDeclaration()
    status, reason = _status(candidate, ci, runners)
    index = (ci.torch or "").strip() if _is_address(ci.torch) else ""
    return {
        "backend": candidate.name,
        "title": candidate.name if status == "runs" else f"{candidate.name}: {status}",
        "status": status,
        "reason": reason,
        "runner_labels": list(ci.runner_labels),
        "container": ci.container or "",
        "torch_index": index,
        "torch_requirement": "torch" if index or not ci.torch else ci.torch.strip(),
        "markers": list(ci.markers),
        "level": ci.level,
        "distribution": candidate.distribution,
    }


def _status(candidate: Candidate[BackendInfo], ci: CiDeclaration, runners: Iterable[frozenset[str]]) -> tuple[str, str]:
    from outrider_conformance.levels import parse_level

    if candidate.info is None:
        return "broken", candidate.reason
    if not ci.runner_labels or not all(isinstance(label, str) and label.strip() for label in ci.runner_labels):
        return "broken", f"it declares runner_labels={ci.runner_labels!r}; expected at least one label, none of them empty"
    try:
        parse_level(ci.level)
    except ConfigError as error:
        return "broken", f"it declares {error}"
    labels = frozenset(ci.runner_labels)
    if (len(labels) == 1 and _HOSTED.fullmatch(next(iter(labels)))) or any(labels <= runner for runner in runners):
        return "runs", ""
    return "not run", f"no runner with the labels {', '.join(ci.runner_labels)}; --runners lists those that there are"


def _is_address(torch: str | None) -> bool:
    return torch is not None and "://" in torch and not torch.lstrip().startswith("torch")


def _selected(rows: Sequence[dict[str, Any]], select: Sequence[str]) -> list[dict[str, Any]]:
    for wanted in select:
        if not any(wanted == r["backend"] or wanted in r["markers"] for r in rows):
            words = sorted({word for r in rows for word in (r["backend"], *r["markers"])})
            raise ConfigError(
                f"--select {wanted}: no installed backend has that name or marker; there are {', '.join(words)}"
            )
    return [r for r in rows if not select or any(w == r["backend"] or w in r["markers"] for w in select)]


def _render(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("backend", "status", "level", "runner", "container", "torch", "markers"):
        table.add_column(title, overflow="fold")  # an address that is cut short is none
    for r in rows:
        torch = r["torch_index"] or r["torch_requirement"]
        table.add_row(
            *(r["backend"], r["status"], r["level"], " ".join(r["runner_labels"]), r["container"], torch),
            " ".join(r["markers"]),
        )
    console.print(table)
    for r in rows:
        if r["reason"]:
            console.print(f"\n{r['title']}: {r['reason']}")
