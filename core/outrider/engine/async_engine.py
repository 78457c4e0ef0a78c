"""An engine for asyncio and for several threads: it runs in a thread of its own, and takes calls from a queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from outrider.device import OutriderError
from outrider.engine.engine import Engine
from outrider.engine.requests.request import FinishReason, StepOutput
from outrider.engine.requests.sampling import SamplingParams
from outrider.errors import RequestError
from outrider.model import Media


class AsyncEngineClosed(OutriderError):
    """The engine was closed, or its thread has ended; it accepts no more requests."""


@dataclass(eq=False)
class _OutputReader:
    """The output queue of one ``stream`` call, which an event loop reads. ``left`` has the ids of the samples that have not
    finished.
    """

    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[StepOutput | BaseException] = field(default_factory=asyncio.Queue)
    left: set[int] = field(default_factory=set)

    def put(self, item: StepOutput | BaseException) -> bool:
        """Deliver outputs from the engine's thread to the reader's queue. Returns False if the event loop is closed."""
        try:
            self.loop.call_soon_threadsafe(self.outputs.put_nowait, item)
        except RuntimeError:
            return False
        return True


class AsyncEngine:
    """Serves requests from any number of tasks, event loops and threads with one :class:`Engine`.

    ``make`` returns the engine; it's called in the engine's own thread, so that loading a model doesn't block an event
    loop. An engine that exists already may be given instead: it's adopted, and its maker must no longer use it.

    Use it as an async context manager, or call :meth:`start` and :meth:`close`. All other methods may be called from any
    thread that runs an event loop, once it's started.

    Recoverable failures of the device are retried: requests keep their tokens. Once the device is lost or stuck, every open
    stream and every later call raises the engine's error.
    """

    def __init__(self, make: Engine | Callable[[], Engine]) -> None:
        self._make: Callable[[], Engine] = (lambda: make) if isinstance(make, Engine) else make
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._readers: dict[int, _OutputReader] = {}
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._started: Future[Engine] = Future()
        self._started.set_running_or_notify_cancel()  # or a task that is cancelled in start would cancel it for all others
        self._stop: bool | None = None  # None: go on; False: when all requests have ended; True: now
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()  # between the last command that is taken and the thread's end

    # -- starting and ending ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the thread and wait until the engine exists. May be called again, also after its task was cancelled.

        Raises the error of the engine's creation, and :class:`AsyncEngineClosed` once :meth:`close` was called.
        """
        with self._lock:
            if self._stop is not None:
                raise AsyncEngineClosed("this engine was closed; make a new one")
            if self._thread.ident is None:
                self._thread.start()
        await asyncio.wrap_future(self._started)

    async def close(self, *, drain: bool = False) -> None:
        """End the engine's thread and wait for its end. May be called twice.

        With ``drain``, the thread finishes open requests first; otherwise it aborts them.
        """
        self._request_stop(drain=drain)
        if self._thread.ident is None:
            self._ended.set()
            return
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _request_stop(self, *, drain: bool) -> None:
        with self._lock:
            self._stop = not drain or bool(self._stop)
        self._commands.put(lambda: None)

    async def __aenter__(self) -> AsyncEngine:
        try:
            await self.start()
        except asyncio.CancelledError:  # no caller could close the engine
            self._request_stop(drain=False)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def engine(self) -> Engine:
        """The engine, for its tokenizer, configuration and counts. Only its thread may call its other methods.

        Raises :class:`AsyncEngineClosed` before :meth:`start` has returned.
        """
        if not self._started.done() or self._started.exception() is not None:
            raise AsyncEngineClosed("this engine hasn't started; await start() first, or use `async with`")
        return self._started.result()

    @property
    def error(self) -> BaseException | None:
        """The error that stopped the engine's thread; None while the engine runs."""
        return self._error

    @property
    def open_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._readers)

    # -- requests --------------------------------------------------------------------------------------------------

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        media: Sequence[Media] = (),
        admitted: Callable[[range], None] | None = None,
    ) -> AsyncIterator[StepOutput]:
        """Run a request and yield the tokens of its ``n`` samples as they arrive, identified by the samples' ids.

        ``admitted`` is called with the ids, in the order of the samples, before the first output is yielded. A cancelled
        task, or an iterator that is closed early, aborts the request. Raises :class:`RequestError` for a request that can't
        be served, before any output is yielded.
        """
        reader = _OutputReader(asyncio.get_running_loop())
        left = reader.left
        try:
            if isinstance(params, SamplingParams) and params.guide is not None:
                # Compiling takes its time: in neither the loop's thread nor the engine's.
                await asyncio.get_running_loop().run_in_executor(None, self.engine.compile_guide, params.guide)
            # Cancelled here, the request may have been admitted all the same: `left` says so then.
            ids = await self.call(lambda engine: self._admit(engine, reader, prompt, params, priority, media))
            if admitted is not None:
                admitted(ids)
            while left:
                item = await reader.outputs.get()
                if isinstance(item, BaseException):
                    raise item
                if item.finish_reason is not None:
                    left.discard(item.request_id)
                yield item
        finally:
            self._post(lambda: self._drop(left))

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        media: Sequence[Media] = (),
    ) -> tuple[tuple[int, ...], ...]:
        """Run a request to its end, and return the output tokens of each of its samples, in order.

        Raises :class:`RequestError` for a request that ends with an error or is aborted, because its tokens would look like a
        whole output; :class:`AsyncEngineClosed` if closing the engine aborted the request.
        """
        outputs: dict[int, list[int]] = {}
        async for output in self.stream(prompt, params, priority=priority, media=media):
            outputs.setdefault(output.request_id, []).extend(output.tokens)
            if output.finish_reason is FinishReason.ERROR:
                raise RequestError(output.error or f"request {output.request_id} ended with an error")
            if output.finish_reason is FinishReason.ABORT:
                raise self._aborted(output.request_id, len(outputs[output.request_id]))
        return tuple(tuple(outputs[request]) for request in sorted(outputs))

    def _aborted(self, request_id: int, tokens: int) -> OutriderError:
        what = f"request {request_id} was aborted after {tokens} tokens"
        if self._stop:
            return AsyncEngineClosed(f"{what}, since the engine was closed; close(drain=True) lets open requests end")
        return RequestError(f"{what}; stream() gives what a request has put out until then")

    async def abort(self, request_id: int) -> None:
        """End a request; its stream ends with the finish reason ``abort``. Raises :class:`RequestError` for an unknown id."""
        await self.call(lambda engine: engine.abort(request_id))

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Return ``function(engine)``, called in the engine's thread between two iterations. Use it to read counts."""
        answer: Future[Any] = Future()

        def command() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function(self._started.result()))
            except BaseException as error:
                answer.set_exception(error)

        self._post(command, answer)
        return await asyncio.wrap_future(answer)

    # -- between threads -------------------------------------------------------------------------------------------

    def _post(self, command: Callable[[], None], answer: Future[Any] | None = None) -> None:
        with self._lock:
            is_refused = self._stop is not None and answer is not None  # a request can be dropped during a drain
            gone = is_refused or self._ended.is_set() or self._thread.ident is None
            if not gone:
                self._commands.put(command)
        if gone and answer is not None:
            answer.set_exception(self._error or AsyncEngineClosed("this engine isn't running: start it, or make a new one"))

    # -- in the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._make()
            engine.adopt()
        except BaseException as error:
            self._error = error
            self._started.set_exception(error)  # first: commands that came meanwhile wait for it
            self._finish(None)
            return
        self._started.set_result(engine)
        try:
            self._serve(engine)
        except BaseException as error:
            self._error = error
        finally:
            self._finish(engine)

    def _serve(self, engine: Engine) -> None:
        while True:
            self._take_commands(block=not engine.has_unfinished)
            if self._stop or (self._stop is not None and not engine.has_unfinished):
                return
            if not engine.has_unfinished:
                continue
            for output in engine.step_or_retry():
                self._hand_on(output)

    def _take_commands(self, *, block: bool) -> None:
        """Execute the commands that callers have queued. With ``block``, wait for one if the queue is empty."""
        try:
            command = self._commands.get(block=block and self._stop is None)
            while True:
                command()
                command = self._commands.get_nowait()
        except Empty:
            pass

    def _admit(
        self,
        engine: Engine,
        reader: _OutputReader,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        priority: int,
        media: Sequence[Media],
    ) -> range:
        first = engine.add_request(prompt, params, priority=priority, media=media)
        ids = range(first, first + (params.n if params is not None else 1))
        reader.left.update(ids)
        self._readers.update(dict.fromkeys(ids, reader))
        return ids

    def _hand_on(self, output: StepOutput) -> None:
        reader = self._readers.get(output.request_id)
        if output.finish_reason is not None:
            self._readers.pop(output.request_id, None)
        if reader is not None and not reader.put(output):
            self._drop(reader.left)

    def _drop(self, requests: set[int]) -> None:
        """Abort requests whose readers are gone, for example because their event loop was closed."""
        if not requests:
            return
        engine = self._started.result()
        still_open = engine.open_requests.keys()
        for request in list(requests):
            if self._readers.pop(request, None) is not None and request in still_open:
                engine.abort(request)

    def _finish(self, engine: Engine | None) -> None:
        """Abort open requests, raise the error in their streams, and refuse later calls."""
        with self._lock:
            self._ended.set()
        if engine is not None and self._error is None:
            try:
                for request in engine.open_requests.keys() & self._readers.keys():
                    engine.abort(request)
                for output in engine.step():  # also those of requests that have ended since the last step
                    self._hand_on(output)
                engine.drain()
            except BaseException as failure:  # open streams would wait forever for the outputs of a failed device
                self._error = failure
        reason = self._error or AsyncEngineClosed("this engine was closed")
        for reader in set(self._readers.values()):
            reader.put(reason)
        self._readers.clear()
        while not self._commands.empty():
            self._commands.get_nowait()()
