"""TritonChoices: the part of the kernel set that samples tokens and verifies drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import LANE_ACCEPT, LANE_DRAFT, LANE_RESIDUAL, LANE_SAMPLE
from outrider_triton.launch import compile_only, has_kernel
from outrider_triton.selection import operators as _choice_ops  # noqa: F401  (registers the operators)
from outrider_triton.tiles.variants import WarmedKernels

_TRITON = torch.ops.outrider


class TritonChoices(WarmedKernels):
    """Kernels that read logits over a vocabulary."""

    def apply_token_bitmask(self, logits: Tensor, bitmask: Tensor) -> Tensor:
        """Mask logits by the grammar's bitmask, one program per row and block of tokens."""
        if not has_kernel(logits):
            return super().apply_token_bitmask(logits, bitmask)
        return _TRITON.apply_token_bitmask.triton(logits, bitmask, self.pdl)  # type: ignore[no-any-return]

    def sample(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, draft: bool = False) -> Tensor:
        """Sample one token per row; several programs share the vocabulary."""
        if not has_kernel(logits):
            return super().sample(logits, temperature, seeds, positions, draft=draft)
        lane = LANE_DRAFT if draft else LANE_SAMPLE
        for count in self._shares(logits.shape):
            tokens = _TRITON.sample.triton(logits, temperature, seeds, positions, lane, count, self.pdl)
        return tokens  # type: ignore[no-any-return]

    def verify_chain(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        draft_probs: Tensor | None,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Verify a chain of drafts: two launches if no row samples, else three."""
        if not has_kernel(target_logits) or not draft_tokens.numel():
            return super().verify_chain(target_logits, draft_tokens, draft_probs, temperature, seeds, positions)
        lanes = [LANE_ACCEPT, LANE_RESIDUAL]
        for count in self._shares(target_logits.shape):
            verdict = _TRITON.verify_chain.triton(
                target_logits, draft_tokens, draft_probs, temperature, seeds, positions, lanes, count, self.pdl
            )
        return verdict  # type: ignore[no-any-return]

    def verify_checked(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        found: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Verify drafts greedily and report NaN: two launches, of which one reads the logits."""
        if not has_kernel(target_logits):
            return super().verify_checked(target_logits, draft_tokens, temperature, seeds, positions, found)
        if self._scope.depth and draft_tokens.numel():
            with compile_only():  # a grammar or a penalty between logits and verification needs this kernel
                self.verify_chain(target_logits, draft_tokens, None, temperature, seeds, positions)
        for count in self._shares(target_logits.shape):
            verdict = _TRITON.verify_checked.triton(target_logits, draft_tokens, found, count, self.pdl)
        return verdict  # type: ignore[no-any-return]

    def verify_tree(
        self,
        target_logits: Tensor,
        tokens: Tensor,
        parents: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        depth: int,
        sampling: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose a token at every node, then follow the accepted path."""
        if not has_kernel(target_logits):
            return super().verify_tree(
                target_logits, tokens, parents, temperature, seeds, positions, depth=depth, sampling=sampling
            )
        for count in self._shares(target_logits.shape):
            verdict = _TRITON.verify_tree.triton(
                target_logits,
                tokens,
                parents,
                temperature,
                seeds,
                positions,
                depth,
                sampling,
                LANE_SAMPLE,
                count,
                self.pdl,
            )
        return verdict  # type: ignore[no-any-return]
