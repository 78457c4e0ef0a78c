"""The tokens that verify processes if each request has a draft length of its own.

Letters: B requests, N tokens of a request in the buffers of verify, T tokens of the pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.device import KernelSet
from outrider.model import ForwardInput, SideBySide, side_by_side


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The verified ones of B * N tokens, side by side: of each request the last token and its first draft tokens.

    Verify computes only these T tokens, and everything before and after verify works on B * N tokens. Tensors of the rows of
    a pass go back to B * N rows by a gather. A row without a token of its own gets the request's last computed row.
    """

    index: Tensor
    """Index of each token among the B * N tokens, int64 [T]."""
    is_padding: Tensor
    """True after the tokens of the last request, bool [T]. These tokens are written to the reserved page 0."""
    query_start: Tensor
    """The first token of each request, and at the end the number of tokens without padding: int32 [B+1]."""
    seq_lens: Tensor
    """KV lengths including the request's tokens, int32 [B]."""
    rows: Tensor
    """Index of the computed row for each of the B * N tokens, int64 [B*N]."""

    @classmethod
    def of_lengths(cls, lengths: Tensor, cached: Tensor, *, lane: Tensor, count: int, capacity: int) -> PackedTokens:
        """Pack ``count`` tokens T, of which each request has one more than its draft length in ``lengths`` int64 [B].

        ``cached``: cached tokens of each request, int64 [B]. ``lane`` has the numbers 0 to N - 1. ``capacity``: number of
        tokens that a block table covers. T is at least the number of all tokens; the others are padding.
        """
        requests, width = lengths.shape[0], lane.shape[0]
        ends = (lengths + 1).cumsum(0)
        starts = ends - lengths - 1
        token = torch.arange(count, device=lengths.device)
        owner = torch.searchsorted(ends, token, right=True).clamp_(max=requests - 1)
        return cls(
            index=owner * width + (token - starts.index_select(0, owner)).clamp_(max=width - 1),
            is_padding=token >= ends[-1:],
            query_start=torch.cat((starts[:1], ends)).to(torch.int32),
            seq_lens=(cached + lengths + 1).clamp_(max=capacity).to(torch.int32),
            rows=(starts.unsqueeze(1) + torch.minimum(lane, lengths.unsqueeze(1))).flatten(),
        )

    def select(self, inputs: ForwardInput) -> ForwardInput:
        """Return ``inputs``, which has B * N tokens, with the T tokens of the pass."""
        attention = replace(
            inputs.attention, query_start=self.query_start, seq_lens=self.seq_lens, uniform=False, plan=None, shapes=()
        )
        return replace(
            inputs,
            tokens=inputs.tokens.index_select(0, self.index),
            positions=inputs.positions.index_select(-1, self.index),
            slots=inputs.slots.index_select(0, self.index).masked_fill_(self.is_padding, 0),
            attention=attention,
        )

    def unpack(self, computed: Tensor, kernels: KernelSet) -> Tensor:
        """Return the rows [B*N, ...] of ``computed`` [T, ...]."""
        return kernels.gather_rows(computed, self.rows)

    def unpack_states(self, states: tuple[Tensor, ...], kernels: KernelSet) -> tuple[Tensor, ...]:
        """Return the rows of hidden ``states``, which :func:`~outrider.model.side_by_side` joins, with one gather."""
        if not states:
            return ()
        return SideBySide(self.unpack(side_by_side(states), kernels), states[0].shape[-1])
