"""A load of requests of random lengths, and the latencies that its users see."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.device.errors import ConfigError
from outrider_bench.answers import StreamedAnswer, summarize

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
