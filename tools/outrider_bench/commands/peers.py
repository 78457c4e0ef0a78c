"""``outrider bench peers``: the same work on other engines that are installed, and on this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.environment import backend_from_environment
from outrider.cli.models import DraftTokensOption, ModeOption
from outrider.cli.report import BackendOption, Interrupted, JsonOption, Report
from outrider.cli.starting import progress_shown
from outrider.device.errors import ConfigError
from outrider.registry import Registry
from outrider_bench.child import ChildFailed, run_child
from outrider_bench.commands.decode import sizes_of
from outrider_bench.peers.sglang import variables as _sglang_variables
from outrider_bench.peers.work import Work

if TYPE_CHECKING:
    from outrider.registry import BackendSpec

OURS = "outrider"
PEERS: Mapping[str, tuple[str, ...]] = {"transformers": ("none",), "vllm": ("none", "eagle"), "sglang": ("none", "eagle")}
"""Each engine, and what it can be measured with."""
_ORDER = (OURS, *PEERS)


def peers(
    shape: Annotated[str, typer.Option("--shape", metavar="NAME", help="Random weights of this shape.")] = "llama-3.1-8b",
    batch: Annotated[str, typer.Option(metavar="1,8,32", help="Batch sizes, by commas.")] = "1,8,32",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, metavar="N")] = 512,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=2, metavar="N")] = 256,
    draft_tokens: DraftTokensOption = 3,
    accept_length: Annotated[
        float, typer.Option("--accept-length", metavar="A", help="Synthetic acceptance, the same for all that have it.")
    ] = 2.98,
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE")] = "bfloat16",
    engines: Annotated[str, typer.Option(metavar="outrider,vllm", help="Which engines.")] = ",".join(_ORDER),
    speculate: Annotated[str, typer.Option("--speculate", metavar="eagle,none", help="With drafts, without, or both.")] = (
        "eagle,none"
    ),
    mode: ModeOption = "fused",
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one engine may take for one of them.")] = 900.0,
    backend: BackendOption = None,
    json_output: JsonOption = False,
) -> Report:
    """Decode the same work on this engine and on whichever of transformers, vLLM and SGLang is installed.

    One after the other, each in a process of its own, in this run. Acceptance is synthetic, by each engine's own
    setting for that; transformers has none and decodes plainly. What isn't installed is listed as such.
    """
    del json_output
    chosen = [name.strip() for name in engines.split(",")]
    kinds = [name.strip() for name in speculate.split(",")]
    for name, given, known in (("--engines", chosen, _ORDER), ("--speculate", kinds, ("eagle", "none"))):
        unknown = [each for each in given if each not in known]
        if unknown or len(set(given)) != len(given):
            raise ConfigError(f"{name} is {','.join(given)!r}; expected some of {', '.join(known)}, each once")
    registry = Registry()
    spec = registry.select(backend, backend_from_environment())
    work = Work(
        shape=shape,
        dtype=dtype,
        batches=tuple(sizes_of(batch)),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        draft_tokens=draft_tokens,
        accept_length=accept_length,
        device=str(registry.create(spec).device),
    )
    jobs = [(name, kind) for name in _ORDER for kind in kinds if name in chosen and (name == OURS or kind in PEERS[name])]
    found: list[dict[str, Any]] = []
    data: dict[str, object] = {
        **asdict(work),
        "backend": str(spec),
        "acceptance": f"synthetic, mean {accept_length:g}",
        "engines": found,
    }

    def render(console: Console) -> None:
        _render(console, data, found)

    with progress_shown() as tell:
        for name, kind in jobs:
            tell(f"{name}, {kind}", 0, 1)
            try:
                found.append(_measured(name, kind, work, spec, mode=mode or "fused", limit_s=limit))
            except KeyboardInterrupt:
                done = f"interrupted at {name}, {kind}, after {len(found)} of {len(jobs)} measurements"
                raise Interrupted(done, data, render if found else None) from None
            tell(f"{name}, {kind}", 1, 1)
    return Report(data=data, render=render)


def _measured(name: str, kind: str, work: Work, spec: BackendSpec, *, mode: str, limit_s: float) -> dict[str, Any]:
    """One engine's results; or why there are none."""
    base: dict[str, Any] = {"engine": name, "speculate": kind, "version": None, "settings": None, "results": []}
    if name != OURS and find_spec(name) is None:
        return base | {"status": "not installed"}
    try:
        if name == OURS:
            return base | {"status": "measured", **_ours(work, spec, kind, mode, limit_s)}
        variables = _sglang_variables(work.accept_length, kind) if name == "sglang" else {}
        given = {**asdict(work), "speculate": kind}
        return base | {
            "status": "measured",
            **run_child(f"outrider_bench.peers.{name}", given, variables=variables, limit_s=limit_s),
        }
    except ChildFailed as error:
        return base | {"status": f"failed: {error}"}


def _ours(work: Work, spec: BackendSpec, kind: str, mode: str, limit_s: float) -> dict[str, Any]:
    given = {
        "batch": ",".join(map(str, work.batches)),
        "new_tokens": work.new_tokens,
        "prompt_tokens": str(work.prompt_tokens),
        "backend": str(spec),
        "speculate": kind,
        "draft_tokens": work.draft_tokens,
        "dtype": work.dtype,
        "shape": work.shape,
        "accept_length": work.accept_length if kind == "eagle" else None,
        "mode": mode,
        "graphs": True,
        "overlap": True,
    }
    data = run_child("outrider_bench.decode_child", given, variables={}, limit_s=limit_s)
    keys = ("batch", "iteration_ms", "tokens_per_s", "acceptance_length", "limit_ms", "ratio_to_limit")
    rows = [{"speculate": kind, **{key: row[key] for key in keys}} for row in data["results"]]
    return {"version": version("outrider"), "settings": f"{mode}, overlap, {data['kernels']}", "results": rows}


def _render(console: Console, data: dict[str, Any], found: list[dict[str, Any]]) -> None:
    console.print(
        f"random weights of {data['shape']} on {data['backend']} ({data['device']}), {data['dtype']}, "
        f"{data['prompt_tokens']} prompt and {data['new_tokens']} new tokens, {data['draft_tokens']} draft tokens"
    )
    console.print(f"ACCEPTANCE IS {str(data['acceptance']).upper()}: tokens/s is what it would be, the text is nonsense\n")
    table = Table("engine", "speculate", "batch", "iteration, ms", "tokens/s", "accepted", box=None, pad_edge=False)
    for each in found:
        name = each["engine"] if each["version"] is None else f"{each['engine']} {each['version']}"
        if not each["results"]:
            table.add_row(name, each["speculate"], "", each["status"].split(":")[0])
        for row in each["results"]:
            figures = (f"{row[key]:.3f}" for key in ("iteration_ms", "tokens_per_s", "acceptance_length"))
            table.add_row(name, each["speculate"], str(row["batch"]), *figures)
    console.print(table)
    for each in found:
        if each["status"].startswith("failed"):
            console.print(f"{each['engine']}, {each['speculate']}: {each['status']}")
    for engine, settings in {(each["engine"], each["settings"]): None for each in found if each["settings"]}:
        console.print(f"{engine}: {settings}")
