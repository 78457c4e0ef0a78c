"""SamplingParams: how a request's tokens are chosen, validated when made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.device import ConfigError
from outrider.engine.requests.guides import Guide
from outrider.errors import shown

MAX_LOGIT_BIAS = 300
"""Entries of a request's bias list, bans for ``min_tokens`` included."""
MAX_SAMPLES = 1024
"""Samples of one prompt."""
MAX_STOPS = 1024
"""Stop tokens, and stop strings, of a request."""
_LARGEST, _SMALLEST, _LARGEST_BIAS = 2.0**32, 2.0**-32, 2.0**64
"""The device computes in float32. Within these, a logit of any model stays finite with all options at their extremes: biased,
penalised and divided by the temperature."""
_RANGE = "from 2**-32 to 2**32"
_MOST_INT = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen, validated when made.

    ``temperature`` 0 is greedy. The same ``seed`` gives the same draws at the same positions, whatever else runs. A token
    of ``stop_token_ids``, or of the model's end-of-sequence tokens unless ``ignore_eos``, ends the request; none of these
    is generated before ``min_tokens`` others.

    The model's logits are changed in this order: ``logit_bias``; penalties; temperature; ``top_k``; ``top_p``; ``min_p``.
    ``logit_bias`` maps tokens to what is added (-inf bans); it is kept as pairs in order of the tokens.
    ``repetition_penalty`` divides positive logits of tokens in the prompt or the output and multiplies negative ones;
    ``presence_penalty`` is subtracted from logits of tokens in the output, ``frequency_penalty`` once for each time.
    ``top_k`` 0 keeps all; ``top_p`` in (0, 1]; ``min_p`` in [0, 1], a share of the likeliest token's probability. The
    last three matter only at a temperature above 0.

    ``stop``: strings that end the request; the text ends before the string, the tokens with the one that completes it.
    (A stop token gives no text.) Those that begin in the first ``min_tokens`` are overlooked. ``logprobs``: report for each
    token its log-probability and those of that many likeliest tokens, of the model's own distribution: before biases,
    penalties and temperature. None: don't. ``n``: samples of the prompt, each with a seed of its own made from ``seed``;
    the first has ``seed``, ``n`` at most :data:`MAX_SAMPLES`.

    ``guide``: what the text must be (:mod:`outrider.engine.requests.guides`). Tokens that don't fit have no probability, in
    drafts and elsewhere, before all other options; log-probabilities are the model's own all the same. An end-of-sequence
    token comes only where the text is complete, with ``ignore_eos`` or before ``min_tokens`` only where nothing else may
    come; the request ends with it.

    Numbers are checked against what the device can compute with: a positive temperature, repetition penalty or share is from
    2**-32 to 2**32, a bias at most 2**64, a whole number at most 2**31 - 1 (``seed``: 64 bits).
    """

    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    n: int = 1
    guide: Guide | None = None

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, _MOST_INT)
        _check_float("temperature", self.temperature, f"0, or a number {_RANGE}", lambda x: x == 0 or _within(x))
        if not _is_int(self.seed) or not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed is {shown(self.seed)}; expected a whole number that fits in 64 bits")
        _check_int("top_k", self.top_k, 0, _MOST_INT)
        _check_float("top_p", self.top_p, "a number above 0, at most 1", lambda x: x <= 1 and _within(x))
        _check_float("min_p", self.min_p, "a number from 0 to 1", lambda x: x == 0 or (x <= 1 and _within(x)))
        _check_float("repetition_penalty", self.repetition_penalty, f"a number {_RANGE}", _within)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_float(name, getattr(self, name), "a number from -2 to 2", lambda x: -2 <= x <= 2)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens, " (max_tokens)")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, _MOST_INT)
        _check_int("n", self.n, 1, MAX_SAMPLES)
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(f"n is {self.n} at temperature 0, which gives the same sample each time; raise the temperature")
        for name in ("ignore_eos",):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; expected True or False")
        if self.guide is not None and (not isinstance(self.guide, Guide) or type(self.guide) is Guide):
            raise ConfigError(
                f"guide is {shown(self.guide)}; expected JsonSchema, JsonObject, Regex, Ebnf or Choice of outrider.engine"
            )
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as pairs of a token and what is added."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0

    @property
    def biased(self) -> bool:
        """Whether some tokens' logits have something added."""
        return bool(self.logit_bias) or self.min_tokens > 0

    @property
    def penalized(self) -> bool:
        """Whether a penalty isn't neutral."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def truncated(self) -> bool:
        """Whether tokens are dropped from the distribution."""
        return self.samples and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def sample(self, index: int) -> SamplingParams:
        """The parameters of one of the ``n`` samples: ``n`` 1 and a seed of its own."""
        return replace(self, n=1, seed=derived_seed(self.seed, index))


def derived_seed(seed: int, index: int) -> int:
    """The seed of sample ``index``: ``seed`` itself for 0, else a 64-bit mix of both (SplitMix64's finalizer, Steele et
    al. 2014; a bijection of the seed for each index, so different seeds keep different samples).
    """
    if index == 0:
        return seed
    mask = 2**64 - 1
    mixed = (seed + index * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _within(value: float) -> bool:
    """Whether a positive number is within what the device can compute with."""
    return _SMALLEST <= value <= _LARGEST


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


def _token_ids(given: object) -> tuple[int, ...]:
    if isinstance(given, Sequence) and not isinstance(given, str) and all(_is_int(token) for token in given[: MAX_STOPS + 1]):
        found = tuple(dict.fromkeys(given[: MAX_STOPS + 1]))
        if len(found) <= MAX_STOPS:
            return found
    raise ConfigError(f"stop_token_ids is {shown(given)}; expected whole numbers, {MAX_STOPS} at most")


def _strings(given: object) -> tuple[str, ...]:
    strings = (given,) if isinstance(given, str) else given
    if isinstance(strings, Sequence) and all(isinstance(text, str) and text for text in strings[: MAX_STOPS + 1]):
        found = tuple(dict.fromkeys(strings[: MAX_STOPS + 1]))
        if len(found) <= MAX_STOPS:
            return found
    raise ConfigError(f"stop is {shown(given)}; expected strings that aren't empty, {MAX_STOPS} at most")


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    wrong = ConfigError(
        f"logit_bias is {shown(given)}; expected token ids with numbers of at most 2**64, or -inf to ban a token"
    )
    if not isinstance(pairs, Sequence) or isinstance(pairs, str):
        raise wrong
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2 or not _is_int(pair[0]) or pair[0] < 0 or pair[0] in found:
            raise wrong
        value = pair[1]
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not (abs(value) <= _LARGEST_BIAS or value == -math.inf)
        ):
            raise wrong
        found[pair[0]] = float(value)
    return tuple(sorted(found.items()))
