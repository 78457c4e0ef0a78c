"""``outrider bench prefill``: the time to the first token, by the host's clock and on the device."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table

from outrider.cli.options.option_records import with_options
from outrider.cli.options.option_values import option, whole
from outrider.cli.terminal.report import CommandReport
from outrider_bench.load import token_ids
from outrider_bench.options import SIZES, MeasuredEngineOptions, PlotOption, check_context, parse_sizes
from outrider_bench.plot import series_svg, write_plot

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider_bench.rates import DeviceRates

_NEXT_TOKENS = 8
"""Number of new tokens of a request that continues to decode."""
_DEFAULT_PROMPT_TOKENS = [512, 4096, 16384]


@with_options
def prefill(
    *,
    prompt_tokens: Annotated[
        str | None,
        option(
            "--prompt-tokens",
            value=SIZES,
            help="Prompt lengths in tokens. Default: 512,4096,16384, as far as they fit in the context.",
        ),
    ] = None,
    repeat: Annotated[int, option("--repeat", value=whole(1), help="Runs of each length; the figures are medians.")] = 5,
    options: MeasuredEngineOptions,
    plot: PlotOption = None,
) -> CommandReport:
    """Measure the time to the first token of one prompt on an idle engine, with the draft's prefill.

    *first token*: a request for one token, from its arrival to its end. *limit*: the larger of the bytes of the target's pass
    over the best measured bandwidth, and of its operations over the best measured rate. *going on*: the first token of a
    request that goes on to decode. *device*: the device's busy time for a request for one token, from a run of its own under
    torch's profiler.
    """
    from outrider.cli.terminal.torch_probe import require_torch

    lengths = _DEFAULT_PROMPT_TOKENS if prompt_tokens is None else parse_sizes(prompt_tokens)
    require_torch()
    from outrider_bench.limits import quantized_weights
    from outrider_bench.rates import measure_rates

    context = max(lengths) + _NEXT_TOKENS
    engine, described = options.build_engine(requests=1, requests_origin="one prompt at a time", context=context)
    if prompt_tokens is None:
        lengths = [each for each in lengths if each + _NEXT_TOKENS <= engine.max_context] or lengths[:1]
    most = max(lengths)
    check_context(engine, f"--prompt-tokens {most} and the {_NEXT_TOKENS} tokens after them", most + _NEXT_TOKENS)
    rates = measure_rates(engine.backend, engine.model.dtype, weights=quantized_weights(engine))
    rows = [_row(engine, length, repeat, rates) for length in lengths]
    data: dict[str, object] = {**described, **rates.describe(), "repeat": repeat, "results": rows}
    code = 0
    if plot is not None:
        points = {"first token": [(row["prompt_tokens"], row["first_token_ms"]) for row in rows]}
        svg = series_svg(points, title=str(described["model"]), across="prompt tokens", up="ms to a token")
        code = write_plot(plot, svg, data)
    return CommandReport(data=data, render=lambda console: _render(console, data, rows), exit_code=code)


def _row(engine: Engine, length: int, repeat: int, rates: DeviceRates) -> dict[str, Any]:
    from outrider_bench.limits import prefill_cost

    number, vocabulary = 0, engine.model.config.vocab_size

    def first_token(count: int) -> float:
        nonlocal number
        number += 1
        # All prompts differ in their first token, so no cached prefix applies.
        return _first_token(engine, token_ids(number, length, vocabulary), count)

    first_token(1)
    first_token(_NEXT_TOKENS)
    alone = [1e3 * first_token(1) for _ in range(repeat)]
    going_on = [1e3 * first_token(_NEXT_TOKENS) for _ in range(repeat)]
    busy, clock = _device_ms(engine, lambda: first_token(1))
    needed, median_ms = prefill_cost(engine, length), statistics.median(alone)
    limits = {} if needed is None else rates.limits_ms(needed)
    return {
        "prompt_tokens": length,
        "first_token_ms": median_ms,
        **limits,
        "ratio_to_limit": median_ms / limits["limit_ms"] if limits else None,
        "first_token_ms_min": min(alone),
        "first_token_ms_max": max(alone),
        "going_on_ms": statistics.median(going_on),
        "tokens_per_s": 1e3 * length / median_ms,
        "device_ms": busy,
        "profile_clock": clock,
        "runs": alone,
    }


def _first_token(engine: Engine, prompt: list[int], count: int) -> float:
    """Return the seconds until the engine returns the first of ``count`` tokens; then decode the other tokens."""
    from outrider.engine.requests.sampling import SamplingParams

    began = time.perf_counter()
    engine.add_request(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
    while not any(output.tokens for output in engine.step()):
        pass
    seconds = time.perf_counter() - began
    while engine.has_unfinished:
        engine.step()
    engine.drain()
    return seconds


def _device_ms(engine: Engine, once: Any) -> tuple[float | None, str | None]:
    """Return the busy time of the device in milliseconds and the name of its clock; None for a device without a profile."""
    from outrider_bench.device_profile import profile_timeline, profiled
    from outrider_trace.timeline import record_timeline

    if engine.backend.control is None:
        profile = profiled(engine.backend, once, warm_up=once)
    else:
        with record_timeline(engine.backend) as timeline:
            once()
        profile = profile_timeline(timeline)
    if profile is None:
        return None, None
    return (profile.window_us - profile.idle_us) / 1e3, profile.clock


def _render(console: Console, data: dict[str, object], rows: list[dict[str, Any]]) -> None:
    console.print(
        f"{data['model']} model on {data['backend']} ({data['device']}), {data['dtype']}, speculate {data['speculate']}, "
        f"chunks of {data['prefill_chunk']}, median of {data['repeat']}\n"
    )
    console.print(f"{data['rates']}\n")
    headings = ("prompt", "first token ms", "limit ms", "ratio", "going on ms", "device ms", "tokens/s")
    table = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        busy = "n/a" if row["device_ms"] is None else f"{row['device_ms']:.2f}"
        ratio = row["ratio_to_limit"]
        limit = ("n/a", "n/a") if ratio is None else (f"{row['limit_ms']:.2f}", f"{ratio:.2f}")
        times = (f"{row['first_token_ms']:.2f}", *limit, f"{row['going_on_ms']:.2f}", busy, f"{row['tokens_per_s']:.0f}")
        table.add_row(str(row["prompt_tokens"]), *times)
    console.print(table)
