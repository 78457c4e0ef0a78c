"""Batch: the scheduler's immutable decision about the work of one iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.requests.hand_over import Arrival
from outrider.engine.requests.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFeatures:
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
    def from_requests(cls, requests: Sequence[Request]) -> BatchFeatures:
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

    def covers(self, other: BatchFeatures) -> bool:
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


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The next context tokens of one request, ``start`` inclusive to ``end`` exclusive."""

    request: Request
    start: int
    end: int

    @property
    def is_final(self) -> bool:
        """Return True if this chunk ends with the last context token."""
        return self.end == len(self.request.context)


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """One iteration of all data-parallel groups. Every rank has an equal record, except for ``launched``."""

    batches: tuple[Batch, ...]
    """The batch of each group, in group order."""
    launched: Batch
    """The batch of this rank's group, padded for the shared collectives.

    Idle requests of row 0 fill ``decode`` up to the largest group. One idle token stands for a missing prefill if another
    group prefills.
    """
    features: BatchFeatures
    """The features that the decoding requests of all groups need."""
    widths: tuple[int, ...]
    """The largest number of tokens of a group, for each prefill pass."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one iteration of one data-parallel group."""

    prefill: tuple[PrefillChunk, ...]
    decode: tuple[Request, ...]
    admitted: tuple[Request, ...]
    """Requests that get their row in this iteration."""
    table_updates: tuple[tuple[int, int, int], ...]
    """Block-table entries to write, as (row, index, page)."""
    arrivals: tuple[tuple[Request, Arrival], ...] = ()
    """Requests whose state comes from another engine. They decode from the next iteration on."""
    drafted: int = 0
    """Number of tokens that the proposer drafts for each decoding request; for a tree, its nodes."""
    draft_lengths: tuple[int, ...] = ()
    """Number of draft tokens that the target verifies for each decoding request, at most ``drafted``; empty: ``drafted`` of
    each.
    """
    repeats: tuple[int, ...] = ()
    """What the draft-length policy was told of each decoding request, see :attr:`DraftLengthPolicy.reads_repeats`."""
    global_batch: GlobalBatch | None = None
    """The batches of all data-parallel groups; None if there is only one group."""
    decode_features: BatchFeatures | None = None
    """The features that ``decode`` needs; None: :attr:`features` computes them."""
    restored_states: tuple[tuple[int, int], ...] = ()
    """Copies of recurrent states before the prefill, as (checkpoint row, request row)."""
    saved_states: tuple[tuple[int, int], ...] = ()
    """Copies of recurrent states after the prefill and before the decode, as (request row, checkpoint row)."""

    @property
    def verified(self) -> int | None:
        """The number of tokens that the target verifies for requests with ``draft_lengths``; None without these."""
        return sum(self.draft_lengths) + len(self.decode) if self.draft_lengths else None

    @property
    def group_batches(self) -> tuple[Batch, ...]:
        """The batches of all data-parallel groups."""
        return (self,) if self.global_batch is None else self.global_batch.batches

    @property
    def launched(self) -> Batch:
        """The batch that this rank enqueues: this one with one data-parallel group, else ``global_batch.launched``."""
        return self if self.global_batch is None else self.global_batch.launched

    @property
    def features(self) -> BatchFeatures:
        """The features that the decoding requests of all groups need."""
        if self.global_batch is not None:
            return self.global_batch.features
        return BatchFeatures.from_requests(self.decode) if self.decode_features is None else self.decode_features

    @property
    def requests(self) -> tuple[Request, ...]:
        """Every request of this batch: those that decode, then those that prefill, then those that arrive from another
        engine.
        """
        prefilled = (chunk.request for chunk in self.prefill)
        return (*self.decode, *prefilled, *(request for request, _ in self.arrivals))

    @property
    def is_guided(self) -> bool:
        """Return True if a guided request of any group gets a token, from decode or from its last prefill chunk."""
        emitting = (
            request
            for batch in self.group_batches
            for request in (*batch.decode, *(chunk.request for chunk in batch.prefill if chunk.is_final))
        )
        return any(request.guidance is not None for request in emitting)

    def part_of_request(self, request: Request) -> Batch:
        """Return a batch with the decoding, the prefill chunk or the arrival of ``request`` alone."""
        return Batch(
            prefill=tuple(chunk for chunk in self.prefill if chunk.request is request),
            decode=tuple(each for each in self.decode if each is request),
            admitted=tuple(each for each in self.admitted if each is request),
            table_updates=tuple(update for update in self.table_updates if update[0] == request.row),
            arrivals=tuple(arrival for arrival in self.arrivals if arrival[0] is request),
            drafted=self.drafted,
            restored_states=tuple(copy for copy in self.restored_states if copy[1] == request.row),
            saved_states=tuple(copy for copy in self.saved_states if copy[0] == request.row),
        )
