"""Attention that is planned: which kinds of it a batch goes through, and the plans that kernels made of batches."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from outrider.device import AttentionMetadata, HostParam, Stream
from outrider.model import LanguageModel, attention_shapes
from outrider.speculative.proposer import Proposer
from outrider.speculative.seq_lens import HostSeqLens


class Planned(StrEnum):
    """What a plan is for: verify (and draft-extend over the same tokens), an accepted path, chunks of prompts."""

    VERIFY = "verify"
    PATH = "path"
    PREFILL = "prefill"


class AttentionPlans:
    """Plans of attention, each kept for the next batch of its kind and size, so that graphs find it where it was.

    A draft's own passes aren't planned: their lengths grow in the middle of a stage.
    """

    def __init__(self, model: LanguageModel, proposer: Proposer, *, page_size: int) -> None:
        self._kernels = model.kernels
        self.on_host = model.kernels.plans_on_host
        """Whether planning reads exact lengths on the host."""
        target = attention_shapes(model.config, model.dtype, page_size=page_size)
        draft = proposer.attention_shapes(page_size)
        both = tuple(dict.fromkeys((*target, *draft)))
        # An accepted path of a tree is another batch than the tree; a chain is taken in as it was verified.
        self._shapes = {
            Planned.VERIFY: target if proposer.is_tree else both,
            Planned.PATH: draft,
            Planned.PREFILL: both,
        }
        self._kept: dict[tuple[Planned, int, int], object | None] = {}

    def plan(
        self, what: Planned, attention: AttentionMetadata, seq_lens_host: HostSeqLens | None, ahead: int, stream: Stream
    ) -> AttentionMetadata:
        """``attention`` with its plan, made in the scope of ``stream``, or brought up to date.

        ``seq_lens_host`` plus ``ahead`` are ``attention.seq_lens`` on the host, those of padding included; needed with
        ``on_host``.
        """
        kept = (what, 0, 0) if what is Planned.PREFILL else (what, attention.seq_lens.shape[0], attention.max_query)
        batch = replace(attention, shapes=self._shapes[what], plan=self._kept.get(kept))
        if self.on_host:
            assert seq_lens_host is not None
            batch = replace(batch, seq_lens_host=HostParam(what.value, seq_lens_host.plus(ahead)))
        planned = self._kernels.plan_attention(batch, stream=stream)
        self._kept[kept] = planned.plan
        return replace(planned, seq_lens_host=attention.seq_lens_host)
