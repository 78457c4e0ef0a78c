"""The loops of a prefill server and of a decode server: messages, turns of their engines, and who comes and goes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from outrider.apart import codec
from outrider.apart.connections import Address, Event, Hub, Role, body_of
from outrider.apart.decode_side import Alone, DecodeSide
from outrider.apart.landing import Landing, OneLanding, RankLandings
from outrider.apart.prefill_side import PrefillSide
from outrider.apart.wire import Message, WireError
from outrider.device import ConfigError
from outrider.engine.engine import Engine
from outrider.engine.requests.request import FinishReason, StepOutput
from outrider.errors import RequestError
from outrider.transports import Link, LinkDown, Transport

Say = Callable[[str], None]
_MOST_RANKS = 1024
_IDLE_S = 0.5
_SOON_S = 0.0005
"""How long a loop waits for messages: with nothing to do, and where something is about to be over."""


class Side(Protocol):
    """What a server's side does for it, whichever one it is."""

    broken: set[int]
    counts: dict[str, int]

    @property
    def open(self) -> int:
        """Requests that it knows of."""

    @property
    def peers(self) -> int:
        """How many are linked to it."""

    @property
    def has_work(self) -> bool:
        """Whether :meth:`turn` may find something to do without a message."""

    def turn(self) -> bool:
        """One iteration of the engine, and whatever else can be done now. Whether anything happened."""

    def left(self, peer: int) -> None:
        """A peer is gone."""

    def leave_all(self) -> None:
        """The server ends."""

    def receive(self, peer: int, message: Message) -> None:
        """A message of a peer. Raises :class:`WireError`."""


class Server(ABC):
    """What both have in common. Belongs to the thread that made it, which is its engine's. ``say``: a line for people."""

    _role: Role
    side: Side

    def __init__(
        self, engine: Engine, transport: Transport, *, listen: Address, secret: bytes, silence_s: float, say: Say
    ) -> None:
        self.engine, self._transport, self._say = engine, transport, say
        # What can't register this engine's memory says so now, and not when somebody comes.
        self._try_link(listen.host)
        self._hub = Hub(self._role, listen=listen, secret=secret, silence_s=silence_s)
        self._fit = codec.fit_of(engine)
        self._meeting: dict[int, Landing | None] = {}
        """Engines that haven't said what they are, each with what was opened for it here."""
        self._ending: float | None = None

    @property
    def address(self) -> Address:
        """Where it listens."""
        assert self._hub.address is not None
        return self._hub.address

    @property
    def counts(self) -> dict[str, int]:
        """What has happened so far."""
        return dict(self.side.counts)

    def end(self, within_s: float) -> None:
        """Take nothing new, and let :meth:`run` return when all requests have ended, or after so many seconds. May be called
        from a signal handler.
        """
        self._ending = min(self._ending or float("inf"), time.monotonic() + within_s)

    def run(self) -> bool:
        """Serve until :meth:`end`. Whether every request had ended. Raises once the device is lost."""
        refused = False
        try:
            while True:
                if self._ending is not None:
                    if not refused:
                        self._hub.refuse_new()
                        refused = True
                    if not self.side.open or time.monotonic() > self._ending:
                        return not self.side.open
                self.turn()
        finally:
            self.close()

    def turn(self, idle_s: float = _IDLE_S) -> None:
        """Read messages, and let the engine do one iteration."""
        busy = self.side.turn()
        for peer in list(self.side.broken):
            self._hub.drop(peer, "its link is down")
        for event in self._hub.poll(0.0 if busy else _SOON_S if self.side.has_work else idle_s):
            self._handle(event)

    def close(self) -> None:
        """End all connections, and wait until no byte is written any more."""
        for landing in self._meeting.values():
            if landing is not None:
                landing.close()
        self._meeting.clear()
        self.side.leave_all()
        self._hub.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        try:
            if event.kind == "left":
                landing = self._meeting.pop(event.peer, None)
                if landing is not None:
                    landing.close()
                self._say(f"{event.role} {event.peer} is gone: {event.why}")
                self._left(event)
            elif event.role is Role.CLIENT:
                self._client(event)
            elif event.kind == "joined":
                self._meeting[event.peer] = self._begin(event.peer)
            elif event.peer in self._meeting:
                self._meet(event.peer, event.message, self._meeting.pop(event.peer))
            else:
                assert event.message is not None
                self.side.receive(event.peer, event.message)
        except (WireError, LinkDown) as error:
            self._hub.drop(event.peer, str(error))

    def _open_link(self, host: str, *, accepts: bool) -> Link:
        return self._transport.open(self.engine.page_memory, self.engine.backend, accepts=accepts, host=host)

    def _engine_of(self, message: Message | None) -> tuple[bytes, ...]:
        """The offers of the other engine, which fits. Raises :class:`ConfigError` for one that doesn't."""
        assert message is not None
        theirs = message.body.get("fit")
        if message.kind == "refused":
            codec.check_fit(self._fit, theirs)  # says it from this side
            raise ConfigError(str(message.body.get("error")))
        if message.kind != "engine" or not 0 < len(message.blobs) <= _MOST_RANKS:
            raise WireError(f"expected what engine it has, it says {message.kind!r}")
        codec.check_fit(self._fit, theirs)
        return message.blobs

    def _send_engine(self, peer: int, offers: Sequence[bytes]) -> None:
        """Say what this side's engine is, and where its pages are."""
        self._hub.send(peer, Message("engine", {"fit": self._fit}, tuple(offers)))

    def _status(self, event: Event) -> None:
        engine = self.engine
        body = {
            "role": self._role,
            "counts": self.counts,
            "open": self.side.open,
            "free_pages": engine.free_pages,
            "pages": (engine.page_memory[0].shape[0] - 1) * engine.groups,
            "free_rows": engine.free_rows,
            "rows": engine.config.max_requests * engine.groups,
            "iterations": engine.stats.iterations,
            f"{'decode' if self._role is Role.PREFILL else 'prefill'}_peers": self.side.peers,
        }
        self._hub.send(event.peer, Message("status", body))

    def _left(self, event: Event) -> None:
        """Somebody is gone. A client holds nothing of the side's."""
        if event.role is not Role.CLIENT:
            self.side.left(event.peer)

    @abstractmethod
    def _client(self, event: Event) -> None: ...

    @abstractmethod
    def _try_link(self, host: str) -> None: ...

    @abstractmethod
    def _begin(self, peer: int) -> Landing | None:
        """An engine has come."""

    @abstractmethod
    def _meet(self, peer: int, message: Message | None, landing: Landing | None) -> None:
        """It says what it is. Raises :class:`WireError`, :class:`LinkDown`, and where nothing can be done any more."""


class PrefillServer(Server):
    """Prefills for any number of decode servers, which come to it."""

    _role = Role.PREFILL
    side: PrefillSide

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        *,
        listen: Address,
        secret: bytes = b"",
        silence_s: float = 30.0,
        say: Say = lambda line: None,
    ) -> None:
        super().__init__(engine, transport, listen=listen, secret=secret, silence_s=silence_s, say=say)
        self.side = PrefillSide(engine)

    def _client(self, event: Event) -> None:
        if event.kind == "message" and event.message is not None:
            if event.message.kind != "status":
                raise WireError(f"a prefill server takes no {event.message.kind!r} of a client; ask a decode server")
            self._status(event)

    def _try_link(self, host: str) -> None:
        self._open_link(host, accepts=True).close()

    def _begin(self, peer: int) -> None:
        del peer  # the other side says first how many ranks it has

    def _meet(self, peer: int, message: Message | None, landing: Landing | None) -> None:
        del landing
        links: list[Link] = []
        try:
            for offer in self._engine_of(message):
                links.append(self._open_link(self.address.host, accepts=True))
                links[-1].connect(offer)
        except (ConfigError, WireError, LinkDown) as error:
            for link in links:
                link.close()
            if not isinstance(error, ConfigError):
                raise
            self._hub.send(peer, Message("refused", {"error": str(error), "fit": self._fit}))
            self._say(f"decode server {peer} was refused: {error}")
            return
        self._send_engine(peer, [link.offer() for link in links])
        self.side.joined(peer, lambda out: self._hub.send(peer, out), links)
        self._say(f"decode {peer} is here, by {self._transport.name}")


class DecodeServer(Server):
    """Serves clients, and has their prompts prefilled by ``prefill``. ``alone``: what it does while none of them is there."""

    _role = Role.DECODE
    side: DecodeSide

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        *,
        listen: Address,
        prefill: Sequence[Address],
        alone: Alone = Alone.PREFILL,
        secret: bytes = b"",
        silence_s: float = 30.0,
        say: Say = lambda line: None,
    ) -> None:
        self._ranks = RankLandings(engine) if engine.groups > 1 else None
        super().__init__(engine, transport, listen=listen, secret=secret, silence_s=silence_s, say=say)
        self.side = DecodeSide(engine, alone=alone)
        self._clients: dict[int, dict[int, int]] = {}
        for address in prefill:
            self._hub.reach(address)

    def _left(self, event: Event) -> None:
        super()._left(event)
        for number in self._clients.pop(event.peer, {}).values():
            self.side.abort(number)

    def _client(self, event: Event) -> None:
        if event.kind == "joined":
            self._clients[event.peer] = {}
            return
        body, requests = body_of(event), self._clients[event.peer]
        assert event.message is not None
        with codec.Reading(f"a message {event.message.kind!r}"):
            if event.message.kind == "status":
                self._status(event)
            elif event.message.kind == "submit":
                self._submit(event.peer, codec.whole(body["id"]), event.message)
            elif event.message.kind == "abort":
                number = requests.pop(codec.whole(body["id"]), None)
                if number is not None:
                    self.side.abort(number)
            else:
                raise WireError(f"a client doesn't say {event.message.kind!r}")

    def _submit(self, peer: int, name: int, message: Message) -> None:
        requests = self._clients[peer]
        if name in requests:
            raise WireError(f"the id {name} is in use")

        def emit(output: StepOutput) -> None:
            if output.finish_reason is not None:
                requests.pop(name, None)
            self._hub.send(peer, Message("output", {"id": name, "output": codec.output_to(output)}))

        try:
            if self._ending is not None:
                raise RequestError("this server is about to end")
            state = codec.state_from(message.body["state"], message.blobs)
            requests[name] = -1
            requests[name] = self.side.submit(state, emit)
        except (RequestError, ConfigError) as error:
            requests.pop(name, None)
            emit(StepOutput(0, (), FinishReason.ERROR, error=str(error)))

    def _try_link(self, host: str) -> None:
        self._landing(host).close()

    def _landing(self, host: str) -> Landing:
        link = self._open_link(host, accepts=False)
        return OneLanding(link) if self._ranks is None else self._ranks.make(link, host)

    def _begin(self, peer: int) -> Landing:
        landing = self._landing(self.address.host)
        self._send_engine(peer, landing.offers())
        return landing

    def _meet(self, peer: int, message: Message | None, landing: Landing | None) -> None:
        assert landing is not None
        try:
            offers = self._engine_of(message)
            if len(offers) != len(landing.offers()):
                raise WireError(f"it has {len(offers)} links for {len(landing.offers())} groups here")
            landing.connect(offers)
        except BaseException:
            landing.close()
            raise
        self.side.joined(peer, lambda out: self._hub.send(peer, out), landing)
        self._say(f"prefill {peer} is here, by {self._transport.name}")
