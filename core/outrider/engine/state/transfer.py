"""Transfer of requests between two engines: copies of a request's rows and caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from outrider.device import Fence
from outrider.engine.requests.hand_over import Arrival, HandOver, engine_fit
from outrider.engine.requests.request import Request
from outrider.engine.state.parts import EngineParts
from outrider.speculative.proposer import slots_of


class StateTransfer:
    """Copies of requests' state out of and into an engine's caches and rows, on the forward stream."""

    def __init__(self, parts: EngineParts) -> None:
        self._backend, self._forward, self._fences = parts.backend, parts.streams.forward, parts.fences
        self._model, self._proposer, self._cache = parts.model, parts.proposer, parts.cache
        self._rows, self._future = parts.rows, parts.future
        data = parts.model.ranks.data
        self._group = 0 if data is None else data.rank

    @cached_property
    def fit(self) -> Mapping[str, str]:
        """The properties that an engine must share to continue a request of this one."""
        return engine_fit(self._model, self._proposer)

    def copy_request_state(self, request: Request) -> HandOver:
        """Copy the state of a decoding request out of the engine's caches. The host must have handled all its results.

        A rank of another data-parallel group has no tensors of the request. The caller may free row and pages afterwards:
        the forward stream reuses the pages after the copies, and the next use of the row waits for *shared reads done*.
        """
        length = len(request.prompt) + len(request.output) - 1
        keys_values, draft_caches, relay, states = (
            self._state(request, length) if request.group == self._group else ((), (), {}, ())
        )
        self._fences.handed_over.signal(self._forward)
        self._fences.shared_reads_done.signal(self._forward)
        return HandOver(
            **request.state_fields(),
            keys_values=keys_values,
            draft_caches=draft_caches,
            relay=relay,
            states=states,
            fit=self.fit,
            backend=self._backend,
            stream=self._forward,
            ready=self._fences.handed_over,
            group=request.group,
        )

    def _state(
        self, request: Request, length: int
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Mapping[str, Tensor], tuple[Tensor, ...]]:
        """Return copies of keys and values, of draft cache entries, of the relayed tensors, and of recurrent states."""
        with self._backend.on(self._forward):
            slots = self._slots(request.row, length + 1)
            keys_values = tuple(cache.flatten(0, 1)[slots[:length]] for pair in self._cache.layers for cache in pair)
            draft_caches = tuple(cache.flatten(0, 1)[slots] for cache in self._proposer.caches)
            row = self._scalar(request.row)
            self._model.settle(self._cache, row)
            states = tuple(self._model.kernels.gather_rows(state, row) for state in self.states)
            return keys_values, draft_caches, dict(self._future.gather_relay(row)), states

    @property
    def states(self) -> tuple[Tensor, ...]:
        """The state tensors of all recurrent layers, [rows, ...] each: the target's, then the proposer's."""
        return tuple(state for layer in (*self._cache.states, *self._proposer.states) for state in layer)

    def copy_to_this_backend(self, handed: HandOver) -> HandOver:
        """Return ``handed`` with tensors on this engine's backend.

        Tensors of another backend are copied through pinned host memory. The host waits for the copies, because two backends
        share no fences.
        """
        if handed.backend is self._backend:
            return handed
        tensors = [*handed.keys_values, *handed.draft_caches, *handed.relay.values(), *handed.states]
        copies = iter(self._copy_through_host(handed, tensors))
        return replace(
            handed,
            keys_values=tuple(next(copies) for _ in handed.keys_values),
            draft_caches=tuple(next(copies) for _ in handed.draft_caches),
            relay={name: next(copies) for name in handed.relay},
            states=tuple(next(copies) for _ in handed.states),
            backend=self._backend,
            stream=self._forward,
            ready=self._fences.handed_over,
        )

    @property
    def paged_caches(self) -> tuple[Tensor, ...]:
        """All paged caches: keys, then values of each layer, then the proposer's caches; [pages, page size, ...] each."""
        return (*(cache for pair in self._cache.layers for cache in pair), *self._proposer.caches)

    def copy_relay_to_host(self, request: Request, ready: Fence) -> Mapping[str, Tensor]:
        """Copy the relayed tensors of a request without iterations in flight to pinned host memory.

        Signals ``ready`` after these copies and all enqueued writes to the request's pages and recurrent states. The host may
        read the result once ``ready`` is done. The caller keeps the pages, and with recurrent layers the row.
        """
        with self._backend.on(self._forward):
            row = self._scalar(request.row)
            self._model.settle(self._cache, row)
            relay = dict(self._future.gather_relay(row))
        copies: dict[str, Tensor] = {}
        for name, value in relay.items():
            copies[name] = self._new_pinned(value)
            self._backend.copy_async(copies[name], value, stream=self._forward)
        ready.signal(self._forward)
        self._fences.shared_reads_done.signal(self._forward)
        return copies

    def signal_pages_free(self, free: Fence) -> None:
        """Signal the fence ``free`` after all accesses to pages and recurrent states that are enqueued so far."""
        free.signal(self._forward)

    def copy_relay_to_pinned(self, relay: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return copies of host tensors in pinned memory, for asynchronous copies to the device."""
        return {name: self._new_pinned(value).copy_(value) for name, value in relay.items()}

    def _new_pinned(self, value: Tensor) -> Tensor:
        pinned = self._backend.empty_pinned("relay", value.shape, value.dtype)
        pinned.renew()
        return pinned.tensor

    def write_arrivals(self, arrivals: Sequence[tuple[Request, Arrival]]) -> None:
        """Write the state of arriving requests to their pages and rows, and publish their lengths, on the forward stream.

        The batch holds the tensors until the host has its results, so that their memory isn't reused earlier.
        """
        for request, arrival in arrivals:
            with self._backend.on(self._forward):
                row = self._scalar(request.row)
            if isinstance(arrival, HandOver):
                self._write_caches(request.row, row, arrival)
                relay = arrival.relay
            else:
                relay = {name: self._copy_to_device(value) for name, value in arrival.items()}
            with self._backend.on(self._forward):
                self._future.publish(row, self._scalar(len(request.context)))
                self._future.stash(row, self._scalar(request.output[-1]), relay)

    def _write_caches(self, number: int, row: Tensor, handed: HandOver) -> None:
        """Write the cache entries and recurrent states of a request to the pages and states of row ``number``, which ``row``
        int64 [1] holds on the device.
        """
        handed.ready.wait(self._forward)
        with self._backend.on(self._forward):
            slots = self._slots(number, handed.length + 1)
            pages = [cache for pair in self._cache.layers for cache in pair]
            for cache, values in zip(pages, handed.keys_values, strict=True):
                _write_rows(cache, slots[: handed.length], values)
            for cache, values in zip(self._proposer.caches, handed.draft_caches, strict=True):
                _write_rows(cache, slots, values)
            for state, value in zip(self.states, handed.states, strict=True):
                self._model.kernels.scatter_rows(state, row, value)

    def _copy_to_device(self, pinned: Tensor) -> Tensor:
        with self._backend.on(self._forward):
            copy = torch.empty(pinned.shape, dtype=pinned.dtype, device=self._backend.device)
        self._backend.copy_async(copy, pinned, stream=self._forward)
        return copy

    def _slots(self, row: int, count: int) -> Tensor:
        """Return the cache slots of the first ``count`` tokens of a request row, int64 [count]."""
        positions = torch.arange(count, device=self._backend.device).unsqueeze(0)
        return slots_of(positions, self._rows.tables[row : row + 1], self._cache.page_size).squeeze(0)

    def _scalar(self, value: int) -> Tensor:
        return torch.full((1,), value, dtype=torch.int64, device=self._backend.device)

    def _copy_through_host(self, handed: HandOver, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the sender's ``tensors`` on this engine's device, after all copies have finished."""
        source = handed.backend
        handed.ready.wait_host()
        sent = [source.empty_pinned("hand_over", tensor.shape, tensor.dtype) for tensor in tensors]
        generations = [buffer.renew() for buffer in sent]
        for buffer, tensor in zip(sent, tensors, strict=True):
            source.copy_async(buffer.tensor, tensor, stream=handed.stream)
        handed.ready.signal(handed.stream)
        handed.ready.wait_host()
        copies = []
        for buffer, generation, tensor in zip(sent, generations, tensors, strict=True):
            pinned = self._backend.empty_pinned("hand_over", tensor.shape, tensor.dtype)
            pinned.renew()
            pinned.tensor.copy_(buffer.read_generation(generation))
            copies.append((self._copy_to_device(pinned.tensor), pinned))
        self._fences.handed_over.signal(self._forward)
        self._fences.handed_over.wait_host()  # the pinned buffers are freed afterwards
        return [copy for copy, _ in copies]


def _write_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write ``rows`` to cache slots. Views 8-bit floats as bytes, because torch has no index_copy_ for them."""
    pages = cache.flatten(0, 1)
    if pages.dtype.itemsize == 1:
        pages, rows = pages.view(torch.uint8), rows.view(torch.uint8)
    pages.index_copy_(0, slots, rows)
