"""Options of a request: how the engine chooses its tokens (:class:`SamplingParams`), and where its text ends.

The engine searches the text for stop strings (:class:`StopText`), or keeps the tokens of the text (:class:`Transcript`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, AnyStr

from outrider.device import ConfigError
from outrider.engine.guides.guides import GUIDES, Guide
from outrider.errors import shown

if TYPE_CHECKING:
    from outrider.model import StreamDecoder, Tokenizer

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
            names = ", ".join(each.__name__ for each in GUIDES)
            raise ConfigError(f"guide is {shown(self.guide)}; expected a guide of outrider.engine: {names}")
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
        if self.n == 1 and index == 0:
            return self
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


class StopText:
    """The text of one request, which ends before the first stop string.

    The end of the text is held back while it may be the start of a stop string. A character that several tokens encode
    becomes part of the text with its last token.
    """

    def __init__(self, decoder: StreamDecoder, stops: Sequence[str], *, overlook: int = 0) -> None:
        """Create the search for stop strings. No stop string may begin in the text of the first ``overlook`` tokens."""
        self._decoder = decoder
        self._stops = tuple(stops)
        self._overlook = overlook
        self._num_tokens = 0
        self._held = ""
        self._ready = ""
        self.matched: str | None = None
        """The stop string that ended the text; None while there is none."""

    def push(self, token: int) -> bool:
        """Add a token and return True if a stop string is complete. The text after the stop string is dropped."""
        self._num_tokens += 1
        self._add(self._decoder.push(token))
        return self.matched is not None

    def finish(self) -> bool:
        """Release the text that is held back, at the end of the request. Return True if the released text contains a stop
        string.
        """
        if self.matched is None:
            self._add(self._decoder.flush())
            if self.matched is None:
                self._release(len(self._held))
        return self.matched is not None

    def pop_certain_text(self) -> str:
        """Return the text that became certain since the last call: no stop string can contain it any more."""
        text, self._ready = self._ready, ""
        return text

    def _add(self, piece: str) -> None:
        self._held += piece
        if self._num_tokens <= self._overlook:
            self._release(len(self._held))
            return
        found = [(start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            start, self.matched = min(found)
            self._release(start)
            self._held = ""
        else:
            self._release(len(self._held) - partial_match_length(self._held, self._stops))

    def _release(self, count: int) -> None:
        self._ready, self._held = self._ready + self._held[:count], self._held[count:]


def partial_match_length(text: AnyStr, literals: Sequence[AnyStr]) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of one of ``literals``.

    The text contains none of the literals as a whole.
    """
    longest = min(max(map(len, literals), default=1) - 1, len(text))
    suffixes = (text[len(text) - size :] for size in range(longest, 0, -1))
    return next((len(suffix) for suffix in suffixes if any(literal.startswith(suffix) for literal in literals)), 0)


def watch_stop_strings(
    tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int], output: Sequence[int] = ()
) -> StopText:
    """Return a :class:`StopText` for the stop strings of ``params`` that has read the request's ``output`` so far."""
    stop_text = StopText(
        tokenizer.stream(spelled=params.spelled_tokens, prompt=prompt), params.stop, overlook=params.min_tokens
    )
    for token in output:
        stop_text.push(token)
    return stop_text


class Transcript:
    """The tokens of a request's outputs in order, and their text.

    The engine appends in its thread without decoding. One reader, in any thread, decodes: text costs only what is read.
    """

    def __init__(self, make_decoder: Callable[[], StreamDecoder]) -> None:
        self._make_decoder = make_decoder
        self._decoder: StreamDecoder | None = None
        self._outputs: list[tuple[Sequence[int], bool]] = []
        self._texts: list[str] = []

    def append(self, tokens: Sequence[int], *, is_last: bool) -> int:
        """Append the tokens of one output and return the index of the output. ``is_last`` marks the request's last output."""
        self._outputs.append((tokens, is_last))
        return len(self._outputs) - 1

    def read_text(self, index: int) -> str:
        """Return the text that became certain with the output ``index``; all that remains with the last one."""
        decoder = self._decoder = self._decoder or self._make_decoder()
        while len(self._texts) <= index:
            tokens, is_last = self._outputs[len(self._texts)]
            text = decoder.push(*tokens) if tokens else ""
            self._texts.append(text + decoder.flush() if is_last else text)
        return self._texts[index]

    def read_all(self) -> str:
        """Return the text of all outputs so far."""
        return "".join(self.read_text(index) for index in range(len(self._outputs)))
