"""Counters of an engine since its creation, and its current load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of iterations, tokens and cache look-ups since the engine was created.

    ``iterations`` counts launched batches, with those of prefill only. ``request_iterations`` counts verifications of single
    requests, ``verified_tokens`` their tokens, and ``drafted_tokens`` the draft tokens that could have been accepted: those
    of chains, and the longest paths of trees. ``blocked_s`` is the time in seconds that the host waited at fences for the
    device.

    ``preemptions`` counts requests that lost their pages and start again. ``prefix_looked_up`` counts context tokens that
    were looked up in the prefix cache, and ``prefix_hits`` those whose pages were cached.
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
        """Tokens that one verification of a request yields on average; 0 before the first verification."""
        return self.verified_tokens / self.request_iterations if self.request_iterations else 0.0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of an engine at this moment. ``running`` counts requests with a row, ``waiting`` requests without one. Of
    ``pages``, no request holds ``free_pages``; of these, ``cached_pages`` have contents that a prefix may hit.
    """

    running: int
    waiting: int
    pages: int
    free_pages: int
    cached_pages: int
    state_checkpoints: int = 0
    """Prefixes whose recurrent states are kept."""
