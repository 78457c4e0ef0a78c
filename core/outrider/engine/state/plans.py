"""What the plan stream computes: from lengths and drafted tokens to the static inputs of verify and draft-extend."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import KernelSet, Recompute, SpeculativeSync
from outrider.engine.state.buffers import PathInputs, StaticBuffers, Views, place_on_axes
from outrider.speculative.proposer import Proposer
from outrider.speculative.slots import slots_of


class Plans:
    """The parts of a plan. Each reads buffers that are private to the iteration, and computes from source: doing a part
    again changes nothing. Everything is enqueued in the caller's scope.
    """

    def __init__(
        self, kernels: KernelSet, buffers: StaticBuffers, proposer: Proposer, *, page_size: int, max_context: int
    ) -> None:
        self._kernels = kernels
        self._lane = buffers.lane
        self._page_size = page_size
        self._max_context = max_context
        self._width = proposer.nodes + 1  # tokens that verify takes in
        self._growth = proposer.depth + 1  # the most tokens that it lets through

    def from_lengths(self, views: Views) -> None:
        """First part: what needs lengths and tables alone. Runs beside the draft."""
        inputs, verify = views.inputs, views.verify
        shape = (views.count, self._width)
        # A tree's positions are written once more, when its shape is known.
        self._kernels.place_tokens(
            inputs.lens,
            inputs.tables,
            self._page_size,
            self._max_context - 1,
            verify.positions.view(shape),
            verify.slots.view(shape),
            verify.seq_lens.unsqueeze(1),
        )
        if verify.mask is None:
            self.on_axes(views)

    def from_draft(self, views: Views) -> None:
        """Second part: what the draft produced. A tree's shape is one of its outputs."""
        inputs, draft, verify = views.inputs, views.draft, views.verify
        tokens = verify.tokens.view(views.count, self._width)
        torch.cat((inputs.last_tokens.unsqueeze(1), draft.tokens), dim=1, out=tokens)
        if verify.mask is not None and draft.tree is not None:
            verify.positions.copy_(self._valid(inputs.lens.unsqueeze(1) + draft.tree.depths).flatten())
            self.on_axes(views)
            verify.mask.copy_(draft.tree.mask.flatten(0, 1))

    def on_axes(self, views: Views) -> None:
        """Verify's positions on three axes. Nothing where positions are plain."""
        if views.inputs.deltas is not None:
            place_on_axes(views.verify.positions, views.inputs.deltas, views.verify.rope_positions)

    def into_graph(self, views: Views, *, static: bool) -> None:
        """What a captured verify reads instead of what was planned; nothing unless it's ``static``."""
        if static and views.inputs.deltas is not None:
            views.verify.static_rope_positions.copy_(views.verify.rope_positions)

    def before_join(self, views: Views, sync: SpeculativeSync, *, static: bool) -> dict[str, Tensor]:
        """What a policy doesn't trust the plan with: buffers that must be written once more after the join, by name."""
        early: dict[str, Tensor] = {}
        if views.inputs.deltas is not None:
            if Recompute.MROPE_POSITIONS in sync.recompute_after_join:
                early["verify.rope_positions"] = views.verify.rope_positions
            if static and "rope_positions" in sync.refresh_before_replay:
                early["verify.static_rope_positions"] = views.verify.static_rope_positions
        return early

    def from_accepted(self, views: Views) -> None:
        """Static inputs of draft-extend: what was accepted, padded with token 0 behind the decided one."""
        outputs, extend = views.outputs, views.extend
        following = extend.tokens.view(views.count, self._growth)
        self._kernels.place_accepted(
            views.inputs.lens, outputs.tokens, outputs.accepted, following, extend.last, extend.next_positions
        )
        if extend.path is not None and outputs.path is not None:
            self._along(views, extend.path, outputs.path)

    def _along(self, views: Views, plan: PathInputs, path: Tensor) -> None:
        """Where the accepted path lies among verify's rows and slots, and where it goes: behind one another."""
        inputs, accepted = views.inputs, views.outputs.accepted
        lane = self._lane[: self._growth]
        node = torch.arange(views.count, device=path.device).unsqueeze(1) * self._width + path
        places = inputs.lens.unsqueeze(1) + lane
        slots = slots_of(places, inputs.tables, self._page_size)
        plan.gather.copy_(node.flatten())
        plan.positions.copy_(self._valid(places).flatten())
        if inputs.deltas is not None:
            place_on_axes(plan.positions, inputs.deltas, plan.rope_positions)
        plan.slots.copy_(slots.flatten())
        plan.seq_lens.copy_((inputs.lens + self._growth).clamp(max=self._capacity(inputs.tables)))
        # The root is where it belongs. What wasn't accepted stays in its place.
        sources = views.verify.slots.index_select(0, node.flatten()).view(path.shape)
        moved = lane <= accepted.unsqueeze(1)
        plan.sources.copy_(torch.where(moved, sources, slots)[:, 1:].flatten())
        plan.destinations.copy_(slots[:, 1:].flatten())

    def _capacity(self, tables: Tensor) -> int:
        return tables.shape[1] * self._page_size

    def _valid(self, positions: Tensor) -> Tensor:
        """Positions that exist. A request that is over on the device, while the host doesn't know yet, runs past its end
        once: its tokens are discarded, so their positions only have to be valid.
        """
        return positions.clamp(max=self._max_context - 1)


class PlanAtJoin:
    """The plan of a batch, for what a device needs between its join and verify (:class:`JoinedPlan`)."""

    def __init__(self, plans: Plans, views: Views, *, static: bool) -> None:
        self._plans = plans
        self._views = views
        self._static = static

    @property
    def idle(self) -> bool:
        """Whether the batch is empty."""
        return self._views.count == 0

    def recompute(self, what: Recompute) -> None:
        """Positions on three axes, from indices and deltas. Plain ones aren't computed at all."""
        if what is Recompute.MROPE_POSITIONS:
            self._plans.on_axes(self._views)

    def refresh(self, buffer: str) -> None:
        """Copy ``rope_positions`` into what the captured verify reads. Without a graph verify reads the plan's own."""
        if buffer == "rope_positions":
            self._plans.into_graph(self._views, static=self._static)
