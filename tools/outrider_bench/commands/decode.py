"""``outrider bench decode``: measure the time of a decode iteration and compare it with its lower limit."""

from __future__ import annotations

import statistics
import textwrap
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.options.option_records import with_options
from outrider.cli.options.option_values import JsonOption, UsageError, option
from outrider.cli.options.rank_processes import (
    DataParallelOption,
    ExpertParallelOption,
    Joined,
    TensorParallelOption,
    run_on_ranks,
)
from outrider.cli.terminal.report import CommandReport
from outrider.device.errors import CapabilityError, ConfigError
from outrider_bench.load import token_ids
from outrider_bench.options import (
    BatchOption,
    MeasuredEngineOptions,
    NewTokensOption,
    PlotOption,
    PromptLengthsOption,
    check_context,
    parse_sizes,
    print_acceptance,
)
from outrider_bench.plot import limits_svg, write_plot

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider_bench.device_profile import DeviceProfile
    from outrider_bench.limits import CollectiveCost
    from outrider_bench.rates import DeviceRates


# -- a batch that decodes ----------------------------------------------------------------------------------------------


_PROFILED_ITERATIONS = 12
_PROFILE_WARM_UP = 2
_PROFILE_LEAD = 2
"""Number of profiled iterations that are left out, because the device still waits for the host."""


@dataclass(frozen=True, slots=True)
class DecodeIterations:
    """Times of the decode iterations in which every request of a batch decodes."""

    seconds: list[float]
    """Host time of each iteration, with reading results back."""
    host_seconds: list[float]
    """Part of ``seconds`` in which the host wasn't blocked by the device."""
    tokens: int
    """Number of tokens that all of these iterations yielded."""
    context: float
    """Mean number of tokens in the context of a request."""


def run_batch(engine: Engine, batch: int, prompt_tokens: int, new_tokens: int) -> DecodeIterations:
    """Decode ``batch`` requests to their ends and return the iterations in which all of them decode.

    These follow the last prompt and precede the first end. There are none if the first request ends before the last prompt.
    """
    from outrider.engine.requests.sampling import SamplingParams

    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    lengths = {engine.add_request(prompt, params): prompt_tokens for prompt in prompts_for(engine, batch, prompt_tokens)}
    started: set[int] = set()
    seconds: list[float] = []
    host_seconds: list[float] = []
    contexts: list[float] = []
    tokens, none_ended = 0, True
    while engine.has_unfinished:
        decoding = len(started) == batch
        context = sum(lengths.values()) / batch
        blocked = engine.stats.blocked_s
        began = time.perf_counter()
        outputs = engine.step()
        elapsed = time.perf_counter() - began
        none_ended = none_ended and not any(output.finish_reason for output in outputs)
        for output in outputs:
            started.add(output.request_id)
            lengths[output.request_id] += len(output.tokens)
        if decoding and none_ended:
            seconds.append(elapsed)
            host_seconds.append(elapsed - (engine.stats.blocked_s - blocked))
            contexts.append(context)
            tokens += sum(len(output.tokens) for output in outputs)
    return DecodeIterations(seconds, host_seconds, tokens, statistics.fmean(contexts) if contexts else 0.0)


def too_few_tokens(new_tokens: int, batch: int, prompt_tokens: int) -> str:
    """Return the message for a batch of which :func:`run_batch` timed no iteration."""
    return (
        f"--new-tokens {new_tokens} is too few for batch {batch} with prompts of {prompt_tokens}: no iteration had the whole "
        "batch decoding"
    )


def profile_batch(engine: Engine, batch: int, prompt_tokens: int, new_tokens: int) -> tuple[DeviceProfile, float] | None:
    """Return the profile of a few iterations of a batch, and their number; None if the device has no profile.

    These iterations aren't timed, since observing slows them down. ``new_tokens`` limits their number. The result is None too
    if a request ends before all iterations have run.
    """
    from outrider_bench.device_profile import profile_timeline, profiled
    from outrider_trace.timeline import record_timeline

    growth = engine.proposer.depth + 1
    most = (new_tokens - 2) // growth
    warm_up = max(0, min(_PROFILE_WARM_UP, most - 1))
    traced = engine.backend.control is None
    asynchronous = traced and engine.backend.capabilities.asynchronous
    lead = max(0, min(_PROFILE_LEAD, most - warm_up - 1)) if asynchronous else 0
    count = min(_PROFILED_ITERATIONS, most - warm_up - lead)
    if count < 1:
        return None
    if traced:
        decoding = _DecodingBatch(engine, batch, prompt_tokens, new_tokens)
        profile = profiled(
            engine.backend,
            lambda: decoding.run_iterations(lead + count),
            warm_up=lambda: decoding.run_iterations(warm_up),
            lead=lead / (lead + count),
        )
        whole = decoding.is_whole
        decoding.abort_requests()
        return (profile, profile.share * (lead + count)) if profile is not None and whole else None
    # The operations of a graph have names only if its capture was observed.
    with record_timeline(engine.backend) as timeline:
        decoding = _DecodingBatch(_copy_engine(engine), batch, prompt_tokens, new_tokens)
        decoding.run_iterations(warm_up)
        begin = timeline.end_time
        decoding.run_iterations(count)
        end, whole = timeline.end_time, decoding.is_whole
        decoding.abort_requests()
    profile = profile_timeline(timeline.part_between(begin, end))
    return (profile, count) if profile is not None and whole else None


class _DecodingBatch:
    """A batch of an engine whose requests all decode."""

    def __init__(self, engine: Engine, batch: int, prompt_tokens: int, new_tokens: int) -> None:
        from outrider.engine.requests.sampling import SamplingParams

        self._engine = engine
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        self._ids = [engine.add_request(prompt, params) for prompt in prompts_for(engine, batch, prompt_tokens)]
        started: set[int] = set()
        while engine.has_unfinished and len(started) < batch:
            started |= {output.request_id for output in engine.step()}
        engine.drain()

    @property
    def is_whole(self) -> bool:
        """True while every request of the batch decodes."""
        return all(request in self._engine.open_requests for request in self._ids)

    def run_iterations(self, count: int) -> None:
        """Run ``count`` decode iterations and wait until the device has finished them."""
        for _ in range(count):
            self._engine.step()
        self._engine.drain()

    def abort_requests(self) -> None:
        """Abort the requests and run the engine until it is idle."""
        for request in self._ids:
            if request in self._engine.open_requests:
                self._engine.abort(request)
        while self._engine.has_unfinished:
            self._engine.step()


def _copy_engine(engine: Engine) -> Engine:
    """Return an engine with the same model and proposer; it takes over the draft's caches."""
    from outrider.engine.engine import Engine

    tokenizer = engine.tokenizer if engine.has_tokenizer else None
    return Engine(engine.model, engine.backend, proposer=engine.proposer, config=engine.config, tokenizer=tokenizer)


def prompts_for(engine: Engine, batch: int, prompt_tokens: int) -> list[list[int]]:
    """Return prompts from different parts of a source file, as in the training data of the bundled model.

    An engine without a tokenizer has random weights and gets arbitrary token ids.
    """
    if not engine.has_tokenizer:
        vocabulary = engine.model.config.vocab_size
        return [token_ids(number, prompt_tokens, vocabulary) for number in range(batch)]
    text = Path(textwrap.__file__).read_text(encoding="utf-8")
    tokens = engine.tokenizer.encode(text, special_tokens=False)
    tokens = tokens * (1 + (prompt_tokens + batch * 97) // len(tokens))
    return [tokens[97 * i : 97 * i + prompt_tokens] for i in range(batch)]


# -- the command -------------------------------------------------------------------------------------------------------


_WARM_UP_TOKENS = 8
_COLUMNS = {
    "batch": "batch",
    "prompt_tokens": "prompt",
    "iteration_ms": "ms",
    "tokens_per_s": "tokens/s",
    "acceptance_length": "accepted",
    "drafted_length": "drafted",
    "limit_ms": "limit ms",
    "bytes_ms": "bytes ms",
    "operations_ms": "products ms",
    "ratio_to_limit": "ratio",
    "device_idle_fraction": "idle",
    "host_ms": "host ms",
    "iterations": "times",
}
_MAX_KERNELS_SHOWN = 24
_MAX_NAME_CHARACTERS = 72


@with_options
def decode(
    context: typer.Context,
    *,
    batch: BatchOption = "1",
    new_tokens: NewTokensOption = 64,
    prompt_tokens: PromptLengthsOption = "64",
    options: MeasuredEngineOptions,
    tensor_parallel: TensorParallelOption = 1,
    data_parallel: DataParallelOption = 1,
    expert_parallel: ExpertParallelOption = False,
    plot: PlotOption = None,
    by_kernel: Annotated[bool, option("--by-kernel", help="Show the device's time of each kernel.")] = False,
    json_output: JsonOption = False,
) -> CommandReport | None:
    """Measure decode iterations: median time, tokens a second, and the ratio to the limit.

    The limit is the larger of the bytes that an iteration must read over the best measured bandwidth, and of the operations
    of its products over the best measured rate. For several ranks it is the limit of one rank, and
    the time of the collectives, each measured alone. An iteration is timed on the host, with reading results back, while the
    whole batch decodes. host ms is the part in which the host isn't blocked by the device.
    The device's idle time comes from a second pass of a few iterations under torch's profiler.
    """
    from outrider.cli.terminal.torch_probe import require_torch

    sizes, lengths = parse_sizes(batch), parse_sizes(prompt_tokens)
    if options.max_requests is not None and options.max_requests < max(sizes):
        raise UsageError(
            f"--max-requests is {options.max_requests}, and --batch {max(sizes)} requests decode together; raise it"
        )
    require_torch()
    spread_out = run_on_ranks(context.obj, tensor_parallel, data_parallel, expert=expert_parallel, json_output=json_output)
    if spread_out is not None:
        return spread_out
    from outrider_bench.limits import collective_costs, quantized_weights
    from outrider_bench.rates import measure_rates

    joined = Joined(tensor_parallel, data_parallel, expert=expert_parallel)
    engine, described = options.build_engine(
        requests=max(sizes),
        requests_origin="--batch",
        context=max(lengths) + new_tokens,
        join=joined.join,
    )
    costs = collective_costs(engine, sizes)
    if engine.follows:
        with joined:
            engine.follow()
        return None
    with joined, closing(engine):
        check_context(engine, f"--prompt-tokens {max(lengths)} and --new-tokens {new_tokens}", max(lengths) + new_tokens)
        notes = [f"{each}" for each in (engine.warm_up, engine.captured, engine.draft_length) if each is not None]
        known = sum(engine.model.kernels.compiled().values())
        rates = measure_rates(engine.backend, engine.model.dtype, weights=quantized_weights(engine))
        run_batch(engine, max(sizes), max(lengths), min(_WARM_UP_TOKENS, new_tokens))
        cases = [(size, length) for length in lengths for size in sizes]
        measured = [(case, _measure(engine, *case, new_tokens, rates, costs[case[0]])) for case in cases]
        missing = [case for case, row in measured if row is None]
        rows = [row for _, row in measured if row is not None]
        if not rows:
            raise ConfigError(f"{too_few_tokens(new_tokens, *missing[0])}; ask for more")
        for case, row in measured:
            if row is not None:
                row |= _profiled(engine, *case, new_tokens, by_kernel)
        notes += [f"{too_few_tokens(new_tokens, *case)}: not measured" for case in missing]
        data: dict[str, object] = {
            **described,
            "prompt_tokens": lengths,
            "new_tokens": new_tokens,
            **rates.describe(),
            "graphs_captured": asdict(engine.captured) if engine.captured is not None else None,
            "draft_length_decided": asdict(engine.draft_length),
            "results": rows,
            "not_measured": [{"batch": size, "prompt_tokens": length} for size, length in missing],
        }
        if engine.warm_up is not None:
            compiled = sum(engine.model.kernels.compiled().values()) - known
            notes.append(f"kernels compiled since: {compiled}")
            data["kernels_compiled"] = {**asdict(engine.warm_up), "since": compiled}
        code = 0 if plot is None else _write_limits(plot, rows, data, notes)
        return CommandReport(data=data, render=lambda console: _render(console, data, rows, notes), exit_code=code)


def _write_limits(plot: Path, rows: list[dict[str, Any]], data: dict[str, object], notes: list[str]) -> int:
    code = write_plot(plot, limits_svg(rows, title=f"{data['model']}, {data['speculate']}, {data['dtype']}"), data)
    notes.append(str(data.get("plot_failed", f"plot: {plot}")))
    return code


def _measure(
    engine: Engine, batch: int, prompt_tokens: int, new_tokens: int, rates: DeviceRates, collectives: CollectiveCost
) -> dict[str, object] | None:
    """Return a table row with the measured times of a batch and its limit; None if the whole batch decodes in no
    iteration.
    """
    from outrider_bench.limits import iteration_cost

    before = engine.stats
    found = run_batch(engine, batch, prompt_tokens, new_tokens)
    seconds, tokens, after = found.seconds, found.tokens, engine.stats
    if not seconds:
        return None
    needed = iteration_cost(engine, batch=batch, context=found.context)
    iteration_ms = 1e3 * statistics.median(seconds)
    limits: dict[str, float | None] = {"limit_ms": None, "bytes_ms": None, "operations_ms": None}
    if needed is not None:
        limits |= rates.limits_ms(needed)
    limit_ms = None if needed is None else 1e3 * (rates.limit_s(needed) + collectives.seconds)
    return {
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "iteration_ms": iteration_ms,
        "iteration_ms_min": 1e3 * min(seconds),
        "iteration_ms_max": 1e3 * max(seconds),
        "tokens_per_s": tokens / sum(seconds),
        "acceptance_length": tokens / (len(seconds) * batch),
        "drafted_length": (after.drafted_tokens - before.drafted_tokens)
        / (after.request_iterations - before.request_iterations),
        "bytes_per_iteration": None if needed is None else round(needed.bytes),
        "operations_per_iteration": None if needed is None else round(needed.operations),
        "mean_context": found.context,
        "collectives": collectives.calls,
        "collectives_ms": 1e3 * collectives.seconds,
        **limits,
        "limit_ms": limit_ms,
        "ratio_to_limit": None if limit_ms is None else iteration_ms / limit_ms,
        "host_ms": 1e3 * statistics.median(found.host_seconds),
        "iterations": len(seconds),
    }


def _profiled(engine: Engine, batch: int, prompt_tokens: int, new_tokens: int, by_kernel: bool) -> dict[str, object]:
    """Return the figures of a profiled pass over the batch. Raises :class:`CapabilityError` if the device has no times of
    kernels.
    """
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


def _render(console: Console, data: dict[str, object], rows: list[dict[str, Any]], notes: list[str]) -> None:
    console.print(
        f"{data['model']} model on {data['backend']} ({data['device']}), {data['dtype']}, speculate {data['speculate']} with "
        f"{data['draft_tokens']} draft tokens, {data['new_tokens']} new tokens"
    )
    print_acceptance(console, data)
    console.print(str(data["rates"]))
    for line in notes:
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
    rest = named[_MAX_KERNELS_SHOWN:]
    others = {
        "kernel": f"({len(rest)} others)",
        "calls": sum(each["calls"] for each in rest),
        "us": sum(each["us"] for each in rest),
        "share": sum(each["share"] for each in rest),
    }
    for each in (*named[:_MAX_KERNELS_SHOWN], *([others] if rest else []), between, idle):
        calls = "" if each["calls"] is None else f"{each['calls']:.1f}"
        table.add_row(each["kernel"][:_MAX_NAME_CHARACTERS], calls, f"{each['us']:.1f}", f"{100 * each['share']:.1f} %")
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return "n/a"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
