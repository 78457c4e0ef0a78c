"""``outrider bench startup``: the time of an engine's start until its first token, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from outrider.cli.options.models import DraftTokensOption
from outrider.cli.options.option_records import with_options
from outrider.cli.options.option_values import DIRECTORY, BackendOption, UsageError, number, option, whole
from outrider.cli.terminal.environment import backend_from_environment
from outrider.cli.terminal.files import check_directory
from outrider.cli.terminal.report import CommandReport, note
from outrider.registry import Registry
from outrider_bench.child import run_child
from outrider_bench.options import LaunchOptions, ProposerOption, ShapeOption
from outrider_sanitizer.scratch_files import scratch_directory

_FUNCTION = "outrider_bench.engine_start:time_start"
_MAX_CONTEXT = 1024


@with_options
def startup(
    *,
    shape: ShapeOption = None,
    speculate: ProposerOption = "eagle",
    draft_tokens: DraftTokensOption = 4,
    batch: Annotated[int, option("--batch", value=whole(1, 4096), help="Concurrent requests of the engine.")] = 8,
    options: LaunchOptions,
    directory: Annotated[
        Path | None,
        option("--directory", value=DIRECTORY, help="Directory for a checkpoint that is removed. Default: temporary."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        option("--checkpoint", value=DIRECTORY, help="Directory for the checkpoint of --shape, which stays and is reused."),
    ] = None,
    starts: Annotated[
        int | None,
        option(
            "--starts",
            value=whole(1),
            help="Number of starts, the first with empty caches. Default: 2 if the backend compiles, else 1.",
        ),
    ] = None,
    limit: Annotated[float, option("--limit", value=number(1), help="Time limit of one start in seconds.")] = 600.0,
    backend: BackendOption = None,
) -> CommandReport:
    """Start an engine in a fresh process and time each stage until its first token, in seconds.

    The weights are read from files, which are in the page cache as far as the memory holds them. With --shape a checkpoint
    of random values is written first. If the backend compiles kernels, the first start has an empty cache of compiled
    kernels (cold), and each other start the cache that the first has left (warm). Each start prints a line to standard error.
    """
    _check_directories(shape, checkpoint, directory)
    about: dict[str, object] | None = None
    registry = Registry()
    spec = registry.select(backend, backend_from_environment())
    caches = registry.backends.info(spec.name).cache_variables
    work: dict[str, Any] = {
        "backend": str(spec),
        "shape": shape,
        "speculate": speculate,
        "draft_tokens": draft_tokens,
        "batch": batch,
        "dtype": options.dtype,
        "target": None,
        "eagle": None,
        "settings": {"max_requests": batch, "max_context": _MAX_CONTEXT} | options.settings(),
    }
    with scratch_directory("outrider-startup-", directory) as fresh:
        if shape is not None:
            from outrider_bench.random_checkpoint import find_or_write_checkpoint

            began = time.perf_counter()
            written, reused = find_or_write_checkpoint(shape, checkpoint or Path(fresh, "checkpoint"))
            seconds = time.perf_counter() - began
            work |= {"target": str(written.target.absolute()), "eagle": str(written.draft.absolute())}
            about = {"bytes": written.bytes, "written_in_s": None if reused else seconds}
        work["tuned"] = f"{fresh}/tuned"  # each start reads the measurements of the starts before
        variables = {name: f"{fresh}/{name}" for name in caches}
        found: dict[str, dict[str, Any]] = {}
        for name in _start_names(starts or (2 if caches else 1), compiles=bool(caches)):
            found[name] = run_child(_FUNCTION, work, variables=variables, limit_s=limit)
            _note_start(name, found[name])
    for key in ("dtype", "chosen"):  # equal in all starts
        work[key] = [each.pop(key) for each in found.values()][-1]
    del work["target"], work["eagle"], work["tuned"]
    data: dict[str, object] = {**work, "checkpoint": about, "kernel_cache": bool(caches), "starts": found}
    return CommandReport(data=data, render=lambda console: _render(console, work, found))


def _check_directories(shape: str | None, checkpoint: Path | None, directory: Path | None) -> None:
    if checkpoint is not None and shape is None:
        raise UsageError("--checkpoint is the directory of a checkpoint of --shape; name a shape")
    if checkpoint is not None and directory is not None:
        raise UsageError("--directory is for a checkpoint that is removed, --checkpoint for one that stays; give one of them")
    if directory is not None:
        check_directory("--directory", directory, make=False)


def _start_names(count: int, *, compiles: bool) -> list[str]:
    """Return the names of ``count`` starts: ``cold``, ``warm``, ``warm 2`` and so on; without compiled kernels ``start``,
    ``start 2``.
    """
    first, others = (["cold"], "warm") if compiles else ([], "start")
    return [*first, others, *(f"{others} {number}" for number in range(2, count + 1))][:count]


def _note_start(name: str, found: Mapping[str, Any]) -> None:
    """Print a finished start to standard error, so that an interrupted run keeps its results."""
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in found["stages"].items())
    note(f"{name}: {found['total']:.2f} s ({stages}); compiled while serving {found['compiled_while_serving']}\n")


def _render(console: Console, work: dict[str, Any], starts: dict[str, dict[str, Any]]) -> None:
    from outrider.engine.config import Choice

    first = next(iter(starts.values()))
    model = "bundled model" if work["shape"] is None else f"a checkpoint of {work['shape']}"
    console.print(f"{model} on {work['backend']} ({first['device']}), {work['dtype']}, seconds in a process of its own\n")
    table = Table("stage", *(name if len(starts) > 1 else "seconds" for name in starts), box=None, pad_edge=False)
    for stage in first["stages"]:
        table.add_row(stage, *(f"{found['stages'][stage]:.2f}" for found in starts.values()))
    table.add_row("total", *(f"{found['total']:.2f}" for found in starts.values()))
    console.print(table)
    if first["compiled"]:
        console.print(f"\ncompiled: {', '.join(f'{name} {count}' for name, count in sorted(first['compiled'].items()))}")
    console.print(f"compiled while serving: {', '.join(str(each['compiled_while_serving']) for each in starts.values())}")
    if first["captured"]:
        console.print(f"captured: {first['captured']}")
    console.print("chosen: " + "; ".join(str(Choice(**made)) for made in work["chosen"]), markup=False, soft_wrap=True)
