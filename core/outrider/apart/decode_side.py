"""What a decode server does, without its sockets: requests are prefilled elsewhere, and decoded here from their pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count

from torch import Tensor

from outrider.apart import codec
from outrider.apart.compiling import Compilers
from outrider.apart.landing import Landing
from outrider.apart.prefill_side import Send, notice_of
from outrider.apart.wire import Message, WireError
from outrider.device import ConfigError, DeviceError
from outrider.engine.engine import Engine
from outrider.engine.requests.lent import Expected
from outrider.engine.requests.request import FinishReason, StepOutput
from outrider.engine.requests.request_state import RequestState
from outrider.errors import RequestError
from outrider.transports import LinkDown

Emit = Callable[[StepOutput], None]
"""Takes the outputs of a request; the last one has a finish reason."""


class Alone(StrEnum):
    """What a decode server does with prompts while no prefill server is connected."""

    PREFILL = "prefill"
    """Prefills them itself."""
    WAIT = "wait"
    """Keeps them until one is."""


class _Stage(StrEnum):
    COMPILING = "compiling its guide"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    WANTS_PAGES = "wants pages"
    WAITS_FOR_PAGES = "waits for its pages to be free"
    WRITING = "writing"
    DECODING = "decoding"
    CANCELLING = "cancelling"


@dataclass(eq=False, slots=True)
class _Peer:
    number: int
    send: Send
    landing: Landing
    entries: dict[int, _Entry] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Entry:
    number: int
    state: RequestState
    emit: Emit
    stage: _Stage = _Stage.QUEUED
    compiled: Future[None] | None = None
    peer: _Peer | None = None
    ticket: int = 0
    pages: int = 0
    relay: Mapping[str, Tensor] = field(default_factory=dict)
    expected: Expected | None = None
    request: int | None = None


class DecodeSide:
    """The engine of a decode server, and its prefill peers.

    A request's steps: its guide is compiled; a peer prefills it, and tells its first token, which goes out at once; pages are
    reserved here, *pages free*, and the peer is told where to write; *pages written*, and it decodes. When a peer goes away,
    those of its requests that don't decode yet begin again with the output that they have, elsewhere or here. One thread, the
    engine's.
    """

    def __init__(self, engine: Engine, *, alone: Alone = Alone.PREFILL) -> None:
        self.engine = engine
        self._alone = alone
        self._compilers = Compilers(engine)
        self._peers: dict[int, _Peer] = {}
        self.broken: set[int] = set()
        """Peers whose links are down: their connections are to be ended."""
        self._entries: dict[int, _Entry] = {}
        self._by_request: dict[int, _Entry] = {}
        self._numbers, self._tickets = count(1), count(1)
        self.counts = {"requests": 0, "arrived": 0, "prefilled_here": 0, "done_again": 0, "finished_there": 0}

    @property
    def open(self) -> int:
        """Requests that haven't ended."""
        return len(self._entries)

    @property
    def peers(self) -> int:
        """How many are linked to this side."""
        return len(self._peers)

    @property
    def has_work(self) -> bool:
        """Whether :meth:`turn` may find something to do without a message."""
        waits = (_Stage.COMPILING, _Stage.WANTS_PAGES, _Stage.WAITS_FOR_PAGES, _Stage.WRITING)
        return self.engine.has_unfinished or any(entry.stage in waits for entry in self._entries.values())

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, state: RequestState, emit: Emit) -> int:
        """Begin a request, or go on with one that has output already; returns its number. Raises :class:`RequestError` for
        one that can't be served; for a guide that can't be compiled, an output says so.
        """
        entry = _Entry(next(self._numbers), state, emit)
        self.counts["requests"] += 1
        entry.compiled = self._compilers.begin(state.params)
        if entry.compiled is None:
            self._begin(entry)
        else:
            entry.stage = _Stage.COMPILING
        self._entries[entry.number] = entry
        return entry.number

    def abort(self, number: int) -> None:
        """End a request; nothing more is emitted for it. Allowed for one that has ended."""
        entry = self._entries.pop(number, None)
        if entry is None:
            return
        if entry.stage is _Stage.DECODING and entry.request is not None:
            del self._by_request[entry.request]
            if entry.request in self.engine.open_requests:
                self.engine.abort(entry.request)
        elif entry.peer is not None:
            # Reserved pages stay reserved until the peer says that it writes nothing there.
            entry.stage = _Stage.CANCELLING
            entry.peer.send(Message("cancel", {"ticket": entry.ticket}))

    # -- peers -------------------------------------------------------------------------------------------------------

    def joined(self, peer: int, send: Send, landing: Landing) -> None:
        """A prefill server, which reaches this engine's pages by ``landing``. Queued requests go to it."""
        self._peers[peer] = _Peer(peer, send, landing)
        for entry in [each for each in self._entries.values() if each.stage is _Stage.QUEUED]:
            self._begin_or_fail(entry)

    def left(self, peer: int) -> None:
        """A prefill server is gone: once its link is closed its pages are free, and its requests are done again."""
        self.broken.discard(peer)
        gone = self._peers.pop(peer, None)
        if gone is None:
            return
        gone.landing.close()
        for entry in list(gone.entries.values()):
            self._free(entry)
            gone.entries.pop(entry.ticket, None)
            if entry.stage is not _Stage.CANCELLING:
                self._again(entry)

    def leave_all(self) -> None:
        """End every request, and let every peer go."""
        self._compilers.close()
        for number in list(self._entries):
            self.abort(number)
        for peer in list(self._peers):
            self.left(peer)

    def receive(self, peer: int, message: Message) -> None:
        """A message of a prefill server. Raises :class:`WireError` for one that can't be: the connection ends."""
        known = self._peers.get(peer)
        if known is None:
            return  # it was refused, or is gone
        with codec.Reading(f"a message {message.kind!r}"):
            ticket = codec.whole(message.body["ticket"])
            entry = known.entries.get(ticket)
            if entry is None:
                if message.kind in ("ready", "finished", "failed", "cancelled"):
                    return  # of a request that is over here
                raise WireError(f"a prefill server doesn't say {message.kind!r}")
            if entry.stage is _Stage.CANCELLING:
                if message.kind == "cancelled":
                    self._forget(known, entry)
                return
            if message.kind == "ready" and entry.stage is _Stage.PREFILLING:
                self._ready(entry, message)
            elif message.kind == "finished" and entry.stage is _Stage.PREFILLING:
                self.counts["finished_there"] += 1
                self._forget(known, entry)
                self._emit(entry, codec.output_from(message.body["output"], entry.number))
            elif message.kind == "failed":
                self._forget(known, entry)
                if message.body["request"]:
                    self._fail(entry, str(message.body["error"]))
                else:
                    self._again(entry)
            else:
                raise WireError(f"ticket {ticket} is {entry.stage}, and the peer says {message.kind!r}")

    def turn(self) -> bool:
        """One iteration of the engine, and whatever else can be done now. Whether anything happened. Raises what
        :meth:`Engine.step` raises once the device is lost.
        """
        busy = self.engine.has_unfinished
        if busy:
            try:
                for output in self.engine.step():
                    entry = self._by_request.get(output.request_id)
                    if entry is not None:
                        self._emit(entry, replace(output, request_id=entry.number))
            except DeviceError as error:
                if error.device_lost:
                    raise
        for entry in [each for each in self._entries.values() if each.stage is _Stage.COMPILING]:
            busy |= self._compiled(entry)
        for peer in list(self._peers.values()):
            busy |= self._notices(peer)
            try:
                for entry in list(peer.entries.values()):
                    busy |= self._advance(peer, entry)
            except LinkDown:
                self.broken.add(peer.number)
        return busy

    # -- inside ------------------------------------------------------------------------------------------------------

    def _compiled(self, entry: _Entry) -> bool:
        """Begin a request whose guide is ready; whether it was."""
        assert entry.compiled is not None
        if not entry.compiled.done():
            return False
        error, entry.compiled = entry.compiled.exception(), None
        if error is None:
            entry.stage = _Stage.QUEUED
            self._begin_or_fail(entry)
        elif isinstance(error, RequestError | ConfigError):
            self._fail(entry, str(error))
        else:
            raise error
        return True

    def _begin(self, entry: _Entry) -> None:
        """To the prefill server that has least to do; where there is none, as :class:`Alone` says."""
        peers = sorted(self._peers.values(), key=lambda peer: len(peer.entries))
        if peers:
            entry.peer, entry.ticket, entry.stage = peers[0], next(self._tickets), _Stage.PREFILLING
            state, blobs = codec.state_to(entry.state)
            peers[0].entries[entry.ticket] = entry
            peers[0].send(Message("prefill", {"ticket": entry.ticket, "state": state}, tuple(blobs)))
        elif self._alone is Alone.PREFILL:
            entry.request = self.engine.resume(entry.state)
            entry.peer, entry.stage = None, _Stage.DECODING
            self._by_request[entry.request] = entry
            self.counts["prefilled_here"] += 1
        else:
            entry.peer, entry.stage = None, _Stage.QUEUED

    def _begin_or_fail(self, entry: _Entry) -> None:
        try:
            self._begin(entry)
        except (RequestError, ConfigError) as error:
            self._fail(entry, str(error))

    def _again(self, entry: _Entry) -> None:
        self.counts["done_again"] += 1
        entry.peer, entry.stage = None, _Stage.QUEUED
        self._begin_or_fail(entry)

    def _ready(self, entry: _Entry, message: Message) -> None:
        """The first token is there, and goes out; from now on the request has output."""
        body = message.body
        output = codec.output_from(body["output"], entry.number)
        if len(output.tokens) != 1 or output.finish_reason is not None:
            raise WireError("a request that comes has one token more, and isn't over")
        entry.relay = codec.relay_from(body["relay"], message.blobs)
        entry.pages = codec.whole(body["pages"])
        entry.stage = _Stage.WANTS_PAGES
        self._emit(entry, output)
        entry.state = replace(
            entry.state,
            iterations=codec.whole(body["iterations"]),
            verified_tokens=codec.whole(body["verified_tokens"]),
        )

    def _advance(self, peer: _Peer, entry: _Entry) -> bool:
        """The next step of a request whose pages are wanted; whether there was one."""
        if entry.stage is _Stage.WANTS_PAGES:
            try:
                entry.expected = self.engine.expect(entry.state)
            except (RequestError, ConfigError) as error:
                self._cancel_failed(peer, entry, str(error))
                return True
            if entry.expected is None:
                return False
            if not 0 < entry.pages <= len(entry.expected.pages):
                self._cancel_failed(peer, entry, f"the prefill server has {entry.pages} pages of it, more than it can have")
                return True
            entry.stage = _Stage.WAITS_FOR_PAGES
            peer.landing.expecting(notice_of(entry.ticket), entry.expected)
        if entry.stage is not _Stage.WAITS_FOR_PAGES:
            return False
        assert entry.expected is not None
        if not peer.landing.free(entry.expected):
            return False
        entry.stage = _Stage.WRITING
        pages = list(entry.expected.pages[: entry.pages])
        peer.send(Message("write", {"ticket": entry.ticket, "pages": pages, "group": entry.expected.group}))
        return True

    def _notices(self, peer: _Peer) -> bool:
        try:
            notices = peer.landing.notices()
        except LinkDown:
            self.broken.add(peer.number)
            return False
        waiting = {notice_of(ticket): entry for ticket, entry in peer.entries.items()}
        for notice in notices:
            entry = waiting.get(notice)
            if entry is not None and entry.stage is _Stage.WRITING:
                self._arrive(peer, entry)
        return bool(notices)

    def _arrive(self, peer: _Peer, entry: _Entry) -> None:
        assert entry.expected is not None
        try:
            entry.request = self.engine.arrived(entry.expected, entry.relay)
        except ConfigError as error:
            self._forget(peer, entry)
            self._fail(entry, str(error))
            return
        del peer.entries[entry.ticket]
        entry.expected, entry.peer, entry.stage = None, None, _Stage.DECODING
        self._by_request[entry.request] = entry
        self.counts["arrived"] += 1

    def _cancel_failed(self, peer: _Peer, entry: _Entry, error: str) -> None:
        entry.stage = _Stage.CANCELLING
        peer.send(Message("cancel", {"ticket": entry.ticket}))
        self._fail(entry, error)

    def _forget(self, peer: _Peer, entry: _Entry) -> None:
        """The peer has nothing to do with it any more, and writes nothing for it."""
        peer.entries.pop(entry.ticket, None)
        self._free(entry)
        entry.peer = None

    def _free(self, entry: _Entry) -> None:
        if entry.expected is not None:
            if entry.peer is not None:
                entry.peer.landing.forget(notice_of(entry.ticket), entry.expected)
            self.engine.forsake(entry.expected)
            entry.expected = None

    def _emit(self, entry: _Entry, output: StepOutput) -> None:
        entry.state = replace(
            entry.state,
            output=(*entry.state.output, *output.tokens),
            logprobs=(*entry.state.logprobs, *output.logprobs),
        )
        if output.finish_reason is not None:
            self._entries.pop(entry.number, None)
            if entry.request is not None:
                self._by_request.pop(entry.request, None)
        entry.emit(output)

    def _fail(self, entry: _Entry, error: str) -> None:
        self._entries.pop(entry.number, None)
        entry.emit(StepOutput(entry.number, (), FinishReason.ERROR, error=error))
