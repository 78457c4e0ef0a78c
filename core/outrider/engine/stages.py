"""The stages of a decode iteration on the forward stream: gather, draft, verify, extend, and the whole iteration as one
stage.

:mod:`outrider.engine.stage_io` has the inputs and outputs of each stage, :mod:`outrider.engine.plan_stages` the stages of the
plan stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.device import AttentionMetadata, KernelSet, RequestInputs, RequestRows, Stream
from outrider.engine.plan_stages import ExtendAttention, PlanExtend, PlanPositions, PlanTokens, VerifyAttention
from outrider.engine.stage_io import (
    Capturable,
    DecodeBatch,
    DraftStageInput,
    ExtendPlanInput,
    ExtendStageInput,
    GatherInput,
    IterationInput,
    PlanPositionsInput,
    PlanTokensInput,
    Stage,
    VerifyStageInput,
)
from outrider.engine.state.agreed_values import agree_values
from outrider.engine.state.buffers import DRAFT, EXTEND, INPUTS, OUTPUTS, VERIFY, DecodeInputs, StaticBuffers, VerifyOutputs
from outrider.engine.state.options import OptionTable
from outrider.engine.state.probes import Probes
from outrider.engine.state.results import Results
from outrider.engine.state.rows import FutureMap, RowTable
from outrider.engine.state.staging import Staging
from outrider.model import (
    ForwardInput,
    KeptRows,
    KVCache,
    LanguageModel,
    ModelRanks,
    SideBySide,
    StateInput,
    side_by_side,
)
from outrider.speculative.proposer import Draft, DraftInputs, ExtendInputs, Proposer
from outrider.speculative.tree import Tree


class Gather(Stage[GatherInput, DecodeInputs]):
    """The copy of all shared state that the iteration reads into ``inputs.*``, private to the iteration.

    Probes check the relay of the previous iteration during the copy. This stage clears the findings of the batch.
    """

    name, fills = "gather", INPUTS

    def __init__(
        self,
        stream: Stream,
        kernels: KernelSet,
        *,
        rows: RowTable,
        future: FutureMap,
        options: OptionTable,
        probes: Probes,
        results: Results,
        buffers: StaticBuffers,
    ) -> None:
        super().__init__(stream)
        self._kernels = kernels
        self._rows = rows
        self._future = future
        self._options = options
        self._probes = probes
        self._results = results
        self._buffers = buffers

    def run(self, given: GatherInput) -> DecodeInputs:
        """Copy the rows of the batch from lengths, sampling rows, block tables and relay into the static buffers."""
        table, future, rows = self._rows, self._future, given.rows
        features, inputs = given.batch.features, self._buffers.views(given.batch.count, given.batch.drafted).inputs
        found = self._results.probe_results(given.batch.count)
        self._kernels.gather_requests(
            rows,
            future.seq_lens if given.seq_lens is None else given.seq_lens,
            RequestRows(future.last_tokens, table.seeds, table.temperature, table.tables),
            RequestInputs(inputs.rows, inputs.seq_lens, inputs.last_tokens, inputs.seeds, inputs.temperature, inputs.tables),
            found,
            lens_by_row=given.seq_lens is None,
        )
        if inputs.mrope_position_deltas is not None:
            inputs.mrope_position_deltas.copy_(table.mrope_position_deltas.index_select(0, rows))
        for name, value in future.relay.items():
            if name != "probs" or features.sampling:  # distributions are valid only if a request samples
                self._probes.copy_checked(f"relay.{name}", value, rows, inputs.relay[name], found)
        self._options.gather_into(features, rows, inputs)
        return inputs


class DraftStage(Capturable[DraftStageInput, Draft]):
    """The proposer's draft, copied through probes into ``draft.*``, where plan and verify read it."""

    name, reads, writes = "draft", (INPUTS,), (DRAFT,)

    def __init__(
        self,
        stream: Stream,
        proposer: Proposer,
        *,
        probes: Probes,
        results: Results,
        buffers: StaticBuffers,
        ranks: ModelRanks | None = None,
    ) -> None:
        super().__init__(stream)
        self._proposer = proposer
        self._probes = probes
        self._results = results
        self._buffers = buffers
        self._ranks = ranks

    def host_params(self, drafted: int) -> Mapping[str, int]:
        """Return the host parameters of the draft passes for this draft length.

        A device may refuse to rebind parameters of passes that a graph lacks.
        """
        declared = self._proposer.host_lengths_of(drafted) or {} if drafted else {}
        return {name: ahead for name, ahead in declared.items() if not name.startswith("extend")}

    def run(self, given: DraftStageInput) -> Draft:
        """Write the draft into the static buffers and return them; write nothing if the batch drafts no tokens."""
        batch, inputs, out = given.batch, given.inputs, self.written(given.batch)
        if not batch.drafted:
            return out
        draft = self._proposer.draft(
            DraftInputs(
                seq_lens=inputs.seq_lens,
                last_tokens=inputs.last_tokens,
                tables=inputs.tables,
                temperature=inputs.temperature,
                seeds=inputs.seeds,
                mrope_position_deltas=inputs.mrope_position_deltas,
                relay=inputs.relay,
                max_kv=batch.max_kv,
                sampling=batch.features.sampling,
                seq_lens_host=batch.seq_lens_host,
                count=batch.drafted,
            )
        )
        draft = self._agreed(draft)
        found = self._results.probe_results(batch.count)
        # A prefix of a chain is a chain, so a proposer may draft more tokens than the batch asks for.
        tokens = draft.tokens[:, : batch.drafted].contiguous()
        self._probes.copy_checked("draft.tokens", tokens, None, out.tokens, found)
        if out.probs is not None and draft.probs is not None:
            probs = draft.probs[:, : batch.drafted].contiguous()
            self._probes.copy_checked("draft.probs", probs, None, out.probs, found)
        if out.tree is not None and draft.tree is not None:
            out.tree.parents.copy_(draft.tree.parents)
            out.tree.depths.copy_(draft.tree.depths)
            out.tree.mask.copy_(draft.tree.mask)
        return out

    def _agreed(self, draft: Draft) -> Draft:
        """Return the draft of the first tensor-parallel rank. Only that rank reads the distributions."""
        if self._ranks is None:
            return draft
        tree = draft.tree
        if tree is None:
            (tokens,) = agree_values(self._ranks, draft.tokens)
            return replace(draft, tokens=tokens)
        tokens, parents, depths, mask = agree_values(self._ranks, draft.tokens, tree.parents, tree.depths, tree.mask)
        return replace(draft, tokens=tokens, tree=Tree(parents, depths, mask))

    def written(self, batch: DecodeBatch) -> Draft:
        """Return the static buffers ``draft.*`` that this stage writes."""
        return self._buffers.views(batch.count, batch.drafted).draft


class Verify(Capturable[VerifyStageInput, VerifyOutputs]):
    """The target's pass over the draft, the acceptance, the published lengths and the results."""

    name, reads, writes = "verify", (INPUTS, DRAFT, VERIFY), (OUTPUTS,)

    def __init__(
        self,
        stream: Stream,
        model: LanguageModel,
        proposer: Proposer,
        *,
        cache: KVCache,
        options: OptionTable,
        probes: Probes,
        results: Results,
        future: FutureMap,
        buffers: StaticBuffers,
    ) -> None:
        super().__init__(stream)
        self._model = model
        self._cache = cache
        self._options = options
        self._probes = probes
        self._results = results
        self._future = future
        self._buffers = buffers
        self._depth = proposer.depth
        self._layers = proposer.aux_hidden_state_layers
        self._keeps_states = _has_extend_work(proposer)

    def host_params(self, drafted: int) -> Mapping[str, int]:
        """Return the number of verified tokens per request, which attention adds to the cached lengths."""
        return {"verify": drafted + 1}

    def run(self, given: VerifyStageInput) -> VerifyOutputs:
        """Verify, publish the lengths, and copy the hidden states that draft-extend reads into static buffers."""
        made, outputs = self.verified(given), self.written(given.batch)
        if self._keeps_states:
            outputs.hidden.copy_(made.hidden)
            for kept, state in zip(outputs.aux_hidden_states, made.aux_hidden_states, strict=True):
                kept.copy_(state)
        return outputs

    def verified(self, given: VerifyStageInput) -> VerifyOutputs:
        """Verify without copying hidden states to static buffers. Use it when extend runs in the same graph."""
        batch, inputs, plan, outputs = given.batch, given.inputs, given.plan, self.written(given.batch)
        model, kernels, features, count = self._model, self._model.kernels, given.batch.features, given.batch.count
        width = batch.drafted + 1
        positions = plan.static_rope_positions if batch.captured else plan.rope_positions
        attention = given.attention
        if batch.seq_lens_host is not None:
            attention = replace(attention, seq_lens_host=batch.seq_lens_host.host_param("verify", width))
        states = None
        if model.config.recurrent is not None:
            states = StateInput(inputs.rows, decodes=True, window=[] if batch.drafted else None)
        flat = ForwardInput(plan.tokens, positions, plan.slots, attention, states=states)
        hidden, aux_hidden_states = model.forward_with_aux_hidden_states(flat, self._cache, self._layers)
        logits = model.logits(hidden).view(count, width, -1)
        options, found = self._options.options_from_inputs(features, inputs), self._results.probe_results(count)
        # If nothing changes the logits, the kernel that accepts also checks them.
        checks_in_accept = given.masks is None and options is None and given.draft.tree is None and not features.sampling
        if not checks_in_accept:
            self._probes.check_for_nan("target.logits", logits, found)
        shaped = logits if given.masks is None else kernels.apply_token_bitmask(logits, given.masks)
        if options is not None:
            shaped = options.process(
                kernels,
                shaped,
                temperature=inputs.temperature,
                tokens=plan.tokens.view(count, width),
                tree_mask=plan.mask,
                positions=plan.positions.view(count, width) + 1,
            )
        checked = self._probes.result_columns("target.logits", found) if checks_in_accept else None
        tokens, path, accepted = self._agreed(*self._accept(given, shaped, checked), found=found)
        if options is not None:
            options.commit(kernels, tokens)
        if features.logprobs is not None:
            along = logits if path is None else logits.gather(1, path.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
            self._results.write_decode_logprobs(*kernels.logprobs(along, tokens, features.logprobs))
        kernels.publish_accepted(
            inputs.rows,
            inputs.seq_lens,
            (tokens, accepted),
            self._future.seq_lens,
            self._future.last_tokens,
            self._results.decode_rows(count, tokens.shape[1]),
            (outputs.tokens, outputs.accepted),
        )
        if states is not None and states.window is not None:
            model.commit(flat, self._cache, accepted)
        if self._keeps_states and outputs.path is not None and path is not None:
            outputs.path.copy_(path)
        return replace(outputs, hidden=hidden, aux_hidden_states=aux_hidden_states)

    def written(self, batch: DecodeBatch) -> VerifyOutputs:
        """Return the static buffers of the accepted tokens and of their hidden states."""
        return self._buffers.views(batch.count, batch.drafted).outputs

    def _agreed(
        self, tokens: Tensor, path: Tensor | None, accepted: Tensor, *, found: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the decision of the first tensor-parallel rank, and copy the findings of its probes to ``found``."""
        ranks = self._model.ranks
        if ranks is None:
            return tokens, path, accepted
        tokens, accepted, agreed_findings, *rest = agree_values(
            ranks, tokens, accepted, found, *([] if path is None else [path])
        )
        found.copy_(agreed_findings)
        return tokens, rest[0] if rest else None, accepted

    def _accept(self, given: VerifyStageInput, logits: Tensor, found: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return tokens [B, D+1], the path through the tree [B, D+1] (None for a chain) and accepted [B], all int64.

        ``found`` int64 [B, 2] receives the findings about the logits of a greedy chain. It is None if the logits were already
        checked.
        """
        kernels, inputs, draft, sampling = self._model.kernels, given.inputs, given.draft, given.batch.features.sampling
        if found is not None:
            after = given.plan.positions.view(logits.shape[:2])[:, 1] if given.batch.drafted else inputs.seq_lens
            tokens, accepted = kernels.verify_checked(logits, draft.tokens, inputs.temperature, inputs.seeds, after, found)
            return tokens, None, accepted
        if draft.tree is None and given.batch.drafted:
            after = given.plan.positions.view(given.batch.count, -1)[:, 1]
            probs = draft.probs if sampling else None
            tokens, accepted = kernels.verify_chain(logits, draft.tokens, probs, inputs.temperature, inputs.seeds, after)
            return tokens, None, accepted
        # Without sampling, no kernel reads the position, and one operation less lies between two iterations.
        after = inputs.seq_lens + 1 if sampling else inputs.seq_lens
        if draft.tree is None:  # nothing was drafted
            tokens = kernels.sample(logits.squeeze(1), inputs.temperature, inputs.seeds, after).unsqueeze(1)
            return tokens, None, self._results.zero_accepted(given.batch.count)
        return kernels.verify_tree(
            logits,
            given.plan.tokens.view(logits.shape[:2]),
            draft.tree.parents,
            inputs.temperature,
            inputs.seeds,
            after,
            depth=self._depth,
            sampling=sampling,
        )


class Extend(Capturable[ExtendStageInput, None]):
    """The move of a tree's accepted KV into place, draft-extend, and the stash of the next-iteration state."""

    name, reads, writes = "extend", (INPUTS, VERIFY, OUTPUTS, EXTEND), ()

    def __init__(self, stream: Stream, kernels: KernelSet, proposer: Proposer, *, cache: KVCache, future: FutureMap) -> None:
        super().__init__(stream)
        self._kernels = kernels
        self._proposer = proposer
        self._cache = cache
        self._future = future

    def host_params(self, drafted: int) -> Mapping[str, int]:
        """Return the host parameters of the draft's passes over the accepted tokens."""
        declared = self._proposer.host_lengths or {}
        taken_in = self._taken_in(drafted)
        return {name: taken_in + ahead for name, ahead in declared.items() if name.startswith("extend")}

    def least_lengths(self, drafted: int) -> Mapping[str, int]:
        """Return the minimum KV length of each draft pass, by host-parameter name."""
        taken_in = self._taken_in(drafted)
        return {name: taken_in + more for name, more in self._proposer.host_widths.items()}

    def _taken_in(self, drafted: int) -> int:
        """Return how many more tokens per request the cache holds: those of verify, or the moved path of a tree."""
        return (self._proposer.depth if self._proposer.is_tree else drafted) + 1

    def run(self, given: ExtendStageInput) -> None:
        """Move accepted tree KV into place, update the draft cache and store the next-iteration state."""
        along = given.plan.path
        if along is not None:
            for k_cache, v_cache in self._cache.layers:
                self._kernels.move_cache(k_cache, v_cache, along.sources, along.destinations)

        if self._proposer.extends:
            self._future.stash_relay(given.inputs.rows, self._extend_draft(given))

    def written(self, batch: DecodeBatch) -> None:
        """Return None: the stage writes no static buffer."""
        del batch

    def _extend_draft(self, given: ExtendStageInput) -> Mapping[str, Tensor]:
        """Run the proposer's draft-extend over the accepted tokens and return its relay tensors by name."""
        batch, inputs, verify, outputs, plan = given.batch, given.inputs, given.verify, given.outputs, given.plan
        along = plan.path

        def accepted_rows(state: Tensor) -> Tensor:
            return state if along is None else state.index_select(0, along.gather)

        aux_hidden_states = outputs.aux_hidden_states
        if along is not None and aux_hidden_states:
            joined = accepted_rows(side_by_side(aux_hidden_states))
            aux_hidden_states = SideBySide(joined, aux_hidden_states[0].shape[-1])
        attention, seq_lens_host = given.attention, batch.seq_lens_host
        if seq_lens_host is not None and self.host_params(batch.drafted):
            seq_lens_host = replace(seq_lens_host, values=seq_lens_host.lengths_after(self._taken_in(batch.drafted)))
            attention = replace(attention, seq_lens_host=seq_lens_host.host_param("extend", 0))
        kept = None  # with exact host lengths, the host knows only the lengths that include all drafted tokens
        if seq_lens_host is None and batch.drafted:
            # From lengths, which never exceed the block tables, not from positions: a request may have ended on the device.
            seq_lens = attention.seq_lens[: batch.count] - (self._taken_in(batch.drafted) - 1)
            kept = KeptRows.one_per_sequence(attention, plan.last, plan.starts, seq_lens.add_(outputs.accepted))
        places = verify if along is None else along
        static = batch.captured and along is None
        return self._proposer.extend(
            ExtendInputs(
                tokens=plan.tokens,
                hidden=accepted_rows(outputs.hidden),
                aux_hidden_states=aux_hidden_states,
                positions=places.positions,
                rope_positions=verify.static_rope_positions if static else places.rope_positions,
                mrope_position_deltas=inputs.mrope_position_deltas,
                slots=places.slots,
                attention=attention,
                last=plan.last,
                next_positions=plan.next_positions,
                temperature=inputs.temperature,
                seeds=inputs.seeds,
                sampling=batch.features.sampling,
                relay=inputs.relay,
                continues=plan.continues,
                prompt=None,
                kept=kept,
                seq_lens_host=seq_lens_host,
            )
        )


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of one engine. ``extends`` is True if draft-extend or a move of tree KV follows verify."""

    gather: Gather
    draft: DraftStage
    place: PlanPositions
    fill: PlanTokens
    verify_attention: VerifyAttention
    verify: Verify
    plan_extend: PlanExtend
    extend_attention: ExtendAttention
    extend: Extend
    extends: bool


class Iteration(Capturable[IterationInput, None]):
    """The whole iteration as one stage on forward. Lengths and all other inputs come from the device."""

    name, reads, writes = "iteration", (), (INPUTS, DRAFT, VERIFY, OUTPUTS, EXTEND)

    def __init__(self, stream: Stream, stages: Stages, staging: Staging) -> None:
        super().__init__(stream)
        self._stages = stages
        self._staging = staging

    def run(self, given: IterationInput) -> None:
        """Run the stages in order, each on the static buffers that the stage before wrote."""
        batch, stages = given.batch, self._stages
        inputs = stages.gather.run(GatherInput(batch, self._staging.decode_rows(batch.count), None))
        draft = stages.draft.run(DraftStageInput(batch, inputs))
        verify = stages.place.run(PlanPositionsInput(batch, inputs))
        verify = stages.fill.run(PlanTokensInput(batch, inputs, draft, verify))
        attention: AttentionMetadata = stages.verify_attention.metadata(batch)
        outputs = stages.verify.verified(VerifyStageInput(batch, inputs, draft, verify, attention))
        if stages.extends:
            plan = stages.plan_extend.run(ExtendPlanInput(batch, inputs, verify, outputs))
            along = stages.extend_attention.of_path(batch) or attention
            stages.extend.run(ExtendStageInput(batch, inputs, verify, outputs, plan, along))

    def written(self, batch: DecodeBatch) -> None:
        """Return None: the stage writes the next-iteration state into rows, not into a static buffer."""
        del batch


def _has_extend_work(proposer: Proposer) -> bool:
    """Return True if work follows verify: a draft-extend pass, or KV of a tree that must move."""
    return proposer.extends or proposer.is_tree
