"""What a prefill server does, without its sockets: prefills requests of decode servers, and writes their pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from outrider.apart import codec
from outrider.apart.compiling import Compilers
from outrider.apart.wire import Message, WireError
from outrider.device import ConfigError, DeviceError
from outrider.engine.engine import Engine
from outrider.engine.requests.lent import Lent
from outrider.engine.requests.request import FinishReason, StepOutput
from outrider.engine.requests.request_state import RequestState
from outrider.errors import RequestError
from outrider.transports import Link, LinkDown, Transfer

Send = Callable[[Message], None]


def notice_of(ticket: int) -> bytes:
    """What the network card says when the pages of that ticket are written."""
    return b"pages %d" % ticket


@dataclass(eq=False, slots=True)
class _Peer:
    number: int
    send: Send
    links: tuple[Link, ...]
    jobs: dict[int, _Job] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Job:
    """One request of a peer, by its ``ticket``. ``first``: what its next token came with; ``told``: the peer knows of it."""

    peer: _Peer
    ticket: int
    request: int | None = None
    first: StepOutput | None = None
    lent: Lent | None = None
    told: bool = False
    transfer: Transfer | None = None
    cancelled: bool = False


class PrefillSide:
    """The engine of a prefill server, and its decode peers.

    A request goes through these steps: its guide is compiled; prefill; its first token is there and it's lent; *pages ready*,
    and the peer is told; the peer says where to; the write is over, *pages read*, and the pages are free. Nothing waits:
    :meth:`turn` does what can be done now. One thread, the engine's.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._peers: dict[int, _Peer] = {}
        self.broken: set[int] = set()
        """Peers whose links are down: their connections are to be ended."""
        self._compilers = Compilers(engine)
        self._compiling: dict[_Job, tuple[RequestState, Future[None]]] = {}
        self._by_request: dict[int, _Job] = {}
        self._leaving: list[_Job] = []
        """Those that wait for something: a slot, *pages ready*, or the end of a write."""
        self.counts = {"requests": 0, "finished_here": 0, "pages_written": 0, "writes": 0, "failed": 0, "lost_with_peers": 0}

    @property
    def open(self) -> int:
        """Requests that this side knows of."""
        return sum(len(peer.jobs) for peer in self._peers.values())

    @property
    def peers(self) -> int:
        """How many are linked to this side."""
        return len(self._peers)

    @property
    def has_work(self) -> bool:
        """Whether :meth:`turn` may find something to do without a message."""
        return bool(self._leaving or self._compiling) or self.engine.has_unfinished

    def joined(self, peer: int, send: Send, links: Sequence[Link]) -> None:
        """A decode server; each of ``links`` reaches the pages of one of its data-parallel groups."""
        self._peers[peer] = _Peer(peer, send, tuple(links))

    def left(self, peer: int) -> None:
        """A decode server is gone: its requests end here, and no page is free before the link is closed."""
        self.broken.discard(peer)
        gone = self._peers.pop(peer, None)
        if gone is None:
            return
        for link in gone.links:
            link.close()
        for job in list(gone.jobs.values()):
            self.counts["lost_with_peers"] += 1
            self._drop(job)

    def leave_all(self) -> None:
        """Every peer is gone, as far as this side is concerned."""
        self._compilers.close()
        for peer in list(self._peers):
            self.left(peer)

    def receive(self, peer: int, message: Message) -> None:
        """A message of a decode server. Raises :class:`WireError` for one that can't be: the connection ends."""
        known = self._peers.get(peer)
        if known is None:
            return  # it was refused, or is gone
        with codec.Reading(f"a message {message.kind!r}"):
            ticket = codec.whole(message.body["ticket"])
            if message.kind == "prefill":
                self._prefill(known, ticket, message)
            elif message.kind == "write":
                self._write(known, ticket, message.body["pages"], codec.whole(message.body["group"]))
            elif message.kind == "cancel":
                self._cancel(known, ticket)
            else:
                raise WireError(f"a decode server doesn't say {message.kind!r}")

    def turn(self) -> bool:
        """One iteration of the engine, and whatever else can be done now. Whether anything happened.

        Raises what :meth:`Engine.step` raises once the device is lost; other failures of it cost the requests that were
        being lent, which their peers do again.
        """
        busy = self.engine.has_unfinished
        if busy:
            try:
                for output in self.engine.step():
                    self._take(output)
            except DeviceError as error:
                if error.device_lost:
                    raise
                self._spoilt(error)
        for job, (state, compiled) in list(self._compiling.items()):
            if compiled.done():
                busy = True
                del self._compiling[job]
                self._admit(job, state, compiled.exception())
        for job in list(self._leaving):
            busy |= self._advance(job)
        return busy

    # -- inside ------------------------------------------------------------------------------------------------------

    def _prefill(self, peer: _Peer, ticket: int, message: Message) -> None:
        if ticket in peer.jobs:
            raise WireError(f"ticket {ticket} is in use")
        self.counts["requests"] += 1
        peer.jobs[ticket] = job = _Job(peer, ticket)
        try:
            state = codec.state_from(message.body["state"], message.blobs)
        except RequestError as error:
            self._refuse(job, error)
            return
        compiled = self._compilers.begin(state.params)
        if compiled is None:
            self._admit(job, state, None)
        else:
            self._compiling[job] = state, compiled

    def _admit(self, job: _Job, state: RequestState, error: BaseException | None) -> None:
        """Queue a request whose guide is ready; ``error``: why it isn't."""
        try:
            if error is not None:
                raise error
            job.request = self.engine.resume(state, lend=True)
        except (RequestError, ConfigError) as refused:
            self._refuse(job, refused)
            return
        self._by_request[job.request] = job

    def _refuse(self, job: _Job, error: Exception) -> None:
        self._end(job)
        job.peer.send(Message("failed", {"ticket": job.ticket, "error": str(error), "request": True}))

    def _take(self, output: StepOutput) -> None:
        job = self._by_request.get(output.request_id)
        if job is None or output.finish_reason is FinishReason.HAND_OVER:
            return
        if output.finish_reason is not None:  # over with its first token, or failed
            del self._by_request[output.request_id]
            job.request = None
            self._end(job)
            self.counts["finished_here"] += 1
            if not job.cancelled:
                job.peer.send(Message("finished", {"ticket": job.ticket, "output": codec.output_to(output)}))
        elif job.first is None:
            job.first = output
            self._leaving.append(job)

    def _advance(self, job: _Job) -> bool:
        """The next steps of a request that leaves; whether there was one."""
        try:
            if job.lent is None:
                assert job.request is not None
                job.lent = self.engine.lend(job.request)
                if job.lent is None:
                    return False
                self._by_request.pop(job.request)
                job.request = None
                return True
            if not job.told:
                if not job.lent.ready.done():
                    return False
                job.told = True
                self._tell(job, job.lent)
                return True
            if job.transfer is None or not job.transfer.done():
                return False
        except LinkDown:
            self.broken.add(job.peer.number)
            return False
        self.counts["writes"] += 1
        self.counts["pages_written"] += len(job.lent.pages)
        self._drop(job)
        if job.cancelled:
            job.peer.send(Message("cancelled", {"ticket": job.ticket}))
        return True

    def _tell(self, job: _Job, lent: Lent) -> None:
        assert job.first is not None
        relay, blobs = codec.relay_to(lent.relay)
        body = {
            "ticket": job.ticket,
            "output": codec.output_to(job.first),
            "iterations": lent.state.iterations,
            "verified_tokens": lent.state.verified_tokens,
            "pages": len(lent.pages),
            "relay": relay,
        }
        job.peer.send(Message("ready", body, tuple(blobs)))

    def _write(self, peer: _Peer, ticket: int, pages: Any, group: int) -> None:
        job = peer.jobs.get(ticket)
        if job is None or job.lent is None or not job.told or job.transfer is not None:
            raise WireError(f"ticket {ticket} has no pages to write")
        if not isinstance(pages, list) or len(pages) != len(job.lent.pages):
            raise WireError(f"ticket {ticket} has {len(job.lent.pages)} pages, and the peer has other ones for them")
        if not 0 <= group < len(peer.links):
            raise WireError(f"ticket {ticket} is to go to group {group}, and the peer has {len(peer.links)}")
        try:
            job.transfer = peer.links[group].write(job.lent.pages, pages, notice_of(ticket), read=job.lent.read)
        except ConfigError as error:
            raise WireError(str(error)) from None
        except LinkDown:
            self.broken.add(peer.number)

    def _cancel(self, peer: _Peer, ticket: int) -> None:
        """The answer comes when no byte of it can be written any more."""
        job = peer.jobs.get(ticket)
        if job is not None and job.transfer is not None:
            job.cancelled = True
            return
        if job is not None:
            self._drop(job)
        peer.send(Message("cancelled", {"ticket": ticket}))

    def _drop(self, job: _Job) -> None:
        """Free what a request has here. Nothing of it is being written, or its link is closed."""
        if job.request is not None:
            self._by_request.pop(job.request, None)
            if job.request in self.engine.open_requests:
                self.engine.abort(job.request)
        if job.lent is not None:
            self.engine.returned(job.lent)
            job.lent = None
        self._end(job)

    def _end(self, job: _Job) -> None:
        job.peer.jobs.pop(job.ticket, None)
        self._compiling.pop(job, None)
        if job in self._leaving:
            self._leaving.remove(job)

    def _spoilt(self, error: DeviceError) -> None:
        """A fault of the device: the engine repeats what it has, but what was lent isn't known to be whole."""
        for job in [job for job in self._leaving if job.lent is not None and not job.told]:
            self.counts["failed"] += 1
            self._drop(job)
            job.peer.send(Message("failed", {"ticket": job.ticket, "error": str(error), "request": False}))
