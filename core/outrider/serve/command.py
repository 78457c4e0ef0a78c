"""``outrider serve``: the API of OpenAI over an engine in a process of its own."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.chat_options import ChatTemplateOption, read_template
from outrider.cli.engine_options import AnyModelOptions, with_options
from outrider.cli.environment import api_keys_from_environment
from outrider.cli.inputs import read_utf8
from outrider.cli.listening import check_listening
from outrider.cli.rank_processes import DataParallelOption, TensorParallelOption
from outrider.device.errors import ConfigError
from outrider.serve.extra import require_kv_events, require_serve

if TYPE_CHECKING:
    from outrider.serve.messages import EngineInfo
    from outrider.serve.prompts import Prompter

_SERVER = "Server"
_LIMITS = "Limits"
_MOST_BYTES = 1 << 20


@with_options
def serve(
    *,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", rich_help_panel=_SERVER, help="Where to listen; 0.0.0.0: everywhere.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, rich_help_panel=_SERVER, help="0: one that is free.")
    ] = 8000,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            rich_help_panel=_SERVER,
            help="What clients call the model; may be given several times. Default: the last part of --model.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="F",
            rich_help_panel=_SERVER,
            help="Keys, one a line, of which clients must have one. Also from OUTRIDER_API_KEY. Without any, all may call.",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin", metavar="URL", rich_help_panel=_SERVER, help="Origin of web pages that may call the server."
        ),
    ] = None,
    chat_template: ChatTemplateOption = None,
    response_template: Annotated[
        Path | None,
        typer.Option(
            "--response-template",
            metavar="F",
            rich_help_panel=_SERVER,
            help="How the model writes calls of tools: a response_template of transformers, as JSON.",
        ),
    ] = None,
    tool_format: Annotated[
        str | None,
        typer.Option(
            "--tool-format",
            metavar="hermes|llama3-json|mistral",
            rich_help_panel=_SERVER,
            help="One that is known, in place of --response-template.",
        ),
    ] = None,
    metrics_names: Annotated[
        str,
        typer.Option(
            "--metrics-names",
            metavar="outrider|vllm",
            rich_help_panel=_SERVER,
            help="vllm: also under the names that routers and dashboards know from vLLM.",
        ),
    ] = "outrider",
    kv_events: Annotated[
        str | None,
        typer.Option(
            "--kv-events",
            metavar="ADDRESS",
            rich_help_panel=_SERVER,
            help="Publish what the prefix cache stores and drops, on ZMQ in vLLM's format: tcp://*:5557 is bound, a name "
            "of a host connected to.",
        ),
    ] = None,
    kv_events_replay: Annotated[
        str | None,
        typer.Option(
            "--kv-events-replay",
            metavar="ADDRESS",
            rich_help_panel=_SERVER,
            help="Where subscribers ask for events that they missed, such as tcp://*:5558.",
        ),
    ] = None,
    otel: Annotated[
        bool,
        typer.Option(
            "--otel",
            rich_help_panel=_SERVER,
            help="A span of OpenTelemetry for each request, over OTLP to where OTEL_EXPORTER_OTLP_ENDPOINT says.",
        ),
    ] = False,
    log_format: Annotated[
        str, typer.Option("--log-format", metavar="json|text", rich_help_panel=_SERVER, help="Of standard error.")
    ] = "json",
    max_queued: Annotated[
        int,
        typer.Option(
            "--max-queued", metavar="N", rich_help_panel=_LIMITS, help="Requests that wait at most; more get status 429."
        ),
    ] = 256,
    max_prompt: Annotated[
        int | None,
        typer.Option(
            "--max-prompt", metavar="N", rich_help_panel=_LIMITS, help="Tokens of a prompt at most. Default: the context's."
        ),
    ] = None,
    max_body: Annotated[
        int, typer.Option("--max-body-mib", metavar="N", rich_help_panel=_LIMITS, help="Of a request; more gets status 413.")
    ] = 32,
    request_timeout: Annotated[
        float,
        typer.Option("--request-timeout", metavar="S", rich_help_panel=_LIMITS, help="From arrival to the last token."),
    ] = 3600.0,
    drain_seconds: Annotated[
        float,
        typer.Option(
            "--drain-seconds", metavar="S", rich_help_panel=_LIMITS, help="What running requests have after SIGTERM."
        ),
    ] = 30.0,
    tensor_parallel: TensorParallelOption = 1,
    data_parallel: DataParallelOption = 1,
    options: AnyModelOptions,
) -> None:
    """Serve a model as OpenAI's API does; without --model the bundled one. Needs the extra: pip install 'outrider[serve]'."""
    require_serve()
    from outrider.cli.torch_probe import require_torch

    require_torch()
    from outrider.serve.config import ServeConfig

    speculation = options.speculation()
    if log_format not in ("json", "text"):
        raise ConfigError(f"--log-format is {log_format!r}; expected json or text")
    config = ServeConfig(
        names=tuple(name or ("outrider-bundled" if options.model is None else options.model.resolve().name,)),
        max_queued=max_queued,
        max_prompt=max_prompt,
        max_body_bytes=max_body << 20,
        request_timeout_s=request_timeout,
        drain_s=drain_seconds,
        api_keys=_keys(api_key_file),
        allow_origins=tuple(allow_origin or ()),
        metric_names=metrics_names,
    )
    make: Any = options.loader(speculation, max_requests=None, say=True)
    if kv_events is not None or kv_events_replay is not None:
        make = _with_kv_events(make, kv_events, kv_events_replay)
    template = None if chat_template is None else read_template(chat_template)
    answers = _answers(response_template, tool_format)
    from outrider.serve.engine_ranks import engine_process
    from outrider.serve.logs import log_to_stderr
    from outrider.serve.prompts import Prompter, Wording
    from outrider.serve.server import Address
    from outrider.serve.server import serve as serve_until_ended
    from outrider.serve.tracing import Spans

    # What can be wrong without the model is said before minutes of loading it.
    check_listening("--host and --port", host, port)
    wording = Wording(speculation.model, chat_template=template, response_template=answers)
    spans = Spans() if otel else None
    log_to_stderr(log_format)

    def make_prompter(info: EngineInfo) -> Prompter:
        return Prompter(speculation.model, info, wording)

    def started(host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        sys.stdout.write(f"outrider: serving {config.names[0]} at http://{shown}:{port}\n")
        sys.stdout.flush()

    address = Address(host=host, port=port)
    engine = engine_process(make, tensor=tensor_parallel, data=data_parallel)
    run_loop(serve_until_ended(engine, make_prompter, config, address, started=started, spans=spans))


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run the server on an event loop of its own: uvloop's where that is installed."""
    if find_spec("uvloop") is None:
        asyncio.run(work)
        return
    import uvloop

    uvloop.run(work)


def _with_kv_events(make: Any, address: str | None, replay: str | None) -> Any:
    if address is None:
        raise ConfigError("--kv-events-replay is given without --kv-events; give both, or --kv-events alone")
    require_kv_events()
    from outrider.serve.kv_events import make_watched

    return functools.partial(make_watched, make, address, replay)


def _answers(file: Path | None, name: str | None) -> dict[str, Any] | None:
    """How the model writes calls of tools, of a file or by a name; None: as the checkpoint says, if it does."""
    if file is not None and name is not None:
        raise ConfigError("--response-template and --tool-format both say how calls are written; give one of them")
    if file is not None:
        return _object(file)
    if name is None:
        return None
    from outrider.serve.calls import FORMATS

    if name not in FORMATS:
        raise ConfigError(f"--tool-format is {name!r}; expected one of {', '.join(FORMATS)}")
    return dict(FORMATS[name])


def _keys(file: Path | None) -> tuple[str, ...]:
    """API keys of the file and of the environment."""
    found = list(api_keys_from_environment())
    if file is not None:
        lines = [line.strip() for line in read_utf8(file, "API keys", _MOST_BYTES).splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"{file}: has no API key; expected one a line")
        found += keys
    return tuple(found)


def _object(file: Path) -> dict[str, Any]:
    read = read_utf8(file, "a response template", _MOST_BYTES)
    try:
        found = json.loads(read)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: has a {type(found).__name__}; expected a JSON object")
    return found
