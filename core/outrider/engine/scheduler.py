"""Which request does what in the next iteration. Host state alone: no tensor, no device."""

from __future__ import annotations

from collections import deque

from outrider.engine.pages import FreeList
from outrider.engine.request import Request
from outrider.engine.staging import Batch, PrefillChunk


class Scheduler:
    """First come, first served; continuous batching with chunked prefill.

    A request is admitted when a row and all pages that it can ever need are free, so it can't run out later. Every
    admitted request whose prompt is done decodes in each iteration; prompts share ``prefill_chunk`` tokens.
    """

    def __init__(self, *, rows: FreeList, pages: FreeList, page_size: int, prefill_chunk: int) -> None:
        self.rows = rows
        self.pages = pages
        self._page_size = page_size
        self._prefill_chunk = prefill_chunk
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether an iteration would do anything."""
        return bool(self._waiting) or any(not r.finished for r in self._running)

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + sum(not r.finished for r in self._running)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._waiting.append(request)

    def drop_waiting(self, request: Request) -> bool:
        """Take a request out of the queue; False when it was admitted already."""
        if request in self._waiting:
            self._waiting.remove(request)
            return True
        return False

    def pages_for(self, request: Request) -> int:
        """Pages that the request needs at its longest."""
        tokens = len(request.prompt) + request.params.max_tokens
        return -(-tokens // self._page_size)

    def next_batch(self) -> Batch | None:
        """The next iteration, or None when there is nothing to do. Counts its requests as in flight."""
        admitted, updates = self._admit()
        decode = tuple(r for r in self._running if not r.finished and not r.needs_prefill)
        prefill = self._chunks()
        if not decode and not prefill:
            return None
        for chunk in prefill:
            chunk.request.prefilled = chunk.end
        batch = Batch(prefill, decode, admitted, updates)
        for request in batch.requests:
            request.in_flight += 1
        for request in decode:
            request.decodes_in_flight += 1
        return batch

    def retire(self) -> None:
        """Free rows and pages of finished requests that no iteration in flight can still read or write."""
        over = [r for r in self._running if r.finished and r.in_flight == 0]
        for request in over:
            self._running.remove(request)
            self.pages.give_back(request.pages)
            self.rows.give_back((request.row,))
            request.pages = []
            request.row = 0

    def _admit(self) -> tuple[tuple[Request, ...], tuple[tuple[int, int, int], ...]]:
        admitted: list[Request] = []
        updates: list[tuple[int, int, int]] = []
        while self._waiting and self.rows.available:
            request = self._waiting[0]
            needed = self.pages_for(request)
            if needed > self.pages.available:
                break
            self._waiting.popleft()
            request.row = self.rows.take()
            request.pages = [self.pages.take() for _ in range(needed)]
            updates.extend((request.row, index, page) for index, page in enumerate(request.pages))
            self._running.append(request)
            admitted.append(request)
        return tuple(admitted), tuple(updates)

    def _chunks(self) -> tuple[PrefillChunk, ...]:
        chunks: list[PrefillChunk] = []
        budget = self._prefill_chunk
        for request in self._running:
            if budget == 0:
                break
            if request.finished or not request.needs_prefill:
                continue
            end = min(len(request.prompt), request.prefilled + budget)
            chunks.append(PrefillChunk(request, request.prefilled, end))
            budget -= end - request.prefilled
        return tuple(chunks)
