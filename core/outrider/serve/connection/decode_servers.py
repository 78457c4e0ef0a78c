"""An engine client that sends requests to decode servers: HTTP in front of a prefill/decode split."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from outrider.disaggregation.connections import PeerAddress
from outrider.disaggregation.decode_client import DecodeClient
from outrider.engine.loop import EngineLoad, EngineStats
from outrider.engine.requests.message_codec import from_plain
from outrider.engine.requests.request import StepOutput
from outrider.serve.connection.engine_client import EngineClient, EngineGone
from outrider.serve.connection.engine_messages import (
    AbortRequest,
    EngineCommand,
    EngineEvent,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EngineSnapshot,
    RequestAdmitted,
    SampleOutput,
    SubmitRequest,
)

_TICK_S = 0.25
"""Interval in seconds in which the client reconnects, pings and requests the servers' counters."""
_MAX_START_WAIT_S = 2.0
"""Seconds that a start waits for the other decode servers once one has answered."""


class DecodeServers(EngineClient):
    """A client of the decode servers at ``servers``. It reads their sockets on the event loop.

    A request whose server goes away continues at another one. It ends with an error if there is none for ``patience_s``
    seconds; a start then fails. ``secret`` is the one of the servers.
    """

    def __init__(self, servers: Sequence[PeerAddress], *, secret: bytes = b"", patience_s: float = 60.0) -> None:
        super().__init__()
        self._servers, self._patience_s = servers, patience_s
        self._client = DecodeClient(servers, secret=secret, patience_s=patience_s)
        self._sample_of: dict[int, tuple[int, int]] = {}
        """Request key and sample number of each open sample, by the sample's number in the client of decode servers."""
        self._ticker: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Close the connections, which makes the servers abort the open requests."""
        self._gone(EngineGone("the connections to the decode servers were closed"), expected=True)
        if self._ticker is not None:
            self._ticker.cancel()
            asyncio.get_running_loop().remove_reader(self._client.fileno())
            self._ticker = None
            self._client.close()

    async def _launch(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._client.fileno(), self._receive)
        self._ticker = loop.create_task(self._tick(loop.time()))

    async def _tick(self, began: float) -> None:
        while True:
            waited_s = asyncio.get_running_loop().time() - began
            self._client.request_status()
            self._receive()
            statuses = [status for status in self._client.statuses if "engine" in status]
            is_complete = len(statuses) == len(self._servers) or waited_s > _MAX_START_WAIT_S
            if self._info is None and statuses and is_complete:
                self._handle([_ready(statuses)])
            elif self._info is None and waited_s > self._patience_s:
                names = ", ".join(map(str, self._servers))
                message = f"no decode server of this version answered at {names} within {self._patience_s:g} s"
                self._handle([EngineFailed(message)])
                return
            if statuses:
                self._handle([_snapshot(statuses)])
            await asyncio.sleep(_TICK_S)

    def _send(self, command: EngineCommand) -> None:
        match command:
            case SubmitRequest(key, tokens, params, priority, media):
                numbers = self._client.submit(tokens, params, priority=priority, media=media)
                self._sample_of.update({number: (key, sample) for sample, number in enumerate(numbers)})
                self._handle([RequestAdmitted(key)])
            case AbortRequest(key):
                for number in [number for number, (owner, _) in self._sample_of.items() if owner == key]:
                    del self._sample_of[number]
                    self._client.abort(number)

    def _receive(self) -> None:
        """Read all complete messages from the sockets, and deliver the outputs to the callers' inboxes."""
        outputs = self._client.poll(0.0)
        self._handle([event for output in outputs if (event := self._event(output)) is not None])

    def _event(self, output: StepOutput) -> EngineEvent | None:
        place = self._sample_of.get(output.request_id)
        if place is None:  # the request was aborted
            return None
        if output.finish_reason is not None:
            del self._sample_of[output.request_id]
        return SampleOutput.from_step(*place, output)


def _ready(statuses: Sequence[Mapping[str, Any]]) -> EngineReady:
    """Return the properties of all decode servers as those of one engine: the smallest context, and the sums of requests and
    pages.
    """
    infos: list[EngineInfo] = [from_plain(status["engine"], EngineInfo) for status in statuses]
    return EngineReady(
        replace(
            infos[0],
            longest_request=min(info.longest_request for info in infos),
            max_requests=sum(info.max_requests for info in infos),
            num_pages=sum(info.num_pages for info in infos),
        )
    )


def _snapshot(statuses: Sequence[Mapping[str, Any]]) -> EngineSnapshot:
    """Return the sums of all decode servers' counters as one snapshot."""
    stats, load = (
        {name: sum(status[part][name] for status in statuses) for name in statuses[0][part]} for part in ("stats", "load")
    )
    return EngineSnapshot(EngineStats(**stats), EngineLoad(**load), 0.0)
