"""``outrider bench sanitizer``: how much slower decoding is under Outrider's sanitizer, and under torch's own."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.environment import backend_from_environment
from outrider.cli.models import DraftTokensOption
from outrider.cli.report import BackendOption, JsonOption, Report
from outrider.device.errors import ConfigError
from outrider.registry import Registry
from outrider_bench.child import ChildFailed, run_child

if TYPE_CHECKING:
    from outrider.registry import BackendSpec

MODES: Mapping[str, Mapping[str, object]] = {
    "staged": {"mode": "staged", "graphs": False, "overlap": True},
    "graphs": {"mode": "staged", "graphs": True, "overlap": True},
    "fused": {"mode": "fused", "graphs": True, "overlap": True},
}
"""How iterations are launched, as an engine's config says it."""
_CHILD = "outrider_bench.sanitizer_child"


def sanitizer(
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 4,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=8, metavar="N", help="New tokens of each.")] = 48,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, metavar="N")] = 32,
    draft_tokens: DraftTokensOption = 4,
    modes: Annotated[str, typer.Option(metavar="staged,graphs,fused", help="Modes to measure.")] = ",".join(MODES),
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one run may take.")] = 300.0,
    backend: BackendOption = None,
    json_output: JsonOption = False,
) -> Report:
    """Decode with the bundled model alone, watched by the sanitizer, and under torch's own where the backend names one.

    Each in a process of its own. Exit code 1 when the sanitizer finds anything in the engine.
    """
    del json_output
    chosen = [name.strip() for name in modes.split(",")]
    unknown = [name for name in chosen if name not in MODES]
    if unknown:
        raise ConfigError(f"--modes is {modes!r}; expected some of {', '.join(MODES)}")
    registry = Registry()
    spec = registry.select(backend, backend_from_environment())
    device = registry.create(spec)
    variables = registry.info(spec.name).sanitizer_variables
    known = [name for name in chosen if MODES[name]["mode"] in device.speculative_sync.step_modes]
    work = {"batch": batch, "new_tokens": new_tokens, "prompt_tokens": prompt_tokens, "draft_tokens": draft_tokens}
    rows = [_row(name, work, spec, variables, limit) for name in known]
    data: dict[str, object] = {"backend": device.name, "device": str(device.device), **work, "results": rows}
    clean = all(not row["findings"] for row in rows)
    return Report(data=data, render=lambda console: _render(console, data, rows), exit_code=0 if clean else 1)


def _row(
    name: str, work: Mapping[str, object], spec: BackendSpec, variables: Mapping[str, str], limit_s: float
) -> dict[str, Any]:
    given = {**work, "backend": str(spec), "config": MODES[name]}
    alone = run_child(_CHILD, {**given, "watched": False}, variables={}, limit_s=limit_s)
    ours = run_child(_CHILD, {**given, "watched": True}, variables={}, limit_s=limit_s)
    row: dict[str, Any] = {
        "mode": name,
        "alone_ms": alone["iteration_ms"],
        "ours_ms": ours["iteration_ms"],
        "ours_slowdown": ours["iteration_ms"] / alone["iteration_ms"],
        "operations": ours["operations"],
        "findings": ours["findings"],
        "torch_ms": None,
        "torch_slowdown": None,
        "torch_says": "none for this backend",
    }
    if variables:
        try:
            theirs = run_child(_CHILD, {**given, "watched": False}, variables=variables, limit_s=limit_s)
            row |= {
                "torch_ms": theirs["iteration_ms"],
                "torch_slowdown": theirs["iteration_ms"] / alone["iteration_ms"],
                "torch_says": "nothing",
            }
        except ChildFailed as error:
            row["torch_says"] = str(error)
    return row


def measure(given: Mapping[str, Any]) -> dict[str, object]:
    """One engine of its own: milliseconds of an iteration, and what the sanitizer found if it watched."""
    from outrider.cli.models import bundled
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine
    from outrider.engine.loading import load_checkpoint
    from outrider_bench.decoding import run_batch, too_few
    from outrider_sanitizer import watch

    device = Registry().create(given["backend"])
    batch, prompt, new = given["batch"], given["prompt_tokens"], given["new_tokens"]
    depth = given["draft_tokens"]
    config = EngineConfig(
        max_requests=batch,
        max_context=prompt + new + 2 * (depth + 1),
        draft_tokens=depth,
        dtype="float32",
        buckets=(batch,),
        **given["config"],
    )
    loaded = load_checkpoint(bundled("target"), device, config, draft_dir=bundled("eagle"), speculate="eagle")
    device.synchronize()
    # From the engine's making on: what its graphs hold is known only to who watched their capture.
    with watch(device) if given["watched"] else nullcontext() as report:
        engine = Engine(loaded.model, device, proposer=loaded.proposer, config=config, tokenizer=loaded.tokenizer)
        run_batch(engine, batch, prompt, max(8, new // 4))
        found = run_batch(engine, batch, prompt, new)
        device.synchronize()
    if not found.seconds:
        raise ConfigError(too_few(new, batch, prompt))
    return {
        "iteration_ms": 1e3 * statistics.median(found.seconds),
        "operations": report.operations if report is not None else None,
        "findings": [str(finding) for finding in report] if report is not None else [],
    }


def _render(console: Console, data: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    console.print(
        f"bundled model on {data['backend']} ({data['device']}), batch {data['batch']}, {data['draft_tokens']} draft tokens; "
        "milliseconds of an iteration\n"
    )
    table = Table("mode", "alone", "ours", "times", "findings", "torch's own", "times", box=None, pad_edge=False)
    for row in rows:
        torch_ms = "n/a" if row["torch_ms"] is None else f"{row['torch_ms']:.3f}"
        torch_times = "" if row["torch_slowdown"] is None else f"{row['torch_slowdown']:.1f}"
        figures = (
            f"{row['alone_ms']:.3f}",
            f"{row['ours_ms']:.3f}",
            f"{row['ours_slowdown']:.1f}",
            str(len(row["findings"])),
        )
        table.add_row(row["mode"], *figures, torch_ms, torch_times)
    console.print(table)
    for row in rows:
        for finding in row["findings"]:
            console.print(f"{row['mode']}: {finding}")
        if row["torch_ms"] is None:
            console.print(f"torch's own, {row['mode']}: {row['torch_says']}")
