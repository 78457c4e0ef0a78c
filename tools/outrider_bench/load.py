"""Loads of requests: random lengths, answers that arrive in parts, and the latencies that users see."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from outrider.device.errors import ConfigError

if TYPE_CHECKING:
    from outrider.engine.engine import Engine


LENGTHS = ("uniform", "log-normal")
"""Distributions of the lengths of a load."""
_PROMPT_MEDIAN, _PROMPT_SIGMA = 350, 1.0
_OUTPUT_MEDIAN, _OUTPUT_SIGMA = 160, 0.8
"""Medians in tokens of log-normal lengths, and the standard deviations of their logarithms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedLoad:
    """A load of requests that arrive at once, with independent random lengths of prompts and outputs."""

    requests: int
    seed: int
    prompts: tuple[int, int] = (32, 1036)
    """Minimum and maximum number of tokens of a prompt, both included."""
    outputs: tuple[int, int] = (16, 400)
    """Minimum and maximum number of tokens of an output, both included."""
    distribution: str = "uniform"
    """Distribution of the lengths, one of :data:`LENGTHS`. Log-normal lengths are rounded into the two ranges."""

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ConfigError(f"a load of {self.requests} requests; expected at least 1")
        for name, (least, most) in (("prompts", self.prompts), ("outputs", self.outputs)):
            if not 1 <= least <= most:
                raise ConfigError(f"{name} of {least} to {most} tokens; expected at least 1, the smaller number first")

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """The prompt length and the output length of each request, in tokens."""
        generator = random.Random(self.seed)
        if self.distribution == "log-normal":
            prompts = self._log_normal(generator, _PROMPT_MEDIAN, _PROMPT_SIGMA, self.prompts)
            return list(zip(prompts, self._log_normal(generator, _OUTPUT_MEDIAN, _OUTPUT_SIGMA, self.outputs), strict=True))
        return [(generator.randint(*self.prompts), generator.randint(*self.outputs)) for _ in range(self.requests)]

    def _log_normal(self, generator: random.Random, median: int, sigma: float, limits: tuple[int, int]) -> list[int]:
        least, most = limits
        found = (int(generator.lognormvariate(math.log(median), sigma)) for _ in range(self.requests))
        return [min(most, max(least, each)) for each in found]

    @property
    def longest(self) -> int:
        """Maximum length of a request in tokens."""
        return self.prompts[1] + self.outputs[1]

    def describe(self) -> dict[str, object]:
        """Return the load's sizes as entries of a report."""
        lengths = self.lengths
        return {
            "requests": self.requests,
            "seed": self.seed,
            "distribution": f"prompts {self.distribution} {_range(self.prompts)}, outputs {self.distribution} "
            f"{_range(self.outputs)}, all at once",
            "prompt_tokens": sum(prompt for prompt, _ in lengths),
            "output_tokens": sum(output for _, output in lengths),
        }


def _range(limits: tuple[int, int]) -> str:
    return f"{limits[0]} to {limits[1]}"


def token_ids(request: int, count: int, vocabulary: int) -> list[int]:
    """Return a prompt of ``count`` token ids for random weights.

    Two requests whose numbers differ by less than ``vocabulary`` - 5 have different first tokens.
    """
    least = min(5, vocabulary - 1)
    return [(97 * request + 31 * position) % (vocabulary - least) + least for position in range(count)]


def latencies(answers: Sequence[StreamedAnswer]) -> dict[str, object]:
    """Return total seconds, tokens a second, and quantiles in milliseconds of first tokens and of gaps of one request.

    Tokens of one verification arrive together, so a gap lies between two verifications.
    """
    found = summarize(answers)
    kept = {name: found[name] for name in ("seconds", "tokens_per_s", "first_token_ms")}
    return kept | {"between_tokens_ms": found["between_outputs_ms"]}


_QUANTILES = (50, 95, 99)


@dataclass(kw_only=True, slots=True)
class StreamedAnswer:
    """The times of one answer, in seconds of the wall clock, which all processes share."""

    began: float = field(default_factory=time.time)
    """Time at which the request was sent."""
    times: list[float] = field(default_factory=list)
    """Time at which each output arrived. Tokens of one verification arrive together."""
    tokens: list[int] = field(default_factory=list)
    """Number of tokens of each output."""

    def add_output(self, tokens: int) -> None:
        """Record that ``tokens`` tokens arrive together now."""
        self.times.append(time.time())
        self.tokens.append(tokens)


Requests = Iterable[tuple[Sequence[int], int]]
"""The requests of one client: token ids of each prompt, and the number of its new tokens."""


def serve_clients(engine: Engine, clients: Iterable[Requests]) -> list[StreamedAnswer]:
    """Serve the requests of several clients, each of which sends its next request after its last answer; return the answers
    in the order of the requests.
    """
    from outrider.engine.requests.sampling import SamplingParams

    answers: list[StreamedAnswer] = []
    pending: dict[int, tuple[Iterator[tuple[Sequence[int], int]], StreamedAnswer]] = {}

    def send_next(requests: Iterator[tuple[Sequence[int], int]]) -> None:
        for prompt, count in islice(requests, 1):
            answers.append(StreamedAnswer())
            request = engine.add_request(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
            pending[request] = requests, answers[-1]

    for requests in clients:
        send_next(iter(requests))
    while pending:
        for output in engine.step():
            following, answer = pending[output.request_id]
            if output.tokens:
                answer.add_output(len(output.tokens))
            if output.finish_reason is not None:
                del pending[output.request_id]
                send_next(following)
    return answers


def summarize(answers: Sequence[StreamedAnswer]) -> dict[str, Any]:
    """Return tokens a second from the first request to the last token, and quantiles in milliseconds.

    The quantiles are those of first tokens, of the gaps between outputs of one answer, and of the mean time of a token after
    an answer's first output.
    """
    gaps = [after - before for each in answers for before, after in pairwise(each.times)]
    spans = [
        (each.times[-1] - each.times[0]) / (sum(each.tokens) - each.tokens[0]) for each in answers if len(each.times) > 1
    ]
    seconds = max(each.times[-1] for each in answers) - min(each.began for each in answers)
    tokens = sum(sum(each.tokens) for each in answers)
    return {
        "requests": len(answers),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "first_token_ms": quantiles([each.times[0] - each.began for each in answers]),
        "between_outputs_ms": quantiles(gaps),
        "a_token_ms": quantiles(spans),
        "tokens_an_output": tokens / sum(len(each.times) for each in answers),
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p95, p99 and the maximum in milliseconds, each by the nearest rank; None for no values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    found = {f"p{share}": 1e3 * ordered[-(-len(ordered) * share // 100) - 1] for share in _QUANTILES}
    return found | {"max": 1e3 * ordered[-1]}
