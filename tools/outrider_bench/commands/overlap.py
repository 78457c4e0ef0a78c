"""``outrider bench overlap``: what planning beside the draft saves, compared with ways of planning that save nothing."""

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

from outrider.cli.environment import backend_from_environment
from outrider.cli.models import DraftTokensOption, bundled
from outrider.cli.report import BackendOption, JsonOption, Report
from outrider.device.errors import ConfigError
from outrider.registry import Registry
from outrider_bench.decoding import prompts_for
from outrider_bench.launch_options import GraphsOption
from outrider_bench.random_model import RandomModel, check_acceptance, check_lengths

if TYPE_CHECKING:
    from outrider.device import Backend, Fence
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine
    from outrider.model import Decoder, EagleHead, ModelConfig
    from outrider.registry import BackendSpec
    from outrider.speculative.proposer import Proposer

_OBSERVED = 6
Tokens = list[tuple[int, ...]]
Measured = dict[str, list[Mapping[str, float]]]


@dataclass(frozen=True, slots=True)
class Variant:
    """One column: its proposer, whether there is a plan stream, and what its first part waits for."""

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
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each column, in turns that rotate.")] = 7,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape", metavar="NAME", help="Random weights of this shape instead of the bundled model: llama-3.1-8b."
        ),
    ] = None,
    speculate: Annotated[
        str, typer.Option("--speculate", metavar="NAME", help="Proposer of the columns that speculate: eagle.")
    ] = "eagle",
    accept_length: Annotated[
        float | None,
        typer.Option(
            "--accept-length",
            metavar="A",
            help="With --shape, synthetic acceptance: tokens that an iteration yields on average.",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="float32 (default), bfloat16 (with --shape), float16, …")
    ] = None,
    backend: BackendOption = None,
    json_output: JsonOption = False,
) -> Report:
    """Measure staged iterations under five ways of planning, in turns, in one run.

    The time of a step is the host's, or virtual on a simulated device. Every column has an engine of its own, made before
    anything is timed, and each round begins with another column. *Hidden* is the share of the plan's own time in which
    forward was busy too, from a timeline of the same work.
    """
    from outrider.cli.torch_probe import require_torch

    del json_output
    require_torch()
    if speculate != "eagle":
        raise ConfigError(f"--speculate is {speculate!r}; the columns that speculate draft with eagle")
    check_acceptance(accept_length, shape)
    model = _config_of(shape)
    check_lengths(model, shape or "the bundled model", prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    registry = Registry()
    spec = registry.select(backend, backend_from_environment())
    device = registry.create(spec)
    dtype = dtype or ("float32" if shape is None else "bfloat16")
    work = _Work(
        spec=spec,
        batch=batch,
        draft_tokens=draft_tokens,
        graphs=graphs is not False,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        context=min(model.max_context, max(512, prompt_tokens + new_tokens + 2 * (draft_tokens + 1))),
        dtype=dtype,
        random=None
        if shape is None
        else RandomModel(shape=shape, speculate="eagle", draft_tokens=draft_tokens, accept_length=accept_length),
    )
    virtual = device.control is not None
    found, tokens = _virtual(work) if virtual else _timed(work, rounds)
    # Synthetic acceptance makes other text than plain decoding, and coarse rounding may: then the others are compared.
    alike = [v.name for v in VARIANTS if v.speculate != "none" or (accept_length is None and dtype in ("float32", "float64"))]
    if len({tuple(tokens[name]) for name in alike}) != 1:
        raise ConfigError(f"the columns put out different tokens: they didn't do the same work ({', '.join(alike)})")
    rows = [_row(variant.name, found[variant.name]) for variant in VARIANTS]
    data: dict[str, object] = {
        "backend": device.name,
        "device": str(device.device),
        "versions": dict(device.versions()),
        "kernels": device.kernels_in_use.name,
        "plans_on_host": device.kernels_in_use.plans_on_host,
        **(work.random.described if work.random is not None else {"model": "bundled", "acceptance": "real"}),
        "dtype": dtype,
        "batch": batch,
        "draft_tokens": draft_tokens,
        "new_tokens": new_tokens,
        "prompt_tokens": prompt_tokens,
        "graphs": graphs,
        "rounds": 1 if virtual else rounds,
        "time": "virtual" if virtual else "host",
        "same_tokens": alike,
        "results": rows,
    }
    return Report(data=data, render=lambda console: _render(console, data, rows))


def _config_of(shape: str | None) -> ModelConfig:
    from outrider.model import ModelConfig
    from outrider.model.shapes import shape_config

    return ModelConfig.from_checkpoint(bundled("target")) if shape is None else shape_config(shape)


@dataclass(kw_only=True, slots=True)
class _Work:
    """What every column does. Random weights are made once; on a simulated device, once for each column."""

    spec: BackendSpec
    batch: int
    draft_tokens: int
    graphs: bool
    prompt_tokens: int
    new_tokens: int
    context: int
    dtype: str
    random: RandomModel | None
    _shared: tuple[Decoder, EagleHead] | None = None

    def engine(self, device: Backend, variant: Variant) -> Engine:
        """The engine of a column. Each has a backend of its own: a device has few streams, and an engine keeps its own."""
        from outrider.engine.config import EngineConfig
        from outrider.engine.engine import Engine
        from outrider.engine.loading import load_checkpoint
        from outrider_bench.later_fence import LaterFence

        fences: dict[str, Fence] = {}

        def wrap(fence: Fence) -> Fence:
            fences[fence.name] = fence
            if fence.name != "shared_reads_done" or variant.waits_for == fence.name:
                return fence
            return LaterFence(fence, variant.waits_for, fences, device)

        config = EngineConfig(
            max_requests=self.batch,
            max_context=self.context,
            draft_tokens=self.draft_tokens,
            dtype=self.dtype,
            overlap=True,
            mode="staged",
            graphs=self.graphs,
            plan_stream=variant.plan_stream,
            prefix_cache=False,
            buckets=(self.batch,),
        )
        if self.random is not None:
            model, proposer = self._random(device, self.random, variant, config)
            return Engine(model, device, proposer=proposer, config=config, wrap_fence=wrap)
        draft = bundled("eagle") if variant.speculate == "eagle" else None
        loaded = load_checkpoint(bundled("target"), device, config, draft_dir=draft, speculate=variant.speculate)
        return Engine(
            loaded.model, device, proposer=loaded.proposer, config=config, tokenizer=loaded.tokenizer, wrap_fence=wrap
        )

    def _random(
        self, device: Backend, random: RandomModel, variant: Variant, config: EngineConfig
    ) -> tuple[Decoder, Proposer | None]:
        from outrider.model import Decoder, EagleHead
        from outrider.speculative.eagle import EagleProposer
        from outrider_bench.random_weights import random_decoder, random_eagle, shape_config
        from outrider_bench.synthetic import with_synthetic_acceptance

        shared = self._shared
        if shared is None:
            made = random_decoder(shape_config(random.shape), backend=device, dtype=config.torch_dtype)
            shared = made, random_eagle(made, backend=device)
            device.synchronize()
            if device.control is None:
                self._shared = shared
        target, head = shared
        if variant.speculate == "none":
            return Decoder(target.config, target.weights, device.kernels_in_use), None
        kernels = device.kernels_in_use
        if random.accept_length is not None:
            kernels = with_synthetic_acceptance(
                kernels, random.accept_length, random.draft_tokens, context=target.config.max_context
            )
        model = Decoder(target.config, target.weights, kernels)
        drafts = EagleHead(head.config, head.weights, model)
        return model, EagleProposer(drafts, draft_tokens=self.draft_tokens)


def _timed(work: _Work, rounds: int) -> tuple[Measured, dict[str, Tokens]]:
    """By the host's clock: each column runs once beforehand, then in turns that rotate, and at last it's observed."""
    registry = Registry()
    engines = {variant.name: work.engine(registry.create(work.spec), variant) for variant in VARIANTS}
    names = list(engines)
    tokens = {name: _run(engine, work)[1] for name, engine in engines.items()}
    found: Measured = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            seconds, out = _run(engines[name], work)
            if out != tokens[name]:
                raise ConfigError(f"the column {name!r} put out different tokens in two runs")
            found[name].append({"step_us": 1e6 * statistics.median(seconds)})
    for name, engine in engines.items():
        found[name].append(_observed(engine.backend, lambda engine=engine: engine, work))  # type: ignore[misc]
    return found, tokens


def _virtual(work: _Work) -> tuple[Measured, dict[str, Tokens]]:
    """By virtual time, which is the same in every run."""
    registry = Registry()
    found: Measured = {}
    tokens: dict[str, Tokens] = {}
    for variant in VARIANTS:
        tokens[variant.name] = _run(work.engine(registry.create(work.spec), variant), work)[1]
        fresh = registry.create(work.spec)
        found[variant.name] = [_observed(fresh, partial(work.engine, fresh, variant), work)]
    return found, tokens


def _run(engine: Engine, work: _Work) -> tuple[list[float], Tokens]:
    """Seconds of each step in which every request decodes, and the tokens."""
    from outrider.engine.requests.sampling import SamplingParams

    prompts = prompts_for(engine, work.batch, work.prompt_tokens)
    return _steps(engine, prompts, SamplingParams(max_tokens=work.new_tokens, ignore_eos=True))


def _observed(device: Backend, make: Callable[[], Engine], work: _Work) -> dict[str, float]:
    """How long the plan takes in a step, and how much of it is hidden; on a simulated device also the time of a step.

    A simulated device is watched from the engine's making on, so that the operations of its graphs are known by name.
    """
    from outrider.engine.requests.sampling import SamplingParams
    from outrider_trace.timeline import record

    virtual = device.control is not None
    with record(device) if virtual else nullcontext() as watched:
        engine = make()
        params = SamplingParams(max_tokens=work.new_tokens, ignore_eos=True)
        ids = [engine.add_request(prompt, params) for prompt in prompts_for(engine, work.batch, work.prompt_tokens)]
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
        for request in engine.open_requests:
            engine.abort(request)
    assert seen is not None
    part = seen.between(begin, seen.end)
    found = {"step_us": part.end / iterations} if virtual else {}
    streams = engine.streams
    if streams.plan is not streams.forward:
        busy, hidden = part.hidden(streams.plan.name, streams.forward.name)
        found |= {"plan_us": busy / iterations, "hidden": hidden / busy if busy else 0.0}
    return found


def _steps(engine: Engine, prompts: list[list[int]], params: Any) -> tuple[list[float], Tokens]:
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
    def of(key: str) -> list[float]:
        return [run[key] for run in runs if key in run]

    steps = of("step_us")
    planned = {key: statistics.median(of(key)) if of(key) else None for key in ("plan_us", "hidden")}
    return {
        "column": name,
        "step_us": statistics.median(steps),
        "step_us_least": min(steps),
        "step_us_most": max(steps),
        **planned,
    }


def _render(console: Console, data: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    console.print(
        f"{data['model']} on {data['backend']} ({data['device']}), kernels {data['kernels']}, {data['dtype']}, batch "
        f"{data['batch']}, {data['time']} time, {data['rounds']} rounds"
    )
    if data["acceptance"] != "real":
        console.print(f"ACCEPTANCE IS {str(data['acceptance']).upper()}: the text is nonsense")
    console.print(f"same tokens: {', '.join(data['same_tokens'])}\n")
    table = Table("", "step, us", "(least to most)", "plan, us", "of it hidden", box=None, pad_edge=False)
    for row in rows:
        plan = "" if row["plan_us"] is None else f"{row['plan_us']:.1f}"
        hidden = "" if row["hidden"] is None else f"{100 * row['hidden']:.0f} %"
        spread = f"{row['step_us_least']:.1f} to {row['step_us_most']:.1f}"
        table.add_row(row["column"], f"{row['step_us']:.1f}", spread, plan, hidden)
    console.print(table)
