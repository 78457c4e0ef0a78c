"""SamplingParams: the validated options that control how the engine chooses a request's tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.device import ConfigError
from outrider.engine.guides.guides import Guide
from outrider.errors import shown

MAX_LOGIT_BIAS = 300
"""Maximum number of bias entries of a request, including the stop tokens that ``min_tokens`` bans."""
MAX_SAMPLES = 1024
"""Maximum number of samples of one prompt."""
MAX_STOPS = 1024
"""Maximum number of stop tokens, of spelled tokens and of stop strings of a request."""
_MAX_FACTOR, _MIN_FACTOR, _MAX_BIAS = 2.0**32, 2.0**-32, 2.0**64
"""Limits within which float32 logits stay finite, even if a request combines all options at their extremes."""
_FACTOR_RANGE = "from 2**-32 to 2**32"
_MAX_INT = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The options that control how the engine chooses a request's tokens. Raises :class:`ConfigError` for invalid values.

    The engine changes the model's logits in this order: grammar mask, ``logit_bias``, penalties, temperature, ``top_k``,
    ``top_p``, ``min_p``. The limits keep float32 logits finite: positive temperatures, repetition penalties and shares are
    from 2**-32 to 2**32, biases at most 2**64, whole numbers at most 2**31 - 1.
    """

    max_tokens: int = 64
    """Maximum number of generated tokens."""
    temperature: float = 0.0
    """Divisor of the logits before sampling; 0 is greedy decoding."""
    seed: int = 0
    """A 64-bit random seed. The same seed gives the same draws at the same positions, independent of other requests."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request, in addition to the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """If True, end-of-sequence tokens of the model don't end the request."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens with this total probability, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens below this share of the likeliest token's probability, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in the prompt or the output."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output, once for each occurrence."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """Values added to the logits of tokens; -inf bans a token. Stored as pairs in ascending order of the tokens."""
    min_tokens: int = 0
    """The engine generates no stop token among the first ``min_tokens`` tokens and ignores stop strings that begin there."""
    stop: tuple[str, ...] = ()
    """Strings that end the request. The text ends before the string, the tokens with the one that completes it.

    Stop tokens add no text.
    """
    spelled_tokens: tuple[int, ...] = ()
    """Special tokens whose spelling is part of the text that stop strings end. Other special tokens have no text."""
    logprobs: int | None = None
    """Number of likeliest tokens to report with each token's log-probability; None: report no log-probabilities.

    Log-probabilities are those of the model's logits before masks, biases, penalties and temperature.
    """
    n: int = 1
    """Number of samples of the prompt, at most :data:`MAX_SAMPLES`. Sample 0 has ``seed``, the others derived seeds."""
    guide: Guide | None = None
    """A constraint on the whole text (:mod:`outrider.engine.guides.guides`).

    Tokens that violate the guide have probability 0, also in drafts. The engine allows an end-of-sequence token only after
    a complete text. With ``ignore_eos``, or before ``min_tokens``, it allows the token only if the guide allows no other.
    The request ends with this token.
    """

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, _MAX_INT)
        _check_float("temperature", self.temperature, f"0, or a number {_FACTOR_RANGE}", lambda x: x == 0 or _in_range(x))
        if not _is_int(self.seed) or not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed is {shown(self.seed)}; expected a whole number that fits in 64 bits")
        _check_int("top_k", self.top_k, 0, _MAX_INT)
        _check_float("top_p", self.top_p, "a number above 0, at most 1", lambda x: x <= 1 and _in_range(x))
        _check_float("min_p", self.min_p, "a number from 0 to 1", lambda x: x == 0 or (x <= 1 and _in_range(x)))
        _check_float("repetition_penalty", self.repetition_penalty, f"a number {_FACTOR_RANGE}", _in_range)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_float(name, getattr(self, name), "a number from -2 to 2", lambda x: -2 <= x <= 2)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens, " (max_tokens)")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, _MAX_INT)
        _check_int("n", self.n, 1, MAX_SAMPLES)
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(f"n is {self.n} at temperature 0, which gives the same sample each time; raise the temperature")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos is {shown(self.ignore_eos)}; expected True or False")
        if self.guide is not None and (not isinstance(self.guide, Guide) or type(self.guide) is Guide):
            raise ConfigError(
                f"guide is {shown(self.guide)}; expected JsonSchema, JsonObject, Regex, Ebnf or Choice of outrider.engine"
            )
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "spelled_tokens", _token_ids(self.spelled_tokens, "spelled_tokens"))
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The pairs (token, added value) of ``logit_bias``."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def samples(self) -> bool:
        """Return True if the engine samples tokens instead of taking the likeliest one."""
        return self.temperature > 0

    @property
    def biased(self) -> bool:
        """Return True if biases, or bans for ``min_tokens``, change logits."""
        return bool(self.logit_bias) or self.min_tokens > 0

    @property
    def penalized(self) -> bool:
        """Return True if a repetition, presence or frequency penalty changes logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def truncated(self) -> bool:
        """Return True if top-k, top-p or min-p drops tokens from the distribution."""
        return self.samples and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def sample(self, index: int) -> SamplingParams:
        """Return the parameters of sample ``index``: ``n`` is 1, and the seed is derived."""
        return replace(self, n=1, seed=derived_seed(self.seed, index))


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of sample ``index``: ``seed`` for index 0, else a 64-bit mix of both.

    The mix is SplitMix64's finalizer (Steele et al. 2014). For each index it is a bijection of the seed, so that different
    seeds give different samples.
    """
    if index == 0:
        return seed
    mask = 2**64 - 1
    mixed = (seed + index * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _in_range(value: float) -> bool:
    return _MIN_FACTOR <= value <= _MAX_FACTOR


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(name: str, value: int, least: int, most: int | None = None, why: str = "") -> None:
    if not _is_int(value) or value < least or (most is not None and value > most):
        above = f"at least {least}" if most is None else f"{least} to {most}{why}"
        raise ConfigError(f"{name} is {shown(value)}; expected a whole number of {above}")


def _check_float(name: str, value: float, expected: str, valid: Callable[[float], bool]) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or (isinstance(value, float) and not math.isfinite(value)) or not valid(value):
        raise ConfigError(f"{name} is {shown(value)}; expected {expected}")


def _distinct_stops(stops: object, is_valid: Callable[[Any], bool]) -> tuple[Any, ...] | None:
    """Return ``stops`` without repetitions, or None if they aren't at most :data:`MAX_STOPS` valid ones."""
    if not isinstance(stops, Sequence) or not all(is_valid(stop) for stop in stops[: MAX_STOPS + 1]):
        return None
    distinct = tuple(dict.fromkeys(stops[: MAX_STOPS + 1]))
    return distinct if len(distinct) <= MAX_STOPS else None


def _token_ids(tokens: object, name: str = "stop_token_ids") -> tuple[int, ...]:
    distinct = None if isinstance(tokens, str) else _distinct_stops(tokens, _is_int)
    if distinct is None:
        raise ConfigError(f"{name} is {shown(tokens)}; expected whole numbers, {MAX_STOPS} at most")
    return distinct


def _strings(strings: object) -> tuple[str, ...]:
    listed = (strings,) if isinstance(strings, str) else strings
    distinct = _distinct_stops(listed, lambda text: isinstance(text, str) and bool(text))
    if distinct is None:
        raise ConfigError(f"stop is {shown(strings)}; expected strings that aren't empty, {MAX_STOPS} at most")
    return distinct


def _biases(logit_bias: object) -> tuple[tuple[int, float], ...]:
    pairs = list(logit_bias.items()) if isinstance(logit_bias, Mapping) else logit_bias
    error = ConfigError(
        f"logit_bias is {shown(logit_bias)}; expected token ids with numbers of at most 2**64, or -inf to ban a token"
    )
    if not isinstance(pairs, Sequence) or isinstance(pairs, str):
        raise error
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2 or not _is_int(pair[0]) or pair[0] < 0 or pair[0] in biases:
            raise error
        value = pair[1]
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not (abs(value) <= _MAX_BIAS or value == -math.inf)
        ):
            raise error
        biases[pair[0]] = float(value)
    return tuple(sorted(biases.items()))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities of one emitted token and of the likeliest tokens at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens as pairs (token, log-probability), the likeliest first."""
