"""Request: the engine's record of one request with its media, the outputs that callers receive, and the queues of outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor

from outrider.device import ConfigError, OutriderError
from outrider.engine.guides.grammars import Guidance
from outrider.engine.requests.draft_length import RepeatedSuffix, RequestAcceptance
from outrider.engine.requests.hand_over import Arrival
from outrider.engine.requests.pages import DecodedState, PageKey
from outrider.engine.requests.sampling import SamplingParams, StopText, TokenLogprobs, Transcript
from outrider.errors import BusyError, RequestError
from outrider.model import Media, VisionConfig, VisionTower, expand_placeholders, prompt_positions


class RequestMedia:
    """The media of one prompt whose placeholders are expanded.

    The first prefill chunk that needs the features of a medium computes them on the prefill stream. The chunk with the
    medium's last token drops them. A prefill after a preemption computes them again.
    """

    def __init__(self, media: Sequence[Media], prompt: Sequence[int], vision: VisionConfig) -> None:
        positions, self.mrope_position_delta = prompt_positions(prompt, [each.grid for each in media], vision)
        self.media = tuple(media)
        self._positions: list[list[int]] = positions.tolist()
        self._runs = [run for each in media for run in each.runs(vision)]  # a video with times has one for each frame
        self._spans = _spans(self._runs, prompt, vision)
        self._features: dict[int, Tensor] = {}

    def positions(self, axis: int, start: int, end: int) -> list[int]:
        """Return the positions of the tokens ``start`` to ``end`` on one axis. Tokens after the prompt count as text."""
        prompt = self._positions[axis]
        return prompt[start:end] + [index + self.mrope_position_delta for index in range(max(start, len(prompt)), end)]

    def digests(self, start: int, end: int) -> tuple[tuple[int, bytes], ...]:
        """Return (first token, digest) of each medium that overlaps the tokens ``start`` to ``end`` (exclusive)."""
        spans = zip(self._spans, self._runs, strict=True)
        return tuple((span.start, run.digest) for span, run in spans if span.start < end and start < span.stop)

    def embed(self, tower: VisionTower, start: int, end: int, embeddings: Tensor, embedded: Tensor) -> None:
        """Write the features of the media tokens among ``start`` to ``end`` into their rows of ``embeddings`` [n, H].

        Sets ``embedded`` bool [n] to True for these rows. The tower may block the host.
        """
        for index, (span, run) in enumerate(zip(self._spans, self._runs, strict=True)):
            first, last = max(span.start, start), min(span.stop, end)
            if first >= last:
                continue
            if index not in self._features:
                # Encode one medium per call: a batch with other media could change the last bits of its features.
                (self._features[index],) = tower.encode([run])
            embeddings[first - start : last - start] = self._features[index][first - span.start : last - span.start]
            embedded[first - start : last - start] = True
            if last == span.stop:
                del self._features[index]


def expand_prompt(tokens: Sequence[int], media: Sequence[Media], vision: VisionConfig | None) -> tuple[int, ...]:
    """Return ``tokens`` with one placeholder for each feature. The input has one for each feature or for each medium.

    Raises :class:`RequestError` if tokens and media don't match, or if the model has no vision part.
    """
    if vision is None:
        if media:
            raise RequestError(f"{len(media)} images and videos were given, but the model takes text alone")
        return tuple(tokens)
    placeholders = sum(token in (vision.image_token, vision.video_token) for token in tokens)
    if placeholders > len(media) or not media:  # already expanded, or wrong: RequestMedia raises for wrong placeholders
        return tuple(tokens)
    return tuple(expand_placeholders(tokens, media, vision))


def request_media(
    media: Sequence[Media], prompt: Sequence[int], vision: VisionConfig | None, tower: VisionTower | None
) -> RequestMedia | None:
    """Return the media of a prompt, or None for a text prompt.

    Raises :class:`RequestError` for placeholders without media, and for media if there is no vision ``tower``.
    """
    if vision is None:
        return None
    prompt_media = RequestMedia(media, prompt, vision)
    if not media:
        return None
    if tower is None:
        raise RequestError(
            "this engine was built without a vision tower; use Engine.from_checkpoint on a checkpoint with one or pass vision"
        )
    return prompt_media


def _spans(media: Sequence[Media], prompt: Sequence[int], vision: VisionConfig) -> tuple[range, ...]:
    """Return the indices of the placeholder tokens of each medium in the prompt."""
    spans: list[range] = []
    index = 0
    for each in media:
        while prompt[index] not in (vision.image_token, vision.video_token):
            index += 1
        spans.append(range(index, index + each.grid.features(vision)))
        index = spans[-1].stop
    return tuple(spans)


class FinishReason(StrEnum):
    """The reason why a request ended."""

    STOP = "stop"
    """The output ends with a stop token or completes a stop string."""
    LENGTH = "length"
    """The output has ``max_tokens`` tokens."""
    ABORT = "abort"
    """The caller aborted the request."""
    ERROR = "error"
    """The request failed, for example through a non-finite value on the device. ``error`` of the output gives the reason.

    All tokens of the output are valid.
    """
    HAND_OVER = "hand_over"
    """The caller handed the request over to another engine."""


@dataclass(slots=True)
class StepOutput:
    """The new tokens of one request after one iteration. Do not change it.

    The record isn't frozen: each request has one in each iteration, and a frozen one takes six times as long to create.
    """

    request_id: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    """None while the request continues."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each token if the request asks for log-probabilities, else empty."""
    searched_text: str | None = None
    """New text that no stop string can contain any more; None for a request without stop strings."""
    error: str | None = None
    """The reason for the finish reason ``error``."""
    drafted: int = 0
    """How many of ``tokens`` are accepted draft tokens; they come first."""
    proposed: int = 0
    """Maximum number of draft tokens that the target could accept; 0 without a draft, as for a request's first token."""
    refused: bool = False
    """True if the request's own options cause the error, so that a retry fails too."""
    busy: bool = False
    """True if the request was refused for the load at the time, so that a retry may succeed."""
    cached: int = 0
    """Number of prompt tokens that the prefix cache supplied; set in a request's first output."""
    stopped_by: str | int | None = None
    """The stop string or the token of ``stop_token_ids`` that ended the request; None for any other end."""
    transcript: Transcript | None = field(default=None, repr=False, compare=False)
    """The request's text; None without a tokenizer."""
    index: int = field(default=0, repr=False, compare=False)
    """Index of this output in ``transcript``, for :meth:`Transcript.read_text`."""

    @classmethod
    def of_error(cls, request_id: int, error: OutriderError) -> StepOutput:
        """Return the output of a request that ends with ``error`` before it runs."""
        busy = isinstance(error, BusyError)
        refused = isinstance(error, RequestError | ConfigError) and not busy
        return cls(request_id, (), FinishReason.ERROR, error=str(error), refused=refused, busy=busy)

    @property
    def text(self) -> str | None:
        """The new text that later tokens can't change, or None without a tokenizer. The last output has all that remains.

        It is decoded when it is read. The outputs of a request are read in one thread.
        """
        if self.searched_text is not None or self.transcript is None:
            return self.searched_text
        return self.transcript.read_text(self.index)


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a finished request."""

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    iterations: int
    """Number of target verifications. The prefill, which yields the first token, isn't one."""
    acceptance_length: float
    """Average number of tokens that a verification yields, including the token that the target decides itself."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each token if the request asks for log-probabilities, else empty."""
    text: str | None = None
    """The text, up to a stop string; None without a tokenizer."""
    error: str | None = None
    """The reason for the finish reason ``error``."""


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one request. Only the scheduler and the engine change it."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_tokens: frozenset[int]
    priority: int = 0
    media: RequestMedia | None = None
    """The images and videos of the prompt; None for a text prompt."""
    rope_key: int = 0
    """The result of :meth:`RopeConfig.sharing_key`. Prompts share pages only if their keys are equal."""
    output: list[int] = field(default_factory=list)
    context: tuple[int, ...] = ()
    """The tokens that prefill writes to the KV cache: the prompt, and after a preemption also the output so far."""
    row: int = 0
    pages: list[int] = field(default_factory=list)
    registered: int = 0
    """Number of leading pages that are registered in the prefix cache."""
    page_key: PageKey | None = None
    """The key of the last registered page."""
    decoded_state: DecodedState = field(default_factory=DecodedState)
    prefilled: int = 0
    """Number of context tokens whose prefill is launched or whose pages were cached."""
    prefill_start: int = 0
    """The first context token that needs prefill: the one after the cached prefix."""
    in_flight: int = 0
    """Number of launched iterations whose results the host hasn't handled. The scheduler maintains all three counts."""
    decodes_in_flight: int = 0
    """Number of iterations in flight that decode the request; each may add tokens."""
    tokens_in_flight: int = 0
    """Minimum number of tokens from iterations in flight: one for each decode and for the last prefill chunk."""
    iterations: int = 0
    verified_tokens: int = 0
    preemptions: int = 0
    group: int = 0
    """The data-parallel group that runs the request."""
    arrival: Arrival | None = None
    """State from another engine that isn't in this engine's caches yet."""
    is_prefill_only: bool = False
    """True if this engine only prefills the request and then lends its pages to another engine."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_text: StopText | None = None
    """The search for stop strings; None without stop strings."""
    guidance: Guidance | None = None
    """The grammar position after the output; None without a guide."""
    text: list[str] = field(default_factory=list)
    """The emitted pieces of text of a request with stop strings."""
    transcript: Transcript | None = None
    """The text of a request without stop strings; None without a tokenizer."""
    repeated_suffix: RepeatedSuffix = field(default_factory=RepeatedSuffix)
    acceptance: RequestAcceptance = field(default_factory=RequestAcceptance)
    """The acceptance of the request's own draft tokens, which the scheduler observes if the draft-length policy reads it."""
    followers: list[Request] = field(default_factory=list)
    """Other samples of the same prompt. The engine queues them once this request's prompt pages are registered."""

    def __post_init__(self) -> None:
        self.context = self.context or self.prompt

    @property
    def needs_prefill(self) -> bool:
        """Return True if the prefill of some context tokens isn't launched yet."""
        return self.prefilled < len(self.context)

    @property
    def is_ready_to_lend(self) -> bool:
        """Return True if the prefill has finished and the request waits until its pages are lent."""
        return self.is_prefill_only and not self.needs_prefill and not self.in_flight

    @property
    def mrope_position_delta(self) -> int:
        """Rope position minus sequence index of the tokens after a prompt with media; 0 for text."""
        return self.media.mrope_position_delta if self.media is not None else 0

    def extra_identity(self, start: int, end: int) -> object:
        """Return the extra identity of the tokens ``start`` to ``end``: rope key and media digests; None if there is none."""
        digests = self.media.digests(start, end) if self.media is not None else ()
        return (self.rope_key, digests) if self.rope_key or digests else None

    @property
    def finished(self) -> bool:
        """Return True if the request has a finish reason."""
        return self.finish_reason is not None

    @property
    def will_finish(self) -> bool:
        """Return True if the iterations in flight certainly reach ``max_tokens``."""
        return self._missing_tokens <= 0

    @property
    def _missing_tokens(self) -> int:
        """The number of tokens still missing to ``max_tokens`` if each iteration in flight adds its guaranteed minimum."""
        return self.params.max_tokens - len(self.output) - self.tokens_in_flight

    def chance_of_end(self, growth: int) -> float:
        """Return the probability that the iterations in flight reach ``max_tokens``, if each adds at most ``growth`` tokens.

        The estimate uses the request's average number of tokens per verification so far.
        """
        if self.will_finish:
            return 1.0
        if self._missing_tokens > self.decodes_in_flight * (growth - 1):
            return 0.0
        acceptance_length = self.verified_tokens / self.iterations if self.iterations else (1 + growth) / 2
        return float((1.0 - 1.0 / acceptance_length) ** self._missing_tokens)

    @property
    def scheduling_key(self) -> tuple[int, int]:
        """The sort key that puts urgent requests first: higher priority, then earlier arrival."""
        return (-self.priority, self.id)

    @property
    def known_length(self) -> int:
        """The number of tokens in the target's KV cache after the iterations that the host has handled.

        The last output token isn't cached.
        """
        return max(len(self.context), len(self.prompt) + len(self.output) - 1)

    @property
    def length_limit(self) -> int:
        """The maximum number of prompt and output tokens."""
        return len(self.prompt) + self.params.max_tokens

    def length_bound(self, growth: int) -> int:
        """Return the maximum KV length after all iterations in flight, if each adds ``growth`` tokens."""
        return self.known_length + self.decodes_in_flight * growth

    def append_tokens(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], proposed: int = 0) -> StepOutput:
        """Append ``tokens`` of one iteration up to a stop token, a stop string, the end of a guided text, or the limit.

        A token that the guide doesn't allow ends the request with an error. The last of ``tokens`` is the target's own; all
        others are accepted tokens of a draft with at most ``proposed`` tokens.
        """
        appended: list[int] = []
        guidance = self.guidance
        for token in tokens:
            violation = None if guidance is None else guidance.accept_token(token)
            if violation is not None:
                self.finish_reason, self.error = FinishReason.ERROR, f"request {self.id}: {violation}"
                break
            appended.append(token)
            has_stop_string = self.stop_text is not None and self.stop_text.push(token)
            if has_stop_string or token in self.stop_tokens or (guidance is not None and guidance.is_complete):
                self.finish_reason = FinishReason.STOP
                break
            if len(self.output) + len(appended) == self.params.max_tokens:
                self.finish_reason = FinishReason.LENGTH
                break
        self.output.extend(appended)
        appended_logprobs = tuple(logprobs[: len(appended)])
        self.logprobs.extend(appended_logprobs)
        text = self.new_text()  # can change the finish reason: the last bytes may complete a stop string
        ends_with_stop_token = self.finish_reason is FinishReason.STOP and appended and appended[-1] in self.stop_tokens
        return StepOutput(
            self.id,
            tuple(appended),
            self.finish_reason,
            appended_logprobs,
            text,
            self.error,
            transcript=self.transcript,
            index=self._transcribe(appended[:-1] if ends_with_stop_token else appended),
            drafted=min(len(appended), len(tokens) - 1, proposed),
            proposed=proposed,
            refused=self.finish_reason is FinishReason.ERROR,
            cached=self.prefill_start if len(self.output) == len(appended) and not self.preemptions else 0,
            stopped_by=self._stopped_by(),
        )

    def finish(self, reason: FinishReason, error: str | None = None) -> StepOutput:
        """Set the finish reason and return the last output. Tokens so far stay valid."""
        self.finish_reason, self.error = reason, error
        text = self.new_text()
        index = self._transcribe(())
        return StepOutput(self.id, (), reason, searched_text=text, error=error, transcript=self.transcript, index=index)

    def _transcribe(self, tokens: Sequence[int]) -> int:
        """Append the tokens of an output to the request's transcript and return the index of the output there; 0 without a
        transcript.
        """
        return 0 if self.transcript is None else self.transcript.append(tokens, is_last=self.finished)

    def _stopped_by(self) -> str | int | None:
        """Return the client's stop string or stop token that ended the output; None if something else ended it."""
        if self.finish_reason is not FinishReason.STOP:
            return None
        if self.stop_text is not None and self.stop_text.matched is not None:
            return self.stop_text.matched
        return self.output[-1] if self.output[-1] in self.params.stop_token_ids else None

    def new_text(self) -> str | None:
        """Return new text that no stop string can contain any more; None for a request without stop strings.

        After the end of the request this is all remaining text. The remaining text can complete a stop string.
        """
        stop_text = self.stop_text
        if stop_text is None:
            return None
        if self.finished and stop_text.finish() and self.finish_reason is FinishReason.LENGTH:
            self.finish_reason = FinishReason.STOP
        text = stop_text.pop_certain_text()
        self.text.append(text)
        return text

    def state_fields(self) -> dict[str, Any]:
        """Return the fields of the request's :class:`~outrider.engine.requests.hand_over.RequestState`, by name."""
        return {
            "prompt": self.prompt,
            "params": self.params,
            "output": tuple(self.output),
            "priority": self.priority,
            "media": self.media.media if self.media is not None else (),
            "logprobs": tuple(self.logprobs),
            "iterations": self.iterations,
            "verified_tokens": self.verified_tokens,
        }

    def completion(self) -> Completion:
        """Return the result of a finished request."""
        assert self.finish_reason is not None
        length = self.verified_tokens / self.iterations if self.iterations else 0.0
        text = "".join(self.text) if self.stop_text is not None else None
        if self.transcript is not None:
            text = self.transcript.read_all()
        return Completion(
            self.id, tuple(self.output), self.finish_reason, self.iterations, length, tuple(self.logprobs), text, self.error
        )


class RequestFailed(OutriderError):
    """Raised if one request of a batch failed. The request ends with an error, and the other requests continue."""

    def __init__(self, request: Request, error: Exception) -> None:
        super().__init__(f"request {request.id}: {type(error).__name__}: {error}")
        self.request = request


class OutputQueue:
    """Queues of step outputs that no caller has received yet.

    A request that a stream or ``generate`` reads has a separate queue. All other requests use the shared queue.
    """

    def __init__(self) -> None:
        self._shared: list[StepOutput] = []
        self._queues: dict[int, deque[StepOutput]] = {}

    @property
    def has_outputs(self) -> bool:
        """Return True if the shared queue has outputs."""
        return bool(self._shared)

    def open(self, request_id: int) -> deque[StepOutput]:
        """Return the request's separate queue, created if needed. It lasts until :meth:`close` or :meth:`release`."""
        return self._queues.setdefault(request_id, deque())

    def close(self, request_id: int) -> None:
        """Drop the request's separate queue and its contents. Does nothing for a request without one."""
        self._queues.pop(request_id, None)

    def put(self, output: StepOutput) -> None:
        """Append an output to the separate queue of its request, or else to the shared queue."""
        queue = self._queues.get(output.request_id)
        if queue is None:
            self._shared.append(output)
        else:
            queue.append(output)

    def pop_outputs(self) -> list[StepOutput]:
        """Return and remove all outputs of the shared queue, in order."""
        outputs, self._shared = self._shared, []
        return outputs

    def release(self, request_id: int) -> None:
        """Move the outputs of the request's separate queue to the shared queue and drop the separate queue."""
        self._shared.extend(self._queues.pop(request_id, ()))


class RequestStream(Iterator[StepOutput]):
    """The outputs of one request, in order, from its separate queue. Other streams, ``generate`` and ``step`` skip them.

    ``next`` raises the error of an iteration. The caller may read on if the engine still works.
    """

    def __init__(
        self,
        request: Request,
        outputs: deque[StepOutput],
        *,
        advance: Callable[[], None],
        close: Callable[[Request], None],
    ) -> None:
        """Create the stream of one request.

        ``advance`` runs one iteration of the engine. ``close`` ends the request if needed; it is called once, after the last
        output, by :meth:`close` or at garbage collection.
        """
        self._request = request
        self._outputs = outputs
        self._advance = advance
        self._close: Callable[[Request], None] | None = close

    @property
    def request_id(self) -> int:
        """The request's id, for :meth:`Engine.abort`."""
        return self._request.id

    def __next__(self) -> StepOutput:
        while self._close is not None and not self._outputs:
            if self._request.finished:
                self.close()
            else:
                self._advance()
        if self._close is None:
            raise StopIteration
        return self._outputs.popleft()

    def close(self) -> None:
        """End the request unless it has ended, and drop its unread outputs. Further calls do nothing."""
        close, self._close = self._close, None
        if close is not None:
            close(self._request)

    def __del__(self) -> None:
        with suppress(Exception):  # no caller could handle the exception
            self.close()
