"""Masks: grammar masks of guided requests.

The draft is copied to the host. The host computes the masks after each draft node and copies them to the device. A request
without a guide has masks that allow every token.

Letters in shapes: M: maximum number of requests; N: draft nodes including the root; W: 32-bit words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.device import Backend, Fence, PinnedBuffer, Stream
from outrider.engine.guides.guidance import ALLOW_ALL_WORD, mask_words
from outrider.engine.requests.batch import PrefillChunk
from outrider.engine.requests.request import Request
from outrider.speculative.proposer import Draft, Proposer


class Masks:
    """Device buffers of masks, int32 [M, N, W] for drafts and int32 [M, W] for prefill, with pinned rings for the copies.

    The caller's fences order all accesses. A ring entry is free once the host has read the results of its iteration. The
    device buffer for drafts needs no ring, because a guided iteration starts only while no iteration is in flight.
    """

    def __init__(self, backend: Backend, proposer: Proposer, *, entries: int, max_requests: int, vocabulary: int) -> None:
        self._backend = backend
        self._is_tree = proposer.is_tree
        self._words = words = mask_words(vocabulary)
        nodes = proposer.nodes
        draft_shape, prefill_shape = (max_requests, nodes + 1, words), (max_requests, words)
        self._draft_masks = torch.full(draft_shape, ALLOW_ALL_WORD, dtype=torch.int32, device=backend.device)
        self._prefill_masks = torch.full(prefill_shape, ALLOW_ALL_WORD, dtype=torch.int32, device=backend.device)
        self._draft_ring = _ring(backend, "masks", entries, draft_shape, torch.int32)
        self._prefill_ring = _ring(backend, "first masks", entries, prefill_shape, torch.int32)
        self._tokens_ring = _ring(backend, "drafted", entries, (max_requests, nodes), torch.int64)
        self._parents_ring = _ring(backend, "parents", entries, (max_requests, nodes + 1), torch.int64)
        self._generations = [(0, 0)] * entries

    def copy_out(self, draft: Draft, entry: int, stream: Stream) -> None:
        """Copy the draft tokens, and the parents of a tree, to pinned ring entry ``entry`` on ``stream``."""
        tokens, parents = self._tokens_ring[entry], self._parents_ring[entry]
        self._generations[entry] = tokens.renew(), parents.renew()
        self._backend.copy_async(_front(tokens.tensor, draft.tokens.shape), draft.tokens, stream=stream)
        if draft.tree is not None:
            self._backend.copy_async(_front(parents.tensor, draft.tree.parents.shape), draft.tree.parents, stream=stream)

    def upload_draft_masks(
        self, requests: Sequence[Request], drafted: int, entry: int, copied: Fence, stream: Stream
    ) -> Tensor:
        """Wait for the draft on the host, compute the masks, and copy them to the device on ``stream``.

        ``copied``: the fence of :meth:`copy_out`. Returns the device masks, int32 [B, N, W].
        """
        count, width = len(requests), drafted + 1
        tokens, parents = [[0] * drafted] * count, [list(range(-1, drafted))] * count
        if drafted:
            copied.wait_host()
            generations = self._generations[entry]
            tokens = _front(self._tokens_ring[entry].read_generation(generations[0]), (count, drafted)).tolist()
            if self._is_tree:
                parents = _front(self._parents_ring[entry].read_generation(generations[1]), (count, width)).tolist()
        masks = torch.full((count, width, self._words), ALLOW_ALL_WORD, dtype=torch.int32)
        for index, request in enumerate(requests):
            if request.guidance is not None and not request.finished:
                request.guidance.fill_draft_masks(tokens[index], parents[index], masks[index])
        return self._upload(masks, self._draft_ring[entry], self._draft_masks, stream)

    def upload_prefill_masks(self, chunks: Sequence[PrefillChunk], entry: int, stream: Stream) -> None:
        """Compute the masks of the first tokens after the prompts, and copy them to the device on ``stream``."""
        masks = torch.full((len(chunks), self._words), ALLOW_ALL_WORD, dtype=torch.int32)
        for index, chunk in enumerate(chunks):
            guidance = chunk.request.guidance
            if guidance is not None and chunk.is_final and not chunk.request.finished:
                guidance.fill_next_mask(masks, index)
        self._upload(masks, self._prefill_ring[entry], self._prefill_masks, stream)

    def prefill_masks(self, count: int) -> Tensor:
        """Return the device masks of ``count`` prefill chunks, int32 [count, W], for the forward stream."""
        return self._prefill_masks[:count]

    def _upload(self, masks: Tensor, pinned: PinnedBuffer, device: Tensor, stream: Stream) -> Tensor:
        pinned.renew()
        source, target = _front(pinned.tensor, masks.shape), _front(device, masks.shape)
        source.copy_(masks)
        self._backend.copy_async(target, source, stream=stream)
        return target


def late_guidance_indices(requests: Sequence[Request]) -> list[int]:
    """Return the indices of requests whose masks took longer than the time limit."""
    return [
        index
        for index, request in enumerate(requests)
        if request.guidance is not None and request.guidance.exceeded_time_limit
    ]


def _ring(backend: Backend, name: str, entries: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[PinnedBuffer]:
    return [backend.empty_pinned(f"{name}[{entry}]", shape, dtype) for entry in range(entries)]


def _front(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first elements of ``tensor`` in the smaller shape of a batch."""
    count = 1
    for size in shape:
        count *= size
    return tensor.view(-1)[:count].view(*shape)
