"""Requests: what a caller asks for, what it gets, and what the engine remembers in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from outrider.device import OutriderError
from outrider.engine.requests.guidance import Guidance
from outrider.engine.requests.hand_over import HandOver
from outrider.engine.requests.lent import Arrived
from outrider.engine.requests.logprobs import TokenLogprobs
from outrider.engine.requests.media import RequestMedia
from outrider.engine.requests.pages import PageKey
from outrider.engine.requests.sampling import SamplingParams
from outrider.engine.requests.text import StopText


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """A stop token was generated, which is the last of the output, or a stop string was completed."""
    LENGTH = "length"
    """``max_tokens`` were generated."""
    ABORT = "abort"
    """The caller aborted it."""
    ERROR = "error"
    """The request failed: a bad value on the device, or something that couldn't be read. The output says what; the tokens
    before it are valid."""
    HAND_OVER = "hand_over"
    """The caller took it out, for another engine to go on with."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """New tokens of one request. ``finish_reason`` is None while the request goes on.

    ``logprobs``: one for each token, where the request asked for them. ``text``: what has become certain of the text of a
    request with stop strings; None for other requests. ``error``: what was found, with the finish reason ``error``.

    ``drafted``: how many of ``tokens``, the first ones, a draft had proposed and the target accepted. ``proposed``: tokens
    that the draft could have had accepted at most; 0 where none was drafted, as for the first token of a request.
    """

    request_id: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    text: str | None = None
    error: str | None = None
    drafted: int = 0
    proposed: int = 0
    refused: bool = False
    """Whether the error is of what the request asks for: it would come again."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. ``acceptance_length``: tokens that a target verification yielded on average, the decided one
    included; ``iterations``: how many verifications that took. Prefill, which yields the first token, counts in neither.
    ``logprobs``: one for each token, where asked for. ``text``: that of a request with stop strings, up to the string.
    ``error``: what was found, with the finish reason ``error``.
    """

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    iterations: int
    acceptance_length: float
    logprobs: tuple[TokenLogprobs, ...] = ()
    text: str | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one request; only the scheduler and the engine change it.

    ``context`` is what prefill puts into the cache: the prompt, and after a preemption the output so far as well.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_tokens: frozenset[int]
    priority: int = 0
    media: RequestMedia | None = None
    """Images and videos of the prompt; None for text alone."""
    rope_key: int = 0
    """Prompts share pages only where this is equal (:meth:`RopeConfig.sharing_key`)."""
    output: list[int] = field(default_factory=list)
    context: tuple[int, ...] = ()
    row: int = 0
    pages: list[int] = field(default_factory=list)
    registered: int = 0
    """Leading pages that the prefix cache knows, the last under ``page_key``."""
    page_key: PageKey | None = None
    prefilled: int = 0
    """Tokens of the context whose prefill was launched, or that a prefix hit brought."""
    prefill_start: int = 0
    """Where the prefill of the context began: behind the prefix hit."""
    in_flight: int = 0
    """Launched iterations whose results the host hasn't handled; the scheduler counts."""
    decodes_in_flight: int = 0
    """Those among them that decode: each may have grown the request."""
    tokens_in_flight: int = 0
    """Tokens that those yield at least: one for each that decodes, and for the last chunk of a context."""
    iterations: int = 0
    verified_tokens: int = 0
    preemptions: int = 0
    group: int = 0
    """The data-parallel group that it runs in."""
    arrival: HandOver | Arrived | None = None
    """What another engine computed of it, until that is in the cache."""
    lends: bool = False
    """It doesn't decode here: once its context is prefilled it rests, until it's lent to another engine."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_text: StopText | None = None
    """Watches for stop strings; None without any."""
    guidance: Guidance | None = None
    """What its guide allows behind the output so far; None without a guide."""
    text: list[str] = field(default_factory=list)
    """Pieces of text, of a request with stop strings."""
    followers: list[Request] = field(default_factory=list)
    """Other samples of the prompt, which wait for its pages."""

    def __post_init__(self) -> None:
        self.context = self.context or self.prompt

    @property
    def needs_prefill(self) -> bool:
        """Whether tokens of the context remain to be launched."""
        return self.prefilled < len(self.context)

    @property
    def rests(self) -> bool:
        """Whether there is nothing to launch for it, nor to wait for: it waits to be lent."""
        return self.lends and not self.needs_prefill and not self.in_flight

    @property
    def mrope_position_delta(self) -> int:
        """What positions on three axes are ahead of the index, behind the prompt."""
        return self.media.mrope_position_delta if self.media is not None else 0

    def besides_tokens(self, start: int, end: int) -> object:
        """What keys and values of the tokens ``start`` to ``end`` depend on besides tokens: media, and the rope's state."""
        digests = self.media.digests(start, end) if self.media is not None else ()
        return (self.rope_key, digests) if self.rope_key or digests else None

    @property
    def finished(self) -> bool:
        """Whether the output is complete."""
        return self.finish_reason is not None

    @property
    def will_finish(self) -> bool:
        """Whether the iterations in flight are sure to complete the output: none that is launched behind them adds to it."""
        return self._unsure <= 0

    @property
    def _unsure(self) -> int:
        """Tokens up to the limit that the iterations in flight aren't sure to bring."""
        return self.params.max_tokens - len(self.output) - self.tokens_in_flight

    def chance_of_end(self, growth: int) -> float:
        """How likely the iterations in flight complete the output, where one adds ``growth`` tokens at most: that a token is
        followed by another one in its iteration is as likely as it was so far.
        """
        if self.will_finish:
            return 1.0
        if self._unsure > self.decodes_in_flight * (growth - 1):
            return 0.0
        usual = self.verified_tokens / self.iterations if self.iterations else (1 + growth) / 2
        return float((1.0 - 1.0 / usual) ** self._unsure)

    @property
    def urgency(self) -> tuple[int, int]:
        """Sorts requests, most urgent first: by priority, then by arrival."""
        return (-self.priority, self.id)

    @property
    def known_length(self) -> int:
        """Tokens in the target's cache as of the results that the host has handled (the last output isn't cached)."""
        return max(len(self.context), len(self.prompt) + len(self.output) - 1)

    @property
    def length_limit(self) -> int:
        """Tokens that the request has at its longest."""
        return len(self.prompt) + self.params.max_tokens

    def length_bound(self, growth: int) -> int:
        """The most tokens that can be in the cache once all launched iterations have run, each growing by ``growth``."""
        return self.known_length + self.decodes_in_flight * growth

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], proposed: int = 0) -> StepOutput:
        """Append tokens up to the first stop token, the one that completes a stop string or a guided text, or the limit. A
        token that the guide doesn't allow ends the request with an error. All but the last of ``tokens`` are from a draft of
        at most ``proposed``.
        """
        taken: list[int] = []
        guidance = self.guidance
        for token in tokens:
            refused = None if guidance is None else guidance.take(token)
            if refused is not None:
                self.finish_reason, self.error = FinishReason.ERROR, f"request {self.id}: {refused}"
                break
            taken.append(token)
            said = self.stop_text is not None and self.stop_text.push(token)
            if said or token in self.stop_tokens or (guidance is not None and guidance.over):
                self.finish_reason = FinishReason.STOP
                break
            if len(self.output) + len(taken) == self.params.max_tokens:
                self.finish_reason = FinishReason.LENGTH
                break
        self.output.extend(taken)
        kept = tuple(logprobs[: len(taken)])
        self.logprobs.extend(kept)
        text = self.new_text()  # may find a stop string at the very end
        drafted = min(len(taken), len(tokens) - 1, proposed)
        ended = self.finish_reason
        return StepOutput(
            self.id,
            tuple(taken),
            ended,
            kept,
            text,
            self.error,
            drafted=drafted,
            proposed=proposed,
            refused=ended is FinishReason.ERROR,
        )

    def end(self, reason: FinishReason, error: str | None = None) -> StepOutput:
        """End the request; its output so far stays valid."""
        self.finish_reason, self.error = reason, error
        return StepOutput(self.id, (), reason, text=self.new_text(), error=error)

    def new_text(self) -> str | None:
        """New text of a request with stop strings; the rest once it has finished, which may complete one more stop string."""
        watch = self.stop_text
        if watch is None:
            return None
        if self.finished and watch.finish() and self.finish_reason is FinishReason.LENGTH:
            self.finish_reason = FinishReason.STOP
        text = watch.take()
        self.text.append(text)
        return text

    def completion(self) -> Completion:
        """The result, once finished."""
        assert self.finish_reason is not None
        length = self.verified_tokens / self.iterations if self.iterations else 0.0
        text = "".join(self.text) if self.stop_text is not None else None
        return Completion(
            self.id, tuple(self.output), self.finish_reason, self.iterations, length, tuple(self.logprobs), text, self.error
        )


class RequestFailed(OutriderError):
    """One request of a batch failed. It ends with an error; the others go on."""

    def __init__(self, request: Request, error: Exception) -> None:
        super().__init__(f"request {request.id}: {type(error).__name__}: {error}")
        self.request = request
