"""``outrider bench serve``: a server under load, beside the engine without one and beside vLLM's server."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.files import check_directory
from outrider.cli.models import DraftTokensOption, DtypeOption
from outrider.cli.report import BackendOption, JsonOption, Report
from outrider.cli.streams import note
from outrider.device.errors import ConfigError
from outrider_bench.child import ChildFailed, run_child
from outrider_bench.commands.decode import sizes_of
from outrider_bench.http_load import HttpLoad, ServerFailed, Streamed, streamed_of, summary
from outrider_bench.load_generators import run_vllm_bench
from outrider_bench.random_model import check_lengths

if TYPE_CHECKING:
    from outrider_bench.served import Setup

_ENGINES = ("bare", "outrider", "vllm")
_GENERATORS = ("own", "vllm")
_PROCESSES = 4
_CLIENTS = 8  # of one process
_LIMIT_S = 900.0
_SEED = 1 << 18


def serve(
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="A server that runs already, instead of starting any.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="With --url: the model's name.")] = None,
    generator: Annotated[
        str,
        typer.Option(
            metavar="own|vllm", help="What sends the requests: this, or the bench serve of a vLLM that is installed."
        ),
    ] = "own",
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --url and --generator vllm: the model's tokenizer.")
    ] = None,
    engines: Annotated[
        str, typer.Option(metavar="bare,outrider,vllm", help="What is started and measured, one after the other.")
    ] = "bare,outrider",
    shape: Annotated[
        str, typer.Option("--shape", metavar="NAME|config.json", help="Random weights of this shape.")
    ] = "llama-3.1-8b",
    concurrency: Annotated[str, typer.Option(metavar="1,32", help="Clients at a time, by commas.")] = "1,32",
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Requests of each client, one after the other.")] = 3,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, metavar="N")] = 512,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=2, metavar="N")] = 256,
    speculate: Annotated[str, typer.Option("--speculate", metavar="eagle|none")] = "eagle",
    draft_tokens: DraftTokensOption = 3,
    accept_length: Annotated[
        float | None, typer.Option("--accept-length", metavar="A", help="Synthetic acceptance, the same for all.")
    ] = 2.98,
    dtype: DtypeOption = None,
    limit: Annotated[float, typer.Option(min=1, metavar="S", help="What a server may take to start.")] = _LIMIT_S,
    logs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep there what the servers say. Default: nowhere.")
    ] = None,
    backend: BackendOption = None,
    json_output: JsonOption = False,
) -> Report:
    """Tokens a second, time to the first token and between tokens, of streams over HTTP.

    Each client sends its next request when its last one has ended; one round runs before what is counted. ``bare`` is the
    same load on the engine in its own thread: what the server costs is the difference. With ``--generator vllm`` requests are
    sent and read by vLLM's generator; ``bare`` has no server, so it gets the same lengths and numbers from ours.
    """
    del json_output
    sizes = sizes_of(concurrency, "--concurrency", "1,32")
    if generator not in _GENERATORS:
        raise ConfigError(f"--generator is {generator!r}; expected one of {', '.join(_GENERATORS)}")
    load = HttpLoad(
        url="",
        model="measured",
        clients=1,
        rounds=rounds,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        seed=secrets.randbelow(_SEED),  # a server that runs already may know the prompts of an earlier run
    )
    data: dict[str, Any] = {
        "rounds": rounds,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "seed": load.seed,
        "concurrency": sizes,
        "shape": None if url else shape,
        "generator": generator,
    }
    if url is not None:
        if model is None:
            raise ConfigError("--url needs --model NAME: what the server calls its model")
        if (generator == "vllm") != (tokenizer is not None):
            raise ConfigError(
                "--generator vllm and --tokenizer DIR go together: it draws prompts from the model's vocabulary"
            )
        load = replace(load, url=_server_url(url), model=model)
        return _report({**data, "model": model, "engines": [{"engine": url, **_results(url, load, sizes, tokenizer)}]})
    if tokenizer is not None:
        raise ConfigError("--tokenizer goes with --url; servers that are started here have a tokenizer of their own")
    if model is not None:
        raise ConfigError("--model is what a server at --url calls its model; servers that are started here have --shape")
    names = [name.strip() for name in engines.split(",")]
    if not set(names) <= set(_ENGINES):
        raise ConfigError(f"--engines is {engines!r}; expected some of {', '.join(_ENGINES)}")
    from outrider.model.shapes import shape_config
    from outrider_bench.served import Setup

    config = shape_config(shape)
    check_lengths(config, shape, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    setup = Setup(
        shape=shape,
        speculate=speculate,
        draft_tokens=draft_tokens,
        accept_length=accept_length if speculate == "eagle" else None,
        dtype=dtype,
        backend=backend,
        max_requests=max(sizes),
        max_context=min(prompt_tokens + new_tokens + 2 * (draft_tokens + 1), config.max_context),
    )
    if logs is not None:
        check_directory("--logs", logs)
    with TemporaryDirectory(prefix="outrider-bench-") as kept:
        where = logs or Path(kept)
        found = [_measured(name, setup, load, sizes, where, limit, generator) for name in names]
    return _report({**data, **asdict(setup), "engines": found})


def _measured(
    name: str, setup: Setup, load: HttpLoad, sizes: list[int], logs: Path, limit: float, generator: str
) -> dict[str, Any]:
    """Results of one engine, or why there are none."""
    from outrider_bench.served import served

    began = time.monotonic()
    try:
        if name == "bare":
            given = {"setup": asdict(setup), "load": asdict(load), "sizes": sizes}
            found = run_child("outrider_bench.bare_child", given, variables={}, limit_s=limit)
            for row in found["results"]:
                _tell(name, row)
            return {"engine": name, **found}
        with served(name, setup, directory=logs, limit_s=limit) as server:
            start_s = time.monotonic() - began
            tokenizer = server.tokenizer if generator == "vllm" else None
            return {
                "engine": name,
                "start_s": start_s,
                **_results(name, replace(load, url=server.url), sizes, tokenizer),
            }
    except ChildFailed as failed:
        return {"engine": name, "failed": str(failed), "results": []}


def _results(name: str, load: HttpLoad, sizes: list[int], tokenizer: Path | None) -> dict[str, Any]:
    """Results for each number of clients, until one fails, and why that did."""
    results: list[dict[str, Any]] = []
    try:
        for number, size in enumerate(sizes, 1):
            results.append(_measured_over_http(name, load.again(clients=size, number=number), tokenizer))
    except (ChildFailed, ServerFailed) as failed:
        return {"failed": str(failed), "results": results}
    return {"results": results}


def _server_url(text: str) -> str:
    """``http://HOST:PORT`` and what comes before ``/v1`` of a server. Raises :class:`ConfigError`."""
    parts = urlsplit(text)
    try:
        known = parts.scheme == "http" and parts.hostname and parts.port != 0 and not parts.username
    except ValueError:  # a port that is no number
        known = False
    if not known or parts.query or parts.fragment or not text.isascii() or any(each <= " " for each in text):
        raise ConfigError(
            f"--url is {text!r}; expected where a server of OpenAI's API is, without TLS, such as http://127.0.0.1:8000"
        )
    return f"http://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _measured_over_http(name: str, load: HttpLoad, tokenizer: Path | None) -> dict[str, Any]:
    """A round to warm up, and then what is counted; by vLLM's generator where it has a tokenizer to draw prompts from."""
    if tokenizer is not None:
        found = run_vllm_bench(load, tokenizer, limit_s=_LIMIT_S)
    else:
        _all_clients(load.warm_up)
        found = summary(_all_clients(load))
    row = {"concurrency": load.clients, **found}
    _tell(name, row)
    return row


def _tell(name: str, row: Mapping[str, Any]) -> None:
    """Show what is there, so that a run that is interrupted isn't lost."""
    first, between = row["first_token_ms"], row["between_outputs_ms"]
    gaps = "" if between is None else f", between outputs {between['p50']:.2f}, {between['p99']:.2f}"
    note(
        f"{name}: {row['concurrency']} clients, {row['requests']} requests, {row['tokens_per_s']:.1f} tokens/s, "
        f"ms at p50, p99: first token {first['p50']:.2f}, {first['p99']:.2f}{gaps}\n"
    )


def _all_clients(load: HttpLoad) -> list[Streamed]:
    """The clients of a load, spread over some processes."""
    processes = max(1, min(_PROCESSES, load.clients // _CLIENTS))
    shares = [load.clients // processes + (number < load.clients % processes) for number in range(processes)]
    parts = [replace(load, clients=share, first=load.first + sum(shares[:number])) for number, share in enumerate(shares)]

    def run(part: HttpLoad) -> list[Streamed]:
        found = run_child("outrider_bench.http_load_child", asdict(part), variables={}, limit_s=_LIMIT_S)
        return streamed_of(found["answers"])

    with ThreadPoolExecutor(processes) as pool:
        return [answer for answers in pool.map(run, parts) for answer in answers]


def _report(data: dict[str, Any]) -> Report:
    def render(console: Console) -> None:
        table = Table("engine", "clients", "tokens/s", "first token p50, p99 ms", "between outputs p50, p99 ms", "ms a token")
        for engine in data["engines"]:
            if "failed" in engine:
                console.print(f"{engine['engine']}: {engine['failed']}")
            for row in engine["results"]:
                first, between, token = row["first_token_ms"], row["between_outputs_ms"], row["a_token_ms"]
                table.add_row(
                    engine["engine"],
                    str(row["concurrency"]),
                    f"{row['tokens_per_s']:.1f}",
                    f"{first['p50']:.2f}, {first['p99']:.2f}",
                    "-" if between is None else f"{between['p50']:.2f}, {between['p99']:.2f}",
                    "-" if token is None else f"{token['p50']:.3f}",
                )
        console.print(table)

    return Report(data=data, render=render, exit_code=1 if any("failed" in each for each in data["engines"]) else 0)
