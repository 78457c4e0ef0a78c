"""``outrider bench overlap``: what planning beside the draft brings, against the ways in which it brings nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.decoding import prompts_for
from outrider.cli.environment import backend_from_environment
from outrider.cli.models import DraftTokensOption, GraphsOption, bundled
from outrider.cli.report import BackendOption, JsonOption, Report
from outrider.device.errors import ConfigError
from outrider.registry import Registry

if TYPE_CHECKING:
    from outrider.device import Backend, Fence
    from outrider.engine.engine import Engine

_OBSERVED = 6
Wrap = Callable[["Fence"], "Fence"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One column: who drafts, whether there is a plan stream, and what its first part waits for."""

    name: str
    speculate: str = "eagle"
    plan_stream: bool = True
    waits_for: str = "shared_reads_done"


VARIANTS = (
    Variant("plain decoding", speculate="none"),
    Variant("no plan stream", plan_stream=False),
    Variant("whole-stream wait", waits_for="everything"),
    Variant("one draft-done event", waits_for="draft_outputs_ready"),
    Variant("two targeted fences"),
)


def overlap(
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 4,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=8, metavar="N", help="New tokens of each request.")] = 48,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, metavar="N", help="Tokens of each prompt.")] = 32,
    draft_tokens: DraftTokensOption = 4,
    graphs: GraphsOption = True,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each column, in turns; medians count.")] = 3,
    backend: BackendOption = None,
    json_output: JsonOption = False,
) -> Report:
    """Measure staged iterations of the bundled model under five ways of planning, in turns, in one run.

    The time of a step is the host's, or virtual on a simulated device. *Hidden* is the share of the plan's own time in which
    forward was busy too, from a timeline of the same work.
    """
    from outrider.cli.torch_probe import require_torch

    del json_output
    require_torch()
    registry = Registry()
    spec = registry.select(backend, backend_from_environment())
    device = registry.create(spec)
    found: dict[str, list[Mapping[str, float]]] = {variant.name: [] for variant in VARIANTS}
    tokens: dict[str, list[tuple[int, ...]]] = {}
    make = partial(_engine, batch=batch, draft_tokens=draft_tokens, graphs=graphs)
    for number in range(rounds):
        for variant in VARIANTS:
            # Each engine has a backend of its own: a device has few streams, and an engine keeps its own for good.
            fresh = registry.create(spec)
            measured, tokens[variant.name] = _measure(fresh, partial(make, fresh, variant), prompt_tokens, new_tokens)
            if number == 0 or device.control is not None:
                fresh = registry.create(spec)
                measured |= _observed(fresh, partial(make, fresh, variant), prompt_tokens, new_tokens)
            found[variant.name].append(measured)
    if len({tuple(each) for each in tokens.values()}) != 1:
        raise ConfigError("the columns put out different tokens: they didn't do the same work")
    rows = [_row(variant.name, found[variant.name]) for variant in VARIANTS]
    data: dict[str, object] = {
        "backend": device.name,
        "device": str(device.device),
        "versions": dict(device.versions()),
        "batch": batch,
        "draft_tokens": draft_tokens,
        "new_tokens": new_tokens,
        "prompt_tokens": prompt_tokens,
        "graphs": graphs,
        "time": "virtual" if device.control is not None else "host",
        "same_tokens": True,
        "results": rows,
    }
    return Report(data=data, render=lambda console: _render(console, data, rows))


def _engine(device: Backend, variant: Variant, *, batch: int, draft_tokens: int, graphs: bool) -> Engine:
    from outrider.cli.later_fence import LaterFence
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine
    from outrider.engine.loading import load_checkpoint

    fences: dict[str, Fence] = {}

    def wrap(fence: Fence) -> Fence:
        fences[fence.name] = fence
        if fence.name != "shared_reads_done" or variant.waits_for == fence.name:
            return fence
        return LaterFence(fence, variant.waits_for, fences, device)

    config = EngineConfig(
        max_requests=batch,
        max_context=512,
        draft_tokens=draft_tokens,
        overlap=True,
        graphs=graphs,
        plan_stream=variant.plan_stream,
        prefix_cache=False,
        buckets=(batch,),
    )
    draft = bundled("eagle") if variant.speculate == "eagle" else None
    loaded = load_checkpoint(bundled("target"), device, config, draft_dir=draft, speculate=variant.speculate)
    return Engine(loaded.model, device, proposer=loaded.proposer, config=config, tokenizer=loaded.tokenizer, wrap_fence=wrap)


def _measure(
    device: Backend, make: Callable[[], Engine], prompt_tokens: int, new_tokens: int
) -> tuple[dict[str, float], list[tuple[int, ...]]]:
    """Microseconds of a step in which every request decodes, by the host's clock, and the tokens."""
    from outrider.engine.request import SamplingParams

    if device.control is not None:
        device.control.reset()
    engine = make()
    prompts = prompts_for(engine, engine.config.max_requests, prompt_tokens)
    seconds, tokens = _steps(engine, prompts, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
    return {"step_us": 1e6 * statistics.median(seconds)}, tokens


def _observed(device: Backend, make: Callable[[], Engine], prompt_tokens: int, new_tokens: int) -> dict[str, float]:
    """How long the plan takes in a step, and what of it is hidden; on a simulated device the time of a step too.

    A simulated device is watched from the engine's making on, so that the operations of its graphs are known by name.
    """
    from outrider.engine.request import SamplingParams
    from outrider.sanitizer.timeline import record

    virtual = device.control is not None
    with record(device) if virtual else nullcontext() as watched:
        engine = make()
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        ids = [engine.add_request(p, params) for p in prompts_for(engine, engine.config.max_requests, prompt_tokens)]
        started: set[int] = set()
        while len(started) < len(ids):
            started |= {output.request_id for output in engine.step()}
        engine.drain()
        before, begin = engine.stats.iterations, watched.end if watched is not None else 0.0
        with nullcontext(watched) if watched is not None else record(device) as seen:
            for _ in range(_OBSERVED):
                engine.step()
            engine.drain()
        iterations = engine.stats.iterations - before
    assert seen is not None
    part = seen.between(begin, seen.end)
    found = {"step_us": part.end / iterations} if virtual else {}
    streams = engine.streams
    if streams.plan is not streams.forward:
        busy, hidden = part.hidden(streams.plan.name, streams.forward.name)
        found |= {"plan_us": busy / iterations, "hidden": hidden / busy if busy else 0.0}
    return found


def _steps(engine: Engine, prompts: list[list[int]], params: Any) -> tuple[list[float], list[tuple[int, ...]]]:
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    found: dict[int, list[int]] = {request: [] for request in ids}
    seconds: list[float] = []
    started: set[int] = set()
    over = False
    while engine.has_unfinished:
        full = len(started) == len(ids) and not over
        began = time.perf_counter()
        outputs = engine.step()
        if full:
            seconds.append(time.perf_counter() - began)
        for output in outputs:
            started.add(output.request_id)
            found[output.request_id].extend(output.tokens)
            over = over or output.finish_reason is not None
    return seconds[2:] or seconds, [tuple(found[request]) for request in ids]


def _row(name: str, runs: list[Mapping[str, float]]) -> dict[str, object]:
    def middle(key: str) -> float | None:
        values = [run[key] for run in runs if key in run]
        return statistics.median(values) if values else None

    return {"column": name, "step_us": middle("step_us"), "plan_us": middle("plan_us"), "hidden": middle("hidden")}


def _render(console: Console, data: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    console.print(
        f"backend {data['backend']} ({data['device']}), batch {data['batch']}, {data['time']} time, same tokens: yes"
    )
    table = Table("", "step, us", "plan, us", "of it hidden", box=None, pad_edge=False)
    for row in rows:
        plan = "" if row["plan_us"] is None else f"{row['plan_us']:.1f}"
        hidden = "" if row["hidden"] is None else f"{100 * row['hidden']:.0f} %"
        table.add_row(row["column"], f"{row['step_us']:.1f}", plan, hidden)
    console.print(table)
