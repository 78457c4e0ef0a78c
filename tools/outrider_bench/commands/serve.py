"""``outrider bench serve``: a server under load, compared with the engine without a server and with vLLM's server."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from outrider.cli.options.models import DraftTokensOption, DtypeOption
from outrider.cli.options.option_records import with_options
from outrider.cli.options.option_values import (
    DIRECTORY,
    BackendOption,
    UsageError,
    number,
    option,
    text,
    whole,
)
from outrider.cli.terminal.files import check_directory
from outrider.cli.terminal.report import CommandReport, note
from outrider.device.errors import ConfigError
from outrider_bench.child import BenchFailed, run_child
from outrider_bench.http_load import HttpLoad, run_clients
from outrider_bench.load import summarize
from outrider_bench.options import (
    SIZES,
    AcceptLengthOption,
    PromptTokensOption,
    ProposerOption,
    RequiredShapeOption,
    TimedTokensOption,
    check_lengths,
    parse_names,
    parse_sizes,
    some_of,
)

if TYPE_CHECKING:
    from outrider_bench.servers import ServerSetup

_ENGINES = ("bare", "outrider", "vllm")
_START_LIMIT_S = 900.0
_SEEDS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class ServerModelOptions:
    """The options for random weights, equal for every server."""

    shape: RequiredShapeOption = "llama-3.1-8b"
    draft_tokens: DraftTokensOption = 3
    accept_length: AcceptLengthOption = "2.98"
    backend: BackendOption = None
    dtype: DtypeOption = None

    def make_setup(self, speculate: str, max_requests: int, *, prompt_tokens: int, new_tokens: int) -> ServerSetup:
        """Return the setup of each server. Raises :class:`ConfigError` for requests that exceed the context."""
        from outrider.model.config.shapes import shape_config
        from outrider_bench.random_model import RandomModel
        from outrider_bench.servers import ServerSetup

        config = shape_config(self.shape)
        check_lengths(config, self.shape, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        return ServerSetup(
            model=RandomModel(
                shape=self.shape,
                speculate=speculate,
                draft_tokens=self.draft_tokens,
                accept_length=self.accept_length if speculate == "eagle" else None,
            ),
            dtype=self.dtype,
            backend=self.backend,
            max_requests=max_requests,
            max_context=min(prompt_tokens + new_tokens + 2 * (self.draft_tokens + 1), config.max_context),
        )


@with_options
def serve(
    *,
    url: Annotated[str | None, option("--url", value=text("URL"), help="Measure this running server and start none.")] = None,
    model: Annotated[str | None, option("--model", value=text("NAME"), help="With --url: the name of the model.")] = None,
    engines: Annotated[
        str, option("--engines", value=some_of(*_ENGINES), help="Engines to start and measure, one after the other.")
    ] = "bare,outrider",
    concurrency: Annotated[str, option("--concurrency", value=SIZES, help="Numbers of concurrent clients.")] = "1,32",
    rounds: Annotated[int, option("--rounds", value=whole(1), help="Requests of each client, one after the other.")] = 3,
    prompt_tokens: PromptTokensOption = 512,
    new_tokens: TimedTokensOption = 256,
    speculate: ProposerOption = "eagle",
    options: ServerModelOptions,
    limit: Annotated[
        float, option("--limit", value=number(1), help="Time limit of a server's start in seconds.")
    ] = _START_LIMIT_S,
    logs: Annotated[
        Path | None, option("--logs", value=DIRECTORY, help="Directory for the output of the servers. Default: temporary.")
    ] = None,
) -> CommandReport:
    """Measure streams over HTTP: tokens a second, time to the first token and between tokens.

    Each client sends its next request when its last one has ended. One round runs first, unmeasured. ``bare`` is the same
    load on the engine in its own thread: the difference is the cost of the server.
    """
    sizes = parse_sizes(concurrency)
    load = HttpLoad(
        url="",
        model="measured",
        clients=1,
        rounds=rounds,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        seed=secrets.randbelow(_SEEDS),  # a running server may have cached the prompts of an earlier run
    )
    data: dict[str, Any] = {
        "rounds": rounds,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "seed": load.seed,
        "concurrency": sizes,
        "shape": None if url else options.shape,
    }
    if url is not None:
        if model is None:
            raise UsageError("--url needs --model NAME: what the server calls its model")
        load = replace(load, url=_server_url(url), model=model)
        return _report({**data, "model": model, "engines": [{"engine": url, **_results(url, load, sizes)}]})
    if model is not None:
        raise UsageError("--model is what a server at --url calls its model; servers that are started here have --shape")
    names = parse_names(engines, _ENGINES)
    setup = options.make_setup(speculate, max(sizes), prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    if logs is not None:
        check_directory("--logs", logs)
    with TemporaryDirectory(prefix="outrider-bench-") as directory:
        where = logs or Path(directory)
        found = [_measured(name, setup, load, sizes, where, limit) for name in names]
    sizes_of = {name: value for name, value in asdict(setup).items() if name != "model"}
    drafts = {name: getattr(setup.model, name) for name in ("speculate", "draft_tokens", "accept_length")}
    return _report({**data, **drafts, **sizes_of, "engines": found})


def _measured(name: str, setup: ServerSetup, load: HttpLoad, sizes: list[int], logs: Path, limit: float) -> dict[str, Any]:
    """Return the measured results of one engine, or the reason of its failure."""
    from outrider_bench.servers import start_server

    began = time.monotonic()
    try:
        if name == "bare":
            given = {"setup": asdict(setup), "load": asdict(load), "sizes": sizes}
            found = run_child("outrider_bench.servers:measure_bare_engine", given, limit_s=limit)
            for row in found["results"]:
                _note_row(name, row)
            return {"engine": name, **found}
        with start_server(name, setup, directory=logs, limit_s=limit) as url:
            start_s = time.monotonic() - began
            return {"engine": name, "start_s": start_s, **_results(name, replace(load, url=url), sizes)}
    except BenchFailed as failed:
        return {"engine": name, "failed": str(failed), "results": []}


def _results(name: str, load: HttpLoad, sizes: list[int]) -> dict[str, Any]:
    """Return the measured results for each number of clients up to the first failure, and the reason of the failure."""
    results: list[dict[str, Any]] = []
    try:
        for number, size in enumerate(sizes, 1):
            results.append(_measured_over_http(name, load.with_clients(size, number=number)))
    except BenchFailed as failed:
        return {"failed": str(failed), "results": results}
    return {"results": results}


def _server_url(text: str) -> str:
    """Return ``http://HOST:PORT`` and the path before ``/v1`` of a server. Raises :class:`ConfigError`."""
    parts = urlsplit(text)
    try:
        is_known = parts.scheme == "http" and parts.hostname and parts.port != 0 and not parts.username
    except ValueError:  # a port that is no number
        is_known = False
    if not is_known or parts.query or parts.fragment or not text.isascii() or any(each <= " " for each in text):
        raise ConfigError(
            f"--url is {text!r}; expected where a server of OpenAI's API is, without TLS, such as http://127.0.0.1:8000"
        )
    return f"http://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _measured_over_http(name: str, load: HttpLoad) -> dict[str, Any]:
    """Warm up a server and measure it over HTTP."""
    run_clients(load.warm_up)
    row = {"concurrency": load.clients, **summarize(run_clients(load))}
    _note_row(name, row)
    return row


def _note_row(name: str, row: Mapping[str, Any]) -> None:
    """Print a row of results to standard error, so that an interrupted run keeps the results."""
    first, between = row["first_token_ms"], row["between_outputs_ms"]
    gaps = "" if between is None else f", between outputs {between['p50']:.2f}, {between['p99']:.2f}"
    note(
        f"{name}: {row['concurrency']} clients, {row['requests']} requests, {row['tokens_per_s']:.1f} tokens/s, "
        f"ms at p50, p99: first token {first['p50']:.2f}, {first['p99']:.2f}{gaps}\n"
    )


def _report(data: dict[str, Any]) -> CommandReport:
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

    return CommandReport(data=data, render=render, exit_code=1 if any("failed" in each for each in data["engines"]) else 0)
