"""What an engine counts, and how full it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine was made. ``verified_tokens`` came out of ``request_iterations`` verifications of single
    requests, of whose drafts ``drafted_tokens`` could have passed at most: those of chains, and the longest paths of trees.
    ``iterations`` counts launched batches, prefill-only ones included. ``blocked_s``: seconds that the host waited at fences
    for the device; the rest of a step's time is the host's own.

    ``preemptions``: requests that gave up their pages and begin again. ``prefix_looked_up``: tokens of contexts that were
    looked up in the prefix cache; ``prefix_hits``: those of them whose pages were there.
    """

    iterations: int
    request_iterations: int
    verified_tokens: int
    emitted_tokens: int
    blocked_s: float = 0.0
    preemptions: int = 0
    prefix_looked_up: int = 0
    prefix_hits: int = 0
    drafted_tokens: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens that one verification of a request yields on average; 0 before the first."""
        return self.verified_tokens / self.request_iterations if self.request_iterations else 0.0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine holds at this moment. ``running``: requests with a row, ``waiting``: those without. Of ``pages``,
    ``free_pages`` are held by no request, and ``cached_pages`` of these have contents that may be hit again.
    """

    running: int
    waiting: int
    pages: int
    free_pages: int
    cached_pages: int
