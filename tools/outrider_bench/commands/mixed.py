"""``outrider bench mixed``: throughput and latencies of a load of requests of random lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from outrider.cli.options.option_records import with_options
from outrider.cli.terminal.report import CommandReport
from outrider_bench.load import StreamedAnswer, latencies, serve_clients, token_ids
from outrider_bench.options import MeasuredEngineOptions, MixedLoadOptions, check_context, print_acceptance

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

_MAX_CONCURRENT = 128
_WARM_UP_DIVISOR = 8
"""Divisor of the load for the warm-up: an eighth of the requests runs first, unmeasured."""


@with_options
def mixed(
    *,
    load_options: MixedLoadOptions,
    options: MeasuredEngineOptions,
) -> CommandReport:
    """Serve a load of requests of random lengths: tokens a second, the time to first tokens and between tokens.

    Lengths of prompts and outputs are uniform and independent. All requests arrive at once, so the time to a first token
    includes the time in the queue. Tokens of one verification arrive together: a gap lies between two verifications.
    """
    from outrider.cli.terminal.torch_probe import require_torch

    load = load_options.load()
    require_torch()
    engine, described = options.build_engine(
        requests=min(load.requests, _MAX_CONCURRENT), requests_origin="--requests", context=load.longest
    )
    prompt, output = max(load.lengths, key=sum)
    check_context(engine, f"a request of --prompts {prompt} and --outputs {output} tokens", prompt + output)
    _serve_load(engine, load.lengths[: -(-load.requests // _WARM_UP_DIVISOR)], first=load.requests)
    known = sum(engine.model.kernels.compiled().values())
    answers = _serve_load(engine, load.lengths, first=0)
    data: dict[str, Any] = {
        **described,
        "load": load.describe(),
        **latencies(answers),
        "kernels_compiled_since": sum(engine.model.kernels.compiled().values()) - known,
    }
    return CommandReport(data=data, render=lambda console: _render(console, data))


def _serve_load(engine: Engine, lengths: list[tuple[int, int]], *, first: int) -> list[StreamedAnswer]:
    """Run the requests of a load; ``first`` is the number of the first prompt. Prompts of different
    numbers share no prefix.
    """
    vocabulary = engine.model.config.vocab_size
    sized = enumerate(lengths, first)
    return serve_clients(engine, [[(token_ids(number, prompt, vocabulary), count)] for number, (prompt, count) in sized])


def _render(console: Console, data: dict[str, Any]) -> None:
    load = data["load"]
    console.print(
        f"{data['model']} model on {data['backend']} ({data['device']}), {data['dtype']}, speculate {data['speculate']}, "
        f"{data['max_requests']} requests at a time"
    )
    print_acceptance(console, data)
    console.print(
        f"{load['requests']} requests, {load['prompt_tokens']} tokens in, {load['output_tokens']} out, "
        f"{load['distribution']}, seed {load['seed']}\n"
    )
    console.print(f"{data['seconds']:.2f} s, {data['tokens_per_s']:.0f} tokens/s")
    for name in ("first_token_ms", "between_tokens_ms"):
        shown = data[name]
        text = "n/a" if shown is None else ", ".join(f"{key} {value:.1f}" for key, value in shown.items())
        console.print(f"{name.removesuffix('_ms').replace('_', ' ')}, ms: {text}")
    console.print(f"kernels compiled during the load: {data['kernels_compiled_since']}")
