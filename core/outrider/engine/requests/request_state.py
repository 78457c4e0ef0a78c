"""RequestState: the host state of a request that another engine continues."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.requests.logprobs import TokenLogprobs
from outrider.engine.requests.sampling import SamplingParams
from outrider.model import Media


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestState:
    """A request without device state.

    An engine without the request's pages recomputes the keys and values of prompt and output. The following tokens are the
    same as without a migration, because sampling depends on seed and position only.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    output: tuple[int, ...] = ()
    """The tokens generated so far; empty for a new request."""
    priority: int = 0
    media: tuple[Media, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each output token if the request asks for log-probabilities, else empty."""
    iterations: int = 0
    """The number of target verifications so far."""
    verified_tokens: int = 0
    """The number of tokens that these verifications yielded."""

    @property
    def length(self) -> int:
        """The number of tokens in the target's KV cache: all but the last output token. 0 without output."""
        return len(self.prompt) + len(self.output) - 1 if self.output else 0
