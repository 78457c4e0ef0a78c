"""The server's end of the connection to its engine: it submits requests and delivers their outputs, on one event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from outrider.device import OutriderError
from outrider.engine.requests.sampling import SamplingParams
from outrider.errors import RequestError
from outrider.model import Media
from outrider.serve.connection.engine_messages import (
    AbortRequest,
    EngineCommand,
    EngineEvent,
    EngineFailed,
    EngineInfo,
    EngineReady,
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
        self._wake: asyncio.Future[None] | None = None
        self.keys: set[int] = set()
        """Keys of the requests that haven't ended."""

    async def wait_until_admitted(self) -> None:
        """Wait until the engine has accepted every request. Raises :class:`RequestError` if the engine refuses one."""
        while self._waiting_for_admission and self._error is None:
            await self._sleep()
        if self._error is not None:
            raise self._error

    async def receive_outputs(self) -> list[SampleOutput]:
        """Return all queued outputs; wait if there is none. Raises the error of :meth:`fail` once the queue is empty."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            await self._sleep()
        return self.pop_outputs()

    def pop_outputs(self) -> list[SampleOutput]:
        """Return the queued outputs without waiting."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def fail(self, error: BaseException) -> None:
        """Make the reader raise ``error`` after the queued outputs. A second error is ignored."""
        self._error = self._error or error
        self._wake_reader()

    async def _sleep(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _expect(self, key: int) -> None:
        self.keys.add(key)
        self._waiting_for_admission.add(key)

    def _put(self, output: SampleOutput) -> None:
        self._outputs.append(output)
        self._wake_reader()

    def _admit(self, key: int) -> None:
        self._waiting_for_admission.discard(key)
        self._wake_reader()


@dataclass(slots=True)
class _OpenRequest:
    inbox: Inbox
    num_running: int
    """Number of samples that haven't ended."""


class EngineClient(ABC):
    """A client of an engine that runs in another thread or process.

    Call all methods on the event loop that :meth:`start` ran on. No method waits for the device.
    """

    def __init__(self) -> None:
        self._info: EngineInfo | None = None
        self._open: dict[int, _OpenRequest] = {}
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
        self._open[key] = _OpenRequest(inbox, params.n)
        self._num_samples += params.n
        inbox._expect(key)
        self._send(SubmitRequest(key, tokens, params, priority, media))
        return key

    def abort(self, inbox: Inbox) -> int:
        """Abort the open requests of ``inbox``, which gets no output from now on. Returns the number of aborted samples."""
        aborted = 0
        for key in list(inbox.keys):
            aborted += self._open.pop(key).num_running
            if self.error is None:
                self._send(AbortRequest(key))
        inbox.keys.clear()
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
                        self._open[key].inbox._admit(key)
                case RequestRefused(key, message):
                    if key in self._open:
                        refused = self._open.pop(key)
                        self._num_samples -= refused.num_running
                        inbox = refused.inbox
                        inbox.keys.discard(key)
                        inbox.fail(RequestError(message))
                case EngineSnapshot():
                    self.snapshot = event
                case EngineReady(info):
                    if self._ready is not None and not self._ready.done():
                        self._ready.set_result(info)
                case EngineFailed(message):
                    self._gone(EngineGone(message))

    def _deliver(self, output: SampleOutput) -> None:
        request = self._open.get(output.key)
        if request is None:  # the server has aborted the request
            return
        if output.finish_reason is not None:
            request.num_running -= 1
            self._num_samples -= 1
            if request.num_running == 0:
                del self._open[output.key]
                request.inbox.keys.discard(output.key)
        request.inbox._put(output)

    def _gone(self, error: EngineGone, *, expected: bool = False) -> None:
        """Record that the engine has ended, and make the callers of all open requests raise ``error``.

        A second error is ignored. If the end is ``expected``, the listeners aren't called.
        """
        if self.error is not None:
            return
        self.error = error
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        for request in self._open.values():
            request.inbox.fail(error)
        if not expected:
            for listener in self._listeners:
                listener(error)
