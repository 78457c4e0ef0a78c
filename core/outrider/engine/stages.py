"""The stages of a decode iteration: device work on static buffers, which can be captured as it stands.

A stage reads and writes buffers that were allocated before, decides nothing by a device value, and waits for nothing: who
runs it orders it. So a stage that is called, a stage that is replayed from a graph of its own, and all stages in one graph
compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, RequestInputs, RequestRows, Stream
from outrider.engine.parts import StepParts
from outrider.engine.requests.features import Features
from outrider.engine.state.attention_plans import Planned
from outrider.engine.state.buffers import Views
from outrider.model import ForwardInput
from outrider.speculative.lengths import HostLengths
from outrider.speculative.proposer import DraftInputs, ExtendInputs


class Stage(StrEnum):
    """What runs, or is captured, as one."""

    DRAFT = "draft"
    VERIFY = "verify"
    EXTEND = "extend"
    ITERATION = "iteration"


@dataclass(frozen=True, slots=True)
class Call:
    """What a stage is run for. ``max_kv``: host bound of cached tokens after the iteration. ``static``: it's captured, and
    reads the copies that are made for that. ``lengths``: those of the requests, only where attention takes host integers.
    """

    views: Views
    features: Features
    max_kv: int
    static: bool = False
    lengths: HostLengths | None = None


class Stages:
    """Gather, draft, verify and extend, each in the scope that the caller opened."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._width = parts.proposer.nodes + 1  # tokens that verify takes in
        self._growth = parts.proposer.depth + 1  # the most tokens that it lets through
        # The cache holds this many more tokens for draft-extend: all of verify's, or an accepted path moved together.
        self._taken_in = self._growth if parts.proposer.is_tree else self._width
        self.drafts = parts.proposer.nodes > 0
        """Whether there is anything to draft."""
        self.extends = parts.proposer.extends or parts.proposer.is_tree
        """Whether there is work behind verify: a draft that must catch up, or keys and values of a tree that must move."""

    # -- metadata --------------------------------------------------------------------------------------------------

    def verify_attention(self, call: Call) -> AttentionMetadata:
        """What verify's attention is told."""
        return call.views.verify.attention(call.views.inputs.tables, max_query=self._width, max_kv=call.max_kv)

    def ahead(self, stage: Stage) -> Mapping[str, int]:
        """The host parameters of a stage's attention, and how many tokens each is ahead of the requests' lengths."""
        declared = self._parts.proposer.host_lengths or {}
        if stage is Stage.VERIFY:
            return {"verify": self._width}
        if stage is Stage.DRAFT:
            return {name: ahead for name, ahead in declared.items() if name != "extend"}
        return {"extend": self._taken_in + declared["extend"]} if "extend" in declared else {}

    def extend_attention(self, call: Call, verify: AttentionMetadata) -> AttentionMetadata:
        """What draft-extend's attention is told: verify's own for a chain, that of the accepted path for a tree."""
        path = call.views.extend.path
        if path is None:
            return verify
        return path.attention(call.views.inputs.tables, max_query=self._growth, max_kv=call.max_kv)

    def plan_verify(self, call: Call, lengths: HostLengths | None, stream: Stream) -> AttentionMetadata:
        """Verify's attention with its plan; ``lengths`` of the requests where planning reads them, those of padding too."""
        attention = self.verify_attention(call)
        return self._parts.attention.plan(Planned.VERIFY, attention, lengths, self._width, stream)

    def plan_extend(
        self, call: Call, verify: AttentionMetadata, lengths: HostLengths | None, stream: Stream
    ) -> AttentionMetadata:
        """Draft-extend's attention with its plan: that of ``verify``, planned already, for a chain."""
        if call.views.extend.path is None:
            return verify
        along = self.extend_attention(call, verify)
        return self._parts.attention.plan(Planned.PATH, along, lengths, self._growth, stream)

    def run(self, stage: Stage, call: Call, attention: AttentionMetadata | None) -> None:
        """Run a stage by its name; verify and extend have an ``attention``."""
        if stage is Stage.DRAFT:
            self.draft(call)
        elif stage is Stage.ITERATION:
            self.iteration(call)
        else:
            assert attention is not None
            (self.verify if stage is Stage.VERIFY else self.extend)(call, attention)

    # -- stages ----------------------------------------------------------------------------------------------------

    def gather(self, call: Call, rows: Tensor, lens: Tensor | None) -> None:
        """Private copies of everything shared that the iteration reads, for ``rows`` and their ``lens`` int64 [B]; None: what
        was published last.

        What the iteration before relayed is looked at on the way. Nothing is found yet when this begins.
        """
        parts, inputs = self._parts, call.views.inputs
        found = parts.results.found(call.views.count)
        parts.model.kernels.gather_requests(
            rows,
            parts.future.lengths if lens is None else lens,
            RequestRows(parts.future.last_tokens, parts.rows.seeds, parts.rows.temperature, parts.rows.tables),
            RequestInputs(inputs.rows, inputs.lens, inputs.last_tokens, inputs.seeds, inputs.temperature, inputs.tables),
            found,
            lens_by_row=lens is None,
        )
        if inputs.deltas is not None:
            inputs.deltas.copy_(parts.rows.deltas.index_select(0, rows))
        for name, value in parts.future.relay.items():
            if self._is_kept(name, call.features):
                parts.probes.take(f"relay.{name}", value, rows, inputs.relay[name], found)
        parts.options.gather_into(call.features, rows, inputs)

    def draft(self, call: Call) -> None:
        """Draft, and copy what came out, looking at it, to where plan and verify read it."""
        inputs, out = call.views.inputs, call.views.draft
        draft = self._parts.proposer.draft(
            DraftInputs(
                lens=inputs.lens,
                last_tokens=inputs.last_tokens,
                tables=inputs.tables,
                temperature=inputs.temperature,
                seeds=inputs.seeds,
                deltas=inputs.deltas,
                relay=inputs.relay,
                max_kv=call.max_kv,
                sampling=call.features.sampling,
                host_lens=call.lengths,
            )
        )
        probes, found = self._parts.probes, self._parts.results.found(call.views.count)
        probes.take("draft.tokens", draft.tokens, None, out.tokens, found)
        if out.probs is not None and draft.probs is not None:
            probes.take("draft.probs", draft.probs, None, out.probs, found)
        if out.tree is not None and draft.tree is not None:
            out.tree.parents.copy_(draft.tree.parents)
            out.tree.depths.copy_(draft.tree.depths)
            out.tree.mask.copy_(draft.tree.mask)

    def verify(self, call: Call, attention: AttentionMetadata) -> None:
        """Run the target over the draft, accept, publish the new lengths and write the results."""
        parts, views, features = self._parts, call.views, call.features
        kernels, inputs, verify, outputs = parts.model.kernels, views.inputs, views.verify, views.outputs
        places = verify.static_rope_positions if call.static else verify.rope_positions
        if call.lengths is not None:
            attention = replace(attention, seq_lens_host=call.lengths.param("verify", self._width))
        flat = ForwardInput(verify.tokens, places, verify.slots, attention)
        hidden, captured = parts.model.forward_captured(flat, parts.cache, parts.proposer.capture_layers)
        logits = parts.model.logits(hidden).view(views.count, self._width, -1)
        parts.probes.look("target.logits", logits, parts.results.found(views.count))
        shaped = logits
        options = parts.options.over(features, inputs)
        if options is not None:
            shaped = options.process(
                kernels,
                logits,
                temperature=inputs.temperature,
                tokens=verify.tokens.view(views.count, self._width),
                tree_mask=verify.mask,
                positions=verify.positions.view(views.count, self._width) + 1,
            )
        tokens, path, accepted = self._accept(call, shaped)
        if options is not None:
            options.commit(kernels, tokens)
        if features.logprobs is not None:
            along = logits if path is None else logits.gather(1, path.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
            parts.results.write_decode_logprobs(*kernels.logprobs(along, tokens, features.logprobs))
        kernels.publish_accepted(
            inputs.rows,
            inputs.lens,
            (tokens, accepted),
            parts.future.lengths,
            parts.future.last_tokens,
            parts.results.decided(views.count),
            (outputs.tokens, outputs.accepted),
        )
        if not self.extends:
            return
        outputs.hidden.copy_(hidden)
        for kept, state in zip(outputs.captured, captured, strict=True):
            kept.copy_(state)
        if outputs.path is not None and path is not None:
            outputs.path.copy_(path)

    def extend(self, call: Call, attention: AttentionMetadata) -> None:
        """Move a tree's accepted keys and values into place, let the draft catch up, and stash."""
        parts, views = self._parts, call.views
        along = views.extend.path
        if along is not None:
            for k_cache, v_cache in parts.cache.layers:
                parts.model.kernels.move_cache(k_cache, v_cache, along.sources, along.destinations)

        if parts.proposer.extends:
            parts.future.stash_relay(views.inputs.rows, self._take_in(call, attention))

    def iteration(self, call: Call) -> None:
        """All of it, on one stream: lengths and everything else come from the device."""
        parts, views = self._parts, call.views
        rows = parts.staging.decode_rows(views.count)
        self.gather(call, rows, None)
        if self.drafts:
            self.draft(call)
        parts.plans.from_lengths(views)
        parts.plans.from_draft(views)
        parts.plans.into_graph(views, static=call.static)
        attention = self.verify_attention(call)
        self.verify(call, attention)
        if self.extends:
            parts.plans.from_accepted(views)
            self.extend(call, self.extend_attention(call, attention))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _take_in(self, call: Call, attention: AttentionMetadata) -> Mapping[str, Tensor]:
        """The draft sees what was accepted; returns what it relays."""
        views = call.views
        inputs, outputs, along = views.inputs, views.outputs, views.extend.path

        def accepted_rows(state: Tensor) -> Tensor:
            return state if along is None else state.index_select(0, along.gather)

        lengths = call.lengths
        if lengths is not None and self.ahead(Stage.EXTEND):
            lengths = replace(lengths, values=lengths.plus(self._taken_in))
            attention = replace(attention, seq_lens_host=lengths.param("extend", 0))
        places = views.verify if along is None else along
        static = call.static and along is None
        return self._parts.proposer.extend(
            ExtendInputs(
                tokens=views.extend.tokens,
                hidden=accepted_rows(outputs.hidden),
                captured=tuple(accepted_rows(state) for state in outputs.captured),
                positions=places.positions,
                rope_positions=views.verify.static_rope_positions if static else places.rope_positions,
                deltas=inputs.deltas,
                slots=places.slots,
                attention=attention,
                last=views.extend.last,
                next_positions=views.extend.next_positions,
                temperature=inputs.temperature,
                seeds=inputs.seeds,
                sampling=call.features.sampling,
                relay=inputs.relay,
                continues=views.extend.continues,
                prompt=None,
                host_lens=lengths,
            )
        )

    def _accept(self, call: Call, logits: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Tokens [B, D+1], the path through the tree [B, D+1] (None for a chain) and accepted [B]."""
        kernels, inputs, draft = self._parts.model.kernels, call.views.inputs, call.views.draft
        if draft.tree is None and self._width > 1:
            after = call.views.verify.positions.view(call.views.count, self._width)[:, 1]
            probs = draft.probs if call.features.sampling else None
            tokens, accepted = kernels.verify_chain(logits, draft.tokens, probs, inputs.temperature, inputs.seeds, after)
            return tokens, None, accepted
        after = inputs.lens + 1
        if draft.tree is None:  # nothing was drafted
            tokens = kernels.sample(logits.squeeze(1), inputs.temperature, inputs.seeds, after).unsqueeze(1)
            return tokens, None, torch.zeros_like(inputs.lens)
        return kernels.verify_tree(
            logits,
            call.views.verify.tokens.view(logits.shape[:2]),
            draft.tree.parents,
            inputs.temperature,
            inputs.seeds,
            after,
            depth=self._growth - 1,
            sampling=call.features.sampling,
        )

    def _is_kept(self, name: str, features: Features) -> bool:
        """Whether a relayed tensor means anything in this iteration: distributions only where somebody samples."""
        return name != "probs" or features.sampling
