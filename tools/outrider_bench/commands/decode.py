"""``outrider bench decode``: the time of a decode iteration, against its limit."""

from __future__ import annotations

import statistics
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.engine_options import with_options
from outrider.cli.files import check_output
from outrider.cli.models import (
    DraftOption,
    DraftOutputHeadOption,
    DraftTokensOption,
    DraftTopkOption,
    DraftVocabularyOption,
    ModelOption,
    SpeculateOption,
    Speculation,
    TransformersOption,
    launched,
    load,
)
from outrider.cli.rank_processes import DataParallelOption, Joined, TensorParallelOption, run_on_ranks
from outrider.cli.report import BackendOption, JsonOption, Report
from outrider.device.errors import CapabilityError, ConfigError
from outrider_bench.decoding import profile_batch, run_batch, too_few
from outrider_bench.engines import DraftQuantizeOption, check_room
from outrider_bench.launch_options import DraftLengthOption, LaunchOptions
from outrider_bench.outputs import write_plot
from outrider_bench.random_model import DRAFT_LAYERS, RandomModel, check_acceptance, check_draft_quantize

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider_bench.collective_limits import CollectiveCost

_WARM_UP_TOKENS = 8
_COLUMNS = {
    "batch": "batch",
    "prompt_tokens": "prompt",
    "iteration_ms": "ms",
    "tokens_per_s": "tokens/s",
    "acceptance_length": "accepted",
    "limit_ms": "limit ms",
    "ratio_to_limit": "ratio",
    "device_idle_fraction": "idle",
    "host_ms": "host ms",
    "iterations": "times",
}
_KERNELS_SHOWN = 24
_NAME_SHOWN = 72


@with_options
def decode(
    context: typer.Context,
    *,
    batch: Annotated[str, typer.Option(metavar="1,4", help="Batch sizes, by commas.")] = "1",
    new_tokens: Annotated[int, typer.Option("--new-tokens", metavar="N", help="New tokens of each request.")] = 64,
    prompt_tokens: Annotated[
        str, typer.Option("--prompt-tokens", metavar="512,4096", help="Tokens of each prompt, several lengths by commas.")
    ] = "64",
    model: ModelOption = None,
    draft: DraftOption = None,
    backend: BackendOption = None,
    speculate: SpeculateOption = None,
    draft_tokens: DraftTokensOption = 4,
    draft_topk: DraftTopkOption = 1,
    draft_output_head: DraftOutputHeadOption = None,
    draft_vocabulary: DraftVocabularyOption = None,
    draft_quantize: DraftQuantizeOption = None,
    through_transformers: TransformersOption = False,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape", metavar="NAME|config.json", help="Random weights of this shape instead of a checkpoint: llama-3.1-8b."
        ),
    ] = None,
    accept_length: Annotated[
        float | None,
        typer.Option(
            "--accept-length",
            metavar="A",
            help="With --shape, synthetic acceptance: tokens that an iteration yields on average.",
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize",
            metavar="FORMAT",
            help="With --shape, how layers are quantised: fp8, fp8-tensor, fp8-block, int8, int4, int4-zeros, int4-32.",
        ),
    ] = None,
    lm_head: Annotated[bool, typer.Option("--lm-head", help="With --quantize, the output head too.")] = False,
    options: LaunchOptions,
    draft_length: DraftLengthOption = None,
    draft_layers: Annotated[
        int | None,
        typer.Option(
            "--draft-layers",
            min=1,
            metavar="N",
            help="With --shape and --speculate dflash: the drafter's layers. Default: 5.",
        ),
    ] = None,
    tensor_parallel: TensorParallelOption = 1,
    data_parallel: DataParallelOption = 1,
    plot: Annotated[
        Path | None, typer.Option(metavar="F.svg", help="Draw iterations against the limit, over batch sizes and prompts.")
    ] = None,
    by_kernel: Annotated[
        bool, typer.Option("--by-kernel", help="Show where the device's time goes, kernel by kernel.")
    ] = False,
    json_output: JsonOption = False,
) -> Report:
    """Measure decode iterations: median time, tokens a second, and the ratio to the limit.

    The limit is the bytes that an iteration must read over the bandwidth measured in the same run; on several ranks the
    bytes of one of them, and the time of the collectives, each measured alone. An iteration is timed
    on the host, results read back included, while the whole batch decodes; host ms is the part in which the host wasn't
    blocked waiting for the device. The device's idle time comes from a second pass of a few iterations under torch's
    profiler.
    """
    from outrider.cli.torch_probe import require_torch

    sizes, lengths = sizes_of(batch), sizes_of(prompt_tokens, "--prompt-tokens", "512,4096")
    running, engine_sizes, dtype = replace(options.running(), draft_length=draft_length), options.sizes(), options.dtype
    max_requests, max_context = options.max_requests, options.max_context
    if max_requests is not None and max_requests < max(sizes):
        raise ConfigError(f"--max-requests is {max_requests}, and --batch {max(sizes)} requests decode together; raise it")
    if quantize is not None and shape is None:
        raise ConfigError(
            "--quantize makes random weights and goes with --shape alone: a checkpoint is quantised or it isn't"
        )
    if lm_head and quantize is None:
        raise ConfigError("--lm-head says what --quantize takes too; leave it out, or name a format with --quantize")
    if draft_layers is not None and (shape is None or speculate != "dflash"):
        raise ConfigError("--draft-layers is the size of a random block drafter: it goes with --shape and --speculate dflash")
    if new_tokens < 1:
        raise ConfigError(f"--new-tokens is {new_tokens}; expected at least 1")
    check_output("--plot", plot, ".svg")
    require_torch()
    ranks_report = run_on_ranks(context.obj, tensor_parallel, data_parallel, json_output=json_output)
    if ranks_report is not None:
        return ranks_report
    from outrider.engine.config import Choice
    from outrider.model.shapes import shape_config
    from outrider_bench.collective_limits import measure_collectives
    from outrider_bench.limits import measure_bandwidth

    check_acceptance(accept_length, shape)
    check_draft_quantize(draft_quantize, shape, quantize)
    joined = Joined(tensor_parallel, data_parallel)
    beside = [Choice("max_requests", max(sizes), "--batch")] if max_requests is None else []
    if shape is not None:
        given = {"--model": model, "--draft": draft, "--through-transformers": through_transformers or None}
        for option, unwanted in given.items():
            if unwanted is not None:
                raise ConfigError(f"{option} doesn't go with --shape, which has random weights of its own")
        if draft_topk != 1:
            raise ConfigError("--shape drafts chains alone; leave out --draft-topk")
        work = RandomModel(
            shape=shape,
            speculate=speculate or "eagle",
            draft_tokens=draft_tokens,
            accept_length=accept_length,
            quantize=quantize,
            quantize_head=lm_head,
            draft_output_head=draft_output_head,
            draft_vocabulary=draft_vocabulary,
            draft_quantize=draft_quantize,
            draft_layers=draft_layers or DRAFT_LAYERS,
        )
        room = min(max(lengths) + new_tokens + 2 * (draft_tokens + 1), shape_config(shape).max_context)
        if max_context is None:
            beside.append(Choice("max_context", room, "prompt and new tokens"))
        engine = work.load(
            backend,
            running=running,
            max_requests=max(sizes),
            dtype=dtype,
            max_context=room,
            sizes=engine_sizes,
            say=not json_output,
            beside=beside,
            joined=joined,
        )
        described = work.described
    else:
        speculation = Speculation.choose(
            speculate,
            model=model,
            draft=draft,
            draft_tokens=draft_tokens,
            draft_topk=draft_topk,
            draft_output_head=draft_output_head,
            draft_vocabulary=draft_vocabulary,
            through_transformers=through_transformers,
        )
        engine = load(
            backend,
            speculation,
            max_requests=max(sizes),
            dtype=dtype,
            running=running,
            sizes=engine_sizes,
            say=not json_output,
            command_choices=beside,
            joined=joined,
        )
        described = {
            "model": _shown(speculation.model, model),
            "draft": None if speculation.kind == "none" else _shown(speculation.draft, draft),
            "speculate": speculation.kind,
            "acceptance": "real",
        }
    costs = measure_collectives(engine, sizes)
    if engine.follows:
        with joined:
            engine.follow()
        return Report.silent_report()
    with joined, closing(engine):
        check_room(engine, f"--prompt-tokens {max(lengths)} and --new-tokens {new_tokens}", max(lengths) + new_tokens)
        started = [f"{each}" for each in (engine.warm_up, engine.captured, engine.draft_length) if each is not None]
        known = sum(engine.model.kernels.compiled().values())
        bandwidth = measure_bandwidth(engine.backend)
        run_batch(engine, max(sizes), max(lengths), min(_WARM_UP_TOKENS, new_tokens))
        cases = [(size, length) for length in lengths for size in sizes]
        measured = [(case, _measure(engine, *case, new_tokens, bandwidth, costs[case[0]])) for case in cases]
        missing = [case for case, row in measured if row is None]
        rows = [row for _, row in measured if row is not None]
        if not rows:
            raise ConfigError(f"{too_few(new_tokens, *missing[0])}; ask for more")
        for case, row in measured:
            if row is not None:
                row |= _profiled(engine, *case, new_tokens, by_kernel)
        started += [f"{too_few(new_tokens, *case)}: not measured" for case in missing]
        data: dict[str, object] = {
            "backend": engine.backend.name,
            "device": str(engine.backend.device),
            "versions": dict(engine.backend.versions()),
            "kernels": engine.model.kernels.name,
            **described,
            "draft_tokens": engine.proposer.depth,
            **launched(engine, beside),
            "prompt_tokens": lengths,
            "new_tokens": new_tokens,
            "bandwidth_gb_per_s": bandwidth / 1e9,
            "graphs_captured": asdict(engine.captured) if engine.captured is not None else None,
            "draft_length_decided": asdict(engine.draft_length),
            "results": rows,
            "not_measured": [{"batch": size, "prompt_tokens": length} for size, length in missing],
        }
        if engine.warm_up is not None:
            later = sum(engine.model.kernels.compiled().values()) - known
            started.append(f"kernels compiled since: {later}")
            data["kernels_compiled"] = {**asdict(engine.warm_up), "since": later}
        code = 0
        if plot is not None:
            from outrider_bench.plot import limits_svg

            drawn = limits_svg(rows, title=f"{data['model']}, {data['speculate']}, {data['dtype']}")
            code = write_plot(plot, drawn, data)
            started.append(str(data.get("plot_failed", f"plot: {plot}")))
        return Report(data=data, render=lambda console: _render(console, data, rows, started), exit_code=code)


def _measure(
    engine: Engine, batch: int, prompt_tokens: int, new_tokens: int, bandwidth: float, collectives: CollectiveCost
) -> dict[str, object] | None:
    """One line of the table; None where no iteration had the whole batch decoding."""
    from outrider_bench.limits import iteration_bytes

    found = run_batch(engine, batch, prompt_tokens, new_tokens)
    seconds, tokens = found.seconds, found.tokens
    if not seconds:
        return None
    needed = iteration_bytes(engine, batch=batch, context=found.context)
    iteration_ms = 1e3 * statistics.median(seconds)
    limit_ms = None if needed is None else 1e3 * (needed / bandwidth + collectives.seconds)
    return {
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "iteration_ms": iteration_ms,
        "iteration_ms_min": 1e3 * min(seconds),
        "iteration_ms_max": 1e3 * max(seconds),
        "tokens_per_s": tokens / sum(seconds),
        "acceptance_length": tokens / (len(seconds) * batch),
        "bytes_per_iteration": None if needed is None else round(needed),
        "mean_context": found.context,
        "collectives": collectives.calls,
        "collectives_ms": 1e3 * collectives.seconds,
        "limit_ms": limit_ms,
        "ratio_to_limit": None if limit_ms is None else iteration_ms / limit_ms,
        "host_ms": 1e3 * statistics.median(found.host_seconds),
        "iterations": len(seconds),
    }


def _profiled(engine: Engine, batch: int, prompt_tokens: int, new_tokens: int, by_kernel: bool) -> dict[str, object]:
    """What the device did, in a pass of its own. Raises :class:`CapabilityError` where kernels are asked for in vain."""
    found = profile_batch(engine, batch, prompt_tokens, new_tokens)
    if found is None:
        if by_kernel:
            raise CapabilityError(
                f"{engine.backend.label} doesn't say what it ran: torch's profiler observes no activity of it over the "
                f"iterations that --new-tokens {new_tokens} leaves room for; leave out --by-kernel"
            )
        return {"device_idle_fraction": None}
    profile, iterations = found
    row: dict[str, object] = {
        "device_idle_fraction": profile.idle_fraction,
        "profile_clock": profile.clock,
        "profiled_iterations": round(iterations, 2),
        "profiled_iteration_ms": profile.window_us / iterations / 1e3,
    }
    return row | ({"by_kernel": profile.by_kernel(iterations)} if by_kernel else {})


def sizes_of(text: str, option: str = "--batch", example: str = "1,4") -> list[int]:
    """Whole numbers by commas. Raises :class:`ConfigError`."""
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option} is {text!r}; expected whole numbers of at least 1, by commas, such as {example}")
    return [int(part) for part in parts]


def _shown(path: Path | None, given: Path | None) -> str:
    return str(path) if given is not None else "bundled"


def _render(console: Console, data: dict[str, object], rows: list[dict[str, Any]], started: list[str]) -> None:
    console.print(
        f"{data['model']} model on {data['backend']} ({data['device']}), {data['dtype']}, speculate {data['speculate']} with "
        f"{data['draft_tokens']} draft tokens, {data['new_tokens']} new tokens"
    )
    if data["acceptance"] != "real":
        console.print(f"ACCEPTANCE IS {str(data['acceptance']).upper()}: tokens/s is what it would be, the text is nonsense")
    console.print(f"bandwidth measured in this run: {data['bandwidth_gb_per_s']:.1f} GB/s")
    for line in started:
        console.print(line)
    console.print()
    table = Table(*_COLUMNS.values(), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in _COLUMNS))
    console.print(table)
    for row in rows:
        if "by_kernel" in row:
            _render_kernels(console, row)


def _render_kernels(console: Console, row: dict[str, Any]) -> None:
    kernels: list[dict[str, Any]] = row["by_kernel"]
    console.print(
        f"\nbatch {row['batch']}: one iteration of {row['profiled_iteration_ms']:.3f} ms under the profiler "
        f"({row['profiled_iterations']:g} of them, {row['profile_clock']} time)"
    )
    table = Table("kernel", "calls", "us", "share", box=None, pad_edge=False)
    *named, between, idle = kernels
    rest = named[_KERNELS_SHOWN:]
    others = {
        "kernel": f"({len(rest)} others)",
        "calls": sum(each["calls"] for each in rest),
        "us": sum(each["us"] for each in rest),
        "share": sum(each["share"] for each in rest),
    }
    for each in (*named[:_KERNELS_SHOWN], *([others] if rest else []), between, idle):
        calls = "" if each["calls"] is None else f"{each['calls']:.1f}"
        table.add_row(each["kernel"][:_NAME_SHOWN], calls, f"{each['us']:.1f}", f"{100 * each['share']:.1f} %")
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return "n/a"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
