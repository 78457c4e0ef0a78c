"""How a request's device state leaves an engine and enters another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.engine.requests.hand_over import HandOver
from outrider.engine.requests.request import Request
from outrider.speculative.slots import slots_of

if TYPE_CHECKING:
    from outrider.engine.parts import StepParts


def collect(parts: StepParts, request: Request) -> HandOver:
    """Copy the state of a decoding request, whose results the host has all handled, out of the engine's caches.

    Its row and pages may be given back then: pages are reused on forward, behind the copies, and the row's next use waits
    for *shared reads done*, which is opened anew.
    """
    forward = parts.streams.forward
    length = len(request.prompt) + len(request.output) - 1
    with parts.backend.on(forward):
        slots = _slots(parts, request.row, length + 1)
        keys_values = tuple(cache.flatten(0, 1)[slots[:length]] for pair in parts.cache.layers for cache in pair)
        draft_caches = tuple(cache.flatten(0, 1)[slots] for cache in parts.proposer.caches)
        relay = dict(parts.future.relayed(_one(parts, request.row)))
    parts.fences.handed_over.signal(forward)
    parts.fences.shared_reads_done.signal(forward)
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
        model=parts.model.config,
        dtype=parts.model.dtype,
        proposer=parts.proposer.name,
        backend=parts.backend,
        stream=forward,
        ready=parts.fences.handed_over,
    )


def bring_here(parts: StepParts, handed: HandOver) -> HandOver:
    """``handed`` with its tensors where this engine can read them. From another backend they come through pinned host
    memory, and the host waits for the copy: between two devices there is no fence that both know.
    """
    if handed.backend is parts.backend:
        return handed
    names = list(handed.relay)
    given = [*handed.keys_values, *handed.draft_caches, *(handed.relay[name] for name in names)]
    values = _through_host(parts, handed, given)
    target, draft = len(handed.keys_values), len(handed.draft_caches)
    return replace(
        handed,
        keys_values=tuple(values[:target]),
        draft_caches=tuple(values[target : target + draft]),
        relay=dict(zip(names, values[target + draft :], strict=True)),
        backend=parts.backend,
        stream=parts.streams.forward,
        ready=parts.fences.handed_over,
    )


def bring_in(parts: StepParts, arrivals: Sequence[tuple[Request, HandOver]]) -> None:
    """Write the state of arriving requests into their pages and rows, and publish their lengths; on forward.

    The batch's record holds the tensors until its results are back, so that their memory isn't reused before.
    """
    forward = parts.streams.forward
    for request, handed in arrivals:
        handed.ready.wait(forward)
        with parts.backend.on(forward):
            slots = _slots(parts, request.row, handed.length + 1)
            pages = [cache for pair in parts.cache.layers for cache in pair]
            for cache, values in zip(pages, handed.keys_values, strict=True):
                cache.flatten(0, 1).index_copy_(0, slots[: handed.length], values)
            for cache, values in zip(parts.proposer.caches, handed.draft_caches, strict=True):
                cache.flatten(0, 1).index_copy_(0, slots, values)
            row = _one(parts, request.row)
            parts.future.publish(row, _one(parts, handed.length))
            parts.future.stash(row, _one(parts, handed.output[-1]), handed.relay)


def _slots(parts: StepParts, row: int, count: int) -> Tensor:
    """Cache slots of the first ``count`` tokens of a row."""
    places = torch.arange(count, device=parts.backend.device).unsqueeze(0)
    return slots_of(places, parts.rows.tables[row : row + 1], parts.page_size).squeeze(0)


def _one(parts: StepParts, value: int) -> Tensor:
    return torch.full((1,), value, dtype=torch.int64, device=parts.backend.device)


def _through_host(parts: StepParts, handed: HandOver, given: Sequence[Tensor]) -> list[Tensor]:
    """Copies of ``given`` on this engine's device; all copies are over when it returns."""
    source, forward = handed.backend, parts.streams.forward
    handed.ready.wait_host()
    left = [source.empty_pinned("hand_over", tensor.shape, tensor.dtype) for tensor in given]
    taken = [buffer.renew() for buffer in left]
    for buffer, tensor in zip(left, given, strict=True):
        source.copy_async(buffer.tensor, tensor, stream=handed.stream)
    handed.ready.signal(handed.stream)
    handed.ready.wait_host()
    values = []
    for buffer, generation, tensor in zip(left, taken, given, strict=True):
        pinned = parts.backend.empty_pinned("hand_over", tensor.shape, tensor.dtype)
        pinned.renew()
        pinned.tensor.copy_(buffer.read(generation))
        with parts.backend.on(forward):
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=parts.backend.device)
        parts.backend.copy_async(value, pinned.tensor, stream=forward)
        values.append((value, pinned))
    parts.fences.handed_over.signal(forward)
    parts.fences.handed_over.wait_host()  # the pinned buffers go away
    return [value for value, _ in values]
