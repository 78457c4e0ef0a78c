"""TokenLogprobs: the log-probabilities that the engine reports for one emitted token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities of one emitted token and of the likeliest tokens at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens as pairs (token, log-probability), the likeliest first."""
