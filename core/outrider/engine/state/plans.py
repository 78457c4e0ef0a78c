"""Plans: the static inputs of verify and draft-extend, which the plan stream computes from lengths and draft tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, HostParam, KernelSet, Recompute, SpeculativeSync, Stream
from outrider.engine.state.buffers import DecodeInputs, ExtendPlan, PathInputs, VerifyInputs, VerifyOutputs
from outrider.model import LanguageModel, speculative_positions
from outrider.speculative.proposer import Draft, HostSeqLens, Proposer, slots_of


class Plans:
    """The steps of a plan. Each step enqueues kernels on the current stream.

    The steps read the iteration's private buffers and are idempotent: repeating a step writes the same values.
    """

    def __init__(self, kernels: KernelSet, proposer: Proposer, *, lane: Tensor, page_size: int, max_context: int) -> None:
        """Create the plan steps. ``lane`` holds 0, 1, … for as many tokens as a request can have in an iteration, int64."""
        self._kernels = kernels
        self._lane = lane
        self._page_size = page_size
        self._max_context = max_context
        self._width = proposer.nodes + 1  # tokens of a request in verify
        self._growth = proposer.depth + 1  # maximum number of tokens that verify adds to a request

    def from_lengths(self, inputs: DecodeInputs, verify: VerifyInputs) -> None:
        """Write verify's positions, slots and lengths, which depend on lengths and block tables only.

        This step runs concurrently with the draft.
        """
        shape = (inputs.seq_lens.shape[0], verify.width)
        # For trees, from_draft() writes the positions again, because they depend on the tree's shape.
        self._kernels.place_tokens(
            inputs.seq_lens,
            inputs.tables,
            self._page_size,
            self._max_context - 1,
            verify.positions.view(shape),
            verify.slots.view(shape),
            verify.seq_lens.unsqueeze(1),
        )
        if verify.mask is None:
            self.write_rope_positions(inputs, verify)

    def from_draft(self, inputs: DecodeInputs, draft: Draft, verify: VerifyInputs) -> None:
        """Write verify's tokens and, for a tree, its positions and mask, from the outputs of the draft.

        Writes no tokens without a draft: verify then reads ``inputs.last_tokens``.
        """
        if draft.tokens.shape[1]:
            tokens = verify.tokens.view(-1, verify.width)
            torch.cat((inputs.last_tokens.unsqueeze(1), draft.tokens), dim=1, out=tokens)
        if verify.mask is not None and draft.tree is not None:
            verify.positions.copy_(self._clamped(inputs.seq_lens.unsqueeze(1) + draft.tree.depths).flatten())
            self.write_rope_positions(inputs, verify)
            verify.mask.copy_(draft.tree.mask.flatten(0, 1))

    def write_rope_positions(self, inputs: DecodeInputs, verify: VerifyInputs) -> None:
        """Write verify's rope positions on three axes. Does nothing if the model's positions have one axis."""
        if inputs.mrope_position_deltas is not None:
            speculative_positions(verify.positions, inputs.mrope_position_deltas, out=verify.rope_positions)

    def copy_rope_positions_for_graph(self, inputs: DecodeInputs, verify: VerifyInputs, *, captured: bool) -> None:
        """Copy the rope positions to the buffer that a captured verify reads. Does nothing without a graph."""
        if captured and inputs.mrope_position_deltas is not None:
            verify.static_rope_positions.copy_(verify.rope_positions)

    def from_accepted(self, inputs: DecodeInputs, verify: VerifyInputs, outputs: VerifyOutputs, extend: ExtendPlan) -> None:
        """Write the inputs of draft-extend: the accepted tokens and the decided one, padded with token 0."""
        tokens = extend.tokens.view(outputs.tokens.shape)
        self._kernels.place_accepted(
            inputs.seq_lens, outputs.tokens, outputs.accepted, tokens, extend.last, extend.next_positions
        )
        if extend.path is not None and outputs.path is not None:
            self._plan_path(inputs, verify, outputs.accepted, outputs.path, extend.path)

    def _plan_path(
        self, inputs: DecodeInputs, verify: VerifyInputs, accepted: Tensor, path: Tensor, plan: PathInputs
    ) -> None:
        """Write the verify rows and cache slots of the accepted path, and the consecutive slots that it moves to."""
        lane = self._lane[: self._growth]
        node = torch.arange(path.shape[0], device=path.device).unsqueeze(1) * self._width + path
        positions = inputs.seq_lens.unsqueeze(1) + lane
        slots = slots_of(positions, inputs.tables, self._page_size)
        plan.gather.copy_(node.flatten())
        plan.positions.copy_(self._clamped(positions).flatten())
        if inputs.mrope_position_deltas is not None:
            speculative_positions(plan.positions, inputs.mrope_position_deltas, out=plan.rope_positions)
        plan.slots.copy_(slots.flatten())
        plan.seq_lens.copy_((inputs.seq_lens + self._growth).clamp(max=inputs.tables.shape[1] * self._page_size))
        # The root doesn't move. Slots after the accepted nodes are copied to themselves.
        sources = verify.slots.index_select(0, node.flatten()).view(path.shape)
        is_accepted = lane <= accepted.unsqueeze(1)
        plan.sources.copy_(torch.where(is_accepted, sources, slots)[:, 1:].flatten())
        plan.destinations.copy_(slots[:, 1:].flatten())

    def _clamped(self, positions: Tensor) -> Tensor:
        """Return ``positions`` limited to the last position of the model's context: rejected tokens may lie beyond it."""
        return positions.clamp(max=self._max_context - 1)


@dataclass(frozen=True, slots=True)
class PlanAtJoin:
    """The plan of a batch between the join of the plan stream and verify (a :class:`JoinedPlan`)."""

    plans: Plans
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
            self.plans.write_rope_positions(self.inputs, self.verify)

    def refresh(self, buffer: str) -> None:
        """Copy ``rope_positions`` to the buffer that a captured verify reads, after the join. Without a graph it does
        nothing.
        """
        if buffer == "rope_positions":
            self.plans.copy_rope_positions_for_graph(self.inputs, self.verify, captured=self.captured)


class AttentionBatchKind(StrEnum):
    """The kinds of batches that have attention plans."""

    VERIFY = "verify"
    """The verify stage, and for chains draft-extend over the same tokens."""
    PATH = "path"
    """Draft-extend over the accepted path of a tree."""
    PREFILL = "prefill"
    """Prefill chunks."""


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
            AttentionBatchKind.VERIFY: target if proposer.is_tree else both,
            AttentionBatchKind.PATH: draft,
            AttentionBatchKind.PREFILL: both,
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
        key = (what, 0, 0) if what is AttentionBatchKind.PREFILL else (what, attention.seq_lens.shape[0], attention.max_query)
        batch = replace(attention, shapes=self._shapes[what], plan=self._plans.get(key))
        if self.plans_on_host:
            assert seq_lens_host is not None
            batch = replace(batch, seq_lens_host=HostParam(what.value, seq_lens_host.lengths_after(ahead)))
        planned = self._kernels.plan_attention(batch, stream=stream)
        self._plans[key] = planned.plan
        return replace(planned, seq_lens_host=attention.seq_lens_host)
