"""``outrider serve --role prefill|decode``: prefill and decode in separate server processes."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from outrider.cli.options.engine_options import ServerOptions
from outrider.cli.options.option_values import checking_options
from outrider.cli.options.rank_processes import Joined, RankPlacement, check_expert_parallel
from outrider.cli.terminal.files import check_listening, read_bounded
from outrider.cli.terminal.report import CommandReport
from outrider.cli.terminal.stopping import SignalStop
from outrider.cli.terminal.streams import note
from outrider.device.errors import ConfigError
from outrider.registry.children import (
    accepted_interruptions,
    end_with_parent,
    ignore_interruptions,
    interruptions_blocked_in_children,
)

if TYPE_CHECKING:
    from outrider.disaggregation.server import DisaggregationServer
    from outrider.engine.engine import Engine

_MAX_REQUESTS = 16
"""Maximum number of requests that a prefill or decode server runs at the same time, unless ``--max-requests`` is given."""
_MIN_SECRET_BYTES = 16
_RANK_EXIT_S = 10.0
"""Seconds that child ranks have to end after the first rank, before they are killed."""


def serve_prefill(
    host: str, port: int, *, transport: str, secret: bytes, drain_s: float, options: ServerOptions
) -> CommandReport:
    """Prefill prompts for the decode servers that connect, until SIGTERM or SIGINT and the end of the running requests."""
    from outrider.disaggregation.connections import PeerAddress
    from outrider.disaggregation.server import PrefillServer
    from outrider.registry.transports import get_transport

    load_engine = _engine_loader(options)
    transport_plugin = get_transport(transport)
    server = PrefillServer(load_engine(), transport_plugin, listen=PeerAddress(host, port), secret=secret, say=_print_line)
    return _serve_until_signal(server, drain_s)


def serve_decode(
    host: str,
    port: int,
    *,
    prefill_servers: Sequence[str],
    transport: str,
    secret: bytes,
    drain_s: float,
    tensor_parallel: int,
    data_parallel: int,
    expert_parallel: bool,
    describe: Callable[[Engine], dict[str, Any]],
    options: ServerOptions,
) -> CommandReport:
    """Decode for clients, with prompts that ``prefill_servers`` have prefilled, until SIGTERM or SIGINT and the end of the
    running requests. While no prefill server is connected, this server prefills the prompts itself. ``describe`` returns what
    HTTP servers get to know of the engine.
    """
    from outrider.disaggregation.connections import PeerAddress
    from outrider.disaggregation.server import DecodeServer
    from outrider.registry.transports import get_transport

    peers = [PeerAddress.parse(each) for each in prefill_servers]
    load_engine = _engine_loader(options)
    transport_plugin = get_transport(transport)
    with DecodeRanks(load_engine, transport, tensor_parallel, data_parallel, expert=expert_parallel) as ranks:
        server = DecodeServer(
            ranks.load_first_rank(),
            transport_plugin,
            listen=PeerAddress(host, port),
            prefill=peers,
            describe=describe,
            secret=secret,
            say=_print_line,
        )
        return _serve_until_signal(server, drain_s)


class DecodeRanks:
    """The ranks of a decode server, as a scope: rank 0 is this process, the other ranks are its children.

    ``load_engine`` loads the engine of one rank. It is pickled for each child, and gets the ranks as ``joined``.
    ``transport``: the plugin with which each rank opens its links. ``expert``: the ranks divide a mixture's experts. If one
    rank ends, all ranks end.
    """

    def __init__(
        self, load_engine: Callable[..., Engine], transport: str, tensor: int, data: int, *, expert: bool = False
    ) -> None:
        check_expert_parallel(expert, tensor, data)
        self._load_engine, self._transport = load_engine, transport
        self._tensor, self._data, self._expert = tensor, data, expert
        self._stack = ExitStack()
        self._store: Any = None

    def __enter__(self) -> DecodeRanks:
        return self

    def load_first_rank(self) -> Engine:
        """Start the child ranks, join them, and return the engine of rank 0."""
        world = self._tensor * self._data
        if world == 1:
            return self._load_engine()
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for rank in range(1, world):
            placement = _rank_placement(rank, world, self._store.port)
            given = (self._load_engine, self._transport, self._tensor, placement, self._expert)
            process = context.Process(target=follow_first_rank, args=given, name=f"outrider-rank-{rank}", daemon=True)
            with interruptions_blocked_in_children():
                process.start()
            self._stack.callback(_end_child, process)
        placement = _rank_placement(0, world, self._store.port)
        joined = self._stack.enter_context(Joined(self._tensor, self._data, placement, expert=self._expert))
        engine = self._load_engine(joined=joined)
        self._stack.callback(engine.close)
        return engine

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        self._store = None


def follow_first_rank(
    load_engine: Callable[..., Engine], transport: str, tensor: int, placement: RankPlacement, expert: bool = False
) -> None:
    """Run a child rank: repeat the decisions of rank 0 until rank 0 ends. This is the main function of the process.
    ``expert``: the ranks divide a mixture's experts.
    """
    from outrider.disaggregation.page_landing import FollowerLinks
    from outrider.registry.transports import get_transport

    ignore_interruptions()
    end_with_parent()
    with Joined(tensor, placement.world // tensor, placement, expert=expert) as joined:
        engine = load_engine(joined=joined)
        pages = FollowerLinks(engine, get_transport(transport), rank=placement.rank)
        try:
            engine.follow(pages.execute_query)
        finally:
            pages.close()


def _rank_placement(rank: int, world: int, port: int) -> RankPlacement:
    return RankPlacement(
        rank=rank, world=world, local=rank, address="127.0.0.1", port=port, store_is_elsewhere=True, pipe=None
    )


def _end_child(process: Any) -> None:
    process.join(_RANK_EXIT_S)
    if process.is_alive():
        process.kill()
        process.join()


def check_address(host: str, port: int, secret_file: Path | None) -> bytes:
    """Check the address and the secret of a server before torch is imported, and return the content of ``secret_file``.
    Raises :class:`UsageError`.
    """
    from outrider.disaggregation.connections import PeerAddress, require_secret

    with checking_options():
        secret = read_secret(secret_file)
        require_secret(host, secret)
        check_listening("--host and --port", host, port, family=PeerAddress(host, port).family)
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
