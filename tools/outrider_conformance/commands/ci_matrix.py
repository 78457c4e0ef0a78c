"""``outrider ci-matrix``: the matrix of a workflow, from what installed plugins declare."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.options.option_values import one_of, option
from outrider.cli.terminal.report import CommandReport
from outrider.device.errors import ConfigError
from outrider.device.plugin import BackendInfo, CiDeclaration
from outrider.registry import Candidate, Registry
from outrider_conformance.levels import parse_level

_HOSTED = re.compile(r"(ubuntu|windows|macos)-[\w.-]+")
"""A pattern for the labels of GitHub's hosted runners."""


_RANKS, _RANKS_LEVEL = "ranks", "L6"


def ci_matrix(
    format: Annotated[
        str | None,
        option(
            "--format",
            value=one_of("github", "json"),
            help="github: {include: […]} on one line, for strategy.matrix; json: the rows as a list. Without it, a table.",
        ),
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option("--select", metavar="NAME", help="Only this backend, or backends with this marker. Repeatable."),
    ] = None,
    runners: Annotated[
        str,
        typer.Option(
            "--runners",
            metavar="LABELS",
            help="Your own runners: labels joined by commas, runners separated by spaces.",
        ),
    ] = "",
) -> CommandReport:
    """List how a CI runs each installed backend. A backend that can't be loaded is listed as broken.

    A backend that declares several devices has a second row: level L6 (collectives) on a runner with that many devices.
    """
    exist = [frozenset(filter(None, runner.split(","))) for runner in runners.split()]
    candidates = Registry().backends.candidates()
    rows = _selected([row for candidate in candidates for row in rows_of(candidate, exist)], select or ())
    data: dict[str, object] = {"rows": rows, "broken": [r["backend"] for r in rows if r["status"] == "broken"]}

    def render(console: Console) -> None:
        if format == "github":
            console.print(json.dumps({"include": rows}))
        elif format == "json":
            console.print(json.dumps(rows, indent=2))
        else:
            _render(console, rows)

    return CommandReport(data=data, render=render)


def rows_of(candidate: Candidate[BackendInfo], runners: Iterable[frozenset[str]]) -> list[dict[str, Any]]:
    """Return the rows of one backend: its own, and one for collectives if it declares several devices."""
    exist = list(runners)
    ci, reason = CiDeclaration(), candidate.reason or candidate.status
    if candidate.info is not None:
        reason = declaration_fault(candidate.info.ci)
        ci = ci if reason else candidate.info.ci
    found = [_row(candidate, exist, ci, reason)]
    if ci.device_count > 1:
        labels = ci.ranks_runner_labels or ci.runner_labels
        found.append(_row(candidate, exist, replace(ci, level=_RANKS_LEVEL, runner_labels=labels), reason, _RANKS))
    return found


def _row(
    candidate: Candidate[BackendInfo], runners: Iterable[frozenset[str]], ci: CiDeclaration, fault: str, job: str = ""
) -> dict[str, Any]:
    """Return one job as flat data. ``status`` is ``runs``, or with a reason ``not run`` or ``broken``.

    ``fault`` is the reason why the backend or its declaration can't be used; the other fields then have their defaults.
    ``job`` is the name of an additional job of the backend.
    """
    status, reason = ("broken", fault) if fault else _status(ci, runners)
    index = (ci.torch or "").strip() if _is_address(ci.torch) else ""
    name = "-".join(filter(None, [candidate.name, job]))
    return {
        "backend": candidate.name,
        "job": name,
        "title": name if status == "runs" else f"{name}: {status}",
        "status": status,
        "reason": reason,
        "runner_labels": list(ci.runner_labels),
        "container": ci.container or "",
        "torch_index": index,
        "torch_requirement": "torch" if index or not ci.torch else ci.torch.strip(),
        "markers": list(ci.markers),
        "level": ci.level,
        "device_count": ci.device_count if job else 1,
        "distribution": candidate.distribution,
    }


def _status(ci: CiDeclaration, runners: Iterable[frozenset[str]]) -> tuple[str, str]:
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


def _level(row: Mapping[str, Any]) -> str:
    return str(row["level"]) if row["device_count"] == 1 else f"{row['level']} on {row['device_count']}"


def _render(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("backend", "status", "level", "runner", "container", "torch", "markers"):
        # Addresses and labels are never truncated, and labels are never wrapped.
        widest = max((len(label) for r in rows for label in r["runner_labels"]), default=0) if title == "runner" else 0
        table.add_column(title, overflow="fold", min_width=widest)
    for r in rows:
        torch = r["torch_index"] or r["torch_requirement"]
        table.add_row(
            *(r["job"], r["status"], _level(r), " ".join(r["runner_labels"]), r["container"], torch),
            " ".join(r["markers"]),
        )
    console.print(table)
    for r in rows:
        if r["reason"]:
            console.print(f"\n{r['title']}: {r['reason']}")


def declaration_fault(ci: object) -> str:
    """Return the reason why a workflow can't use a plugin's CI declaration; empty for a usable declaration."""
    if not isinstance(ci, CiDeclaration):
        return f"it declares ci={ci!r}; expected a CiDeclaration"
    checks = {
        "runner_labels": (
            bool(ci.runner_labels) and _is_words(ci.runner_labels),
            "a tuple of labels, at least one, each one word",
        ),
        "ranks_runner_labels": (_is_words(ci.ranks_runner_labels), "a tuple of labels, each one word"),
        "markers": (isinstance(ci.markers, tuple | list) and all(map(_is_line, ci.markers)), "a tuple of lines of text"),
        "container": (ci.container is None or _is_word(ci.container), "the name of an image, without spaces and line breaks"),
        "torch": (ci.torch is None or _is_line(ci.torch), "the address of a package index or a requirement, on one line"),
        "device_count": (type(ci.device_count) is int and ci.device_count > 0, "a number of devices, at least 1"),
    }
    for name, (is_usable, expected) in checks.items():
        if not is_usable:
            return f"it declares {name}={getattr(ci, name)!r}; expected {expected}"
    try:
        parse_level(str(ci.level))
    except ConfigError as error:
        return f"it declares {error}"
    return ""


def _is_words(labels: object) -> bool:
    return isinstance(labels, tuple | list) and all(_is_word(label) and "," not in label for label in labels)


def _is_word(value: Any) -> bool:
    return _is_line(value) and " " not in value


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and bool(value.strip())
