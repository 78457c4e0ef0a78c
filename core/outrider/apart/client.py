"""A client of decode servers: it keeps what it has asked for, and asks again when a server goes away."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from outrider.apart import codec
from outrider.apart.connections import Address, Event, Hub, Role
from outrider.apart.wire import Message, WireError
from outrider.engine.requests.request import FinishReason, StepOutput
from outrider.engine.requests.request_state import RequestState
from outrider.engine.requests.sampling import SamplingParams
from outrider.model import Media


@dataclass(eq=False, slots=True)
class _Asked:
    state: RequestState
    peer: int | None = None
    since: float = field(default_factory=time.monotonic)


class DecodeClient:
    """Requests to whichever decode server has least to do. One thread.

    A request whose server goes away begins again at another one, or at the same one once it's back, with the output that it
    has; nothing that was given out is given out twice, or taken back. One that finds no server for ``patience_s`` ends with
    an error.
    """

    def __init__(
        self, servers: Sequence[Address], *, secret: bytes = b"", patience_s: float = 60.0, silence_s: float = 30.0
    ) -> None:
        self._hub = Hub(Role.CLIENT, listen=None, secret=secret, silence_s=silence_s)
        self._patience_s = patience_s
        self._asked: dict[int, _Asked] = {}
        self._peers: dict[int, set[int]] = {}
        self._numbers = count(1)
        self._outputs: deque[StepOutput] = deque()
        self._status: dict[int, dict[str, Any]] = {}
        self.asked_again = 0
        """How often a request was asked for again."""
        for server in servers:
            self._hub.reach(server)

    @property
    def open_requests(self) -> int:
        """Requests that haven't ended."""
        return len(self._asked)

    @property
    def servers(self) -> int:
        """How many servers are connected."""
        return len(self._peers)

    def submit(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        media: Sequence[Media] = (),
    ) -> tuple[int, ...]:
        """Ask for a request; returns the number of each of its samples. Errors come as outputs."""
        params = params or SamplingParams()
        numbers = []
        for index in range(params.n):
            number = next(self._numbers)
            sample = params.sample(index) if params.n > 1 else params
            state = RequestState(prompt=tuple(tokens), params=sample, priority=priority, media=tuple(media))
            self._asked[number] = _Asked(state)
            self._place(number)
            numbers.append(number)
        return tuple(numbers)

    def abort(self, number: int) -> None:
        """End a request; nothing more comes of it."""
        asked = self._asked.pop(number, None)
        if asked is not None and asked.peer is not None:
            self._peers[asked.peer].discard(number)
            self._hub.send(asked.peer, Message("abort", {"id": number}))

    def poll(self, seconds: float = 0.1) -> list[StepOutput]:
        """Outputs that have come; waits at most so long for any. Their ids are the numbers of :meth:`submit`."""
        for event in self._hub.poll(0.0 if self._outputs else seconds):
            self._handle(event)
        now = time.monotonic()
        for number, asked in list(self._asked.items()):
            if asked.peer is None and now - asked.since > self._patience_s:
                del self._asked[number]
                error = f"no decode server was there for {self._patience_s:g} s"
                self._outputs.append(StepOutput(number, (), FinishReason.ERROR, error=error))
        found = list(self._outputs)
        self._outputs.clear()
        return found

    def status(self, seconds: float = 10.0) -> list[dict[str, Any]]:
        """What each server says of itself. Outputs that come meanwhile are kept."""
        self._status.clear()
        for peer in self._peers:
            self._hub.send(peer, Message("status"))
        end = time.monotonic() + seconds
        while len(self._status) < len(self._peers) and time.monotonic() < end:
            for event in self._hub.poll(0.1):
                self._handle(event)
        return list(self._status.values())

    def close(self) -> None:
        """End the connections; the servers end what is open."""
        self._hub.close()

    def _place(self, number: int) -> None:
        if not self._peers:
            return
        peer = min(self._peers, key=lambda each: len(self._peers[each]))
        asked = self._asked[number]
        asked.peer = peer
        self._peers[peer].add(number)
        state, blobs = codec.state_to(asked.state)
        self._hub.send(peer, Message("submit", {"id": number, "state": state}, tuple(blobs)))

    def _handle(self, event: Event) -> None:
        if event.kind == "joined":
            self._peers[event.peer] = set()
            for number in [number for number, asked in self._asked.items() if asked.peer is None]:
                self._place(number)
        elif event.kind == "left":
            for number in sorted(self._peers.pop(event.peer, ())):
                asked = self._asked[number]
                asked.peer, asked.since = None, time.monotonic()
                self.asked_again += 1
                self._place(number)
        else:
            assert event.message is not None
            try:
                self._take(event.peer, event.message)
            except WireError as error:
                self._hub.drop(event.peer, str(error))

    def _take(self, peer: int, message: Message) -> None:
        with codec.Reading(f"a message {message.kind!r}"):
            if message.kind == "status":
                self._status[peer] = dict(message.body)
                return
            if message.kind != "output":
                raise WireError(f"a server doesn't say {message.kind!r}")
            number = codec.whole(message.body["id"])
            asked = self._asked.get(number)
            if asked is None or asked.peer != peer:
                return  # it was aborted
            output = codec.output_from(message.body["output"], number)
            asked.state = replace(
                asked.state,
                output=(*asked.state.output, *output.tokens),
                logprobs=(*asked.state.logprobs, *output.logprobs),
            )
            if output.finish_reason is not None:
                del self._asked[number]
                self._peers[peer].discard(number)
            self._outputs.append(output)
