"""A load of requests of different lengths, and what its users see: first tokens, gaps between tokens, tokens a second."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.device.errors import ConfigError

PROMPTS = (32, 1036)
OUTPUTS = (16, 400)
_QUANTILES = (50, 95, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedLoad:
    """``requests`` that arrive at once. Each one's prompt and output are of lengths drawn uniformly, and independently, from
    ``prompts`` and ``outputs`` (least and most tokens, both included), by ``seed``.
    """

    requests: int
    seed: int
    prompts: tuple[int, int] = PROMPTS
    outputs: tuple[int, int] = OUTPUTS

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ConfigError(f"a load of {self.requests} requests; expected at least 1")
        for name, (least, most) in (("prompts", self.prompts), ("outputs", self.outputs)):
            if not 1 <= least <= most:
                raise ConfigError(f"{name} of {least} to {most} tokens; expected at least 1, the smaller number first")

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Tokens of each request's prompt and of its output."""
        drawn = random.Random(self.seed)
        return [(drawn.randint(*self.prompts), drawn.randint(*self.outputs)) for _ in range(self.requests)]

    @property
    def longest(self) -> int:
        """Tokens of a request at most."""
        return self.prompts[1] + self.outputs[1]

    def described(self) -> dict[str, object]:
        """What a report says about it."""
        lengths = self.lengths
        return {
            "requests": self.requests,
            "seed": self.seed,
            "distribution": f"prompts uniform {_range(self.prompts)}, outputs uniform {_range(self.outputs)}, all at once",
            "prompt_tokens": sum(prompt for prompt, _ in lengths),
            "output_tokens": sum(output for _, output in lengths),
        }


def _range(limits: tuple[int, int]) -> str:
    return f"{limits[0]} to {limits[1]}"


def length_range(text: str, option: str) -> tuple[int, int]:
    """``32-1036`` as two numbers. Raises :class:`ConfigError`."""
    least, dash, most = text.partition("-")
    if not dash or not all(each.isascii() and each.isdigit() for each in (least, most)) or not 1 <= int(least) <= int(most):
        raise ConfigError(f"{option} is {text!r}; expected the least and the most tokens, such as 32-1036")
    return int(least), int(most)


@dataclass(slots=True)
class Arrivals:
    """When tokens of each request of a load came, in seconds since the load did."""

    began: float = field(default_factory=time.perf_counter)
    times: dict[object, list[float]] = field(default_factory=dict)
    tokens: int = 0

    def note(self, request: object, tokens: int) -> None:
        """``tokens`` more of a request came, now and together."""
        self.times.setdefault(request, []).append(time.perf_counter() - self.began)
        self.tokens += tokens

    def summary(self) -> dict[str, object]:
        """Seconds in all, tokens a second, and quantiles in milliseconds: of the first tokens, and of the gaps between what
        one request's user sees. Tokens of one verification come together, so a gap lies between two verifications.
        """
        firsts = [times[0] for times in self.times.values()]
        gaps = [after - before for times in self.times.values() for before, after in pairwise(times)]
        seconds = max(times[-1] for times in self.times.values())
        return {
            "seconds": seconds,
            "tokens_per_s": self.tokens / seconds,
            "first_token_ms": quantiles(firsts),
            "between_tokens_ms": quantiles(gaps),
        }


def quantiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50, p95, p99 and the largest, in milliseconds, each by the nearest rank: the least that so many per cent of all don't
    exceed. None of nothing.
    """
    if not seconds:
        return None
    ordered = sorted(seconds)
    found = {f"p{share}": 1e3 * ordered[-(-len(ordered) * share // 100) - 1] for share in _QUANTILES}
    return found | {"max": 1e3 * ordered[-1]}


def token_ids(request: int, count: int, vocabulary: int) -> list[int]:
    """A prompt for random weights: requests of numbers less than ``vocabulary`` - 5 apart differ from their first token
    on.
    """
    least = min(5, vocabulary - 1)
    return [(97 * request + 31 * place) % (vocabulary - least) + least for place in range(count)]


Arrived = Callable[[object, int], None]
"""Called with a request and how many tokens of it came."""
