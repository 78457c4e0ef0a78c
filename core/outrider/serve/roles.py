"""``outrider serve --role prefill|decode``: prefill and decode in separate server processes."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from outrider.cli.options.option_records import ServerOptions
from outrider.cli.options.option_values import INPUT_FILE, checking_options, installed_plugin, one_of, option, parsed
from outrider.cli.options.rank_processes import (
    DataParallelOption,
    ExpertParallelOption,
    TensorParallelOption,
    first_rank,
)
from outrider.cli.terminal.files import check_listening, read_bounded
from outrider.cli.terminal.report import CommandReport, note
from outrider.cli.terminal.stopping import SignalStop
from outrider.device.errors import ConfigError
from outrider.disaggregation.connections import PeerAddress, require_secret
from outrider.registry.children import accepted_interruptions

if TYPE_CHECKING:
    from outrider.disaggregation.server import DisaggregationServer
    from outrider.engine.engine import Engine

_MAX_REQUESTS = 16
"""Maximum number of requests that a prefill or decode server runs at the same time, unless ``--max-requests`` is given."""
_MIN_SECRET_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """The options of disaggregated serving, and of serving on several ranks."""

    role: Annotated[
        str,
        option(
            "--role",
            value=one_of("all", "prefill", "decode"),
            help="all: serve OpenAI's API. prefill: prefill prompts for decode servers. decode: decode for a --decode-server "
            "option or a DecodeClient, with prompts from prefill servers.",
        ),
    ] = "all"
    prefill_server: Annotated[
        list[str] | None,
        option(
            "--prefill-server",
            value=parsed("HOST:PORT", PeerAddress.parse),
            help="With --role decode: a prefill server. Repeatable.",
        ),
    ] = None
    decode_server: Annotated[
        list[str] | None,
        option(
            "--decode-server",
            value=parsed("HOST:PORT", PeerAddress.parse),
            help="With --role all: a decode server that runs the engine; this process serves HTTP. Repeatable. Takes "
            "--model, for its tokenizer, and no other option of the engine.",
        ),
    ] = None
    decode_secret_file: Annotated[
        Path | None,
        option(
            "--decode-secret-file",
            value=INPUT_FILE,
            help="With --decode-server: the secret that the decode servers have as --api-key-file.",
        ),
    ] = None
    transport: Annotated[
        str,
        option(
            "--transport",
            value=installed_plugin("outrider.transports"),
            help="Plugin that transfers KV pages between the servers: nixl, torch, or an installed plugin's name.",
        ),
    ] = "torch"
    tensor_parallel: TensorParallelOption = 1
    data_parallel: DataParallelOption = 1
    expert_parallel: ExpertParallelOption = False


def serve_prefill(
    listen: PeerAddress, secret: bytes, drain_s: float, roles: RoleOptions, options: ServerOptions
) -> CommandReport:
    """Prefill prompts for the decode servers that connect, until SIGTERM or SIGINT and the end of the running requests."""
    from outrider.disaggregation.server import PrefillServer
    from outrider.registry.engine_plugins import get_transport

    load_engine = _engine_loader(options)
    transport = get_transport(roles.transport)
    server = PrefillServer(load_engine(), transport, listen=listen, secret=secret, say=_print_line)
    return _serve_until_signal(server, drain_s)


def serve_decode(
    listen: PeerAddress,
    secret: bytes,
    drain_s: float,
    roles: RoleOptions,
    options: ServerOptions,
    *,
    describe: Callable[[Engine], dict[str, Any]],
) -> CommandReport:
    """Decode for clients until SIGTERM or SIGINT and the end of the running requests. Prefill servers prefill the prompts.

    While no prefill server is connected, this server prefills the prompts itself. ``describe`` returns what HTTP servers get
    to know of the engine.
    """
    from outrider.disaggregation.server import DecodeServer
    from outrider.registry.engine_plugins import get_transport

    load_engine = _engine_loader(options)
    transport = get_transport(roles.transport)
    follow = functools.partial(_follow, roles.transport)
    ranks = roles.tensor_parallel, roles.data_parallel
    with first_rank(load_engine, *ranks, expert=roles.expert_parallel, follow=follow) as engine:
        server = DecodeServer(
            engine,
            transport,
            listen=listen,
            prefill=[PeerAddress.parse(each) for each in roles.prefill_server or ()],
            describe=describe,
            secret=secret,
            say=_print_line,
        )
        return _serve_until_signal(server, drain_s)


def _follow(transport: str, engine: Engine, rank: int) -> None:
    """Run a child rank, with the links over its part of the pages."""
    from outrider.disaggregation.page_landing import FollowerLinks
    from outrider.registry.engine_plugins import get_transport

    pages = FollowerLinks(engine, get_transport(transport), rank=rank)
    try:
        engine.follow(pages.execute_query)
    finally:
        pages.close()


def check_address(listen: PeerAddress, secret_file: Path | None) -> bytes:
    """Check the address and the secret of a server before torch is imported, and return the content of ``secret_file``.
    Raises :class:`UsageError`.
    """
    with checking_options():
        secret = read_secret(secret_file)
        require_secret(listen.host, secret)
        check_listening("--host and --port", listen.host, listen.port, family=listen.family)
    return secret


def read_secret(file: Path | None) -> bytes:
    """Return the content of the file without surrounding space. Raises :class:`ConfigError` for a short secret."""
    if file is None:
        return b""
    secret = read_bounded(file, "a secret").strip()
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(f"{file} has {len(secret)} bytes; expected a secret of at least {_MIN_SECRET_BYTES}")
    return secret


def _engine_loader(options: ServerOptions) -> Callable[..., Engine]:
    return options.loader(options.speculation(), max_requests=_MAX_REQUESTS)


def _serve_until_signal(server: DisaggregationServer, drain_s: float) -> CommandReport:
    _print_line(f"listening on {server.address}")
    with _ended_by_signals(lambda: server.drain(drain_s)):
        all_ended = server.serve_until_drained()
    data = {"address": str(server.address), "all_requests_ended": all_ended, "counts": server.counts}

    def render(console: Console) -> None:
        console.print("ended; every request had ended" if all_ended else "ended; requests were still open")

    return CommandReport(data=data, render=render, exit_code=0 if all_ended else 1)


@contextmanager
def _ended_by_signals(end: Callable[[], None]) -> Generator[None]:
    """Call ``end`` at SIGTERM and SIGINT in the scope, instead of ending the command. An ignored signal stays ignored."""
    stop = SignalStop.of_process(signal.SIGTERM)

    def handle(number: int, frame: Any) -> None:
        del number, frame
        if stop is not None:
            stop.handled()  # otherwise the watcher takes the process to hang, and ends it while requests still run
        end()

    before = {number: signal.signal(number, handle) for number in accepted_interruptions()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_line(line: str) -> None:
    note(f"{line}\n")
