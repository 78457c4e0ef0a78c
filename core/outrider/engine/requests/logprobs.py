"""Log-probabilities of emitted tokens, as the host reports them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One emitted token: its log-probability, and the likeliest tokens with theirs, likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
