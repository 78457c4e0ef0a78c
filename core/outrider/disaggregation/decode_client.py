"""A client of decode servers. If a server goes away, the client submits its requests to another server."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from outrider.disaggregation import codec
from outrider.disaggregation.connections import (
    ConnectionEvent,
    ConnectionHub,
    PeerAddress,
    ProcessRole,
    WireError,
    WireMessage,
)
from outrider.engine.requests.hand_over import RequestState
from outrider.engine.requests.request import FinishReason, StepOutput
from outrider.engine.requests.sampling import SamplingParams
from outrider.model import Media


@dataclass(eq=False, slots=True)
class _OpenSample:
    state: RequestState
    """The request, with the output tokens that the client has received."""
    peer: int | None = None
    """Number of the server's connection; None while no server is connected."""
    waiting_since: float = field(default_factory=time.monotonic)


class DecodeClient:
    """A client that distributes requests over decode servers. Each sample goes to the server with the fewest open samples.

    If a server goes away, its samples continue on another server, or on the same server once it is back. They continue after
    the output that has been received, which is neither repeated nor changed. A sample that finds no server for ``patience_s``
    seconds ends with an error.

    Use a client in one thread.
    """

    def __init__(self, servers: Sequence[PeerAddress], *, secret: bytes = b"", patience_s: float = 60.0) -> None:
        self._hub = ConnectionHub(ProcessRole.CLIENT, listen=None, secret=secret)
        self._patience_s = patience_s
        self._open: dict[int, _OpenSample] = {}
        self._samples_of_peer: dict[int, set[int]] = {}
        self._numbers = count(1)
        self._outputs: deque[StepOutput] = deque()
        self._status: dict[int, dict[str, Any]] = {}
        self.num_resubmitted = 0
        """Number of samples that were submitted again because their server went away."""
        for server in servers:
            self._hub.connect_to(server)

    @property
    def open_requests(self) -> int:
        """Number of samples that haven't ended."""
        return len(self._open)

    @property
    def num_servers(self) -> int:
        """Number of connected servers."""
        return len(self._samples_of_peer)

    def submit(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        media: Sequence[Media] = (),
    ) -> tuple[int, ...]:
        """Submit a request and return the number of each of its samples. Errors are reported as outputs."""
        params = params or SamplingParams()
        numbers = []
        for index in range(params.n):
            number = next(self._numbers)
            sample = params.sample(index) if params.n > 1 else params
            state = RequestState(prompt=tuple(tokens), params=sample, priority=priority, media=tuple(media))
            self._open[number] = _OpenSample(state)
            self._send_to_server(number)
            numbers.append(number)
        return tuple(numbers)

    def abort(self, number: int) -> None:
        """End a sample of a request; :meth:`poll` returns no further output of the sample."""
        sample = self._open.pop(number, None)
        if sample is not None and sample.peer is not None:
            self._samples_of_peer[sample.peer].discard(number)
            self._hub.send(sample.peer, WireMessage("abort", {"id": number}))

    def poll(self, seconds: float = 0.1) -> list[StepOutput]:
        """Return the outputs that have arrived; wait up to ``seconds`` for the first one.

        The ``request_id`` of an output is the sample's number from :meth:`submit`.
        """
        for event in self._hub.poll(0.0 if self._outputs else seconds):
            self._handle(event)
        now = time.monotonic()
        for number, sample in list(self._open.items()):
            if sample.peer is None and now - sample.waiting_since > self._patience_s:
                del self._open[number]
                error = f"no decode server was there for {self._patience_s:g} s"
                self._outputs.append(StepOutput(number, (), FinishReason.ERROR, error=error))
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def fileno(self) -> int:
        """Return a file descriptor that is readable when :meth:`poll` has something to do."""
        return self._hub.fileno()

    def request_status(self) -> None:
        """Ask each connected server for its status; :attr:`statuses` has it after a later :meth:`poll`."""
        for peer in self._samples_of_peer:
            self._hub.send(peer, WireMessage("status"))

    @property
    def statuses(self) -> list[dict[str, Any]]:
        """The last status message of each connected server that has sent one."""
        return [self._status[peer] for peer in self._samples_of_peer if peer in self._status]

    def status(self, seconds: float = 10.0) -> list[dict[str, Any]]:
        """Return the status of each server that replies within ``seconds``. Outputs stay queued for :meth:`poll`."""
        self._status.clear()
        self.request_status()
        end = time.monotonic() + seconds
        while len(self._status) < len(self._samples_of_peer) and time.monotonic() < end:
            for event in self._hub.poll(0.1):
                self._handle(event)
        return list(self._status.values())

    def close(self) -> None:
        """Close the connections. The servers abort the open samples."""
        self._hub.close()

    def _send_to_server(self, number: int) -> None:
        """Submit a sample to the server with the fewest open samples. Without a server, the sample waits."""
        if not self._samples_of_peer:
            return
        peer = min(self._samples_of_peer, key=lambda each: len(self._samples_of_peer[each]))
        sample = self._open[number]
        sample.peer = peer
        self._samples_of_peer[peer].add(number)
        state, blobs = codec.encode_state(sample.state)
        self._hub.send(peer, WireMessage("submit", {"id": number, "state": state}, tuple(blobs)))

    def _handle(self, event: ConnectionEvent) -> None:
        if event.kind == "joined":
            self._samples_of_peer[event.peer] = set()
            for number in [number for number, sample in self._open.items() if sample.peer is None]:
                self._send_to_server(number)
        elif event.kind == "left":
            for number in sorted(self._samples_of_peer.pop(event.peer, ())):
                sample = self._open[number]
                sample.peer, sample.waiting_since = None, time.monotonic()
                self.num_resubmitted += 1
                self._send_to_server(number)
        else:
            assert event.message is not None
            try:
                self._receive(event.peer, event.message)
            except WireError as error:
                self._hub.disconnect(event.peer, str(error))

    def _receive(self, peer: int, message: WireMessage) -> None:
        with codec.decoding(f"a message {message.kind!r}"):
            if message.kind == "status":
                self._status[peer] = dict(message.body)
                return
            if message.kind != "output":
                raise WireError(f"a server doesn't say {message.kind!r}")
            number = codec.decode_int(message.body["id"])
            sample = self._open.get(number)
            if sample is None or sample.peer != peer:
                return  # the sample was aborted
            output = codec.decode_output(message.body["output"], number)
            sample.state = codec.state_after(sample.state, output)
            if output.finish_reason is not None:
                del self._open[number]
                self._samples_of_peer[peer].discard(number)
            self._outputs.append(output)
