"""The stages of a decode iteration on the plan stream: static inputs and attention metadata of verify and draft-extend."""

from __future__ import annotations

from outrider.device import AttentionMetadata, Stream
from outrider.engine.stage_io import (
    AttentionInput,
    DecodeBatch,
    ExtendAttentionInput,
    ExtendPlanInput,
    PlanPositionsInput,
    PlanTokensInput,
    Stage,
)
from outrider.engine.state.attention_plans import AttentionBatchKind, AttentionPlans
from outrider.engine.state.buffers import EXTEND, VERIFY, ExtendPlan, StaticBuffers, VerifyInputs
from outrider.engine.state.plans import Plans
from outrider.speculative.proposer import Proposer


class PlanPositions(Stage[PlanPositionsInput, VerifyInputs]):
    """The first part of the plan, concurrent with the draft: positions, cache slots and lengths, from lengths and block
    tables only.
    """

    name, fills = "place", VERIFY

    def __init__(self, stream: Stream, plans: Plans, buffers: StaticBuffers) -> None:
        super().__init__(stream)
        self._plans = plans
        self._buffers = buffers

    def run(self, given: PlanPositionsInput) -> VerifyInputs:
        """Compute positions, cache slots and lengths of verify's tokens from the gathered state."""
        verify = self._buffers.views(given.batch.count, given.batch.drafted).verify
        self._plans.from_lengths(given.inputs, verify)
        return verify


class PlanTokens(Stage[PlanTokensInput, VerifyInputs]):
    """The second part of the plan, after the draft: tokens, and the mask of a tree."""

    name = "fill"

    def __init__(self, stream: Stream, plans: Plans) -> None:
        super().__init__(stream)
        self._plans = plans

    def run(self, given: PlanTokensInput) -> VerifyInputs:
        """Write tokens and tree mask into the buffers that the first part started."""
        self._plans.from_draft(given.inputs, given.draft, given.verify)
        self._plans.copy_rope_positions_for_graph(given.inputs, given.verify, captured=given.batch.captured)
        return given.verify


class VerifyAttention(Stage[AttentionInput, AttentionMetadata]):
    """Metadata of verify's attention, with its plan, for the whole bucket."""

    name = "verify attention"

    def __init__(self, stream: Stream, attention: AttentionPlans, buffers: StaticBuffers) -> None:
        super().__init__(stream)
        self._attention = attention
        self._buffers = buffers

    def run(self, given: AttentionInput) -> AttentionMetadata:
        """Create the attention plan of verify, or update it for this batch."""
        metadata = self.metadata(given.batch)
        return self._attention.plan(AttentionBatchKind.VERIFY, metadata, given.seq_lens_host, metadata.max_query, self.stream)

    def metadata(self, batch: DecodeBatch) -> AttentionMetadata:
        """Return the metadata without a plan."""
        padded = self._buffers.views(batch.bucket, batch.drafted)
        return padded.verify.attention(padded.inputs.tables, max_query=batch.drafted + 1, max_kv=batch.max_kv)


class PlanExtend(Stage[ExtendPlanInput, ExtendPlan]):
    """The tokens of draft-extend; for a tree also the accepted path and the destination of its KV."""

    name, fills = "extend plan", EXTEND

    def __init__(self, stream: Stream, plans: Plans, buffers: StaticBuffers) -> None:
        super().__init__(stream)
        self._plans = plans
        self._buffers = buffers

    def run(self, given: ExtendPlanInput) -> ExtendPlan:
        """Compute the input tokens of draft-extend, and a tree's accepted path, from the accepted tokens."""
        plan = self._buffers.views(given.batch.count, given.batch.drafted).extend
        self._plans.from_accepted(given.inputs, given.verify, given.outputs, plan)
        return plan


class ExtendAttention(Stage[ExtendAttentionInput, AttentionMetadata]):
    """Metadata of draft-extend's attention, with its plan: that of verify for a chain, that of the accepted path for a
    tree.
    """

    name = "extend attention"

    def __init__(self, stream: Stream, attention: AttentionPlans, buffers: StaticBuffers, proposer: Proposer) -> None:
        super().__init__(stream)
        self._attention = attention
        self._buffers = buffers
        self._growth = proposer.depth + 1  # maximum number of tokens of a tree that verify accepts

    def run(self, given: ExtendAttentionInput) -> AttentionMetadata:
        """Create or update the attention plan of a tree's accepted path; return verify's planned metadata for a chain."""
        path = self.of_path(given.batch)
        if path is None:
            return given.verify
        return self._attention.plan(AttentionBatchKind.PATH, path, given.seq_lens_host, self._growth, self.stream)

    def of_path(self, batch: DecodeBatch) -> AttentionMetadata | None:
        """Return the metadata of an accepted path, without a plan; None for a chain."""
        padded = self._buffers.views(batch.bucket, batch.drafted)
        path = padded.extend.path
        if path is None:
            return None
        return path.attention(padded.inputs.tables, max_query=self._growth, max_kv=batch.max_kv)
