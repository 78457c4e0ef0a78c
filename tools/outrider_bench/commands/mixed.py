"""``outrider bench mixed``: requests of many lengths at once, and what their users see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.cli.engine_options import with_options
from outrider.cli.report import JsonOption, Report
from outrider_bench.engines import WorkOptions, check_room
from outrider_bench.mixed_load import Arrivals, MixedLoad, length_range, token_ids

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

_AT_ONCE = 128
_WARM_UP = 8  # an eighth of the load


@with_options
def mixed(
    *,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="Requests, all at once.")] = 256,
    seed: Annotated[int, typer.Option(metavar="S", help="Draws the lengths.")] = 7,
    prompts: Annotated[str, typer.Option(metavar="A-B", help="Tokens of a prompt, uniform.")] = "32-1036",
    outputs: Annotated[str, typer.Option(metavar="A-B", help="New tokens of a request, uniform.")] = "16-400",
    options: WorkOptions,
    accept_length: Annotated[
        float | None,
        typer.Option("--accept-length", metavar="A", help="With --shape, synthetic acceptance, equal chances."),
    ] = None,
    json_output: JsonOption = False,
) -> Report:
    """Serve a load of requests whose lengths are drawn: tokens a second, the time to first tokens and between tokens.

    Prompts and outputs are drawn uniformly and independently. All requests arrive at once, so the time to a first token
    holds the wait for a place. Tokens of one verification arrive together: a gap lies between two verifications.
    """
    from outrider.cli.torch_probe import require_torch

    drawn = MixedLoad(
        requests=requests,
        seed=seed,
        prompts=length_range(prompts, "--prompts"),
        outputs=length_range(outputs, "--outputs"),
    )
    require_torch()
    asked = options.asked(requests=min(requests, _AT_ONCE), context=drawn.longest, accept_length=accept_length)
    engine, described = asked.made(say=not json_output)
    prompt, output = max(drawn.lengths, key=sum)
    check_room(engine, f"a request of --prompts {prompt} and --outputs {output} tokens", prompt + output)
    _serve(engine, drawn.lengths[: -(-requests // _WARM_UP)], first=requests)
    known = sum(engine.model.kernels.compiled().values())
    found = _serve(engine, drawn.lengths, first=0)
    data: dict[str, Any] = {
        **described,
        "load": drawn.described(),
        **found.summary(),
        "kernels_compiled_since": sum(engine.model.kernels.compiled().values()) - known,
    }
    return Report(data=data, render=lambda console: _render(console, data))


def _serve(engine: Engine, lengths: list[tuple[int, int]], *, first: int) -> Arrivals:
    """``first``: the number of the first prompt; those of other numbers share no prefix with it."""
    from outrider.engine.requests.sampling import SamplingParams

    vocabulary = engine.model.config.vocab_size
    prompts = [token_ids(first + number, prompt, vocabulary) for number, (prompt, _) in enumerate(lengths)]
    arrivals = Arrivals()
    for prompt, (_, count) in zip(prompts, lengths, strict=True):
        engine.add_request(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
    while engine.has_unfinished:
        for output in engine.step():
            if output.tokens:
                arrivals.note(output.request_id, len(output.tokens))
    return arrivals


def _render(console: Console, data: dict[str, Any]) -> None:
    load = data["load"]
    console.print(
        f"{data['model']} model on {data['backend']} ({data['device']}), {data['dtype']}, speculate {data['speculate']}, "
        f"{data['max_requests']} requests at a time"
    )
    if data["acceptance"] != "real":
        console.print(f"ACCEPTANCE IS {str(data['acceptance']).upper()}: tokens/s is what it would be, the text is nonsense")
    console.print(
        f"{load['requests']} requests, {load['prompt_tokens']} tokens in, {load['output_tokens']} out, "
        f"{load['distribution']}, seed {load['seed']}\n"
    )
    console.print(f"{data['seconds']:.2f} s, {data['tokens_per_s']:.0f} tokens/s")
    for name in ("first_token_ms", "between_tokens_ms"):
        shown = data[name]
        told = "n/a" if shown is None else ", ".join(f"{key} {value:.1f}" for key, value in shown.items())
        console.print(f"{name.removesuffix('_ms').replace('_', ' ')}, ms: {told}")
    console.print(f"kernels compiled meanwhile: {data['kernels_compiled_since']}")
