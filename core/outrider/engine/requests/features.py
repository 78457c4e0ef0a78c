"""What the requests of a batch ask for beyond their likeliest tokens: it decides which kernels an iteration has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.requests.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """Abilities of an iteration, each needed if one request needs it. Rows that don't need one aren't changed by it.

    ``sampling``: a temperature above 0, so that draft distributions are kept. ``biased``, ``penalized``, ``truncated``: see
    :class:`~outrider.engine.state.options.BatchOptions`. ``guided``: masks. ``logprobs``: how many likeliest tokens are
    reported, None for none.
    """

    sampling: bool = False
    biased: bool = False
    penalized: bool = False
    truncated: bool = False
    guided: bool = False
    logprobs: int | None = None

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Features:
        """The least that serves ``requests``."""
        params = [request.params for request in requests]
        return cls(
            sampling=any(chosen.temperature > 0 for chosen in params),
            biased=any(chosen.biased for chosen in params),
            penalized=any(chosen.penalized for chosen in params),
            truncated=any(chosen.truncated for chosen in params),
            guided=any(request.guidance is not None for request in requests),
            logprobs=logprobs_of(requests),
        )

    @property
    def options(self) -> bool:
        """Whether logits are changed before a draw."""
        return self.biased or self.penalized or self.truncated

    def covers(self, other: Features) -> bool:
        """Whether an iteration with these abilities serves a batch that needs ``other``."""
        enough = other.logprobs is None or (self.logprobs is not None and self.logprobs >= other.logprobs)
        return enough and all(
            getattr(self, name) or not getattr(other, name)
            for name in ("sampling", "biased", "penalized", "truncated", "guided")
        )


def logprobs_of(requests: Sequence[Request]) -> int | None:
    """How many likeliest tokens the batch must report: the most that a request wants, None when none wants any."""
    wanted = [request.params.logprobs for request in requests if request.params.logprobs is not None]
    return max(wanted) if wanted else None
