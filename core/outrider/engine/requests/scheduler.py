"""Scheduler: decide on the host which requests prefill and decode in the next iteration. It touches no tensor."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.requests.batch import Batch, BatchFeatures, PrefillChunk
from outrider.engine.requests.draft_length import DraftLengthPolicy
from outrider.engine.requests.pages import DecodedState, FreeList, PageKey, PagePool
from outrider.engine.requests.request import Request

_GREEDY = BatchFeatures()
MAX_PREFILL_SEQUENCES = 256
"""Maximum number of prefill chunks in an iteration. The warm-up compiles kernels for so many sequences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """Limits of the scheduler's batches."""

    growth: int
    """Maximum number of tokens that an iteration adds to a request."""
    slots: int
    """Number of cache slots that an iteration writes after the request's length."""
    spare: int
    """Number of cache slots that a request at its maximum length needs after its tokens: tree nodes use them."""
    prefill_chunk: int
    """Maximum number of prompt tokens in an iteration."""
    token_budget: int | None = None
    """Token limit of an iteration that decodes, including draft tokens; None: ``prefill_chunk`` is the only limit.

    Prefill gets at least a quarter of this budget.
    """
    crowd: int = 0
    """Number of decoding requests from which on new prompts wait for each other, to share a launch."""
    gather_tokens: int = 0
    """Total number of waiting prompt tokens that ends the wait."""
    gather_iterations: int = 0
    """Maximum wait in iterations."""
    mixed_requests: int = 0
    """Maximum number of greedy decoding requests that share a pass with prompts. Prompts that may share it don't wait."""


class OutOfPages(Exception):
    """No page is free, and the scheduler can't preempt before the host has handled the results in flight.

    The engine catches this exception.
    """


class Scheduler:
    """Continuous batching with chunked prefill, shared prefixes, priorities, and preemption with recompute.

    Urgent requests come first: higher priority, then earlier arrival. Every admitted request with a prefilled context
    decodes in each iteration. A request allocates pages as it grows. If no page is free, the scheduler preempts the least
    urgent request, which later prefills its prompt and its output again.
    """

    def __init__(self, *, rows: FreeList, pages: PagePool, limits: SchedulerLimits, draft_length: DraftLengthPolicy) -> None:
        """Create a scheduler without requests."""
        self._draft_length = draft_length
        self.rows = rows
        self.pages = pages
        self._limits = limits
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._gathered_iterations = 0  # iterations that the new prompts have waited for other prompts
        self._restored_states: list[tuple[int, int]] = []
        """Copies (checkpoint row, request row) for the next batch."""
        self._table_updates: list[tuple[int, int, int]] = []
        """Entries (row, index, page) that the device's block table lacks."""
        self.preemptions = 0
        self.prefix_looked_up = 0
        """Number of context tokens that the prefix cache was asked for, at each admission."""
        self.prefix_hits = 0
        """Number of these tokens whose pages were cached."""

    @property
    def has_work(self) -> bool:
        """Return True if at least one request waits or runs."""
        return bool(self._waiting) or any(not request.finished and not request.is_ready_to_lend for request in self._running)

    @property
    def chance_of_end(self) -> float:
        """The probability that the iterations in flight complete every output, so that a further iteration is wasted.

        0 if a request waits or needs prefill.
        """
        chance = 0.0 if self._waiting else 1.0
        for request in self._running:
            if not chance:
                break  # usually at the first request; the engine reads this property in each iteration
            if not request.finished and not request.is_prefill_only:
                chance *= 0.0 if request.needs_prefill else request.chance_of_end(self._limits.growth)
        return chance

    @property
    def groups(self) -> tuple[Scheduler]:
        """The schedulers of all data-parallel groups: this one, of the only group."""
        return (self,)

    @property
    def running(self) -> tuple[Request, ...]:
        """The requests that hold a row, the most urgent first."""
        return tuple(self._running)

    def add(self, request: Request) -> None:
        """Insert ``request`` into the queue of waiting requests, which is sorted by urgency."""
        bisect.insort(self._waiting, request, key=lambda r: r.scheduling_key)

    def drop_waiting(self, request: Request) -> None:
        """Remove ``request`` from the queue and free its reserved pages. Does nothing if it isn't queued."""
        if request in self._waiting:
            self._waiting.remove(request)
            self.free_reserved(request)

    def next_batch(self, shared_length: int | None = None) -> Batch | None:
        """Return the batch of the next iteration and count its requests as in flight; None if there is no work.

        ``shared_length`` is the draft length that all data-parallel groups share; None: the policy chooses.

        Raises :class:`OutOfPages` if a request must be preempted before the host has handled all results in flight. The
        caller then handles results and calls again.
        """
        self._grow()
        admitted = self._admit()
        decode = tuple(r for r in self._running if self._can_decode(r))
        drafted, features = 0, BatchFeatures.from_requests(decode)
        draft_lengths: tuple[int, ...] = ()
        repeats: tuple[int, ...] = ()
        if decode and shared_length is not None:
            drafted = shared_length
        elif decode:
            # A sampled token depends on the draft. Full drafts keep it independent of the other requests.
            drafted = self._draft_length.lengths[-1]
            repeats = count_repeats(self._draft_length, decode)
            if features == _GREEDY:
                drafted, draft_lengths = choose_draft_lengths(self._draft_length, decode, repeats)
        has_full_drafts = drafted == self._draft_length.lengths[-1] and not draft_lengths
        can_mix = has_full_drafts and features == _GREEDY and len(decode) <= self._limits.mixed_requests
        prefill = self._chunks(len(decode), drafted + 1, can_mix=can_mix)
        arrivals = tuple((r, r.arrival) for r in admitted if r.arrival is not None)
        if not decode and not prefill and not arrivals:
            return None
        saved_states = [copy for request in decode for copy in self._save_decoded(request)]  # (request row, checkpoint row)
        for chunk in prefill:
            chunk.request.prefilled = chunk.end
            self.register(chunk.request, chunk.end)
            saved_states += self._checkpoint(chunk)
        for request, _ in arrivals:
            request.arrival = None  # the batch holds the state from now on
            request.prefilled = len(request.context)
        batch = Batch(
            prefill,
            decode,
            admitted,
            tuple(self._table_updates),
            arrivals,
            drafted,
            draft_lengths=draft_lengths,
            repeats=repeats,
            decode_features=features,
            restored_states=tuple(self._restored_states),
            # Of two prefixes that got one row, the later one has it.
            saved_states=tuple({target: (row, target) for row, target in saved_states}.values()),
        )
        self._table_updates.clear()
        self._restored_states.clear()
        self._count(batch, 1)
        return batch

    def _checkpoint(self, chunk: PrefillChunk) -> list[tuple[int, int]]:
        """Return the copy of the state after ``chunk`` to a new checkpoint, if the chunk ends with a registered prefix."""
        checkpoints, request = self.pages.checkpoints, chunk.request
        if checkpoints is None or request.page_key is None or chunk.end % checkpoints.interval:
            return []
        if request.registered * self.pages.page_size != chunk.end:
            return []
        row = checkpoints.allocate_row(request.page_key)
        return [] if row is None else [(request.row, row)]

    def _save_decoded(self, request: Request) -> list[tuple[int, int]]:
        """Return the copy of the state of a request that decodes, if the iterations in flight can end at a checkpoint.

        The copy precedes the next iteration. :meth:`register` publishes it, once the host knows the length.
        """
        checkpoints, decoded = self.pages.checkpoints, request.decoded_state
        if checkpoints is None or decoded.length:
            return []
        length = -(-(request.known_length + request.decodes_in_flight) // checkpoints.interval) * checkpoints.interval
        if length > request.length_bound(self._limits.growth) or not checkpoints.provide_row(decoded):
            return []
        decoded.length, decoded.awaited = length, request.decodes_in_flight
        copy = request.row, decoded.row
        self._publish_decoded(request)
        return [copy]

    def _publish_decoded(self, request: Request) -> None:
        """Publish the undecided copy of a request's state as a checkpoint if the copied length is the expected one, else
        discard it.

        The last results of a request may have more tokens than the request keeps, so they decide nothing.
        """
        checkpoints, decoded = self.pages.checkpoints, request.decoded_state
        if checkpoints is None or not decoded.length or decoded.awaited:
            return
        if not decoded.is_exact and (request.finished or request.known_length != decoded.length):
            decoded.length = 0
            return
        decoded.is_exact = True
        key, later_pages = request.page_key, request.registered - decoded.length // self.pages.page_size
        for _ in range(later_pages):
            key = None if key is None else key.parent
        if key is not None and later_pages >= 0:
            checkpoints.publish(decoded, key)

    @staticmethod
    def _can_decode(request: Request) -> bool:
        """Return True if the request's context is prefilled and one more iteration can add tokens to its output."""
        return not (request.finished or request.is_prefill_only or request.needs_prefill or request.will_finish)

    def handle_landed(self, batch: Batch, accepted: Sequence[int]) -> None:
        """Count the results of ``batch`` as read by the host: its requests have one iteration less in flight.

        ``accepted``: number of accepted draft tokens of each decoding request that continues.
        """
        self._count(batch, -1)
        for request in batch.decode:
            request.decoded_state.awaited = max(0, request.decoded_state.awaited - 1)
        report_accepted(self._draft_length, batch, accepted)

    def max_accepted(self, batch: Batch) -> tuple[int, ...]:
        """Return the maximum number of accepted draft tokens of each decoding request of ``batch``."""
        length = min(batch.drafted, self._limits.growth - 1)
        return batch.draft_lengths or (length,) * len(batch.decode)

    def _count(self, batch: Batch, change: int) -> None:
        """Change the in-flight counts of all requests of ``batch`` by 1 or -1. No other code changes them."""
        for request in batch.requests:
            request.in_flight += change
        for request in batch.decode:
            request.decodes_in_flight += change
            request.tokens_in_flight += change
        for chunk in batch.prefill:
            if chunk.is_final:
                chunk.request.tokens_in_flight += change

    def register(self, request: Request, filled: int) -> None:
        """Register the request's full pages among its first ``filled`` tokens in the prefix cache."""
        if self.pages.shares_prefixes and (request.registered + 1) * self.pages.page_size <= filled:
            # Not in each iteration: the host takes milliseconds to join a long prompt and its output.
            tokens = request.context if request.needs_prefill else (*request.prompt, *request.output)
            request.page_key, request.registered = self.pages.register(
                request.pages, tokens, filled, request.page_key, request.registered, request.extra_identity
            )
        self._publish_decoded(request)

    def retire(self) -> None:
        """Free rows and pages of finished requests that no iteration in flight reads or writes."""
        for request in [r for r in self._running if r.finished and r.in_flight == 0]:
            self._release(request)

    # -- pages -----------------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        """Allocate the pages that the next iteration can write, for each decoding request; preempt if no page is free."""
        for request in list(self._running):
            if not self._can_decode(request) or request not in self._running:
                continue
            written = request.length_bound(self._limits.growth) + self._limits.slots
            needed = self._pages_of(min(written, request.length_limit + self._limits.spare))
            while request in self._running and len(request.pages) < needed:
                if self.pages.available:
                    self._append(request, self.pages.allocate())
                else:
                    self._preempt()

    def _preempt(self) -> None:
        """Free row and pages of the least urgent request and queue it again."""
        if any(request.in_flight for request in self._running):
            raise OutOfPages
        victim = next(request for request in reversed(self._running) if not request.finished)
        self.preemptions += 1
        self._requeue(victim)

    def undo_batches(self, batches: Sequence[Batch], *, corrupted: bool) -> None:
        """Undo ``batches`` that failed or weren't completely launched, and queue their requests again.

        No other batch may be in flight. The requests prefill their prompt and their output as known to the host. All pages
        become unregistered, because some may lack their contents. ``corrupted``: a failed operation may have written shared
        memory, so that all running requests start again.
        """
        affected = {request.id: request for request in self._running} if corrupted else {}
        for batch in batches:
            self._count(batch, -1)
            # An admitted request may have no token in the batch, but the batch initializes its row.
            affected |= {request.id: request for request in (*batch.requests, *batch.admitted)}
        self.pages.unregister_all()
        for request in affected.values():
            if not request.finished:
                self._requeue(request)
        self.retire()

    def _requeue(self, request: Request) -> None:
        """Free the request's row and pages and queue it, to prefill its prompt and its output again."""
        self._release(request)
        request.context = (*request.prompt, *request.output)
        request.prefilled = 0
        request.preemptions += 1
        self.add(request)

    def _release(self, request: Request) -> None:
        row, pages = self.detach(request)
        self.rows.give_back(row)
        self.pages.give_back(pages)

    def detach(self, request: Request) -> tuple[int, list[int]]:
        """Remove a running request that has no iteration in flight, and return its row and its pages.

        The caller holds row and pages from now on and gives them back to their pools.
        """
        self._running.remove(request)
        # Writes to the row that no batch has taken yet would meet those of its next owner in one operation.
        self._table_updates = [update for update in self._table_updates if update[0] != request.row]
        self._restored_states = [copy for copy in self._restored_states if copy[1] != request.row]
        row, pages = request.row, request.pages
        request.pages, request.row = [], 0
        request.registered, request.page_key = 0, None
        if self.pages.checkpoints is not None:
            self.pages.checkpoints.release(request.decoded_state)
            request.decoded_state = DecodedState()
        return row, pages

    def reserve(self, request: Request, *, needs_row: bool) -> bool:
        """Allocate pages for an unqueued request whose context another engine computes, and with ``needs_row`` the row that
        its recurrent states are written to. Return False if too few are free.
        """
        needed = self._initial_pages(request)
        if needed > self.pages.available or (needs_row and not self.rows.available):
            return False
        request.pages = [self.pages.allocate() for _ in range(needed)]
        request.row = self.rows.allocate() if needs_row else 0
        return True

    def free_reserved(self, request: Request) -> None:
        """Free the pages and the row that :meth:`reserve` allocated, if any."""
        self.pages.give_back(request.pages)
        if request.row:
            self.rows.give_back(request.row)
        request.pages, request.row = [], 0

    def _append(self, request: Request, page: int) -> None:
        self._table_updates.append((request.row, len(request.pages), page))
        request.pages.append(page)

    def max_pages(self, tokens: int) -> int:
        """Return the maximum number of pages of a request with at most ``tokens`` tokens."""
        return self._pages_of(tokens + self._limits.spare)

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.pages.page_size)

    # -- who runs --------------------------------------------------------------------------------------------------

    def _admit(self) -> tuple[Request, ...]:
        """Allocate a row and the pages of the context for waiting requests, while both are free."""
        admitted: list[Request] = []
        short = False  # a more urgent request waits for pages
        has_reserved_rows = self.rows.count - 1 - self.rows.available > len(self._running)
        for request in list(self._waiting):
            if not self.rows.available and not request.row:
                if has_reserved_rows:
                    continue
                break
            if short and not request.pages:
                continue
            reserved, request.pages = request.pages, []
            hit, key = (reserved, None) if reserved else self._match(request)
            needed = self._initial_pages(request)
            if needed - len(hit) > self.pages.available:
                # Less urgent requests wait too. Those with reserved pages don't: the pages that they free end the wait.
                self.pages.give_back(hit)
                short = True
                continue
            self._waiting.remove(request)
            if request.arrival is None:
                self.prefix_looked_up += len(request.context)
                self.prefix_hits += len(hit) * self.pages.page_size
            request.row = request.row or self.rows.allocate()
            if not reserved:
                request.registered, request.page_key = len(hit), key
                request.prefilled = request.prefill_start = len(hit) * self.pages.page_size
                self._restore(request, key)
            for page in hit:
                self._append(request, page)
            while len(request.pages) < needed:
                self._append(request, self.pages.allocate())
            bisect.insort(self._running, request, key=lambda r: r.scheduling_key)
            admitted.append(request)
        return tuple(admitted)

    def _restore(self, request: Request, key: PageKey | None) -> None:
        """Schedule the copy of the checkpoint after page ``key`` to the request's row, before its prefill continues there."""
        if self.pages.checkpoints is not None and key is not None:
            row = self.pages.checkpoints.row_of(key)
            assert row is not None  # a prefix ends at a checkpoint, and no page was evicted since it was matched
            self._restored_states.append((row, request.row))

    def _initial_pages(self, request: Request) -> int:
        """Return the number of pages for the context and for the slots that the first iteration writes after it."""
        longest = request.length_limit + self._limits.spare
        return self._pages_of(min(len(request.context) + self._limits.slots, longest))

    def _match(self, request: Request) -> tuple[list[int], PageKey | None]:
        """Return the cached pages of the context; none for an arrival, whose state needs separate pages."""
        return ([], None) if request.arrival is not None else self.pages.match(request.context, request.extra_identity)

    def _chunks(self, decoding: int, width: int, *, can_mix: bool) -> tuple[PrefillChunk, ...]:
        """Return the prefill chunks of an iteration in which ``decoding`` requests decode ``width`` tokens each.
        ``can_mix``: these requests may share a pass with prompts.
        """
        pending = [r for r in self._running if not r.finished and r.needs_prefill and r.arrival is None]
        if self._gathers(pending, decoding, can_mix=can_mix):
            return ()
        chunks: list[PrefillChunk] = []
        budget = self._prefill_budget(decoding * width)
        for request in pending:
            if budget == 0 or len(chunks) == MAX_PREFILL_SEQUENCES:
                break
            end = min(len(request.context), request.prefilled + budget)
            if self.pages.checkpoints is not None:
                end = self.pages.checkpoints.chunk_end(request.prefilled, end, len(request.context))
            chunks.append(PrefillChunk(request, request.prefilled, end))
            budget -= end - request.prefilled
        return tuple(chunks)

    def _prefill_budget(self, decode_tokens: int) -> int:
        """Return the maximum number of prompt tokens of an iteration with ``decode_tokens`` decoding tokens."""
        limits = self._limits
        if not decode_tokens or limits.token_budget is None:
            return limits.prefill_chunk
        remaining = max(limits.token_budget - decode_tokens, limits.token_budget // 4, 1)
        return min(limits.prefill_chunk, remaining)

    def _gathers(self, pending: Sequence[Request], decoding: int, *, can_mix: bool) -> bool:
        """Return True if the new prompts wait for further prompts. They don't wait once a prefill has begun."""
        limits = self._limits
        waits = (
            bool(pending)
            and not can_mix
            and decoding >= max(1, limits.crowd)
            and self._gathered_iterations < limits.gather_iterations
            and all(request.prefilled == request.prefill_start for request in pending)
            and sum(len(request.context) - request.prefilled for request in pending) < limits.gather_tokens
        )
        self._gathered_iterations = self._gathered_iterations + 1 if waits else 0
        return waits


def count_repeats(policy: DraftLengthPolicy, decode: Sequence[Request]) -> tuple[int, ...]:
    """Return how many of each request's last tokens occurred before, if ``policy`` reads it; else nothing."""
    if not policy.reads_repeats:
        return ()
    return tuple(request.repeated_suffix.update(request.prompt, request.output) for request in decode)


def choose_draft_lengths(
    policy: DraftLengthPolicy, decode: Sequence[Request], repeats: Sequence[int] = ()
) -> tuple[int, tuple[int, ...]]:
    """Return the draft length that ``policy`` chooses for a batch of greedy requests, and how many of these tokens the target
    verifies for each request (empty: all).
    """
    if policy.context is not None and all(request.known_length >= policy.context for request in decode):
        return policy.lengths[0], ()
    cached = sum(request.known_length for request in decode) if policy.reads_load else 0
    if policy.widths:
        return policy.choose_each([request.acceptance for request in decode], cached)
    return policy.choose(len(decode), cached, repeats), ()


def report_accepted(policy: DraftLengthPolicy, batch: Batch, accepted: Sequence[int]) -> None:
    """Pass the numbers of accepted draft tokens to ``policy``, if it needs them, see :meth:`Scheduler.handle_landed`."""
    if policy.needs_acceptance and accepted:
        if policy.widths:
            counts = iter(accepted)
            lengths = batch.draft_lengths or (batch.drafted,) * len(batch.decode)
            for request, length in zip(batch.decode, lengths, strict=True):
                if not request.finished:
                    request.acceptance.observe(length, next(counts))
        repeats = zip(batch.decode, batch.repeats, strict=policy.reads_repeats)
        policy.observe(batch.drafted, accepted, [count for request, count in repeats if not request.finished])
