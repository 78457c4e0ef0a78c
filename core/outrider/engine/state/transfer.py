"""Moves a request's device state from one engine to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import Backend, Fence, Stream
from outrider.engine.fences import FenceSet
from outrider.engine.requests.hand_over import HandOver
from outrider.engine.requests.lent import Arrived
from outrider.engine.requests.request import Request
from outrider.engine.state.rows import FutureMap, RowTable
from outrider.model import KVCache, LanguageModel
from outrider.speculative.proposer import Proposer
from outrider.speculative.slots import slots_of


class Transfer:
    """Takes the state of requests out of an engine's caches and rows, and writes it into them; all of it on forward."""

    def __init__(
        self,
        backend: Backend,
        forward: Stream,
        model: LanguageModel,
        proposer: Proposer,
        *,
        cache: KVCache,
        rows: RowTable,
        future: FutureMap,
        fences: FenceSet,
        group: int = 0,
    ) -> None:
        """``group``: the data-parallel group of this rank."""
        self._group = group
        self._backend = backend
        self._forward = forward
        self._model = model
        self._proposer = proposer
        self._cache = cache
        self._rows = rows
        self._future = future
        self._fences = fences

    def collect(self, request: Request) -> HandOver:
        """Copy the state of a decoding request, whose results the host has all handled, out of the engine's caches; of one in
        another data-parallel group there is none here.

        Its row and pages may be given back then: pages are reused on forward, behind the copies, and the row's next use
        waits for *shared reads done*, which is opened anew.
        """
        length = len(request.prompt) + len(request.output) - 1
        keys_values, draft_caches, relay = self._state(request, length) if request.group == self._group else ((), (), {})
        self._fences.handed_over.signal(self._forward)
        self._fences.shared_reads_done.signal(self._forward)
        return HandOver(
            prompt=request.prompt,
            output=tuple(request.output),
            params=request.params,
            priority=request.priority,
            media=request.media.media if request.media is not None else (),
            logprobs=tuple(request.logprobs),
            iterations=request.iterations,
            verified_tokens=request.verified_tokens,
            length=length,
            keys_values=keys_values,
            draft_caches=draft_caches,
            relay=relay,
            model=self._model.config,
            dtype=self._model.dtype,
            cache_dtype=self._model.cache_dtype,
            proposer=self._proposer.name,
            backend=self._backend,
            stream=self._forward,
            ready=self._fences.handed_over,
            group=request.group,
        )

    def _state(self, request: Request, length: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Mapping[str, Tensor]]:
        """Keys and values, entries of the draft's caches, and what is relayed."""
        with self._backend.on(self._forward):
            slots = self._slots(request.row, length + 1)
            keys_values = tuple(cache.flatten(0, 1)[slots[:length]] for pair in self._cache.layers for cache in pair)
            draft_caches = tuple(cache.flatten(0, 1)[slots] for cache in self._proposer.caches)
            return keys_values, draft_caches, dict(self._future.relayed(self._one(request.row)))

    def bring_here(self, handed: HandOver) -> HandOver:
        """``handed`` with its tensors where this engine can read them. From another backend they come through pinned host
        memory, and the host waits for the copy: between two devices there is no fence that both know.
        """
        if handed.backend is self._backend:
            return handed
        names = list(handed.relay)
        given = [*handed.keys_values, *handed.draft_caches, *(handed.relay[name] for name in names)]
        values = self._through_host(handed, given)
        target, draft = len(handed.keys_values), len(handed.draft_caches)
        return replace(
            handed,
            keys_values=tuple(values[:target]),
            draft_caches=tuple(values[target : target + draft]),
            relay=dict(zip(names, values[target + draft :], strict=True)),
            backend=self._backend,
            stream=self._forward,
            ready=self._fences.handed_over,
        )

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """All that has pages: keys and values of each layer, then the proposer's caches; [pages, page size, ...] each."""
        return (*(cache for pair in self._cache.layers for cache in pair), *self._proposer.caches)

    def depart(self, request: Request, ready: Fence) -> Mapping[str, Tensor]:
        """Copy what the proposer relays for a request, of which nothing is in flight, to the host. Signal ``ready`` behind
        that and everything that was enqueued for its pages; the result may be read once the host has seen it done.

        Its row may be given back then; its pages stay the caller's.
        """
        with self._backend.on(self._forward):
            relay = dict(self._future.relayed(self._one(request.row)))
        copies: dict[str, Tensor] = {}
        for name, value in relay.items():
            pinned = self._backend.empty_pinned("relay", value.shape, value.dtype)
            pinned.renew()
            self._backend.copy_async(pinned.tensor, value, stream=self._forward)
            copies[name] = pinned.tensor
        ready.signal(self._forward)
        self._fences.shared_reads_done.signal(self._forward)
        return copies

    def await_pages(self, free: Fence) -> None:
        """Signal ``free`` behind everything that was enqueued for pages so far."""
        free.signal(self._forward)

    def pinned_relay(self, relay: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copies of host tensors in pinned memory, from where forward can take them."""
        copies: dict[str, Tensor] = {}
        for name, value in relay.items():
            pinned = self._backend.empty_pinned("relay", value.shape, value.dtype)
            pinned.renew()
            pinned.tensor.copy_(value)
            copies[name] = pinned.tensor
        return copies

    def bring_in(self, arrivals: Sequence[tuple[Request, HandOver | Arrived]]) -> None:
        """Write the state of arriving requests into their pages and rows, and publish their lengths; on forward.

        The batch's record holds the tensors until its results are back, so that their memory isn't reused before.
        """
        for request, handed in arrivals:
            if isinstance(handed, Arrived):
                self._enter(request, handed)
                continue
            handed.ready.wait(self._forward)
            with self._backend.on(self._forward):
                slots = self._slots(request.row, handed.length + 1)
                pages = [cache for pair in self._cache.layers for cache in pair]
                for cache, values in zip(pages, handed.keys_values, strict=True):
                    _write_rows(cache, slots[: handed.length], values)
                for cache, values in zip(self._proposer.caches, handed.draft_caches, strict=True):
                    _write_rows(cache, slots, values)
                row = self._one(request.row)
                self._future.publish(row, self._one(handed.length))
                self._future.stash(row, self._one(handed.output[-1]), handed.relay)

    def _enter(self, request: Request, arrived: Arrived) -> None:
        """The row of a request whose pages are filled."""
        relay: dict[str, Tensor] = {}
        for name, value in arrived.relay.items():
            with self._backend.on(self._forward):
                relay[name] = torch.empty(value.shape, dtype=value.dtype, device=self._backend.device)
            self._backend.copy_async(relay[name], value, stream=self._forward)
        with self._backend.on(self._forward):
            row = self._one(request.row)
            self._future.publish(row, self._one(arrived.length))
            self._future.stash(row, self._one(arrived.last), relay)

    def _slots(self, row: int, count: int) -> Tensor:
        """Cache slots of the first ``count`` tokens of a row."""
        places = torch.arange(count, device=self._backend.device).unsqueeze(0)
        return slots_of(places, self._rows.tables[row : row + 1], self._cache.page_size).squeeze(0)

    def _one(self, value: int) -> Tensor:
        return torch.full((1,), value, dtype=torch.int64, device=self._backend.device)

    def _through_host(self, handed: HandOver, given: Sequence[Tensor]) -> list[Tensor]:
        """Copies of ``given`` on this engine's device; all copies have finished when it returns."""
        source = handed.backend
        handed.ready.wait_host()
        left = [source.empty_pinned("hand_over", tensor.shape, tensor.dtype) for tensor in given]
        taken = [buffer.renew() for buffer in left]
        for buffer, tensor in zip(left, given, strict=True):
            source.copy_async(buffer.tensor, tensor, stream=handed.stream)
        handed.ready.signal(handed.stream)
        handed.ready.wait_host()
        values = []
        for buffer, generation, tensor in zip(left, taken, given, strict=True):
            pinned = self._backend.empty_pinned("hand_over", tensor.shape, tensor.dtype)
            pinned.renew()
            pinned.tensor.copy_(buffer.read(generation))
            with self._backend.on(self._forward):
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._backend.device)
            self._backend.copy_async(value, pinned.tensor, stream=self._forward)
            values.append((value, pinned))
        self._fences.handed_over.signal(self._forward)
        self._fences.handed_over.wait_host()  # the pinned buffers go away
        return [value for value, _ in values]


def _write_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write ``rows`` to slots of pages; as bytes where those hold eight-bit floats, of which torch copies no rows."""
    pages = cache.flatten(0, 1)
    if pages.dtype.itemsize == 1:
        pages, rows = pages.view(torch.uint8), rows.view(torch.uint8)
    pages.index_copy_(0, slots, rows)
