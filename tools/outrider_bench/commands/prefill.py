"""``outrider bench prefill``: the time to the first token, on the clock and on the device."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.engine_options import with_options
from outrider.cli.files import check_output
from outrider.cli.report import JsonOption, Report
from outrider_bench.commands.decode import sizes_of
from outrider_bench.engines import WorkOptions, check_room
from outrider_bench.mixed_load import token_ids
from outrider_bench.outputs import write_plot

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

_GOES_ON = 8


@with_options
def prefill(
    *,
    prompt_tokens: Annotated[
        str, typer.Option("--prompt-tokens", metavar="512,4096", help="Tokens of a prompt, several lengths by commas.")
    ] = "512,4096,16384",
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of each; the figures are medians.")] = 5,
    options: WorkOptions,
    plot: Annotated[Path | None, typer.Option(metavar="F.svg", help="Draw the time over the prompt's length.")] = None,
    json_output: JsonOption = False,
) -> Report:
    """Measure the time to the first token of one prompt on an idle engine, the draft's part of the prompt included.

    *first token*: of a request for one token, from its arrival to its end. *going on*: the same of a request that goes on to
    decode. *device*: what the device was busy with for the first of them, in a pass of its own under torch's profiler.
    """
    from outrider.cli.torch_probe import require_torch

    lengths = sizes_of(prompt_tokens, "--prompt-tokens", "512,4096")
    check_output("--plot", plot, ".svg")
    require_torch()
    asked = options.asked(requests=1, context=max(lengths) + _GOES_ON)
    engine, described = asked.made(say=not json_output)
    most = max(lengths)
    check_room(engine, f"--prompt-tokens {most} and the {_GOES_ON} tokens behind them", most + _GOES_ON)
    rows = [_row(engine, length, repeat) for length in lengths]
    data: dict[str, object] = {**described, "repeat": repeat, "results": rows}
    code = 0
    if plot is not None:
        from outrider_bench.plot import series_svg

        drawn = {"first token": [(row["prompt_tokens"], row["first_token_ms"]) for row in rows]}
        svg = series_svg(drawn, title=str(described["model"]), across="prompt tokens", up="ms to a token")
        code = write_plot(plot, svg, data)
    return Report(data=data, render=lambda console: _render(console, data, rows), exit_code=code)


def _row(engine: Engine, length: int, repeat: int) -> dict[str, Any]:
    number, vocabulary = 0, engine.model.config.vocab_size

    def first_token(count: int) -> float:
        nonlocal number
        number += 1
        # Each differs from the others from its first token on, so no cached prefix serves it.
        return _first_token(engine, token_ids(number, length, vocabulary), count)

    first_token(1)
    first_token(_GOES_ON)
    alone = [1e3 * first_token(1) for _ in range(repeat)]
    going_on = [1e3 * first_token(_GOES_ON) for _ in range(repeat)]
    busy, clock = _device_ms(engine, lambda: first_token(1))
    return {
        "prompt_tokens": length,
        "first_token_ms": statistics.median(alone),
        "first_token_ms_min": min(alone),
        "first_token_ms_max": max(alone),
        "going_on_ms": statistics.median(going_on),
        "tokens_per_s": 1e3 * length / statistics.median(alone),
        "device_ms": busy,
        "profile_clock": clock,
        "runs": alone,
    }


def _first_token(engine: Engine, prompt: list[int], count: int) -> float:
    """Seconds until the engine hands out the first token; the rest is decoded behind that."""
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
    """Milliseconds in which the device ran something, and by which clock; None where it can't say."""
    from outrider_bench.device_profile import of_timeline, profiled
    from outrider_trace.timeline import record

    if engine.backend.control is None:
        profile = profiled(engine.backend, once, warm_up=once)
    else:
        with record(engine.backend) as timeline:
            once()
        profile = of_timeline(timeline)
    if profile is None:
        return None, None
    return (profile.window_us - profile.idle_us) / 1e3, profile.clock


def _render(console: Console, data: dict[str, object], rows: list[dict[str, Any]]) -> None:
    console.print(
        f"{data['model']} model on {data['backend']} ({data['device']}), {data['dtype']}, speculate {data['speculate']}, "
        f"chunks of {data['prefill_chunk']}, median of {data['repeat']}\n"
    )
    table = Table("prompt", "first token ms", "going on ms", "device ms", "tokens/s", box=None, pad_edge=False)
    for row in rows:
        busy = "n/a" if row["device_ms"] is None else f"{row['device_ms']:.2f}"
        times = (f"{row['first_token_ms']:.2f}", f"{row['going_on_ms']:.2f}", busy, f"{row['tokens_per_s']:.0f}")
        table.add_row(str(row["prompt_tokens"]), *times)
    console.print(table)
