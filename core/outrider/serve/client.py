"""The server's side of the line to its engine: requests in, their outputs out, on one event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from outrider.device import OutriderError
from outrider.engine.requests.sampling import SamplingParams
from outrider.errors import RequestError
from outrider.model import Media
from outrider.serve.messages import (
    Abort,
    Admitted,
    Command,
    EngineInfo,
    Event,
    Failed,
    Output,
    Ready,
    Refused,
    Snapshot,
    Submit,
)


class EngineGone(OutriderError):
    """The engine has ended: its device was lost, its process died, or it was closed. No request is served any more."""


class Inbox:
    """Outputs of the requests of one caller, in the order in which they came. One task reads it.

    :meth:`take` gives all that has come, so a caller that is slow gets more at once and the server keeps nothing twice.
    """

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._waiting_for_admission: set[int] = set()
        self._error: BaseException | None = None
        self._wake: asyncio.Future[None] | None = None
        self.keys: set[int] = set()
        """Requests that haven't ended."""

    async def admitted(self) -> None:
        """Wait until every request was checked by the engine. Raises :class:`RequestError` where one can't be served."""
        while self._waiting_for_admission and self._error is None:
            await self._sleep()
        if self._error is not None:
            raise self._error

    async def take(self) -> list[Output]:
        """All outputs that have come; waits where there is none. Raises what :meth:`fail` was told, outputs first."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            await self._sleep()
        taken, self._outputs = self._outputs, []
        return taken

    def fail(self, error: BaseException) -> None:
        """Let the reader raise this. The first error stays."""
        self._error = self._error or error
        self._rouse()

    async def _sleep(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _expect(self, key: int) -> None:
        self.keys.add(key)
        self._waiting_for_admission.add(key)

    def _put(self, output: Output) -> None:
        self._outputs.append(output)
        self._rouse()

    def _answer(self, key: int) -> None:
        self._waiting_for_admission.discard(key)
        self._rouse()


@dataclass(slots=True)
class _Open:
    """One request on the way. ``left``: samples that haven't ended."""

    inbox: Inbox
    left: int


class EngineClient(ABC):
    """An engine that works elsewhere, as a server sees it. All methods belong to the event loop that :meth:`start` ran on,
    and none of them waits for the device.
    """

    def __init__(self) -> None:
        self._info: EngineInfo | None = None
        self._open: dict[int, _Open] = {}
        self._samples = 0  # in all of them
        self._next_key = 1
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._listeners: list[Callable[[EngineGone], None]] = []
        self.snapshot: Snapshot | None = None
        """The latest that the engine has told: at most a tenth of a second old while it works."""
        self.error: EngineGone | None = None
        """Why the engine is gone; None while it works."""

    # -- starting and ending ---------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Make the engine, and wait for it. Raises :class:`EngineGone` where it can't be made."""
        self._ready = asyncio.get_running_loop().create_future()
        await self._launch()
        self._info = await self._ready
        return self._info

    @abstractmethod
    async def close(self) -> None:
        """End the engine; open requests are aborted. Allowed more than once."""

    @abstractmethod
    async def _launch(self) -> None:
        """Start what runs the engine. Its events come to :meth:`_handle`."""

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Hand a command on, without waiting."""

    @property
    def info(self) -> EngineInfo:
        """What of the engine doesn't change. Raises :class:`EngineGone` before :meth:`start` is through."""
        if self._info is None:
            raise EngineGone("the engine hasn't started")
        return self._info

    def on_gone(self, listener: Callable[[EngineGone], None]) -> None:
        """Call this, once, when the engine is gone without having been closed."""
        self._listeners.append(listener)

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def open_requests(self) -> int:
        """Samples that haven't ended."""
        return self._samples

    def submit(
        self,
        inbox: Inbox,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        media: Sequence[Media] = (),
    ) -> int:
        """Queue a request whose outputs come to ``inbox``; returns its key. Raises :class:`EngineGone`."""
        if self.error is not None:
            raise self.error
        key = self._next_key
        self._next_key += 1
        self._open[key] = _Open(inbox, params.n)
        self._samples += params.n
        inbox._expect(key)
        self._send(Submit(key, tokens, params, priority, media))
        return key

    def abort(self, inbox: Inbox) -> int:
        """End what is open of an inbox; nothing more comes to it. Returns how many samples that ended."""
        ended = 0
        for key in list(inbox.keys):
            ended += self._open.pop(key).left
            if self.error is None:
                self._send(Abort(key))
        inbox.keys.clear()
        self._samples -= ended
        return ended

    # -- from the engine -------------------------------------------------------------------------------------------

    def _handle(self, events: Iterable[Event]) -> None:
        """Take in what the engine told. On the event loop."""
        for event in events:
            if type(event) is Output:
                self._deliver(event)
                continue
            match event:
                case Admitted(key):
                    if key in self._open:
                        self._open[key].inbox._answer(key)
                case Refused(key, message):
                    if key in self._open:
                        refused = self._open.pop(key)
                        self._samples -= refused.left
                        inbox = refused.inbox
                        inbox.keys.discard(key)
                        inbox.fail(RequestError(message))
                case Snapshot():
                    self.snapshot = event
                case Ready(info):
                    if self._ready is not None and not self._ready.done():
                        self._ready.set_result(info)
                case Failed(message):
                    self._gone(EngineGone(message))

    def _deliver(self, output: Output) -> None:
        request = self._open.get(output.key)
        if request is None:  # it was aborted meanwhile
            return
        if output.finish_reason is not None:
            request.left -= 1
            self._samples -= 1
            if request.left == 0:
                del self._open[output.key]
                request.inbox.keys.discard(output.key)
        request.inbox._put(output)

    def _gone(self, error: EngineGone, *, expected: bool = False) -> None:
        """The engine has ended: say so to every caller. The first error stays."""
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
