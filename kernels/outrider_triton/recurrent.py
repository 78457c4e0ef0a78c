"""TritonRecurrent: the part of the kernel set that computes recurrent layers."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import DeltaRuleWeights, RecurrentBatch
from outrider_triton import recurrent_ops as _recurrent_ops  # noqa: F401  (registers the operators)
from outrider_triton.launch import has_kernel
from outrider_triton.recurrent_ops import MAX_TAPS, fits_whole_heads
from outrider_triton.variants import WarmedKernels

_TRITON = torch.ops.outrider
_MAX_WAVES = 2
"""Maximum number of heads, of all requests, per multiprocessor for which one kernel computes everything."""
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
        return _TRITON.gated_delta_rule.triton(*operands, commit, batch.uniform, self.pdl)  # type: ignore[no-any-return]

    def chunk_gated_delta_rule(
        self, mixed: Tensor, gates: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, batch: RecurrentBatch
    ) -> Tensor:
        """Compute the rule for 64 tokens at once: a kernel over all chunks, and one that goes through each sequence."""
        if not self._has_rule(mixed, gates, state):
            return super().chunk_gated_delta_rule(mixed, gates, a_log, dt_bias, state, batch)
        operands = mixed, gates, a_log, dt_bias, state, *batch.operands
        return _TRITON.chunk_gated_delta_rule.triton(*operands, self.pdl)  # type: ignore[no-any-return]

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the gated norm of several heads per program."""
        if not has_kernel(x, gate, weight):
            return super().gated_rms_norm(x, gate, weight, eps)
        return _TRITON.gated_rms_norm.triton(x, gate, weight, eps, self.pdl)  # type: ignore[no-any-return]

    def gated_delta_rule_norm(
        self,
        mixed: Tensor,
        gates: Tensor,
        gate: Tensor,
        weights: DeltaRuleWeights,
        states: tuple[Tensor, Tensor],
        batch: RecurrentBatch,
        commit: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Compute all three in one kernel, and write the convolution's state in another one; one by one for many requests."""
        if not self._is_fused(mixed, gates, weights, states, batch) or gate.stride(1) != 1:
            return super().gated_delta_rule_norm(mixed, gates, gate, weights, states, batch, commit, eps)
        made: Tensor = self._rule_and_neighbours(mixed, gates, gate, weights, states, batch, commit, eps)
        if commit is not None:
            self._commit_window(mixed, weights, states[0], batch, commit)
        return made

    def commit_delta_rule(
        self,
        mixed: Tensor,
        gates: Tensor,
        weights: DeltaRuleWeights,
        states: tuple[Tensor, Tensor],
        batch: RecurrentBatch,
        commit: Tensor,
    ) -> None:
        """Run the kernel of :meth:`gated_delta_rule_norm` without its results."""
        if not self._is_fused(mixed, gates, weights, states, batch):
            super().commit_delta_rule(mixed, gates, weights, states, batch, commit)
            return
        self._rule_and_neighbours(mixed, gates, None, weights, states, batch, commit, 0.0)
        self._commit_window(mixed, weights, states[0], batch, commit)

    def _commit_window(
        self, mixed: Tensor, weights: DeltaRuleWeights, state: Tensor, batch: RecurrentBatch, commit: Tensor
    ) -> None:
        rows, query_start, seq_lens, _ = batch.operands
        operands = mixed, state, rows, query_start, seq_lens, commit, weights.convolution.shape[1]
        _TRITON.short_convolution.triton_commit(*operands, self.pdl)

    def _rule_and_neighbours(
        self,
        mixed: Tensor,
        gates: Tensor,
        gate: Tensor | None,
        weights: DeltaRuleWeights,
        states: tuple[Tensor, Tensor],
        batch: RecurrentBatch,
        commit: Tensor | None,
        eps: float,
    ) -> Tensor:
        rows, query_start, seq_lens, _ = batch.operands
        constants = weights.convolution, weights.a_log, weights.dt_bias, weights.norm
        operands = mixed, gates, gate, *constants, *states, rows, query_start, seq_lens, commit, eps
        return _TRITON.gated_delta_rule.triton_fused(*operands, batch.settled and self.pdl, batch.uniform, self.pdl)  # type: ignore[no-any-return]

    def _has_rule(self, mixed: Tensor, gates: Tensor, state: Tensor) -> bool:
        is_laid_out = state.is_contiguous() and mixed.stride(1) == gates.stride(1) == 1
        return has_kernel(mixed, gates, state) and is_laid_out and max(state.shape[2:]) <= _MAX_HEAD_SIZE

    def _is_fused(
        self,
        mixed: Tensor,
        gates: Tensor,
        weights: DeltaRuleWeights,
        states: tuple[Tensor, Tensor],
        batch: RecurrentBatch,
    ) -> bool:
        inputs, state = states
        is_laid_out = inputs.is_contiguous() and weights.convolution.is_contiguous()
        fits = fits_whole_heads(state) and weights.convolution.shape[1] <= MAX_TAPS
        # A program of a whole head has so many registers that its multiprocessor runs no second one.
        fits = fits and batch.rows.shape[0] * state.shape[1] <= _MAX_WAVES * self.processors
        return self._has_rule(mixed, gates, state) and has_kernel(weights.norm, inputs) and is_laid_out and fits
