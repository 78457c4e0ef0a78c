"""Features: the sampling abilities that an iteration needs. They decide which kernels the iteration launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.requests.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """The sampling abilities that the requests of an iteration need.

    An ability is launched if one request needs it, and leaves the rows of all other requests unchanged.
    """

    sampling: bool = False
    """A temperature is above 0, so that the iteration stores draft distributions."""
    biased: bool = False
    """A logit bias applies, see :class:`~outrider.engine.state.options.BatchOptions`."""
    penalized: bool = False
    """A repetition, presence or frequency penalty applies."""
    truncated: bool = False
    """Top-k, top-p or min-p applies."""
    guided: bool = False
    """A grammar mask applies."""
    logprobs: int | None = None
    """Number of likeliest tokens to report with log-probabilities; None: the iteration reports no log-probabilities."""

    @classmethod
    def from_requests(cls, requests: Sequence[Request]) -> Features:
        """Return the fewest features that serve all ``requests``."""
        all_params = [request.params for request in requests]
        return cls(
            sampling=any(params.temperature > 0 for params in all_params),
            biased=any(params.biased for params in all_params),
            penalized=any(params.penalized for params in all_params),
            truncated=any(params.truncated for params in all_params),
            guided=any(request.guidance is not None for request in requests),
            logprobs=logprobs_of(requests),
        )

    @property
    def options(self) -> bool:
        """Return True if biases, penalties or truncation change logits before sampling."""
        return self.biased or self.penalized or self.truncated

    def covers(self, other: Features) -> bool:
        """Return True if an iteration with these abilities serves a batch that needs ``other``."""
        covers_logprobs = other.logprobs is None or (self.logprobs is not None and self.logprobs >= other.logprobs)
        return covers_logprobs and all(
            getattr(self, name) or not getattr(other, name)
            for name in ("sampling", "biased", "penalized", "truncated", "guided")
        )


def logprobs_of(requests: Sequence[Request]) -> int | None:
    """Return the largest number of likeliest tokens that a request asks for; None if no request asks for logprobs."""
    counts = [request.params.logprobs for request in requests if request.params.logprobs is not None]
    return max(counts, default=None)
