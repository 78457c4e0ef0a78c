"""Scheduling of several data-parallel groups.

Each group has its own requests, rows and pages. All groups take part in every iteration, because they share MLPs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod

from outrider.engine.requests.batch import Batch, BatchFeatures, GlobalBatch, PrefillChunk
from outrider.engine.requests.draft_length import DraftLengthPolicy
from outrider.engine.requests.request import Request
from outrider.engine.requests.sampling import SamplingParams
from outrider.engine.requests.scheduler import Scheduler, choose_draft_lengths, report_accepted

PromptPasses = Callable[[int, int, int], tuple[int, ...]]
"""The function that returns the number of tokens of each prefill pass, from (tokens, sequences, tokens of the longest
sequence).
"""


def groups_by_load(count: int, requests: Iterable[Request]) -> list[int]:
    """Return the numbers of ``count`` groups in ascending order of how many of ``requests`` they have."""
    if count == 1:
        return [0]
    load = Counter(request.group for request in requests)
    return sorted(range(count), key=load.__getitem__)


class GroupScheduler:
    """One :class:`Scheduler` for each data-parallel group. Calls about one request go to the scheduler of its group.

    Every rank runs the schedulers of all groups, so that each rank knows the batches of the other groups.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        *,
        own: int,
        draft_length: DraftLengthPolicy,
        passes: PromptPasses,
    ) -> None:
        """Create the scheduler of all groups.

        ``own`` is this rank's group, whose batch :meth:`next_batch` returns. All groups draft the one length that
        ``draft_length`` chooses for an iteration.
        """
        self.groups = tuple(schedulers)
        """The scheduler of each group, in group order."""
        self._own = own
        self._draft_length = draft_length
        self._shared_length = draft_length.lengths[-1]
        """The draft length of the current iteration."""
        self._passes = passes
        self._group_batches: list[Batch | None] = []
        """Batches of the first groups, after a later group raised :class:`OutOfPages`."""
        self.pages = self.groups[own].pages
        """The pages of this rank's group; this rank's device has no pages of other groups."""

    @property
    def has_work(self) -> bool:
        """Return True if at least one group has work for an iteration."""
        return any(scheduler.has_work for scheduler in self.groups)

    @property
    def chance_of_end(self) -> float:
        """Probability that the iterations in flight complete the output of every request of all groups."""
        return prod(scheduler.chance_of_end for scheduler in self.groups)

    @property
    def running(self) -> tuple[Request, ...]:
        """The requests that hold a row, in group order."""
        return tuple(request for scheduler in self.groups for request in scheduler.running)

    def next_batch(self) -> Batch | None:
        """Return the batch of this rank's group, which may be idle; None if no group has work.

        Raises :class:`OutOfPages` like :meth:`Scheduler.next_batch`; the caller then handles results and calls again.
        """
        if not self._group_batches:
            self._shared_length = self._choose_length()
        for scheduler in self.groups[len(self._group_batches) :]:
            self._group_batches.append(scheduler.next_batch(self._shared_length))
        group_batches, self._group_batches = self._group_batches, []
        if not any(group_batches):
            return None
        decodes = any(batch is not None and batch.decode for batch in group_batches)
        length = self._shared_length if decodes else 0
        batches = tuple(replace(batch or Batch((), (), (), ()), drafted=length) for batch in group_batches)
        return replace(batches[self._own], global_batch=self._global_batch(batches))

    def handle_landed(self, batch: Batch, accepted: Sequence[int]) -> None:
        """Count the results of ``batch`` as read by the host in all groups, see :meth:`Scheduler.handle_landed`."""
        for scheduler, group_batch in zip(self.groups, batch.group_batches, strict=True):
            scheduler.handle_landed(group_batch, ())
        report_accepted(self._draft_length, batch, accepted)

    def retire(self) -> None:
        """Free rows and pages of finished requests in every group, see :meth:`Scheduler.retire`."""
        for scheduler in self.groups:
            scheduler.retire()

    def undo_batches(self, batches: Sequence[Batch], *, corrupted: bool) -> None:
        """Call :meth:`Scheduler.undo_batches` of every group with its part of ``batches``."""
        for index, scheduler in enumerate(self.groups):
            scheduler.undo_batches([batch.group_batches[index] for batch in batches], corrupted=corrupted)

    def _choose_length(self) -> int:
        """Return the draft length of the next iteration: the longest length if a request samples, because its tokens depend
        on the draft, else the policy's choice.
        """
        decoding = [request for request in self.running if not request.finished and not request.needs_prefill]
        if not decoding or BatchFeatures.from_requests(decoding) != BatchFeatures():
            return self._draft_length.lengths[-1]
        length, _ = choose_draft_lengths(self._draft_length, decoding)
        return length

    def _global_batch(self, batches: tuple[Batch, ...]) -> GlobalBatch:
        own = batches[self._own]
        count = max(len(batch.decode) for batch in batches)
        widths = [self._passes(*_prefill_extent(batch.prefill)) for batch in batches if batch.prefill]
        # A group without prefill runs one idle token in each prefill pass.
        widths += [self._passes(1, 1, 1)] if widths else []
        idle = Request(-1, (0, 0), SamplingParams(max_tokens=1), frozenset(), pages=[0])
        launched = replace(
            own,
            prefill=own.prefill or ((PrefillChunk(idle, 0, 1),) if widths else ()),
            decode=(*own.decode, *[idle] * (count - len(own.decode))),
        )
        return GlobalBatch(
            batches=batches,
            launched=launched,
            features=BatchFeatures.from_requests([request for batch in batches for request in batch.decode]),
            widths=tuple(max(pass_widths) for pass_widths in zip(*widths, strict=True)),
        )


def _prefill_extent(chunks: Sequence[PrefillChunk]) -> tuple[int, int, int]:
    """Return the number of tokens, the number of sequences, and the length of the longest sequence."""
    lengths = [chunk.end - chunk.start for chunk in chunks]
    return sum(lengths), len(lengths), max(lengths)
