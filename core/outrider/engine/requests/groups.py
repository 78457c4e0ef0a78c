"""Scheduling of several data-parallel groups: each has requests, rows and pages of its own, and all take part in every
iteration, since they share MLPs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod

from outrider.engine.requests.batch import Batch, PrefillChunk, Together
from outrider.engine.requests.draft_length import DraftLengthPolicy, FixedLength
from outrider.engine.requests.features import Features
from outrider.engine.requests.pages import PagePool, PageWatcher
from outrider.engine.requests.request import Request
from outrider.engine.requests.sampling import SamplingParams
from outrider.engine.requests.scheduler import Scheduler, length_for, report_accepted

PromptPasses = Callable[[int, int, int], tuple[int, ...]]
"""Tokens of each pass over prompts, from how many tokens and sequences there are, and the longest of these."""


class AgreedLength(FixedLength):
    """The length that was chosen once for all groups."""

    def agree(self, length: int) -> None:
        """From now on it's this one."""
        self.lengths = (length,)


class GroupScheduler:
    """A :class:`Scheduler` for each group, used as one. Every rank has all of them, so that each knows what all do.

    ``own``: the group of this rank, whose batch :meth:`next_batch` returns. ``agreed``: what the schedulers were made with.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        *,
        own: int,
        agreed: AgreedLength,
        draft_length: DraftLengthPolicy,
        passes: PromptPasses,
    ) -> None:
        self._schedulers = tuple(schedulers)
        self._own = own
        self._agreed = agreed
        self._draft_length = draft_length
        self._passes = passes
        self._made: list[Batch | None] = []
        self.pages = GroupPages([scheduler.pages for scheduler in schedulers], own)
        self.rows = GroupRows(self._schedulers)

    @property
    def has_work(self) -> bool:
        """Whether an iteration would do anything in some group."""
        return any(scheduler.has_work for scheduler in self._schedulers)

    @property
    def chance_of_end(self) -> float:
        """See :attr:`Scheduler.chance_of_end`; in all groups."""
        return prod(scheduler.chance_of_end for scheduler in self._schedulers)

    @property
    def preemptions(self) -> int:
        """See :class:`Scheduler`; of all groups, as the other counts."""
        return sum(scheduler.preemptions for scheduler in self._schedulers)

    @property
    def prefix_looked_up(self) -> int:
        """Tokens of contexts that were looked up in the prefix cache."""
        return sum(scheduler.prefix_looked_up for scheduler in self._schedulers)

    @property
    def prefix_hits(self) -> int:
        """Those of them that it had."""
        return sum(scheduler.prefix_hits for scheduler in self._schedulers)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold a row, group by group."""
        return tuple(request for scheduler in self._schedulers for request in scheduler.running)

    def least_busy(self, requests: Iterable[Request]) -> int:
        """The group with the fewest of these ``requests``, the first among equals."""
        return self.by_load(requests)[0]

    def by_load(self, requests: Iterable[Request]) -> list[int]:
        """The groups, those with fewer of these ``requests`` first."""
        busy = [0] * len(self._schedulers)
        for request in requests:
            busy[request.group] += 1
        return sorted(range(len(busy)), key=busy.__getitem__)

    def reserve(self, request: Request) -> bool:
        """See :meth:`Scheduler.reserve`; in the request's group."""
        return self._of(request).reserve(request)

    def free_reserved(self, request: Request) -> None:
        """See :meth:`Scheduler.free_reserved`."""
        self._of(request).free_reserved(request)

    def add(self, request: Request) -> None:
        """Queue a request in its group."""
        self._of(request).add(request)

    def drop_waiting(self, request: Request) -> None:
        """Take a request out of its queue, if it's there."""
        self._of(request).drop_waiting(request)

    def next_batch(self) -> Batch | None:
        """The own group's part of the next iteration, which may be idle; None where no group has anything to do.

        Raises :class:`OutOfPages` as :meth:`Scheduler.next_batch` does; call again then.
        """
        if not self._made:
            self._agreed.agree(self._length())
        for scheduler in self._schedulers[len(self._made) :]:
            self._made.append(scheduler.next_batch())
        made, self._made = self._made, []
        if not any(made):
            return None
        length = self._agreed.lengths[0] if any(each is not None and each.decode for each in made) else None
        batches = tuple(replace(each or Batch((), (), (), ()), drafted=length) for each in made)
        own = batches[self._own]
        return replace(own, together=self._together(batches))

    def landed(self, batch: Batch, accepted: Sequence[int]) -> None:
        """The results of an iteration are on the host, see :meth:`Scheduler.landed`."""
        for scheduler, each in zip(self._schedulers, batch.everyone, strict=True):
            scheduler.landed(each, ())
        report_accepted(self._draft_length, batch, accepted)

    def register(self, request: Request, filled: int) -> None:
        """See :meth:`Scheduler.register`."""
        self._of(request).register(request, filled)

    def retire(self) -> None:
        """See :meth:`Scheduler.retire`."""
        for scheduler in self._schedulers:
            scheduler.retire()

    def take_back(self, batches: Sequence[Batch], *, spoilt: bool) -> None:
        """See :meth:`Scheduler.take_back`."""
        for index, scheduler in enumerate(self._schedulers):
            scheduler.take_back([batch.everyone[index] for batch in batches], spoilt=spoilt)

    def proposed(self, batch: Batch) -> int:
        """See :meth:`Scheduler.proposed`."""
        return self._schedulers[0].proposed(batch)

    def most_pages(self, tokens: int) -> int:
        """See :meth:`Scheduler.most_pages`."""
        return self._schedulers[0].most_pages(tokens)

    def _of(self, request: Request) -> Scheduler:
        return self._schedulers[request.group]

    def _length(self) -> int:
        """Draws depend on what was drafted, so that all are drafted for in full where one request draws."""
        decoding = [request for request in self.running if not request.finished and not request.needs_prefill]
        if not decoding or Features.of(decoding) != Features():
            return self._draft_length.lengths[-1]
        return length_for(self._draft_length, decoding)

    def _together(self, batches: tuple[Batch, ...]) -> Together:
        own = batches[self._own]
        count = max(len(batch.decode) for batch in batches)
        widths = [self._passes(*_extent(batch.prefill)) for batch in batches if batch.prefill]
        # A group without prompts has one token in each pass over them.
        widths += [self._passes(1, 1, 1)] if widths else []
        idle = Request(-1, (0, 0), SamplingParams(max_tokens=1), frozenset(), pages=[0])
        launched = replace(
            own,
            prefill=own.prefill or ((PrefillChunk(idle, 0, 1),) if widths else ()),
            decode=(*own.decode, *[idle] * (count - len(own.decode))),
        )
        return Together(
            batches=batches,
            launched=launched,
            features=Features.of([request for batch in batches for request in batch.decode]),
            widths=tuple(max(each) for each in zip(*widths, strict=True)),
        )


def _extent(chunks: Sequence[PrefillChunk]) -> tuple[int, int, int]:
    """Tokens, sequences, and the longest of these."""
    lengths = [chunk.end - chunk.start for chunk in chunks]
    return sum(lengths), len(lengths), max(lengths)


class GroupPages:
    """The page pools of all groups. ``count``: pages of one, since a request's pages are all in one. ``own``: this rank's."""

    def __init__(self, pools: Sequence[PagePool], own: int) -> None:
        self._pools = tuple(pools)
        self._own = pools[own]
        self.count = pools[0].count
        self.page_size = pools[0].page_size

    @property
    def available(self) -> int:
        """Pages that can be taken, in all groups."""
        return sum(pool.available for pool in self._pools)

    @property
    def cached(self) -> int:
        """Pages that no request holds and whose contents may be hit again."""
        return sum(pool.cached for pool in self._pools)

    @property
    def shares(self) -> bool:
        """See :attr:`PagePool.shares`."""
        return self._own.shares

    def watch(self, watcher: PageWatcher | None) -> None:
        """See :meth:`PagePool.watch`; the own group's pages, which alone lie here."""
        self._own.watch(watcher)

    def forget_all(self) -> None:
        """See :meth:`PagePool.forget_all`."""
        for pool in self._pools:
            pool.forget_all()


class GroupRows:
    """The rows of all groups."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._schedulers = tuple(schedulers)

    @property
    def available(self) -> int:
        """Rows that can be taken, in all groups."""
        return sum(scheduler.rows.available for scheduler in self._schedulers)
