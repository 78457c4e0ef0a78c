"""The requests of a server: their generations, the text of each choice, and log-probabilities in OpenAI's format."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from starlette.requests import Request

from outrider.engine.requests.request import StepOutput
from outrider.engine.requests.sampling import SamplingParams, TokenLogprobs
from outrider.errors import BusyError, RequestError
from outrider.model import Tokenizer
from outrider.serve.api.prompt_builder import EnginePrompt, PromptBuilder
from outrider.serve.api.request_fields import ChatRequest, SamplingFields, format_guide, sampling_params
from outrider.serve.api.responses import OVERLOADED, SERVER, ApiError, bad_request, unavailable
from outrider.serve.api.tool_calls import RequestToolCalls, ToolCallReader
from outrider.serve.config import ServeConfig
from outrider.serve.connection.engine_client import EngineClient, EngineGone, Inbox
from outrider.serve.connection.engine_messages import SampleOutput
from outrider.serve.http.metrics import ServerMetrics


@dataclass(slots=True)
class ChoiceDelta:
    """The new text and new tokens of one choice since its previous delta."""

    index: int
    """Index of the choice in the response, from 0."""
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()
    """The offset in the choice's text of each token that has ``logprobs``, in characters."""
    finish_reason: str | None = None
    drafted: int = 0
    """Number of ``tokens`` that are accepted draft tokens. They come first."""
    proposed: int = 0
    """Number of draft tokens that the engine verified in this iteration."""
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    """The text of each token, with True if the token was drafted. Empty unless the request asks for pieces."""
    stopped_by: str | int | None = None
    """The stop string or stop token of the request that ended the choice."""

    def followed_by(self, later: ChoiceDelta) -> ChoiceDelta:
        """Return one delta that has the content of this delta and then the content of ``later``, of the same choice."""
        return ChoiceDelta(
            self.index,
            self.text + later.text,
            self.tokens + later.tokens,
            self.logprobs + later.logprobs,
            self.offsets + later.offsets,
            later.finish_reason,
            self.drafted + later.drafted,
            self.proposed + later.proposed,
            self.pieces + later.pieces,
            later.stopped_by,
        )


class ChoiceText:
    """A decoder of one choice: turns the token ids of its outputs into text, output by output.

    With ``pieces`` each delta has the text of each of its tokens. The text continues that of the ``prompt`` tokens. ``ends``
    are the end-of-sequence tokens, which never have text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        index: int,
        params: SamplingParams,
        *,
        prompt: Sequence[int],
        ends: Collection[int],
        pieces: bool = False,
    ) -> None:
        self.index = index
        self._ends = ends
        # With stop strings the engine decodes the text itself, because it has to find them.
        self._text_from_engine = bool(params.stop)
        self._decoder = tokenizer.stream(spelled=params.spelled_tokens, prompt=prompt)
        self._offsets = TextOffsets(tokenizer, prompt) if params.logprobs is not None else None
        self._has_pieces = pieces
        self.finish_reason: str | None = None
        """Finish reason of the outputs that have arrived, which :meth:`add` may not have decoded yet."""

    def add(self, output: StepOutput) -> ChoiceDelta:
        """Decode the tokens of ``output`` and return the new text.

        The text of a token that ends inside a character is part of a later delta. The last output flushes the decoder.
        """
        decoder, tokens = self._decoder, output.tokens
        if output.finish_reason == "stop" and tokens and tokens[-1] in self._ends:
            tokens = tokens[:-1]
        pieces: list[str] = []
        if self._has_pieces:
            pieces = [decoder.push(token) for token in tokens]
        elif not self._text_from_engine and tokens:
            pieces = [decoder.push(*tokens)]
        if output.finish_reason is not None and (self._has_pieces or not self._text_from_engine):
            rest = decoder.flush()
            pieces = [*pieces[:-1], pieces[-1] + rest] if pieces else [rest]
        text = (output.searched_text or "") if self._text_from_engine else "".join(pieces)
        offsets = tuple(self._offsets.add(entry.token) for entry in output.logprobs) if self._offsets is not None else ()
        delta = ChoiceDelta(
            self.index, text, output.tokens, output.logprobs, offsets, output.finish_reason, output.drafted, output.proposed
        )
        delta.stopped_by = output.stopped_by
        if self._has_pieces:
            delta.pieces = [(piece, index < output.drafted) for index, piece in enumerate(pieces) if piece]
        return delta


class TextOffsets:
    """The offsets of the tokens of a text that continues the ``prompt`` tokens. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream(prompt=prompt)
        self._num_decoded = self._settled = 0
        self._unsettled = b""  # bytes after the first ``_settled`` characters

    def add(self, token: int) -> int:
        """Return the number of characters that begin before the next ``token``. Invalid bytes count as in the text."""
        data = b"" if token in self._tokenizer.special_tokens else self._tokenizer.bytes_of(token)
        offset = self._settled + len(self._unsettled.decode(errors="replace"))
        self._num_decoded += len(self._decoder.push(token))
        if not self._decoder.is_complete:
            self._unsettled += data
            return offset
        text = data.decode(errors="replace")
        if self._unsettled and "\N{REPLACEMENT CHARACTER}" not in text:
            offset = self._num_decoded - len(text)  # a run of bytes has ended: the decoder may show each of them
        self._settled, self._unsettled = self._num_decoded, b""
        return offset


_MIN_LOGPROB = -9999.0
"""The log-probability that clients get for an impossible token: JSON has no infinity."""


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], offsets: Sequence[int]) -> dict[str, Any]:
    """Return the ``logprobs`` field of a completion whose tokens begin at ``offsets`` in the text of the choice."""
    return {
        "tokens": [format_token(tokenizer, entry.token) for entry in entries],
        "token_logprobs": [max(entry.logprob, _MIN_LOGPROB) for entry in entries],
        "top_logprobs": [
            {
                format_token(tokenizer, token): max(logprob, _MIN_LOGPROB)
                for token, logprob in (*entry.top, (entry.token, entry.logprob))
            }
            for entry in entries
        ],
        "text_offset": list(offsets),
    }


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return the ``logprobs`` field of a choice of a chat completion."""

    def token_entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.bytes_of(token)
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(data)}

    content = [
        {**token_entry(entry.token, entry.logprob), "top_logprobs": [token_entry(token, value) for token, value in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def format_token(tokenizer: Tokenizer, token: int) -> str:
    """Return the token's text as OpenAI's completions show it. A part of a character is shown as its bytes."""
    data = tokenizer.bytes_of(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


T = TypeVar("T")
LOG_FIELDS_KEY = "outrider"
"""Key in the ASGI scope of a dict: a route adds the fields to it that the request's log record shall have."""
_DEFAULT_COMPLETION_TOKENS = 16
"""Maximum number of tokens of a completion whose request names none, as in OpenAI's API."""
_RETRY_AFTER_S = 1
"""Value in seconds of the header ``Retry-After`` for a client whose request was refused."""
_MAX_INLINE_CHARACTERS = 1024
"""Prompts below this length are tokenised on the event loop: a switch to a thread takes longer."""
_NUM_PROMPT_THREADS = 2
"""Number of threads that tokenise prompts and render chat templates."""


class Service:
    """The requests of a server whose engine has started. All methods run on the engine client's event loop."""

    def __init__(self, engine: EngineClient, prompter: PromptBuilder, config: ServeConfig) -> None:
        self.engine = engine
        self.prompter = prompter
        self.config = config
        self.metrics = ServerMetrics(engine, config)
        self.started = int(time.time())
        self._draining = False
        self._open: set[Generation] = set()
        self._threads = ThreadPoolExecutor(_NUM_PROMPT_THREADS, thread_name_prefix="outrider-prompts")

    @property
    def state(self) -> Literal["ready", "draining", "lost"]:
        """The current state of the server: ``ready``, ``draining`` (it is about to end, refuses new requests and finishes the
        running ones) or ``lost`` (the engine has ended, and the server refuses all requests).
        """
        return "lost" if self.engine.error is not None else "draining" if self._draining else "ready"

    # -- requests --------------------------------------------------------------------------------------------------

    def check_accepting(self) -> None:
        """Raise :class:`ApiError` unless the server accepts new requests."""
        if self.state == "lost":
            raise unavailable("the engine is gone; this server is about to end", "engine_lost")
        if self.state == "draining":
            raise unavailable("this server is about to end; ask another one", "draining", _RETRY_AFTER_S)

    def check_model(self, name: str) -> None:
        """Raise :class:`ApiError` (404) unless ``name`` is one of the names under which the server offers its model."""
        if name not in self.config.names:
            message = f"the model {name!r} does not exist; this server has {', '.join(self.config.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def build_prompts(self, make: Callable[[], T], *, size: int | None) -> T:
        """Call ``make``, which builds a prompt, and return its result. Long prompts are built in a thread.

        ``size`` is the number of characters to tokenise; None if it is unknown.
        """
        if size is not None and size < _MAX_INLINE_CHARACTERS:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._threads, make)

    def output_limit(self, prompt: EnginePrompt, max_tokens: int | None, field: str = "max_tokens") -> int:
        """Return the maximum number of output tokens: ``max_tokens``, or the remaining context if that is None.

        Raises :class:`ApiError` that names ``field`` if prompt and output exceed the context length.
        """
        longest = self.engine.info.longest_request
        length = prompt.length
        self.prompter.check_length(length)
        if max_tokens is not None and length + max_tokens > longest:
            raise bad_request(
                f"this model's maximum context length is {longest} tokens; the request has {length} in the prompt and asks "
                f"for {max_tokens} more",
                field,
                "context_length_exceeded",
            )
        return longest - length if max_tokens is None else max_tokens

    async def start_chat(self, body: ChatRequest, request: Request, *, clamp: bool = False) -> Generation:
        """Start the generation of a chat request and return it. The caller must close the generation.

        With ``clamp``, ``max_tokens`` may exceed the context, which then ends the generation.
        """
        self.check_room(body.n or 1)
        calls = RequestToolCalls(body, self.prompter.answer_format)
        prompt = await self.build_prompts(lambda: self.prompter.chat(body), size=None)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if clamp and max_tokens is not None:
            max_tokens = min(max_tokens, max(1, self.engine.info.longest_request - prompt.length))
        return await self.start_generation(body, request, [prompt], max_tokens, calls)

    async def start_generation(
        self,
        body: SamplingFields,
        request: Request,
        prompts: list[EnginePrompt],
        max_tokens: int | None,
        calls: RequestToolCalls | None = None,
    ) -> Generation:
        """Start the generation of a request with these prompts and return it. The caller must close the generation.

        ``calls`` are the tool calls of a chat.
        """
        info, n = self.engine.info, body.n or 1
        spelled: tuple[int, ...] = ()
        if calls is None:
            guide = format_guide(body)
        else:
            calls.read_prompt(prompts[0].text)
            guide, spelled = calls.guide, self.prompter.marker_tokens
        newer = getattr(body, "max_completion_tokens", None) is not None
        field = "max_completion_tokens" if newer else "max_tokens"
        limits = [self.output_limit(prompt, max_tokens, field) for prompt in prompts]
        if max_tokens is None and calls is None:
            limits = [min(limit, _DEFAULT_COMPLETION_TOKENS) for limit in limits]
        params = [sampling_params(body, info, max_tokens=limit, guide=guide, spelled_tokens=spelled) for limit in limits]
        if n > 1 and params[0].n == 1:  # greedy samples are equal; the engine runs them as separate requests
            prompts = [prompt for prompt in prompts for _ in range(n)]
            params = [each for each in params for _ in range(n)]
        num_choices = sum(each.n for each in params)
        readers = [] if calls is None else [calls.create_reader(prompts[0].text) for _ in range(num_choices)]
        pieces = body.stream_options is not None and body.stream_options.include_drafted
        try:
            generation = await self.generate(prompts, params, priority=body.priority or 0, pieces=pieces, readers=readers)
        except ApiError as error:
            if guide is not None and error.status == 400 and error.param is None:  # the guide can't be compiled
                error.param = "response_format" if calls is None else calls.guide_field
            raise
        generation.log_fields = request.scope[LOG_FIELDS_KEY]
        generation.log_fields["model"] = body.model
        return generation

    async def generate(
        self,
        prompts: Sequence[EnginePrompt],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
        pieces: bool = False,
        readers: Sequence[ToolCallReader] = (),
    ) -> Generation:
        """Start a request and return its generation once the engine has accepted it. The caller must close the generation.

        Prompt i gets ``params[i].n`` choices. ``pieces`` is passed to :class:`~outrider.serve.api.service.ChoiceText`.
        ``readers`` has one for each choice of a chat.

        Raises :class:`ApiError` if the request is refused or the queue is full.
        """
        self.check_accepting()
        self.check_room(sum(each.n for each in params))
        generation = Generation(self, pieces=pieces, readers=readers)
        try:
            await generation.start(prompts, params, priority)
        except BaseException:
            generation.close()
            raise
        return generation

    def check_room(self, samples: int, field: str = "n") -> None:
        """Raise :class:`ApiError`, which names ``field``, if the server can't run or queue ``samples`` more choices now."""
        capacity = self.engine.info.max_requests + self.config.max_queued
        if samples > capacity:
            raise bad_request(f"the request asks for {samples} choices, this server runs and queues {capacity}", field)
        if self.engine.num_open_samples + samples > capacity:
            open_samples = self.engine.num_open_samples
            raise _overloaded(f"the queue is full: {open_samples} choices run or wait, {capacity} at most; try again later")

    # -- shutdown ----------------------------------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        """Set the server to refuse new requests from now on; running requests continue."""
        self._draining = True

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests, and wait up to ``seconds`` for the running ones. Then end the remaining ones with an error.

        Returns whether all requests finished in time.
        """
        self.stop_accepting()
        deadline = time.monotonic() + seconds
        while self._open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        unfinished = list(self._open)
        for generation in unfinished:
            generation.fail(unavailable("this server has ended; the request was cut off", "draining"))
        return not unfinished

    def close(self) -> None:
        """Stop the threads that build prompts. The caller closes the engine."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Generation:
    """The running choices of one HTTP request, and its counts and times for log and metrics."""

    def __init__(self, service: Service, *, pieces: bool, readers: Sequence[ToolCallReader]) -> None:
        self.readers = readers
        """The readers of the choices of a chat; empty for a completion."""
        self._service = service
        self._inbox = Inbox()
        self._pieces = pieces
        self._choices: dict[tuple[int, int], ChoiceText] = {}
        self._arrival_time = time.perf_counter()
        self._last_output_time: dict[int, float] = {}
        self._first_keys: set[int] = set()
        """Keys of the first engine request of each prompt, whose cached tokens are counted."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = self._recorded = False
        self.log_fields: dict[str, Any] = {}
        """Fields for the log record of the request; :meth:`close` adds them."""
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.accepted_draft_tokens = 0
        """Number of accepted draft tokens, over all choices."""
        self.proposed_draft_tokens = 0
        """Number of draft tokens that the target verified, over all choices."""
        self.reasoning_tokens = 0
        """Number of output tokens of reasoning, over all choices. It may lack tokens of its marks."""
        self.cached_tokens = 0
        """Number of prompt tokens that the prefix cache supplied."""
        self.first_token_s: float | None = None
        """Seconds from the request's arrival to its first token; None before the first token."""
        service._open.add(self)

    @property
    def choices(self) -> int:
        """Number of choices of the request."""
        return len(self._choices)

    @property
    def usage(self) -> dict[str, Any]:
        """The prompt tokens and the output tokens received so far, over all choices, in the form of OpenAI's API."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": min(self.cached_tokens, self.prompt_tokens)},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_draft_tokens": self.accepted_draft_tokens,
                "proposed_draft_tokens": self.proposed_draft_tokens,
            },
        }

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons of the choices that have ended, also by an error, in the order of the choices."""
        return [choice.finish_reason for choice in self._choices.values() if choice.finish_reason is not None]

    async def start(self, prompts: Sequence[EnginePrompt], params: Sequence[SamplingParams], priority: int) -> None:
        """Submit one engine request for each prompt, and wait until the engine has accepted all of them.

        Raises :class:`ApiError` if the engine refuses one of them.
        """
        service = self._service
        timeout_s = service.config.request_timeout_s
        timeout = ApiError(504, f"the request wasn't done within {timeout_s:g} s", kind=SERVER, code="timeout")
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.fail, timeout)
        last: EnginePrompt | None = None
        try:
            for prompt, each in zip(prompts, params, strict=True):
                key = service.engine.submit(self._inbox, prompt.tokens, each, priority=priority, media=prompt.media)
                if prompt is not last:  # greedy choices of one prompt are separate requests
                    self.prompt_tokens += prompt.length
                    self._first_keys.add(key)
                last = prompt
                for sample in range(each.n):
                    self._choices[key, sample] = ChoiceText(
                        service.prompter.tokenizer,
                        len(self._choices),
                        each,
                        prompt=prompt.tokens,
                        ends=service.engine.info.eos_token_ids,
                        pieces=self._pieces,
                    )
            await self._inbox.wait_until_admitted()
        except Exception as error:
            if isinstance(error, RequestError):
                self.prompt_tokens = 0  # the engine has refused the prompt
            raise _client_error(error) from error

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        """Yield the new text and tokens until every choice has ended; a slow reader gets several deltas at once.

        Raises :class:`ApiError` if the request fails or times out.
        """
        num_running = len(self._choices)
        while num_running:
            try:
                received = await self._inbox.receive_outputs()
            except Exception as error:
                raise _client_error(error) from error
            now = time.perf_counter()
            deltas: list[ChoiceDelta] = []
            choices = [self._count(event, now) for event in received]  # all, before one raises
            for choice, (_, _, output) in zip(choices, received, strict=True):
                if output.busy:
                    raise _overloaded(str(output.error))
                if output.refused:
                    raise bad_request(f"the request can't be served any further: {output.error}", code="failed")
                if output.error is not None:
                    raise ApiError(500, f"the request failed on the device: {output.error}", kind=SERVER, code="failed")
                deltas.append(choice.add(output))
                num_running -= output.finish_reason is not None
            yield deltas
        self._record()

    def read_message(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the delta of the message that ``delta`` of a chat's choice completes, possibly empty."""
        message = self.readers[delta.index].feed(delta.text, last=delta.finish_reason is not None)
        if reasoning := message.get("reasoning_content"):
            count, tokenizer = len(delta.tokens), self._service.prompter.tokenizer
            self.reasoning_tokens += count if len(message) == 1 else min(count, len(tokenizer.encode(reasoning)))
        return message

    def _count(self, event: SampleOutput, now: float) -> ChoiceText:
        """Count the tokens of an output that has arrived, and return its choice."""
        key, sample, output = event
        choice, metrics = self._choices[key, sample], self._service.metrics
        choice.finish_reason = output.finish_reason
        if output.tokens:
            if self.first_token_s is None:
                self.first_token_s = now - self._arrival_time
                metrics.record_first_token(self.first_token_s)
            last = self._last_output_time.get(choice.index)
            interval = None if last is None else now - last
            metrics.record_output(interval, len(output.tokens), output.drafted, output.proposed)
            self._last_output_time[choice.index] = now
            self.output_tokens += len(output.tokens)
            self.accepted_draft_tokens += output.drafted
            self.proposed_draft_tokens += output.proposed
            if sample == 0 and key in self._first_keys:
                self.cached_tokens += output.cached
        return choice

    def _record(self) -> None:
        """Add the finished request's counts and times to the server's metrics, once."""
        if self._recorded:
            return
        self._recorded = True
        metrics, reasons = self._service.metrics, self.finish_reasons
        if len(reasons) == len(self._choices) and "error" not in reasons:
            seconds = time.perf_counter() - self._arrival_time
            metrics.record_finished(seconds, self.prompt_tokens, self.output_tokens)
        metrics.count_samples(reasons)
        metrics.count_tokens(self.prompt_tokens, self.output_tokens)

    def fail(self, error: ApiError) -> None:
        """End the request: the reader of :meth:`deltas` raises ``error`` after the outputs that have arrived."""
        self._inbox.fail(error)

    def close(self) -> None:
        """Abort the choices that haven't ended, and record the request for the log. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        service = self._service
        service._open.discard(self)
        aborted = service.engine.abort(self._inbox)
        for event in self._inbox.pop_outputs():  # that no reader has received
            self._count(event, time.perf_counter())
        service.metrics.count_aborted(aborted)
        self._record()
        self.log_fields |= {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        self.log_fields |= {
            "accepted_draft_tokens": self.accepted_draft_tokens,
            "finish_reasons": self.finish_reasons,
            "aborted": aborted,
        }
        if self.first_token_s is not None:
            self.log_fields["first_token_s"] = round(self.first_token_s, 6)


def _overloaded(message: str) -> ApiError:
    headers = {"Retry-After": str(_RETRY_AFTER_S)}
    return ApiError(429, message, kind=OVERLOADED, code="queue_full", headers=headers)


def _client_error(error: Exception) -> Exception:
    """Return the :class:`ApiError` that a client gets for ``error`` of the engine client, or ``error`` itself."""
    if isinstance(error, BusyError):
        return _overloaded(str(error))
    if isinstance(error, RequestError):
        return bad_request(str(error))
    if isinstance(error, EngineGone):
        return unavailable(f"the engine is gone: {error}", "engine_lost")
    return error
