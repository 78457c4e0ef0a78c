"""Stages, prefill, guides and step of one of several ranks: they wrap those of a single rank.

All tensor-parallel ranks compute each token, and they can differ in the last bits. So the first of them, the decider,
broadcasts its draft, its acceptance, its first tokens and the findings of its probes. It alone walks the grammars of guided
requests. A rank cannot end a request by itself: it writes a host failure, which reaches all ranks with the findings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import Decision
from outrider.engine.guided import GuidedDecoding
from outrider.engine.prefill import Prefill
from outrider.engine.requests.batch import Batch, PrefillChunk
from outrider.engine.requests.request import Request
from outrider.engine.stages import DecodeBatch, DraftStage, Frame, Stages, Verify
from outrider.engine.state.options import BatchOptions
from outrider.engine.state.parts import EngineParts
from outrider.engine.state.results import GUIDE_LATE, MEDIA_FAILED, PendingResult
from outrider.engine.state.staging import PrefillInputs
from outrider.engine.step import Step
from outrider.model import ModelRanks
from outrider.speculative.proposer import Draft
from outrider.speculative.tree import Tree


def agree_values(ranks: ModelRanks, *values: Tensor) -> list[Tensor]:
    """Return ``values`` [B, ...], int64 or bool, as the first tensor-parallel rank has them. One broadcast on the device
    carries all of them.
    """
    if ranks.tensor is None:
        return list(values)
    batch = values[0].shape[0]
    record = torch.cat([value.reshape(batch, -1).to(torch.int64) for value in values], dim=1)
    ranks.agree(record)
    parts = record.split([value[0].numel() if batch else 0 for value in values], dim=1)
    return [part.reshape(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True)]


class RankedDraft(DraftStage):
    """The draft stage of a tensor-parallel rank, which broadcasts the decider's draft tokens. Only the decider reads the
    draft distributions.
    """

    def __init__(self, parts: EngineParts, ranks: ModelRanks) -> None:
        super().__init__(parts)
        self._ranks = ranks

    def _draft(self, batch: DecodeBatch, frame: Frame) -> Draft:
        draft = super()._draft(batch, frame)
        tree = draft.tree
        if tree is None:
            (tokens,) = agree_values(self._ranks, draft.tokens)
            return replace(draft, tokens=tokens)
        tokens, parents, depths, mask = agree_values(self._ranks, draft.tokens, tree.parents, tree.depths, tree.mask)
        return replace(draft, tokens=tokens, tree=Tree(parents, depths, mask))


class RankedVerify(Verify):
    """The verify stage of a tensor-parallel rank, which broadcasts the decider's accepted tokens and probe results."""

    def __init__(self, parts: EngineParts, ranks: ModelRanks) -> None:
        super().__init__(parts)
        self._ranks = ranks

    def _accept(
        self, batch: DecodeBatch, frame: Frame, logits: Tensor, options: BatchOptions | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        tokens, path, accepted = super()._accept(batch, frame, logits, options)
        findings = self._parts.results.probe_results(batch.count)
        paths = [] if path is None else [path]
        tokens, accepted, agreed_findings, *paths = agree_values(self._ranks, tokens, accepted, findings, *paths)
        findings.copy_(agreed_findings)
        return tokens, paths[0] if paths else None, accepted


def ranked_stages(parts: EngineParts, ranks: ModelRanks) -> Stages:
    """Return the stages of an engine whose model is split over ``ranks``, with the broadcasts of draft and acceptance."""
    stages = Stages(parts)
    stages.draft, stages.verify = RankedDraft(parts, ranks), RankedVerify(parts, ranks)
    return stages


class RankedPrefill(Prefill):
    """The prefill of a tensor-parallel rank, which broadcasts the decider's first tokens and probe results."""

    def __init__(self, parts: EngineParts, guided: GuidedDecoding, ranks: ModelRanks) -> None:
        super().__init__(parts, guided)
        self._ranks = ranks

    def _sample(self, logits: Tensor, temperature: Tensor, seeds: Tensor, inputs: PrefillInputs) -> Tensor:
        findings = self._parts.results.prefill_probe_results(logits.shape[0])
        first, agreed_findings = agree_values(self._ranks, super()._sample(logits, temperature, seeds, inputs), findings)
        findings.copy_(agreed_findings)
        return first

    def _refuse_media(self, chunk: PrefillChunk, index: int, error: Exception) -> None:
        """Write a host failure: other ranks run this iteration too, and the request ends after it."""
        del chunk
        self._parts.results.write_host_failures(MEDIA_FAILED, {index: f"{type(error).__name__}: {error}"}, prefill=True)


def _late_guidance_indices(requests: Sequence[Request]) -> list[int]:
    """Return the indices of requests whose masks took longer than the time limit."""
    return [
        index
        for index, request in enumerate(requests)
        if request.guidance is not None and request.guidance.exceeded_time_limit
    ]


class DeciderGuidedDecoding(GuidedDecoding):
    """The guided decoding of the decider. It writes a host failure for each request whose masks exceeded the time limit, so
    that all ranks end the request.
    """

    def report_late_prompts(self, requests: Sequence[Request]) -> None:
        """Write a host failure for each request whose walk took too long, on forward."""
        late = dict.fromkeys(_late_guidance_indices(requests), "")
        self._parts.results.write_host_failures(GUIDE_LATE, late, prefill=True)

    def mask_draft(self, batch: Batch, decode: DecodeBatch, frame: Frame, entry: int) -> None:
        """Put the token masks into ``frame``, and write a host failure for each walk that took too long."""
        super().mask_draft(batch, decode, frame, entry)
        with self._parts.backend.on(self._parts.streams.forward):
            late = dict.fromkeys(_late_guidance_indices(batch.decode), "")
            self._parts.results.write_host_failures(GUIDE_LATE, late)


class FollowerGuidedDecoding(GuidedDecoding):
    """The guided decoding of a rank that receives the decider's tokens: it walks no grammar and masks nothing."""

    def has_prompts(self, batch: Batch) -> bool:
        """Return False: the decider masks the first tokens and broadcasts them."""
        del batch
        return False

    def mask_first_tokens(self, kernels: object, logits: Tensor) -> Tensor:
        """Return ``logits`` [S, V] unchanged: the decider broadcasts the masked choice."""
        del kernels
        return logits

    def mask_draft(self, batch: Batch, decode: DecodeBatch, frame: Frame, entry: int) -> None:
        """Leave ``frame.masks`` None: the decider broadcasts draft and acceptance."""


class RankedStep:
    """The step of a rank: before each iteration it sets the stream of the model's collectives, and the pass widths that all
    ranks share.

    With data-parallel groups, this rank enqueues the collectives of all groups, with idle requests if it has none of its own.
    """

    def __init__(self, step: Step, parts: EngineParts, ranks: ModelRanks) -> None:
        self.step = step
        self._parts = parts
        self._ranks = ranks

    def launch(self, requested: Batch) -> PendingResult:
        """Enqueue one iteration and return the pending result."""
        forward, shared = self._parts.streams.forward, requested.global_batch
        self._ranks.use_stream(forward)
        self._ranks.expect_pass_widths(() if shared is None else shared.widths)
        with self._parts.backend.on(forward):
            self._parts.results.clear_host_failures()
        return self.step.launch(requested)

    def shape(self, batch: Batch | None) -> Mapping[str, Decision]:
        """Return the decisions about ``batch`` that all ranks must share.

        ``mode`` is the mode of the decoding part and ``bucket`` its batch bucket. ``prompts`` is the number of tokens of a
        prefill that a graph replays. ``mixed`` is the number of decoding requests that this graph holds as well. Each is None
        if the batch has no such part.
        """
        shape: dict[str, Decision] = {"prompts": None, "mode": None, "bucket": None, "mixed": None}
        if batch is None:
            return shape
        replayed = self.step.prefill.bucket(batch.launched)
        if replayed is not None:
            shape["prompts"] = replayed.tokens
        if batch.launched.decode:
            if batch.features.guided:  # no graph covers masks
                return {**shape, "mode": "called", "bucket": len(batch.launched.decode)}
            shape["mode"] = str(self._parts.config.step_mode)
            if replayed is not None and replayed.decoding:
                return {**shape, "bucket": replayed.decoding, "mixed": replayed.decoding}
            shape["bucket"] = self.step.decode_batch(self.step.runner, batch.launched, batch.features).bucket
        return shape
