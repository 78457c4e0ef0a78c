"""What the plan stream computes: from lengths and drafted tokens to the static inputs of verify and draft-extend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import KernelSet, Recompute, SpeculativeSync
from outrider.engine.state.buffers import DecodeInputs, ExtendPlan, PathInputs, VerifyInputs, VerifyOutputs
from outrider.model import speculative_positions
from outrider.speculative.proposer import Draft, Proposer
from outrider.speculative.slots import slots_of


class Plans:
    """The parts of a plan. Each reads buffers that are private to the iteration, and computes from source: doing a part
    again changes nothing. Everything is enqueued in the caller's scope.

    ``lane`` int64: 0, 1, … for as many tokens as a request may have in an iteration.
    """

    def __init__(self, kernels: KernelSet, proposer: Proposer, *, lane: Tensor, page_size: int, max_context: int) -> None:
        self._kernels = kernels
        self._lane = lane
        self._page_size = page_size
        self._max_context = max_context
        self._width = proposer.nodes + 1  # tokens of a tree that verify takes in
        self._growth = proposer.depth + 1  # the most of them that it lets through

    def from_lengths(self, inputs: DecodeInputs, verify: VerifyInputs) -> None:
        """First part: what needs lengths and tables alone. Runs beside the draft."""
        shape = (inputs.seq_lens.shape[0], verify.width)
        # A tree's positions are written once more, when its shape is known.
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
            self.on_axes(inputs, verify)

    def from_draft(self, inputs: DecodeInputs, draft: Draft, verify: VerifyInputs) -> None:
        """Second part: what the draft produced. A tree's shape is one of its outputs. Nothing where nothing is drafted: then
        verify reads the last tokens themselves.
        """
        if draft.tokens.shape[1]:
            tokens = verify.tokens.view(-1, verify.width)
            torch.cat((inputs.last_tokens.unsqueeze(1), draft.tokens), dim=1, out=tokens)
        if verify.mask is not None and draft.tree is not None:
            verify.positions.copy_(self._valid(inputs.seq_lens.unsqueeze(1) + draft.tree.depths).flatten())
            self.on_axes(inputs, verify)
            verify.mask.copy_(draft.tree.mask.flatten(0, 1))

    def on_axes(self, inputs: DecodeInputs, verify: VerifyInputs) -> None:
        """Verify's positions on three axes. Nothing where positions are plain."""
        if inputs.mrope_position_deltas is not None:
            speculative_positions(verify.positions, inputs.mrope_position_deltas, out=verify.rope_positions)

    def into_graph(self, inputs: DecodeInputs, verify: VerifyInputs, *, captured: bool) -> None:
        """What a captured verify reads instead of what was planned; nothing unless it's ``captured``."""
        if captured and inputs.mrope_position_deltas is not None:
            verify.static_rope_positions.copy_(verify.rope_positions)

    def from_accepted(self, inputs: DecodeInputs, verify: VerifyInputs, outputs: VerifyOutputs, extend: ExtendPlan) -> None:
        """Static inputs of draft-extend: what was accepted, padded with token 0 behind the decided one."""
        following = extend.tokens.view(outputs.tokens.shape)
        self._kernels.place_accepted(
            inputs.seq_lens, outputs.tokens, outputs.accepted, following, extend.last, extend.next_positions
        )
        if extend.path is not None and outputs.path is not None:
            self._along(inputs, verify, outputs.accepted, outputs.path, extend.path)

    def _along(self, inputs: DecodeInputs, verify: VerifyInputs, accepted: Tensor, path: Tensor, plan: PathInputs) -> None:
        """Where the accepted path lies among verify's rows and slots, and where it goes: behind one another."""
        lane = self._lane[: self._growth]
        node = torch.arange(path.shape[0], device=path.device).unsqueeze(1) * self._width + path
        places = inputs.seq_lens.unsqueeze(1) + lane
        slots = slots_of(places, inputs.tables, self._page_size)
        plan.gather.copy_(node.flatten())
        plan.positions.copy_(self._valid(places).flatten())
        if inputs.mrope_position_deltas is not None:
            speculative_positions(plan.positions, inputs.mrope_position_deltas, out=plan.rope_positions)
        plan.slots.copy_(slots.flatten())
        plan.seq_lens.copy_((inputs.seq_lens + self._growth).clamp(max=self._capacity(inputs.tables)))
        # The root is where it belongs. What wasn't accepted stays in its place.
        sources = verify.slots.index_select(0, node.flatten()).view(path.shape)
        moved = lane <= accepted.unsqueeze(1)
        plan.sources.copy_(torch.where(moved, sources, slots)[:, 1:].flatten())
        plan.destinations.copy_(slots[:, 1:].flatten())

    def _capacity(self, tables: Tensor) -> int:
        return tables.shape[1] * self._page_size

    def _valid(self, positions: Tensor) -> Tensor:
        """Positions within range. A request that has finished on the device runs one iteration more, until the host knows.
        Its tokens are discarded, so their positions only have to be valid.
        """
        return positions.clamp(max=self._max_context - 1)


@dataclass(frozen=True, slots=True)
class PlanAtJoin:
    """The plan of a batch, for what a device needs between its join and verify (:class:`JoinedPlan`).

    ``captured``: verify is replayed from a graph.
    """

    plans: Plans
    inputs: DecodeInputs
    verify: VerifyInputs
    captured: bool

    def written_again(self, sync: SpeculativeSync) -> dict[str, Tensor]:
        """Buffers that the policy wants written once more after the join, by name."""
        early: dict[str, Tensor] = {}
        if self.inputs.mrope_position_deltas is not None:
            if Recompute.MROPE_POSITIONS in sync.recompute_after_join:
                early["verify.rope_positions"] = self.verify.rope_positions
            if self.captured and "rope_positions" in sync.refresh_before_replay:
                early["verify.static_rope_positions"] = self.verify.static_rope_positions
        return early

    @property
    def idle(self) -> bool:
        """Whether the batch is empty."""
        return self.inputs.seq_lens.shape[0] == 0

    def recompute(self, what: Recompute) -> None:
        """Positions on three axes, from indices and deltas. Plain ones aren't computed at all."""
        if what is Recompute.MROPE_POSITIONS:
            self.plans.on_axes(self.inputs, self.verify)

    def refresh(self, buffer: str) -> None:
        """Copy ``rope_positions`` into what the captured verify reads. Without a graph verify reads the plan's own."""
        if buffer == "rope_positions":
            self.plans.into_graph(self.inputs, self.verify, captured=self.captured)
