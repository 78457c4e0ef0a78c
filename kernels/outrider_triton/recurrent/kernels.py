"""TritonRecurrent: the part of the kernel set that computes recurrent layers."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import RecurrentBatch
from outrider_triton.launch import has_kernel
from outrider_triton.recurrent import operators as _recurrent_ops  # noqa: F401  (registers the operators)
from outrider_triton.tiles.variants import WarmedKernels

_TRITON = torch.ops.outrider
_MAX_HEAD_SIZE = 256
"""Maximum size of keys and values of a head, whose state or products must fit in one program."""


class TritonRecurrent(WarmedKernels):
    """Short convolution, gated delta rule and gated norm. Every size of a batch runs the same few variants."""

    def short_convolution(
        self, x: Tensor, weight: Tensor, state: Tensor, batch: RecurrentBatch, commit: Tensor | None = None
    ) -> Tensor:
        """Convolve one block of tokens and channels per program."""
        if not has_kernel(x, weight, state) or x.stride(1) != 1 or not (weight.is_contiguous() and state.is_contiguous()):
            return super().short_convolution(x, weight, state, batch, commit)
        return _TRITON.short_convolution.triton(x, weight, state, *batch.operands, commit, batch.uniform, self.pdl)  # type: ignore[no-any-return]

    def gated_delta_rule(
        self,
        mixed: Tensor,
        gates: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        batch: RecurrentBatch,
        commit: Tensor | None = None,
    ) -> Tensor:
        """Compute the rule token by token, one program per head and block of values."""
        if not self._has_rule(mixed, gates, state):
            return super().gated_delta_rule(mixed, gates, a_log, dt_bias, state, batch, commit)
        operands = mixed, gates, a_log, dt_bias, state, *batch.operands
        return _TRITON.gated_delta_rule.triton(*operands, commit, batch.settled and self.pdl, batch.uniform, self.pdl)  # type: ignore[no-any-return]

    def chunk_gated_delta_rule(
        self, mixed: Tensor, gates: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, batch: RecurrentBatch
    ) -> Tensor:
        """Compute the rule for 64 tokens at once. Of three kernels, only the second goes through each sequence."""
        if not self._has_rule(mixed, gates, state):
            return super().chunk_gated_delta_rule(mixed, gates, a_log, dt_bias, state, batch)
        operands = mixed, gates, a_log, dt_bias, state, *batch.operands
        return _TRITON.chunk_gated_delta_rule.triton(*operands, self.pdl)  # type: ignore[no-any-return]

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the gated norm of several heads per program."""
        if not has_kernel(x, gate, weight):
            return super().gated_rms_norm(x, gate, weight, eps)
        return _TRITON.gated_rms_norm.triton(x, gate, weight, eps, self.pdl)  # type: ignore[no-any-return]

    def _has_rule(self, mixed: Tensor, gates: Tensor, state: Tensor) -> bool:
        is_laid_out = state.is_contiguous() and mixed.stride(1) == gates.stride(1) == 1
        return has_kernel(mixed, gates, state) and is_laid_out and max(state.shape[2:]) <= _MAX_HEAD_SIZE
