"""Guided decoding: the masks of guided requests, with all waits that they add to an iteration.

Between draft and verify of an iteration with a guided request:

    forward:  draft ── draft_outputs_ready ─┐                                        ┌─ join · verify
    copy:               draft to the host ──┴─ draft_on_host ─┐                      │
    host:                                   walk the grammars ┴─ masks ─┐            │
    schedule:                                                    upload ┴ masks_ready ┘
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.device import KernelSet
from outrider.engine.requests.batch import Batch
from outrider.engine.requests.request import Request
from outrider.engine.stages import DecodeBatch, Frame
from outrider.engine.state.parts import EngineParts


class GuidedDecoding:
    """The masks of one engine's guided requests. The host walks their grammars."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._masks = parts.masks

    def has_prompts(self, batch: Batch) -> bool:
        """Return True if a prefill chunk of ``batch`` belongs to a guided request, so that its first token needs a mask."""
        return any(chunk.request.guidance is not None for chunk in batch.prefill)

    def upload_prompt_masks(self, batch: Batch, entry: int) -> None:
        """Copy the masks of the first tokens after prompts to the device, on schedule. Schedule has waited for the reads of
        the previous masks.
        """
        if self.has_prompts(batch):
            self._masks.upload_prefill_masks(batch.prefill, entry, self._parts.streams.schedule)

    def mask_first_tokens(self, kernels: KernelSet, logits: Tensor) -> Tensor:
        """Return ``logits`` [S, V] of S prefill chunks with -inf at the tokens that guides forbid. Runs on forward, before
        the first tokens are chosen.
        """
        masks = self._masks.prefill_masks(logits.shape[0])
        return kernels.apply_token_bitmask(logits.unsqueeze(1), masks.unsqueeze(1)).squeeze(1)

    def report_late_prompts(self, requests: Sequence[Request]) -> None:
        """Report requests whose masks for first tokens exceeded the time limit to other ranks. Does nothing with one rank:
        the request's guidance knows.
        """

    def mask_draft(self, batch: Batch, decode: DecodeBatch, frame: Frame, entry: int) -> None:
        """Upload the token masks of each draft node and put their view into ``frame.masks``. The host waits for the draft
        tokens and advances each grammar along them.
        """
        streams, fences, masks = self._parts.streams, self._parts.fences, self._masks
        if decode.drafted:
            fences.draft_outputs_ready.wait(streams.copy)
            masks.copy_out(frame.draft, entry, streams.copy)
            fences.draft_on_host[entry].signal(streams.copy)
        frame.masks = masks.upload_draft_masks(
            batch.decode, decode.drafted, entry, fences.draft_on_host[entry], streams.schedule
        )
        fences.masks_ready.signal(streams.schedule)
        fences.masks_ready.wait(streams.forward)
