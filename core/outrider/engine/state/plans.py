"""Plans of attention, and the plan of a batch between the join of the plan stream and verify."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from outrider.device import AttentionMetadata, HostParam, InterfaceError, Recompute, SpeculativeSync, Stream
from outrider.engine.state.buffers import DecodeInputs, VerifyInputs
from outrider.model import LanguageModel
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
