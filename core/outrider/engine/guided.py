"""Guided decoding: the masks of guided requests, with all waits that they add to an iteration.

Between draft and verify of an iteration with a guided request:

    forward:  draft ── draft_outputs_ready ─┐                                        ┌─ join · verify
    copy:               draft to the host ──┴─ draft_on_host ─┐                      │
    host:                                   walk the grammars ┴─ masks ─┐            │
    schedule:                                                    upload ┴ masks_ready ┘
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.device import KernelSet, PinnedBuffer
from outrider.engine.guides.grammars import ALLOW_ALL_WORD, mask_words
from outrider.engine.requests.batch import Batch
from outrider.engine.requests.request import Request
from outrider.engine.stages import DecodeBatch, Frame
from outrider.engine.state.parts import EngineParts, ring_entries
from outrider.speculative.proposer import Draft


class GuidedDecoding:
    """The masks of one engine's guided requests. The host walks their grammars. A request without a guide has masks that
    allow every token.

    Device buffers, int32 [M, N, W] for drafts and int32 [M, W] for prompts, have pinned rings for the copies. M: maximum
    number of requests; N: nodes of each request, including the root; W: 32-bit words of a mask. A ring entry is free once
    the host has read the results of its iteration. The device buffers need no ring, because a guided iteration starts only
    while no iteration is in flight.
    """

    def __init__(self, parts: EngineParts) -> None:
        """Allocate the buffers, which exist when this returns: other streams may use them."""
        self._parts = parts
        backend, forward = parts.backend, parts.streams.forward
        nodes, requests = parts.proposer.nodes, parts.config.max_requests
        self._words = words = mask_words(parts.model.config.vocab_size)
        draft_shape, prefill_shape = (requests, nodes + 1, words), (requests, words)
        with backend.on(forward), backend.guard("allocating the masks of guided requests"):
            self._draft_masks = torch.full(draft_shape, ALLOW_ALL_WORD, dtype=torch.int32, device=backend.device)
            self._prefill_masks = torch.full(prefill_shape, ALLOW_ALL_WORD, dtype=torch.int32, device=backend.device)
            self._draft_ring = self._ring("masks", draft_shape, torch.int32)
            self._prefill_ring = self._ring("first masks", prefill_shape, torch.int32)
            self._tokens_ring = self._ring("drafted", (requests, nodes), torch.int64)
            self._parents_ring = self._ring("parents", (requests, nodes + 1), torch.int64)
        forward.synchronize()

    def _ring(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[PinnedBuffer]:
        entries, backend = ring_entries(self._parts.config), self._parts.backend
        return [backend.empty_pinned(f"{name}[{entry}]", shape, dtype) for entry in range(entries)]

    def has_prompts(self, batch: Batch) -> bool:
        """Return True if a prefill chunk of ``batch`` belongs to a guided request, so that its first token needs a mask."""
        return any(chunk.request.guidance is not None for chunk in batch.prefill)

    def upload_prompt_masks(self, batch: Batch, entry: int) -> None:
        """Copy the masks of the first tokens after prompts to the device, on schedule. Schedule has waited for the reads of
        the previous masks.
        """
        if not self.has_prompts(batch):
            return
        masks = torch.full((len(batch.prefill), self._words), ALLOW_ALL_WORD, dtype=torch.int32)
        for index, chunk in enumerate(batch.prefill):
            guidance = chunk.request.guidance
            if guidance is not None and chunk.is_final and not chunk.request.finished:
                guidance.fill_next_mask(masks, index)
        self._upload(masks, self._prefill_ring[entry], self._prefill_masks)

    def mask_first_tokens(self, kernels: KernelSet, logits: Tensor) -> Tensor:
        """Return ``logits`` [S, V] of S prefill chunks with -inf at the tokens that guides forbid. Runs on forward, before
        the first tokens are chosen.
        """
        masks = self._prefill_masks[: logits.shape[0]]
        return kernels.apply_token_bitmask(logits.unsqueeze(1), masks.unsqueeze(1)).squeeze(1)

    def report_late_prompts(self, requests: Sequence[Request]) -> None:
        """Report requests whose masks for first tokens exceeded the time limit to other ranks. Does nothing with one rank:
        the request's guidance knows.
        """

    def mask_draft(self, batch: Batch, decode: DecodeBatch, frame: Frame, entry: int) -> None:
        """Upload the token masks of each draft node and put their view into ``frame.masks``. The host waits for the draft
        tokens and advances each grammar along them.
        """
        streams, fences = self._parts.streams, self._parts.fences
        count, drafted = len(batch.decode), decode.drafted
        tokens, parents = [[0] * drafted] * count, [list(range(-1, drafted))] * count
        if drafted:
            fences.draft_outputs_ready.wait(streams.copy)
            self._copy_out(frame.draft, entry)
            fences.draft_on_host[entry].signal(streams.copy)
            fences.draft_on_host[entry].wait_host()
            tokens = _leading_part(self._tokens_ring[entry].tensor, (count, drafted)).tolist()
            if frame.draft.tree is not None:
                parents = _leading_part(self._parents_ring[entry].tensor, (count, drafted + 1)).tolist()
        masks = torch.full((count, drafted + 1, self._words), ALLOW_ALL_WORD, dtype=torch.int32)
        for index, request in enumerate(batch.decode):
            if request.guidance is not None and not request.finished:
                request.guidance.fill_draft_masks(tokens[index], parents[index], masks[index])
        frame.masks = self._upload(masks, self._draft_ring[entry], self._draft_masks)
        fences.masks_ready.signal(streams.schedule)
        fences.masks_ready.wait(streams.forward)

    def _copy_out(self, draft: Draft, entry: int) -> None:
        """Copy the draft tokens, and the parents of a tree, to pinned ring entry ``entry`` on the copy stream."""
        copies = [(self._tokens_ring[entry], draft.tokens)]
        if draft.tree is not None:
            copies.append((self._parents_ring[entry], draft.tree.parents))
        for pinned, value in copies:
            pinned.renew()
            target = _leading_part(pinned.tensor, value.shape)
            self._parts.backend.copy_async(target, value, stream=self._parts.streams.copy)

    def _upload(self, masks: Tensor, pinned: PinnedBuffer, device: Tensor) -> Tensor:
        """Copy ``masks`` to ``device`` through ``pinned``, on schedule. Return the part of ``device`` that has them."""
        pinned.renew()
        source, target = _leading_part(pinned.tensor, masks.shape), _leading_part(device, masks.shape)
        source.copy_(masks)
        self._parts.backend.copy_async(target, source, stream=self._parts.streams.schedule)
        return target


def _leading_part(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first elements of ``tensor`` in the smaller shape of a batch."""
    return tensor.view(-1)[: math.prod(shape)].view(*shape)
