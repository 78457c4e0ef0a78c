"""The prefill server and the decode server: each runs a loop that handles messages and runs iterations of its engine."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from outrider.device import ConfigError
from outrider.disaggregation import codec
from outrider.disaggregation.connections import (
    ConnectionEvent,
    ConnectionHub,
    PeerAddress,
    ProcessRole,
    WireError,
    WireMessage,
)
from outrider.disaggregation.decode_worker import DecodeWorker
from outrider.disaggregation.page_landing import (
    LandingRegistry,
    PageLanding,
    registered_memory,
)
from outrider.disaggregation.prefill_worker import PrefillWorker
from outrider.engine.engine import Engine
from outrider.engine.ranks.ranks import MAX_RANKS, ParallelConfig
from outrider.engine.requests.hand_over import check_fit
from outrider.engine.requests.request import StepOutput
from outrider.errors import BusyError, RequestError
from outrider.model import Shard
from outrider.transports import Link, LinkDown, Transport

LogLine = Callable[[str], None]
"""A function that is called with each line of the server's log."""
_IDLE_POLL_S = 0.5
_BUSY_POLL_S = 0.0005
"""Maximum seconds that the loop waits for messages while a request waits for a fence, a guide or a transfer."""


class DisaggregationServer(ABC):
    """The common part of the prefill server and the decode server: connections, handshakes of engines, and the loop.

    Create and use a server in its engine's thread. The server listens on ``listen``. ``secret`` is an argument of
    :class:`~outrider.disaggregation.connections.ConnectionHub`. ``say`` is called with each log line.
    """

    _role: ProcessRole
    _describe: Callable[[Engine], dict[str, Any]] | None = None
    """Function that returns what clients get to know of the engine, in addition to its load."""
    worker: PrefillWorker | DecodeWorker

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        *,
        listen: PeerAddress,
        secret: bytes = b"",
        say: LogLine = lambda line: None,
    ) -> None:
        self.engine, self._transport, self._say = engine, transport, say
        shards = engine.model.shards
        self._layout = ParallelConfig(tensor=shards.attention.size, data=engine.groups, expert=shards.divides_experts)
        # A transport that can't register this engine's memory fails now, not when the first peer connects.
        self._try_link(listen.host)
        self._hub = ConnectionHub(self._role, listen=listen, secret=secret)
        self._fit = codec.server_fit(engine)
        self._handshakes: dict[int, PageLanding | None] = {}
        """Peers that haven't described their engine, each with the landing that a decode server has opened for it."""
        self._drain_deadline: float | None = None
        self.worker = self._create_worker()

    @property
    def address(self) -> PeerAddress:
        """Address on which the server listens."""
        assert self._hub.address is not None
        return self._hub.address

    @property
    def counts(self) -> dict[str, int]:
        """Counters of requests and transfers since the start."""
        return dict(self.worker.counts)

    def drain(self, within_s: float) -> None:
        """Refuse new requests, and make :meth:`serve_until_drained` return once all requests have ended, or after
        ``within_s`` seconds.

        A signal handler may call this method.
        """
        self._drain_deadline = min(self._drain_deadline or float("inf"), time.monotonic() + within_s)

    def serve_until_drained(self) -> bool:
        """Serve until :meth:`drain`. Return whether all requests had ended in time. Raises once the device is lost."""
        try:
            while True:
                if self._drain_deadline is not None:
                    self._hub.stop_listening()
                    if not self.worker.num_requests or time.monotonic() > self._drain_deadline:
                        return not self.worker.num_requests
                self.run_once()
        finally:
            self.close()

    def run_once(self, idle_s: float = _IDLE_POLL_S) -> None:
        """Run one iteration of the engine and handle the messages that have arrived.

        Without any work, wait up to ``idle_s`` seconds for a message.
        """
        busy = self.worker.run_iteration()
        for peer, why in list(self.worker.broken_peers.items()):
            self._hub.disconnect(peer, why)
        for event in self._hub.poll(0.0 if busy else _BUSY_POLL_S if self.worker.has_work else idle_s):
            self._handle(event)

    def close(self) -> None:
        """Close all links and connections. After the call, no transfer reads or writes the engine's pages."""
        for landing in self._handshakes.values():
            if landing is not None:
                landing.close()
        self._handshakes.clear()
        self.worker.remove_all_peers()
        self._hub.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _handle(self, event: ConnectionEvent) -> None:
        try:
            if event.kind == "left":
                landing = self._handshakes.pop(event.peer, None)
                if landing is not None:
                    landing.close()
                self._say(f"{event.role} {event.peer} is gone: {event.why}")
                self._remove_peer(event)
            elif event.role is ProcessRole.CLIENT:
                self._handle_client(event)
            elif event.kind == "joined":
                self._handshakes[event.peer] = self._start_handshake(event.peer)
            elif event.peer in self._handshakes:
                self._finish_handshake(event.peer, event.message, self._handshakes.pop(event.peer))
            else:
                assert event.message is not None
                self.worker.handle_message(event.peer, event.message)
        except (WireError, LinkDown) as error:
            self._hub.disconnect(event.peer, str(error))

    def _open_link(self, host: str, tensor_ranks: int, part: Shard | None = None, *, accepts: bool) -> Link:
        """Open a link over the memory that :func:`registered_memory` returns for ``tensor_ranks`` and ``part``."""
        regions, states = registered_memory(self.engine, tensor_ranks, part)
        return self._transport.open(regions, self.engine.backend, accepts=accepts, host=host, states=states)

    def _check_engine(self, message: WireMessage | None, fit: Mapping[str, Any]) -> tuple[bytes, ...]:
        """Return the link offers of the peer's engine. Raises :class:`ConfigError` if its description doesn't fit ``fit``."""
        assert message is not None
        peer_fit = message.body.get("fit")
        if message.kind not in ("engine", "refused"):
            raise WireError(f"expected what engine it has, it says {message.kind!r}")
        if not isinstance(peer_fit, dict):
            raise WireError("the other side doesn't say what engine it has")
        check_fit(fit, peer_fit)  # raises an error that names this engine's values first
        if message.kind == "refused":
            raise ConfigError(str(message.body.get("error")))
        if not 0 < len(message.blobs) <= MAX_RANKS:
            raise WireError(f"its engine offers {len(message.blobs)} links; expected 1 to {MAX_RANKS}")
        return message.blobs

    def _send_engine(self, peer: int, fit: Mapping[str, Any], layout: ParallelConfig, offers: Sequence[bytes]) -> None:
        """Send the description ``fit`` of an engine of ``layout`` and the offers of the links over its pages."""
        body = {"fit": dict(fit), "ranks": [layout.tensor, layout.data, int(layout.expert)]}
        self._hub.send(peer, WireMessage("engine", body, tuple(offers)))

    def _send_status(self, event: ConnectionEvent) -> None:
        engine = self.engine
        body = {
            "role": self._role,
            "counts": self.counts,
            "open": self.worker.num_requests,
            "free_pages": engine.free_pages,
            "pages": (engine.page_memory[0].shape[0] - 1) * engine.groups,
            "free_rows": engine.free_rows,
            "rows": engine.config.max_requests * engine.groups,
            "iterations": engine.stats.iterations,
            "stats": asdict(engine.stats),
            "load": asdict(engine.load),
            **({} if self._describe is None else {"engine": self._describe(engine)}),
            f"{'decode' if self._role is ProcessRole.PREFILL else 'prefill'}_peers": self.worker.num_peers,
        }
        self._hub.send(event.peer, WireMessage("status", body))

    def _remove_peer(self, event: ConnectionEvent) -> None:
        if event.role is not ProcessRole.CLIENT:
            self.worker.remove_peer(event.peer)

    @abstractmethod
    def _create_worker(self) -> PrefillWorker | DecodeWorker: ...

    @abstractmethod
    def _handle_client(self, event: ConnectionEvent) -> None: ...

    @abstractmethod
    def _try_link(self, host: str) -> None:
        """Open a link and close it. Raises :class:`CapabilityError` if the transport can't register the memory."""

    @abstractmethod
    def _start_handshake(self, peer: int) -> PageLanding | None:
        """Start the handshake with the engine of a new peer. Return the landing that was opened for the peer, if any."""

    @abstractmethod
    def _finish_handshake(self, peer: int, message: WireMessage | None, landing: PageLanding | None) -> None:
        """Check the peer's engine and connect the links.

        Raises :class:`WireError` or :class:`LinkDown`, which close the connection, or an error that ends the server.
        """


class PrefillServer(DisaggregationServer):
    """A server that prefills for any number of decode servers. They connect to it."""

    _role = ProcessRole.PREFILL
    worker: PrefillWorker

    def _create_worker(self) -> PrefillWorker:
        return PrefillWorker(self.engine)

    def _handle_client(self, event: ConnectionEvent) -> None:
        if event.kind == "message" and event.message is not None:
            if event.message.kind != "status":
                raise WireError(f"a prefill server takes no {event.message.kind!r} of a client; ask a decode server")
            self._send_status(event)

    def _try_link(self, host: str) -> None:
        self._open_link(host, 1, accepts=True).close()

    def _start_handshake(self, peer: int) -> None:
        del peer  # the decode server sends the first message, with the number of its ranks

    def _finish_handshake(self, peer: int, message: WireMessage | None, landing: PageLanding | None) -> None:
        del landing
        links: list[Link] = []
        fit = self._fit
        try:
            layout = _layout_of(message)
            fit = codec.server_fit(self.engine, layout.shards(0))
            offers = self._check_engine(message, fit)
            if len(offers) != layout.world:
                raise WireError(f"it offers {len(offers)} links for {layout.world} ranks")
            for rank, offer in enumerate(offers):
                part = layout.shards(rank).attention
                links.append(self._open_link(self.address.host, part.size, part, accepts=True))
                links[-1].connect(offer)
        except (ConfigError, WireError, LinkDown) as error:
            for link in links:
                link.close()
            if not isinstance(error, ConfigError):
                raise
            self._hub.send(peer, WireMessage("refused", {"error": str(error), "fit": fit}))
            self._say(f"decode server {peer} was refused: {error}")
            return
        self._send_engine(peer, fit, layout, [link.offer() for link in links])
        self.worker.add_peer(peer, lambda out: self._hub.send(peer, out), links, layout.tensor)
        self._say(f"decode {peer} is here, by {self._transport.name}")


class DecodeServer(DisaggregationServer):
    """A server that decodes for clients. The servers at the addresses ``prefill`` prefill the prompts.

    ``prefills_alone``: prefill prompts here while no prefill server is connected; otherwise they wait for one. ``describe``
    returns what clients get to know of the engine.
    """

    _role = ProcessRole.DECODE
    worker: DecodeWorker

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        *,
        listen: PeerAddress,
        prefill: Sequence[PeerAddress],
        prefills_alone: bool = True,
        describe: Callable[[Engine], dict[str, Any]] | None = None,
        secret: bytes = b"",
        say: LogLine = lambda line: None,
    ) -> None:
        self._landings = LandingRegistry(engine)
        self._prefills_alone, self._describe = prefills_alone, describe
        super().__init__(engine, transport, listen=listen, secret=secret, say=say)
        self._requests_of_client: dict[int, dict[int, int]] = {}
        """Number of each open request, by the client's connection number and then by the client's own id of the request."""
        for address in prefill:
            self._hub.connect_to(address)

    def _create_worker(self) -> DecodeWorker:
        return DecodeWorker(self.engine, prefills_alone=self._prefills_alone)

    def _remove_peer(self, event: ConnectionEvent) -> None:
        super()._remove_peer(event)
        for number in self._requests_of_client.pop(event.peer, {}).values():
            self.worker.abort(number)

    def _handle_client(self, event: ConnectionEvent) -> None:
        if event.kind == "joined":
            self._requests_of_client[event.peer] = {}
            return
        assert event.message is not None
        kind, body = event.message.kind, event.message.body
        with codec.decoding(f"a message {kind!r}"):
            if kind == "status":
                self._send_status(event)
            elif kind == "submit":
                self._submit(event.peer, codec.decode_int(body["id"]), event.message)
            elif kind == "abort":
                number = self._requests_of_client[event.peer].pop(codec.decode_int(body["id"]), None)
                if number is not None:
                    self.worker.abort(number)
            else:
                raise WireError(f"a client doesn't say {kind!r}")

    def _submit(self, peer: int, client_id: int, message: WireMessage) -> None:
        requests = self._requests_of_client[peer]
        if client_id in requests:
            raise WireError(f"the id {client_id} is in use")

        def emit(output: StepOutput) -> None:
            if output.finish_reason is not None:
                requests.pop(client_id, None)
            self._hub.send(peer, WireMessage("output", {"id": client_id, "output": codec.encode_output(output)}))

        try:
            if self._drain_deadline is not None:
                raise BusyError("this server is about to end")
            state = codec.decode_state(message.body["state"], message.blobs)
            requests[client_id] = -1
            requests[client_id] = self.worker.submit(state, emit)
        except (RequestError, ConfigError) as error:
            requests.pop(client_id, None)
            emit(StepOutput.of_error(0, error))

    def _try_link(self, host: str) -> None:
        self._open_landing(host).close()

    def _open_landing(self, host: str) -> PageLanding:
        return self._landings.open_landing(self._open_link(host, self._layout.tensor, accepts=False), host)

    def _start_handshake(self, peer: int) -> PageLanding:
        landing = self._open_landing(self.address.host)
        self._send_engine(peer, self._fit, self._layout, landing.offers())
        return landing

    def _finish_handshake(self, peer: int, message: WireMessage | None, landing: PageLanding | None) -> None:
        assert landing is not None
        try:
            offers = self._check_engine(message, self._fit)
            if len(offers) != len(landing.offers()):
                raise WireError(f"it has {len(offers)} links for {len(landing.offers())} ranks here")
            landing.connect(offers)
        except BaseException:
            landing.close()
            raise
        self.worker.add_peer(peer, lambda out: self._hub.send(peer, out), landing)
        self._say(f"prefill {peer} is here, by {self._transport.name}")


def _layout_of(message: WireMessage | None) -> ParallelConfig:
    """Return the ranks of a decode server's engine. Raises :class:`WireError` or :class:`ConfigError` for invalid numbers."""
    assert message is not None
    with codec.decoding("a decode server's ranks"):
        tensor, data, expert = (codec.decode_int(each) for each in message.body["ranks"])
    return ParallelConfig(tensor=tensor, data=data, expert=expert == 1)
