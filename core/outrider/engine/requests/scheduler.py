"""Which request does what in the next iteration. Host state alone: no tensor, no device."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.requests.batch import Batch, PrefillChunk
from outrider.engine.requests.draft_length import DraftLengthPolicy
from outrider.engine.requests.features import Features
from outrider.engine.requests.pages import FreeList, PageKey, PagePool
from outrider.engine.requests.request import Request

_GREEDY = Features()


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """What bounds a batch. ``growth``: tokens that an iteration can add to a request; ``slots``: cache slots that it
    writes behind the request's length; ``spare``: slots behind those of its tokens that a request needs at its longest, for
    trees, which are scattered over them; ``prefill_chunk``: prompt tokens in an iteration.

    ``token_budget``: tokens in an iteration in which requests decode, theirs and their drafts' included; None: prompts aren't
    held to less than a chunk. They get a quarter of it at least.

    ``crowd``: from so many decoding requests on, new prompts of less than ``gather_tokens`` together wait for others, to
    share a launch, at most ``gather_iterations``.
    """

    growth: int
    slots: int
    spare: int
    prefill_chunk: int
    token_budget: int | None = None
    crowd: int = 0
    gather_tokens: int = 0
    gather_iterations: int = 0


class OutOfPages(Exception):
    """Pages are short, and results in flight must be handled before a request can be preempted. The engine catches it."""


class Scheduler:
    """Continuous batching with chunked prefill, shared prefixes, priorities, and preemption with recompute.

    The more urgent request goes first: by priority, then by arrival. Every admitted request whose context is prefilled
    decodes in each iteration. Pages are taken as a request grows; when they run out, the least urgent request gives its
    pages up, waits, and later prefills its prompt and its output again.
    """

    def __init__(
        self, *, rows: FreeList, pages: PagePool, limits: SchedulerLimits, draft_length: DraftLengthPolicy | None = None
    ) -> None:
        """``draft_length``: says how many tokens an iteration drafts; None: as many as the proposer does."""
        self._draft_length = draft_length
        self.rows = rows
        self.pages = pages
        self._limits = limits
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._gathered = 0  # iterations that new prompts have waited for others
        self._table_updates: list[tuple[int, int, int]] = []
        """(row, index, page) that the device's block table doesn't have yet."""
        self.preemptions = 0
        self.prefix_looked_up = 0
        """Tokens of contexts that were looked up in the prefix cache, each when its request was admitted."""
        self.prefix_hits = 0
        """Those of them whose pages were there."""

    @property
    def has_work(self) -> bool:
        """Whether an iteration would do anything."""
        return bool(self._waiting) or any(not request.finished and not request.rests for request in self._running)

    @property
    def chance_of_end(self) -> float:
        """How likely the iterations in flight complete every output, so that another one would be for nobody; 0 where a
        request waits, or its prompt is to be computed.
        """
        chance = 0.0 if self._waiting else 1.0
        for request in self._running:
            if not chance:
                break  # mostly at the first one: this is asked in each iteration
            if not request.finished and not request.lends:
                chance *= 0.0 if request.needs_prefill else request.chance_of_end(self._limits.growth)
        return chance

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold a row, most urgent first."""
        return tuple(self._running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        bisect.insort(self._waiting, request, key=lambda r: r.urgency)

    def drop_waiting(self, request: Request) -> None:
        """Take a request out of the queue, if it's there, and free pages that were reserved for it."""
        if request in self._waiting:
            self._waiting.remove(request)
            self.free_reserved(request)

    def next_batch(self) -> Batch | None:
        """The next iteration, or None when there is nothing to do. Counts its requests as in flight.

        Raises :class:`OutOfPages` when a request must be preempted and the results of an iteration in flight are still
        to be handled; call again then.
        """
        self._grow()
        admitted = self._admit()
        decode = tuple(r for r in self._running if self._decodes(r))
        drafted, needed = None, Features.of(decode)
        if decode and self._draft_length is not None:
            # A draw depends on what was drafted: requests that draw are drafted for in full, whatever else runs.
            drafted = self._draft_length.lengths[-1]
            if needed == _GREEDY:
                drafted = length_for(self._draft_length, decode)
        prefill = self._chunks(len(decode), self._limits.growth if drafted is None else drafted + 1)
        arrivals = tuple((r, r.arrival) for r in admitted if r.arrival is not None)
        if not decode and not prefill and not arrivals:
            return None
        for chunk in prefill:
            chunk.request.prefilled = chunk.end
            self.register(chunk.request, chunk.end)
        for request, _ in arrivals:
            request.arrival = None  # the batch holds it now
            request.prefilled = len(request.context)
        batch = Batch(prefill, decode, admitted, tuple(self._table_updates), arrivals, drafted, needed=needed)
        self._table_updates.clear()
        self._count(batch, 1)
        return batch

    @staticmethod
    def _decodes(request: Request) -> bool:
        """Whether another iteration may add to the request's output."""
        return not (request.finished or request.lends or request.needs_prefill or request.will_finish)

    def landed(self, batch: Batch, accepted: Sequence[int]) -> None:
        """The results of ``batch`` are on the host: its requests have one iteration less in flight. ``accepted``: drafted
        tokens that passed, of each request that decoded and goes on.
        """
        self._count(batch, -1)
        if self._draft_length is not None:
            report_accepted(self._draft_length, batch, accepted)

    def proposed(self, batch: Batch) -> int:
        """Drafted tokens of a request of ``batch`` that could be accepted at most."""
        longest = self._limits.growth - 1
        return longest if batch.drafted is None else min(batch.drafted, longest)

    def _count(self, batch: Batch, change: int) -> None:
        """Nothing else changes what counts as in flight."""
        for request in batch.requests:
            request.in_flight += change
        for request in batch.decode:
            request.decodes_in_flight += change
            request.tokens_in_flight += change
        for chunk in batch.prefill:
            if chunk.final:
                chunk.request.tokens_in_flight += change

    def register(self, request: Request, filled: int) -> None:
        """Tell the prefix cache of the request's full pages among its first ``filled`` tokens."""
        tokens = request.context if request.needs_prefill else (*request.prompt, *request.output)
        request.page_key, request.registered = self.pages.register(
            request.pages, tokens, filled, request.page_key, request.registered, request.besides_tokens
        )

    def retire(self) -> None:
        """Free rows and pages of finished requests that no iteration in flight can still read or write."""
        for request in [r for r in self._running if r.finished and r.in_flight == 0]:
            self._release(request)

    # -- pages -----------------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        """Give every decoding request the pages that its next iteration can write; preempt where they run out."""
        for request in list(self._running):
            if not self._decodes(request) or request not in self._running:
                continue
            written = request.length_bound(self._limits.growth) + self._limits.slots
            needed = self._pages_of(min(written, request.length_limit + self._limits.spare))
            while request in self._running and len(request.pages) < needed:
                if self.pages.available:
                    self._append(request, self.pages.take())
                else:
                    self._preempt()

    def _preempt(self) -> None:
        """Take the pages of the least urgent request, which waits from now on."""
        if any(request.in_flight for request in self._running):
            raise OutOfPages
        victim = next(request for request in reversed(self._running) if not request.finished)
        self.preemptions += 1
        self._requeue(victim)

    def take_back(self, batches: Sequence[Batch], *, spoilt: bool) -> None:
        """Undo batches that weren't launched to their end, or failed: what they wrote counts for nothing.

        Nothing else may be in flight. Their requests wait and begin again with what the host knows of their output; no page
        is known as a prefix any more, since what was enqueued to fill it may not have been. ``spoilt``: an operation failed,
        in memory that all requests share, so every request begins again.
        """
        concerned = {request.id: request for request in self._running} if spoilt else {}
        for batch in batches:
            self._count(batch, -1)
            # Who was admitted may not have got a token into the batch, but its row was to be made ready in it.
            concerned |= {request.id: request for request in (*batch.requests, *batch.admitted)}
        self.pages.forget_all()
        for request in concerned.values():
            if not request.finished:
                self._requeue(request)
        self.retire()

    def _requeue(self, victim: Request) -> None:
        """Take a request's row and pages; it waits, to prefill its prompt and its output again."""
        self._table_updates = [update for update in self._table_updates if update[0] != victim.row]
        self._release(victim)
        victim.context = (*victim.prompt, *victim.output)
        victim.prefilled = 0
        victim.preemptions += 1
        self.add(victim)

    def _release(self, request: Request) -> None:
        self.pages.give_back(self.lend(request))

    def lend(self, request: Request) -> list[int]:
        """Take a running request out, of which nothing is in flight; its row is free. The caller has its pages from now on,
        and gives them back.
        """
        self._running.remove(request)
        self.rows.give_back(request.row)
        pages = request.pages
        request.pages, request.row = [], 0
        request.registered, request.page_key = 0, None
        return pages

    def reserve(self, request: Request) -> bool:
        """Take pages for a request whose context another engine computes, before it's queued. False where they're short."""
        needed = self._pages_at_first(request)
        if needed > self.pages.available:
            return False
        request.pages = [self.pages.take() for _ in range(needed)]
        return True

    def free_reserved(self, request: Request) -> None:
        """Give back what :meth:`reserve` took, if anything."""
        self.pages.give_back(request.pages)
        request.pages = []

    def _append(self, request: Request, page: int) -> None:
        self._table_updates.append((request.row, len(request.pages), page))
        request.pages.append(page)

    def most_pages(self, tokens: int) -> int:
        """Pages that a request of ``tokens`` at its longest can hold at a time."""
        return self._pages_of(tokens + self._limits.spare)

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.pages.page_size)

    # -- who runs --------------------------------------------------------------------------------------------------

    def _admit(self) -> tuple[Request, ...]:
        """Give waiting requests a row and the pages of their context, as long as both are there."""
        admitted: list[Request] = []
        short = False
        for request in list(self._waiting):
            if not self.rows.available:
                break
            if short and not request.pages:
                continue
            reserved, request.pages = request.pages, []
            hit, key = (reserved, None) if reserved else self._match(request)
            needed = self._pages_at_first(request)
            if needed - len(hit) > self.pages.available:
                # Those behind it wait too, but for requests whose pages are there: they are what the others wait for.
                self.pages.give_back(hit)
                short = True
                continue
            self._waiting.remove(request)
            if request.arrival is None:
                self.prefix_looked_up += len(request.context)
                self.prefix_hits += len(hit) * self.pages.page_size
            request.row = self.rows.take()
            if not reserved:
                request.registered, request.page_key = len(hit), key
                request.prefilled = request.prefill_start = len(hit) * self.pages.page_size
            for page in hit:
                self._append(request, page)
            while len(request.pages) < needed:
                self._append(request, self.pages.take())
            bisect.insort(self._running, request, key=lambda r: r.urgency)
            admitted.append(request)
        return tuple(admitted)

    def _pages_at_first(self, request: Request) -> int:
        """Pages of its context, and of what its first iteration writes behind it."""
        longest = request.length_limit + self._limits.spare
        return self._pages_of(min(len(request.context) + self._limits.slots, longest))

    def _match(self, request: Request) -> tuple[list[int], PageKey | None]:
        """Cached pages of its context; none where another engine computed it, since that is written to pages of its own."""
        return ([], None) if request.arrival is not None else self.pages.match(request.context, request.besides_tokens)

    def _chunks(self, decoding: int, width: int) -> tuple[PrefillChunk, ...]:
        """The next tokens of each unfinished context, within the budget of an iteration in which so many requests decode,
        with ``width`` tokens each.
        """
        pending = [r for r in self._running if not r.finished and r.needs_prefill and r.arrival is None]
        if self._gathers(pending, decoding):
            return ()
        chunks: list[PrefillChunk] = []
        budget = self._prompt_tokens(decoding * width)
        for request in pending:
            if budget == 0:
                break
            end = min(len(request.context), request.prefilled + budget)
            chunks.append(PrefillChunk(request, request.prefilled, end))
            budget -= end - request.prefilled
        return tuple(chunks)

    def _prompt_tokens(self, decode_tokens: int) -> int:
        """Prompt tokens that an iteration may have beside those of decoding requests."""
        limits = self._limits
        if not decode_tokens or limits.token_budget is None:
            return limits.prefill_chunk
        left = max(limits.token_budget - decode_tokens, limits.token_budget // 4, 1)
        return min(limits.prefill_chunk, left)

    def _gathers(self, pending: Sequence[Request], decoding: int) -> bool:
        """Whether new prompts wait for others. None does whose prefill has begun, nor any beside it."""
        limits = self._limits
        waits = (
            bool(pending)
            and decoding >= max(1, limits.crowd)
            and self._gathered < limits.gather_iterations
            and all(request.prefilled == request.prefill_start for request in pending)
            and sum(len(request.context) - request.prefilled for request in pending) < limits.gather_tokens
        )
        self._gathered = self._gathered + 1 if waits else 0
        return waits


def length_for(policy: DraftLengthPolicy, decode: Sequence[Request]) -> int:
    """Return the draft length that ``policy`` chooses for a batch of greedy requests."""
    cached = sum(request.known_length for request in decode) if policy.reads_load else 0
    return policy.choose(len(decode), cached)


def report_accepted(policy: DraftLengthPolicy, batch: Batch, accepted: Sequence[int]) -> None:
    """Pass the accepted draft tokens of all groups of ``batch`` to ``policy``, if it listens: see :meth:`landed`."""
    if policy.listens and batch.drafted is not None and accepted:
        policy.observe(batch.drafted, accepted)
