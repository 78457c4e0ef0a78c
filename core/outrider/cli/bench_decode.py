"""``outrider bench decode``: the time of a decode iteration, against its limit."""

from __future__ import annotations

import statistics
import textwrap
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.models import (
    DoorOption,
    DraftNodesOption,
    DraftOption,
    DraftTokensOption,
    DraftTopkOption,
    GraphsOption,
    ModelOption,
    ModeOption,
    OverlapOption,
    Running,
    SpeculateOption,
    Speculation,
    load,
)
from outrider.cli.random_model import RandomModel
from outrider.cli.report import BackendOption, JsonOption, Report
from outrider.device.errors import ConfigError

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

_WARM_UP_TOKENS = 8
_COLUMNS = ("batch", "iteration_ms", "tokens_per_s", "acceptance_length", "limit_ms", "ratio_to_limit", "iterations")


def decode(
    batch: Annotated[str, typer.Option(metavar="1,4", help="Batch sizes, by commas.")] = "1",
    new_tokens: Annotated[int, typer.Option("--new-tokens", metavar="N", help="New tokens of each request.")] = 64,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", metavar="N", help="Tokens of each prompt.")] = 64,
    model: ModelOption = None,
    draft: DraftOption = None,
    backend: BackendOption = None,
    speculate: SpeculateOption = None,
    draft_tokens: DraftTokensOption = 4,
    draft_topk: DraftTopkOption = 1,
    draft_nodes: DraftNodesOption = None,
    through_transformers: DoorOption = False,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="float32 (default), bfloat16 (with --shape), float16, …")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option("--shape", metavar="NAME", help="Random weights of this shape instead of a checkpoint: llama-3.1-8b."),
    ] = None,
    accept_length: Annotated[
        float | None,
        typer.Option(
            "--accept-length",
            metavar="A",
            help="With --shape, synthetic acceptance: tokens that an iteration yields on average, by decree.",
        ),
    ] = None,
    mode: ModeOption = "staged",
    graphs: GraphsOption = False,
    overlap: OverlapOption = False,
    json_output: JsonOption = False,
) -> Report:
    """Measure decode iterations: median time, tokens a second, and the ratio to the limit.

    The limit is the bytes that an iteration must read over the bandwidth measured in the same run. An iteration is timed
    on the host, results read back included, while the whole batch decodes.
    """
    from outrider.cli.torch_probe import require_torch

    sizes = _sizes(batch)
    running = Running(mode=mode, graphs=graphs, overlap=overlap)
    for name, value in (("--new-tokens", new_tokens), ("--prompt-tokens", prompt_tokens)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; expected at least 1")
    del json_output
    require_torch()
    from outrider.cli.limits import measure_bandwidth

    if accept_length is not None and shape is None:
        raise ConfigError("--accept-length is synthetic and goes with --shape alone: a real model accepts what it accepts")
    if shape is not None:
        given = {"--model": model, "--draft": draft, "--through-transformers": through_transformers or None}
        for option, unwanted in given.items():
            if unwanted is not None:
                raise ConfigError(f"{option} doesn't go with --shape, which has random weights of its own")
        if draft_topk != 1 or draft_nodes is not None:
            raise ConfigError("--shape drafts chains alone; leave out --draft-topk and --draft-nodes")
        work = RandomModel(
            shape=shape, speculate=speculate or "eagle", draft_tokens=draft_tokens, accept_length=accept_length
        )
        dtype = dtype or "bfloat16"
        engine = work.load(
            backend,
            running=running,
            max_requests=max(sizes),
            dtype=dtype,
            max_context=prompt_tokens + new_tokens + 2 * (draft_tokens + 1),
        )
        described = work.described
    else:
        speculation = Speculation.choose(
            speculate,
            model=model,
            draft=draft,
            draft_tokens=draft_tokens,
            draft_topk=draft_topk,
            draft_nodes=draft_nodes,
            through_transformers=through_transformers,
        )
        dtype = dtype or "float32"
        engine = load(backend, speculation, max_requests=max(sizes), dtype=dtype, running=running)
        described = {
            "model": _shown(speculation.model, model),
            "draft": None if speculation.kind == "none" else _shown(speculation.draft, draft),
            "speculate": speculation.kind,
            "acceptance": "real",
        }
    bandwidth = measure_bandwidth(engine.backend)
    _run(engine, max(sizes), prompt_tokens, _WARM_UP_TOKENS)
    rows = [_measure(engine, size, prompt_tokens, new_tokens, bandwidth) for size in sizes]
    data: dict[str, object] = {
        "backend": engine.backend.name,
        "device": str(engine.backend.device),
        "versions": dict(engine.backend.versions()),
        "kernels": engine.model.kernels.name,
        **described,
        "draft_tokens": engine.proposer.depth,
        "dtype": dtype,
        **asdict(running),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "results": rows,
    }
    return Report(data=data, render=lambda console: _render(console, data, rows))


def _measure(engine: Engine, batch: int, prompt_tokens: int, new_tokens: int, bandwidth: float) -> dict[str, object]:
    from outrider.cli.limits import iteration_bytes

    seconds, tokens, context = _run(engine, batch, prompt_tokens, new_tokens)
    if not seconds:
        raise ConfigError(
            f"--new-tokens {new_tokens} is too few for batch {batch}: no iteration had the whole batch decoding; ask for more"
        )
    needed = iteration_bytes(engine, batch=batch, context=context)
    iteration_ms = 1e3 * statistics.median(seconds)
    limit_ms = 1e3 * needed / bandwidth
    return {
        "batch": batch,
        "iteration_ms": iteration_ms,
        "iteration_ms_min": 1e3 * min(seconds),
        "iteration_ms_max": 1e3 * max(seconds),
        "tokens_per_s": tokens / sum(seconds),
        "acceptance_length": tokens / (len(seconds) * batch),
        "bytes_per_iteration": round(needed),
        "mean_context": context,
        "limit_ms": limit_ms,
        "ratio_to_limit": iteration_ms / limit_ms,
        "iterations": len(seconds),
    }


def _run(engine: Engine, batch: int, prompt_tokens: int, new_tokens: int) -> tuple[list[float], int, float]:
    """Seconds of each iteration in which every request decodes, the tokens they gave, and their mean context."""
    from outrider.engine.request import SamplingParams

    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    lengths = {engine.add_request(prompt, params): prompt_tokens for prompt in prompts_for(engine, batch, prompt_tokens)}
    started: set[int] = set()
    seconds: list[float] = []
    contexts: list[float] = []
    counted, full = 0, True
    while engine.has_unfinished:
        decoding = len(started) == batch
        context = sum(lengths.values()) / batch
        began = time.perf_counter()
        outputs = engine.step()
        elapsed = time.perf_counter() - began
        full = full and not (decoding and any(output.finish_reason for output in outputs))
        for output in outputs:
            started.add(output.request_id)
            lengths[output.request_id] += len(output.tokens)
        if decoding and full:
            seconds.append(elapsed)
            contexts.append(context)
            counted += sum(len(output.tokens) for output in outputs)
    return seconds, counted, statistics.fmean(contexts) if contexts else 0.0


def prompts_for(engine: Engine, batch: int, prompt_tokens: int) -> list[list[int]]:
    """Different stretches of real text: what a model has never seen anything like, it doesn't accept drafts for.

    An engine without a tokenizer has random weights, to which every token is alike.
    """
    if not engine.has_tokenizer:
        vocabulary = engine.model.config.vocab_size
        return [[(97 * i + 31 * j) % vocabulary for j in range(prompt_tokens)] for i in range(batch)]
    text = Path(textwrap.__file__).read_text(encoding="utf-8")
    tokens = engine.tokenizer.encode(text, special_tokens=False)
    tokens = tokens * (1 + (prompt_tokens + batch * 97) // len(tokens))
    return [tokens[97 * i : 97 * i + prompt_tokens] for i in range(batch)]


def _sizes(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--batch is {text!r}; expected whole numbers of at least 1, by commas, such as 1,4")
    return [int(part) for part in parts]


def _shown(path: Path | None, given: Path | None) -> str:
    return str(path) if given is not None else "bundled"


def _render(console: Console, data: dict[str, object], rows: list[dict[str, Any]]) -> None:
    console.print(
        f"{data['model']} model on {data['backend']} ({data['device']}), {data['dtype']}, speculate {data['speculate']} with "
        f"{data['draft_tokens']} draft tokens, {data['prompt_tokens']} prompt and {data['new_tokens']} new tokens"
    )
    if data["acceptance"] != "real":
        console.print(f"ACCEPTANCE IS {str(data['acceptance']).upper()}: tokens/s is what it would be, the text is nonsense")
    console.print(f"bandwidth measured in this run: {data['bandwidth_gb_per_s']:.1f} GB/s\n")
    table = Table(*(name.replace("_", " ") for name in _COLUMNS), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(f"{row[key]:.3f}" if isinstance(row[key], float) else str(row[key]) for key in _COLUMNS))
    console.print(table)
