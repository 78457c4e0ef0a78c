"""``outrider prefill-server`` and ``outrider decode-server``: prefill and decode in processes of their own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.cli.decode_ranks import DecodeRanks
from outrider.cli.engine_options import DecodeOptions, EngineOptions, with_options
from outrider.cli.inputs import read_bounded
from outrider.cli.listening import check_listening
from outrider.cli.report import JsonOption, Report
from outrider.cli.stopping import Stop
from outrider.cli.streams import note
from outrider.device.errors import ConfigError
from outrider.registry.interruptions import accepted_interruptions

if TYPE_CHECKING:
    from outrider.apart.connections import Address
    from outrider.apart.server import Server
    from outrider.engine.engine import Engine

_REQUESTS = 16
_SECRET_BYTES = 16

ListenOption = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Where others connect. Port 0: any that is free; it's printed.")
]
TransportOption = Annotated[
    str, typer.Option("--transport", metavar="NAME", help="What moves pages: nixl, torch, or an installed plugin's name.")
]
SecretOption = Annotated[
    Path | None,
    typer.Option(
        "--secret-file",
        metavar="F",
        help="A file with what all processes of a deployment know; needed wherever other machines can connect.",
    ),
]
DrainOption = Annotated[
    float, typer.Option("--drain-seconds", metavar="S", min=0.0, help="How long running requests may take after SIGTERM.")
]
SilenceOption = Annotated[
    float,
    typer.Option("--silence-seconds", metavar="S", min=1.0, help="A process that says nothing for so long counts as gone."),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where and how a server is reached."""

    listen: str
    transport: str
    secret_file: Path | None
    drain_s: float
    silence_s: float

    def secret(self) -> bytes:
        """What the file has, without space around it. Raises :class:`ConfigError` where that is nothing much."""
        if self.secret_file is None:
            return b""
        found = read_bounded(self.secret_file).strip()
        if len(found) < _SECRET_BYTES:
            raise ConfigError(f"{self.secret_file} has {len(found)} bytes; expected a secret of at least {_SECRET_BYTES}")
        return found


@with_options
def prefill_server(
    *,
    listen: ListenOption = "127.0.0.1:9500",
    transport: TransportOption = "torch",
    secret_file: SecretOption = None,
    drain_seconds: DrainOption = 30.0,
    silence_seconds: SilenceOption = 30.0,
    options: EngineOptions,
    json_output: JsonOption = False,
) -> Report:
    """Prefill prompts for decode servers, which connect to it. Ends at SIGTERM, when running requests have ended."""
    from outrider.apart.server import PrefillServer
    from outrider.registry.transports import get_transport

    place = _Place(
        listen=listen, transport=transport, secret_file=secret_file, drain_s=drain_seconds, silence_s=silence_seconds
    )
    address, secret = _listening(place)
    start = _loader(options, say=not json_output)
    moves = get_transport(transport)
    engine = start()
    server = PrefillServer(engine, moves, listen=address, secret=secret, silence_s=silence_seconds, say=_say)
    return _serve(server, place)


@with_options
def decode_server(
    *,
    prefill: Annotated[
        list[str], typer.Option("--prefill", metavar="HOST:PORT", help="A prefill server; give the option once for each.")
    ],
    listen: ListenOption = "127.0.0.1:9600",
    alone: Annotated[
        str,
        typer.Option(
            "--alone",
            metavar="prefill|wait",
            help="While no prefill server is there: prefill here, or keep requests until one is.",
        ),
    ] = "prefill",
    transport: TransportOption = "torch",
    secret_file: SecretOption = None,
    drain_seconds: DrainOption = 30.0,
    silence_seconds: SilenceOption = 30.0,
    data_parallel: Annotated[
        int,
        typer.Option(
            "--data-parallel",
            metavar="M",
            min=1,
            help="M devices of this host, each with requests of its own; all share each layer's MLP.",
        ),
    ] = 1,
    options: DecodeOptions,
    json_output: JsonOption = False,
) -> Report:
    """Decode for clients; prefill servers prefill the prompts. Ends at SIGTERM, when running requests have ended."""
    from outrider.apart.connections import Address
    from outrider.apart.decode_side import Alone
    from outrider.apart.server import DecodeServer
    from outrider.registry.transports import get_transport

    if alone not in tuple(Alone):
        raise ConfigError(f"--alone is {alone!r}; expected {' or '.join(Alone)}")
    place = _Place(
        listen=listen, transport=transport, secret_file=secret_file, drain_s=drain_seconds, silence_s=silence_seconds
    )
    address, secret = _listening(place)
    peers = [Address.parse(each) for each in prefill]
    start = _loader(options, say=not json_output)
    moves = get_transport(transport)
    with DecodeRanks(start, transport, data_parallel) as ranks:
        server = DecodeServer(
            ranks.engine(),
            moves,
            listen=address,
            prefill=peers,
            alone=Alone(alone),
            secret=secret,
            silence_s=silence_seconds,
            say=_say,
        )
        return _serve(server, place)


def _listening(place: _Place) -> tuple[Address, bytes]:
    """Address and secret, looked at before a model is loaded. Raises :class:`ConfigError`."""
    from outrider.apart.connections import Address, check_exposed

    address, secret = Address.parse(place.listen), place.secret()
    check_exposed(address.host, secret)
    check_listening("--listen", address.host, address.port, family=address.family)
    return address, secret


def _loader(options: EngineOptions, *, say: bool) -> Callable[..., Engine]:
    from outrider.cli.torch_probe import require_torch

    require_torch()
    return options.loader(options.speculation(), max_requests=_REQUESTS, say=say)


def _serve(server: Server, place: _Place) -> Report:
    _say(f"listening on {server.address}")
    with _ended_by_signals(lambda: server.end(place.drain_s)):
        all_ended = server.run()
    data = {"address": str(server.address), "all_requests_ended": all_ended, "counts": server.counts}

    def render(console: Console) -> None:
        console.print("ended; every request had ended" if all_ended else "ended; requests were still open")

    return Report(data=data, render=render, exit_code=0 if all_ended else 1)


@contextmanager
def _ended_by_signals(end: Callable[[], None]) -> Generator[None]:
    """Call ``end`` for SIGTERM and SIGINT in the scope. A signal that is ignored stays ignored."""
    stop = Stop.of_process(signal.SIGTERM)

    def handle(number: int, frame: Any) -> None:
        del number, frame
        if stop is not None:
            stop.handled()  # else the process is taken to hang, and ended while requests still run
        end()

    before = {number: signal.signal(number, handle) for number in accepted_interruptions()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    note(f"{line}\n")
