"""What the routes call: admission, generation, and the states of a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any, TypeVar

from outrider.engine.requests.sampling import SamplingParams
from outrider.errors import RequestError
from outrider.serve.choices import ChoiceText, Delta
from outrider.serve.client import EngineClient, EngineGone, Inbox
from outrider.serve.config import ServeConfig
from outrider.serve.errors import OVERLOADED, SERVER, ApiError, bad_request, unavailable
from outrider.serve.metrics import Metrics
from outrider.serve.prompts import Prompt, Prompter

T = TypeVar("T")
_RETRY_S = 1
"""What a client that was refused is told to wait."""
_SHORT = 1024
"""Characters that are tokenised in less time than a thread takes."""
_PREPARING = 2
"""Threads that tokenise and fill in templates."""


class State(StrEnum):
    """What a server does with a new request."""

    READY = "ready"
    DRAINING = "draining"
    """It's about to end: running requests go on, new ones are refused."""
    LOST = "lost"
    """Its engine is gone."""


class Service:
    """Runs requests on an engine that has started. It belongs to the engine client's event loop."""

    def __init__(self, engine: EngineClient, prompter: Prompter, config: ServeConfig) -> None:
        self.engine = engine
        self.prompter = prompter
        self.config = config
        self.metrics = Metrics(engine, config)
        self.started = int(time.time())
        self._draining = False
        self._open: set[Generation] = set()
        self._threads = ThreadPoolExecutor(_PREPARING, thread_name_prefix="outrider-prompts")

    @property
    def state(self) -> State:
        """What it does with a new request."""
        if self.engine.error is not None:
            return State.LOST
        return State.DRAINING if self._draining else State.READY

    # -- requests --------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises :class:`ApiError` where no new request is taken."""
        if self.state is State.LOST:
            raise unavailable("the engine is gone; this server is about to end", "engine_lost")
        if self.state is State.DRAINING:
            raise unavailable("this server is about to end; ask another one", "draining", _RETRY_S)

    def check_model(self, name: str) -> None:
        """Raises :class:`ApiError` where the model isn't served under this name."""
        if name not in self.config.names:
            message = f"the model {name!r} does not exist; this server has {', '.join(self.config.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def prepare(self, make: Callable[[], T], *, size: int | None) -> T:
        """What ``make`` returns; called in a thread where it may take long. ``size``: its characters, or None."""
        if size is not None and size < _SHORT:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._threads, make)

    def room_for(self, prompt: Prompt, max_tokens: int | None) -> int:
        """Tokens that the output may have: ``max_tokens``, or None for what fits. Raises :class:`ApiError`."""
        longest = self.engine.info.longest_request
        # An image has one placeholder here, and in the cache a token for each feature.
        length = len(prompt.tokens)
        most = longest - 1
        if length > most:
            raise bad_request(
                f"the prompt has {length} tokens, this server takes {most} at most (its context is {longest})",
                "prompt",
                "context_length_exceeded",
            )
        if max_tokens is not None and length + max_tokens > longest:
            raise bad_request(
                f"this model's maximum context length is {longest} tokens; the request has {length} in the prompt and asks "
                f"for {max_tokens} more",
                "max_tokens",
                "context_length_exceeded",
            )
        return longest - length if max_tokens is None else max_tokens

    async def generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
        special_tokens: bool = False,
        pieces: bool = False,
    ) -> Generation:
        """Start a request: prompt i gets ``params[i].n`` choices. It's admitted when this returns; the caller must close it.

        Raises :class:`ApiError`.
        """
        self.check_open()
        samples = sum(each.n for each in params)
        capacity = self.engine.info.max_requests + self.config.max_queued
        if samples > capacity:
            raise bad_request(f"the request asks for {samples} choices, this server runs and queues {capacity}", "n")
        if self.engine.open_requests + samples > capacity:
            raise ApiError(
                429,
                f"the queue is full: {self.engine.open_requests} choices run or wait, {capacity} at most; try again later",
                kind=OVERLOADED,
                code="queue_full",
                headers={"Retry-After": str(_RETRY_S)},
            )
        generation = Generation(self, special_tokens=special_tokens, pieces=pieces)
        try:
            await generation.start(prompts, params, priority)
        except BaseException:
            generation.close()
            raise
        return generation

    # -- the end ---------------------------------------------------------------------------------------------------

    def refuse_new(self) -> None:
        """From now on refuse new requests."""
        self._draining = True

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests, wait for the running ones for so long, then end them with an error. Returns whether all ended
        by themselves.
        """
        self.refuse_new()
        deadline = time.monotonic() + seconds
        while self._open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        left = list(self._open)
        for generation in left:
            generation.fail(unavailable("this server has ended; the request was cut off", "draining"))
        return not left

    def close(self) -> None:
        """Give up what the service holds besides the engine."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Generation:
    """The choices of one request, on their way."""

    def __init__(self, service: Service, *, special_tokens: bool, pieces: bool) -> None:
        self._service = service
        self._inbox = Inbox()
        self._special_tokens, self._pieces = special_tokens, pieces
        self._choices: dict[tuple[int, int], ChoiceText] = {}
        self._arrived = time.perf_counter()
        self._last: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.notes: dict[str, Any] = {}
        """What the log shall say of it; filled when it's closed."""
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.accepted = 0
        self.first_token_s: float | None = None
        """From arrival to the first token; None before it."""
        service._open.add(self)

    @property
    def choices(self) -> int:
        """How many it has."""
        return len(self._choices)

    @property
    def finish_reasons(self) -> list[str]:
        """Those of the choices that have ended, in their order."""
        return [choice.finish_reason for choice in self._choices.values() if choice.finish_reason is not None]

    async def start(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priority: int) -> None:
        """Queue the requests, and wait until the engine has checked them."""
        service = self._service
        limit = service.config.request_timeout_s
        late = ApiError(504, f"the request wasn't done within {limit:g} s", kind=SERVER, code="timeout")
        self._timer = asyncio.get_running_loop().call_later(limit, self.fail, late)
        try:
            for prompt, each in zip(prompts, params, strict=True):
                self.prompt_tokens += len(prompt.tokens)
                key = service.engine.submit(self._inbox, prompt.tokens, each, priority=priority, media=prompt.media)
                for sample in range(each.n):
                    self._choices[key, sample] = ChoiceText(
                        service.prompter.tokenizer,
                        len(self._choices),
                        each,
                        ends=service.engine.info.eos_token_ids,
                        special_tokens=self._special_tokens,
                        pieces=self._pieces,
                    )
            await self._inbox.admitted()
        except Exception as error:
            raise self._told(error) from error

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What is new, as it comes; a reader that is slow gets more at once. Raises :class:`ApiError`."""
        left = len(self._choices)
        metrics = self._service.metrics
        while left:
            try:
                outputs = await self._inbox.take()
            except Exception as error:
                raise self._told(error) from error
            now = time.perf_counter()
            deltas: list[Delta] = []
            for output in outputs:
                choice = self._choices[output.key, output.sample]
                if output.refused:
                    raise bad_request(f"the request can't be served any further: {output.error}", code="failed")
                if output.error is not None:
                    raise ApiError(500, f"the request failed on the device: {output.error}", kind=SERVER, code="failed")
                if output.tokens:
                    if self.first_token_s is None:
                        self.first_token_s = now - self._arrived
                        metrics.first_token(self.first_token_s)
                    last = self._last.get(choice.index)
                    gap = None if last is None else now - last
                    metrics.output(gap, len(output.tokens), output.drafted, output.proposed)
                    self._last[choice.index] = now
                    self.output_tokens += len(output.tokens)
                    self.accepted += output.drafted
                delta = choice.add(output)
                deltas.append(delta)
                left -= output.finish_reason is not None
            yield deltas
        seconds = time.perf_counter() - self._arrived
        metrics.ended(seconds, self.prompt_tokens, self.output_tokens, self.finish_reasons)

    def fail(self, error: ApiError) -> None:
        """End it with this error."""
        self._inbox.fail(error)

    def close(self) -> None:
        """Abort what hasn't ended. Allowed more than once."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        service = self._service
        service._open.discard(self)
        ended = service.engine.abort(self._inbox)
        self.notes |= {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        self.notes |= {"accepted_draft_tokens": self.accepted, "finish_reasons": self.finish_reasons, "aborted": ended}
        if self.first_token_s is not None:
            self.notes["first_token_s"] = round(self.first_token_s, 6)
        if ended:
            service.metrics.aborted(ended)
            service.metrics.counted(self.prompt_tokens, self.output_tokens)

    def _told(self, error: Exception) -> Exception:
        """An error as clients are told of it."""
        if isinstance(error, RequestError):
            return bad_request(str(error))
        if isinstance(error, EngineGone):
            return unavailable(f"the engine is gone: {error}", "engine_lost")
        return error
