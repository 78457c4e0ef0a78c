"""Plans of attention, the plan of a batch between the join of the plan stream and verify, and the packed tokens of verify.

Letters: B requests, N tokens of a request in the buffers of verify, T tokens of the pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, HostParam, InterfaceError, KernelSet, Recompute, SpeculativeSync, Stream
from outrider.engine.state.buffers import DecodeInputs, VerifyInputs
from outrider.model import ForwardInput, LanguageModel, SideBySide, side_by_side
from outrider.speculative.proposer import HostSeqLens, Proposer


@dataclass(frozen=True, slots=True)
class PlanAtJoin:
    """The plan of a batch between the join of the plan stream and verify (a :class:`JoinedPlan`)."""

    inputs: DecodeInputs
    verify: VerifyInputs
    captured: bool
    """True if verify is replayed from a graph."""

    def written_again(self, sync: SpeculativeSync) -> dict[str, Tensor]:
        """Return the buffers that the device's policy writes again after the join, by name."""
        buffers: dict[str, Tensor] = {}
        if self.inputs.mrope_position_deltas is not None:
            if Recompute.MROPE_POSITIONS in sync.recompute_after_join:
                buffers["verify.rope_positions"] = self.verify.rope_positions
            if self.captured and "rope_positions" in sync.refresh_before_replay:
                buffers["verify.static_rope_positions"] = self.verify.static_rope_positions
        return buffers

    @property
    def idle(self) -> bool:
        """Return True if the batch has no decoding requests."""
        return self.inputs.seq_lens.shape[0] == 0

    def recompute(self, what: Recompute) -> None:
        """Write verify's rope positions on three axes again, from sequence indices and deltas. Called after the join for a
        device whose policy names them.
        """
        if what is Recompute.MROPE_POSITIONS:
            self.verify.write_rope_positions(self.inputs.mrope_position_deltas)

    def refresh(self, buffer: str) -> None:
        """Copy ``rope_positions`` to the buffer that a captured verify reads, after the join. Without a graph it does
        nothing. Raises :class:`InterfaceError` for another name.
        """
        if buffer != "rope_positions":
            raise InterfaceError(
                f"the backend's policy refreshes {buffer!r} before a replay; the only static input is 'rope_positions' "
                "(SpeculativeSync.refresh_before_replay, after_join)"
            )
        if self.captured:
            self.verify.copy_rope_positions_for_graph()


AttentionBatchKind = Literal["verify", "path", "prefill"]
"""The kinds of batches that have attention plans: the verify stage, and for chains draft-extend over the same tokens;
draft-extend over the accepted path of a tree; prefill chunks.
"""


class AttentionPlans:
    """The attention plans of an engine. A batch reuses the plan object of its kind and size, so that graphs find it.

    Draft passes have no plans, because their lengths grow within a stage.
    """

    def __init__(self, model: LanguageModel, proposer: Proposer, *, page_size: int) -> None:
        self._kernels = model.kernels
        self.plans_on_host = model.kernels.plans_on_host
        """True if the kernels need exact lengths on the host for planning."""
        target = model.config.attention_shapes(model.dtype, page_size=page_size)
        draft = proposer.attention_shapes(page_size)
        both = tuple(dict.fromkeys((*target, *draft)))
        # Draft-extend processes the accepted path of a tree, but the whole verified chain.
        self._shapes = {
            "verify": target if proposer.is_tree else both,
            "path": draft,
            "prefill": both,
        }
        self._plans: dict[tuple[AttentionBatchKind, int, int], object | None] = {}

    def plan(
        self,
        what: AttentionBatchKind,
        attention: AttentionMetadata,
        seq_lens_host: HostSeqLens | None,
        ahead: int,
        stream: Stream,
    ) -> AttentionMetadata:
        """Return ``attention`` with its plan, created or updated on ``stream``.

        ``seq_lens_host`` plus ``ahead`` must equal ``attention.seq_lens``, including padding; required if
        :attr:`plans_on_host`.
        """
        key = (what, 0, 0) if what == "prefill" else (what, attention.seq_lens.shape[0], attention.max_query)
        batch = replace(attention, shapes=self._shapes[what], plan=self._plans.get(key))
        if self.plans_on_host:
            assert seq_lens_host is not None
            batch = replace(batch, seq_lens_host=HostParam(what, seq_lens_host.lengths_after(ahead)))
        planned = self._kernels.plan_attention(batch, stream=stream)
        self._plans[key] = planned.plan
        return replace(planned, seq_lens_host=attention.seq_lens_host)


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
