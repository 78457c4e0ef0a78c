"""The engine of a prefill server and its requests, without sockets: it prefills for decode servers and writes their pages."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from outrider.device import ConfigError, DeviceError
from outrider.disaggregation import codec
from outrider.disaggregation.connections import WireError, WireMessage
from outrider.disaggregation.page_landing import slots_of_pages
from outrider.engine.engine import Engine
from outrider.engine.guides.grammars import GuideCompilers
from outrider.engine.requests.hand_over import LentPages, RequestState
from outrider.engine.requests.request import FinishReason, StepOutput
from outrider.errors import BusyError, RequestError
from outrider.transports import Link, LinkDown, PageTransfer

SendMessage = Callable[[WireMessage], None]
"""A function that queues a message to one peer."""


def written_notice(ticket: int) -> bytes:
    """Return the notice that the link delivers to the decode server when the pages of ``ticket`` are written."""
    return b"pages %d" % ticket


@contextmanager
def _naming_rank(rank: int) -> Generator[None]:
    """Name the rank in the error of a link that is down."""
    try:
        yield
    except LinkDown as error:
        raise LinkDown(f"the link to rank {rank} of the decode server: {error}") from error


def _are_over(transfers: dict[int, PageTransfer]) -> bool:
    """Drop the transfers that are over, and return whether none is left. All are asked, because that makes them progress."""
    for rank, transfer in list(transfers.items()):
        with _naming_rank(rank):
            if transfer.done():
                del transfers[rank]
    return not transfers


@dataclass(eq=False, slots=True)
class _DecodePeer:
    number: int
    send: SendMessage
    links: tuple[Link, ...]
    """The link to each rank of the peer."""
    tensor_ranks: int
    """Number of ranks of the peer that share the KV heads of a page."""
    jobs: dict[int, _PrefillJob] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _PrefillJob:
    """The state of one request that a decode server has sent to this prefill server."""

    peer: _DecodePeer
    ticket: int
    """The number that identifies the request in messages with the decode server."""
    request: int | None = None
    """Id of the request in the prefill engine, until its pages are lent."""
    first_output: StepOutput | None = None
    """The output with the first token."""
    lent: LentPages | None = None
    """The prefilled pages, until they have been written."""
    is_announced: bool = False
    """True once the peer has been told that the pages are ready."""
    transfers: dict[int, PageTransfer] | None = None
    """The transfers to the ranks of the peer that aren't over, by rank; None before they have started."""
    is_cancelled: bool = False


class PrefillWorker:
    """The requests of a prefill server: a state machine over its engine and its decode servers ("peers").

    A request has these stages:

    1. A thread compiles its guide.
    2. The engine prefills the prompt and samples the first token. It then lends the pages.
    3. At the fence *pages ready*, the peer gets the first token and the draft state.
    4. The peer says which of its pages to write, and the link starts the transfer.
    5. When the transfer is over (fence *pages read*), the engine frees the pages.

    No method waits: :meth:`run_iteration` advances every request that can advance. Use the object in the engine's thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._peers: dict[int, _DecodePeer] = {}
        self.broken_peers: dict[int, str] = {}
        """Peers with a link that is down, and the reason. The server closes their connections."""
        self._compilers = GuideCompilers(engine.compile_guide)
        self._by_request: dict[int, _PrefillJob] = {}
        self._prefilled: list[_PrefillJob] = []
        """Prefilled requests. Each waits for a lending slot, for *pages ready*, for the peer or for its transfer."""
        self.counts = {"requests": 0, "finished_here": 0, "pages_written": 0, "writes": 0, "failed": 0, "lost_with_peers": 0}

    @property
    def num_requests(self) -> int:
        """Number of requests that haven't ended."""
        return sum(len(peer.jobs) for peer in self._peers.values())

    @property
    def num_peers(self) -> int:
        """Number of connected decode servers."""
        return len(self._peers)

    @property
    def has_work(self) -> bool:
        """True if :meth:`run_iteration` may make progress before another message arrives."""
        return bool(self._prefilled) or self._compilers.has_waiting or self.engine.has_unfinished

    def add_peer(self, peer: int, send: SendMessage, links: Sequence[Link], tensor_ranks: int = 1) -> None:
        """Add a decode server. Link i reaches the pages of its rank i. ``tensor_ranks`` successive ranks share the KV heads
        of a page; each of their links has the token slots of the rank's heads (:mod:`outrider.disaggregation.page_landing`).
        """
        self._peers[peer] = _DecodePeer(peer, send, tuple(links), tensor_ranks)

    def remove_peer(self, peer: int) -> None:
        """Remove a decode server that is gone: close its links, then free the pages of its requests and end them."""
        self.broken_peers.pop(peer, None)
        removed = self._peers.pop(peer, None)
        if removed is None:
            return
        for link in removed.links:
            link.close()
        for job in list(removed.jobs.values()):
            self.counts["lost_with_peers"] += 1
            self._release(job)

    def remove_all_peers(self) -> None:
        """Close the guide compilers, then remove every peer, which ends all requests."""
        self._compilers.close()
        for peer in list(self._peers):
            self.remove_peer(peer)

    def handle_message(self, peer: int, message: WireMessage) -> None:
        """Handle a message of a decode server. Raises :class:`WireError` for an invalid message."""
        sender = self._peers.get(peer)
        if sender is None:
            return  # the peer was refused, or is gone
        with codec.decoding(f"a message {message.kind!r}"):
            ticket = codec.decode_int(message.body["ticket"])
            if message.kind == "prefill":
                self._start_request(sender, ticket, message)
            elif message.kind == "write":
                self._write_pages(sender, ticket, message.body["pages"], codec.decode_int(message.body["group"]))
            elif message.kind == "cancel":
                self._cancel(sender, ticket)
            else:
                raise WireError(f"a decode server doesn't say {message.kind!r}")

    def run_iteration(self) -> bool:
        """Run one iteration of the engine and advance every request that can advance. Return whether anything happened.

        Raises the error of :meth:`Engine.step` once the device is lost. After another device error, the requests that are
        being lent fail, and their peers start them again.
        """
        busy = self.engine.has_unfinished
        if busy:
            try:
                for output in self.engine.step():
                    self._handle_output(output)
            except DeviceError as error:
                if error.device_lost:
                    raise
                self._fail_lent_requests(error)
        busy |= self._compilers.admit_compiled()
        for job in list(self._prefilled):
            busy |= self._advance(job)
        return busy

    # -- inside ------------------------------------------------------------------------------------------------------

    def _start_request(self, peer: _DecodePeer, ticket: int, message: WireMessage) -> None:
        if ticket in peer.jobs:
            raise WireError(f"ticket {ticket} is in use")
        self.counts["requests"] += 1
        peer.jobs[ticket] = job = _PrefillJob(peer, ticket)
        try:
            state = codec.decode_state(message.body["state"], message.blobs)
        except RequestError as error:
            self._refuse(job, error)
            return
        if not self._compilers.delay(job, state.params, partial(self._admit, job, state)):
            self._admit(job, state, None)

    def _admit(self, job: _PrefillJob, state: RequestState, error: BaseException | None) -> None:
        """Add a request to the engine, or refuse it with the ``error`` of its guide."""
        try:
            if error is not None:
                raise error
            job.request = self.engine.resume(state, lend=True)
        except (RequestError, ConfigError) as refused:
            self._refuse(job, refused)
            return
        self._by_request[job.request] = job

    def _refuse(self, job: _PrefillJob, error: Exception) -> None:
        self._remove(job)
        is_busy = isinstance(error, BusyError)
        job.peer.send(WireMessage("failed", {"ticket": job.ticket, "error": str(error), "request": True, "busy": is_busy}))

    def _handle_output(self, output: StepOutput) -> None:
        job = self._by_request.get(output.request_id)
        if job is None or output.finish_reason is FinishReason.HAND_OVER:
            return
        if output.finish_reason is not None:  # the first token ended the request, or the request failed
            del self._by_request[output.request_id]
            job.request = None
            self._remove(job)
            self.counts["finished_here"] += 1
            if not job.is_cancelled:
                job.peer.send(WireMessage("finished", {"ticket": job.ticket, "output": codec.encode_output(output)}))
        elif job.first_output is None:
            job.first_output = output
            self._prefilled.append(job)

    def _advance(self, job: _PrefillJob) -> bool:
        """Lend the pages of a prefilled request, announce them, or end its transfer. Return whether the request advanced."""
        try:
            if job.lent is None:
                assert job.request is not None
                job.lent = self.engine.lending.lend(job.request)
                if job.lent is None:
                    return False
                self._by_request.pop(job.request)
                job.request = None
                return True
            if not job.is_announced:
                if not job.lent.ready.done():
                    return False
                job.is_announced = True
                self._announce(job, job.lent)
                return True
            if job.transfers is None or not _are_over(job.transfers):
                return False
        except LinkDown as error:
            self.broken_peers[job.peer.number] = str(error)
            return False
        self.counts["writes"] += 1
        self.counts["pages_written"] += len(job.lent.pages)
        self._release(job)
        if job.is_cancelled:
            job.peer.send(WireMessage("cancelled", {"ticket": job.ticket}))
        return True

    def _announce(self, job: _PrefillJob, lent: LentPages) -> None:
        """Send the first token, the draft state and the number of pages to the peer."""
        assert job.first_output is not None
        relay, blobs = codec.encode_relay(lent.relay)
        body = {
            "ticket": job.ticket,
            "output": codec.encode_output(job.first_output),
            "iterations": lent.state.iterations,
            "verified_tokens": lent.state.verified_tokens,
            "pages": len(lent.pages),
            "relay": relay,
        }
        job.peer.send(WireMessage("ready", body, tuple(blobs)))

    def _write_pages(self, peer: _DecodePeer, ticket: int, pages: Any, group: int) -> None:
        """Start to write the request's pages to ``pages`` of the peer's data-parallel group."""
        job = peer.jobs.get(ticket)
        if job is None or job.lent is None or not job.is_announced or job.transfers is not None:
            raise WireError(f"ticket {ticket} has no pages to write")
        if not isinstance(pages, list) or len(pages) != len(job.lent.pages):
            raise WireError(f"ticket {ticket} has {len(job.lent.pages)} pages, and the peer has other ones for them")
        tensor, groups = peer.tensor_ranks, len(peer.links) // peer.tensor_ranks
        if not 0 <= group < groups:
            raise WireError(f"ticket {ticket} is to go to group {group}, and the peer has {groups}")
        local, remote = list(job.lent.pages), [codec.decode_int(page) for page in pages]
        if tensor > 1:
            link, page_size = peer.links[group * tensor], self.engine.config.page_size
            local = slots_of_pages(local, page_size, link.blocks)
            remote = slots_of_pages(remote, page_size, link.peer_blocks)
        transfers: dict[int, PageTransfer] = {}
        try:
            for rank in range(group * tensor, (group + 1) * tensor):
                with _naming_rank(rank):
                    # A fence is signalled by one link; the other links create their own.
                    read = None if transfers else job.lent.read
                    transfers[rank] = peer.links[rank].start_write(local, remote, written_notice(ticket), read=read)
        except ConfigError as error:
            raise WireError(str(error)) from None
        except LinkDown as error:
            self.broken_peers[peer.number] = str(error)
            return
        job.transfers = transfers

    def _cancel(self, peer: _DecodePeer, ticket: int) -> None:
        """End a request. The message *cancelled* is sent once no page of the peer can be written for it."""
        job = peer.jobs.get(ticket)
        if job is not None and job.transfers is not None:
            job.is_cancelled = True
            return
        if job is not None:
            self._release(job)
        peer.send(WireMessage("cancelled", {"ticket": ticket}))

    def _release(self, job: _PrefillJob) -> None:
        """End a request and free its lent pages. Call this only if no transfer runs for the request, or after its link is
        closed.
        """
        if job.request is not None:
            self._by_request.pop(job.request, None)
            if job.request in self.engine.open_requests:
                self.engine.abort(job.request)
        if job.lent is not None:
            self.engine.lending.returned(job.lent)
            job.lent = None
        self._remove(job)

    def _remove(self, job: _PrefillJob) -> None:
        job.peer.jobs.pop(job.ticket, None)
        self._compilers.drop(job)
        if job in self._prefilled:
            self._prefilled.remove(job)

    def _fail_lent_requests(self, error: DeviceError) -> None:
        """Fail the requests whose lent pages aren't known to be complete after a device error.

        The engine itself repeats the requests that it still has.
        """
        for job in [job for job in self._prefilled if job.lent is not None and not job.is_announced]:
            self.counts["failed"] += 1
            self._release(job)
            job.peer.send(WireMessage("failed", {"ticket": job.ticket, "error": str(error), "request": False}))
