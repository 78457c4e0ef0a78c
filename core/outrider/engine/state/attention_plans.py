"""AttentionPlans: the plans that kernels compute for the attention of each kind of batch."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from outrider.device import AttentionMetadata, HostParam, Stream
from outrider.model import LanguageModel, attention_shapes
from outrider.speculative.host_seq_lens import HostSeqLens
from outrider.speculative.proposer import Proposer


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
        target = attention_shapes(model.config, model.dtype, page_size=page_size)
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
