"""Requests: what a caller asks for, what it gets, and what the engine remembers in between."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from outrider.device import ConfigError
from outrider.engine.pages import PageKey


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """A stop token was generated; it is the last of the output."""
    LENGTH = "length"
    """``max_tokens`` were generated."""
    ABORT = "abort"
    """The caller aborted it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen, validated when made.

    ``temperature`` 0 is greedy. The same ``seed`` gives the same draws at the same positions, whatever else runs. A token
    of ``stop_token_ids``, or of the model's end-of-sequence tokens unless ``ignore_eos``, ends the request.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, int) or isinstance(self.max_tokens, bool) or self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens!r}; expected a whole number of at least 1")
        if not isinstance(self.temperature, (int, float)) or not math.isfinite(self.temperature) or self.temperature < 0:
            raise ConfigError(f"temperature is {self.temperature!r}; expected a finite number of at least 0")
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed!r}; expected a whole number that fits in 64 bits")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """New tokens of one request. ``finish_reason`` is None while the request goes on."""

    request_id: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. ``acceptance_length``: tokens that a target verification yielded on average, the decided one
    included; ``iterations``: how many verifications that took. Prefill, which yields the first token, counts in neither.
    """

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    iterations: int
    acceptance_length: float


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
    output: list[int] = field(default_factory=list)
    context: tuple[int, ...] = ()
    row: int = 0
    pages: list[int] = field(default_factory=list)
    registered: int = 0
    """Leading pages that the prefix cache knows, the last under ``page_key``."""
    page_key: PageKey | None = None
    prefilled: int = 0
    """Tokens of the context whose prefill was launched, or that a prefix hit brought."""
    in_flight: int = 0
    """Launched iterations whose results the host hasn't handled."""
    decodes_in_flight: int = 0
    """Those among them that decode: each may have grown the request."""
    iterations: int = 0
    verified_tokens: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.context = self.context or self.prompt

    @property
    def needs_prefill(self) -> bool:
        """Whether tokens of the context remain to be launched."""
        return self.prefilled < len(self.context)

    @property
    def finished(self) -> bool:
        """Whether the output is complete."""
        return self.finish_reason is not None

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

    def completion(self) -> Completion:
        """The result, once finished."""
        assert self.finish_reason is not None
        length = self.verified_tokens / self.iterations if self.iterations else 0.0
        return Completion(self.id, tuple(self.output), self.finish_reason, self.iterations, length)
