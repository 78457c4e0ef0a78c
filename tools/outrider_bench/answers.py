"""Answers that arrive in parts, and the latencies that their users see."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

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
