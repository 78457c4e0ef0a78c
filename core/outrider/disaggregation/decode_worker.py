"""The engine of a decode server and its requests, without sockets: prefill servers prefill the prompts, it decodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import count

from torch import Tensor

from outrider.device import ConfigError, OutriderError
from outrider.disaggregation import codec
from outrider.disaggregation.connections import WireError, WireMessage
from outrider.disaggregation.page_landing import PageLanding
from outrider.disaggregation.prefill_worker import SendMessage, written_notice
from outrider.engine.engine import Engine
from outrider.engine.guides.grammars import GuideCompilers
from outrider.engine.requests.hand_over import ExpectedPages, RequestState
from outrider.engine.requests.request import StepOutput
from outrider.errors import BusyError, RequestError
from outrider.transports import LinkDown

EmitOutput = Callable[[StepOutput], None]
"""A function that is called with each output of a request. The last output has a finish reason."""


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
class _PrefillPeer:
    number: int
    send: SendMessage
    landing: PageLanding
    entries: dict[int, _Entry] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Entry:
    number: int
    state: RequestState
    """The request, with its output tokens so far."""
    emit: EmitOutput
    stage: _Stage = _Stage.QUEUED
    peer: _PrefillPeer | None = None
    """The prefill server that prefills the request."""
    ticket: int = 0
    """The number that identifies the request in messages with the prefill server."""
    pages: int = 0
    """Number of pages that the prefill server will write for the request."""
    relay: Mapping[str, Tensor] = field(default_factory=dict)
    """Host tensors of the draft state, by name, from the prefill server's proposer."""
    expected: ExpectedPages | None = None
    """The reserved pages, until the prefill server has written them."""
    request: int | None = None
    """Id of the request in the decode engine, once it decodes."""


class DecodeWorker:
    """The requests of a decode server: a state machine over its engine and its prefill servers ("peers").

    A request has these stages:

    1. A thread compiles its guide.
    2. A peer prefills the prompt and reports the first token, which is emitted at once.
    3. The engine reserves pages. At the fence *pages free*, the peer is told which pages to write.
    4. At the fence *pages written*, the engine starts to decode the request.

    If a peer goes away, its requests before stage 4 start again, on another peer or on this engine. They keep their output.
    Use the object in the engine's thread.
    """

    def __init__(self, engine: Engine, *, prefills_alone: bool = True) -> None:
        self.engine = engine
        self._prefills_alone = prefills_alone
        self._compilers = GuideCompilers(engine.compile_guide)
        self._peers: dict[int, _PrefillPeer] = {}
        self.broken_peers: dict[int, str] = {}
        """Peers with a link that is down, and the reason. The server closes their connections."""
        self._entries: dict[int, _Entry] = {}
        self._by_request: dict[int, _Entry] = {}
        self._numbers, self._tickets = count(1), count(1)
        self.counts = {"requests": 0, "arrived": 0, "prefilled_here": 0, "done_again": 0, "finished_there": 0}

    @property
    def num_requests(self) -> int:
        """Number of requests that haven't ended."""
        return len(self._entries)

    @property
    def num_peers(self) -> int:
        """Number of connected prefill servers."""
        return len(self._peers)

    @property
    def has_work(self) -> bool:
        """True if :meth:`run_iteration` may make progress before another message arrives."""
        polled_stages = (_Stage.COMPILING, _Stage.WANTS_PAGES, _Stage.WAITS_FOR_PAGES, _Stage.WRITING)
        return self.engine.has_unfinished or any(entry.stage in polled_stages for entry in self._entries.values())

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, state: RequestState, emit: EmitOutput) -> int:
        """Start a request, or continue a request that already has output. Return its number.

        Raises :class:`RequestError` if the request can't be served. The error of an invalid guide is emitted as an output.
        """
        entry = _Entry(next(self._numbers), state, emit)
        self.counts["requests"] += 1
        if self._compilers.delay(entry.number, state.params, partial(self._begin_compiled, entry)):
            entry.stage = _Stage.COMPILING
        else:
            self._begin(entry)
        self._entries[entry.number] = entry
        return entry.number

    def abort(self, number: int) -> None:
        """End a request, which emits no further output. A request that has already ended is no error."""
        entry = self._entries.pop(number, None)
        if entry is None:
            return
        self._compilers.drop(number)
        if entry.stage is _Stage.DECODING and entry.request is not None:
            del self._by_request[entry.request]
            if entry.request in self.engine.open_requests:
                self.engine.abort(entry.request)
        elif entry.peer is not None:
            # Reserved pages stay reserved until the peer confirms that it doesn't write them.
            entry.stage = _Stage.CANCELLING
            entry.peer.send(WireMessage("cancel", {"ticket": entry.ticket}))

    # -- peers -------------------------------------------------------------------------------------------------------

    def add_peer(self, peer: int, send: SendMessage, landing: PageLanding) -> None:
        """Add a prefill server, which writes this engine's pages over ``landing``. Queued requests are sent to it."""
        self._peers[peer] = _PrefillPeer(peer, send, landing)
        for entry in [each for each in self._entries.values() if each.stage is _Stage.QUEUED]:
            self._begin_or_fail(entry)

    def remove_peer(self, peer: int) -> None:
        """Remove a prefill server that is gone: close its links, then free its requests' pages and start them again."""
        self.broken_peers.pop(peer, None)
        removed = self._peers.pop(peer, None)
        if removed is None:
            return
        removed.landing.close()
        for entry in list(removed.entries.values()):
            self._release_pages(entry)
            removed.entries.pop(entry.ticket, None)
            if entry.stage is not _Stage.CANCELLING:
                self._restart(entry)

    def remove_all_peers(self) -> None:
        """Close the guide compilers, abort every request, then remove every peer."""
        self._compilers.close()
        for number in list(self._entries):
            self.abort(number)
        for peer in list(self._peers):
            self.remove_peer(peer)

    def handle_message(self, peer: int, message: WireMessage) -> None:
        """Handle a message of a prefill server. Raises :class:`WireError` for an invalid message."""
        sender = self._peers.get(peer)
        if sender is None:
            return  # the peer was refused, or is gone
        with codec.decoding(f"a message {message.kind!r}"):
            ticket = codec.decode_int(message.body["ticket"])
            entry = sender.entries.get(ticket)
            if entry is None:
                if message.kind in ("ready", "finished", "failed", "cancelled"):
                    return  # the request has already ended here
                raise WireError(f"a prefill server doesn't say {message.kind!r}")
            if entry.stage is _Stage.CANCELLING:
                if message.kind == "cancelled":
                    self._detach_from_peer(sender, entry)
                return
            if message.kind == "ready" and entry.stage is _Stage.PREFILLING:
                self._handle_ready(entry, message)
            elif message.kind == "finished" and entry.stage is _Stage.PREFILLING:
                self.counts["finished_there"] += 1
                self._detach_from_peer(sender, entry)
                self._emit(entry, codec.decode_output(message.body["output"], entry.number))
            elif message.kind == "failed":
                self._detach_from_peer(sender, entry)
                if message.body["request"]:
                    kind = BusyError if message.body["busy"] else RequestError
                    self._fail(entry, kind(str(message.body["error"])))
                else:
                    self._restart(entry)
            else:
                raise WireError(f"ticket {ticket} is {entry.stage}, and the peer says {message.kind!r}")

    def run_iteration(self) -> bool:
        """Run one iteration of the engine and advance every request that can advance. Return whether anything happened.

        Raises the errors of :meth:`Engine.step_or_retry`.
        """
        busy = self.engine.has_unfinished
        if busy:
            for output in self.engine.step_or_retry():
                entry = self._by_request.get(output.request_id)
                if entry is not None:
                    self._emit(entry, replace(output, request_id=entry.number))
        busy |= self._compilers.admit_compiled()
        for peer in list(self._peers.values()):
            busy |= self._handle_notices(peer)
            try:
                for entry in list(peer.entries.values()):
                    busy |= self._advance(peer, entry)
            except LinkDown as error:
                self.broken_peers[peer.number] = str(error)
        return busy

    # -- inside ------------------------------------------------------------------------------------------------------

    def _begin_compiled(self, entry: _Entry, error: BaseException | None) -> None:
        """Start a request whose guide has been compiled, or end it with the ``error`` of its guide."""
        if error is None:
            entry.stage = _Stage.QUEUED
            self._begin_or_fail(entry)
        elif isinstance(error, RequestError | ConfigError):
            self._fail(entry, error)
        else:
            raise error

    def _begin(self, entry: _Entry) -> None:
        """Send the request to the prefill server with the fewest requests. Without one, prefill here or leave it queued."""
        if self._peers:
            peer = min(self._peers.values(), key=lambda each: len(each.entries))
            entry.peer, entry.ticket, entry.stage = peer, next(self._tickets), _Stage.PREFILLING
            state, blobs = codec.encode_state(entry.state)
            peer.entries[entry.ticket] = entry
            peer.send(WireMessage("prefill", {"ticket": entry.ticket, "state": state}, tuple(blobs)))
        elif self._prefills_alone:
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
            self._fail(entry, error)

    def _restart(self, entry: _Entry) -> None:
        self.counts["done_again"] += 1
        entry.peer, entry.stage = None, _Stage.QUEUED
        self._begin_or_fail(entry)

    def _handle_ready(self, entry: _Entry, message: WireMessage) -> None:
        """Emit the first token of a prefilled request, and store its draft state and its number of pages."""
        body = message.body
        output = codec.decode_output(body["output"], entry.number)
        if len(output.tokens) != 1 or output.finish_reason is not None:
            raise WireError("a request that comes has one token more, and isn't over")
        entry.relay = codec.decode_relay(body["relay"], message.blobs)
        entry.pages = codec.decode_int(body["pages"])
        entry.stage = _Stage.WANTS_PAGES
        self._emit(entry, output)
        entry.state = replace(
            entry.state,
            iterations=codec.decode_int(body["iterations"]),
            verified_tokens=codec.decode_int(body["verified_tokens"]),
        )

    def _advance(self, peer: _PrefillPeer, entry: _Entry) -> bool:
        """Reserve the pages of a prefilled request, or send their numbers to the peer, which then writes them. Return whether
        the request advanced.
        """
        if entry.stage is _Stage.WANTS_PAGES:
            try:
                entry.expected = self.engine.lending.expect(entry.state)
            except (RequestError, ConfigError) as error:
                self._cancel_failed(peer, entry, error)
                return True
            if entry.expected is None:
                return False
            if not 0 < entry.pages <= len(entry.expected.pages):
                message = f"the prefill server has {entry.pages} pages of it, more than it can have"
                self._cancel_failed(peer, entry, OutriderError(message))
                return True
            entry.stage = _Stage.WAITS_FOR_PAGES
            peer.landing.expect_pages(written_notice(entry.ticket), entry.expected)
        if entry.stage is not _Stage.WAITS_FOR_PAGES:
            return False
        assert entry.expected is not None
        if not peer.landing.are_pages_free(entry.expected):
            return False
        entry.stage = _Stage.WRITING
        pages = list(entry.expected.pages[: entry.pages])
        peer.send(WireMessage("write", {"ticket": entry.ticket, "pages": pages, "group": entry.expected.group}))
        return True

    def _handle_notices(self, peer: _PrefillPeer) -> bool:
        """Start to decode each request whose pages the peer has written. Return whether a notice has arrived."""
        try:
            notices = peer.landing.notices()
        except LinkDown as error:
            self.broken_peers[peer.number] = str(error)
            return False
        waiting = {written_notice(ticket): entry for ticket, entry in peer.entries.items()}
        for notice in notices:
            entry = waiting.get(notice)
            if entry is not None and entry.stage is _Stage.WRITING:
                self._start_decoding(peer, entry)
        return bool(notices)

    def _start_decoding(self, peer: _PrefillPeer, entry: _Entry) -> None:
        assert entry.expected is not None
        try:
            entry.request = self.engine.lending.arrived(entry.expected, entry.relay)
        except ConfigError as error:
            self._detach_from_peer(peer, entry)
            self._fail(entry, error)
            return
        del peer.entries[entry.ticket]
        entry.expected, entry.peer, entry.stage = None, None, _Stage.DECODING
        self._by_request[entry.request] = entry
        self.counts["arrived"] += 1

    def _cancel_failed(self, peer: _PrefillPeer, entry: _Entry, error: OutriderError) -> None:
        entry.stage = _Stage.CANCELLING
        peer.send(WireMessage("cancel", {"ticket": entry.ticket}))
        self._fail(entry, error)

    def _detach_from_peer(self, peer: _PrefillPeer, entry: _Entry) -> None:
        """Release the request's pages, which the peer doesn't write, and remove the request from the peer."""
        peer.entries.pop(entry.ticket, None)
        self._release_pages(entry)
        entry.peer = None

    def _release_pages(self, entry: _Entry) -> None:
        if entry.expected is not None:
            if entry.peer is not None:
                entry.peer.landing.cancel_landing(written_notice(entry.ticket), entry.expected)
            self.engine.lending.abandon(entry.expected)
            entry.expected = None

    def _emit(self, entry: _Entry, output: StepOutput) -> None:
        entry.state = codec.state_after(entry.state, output)
        if output.finish_reason is not None:
            self._entries.pop(entry.number, None)
            if entry.request is not None:
                self._by_request.pop(entry.request, None)
        entry.emit(output)

    def _fail(self, entry: _Entry, error: OutriderError) -> None:
        self._entries.pop(entry.number, None)
        entry.emit(StepOutput.of_error(entry.number, error))
