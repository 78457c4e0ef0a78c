"""The server's ends of connections to an engine: they submit requests and deliver their outputs, on one event loop.

The engine runs in decode servers (:class:`DecodeServers`), or as :mod:`outrider.serve.connection.engine_process` says.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from outrider.device import OutriderError
from outrider.disaggregation.connections import PeerAddress
from outrider.disaggregation.decode_client import DecodeClient
from outrider.engine.loop import EngineLoad, EngineStats
from outrider.engine.requests.message_codec import from_plain
from outrider.engine.requests.request import StepOutput
from outrider.engine.requests.sampling import SamplingParams
from outrider.errors import BusyError, RequestError
from outrider.model import Media
from outrider.serve.connection.engine_messages import (
    AbortRequest,
    EngineCommand,
    EngineEvent,
    EngineFailed,
    EngineInfo,
    EngineSnapshot,
    RequestAdmitted,
    RequestRefused,
    SampleOutput,
    SubmitRequest,
)


class EngineGone(OutriderError):
    """Raised once the engine has ended: its device was lost, its process died, or it was closed. It serves no request."""


class Inbox:
    """A queue of the outputs of one caller's requests, in the order of arrival. One task reads it.

    :meth:`receive_outputs` returns all queued outputs: a slow caller gets several at once.
    """

    def __init__(self) -> None:
        self._outputs: list[SampleOutput] = []
        self._waiting_for_admission: set[int] = set()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self.num_running: dict[int, int] = {}
        """Number of samples that haven't ended, by the key of each request that hasn't ended."""

    async def wait_until_admitted(self) -> None:
        """Wait until the engine has accepted every request. Raises :class:`RequestError` if the engine refuses one."""
        while self._waiting_for_admission and self._error is None:
            await self._wait_for_change()
        if self._error is not None:
            raise self._error

    async def receive_outputs(self) -> list[SampleOutput]:
        """Return all queued outputs; wait if there is none. Raises the error of :meth:`fail` once the queue is empty."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            await self._wait_for_change()
        return self.pop_outputs()

    def pop_outputs(self) -> list[SampleOutput]:
        """Return the queued outputs without waiting."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def fail(self, error: BaseException) -> None:
        """Make the reader raise ``error`` after the queued outputs. A second error is ignored."""
        self._error = self._error or error
        self._changed.set()

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _expect(self, key: int, samples: int) -> None:
        self.num_running[key] = samples
        self._waiting_for_admission.add(key)

    def _queue_output(self, output: SampleOutput) -> None:
        self._outputs.append(output)
        self._changed.set()

    def _admit(self, key: int) -> None:
        self._waiting_for_admission.discard(key)
        self._changed.set()


class EngineClient(ABC):
    """A client of an engine that runs in another thread or process.

    Call all methods on the event loop that :meth:`start` ran on. No method waits for the device.
    """

    def __init__(self) -> None:
        self._info: EngineInfo | None = None
        self._open: dict[int, Inbox] = {}
        """The inbox of each request that hasn't ended, by key."""
        self._num_samples = 0
        self._next_key = 1
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._listeners: list[Callable[[EngineGone], None]] = []
        self.snapshot: EngineSnapshot | None = None
        """The engine's latest snapshot, at most 0.1 s old while the engine has requests. None before the first one."""
        self.error: EngineGone | None = None
        """The error that ended the engine; None while the engine runs."""

    # -- starting and ending ---------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Start the engine, wait until it is ready, and return its properties. Raises :class:`EngineGone` if it fails."""
        self._ready = asyncio.get_running_loop().create_future()
        await self._launch()
        self._info = await self._ready
        return self._info

    @abstractmethod
    async def close(self) -> None:
        """End the engine, which aborts its open requests. May be called more than once."""

    @abstractmethod
    async def _launch(self) -> None:
        """Start the thread or the processes of the engine. Their events reach :meth:`_handle` on the event loop."""

    @abstractmethod
    def _send(self, command: EngineCommand) -> None:
        """Send a command to the engine without waiting."""

    @property
    def info(self) -> EngineInfo:
        """The engine's constant properties. Raises :class:`EngineGone` before :meth:`start` has returned."""
        if self._info is None:
            raise EngineGone("the engine hasn't started")
        return self._info

    def add_loss_listener(self, listener: Callable[[EngineGone], None]) -> None:
        """Register ``listener``, which is called once if the engine ends without :meth:`close`."""
        self._listeners.append(listener)

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def num_open_samples(self) -> int:
        """Number of samples, over all requests, that haven't ended."""
        return self._num_samples

    def submit(
        self,
        inbox: Inbox,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        media: Sequence[Media] = (),
    ) -> int:
        """Queue a request whose outputs are delivered to ``inbox``, and return its key. Raises :class:`EngineGone`."""
        if self.error is not None:
            raise self.error
        key = self._next_key
        self._next_key += 1
        self._open[key] = inbox
        self._num_samples += params.n
        inbox._expect(key, params.n)
        self._send(SubmitRequest(key, tokens, params, priority, media))
        return key

    def abort(self, inbox: Inbox) -> int:
        """Abort the open requests of ``inbox``, which gets no output from now on. Returns the number of aborted samples."""
        aborted = sum(inbox.num_running.values())
        for key in inbox.num_running:
            del self._open[key]
            if self.error is None:
                self._send(AbortRequest(key))
        inbox.num_running.clear()
        self._num_samples -= aborted
        return aborted

    # -- events of the engine ----------------------------------------------------------------------------------------

    def _handle(self, events: Iterable[EngineEvent]) -> None:
        """Deliver the events that the engine has sent to the inboxes of their requests. Called on the event loop."""
        for event in events:
            if type(event) is SampleOutput:
                self._deliver(event)
                continue
            match event:
                case RequestAdmitted(key):
                    if key in self._open:
                        self._open[key]._admit(key)
                case RequestRefused(key, message, busy):
                    if key in self._open:
                        inbox = self._open.pop(key)
                        self._num_samples -= inbox.num_running.pop(key)
                        inbox.fail(BusyError(message) if busy else RequestError(message))
                case EngineSnapshot():
                    self.snapshot = event
                case EngineInfo():
                    if self._ready is not None and not self._ready.done():
                        self._ready.set_result(event)
                case EngineFailed(message):
                    self._end_open_requests(EngineGone(message))

    def _deliver(self, event: SampleOutput) -> None:
        key = event.key
        inbox = self._open.get(key)
        if inbox is None:  # the server has aborted the request
            return
        if event.output.finish_reason is not None:
            inbox.num_running[key] -= 1
            self._num_samples -= 1
            if inbox.num_running[key] == 0:
                del self._open[key], inbox.num_running[key]
        inbox._queue_output(event)

    def _end_open_requests(self, error: EngineGone, *, expected: bool = False) -> None:
        """Record that the engine has ended, and make the callers of all open requests raise ``error``.

        A second error is ignored. If the end is ``expected``, the listeners aren't called.
        """
        if self.error is not None:
            return
        self.error = error
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        for inbox in self._open.values():
            inbox.fail(error)
        if not expected:
            for listener in self._listeners:
                listener(error)


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
        self._end_open_requests(EngineGone("the connections to the decode servers were closed"), expected=True)
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
                self._handle([_info(statuses)])
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
        return SampleOutput(*place, output)


def _info(statuses: Sequence[Mapping[str, Any]]) -> EngineInfo:
    """Return the properties of all decode servers as those of one engine: the smallest context, and the sums of requests and
    pages.
    """
    infos: list[EngineInfo] = [from_plain(status["engine"], EngineInfo) for status in statuses]
    return replace(
        infos[0],
        longest_request=min(info.longest_request for info in infos),
        max_requests=sum(info.max_requests for info in infos),
        num_pages=sum(info.num_pages for info in infos),
    )


def _snapshot(statuses: Sequence[Mapping[str, Any]]) -> EngineSnapshot:
    """Return the sums of all decode servers' counters as one snapshot."""
    stats, load = (
        {name: sum(status[part][name] for status in statuses) for name in statuses[0][part]} for part in ("stats", "load")
    )
    return EngineSnapshot(EngineStats(**stats), EngineLoad(**load), 0.0)
