"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine was made. ``verified_tokens`` came out of ``request_iterations`` verifications of single
    requests; ``iterations`` counts launched batches, prefill-only ones included. ``blocked_s``: seconds that the host
    waited at fences for the device; the rest of a step's time is the host's own.
    """

    iterations: int
    request_iterations: int
    verified_tokens: int
    emitted_tokens: int
    blocked_s: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens that one verification of a request yields on average; 0 before the first."""
        return self.verified_tokens / self.request_iterations if self.request_iterations else 0.0
