"""Masks of guided requests: the draft comes to the host, which walks each grammar along it, and the masks go back.

Letters: M most requests, N nodes of a draft with its root, W words of 32 tokens, V vocabulary. A request without a guide has
masks that allow everything, which change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.device import Backend, Fence, PinnedBuffer, Stream
from outrider.engine.requests.batch import PrefillChunk
from outrider.engine.requests.guidance import EVERYTHING, words_of
from outrider.engine.requests.request import Request
from outrider.speculative.proposer import Draft, Proposer


class Masks:
    """Device buffers int32 [M, N, W] behind drafts and [M, W] behind prompts, and the pinned rings around them.

    The caller's fences order everything. An entry of a ring is used again only once the results of its iteration are on the
    host; so is the device buffer behind drafts, since an iteration with a guide is launched when nothing is in flight.
    """

    def __init__(self, backend: Backend, proposer: Proposer, *, entries: int, max_requests: int, vocabulary: int) -> None:
        self._backend = backend
        self._is_tree = proposer.is_tree
        self._words = words = words_of(vocabulary)
        nodes = proposer.nodes
        behind, first = (max_requests, nodes + 1, words), (max_requests, words)
        self._behind = torch.full(behind, EVERYTHING, dtype=torch.int32, device=backend.device)
        self._first = torch.full(first, EVERYTHING, dtype=torch.int32, device=backend.device)
        self._behind_ring = _ring(backend, "masks", entries, behind, torch.int32)
        self._first_ring = _ring(backend, "first masks", entries, first, torch.int32)
        self._tokens_ring = _ring(backend, "drafted", entries, (max_requests, nodes), torch.int64)
        self._parents_ring = _ring(backend, "parents", entries, (max_requests, nodes + 1), torch.int64)
        self._generations = [(0, 0)] * entries

    def copy_out(self, draft: Draft, entry: int, stream: Stream) -> None:
        """Copy the drafted tokens, and a tree's shape, into the pinned entry on ``stream``."""
        tokens, parents = self._tokens_ring[entry], self._parents_ring[entry]
        self._generations[entry] = tokens.renew(), parents.renew()
        self._backend.copy_async(_front(tokens.tensor, draft.tokens.shape), draft.tokens, stream=stream)
        if draft.tree is not None:
            self._backend.copy_async(_front(parents.tensor, draft.tree.parents.shape), draft.tree.parents, stream=stream)

    def behind(self, requests: Sequence[Request], drafted: int, entry: int, copied: Fence, stream: Stream) -> Tensor:
        """Host: wait for the draft, walk, and copy the masks to the device on ``stream``; returns them, [B, N, W]."""
        count, width = len(requests), drafted + 1
        tokens, parents = [[0] * drafted] * count, [list(range(-1, drafted))] * count
        if drafted:
            copied.wait_host()
            generations = self._generations[entry]
            tokens = _front(self._tokens_ring[entry].read(generations[0]), (count, drafted)).tolist()
            if self._is_tree:
                parents = _front(self._parents_ring[entry].read(generations[1]), (count, width)).tolist()
        masks = torch.full((count, width, self._words), EVERYTHING, dtype=torch.int32)
        for index, request in enumerate(requests):
            if request.guidance is not None and not request.finished:
                request.guidance.along(tokens[index], parents[index], masks[index])
        return self._upload(masks, self._behind_ring[entry], self._behind, stream)

    def first(self, chunks: Sequence[PrefillChunk], entry: int, stream: Stream) -> None:
        """Host: the masks of the tokens behind prompts, copied to the device on ``stream``."""
        masks = torch.full((len(chunks), self._words), EVERYTHING, dtype=torch.int32)
        for index, chunk in enumerate(chunks):
            guidance = chunk.request.guidance
            if guidance is not None and chunk.final and not chunk.request.finished:
                guidance.first(masks, index)
        self._upload(masks, self._first_ring[entry], self._first, stream)

    def of_prompts(self, count: int) -> Tensor:
        """Those of ``count`` chunks, int32 [S, W]; on forward."""
        return self._first[:count]

    def _upload(self, masks: Tensor, pinned: PinnedBuffer, device: Tensor, stream: Stream) -> Tensor:
        pinned.renew()
        source, target = _front(pinned.tensor, masks.shape), _front(device, masks.shape)
        source.copy_(masks)
        self._backend.copy_async(target, source, stream=stream)
        return target


def late(requests: Sequence[Request]) -> list[int]:
    """The places of those whose grammar took too long to walk."""
    return [index for index, request in enumerate(requests) if request.guidance is not None and request.guidance.late]


def _ring(backend: Backend, name: str, entries: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[PinnedBuffer]:
    return [backend.empty_pinned(f"{name}[{entry}]", shape, dtype) for entry in range(entries)]


def _front(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The beginning of a tensor's memory, in another shape: a batch has fewer requests, or shorter drafts."""
    count = 1
    for size in shape:
        count *= size
    return tensor.view(-1)[:count].view(*shape)
