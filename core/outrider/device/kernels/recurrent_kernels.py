"""The part of a KernelSet for recurrent layers: short convolution, gated delta rule and gated norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.device.kernels.reference import ops as _ops  # noqa: F401  (registers the operators)
from outrider.device.kernels.reference.recurrent import CHUNK


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRuleWeights:
    """Weights of a recurrent layer besides its large products, for C channels, kernel size K, Hv heads of value size E."""

    convolution: Tensor
    """[C, K]: weight of the short convolution, the token's own column last."""
    a_log: Tensor
    """[Hv], in float32 or wider: logarithm of each head's rate of decay."""
    dt_bias: Tensor
    """[Hv], in float32 or wider: addend of each head's gate a."""
    norm: Tensor
    """[E]: weight of the norm of each head's result."""


class RecurrentBatch(NamedTuple):
    """The B sequences of a pass through recurrent layers, with T new tokens in all.

    ``rows`` int64 [B]: the row of each sequence's state; distinct, except for row 0, which takes padding. ``query_start``
    int32 [B + 1], ``seq_lens`` int32 [B] and ``max_query`` are those of the pass's
    :class:`~outrider.device.AttentionMetadata`. A sequence whose length equals its number of new tokens has no earlier
    token: its state starts from zeros, whatever its row holds.

    ``settled``: a whole decoder layer was enqueued after the last write to these tensors and to the rows of the states, as in
    :class:`~outrider.device.AttentionMetadata`. ``uniform``: every sequence has exactly ``max_query`` new tokens, and there
    is no padding. Otherwise results of padding are zeros.

    ``pending`` int64 [R]: the magnitude is the number of tokens of each row's window that the row's states lack. Passes
    with windows read it and leave it to the caller.
    """

    rows: Tensor
    query_start: Tensor
    seq_lens: Tensor
    max_query: int
    settled: bool = False
    uniform: bool = False
    pending: Tensor | None = None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """The fields that every operator of recurrent layers takes: ``rows``, ``query_start``, ``seq_lens``,
        ``max_query``.
        """
        return self[:4]


class RecurrentKernels:
    """Kernels of recurrent layers. Rules: :class:`~outrider.device.KernelSet`.

    C channels are q and k of Hk heads of size D, then v of Hv heads of size E. R state rows, K kernel size.

    *Windows.* Speculation can't truncate a state when drafts are rejected, so a pass over drafts must not write them to it.
    Without a window, a kernel writes the state after all new tokens to each sequence's row. With one, it first *settles* the
    row: the state receives the pending tokens of the row's window (:attr:`RecurrentBatch.pending`). The kernel then computes
    the new tokens and keeps them in the window instead of the state. A sequence without new tokens is settled alone. One
    without earlier tokens has no pending ones, and its row's state may be left alone.

    *Equal bits.* The results of a token in :meth:`short_convolution` and :meth:`gated_delta_rule` don't depend on the number
    of new tokens after it, nor on windows. A settled state has the bits of a pass over the same tokens without a window.
    """

    state_interval: int = CHUNK
    """Number of tokens at whose multiples prompts are cut, and at which the prefix cache keeps states.

    A pass that begins at a multiple computes the bits of a longer pass that began earlier.
    """

    def short_convolution(
        self, x: Tensor, weight: Tensor, state: Tensor, batch: RecurrentBatch, window: Tensor | None = None
    ) -> Tensor:
        """Return SiLU of the causal depthwise convolution of ``x`` [T, C] with ``weight`` [C, K] → [T, C].

        ``state`` [R, K - 1, C] holds the last inputs of each row, the oldest first, and ``window`` [R, N, C] the inputs that
        follow them. The last column of ``weight`` belongs to the token itself. Sums are in float32 or wider.
        """
        return torch.ops.outrider.short_convolution(  # type: ignore[no-any-return]
            x, weight, state, *batch.operands, batch.pending, window
        )

    def gated_delta_rule(
        self,
        mixed: Tensor,
        gates: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        batch: RecurrentBatch,
        updates: Tensor | None = None,
    ) -> Tensor:
        """Return the gated delta rule (Yang et al. 2024) of the convolution's result ``mixed`` [T, C] → [T, Hv, E].

        ``gates`` [T, 2 Hv] are b, then a; ``a_log`` and ``dt_bias`` [Hv]; ``state`` S [R, Hv, D, E]. Key head h serves value
        heads h Hv / Hk onwards. q and k are divided by their Euclidean norm (with 1e-6 under the root), and q by the root of
        D. For each token: S *= exp(-exp(a_log) softplus(a + dt_bias)); S += k (sigmoid(b) (v - S'k))'; the result is S'q.
        All of it is computed in float32 or wider. For few tokens of a sequence.

        The window ``updates`` [R, 2, N, Hk D + Hv E + Hv], in float32 or wider, holds three parts of each token: k, the
        factors of k in the second assignment, and the factors of S in the first. A positive number of pending tokens counts
        those of the first half, which then stays unchanged; new tokens are kept in the other half.
        """
        return torch.ops.outrider.gated_delta_rule(  # type: ignore[no-any-return]
            mixed, gates, a_log, dt_bias, state, *batch.operands, batch.pending, updates
        )

    def chunk_gated_delta_rule(
        self, mixed: Tensor, gates: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, batch: RecurrentBatch
    ) -> Tensor:
        """Return :meth:`gated_delta_rule` for many tokens of a sequence, and write the state after all of them.

        Chunks of tokens may be computed at once, so results equal those of the recurrence up to rounding.
        """
        return torch.ops.outrider.chunk_gated_delta_rule(  # type: ignore[no-any-return]
            mixed, gates, a_log, dt_bias, state, *batch.operands
        )

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the root-mean-square norm of ``x`` [..., E] with ``weight`` [E], times SiLU of ``gate`` [..., E].

        Unlike in ``rms_norm``, the norm is rounded to x's dtype before a wider ``weight``, too.
        """
        return torch.ops.outrider.gated_rms_norm(x, gate, weight, eps)  # type: ignore[no-any-return]
