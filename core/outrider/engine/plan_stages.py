"""The stages of a decode iteration on the plan stream: static inputs and attention metadata of verify and draft-extend."""

from __future__ import annotations

from outrider.device import AttentionMetadata, Stream
from outrider.engine.stage_io import (
    AttentionInput,
    DecodeBatch,
    ExtendAttentionInput,
    ExtendPlanInput,
    FillInput,
    PlaceInput,
    Stage,
)
from outrider.engine.state.attention_plans import AttentionPlans, Planned
from outrider.engine.state.buffers import EXTEND, VERIFY, ExtendPlan, StaticBuffers, VerifyInputs
from outrider.engine.state.plans import Plans
from outrider.speculative.proposer import Proposer


class Place(Stage[PlaceInput, VerifyInputs]):
    """The plan's first part, beside the draft: positions, slots and lengths, from lengths and tables alone."""

    name, fills = "place", VERIFY

    def __init__(self, stream: Stream, plans: Plans, buffers: StaticBuffers) -> None:
        super().__init__(stream)
        self._plans = plans
        self._buffers = buffers

    def run(self, given: PlaceInput) -> VerifyInputs:
        """Compute them from source."""
        verify = self._buffers.views(given.batch.count, given.batch.drafted).verify
        self._plans.from_lengths(given.inputs, verify)
        return verify


class Fill(Stage[FillInput, VerifyInputs]):
    """The plan's second part, behind the draft: tokens, and a tree's shape."""

    name = "fill"

    def __init__(self, stream: Stream, plans: Plans) -> None:
        super().__init__(stream)
        self._plans = plans

    def run(self, given: FillInput) -> VerifyInputs:
        """Write them beside what the first part wrote."""
        self._plans.from_draft(given.inputs, given.draft, given.verify)
        self._plans.into_graph(given.inputs, given.verify, captured=given.batch.captured)
        return given.verify


class VerifyAttention(Stage[AttentionInput, AttentionMetadata]):
    """Metadata of verify's attention, with its plan; for the whole bucket."""

    name = "verify attention"

    def __init__(self, stream: Stream, attention: AttentionPlans, buffers: StaticBuffers) -> None:
        super().__init__(stream)
        self._attention = attention
        self._buffers = buffers

    def run(self, given: AttentionInput) -> AttentionMetadata:
        """Make the plan, or bring it up to date."""
        metadata = self.metadata(given.batch)
        return self._attention.plan(Planned.VERIFY, metadata, given.seq_lens_host, metadata.max_query, self.stream)

    def metadata(self, batch: DecodeBatch) -> AttentionMetadata:
        """The metadata, without a plan."""
        padded = self._buffers.views(batch.bucket, batch.drafted)
        return padded.verify.attention(padded.inputs.tables, max_query=batch.drafted + 1, max_kv=batch.max_kv)


class PlanExtend(Stage[ExtendPlanInput, ExtendPlan]):
    """The tokens that draft-extend takes in; of a tree, also where the accepted path lies and where it goes."""

    name, fills = "extend plan", EXTEND

    def __init__(self, stream: Stream, plans: Plans, buffers: StaticBuffers) -> None:
        super().__init__(stream)
        self._plans = plans
        self._buffers = buffers

    def run(self, given: ExtendPlanInput) -> ExtendPlan:
        """Compute them from what verify accepted."""
        plan = self._buffers.views(given.batch.count, given.batch.drafted).extend
        self._plans.from_accepted(given.inputs, given.verify, given.outputs, plan)
        return plan


class ExtendAttention(Stage[ExtendAttentionInput, AttentionMetadata]):
    """Metadata of draft-extend's attention, with its plan: verify's own for a chain, the accepted path's for a tree."""

    name = "extend attention"

    def __init__(self, stream: Stream, attention: AttentionPlans, buffers: StaticBuffers, proposer: Proposer) -> None:
        super().__init__(stream)
        self._attention = attention
        self._buffers = buffers
        self._growth = proposer.depth + 1  # the most tokens of a tree that verify lets through

    def run(self, given: ExtendAttentionInput) -> AttentionMetadata:
        """Make the plan of a path, or bring it up to date; a chain's is verify's, made already."""
        path = self.of_path(given.batch)
        if path is None:
            return given.verify
        return self._attention.plan(Planned.PATH, path, given.seq_lens_host, self._growth, self.stream)

    def of_path(self, batch: DecodeBatch) -> AttentionMetadata | None:
        """The metadata of an accepted path, without a plan; None for a chain."""
        padded = self._buffers.views(batch.bucket, batch.drafted)
        path = padded.extend.path
        if path is None:
            return None
        return path.attention(padded.inputs.tables, max_query=self._growth, max_kv=batch.max_kv)
