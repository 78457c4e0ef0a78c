"""What the host knows of a request that goes on elsewhere: what was asked, and what has come of it."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.requests.logprobs import TokenLogprobs
from outrider.engine.requests.sampling import SamplingParams
from outrider.model import Media


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestState:
    """A request without its device state. An engine that gets it alone computes the keys and values of prompt and output
    again; tokens depend on seed and position, so they are those that it would have had.

    ``output``: the tokens so far; empty for a new request. ``logprobs``: one for each of them, where asked for.
    ``iterations`` and ``verified_tokens`` count its verifications so far.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    output: tuple[int, ...] = ()
    priority: int = 0
    media: tuple[Media, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    iterations: int = 0
    verified_tokens: int = 0

    @property
    def length(self) -> int:
        """Tokens in the target's cache once it decodes: all but the last of the output. 0 before there is any output."""
        return len(self.prompt) + len(self.output) - 1 if self.output else 0
