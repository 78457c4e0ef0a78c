"""``outrider serve``: the API of OpenAI over an engine in a process of its own, or one role of disaggregated serving."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import re
import sys
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options.option_records import ChatTemplateOption, ServerOptions, read_template, with_options
from outrider.cli.options.option_values import (
    INPUT_FILE,
    REASONING_FORMATS,
    TOOL_FORMATS,
    UsageError,
    checking_options,
    closest,
    number,
    one_of,
    option,
    parsed,
    text,
    whole,
)
from outrider.cli.terminal.environment import api_keys_from_environment, spans_from_environment
from outrider.cli.terminal.files import check_listening, read_utf8
from outrider.cli.terminal.report import CommandReport, show_progress
from outrider.cli.terminal.torch_probe import require_torch
from outrider.device.errors import ConfigError
from outrider.disaggregation.connections import PeerAddress
from outrider.serve.config import ServeConfig, require_kv_events, require_serve
from outrider.serve.roles import RoleOptions, check_address, read_secret, serve_decode, serve_prefill

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.serve.api.prompt_builder import PromptBuilder
    from outrider.serve.connection.engine_client import EngineClient
    from outrider.serve.connection.engine_messages import EngineInfo

_MAX_FILE_BYTES = 1 << 20
_DEFAULT_PORTS = {"all": 8000, "prefill": 9500, "decode": 9600}
_HTTP_OPTIONS = ("name", "allow_origin", "chat_template", "tool_format", "reasoning_format", "kv_events")
_DISAGGREGATION_OPTIONS = ("prefill_server", "transport")
_DECODE_SERVER_OPTIONS = ("decode_server", "decode_secret_file")
_REFUSED_BY_ROLE = {
    "all": _DISAGGREGATION_OPTIONS,
    "prefill": (
        *_HTTP_OPTIONS,
        *_DECODE_SERVER_OPTIONS,
        "tensor_parallel",
        "data_parallel",
        "expert_parallel",
        "prefill_server",
        "through_transformers",
        "trust_remote_code",
    ),
    "decode": (*_HTTP_OPTIONS, *_DECODE_SERVER_OPTIONS, "through_transformers", "trust_remote_code"),
}
"""Parameters of :func:`serve` that have no effect with a role. Passing such an option is an error."""
_NO_LOCAL_ENGINE_OPTIONS = {"kv_events", "tensor_parallel", "data_parallel", "expert_parallel"}
"""Further parameters that have no effect without an engine in a process of this server."""


def _read_tool_format(tool_format: str | None) -> tuple[str | None, dict[str, Any] | None]:
    """Return (format name, None) if ``tool_format`` names a format, or (None, response template) if it is a file. Raises
    :class:`ConfigError` for an unreadable file.
    """
    if tool_format is None or not tool_format.endswith(".json"):
        return tool_format, None
    return None, _read_json_object(Path(tool_format))


def _check_tool_format(given: str) -> None:
    if given in TOOL_FORMATS:
        return
    if not given.endswith(".json"):
        names = ", ".join(TOOL_FORMATS)
        raise ConfigError(f"expected one of {names}, or a file that ends in .json{closest(given, TOOL_FORMATS)}")
    _read_json_object(Path(given))


def _read_json_object(file: Path) -> dict[str, Any]:
    text = read_utf8(file, "a response template", _MAX_FILE_BYTES)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: has a {type(value).__name__}; expected a JSON object")
    return value


def _check_origin(url: str) -> None:
    if url not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", url):
        raise ConfigError("expected an origin such as https://example.org, without a path, or *")


def _check_event_addresses(given: str) -> None:
    for address in given.split(","):
        if not re.fullmatch(r"[a-z]+://\S+", address) or given.count(",") > 1:
            raise ConfigError("expected ADDRESS or ADDRESS,REPLAY, each such as tcp://*:5557")


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """The options of a server: address, names, API keys, templates and cache events."""

    host: Annotated[str, option("--host", value=text("ADDRESS"), help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1"
    port: Annotated[
        int | None,
        option(
            "--port",
            value=whole(0, 65535),
            help="Port to listen on; 0: any free port. Default: 8000; of role prefill 9500, of role decode 9600.",
        ),
    ] = None
    name: Annotated[
        list[str] | None,
        option(
            "--served-model-name",
            value=text("NAME"),
            help="Name of the model for clients. Repeatable. Default: the last part of --model.",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        option(
            "--api-key-file",
            value=INPUT_FILE,
            help="File of API keys, one a line; a client must send one of them. OUTRIDER_API_KEY adds keys. Default: no key "
            "is needed. With --role prefill|decode: the secret of at least 16 bytes that all processes share.",
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        option(
            "--allow-origin",
            value=parsed("URL", _check_origin),
            help="Origin of web pages that may call the server. Repeatable.",
        ),
    ] = None
    chat_template: ChatTemplateOption = None
    tool_format: Annotated[
        str | None,
        option(
            "--tool-format",
            value=parsed("NAME|FILE", _check_tool_format),
            help=f"How the model writes tool calls: {', '.join(TOOL_FORMATS)}, or a .json file with a response_template of "
            "transformers. Default: the checkpoint's response_template, or the format that its chat template shows.",
        ),
    ] = None
    reasoning_format: Annotated[
        str | None,
        option(
            "--reasoning-format",
            value=one_of(*REASONING_FORMATS, metavar="NAME"),
            help=f"How the model writes reasoning: {', '.join(REASONING_FORMATS)}; think is between <think> and </think>. "
            "Default: as for --tool-format.",
        ),
    ] = None
    kv_events: Annotated[
        str | None,
        option(
            "--kv-events",
            value=parsed("ADDRESS[,REPLAY]", _check_event_addresses),
            help="Publish the events of the prefix cache on ZMQ, in vLLM's format: tcp://*:5557 is bound, a host name is "
            "connected to. REPLAY, such as tcp://*:5558: where subscribers request the events that they missed.",
        ),
    ] = None
    drain_seconds: Annotated[
        float, option("--drain-seconds", value=number(0), help="Seconds that running requests have after SIGTERM.")
    ] = 30.0


@with_options
def serve(context: typer.Context, *, options: ServerOptions, http: HttpOptions, roles: RoleOptions) -> CommandReport | None:
    """Serve a model as OpenAI's API does; without --model the bundled one. Needs the extra: pip install 'outrider[serve]'.

    With --role, prefill and decode run in separate processes that exchange KV pages; these roles need no extra.
    """
    _refuse_options(context, _REFUSED_BY_ROLE[roles.role], f"--role {roles.role}")
    if roles.decode_server:
        engine_options = {each.name for each in fields(ServerOptions)} - {"model"} | _NO_LOCAL_ENGINE_OPTIONS
        _refuse_options(context, engine_options, "--decode-server")
    port = _DEFAULT_PORTS[roles.role] if http.port is None else http.port
    if roles.role == "all":
        _serve_api(port, http, roles, options)
        return None
    if roles.role == "decode" and not roles.prefill_server:
        raise UsageError("--role decode needs a prefill server; name at least one with --prefill-server HOST:PORT")
    secret = check_address(PeerAddress(http.host, port), http.api_key_file)
    require_torch()
    if roles.role == "prefill":
        return serve_prefill(PeerAddress(http.host, port), secret, http.drain_seconds, roles, options)
    return serve_decode(PeerAddress(http.host, port), secret, http.drain_seconds, roles, options, describe=describe_engine)


def _serve_api(port: int, http: HttpOptions, roles: RoleOptions, options: ServerOptions) -> None:
    """Serve OpenAI's API until SIGTERM or SIGINT. Errors that don't need the model are raised before it is loaded."""
    require_serve()
    default_name = "outrider-bundled" if options.model is None else options.model.resolve().name
    with checking_options():
        config = ServeConfig(
            names=tuple(http.name or (default_name,)),
            drain_s=http.drain_seconds,
            api_keys=read_api_keys(http.api_key_file),
            allow_origins=tuple(http.allow_origin or ()),
        )
        template = None if http.chat_template is None else read_template(http.chat_template)
        tool_format, response_template = _read_tool_format(http.tool_format)
        decode_secret = read_secret(roles.decode_secret_file)
        check_listening("--host and --port", http.host, port)
    require_torch()
    speculation = options.speculation()
    make: Any = options.loader(speculation, max_requests=None)
    if http.kv_events is not None:
        make = _with_kv_events(make, http.kv_events)
    with show_progress() as tell:
        tell("importing the server", 0, 0)
        from outrider.serve.api.prompt_builder import PromptBuilder, PromptResources
        from outrider.serve.connection.engine_process import EngineProcess
        from outrider.serve.http.request_middleware import RequestSpans, log_to_stderr
        from outrider.serve.http.server import serve_http as serve_until_ended

    wording = PromptResources(
        speculation.model,
        chat_template=template,
        response_template=response_template,
        tool_format=tool_format,
        reasoning_format=http.reasoning_format,
    )
    spans = RequestSpans() if spans_from_environment() else None
    log_to_stderr("text" if sys.stderr.isatty() else "json")

    def make_prompter(info: EngineInfo) -> PromptBuilder:
        return PromptBuilder(speculation.model, info, wording)

    def report_started(host: str, port: int) -> None:
        gc.collect()
        gc.freeze()  # a collection that visits the modules and the tokenizer holds the event loop for 0.2 s
        shown = f"[{host}]" if ":" in host else host
        sys.stdout.write(f"outrider: serving {config.names[0]} at http://{shown}:{port}\n")
        sys.stdout.flush()

    if roles.decode_server:
        from outrider.serve.connection.engine_client import DecodeServers

        servers = [PeerAddress.parse(each) for each in roles.decode_server]
        engine: EngineClient = DecodeServers(servers, secret=decode_secret)
    else:
        engine = EngineProcess(make, tensor=roles.tensor_parallel, data=roles.data_parallel, expert=roles.expert_parallel)
    served = serve_until_ended(engine, make_prompter, config, host=http.host, port=port, started=report_started, spans=spans)
    run_loop(served)


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run the server on a new event loop, which is uvloop's if uvloop is installed."""
    if find_spec("uvloop") is None:
        asyncio.run(work)
        return
    import uvloop

    uvloop.run(work)


def _refuse_options(context: typer.Context, names: Collection[str], reason: str) -> None:
    """Raise :class:`UsageError` if the command line has an option of ``names``."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{parameter.opts[0]} has no effect with {reason}; leave it out")


def describe_engine(engine: Engine) -> dict[str, Any]:
    """Return the facts about a decode server's engine that HTTP servers in front of it read, as plain data for JSON."""
    from outrider.engine.requests.message_codec import to_plain
    from outrider.serve.connection.engine_messages import EngineInfo

    description: dict[str, Any] = to_plain(EngineInfo.from_engine(engine), EngineInfo)
    return description


def _with_kv_events(make: Any, addresses: str) -> Any:
    require_kv_events()
    from outrider.serve.connection.kv_events import make_engine_with_events

    address, _, replay = addresses.partition(",")
    return functools.partial(make_engine_with_events, make, address, replay or None)


def read_api_keys(file: Path | None) -> tuple[str, ...]:
    """Return the API keys of the environment and of the file. Raises :class:`ConfigError` for a file without a key."""
    keys = list(api_keys_from_environment())
    if file is not None:
        lines = [line.strip() for line in read_utf8(file, "API keys", _MAX_FILE_BYTES).splitlines()]
        file_keys = [line for line in lines if line and not line.startswith("#")]
        if not file_keys:
            raise ConfigError(f"{file}: has no API key; expected one a line")
        keys += file_keys
    return tuple(keys)
