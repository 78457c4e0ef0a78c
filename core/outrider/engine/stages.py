"""The stages of a decode iteration, and the frame of static buffers that they share.

In their order: gather, draft, the plan of verify, verify, the plan of extend, extend. The last stage, *iteration*, is all of
them as one stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, RequestInputs, RequestRows, Stream
from outrider.engine.requests.batch import BatchFeatures
from outrider.engine.state.buffers import (
    DRAFT,
    EXTEND,
    INPUTS,
    OUTPUTS,
    VERIFY,
    DecodeInputs,
    ExtendPlan,
    PathInputs,
    StaticBuffers,
    VerifyInputs,
    VerifyOutputs,
)
from outrider.engine.state.options import BatchOptions
from outrider.engine.state.parts import EngineParts
from outrider.engine.state.plans import PackedTokens
from outrider.model import ForwardInput, KeptRows, SideBySide, StateInput, side_by_side, speculative_positions
from outrider.speculative.proposer import Draft, DraftInputs, ExtendInputs, HostSeqLens, slots_of


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The host's description of the batch of one decode iteration; every stage receives it."""

    count: int
    """Number of requests."""
    bucket: int
    """Number of rows of the captured graphs; ``count`` without graphs."""
    drafted: int
    """Tokens drafted per request; for a tree, its nodes."""
    features: BatchFeatures
    """Features that cover those of the requests."""
    max_kv: int
    """Upper bound of cached tokens per request after the iteration."""
    captured: bool = False
    """Stages are replayed and read the static copies made for graphs."""
    fused: bool = False
    """One graph holds all stages: gather reads published lengths, and extend reads hidden states where verify wrote them."""
    seq_lens_host: HostSeqLens | None = None
    """Exact lengths of ``bucket`` rows, if attention takes host integers."""
    packed: int | None = None
    """Number of tokens of verify's pass, padding included, if each request has a draft length of its own; None: all drafts
    of all rows are verified.
    """


@dataclass(frozen=True, slots=True)
class TargetPass:
    """Results of the target's pass over T tokens."""

    hidden: Tensor
    """Hidden states [T, H] after the final norm."""
    aux_hidden_states: tuple[Tensor, ...]
    """States [T, H] that the proposer reads."""
    logits: Tensor
    """Logits [N, V] of all tokens, or of those after which a token is chosen."""

    def part(self, rows: slice) -> TargetPass:
        """Return the results of ``rows`` of the states, and of the same rows of the logits."""
        states = self.aux_hidden_states
        if states:
            states = SideBySide(side_by_side(states)[rows], states[0].shape[-1])
        return TargetPass(self.hidden[rows], states, self.logits[rows])


def run_target(parts: EngineParts, inputs: ForwardInput, chosen: Callable[[Tensor], Tensor] | None = None) -> TargetPass:
    """Run the target over ``inputs``. Logits are of all hidden states, or of those that ``chosen`` returns of them."""
    layers = parts.proposer.aux_hidden_state_layers
    hidden, aux_hidden_states = parts.model.forward_with_aux_hidden_states(inputs, parts.cache, layers)
    return TargetPass(hidden, aux_hidden_states, parts.model.logits(hidden if chosen is None else chosen(hidden)))


@dataclass(slots=True)
class MixedPrompts:
    """Prompt chunks that verify computes in the same pass of the target, after the tokens of the draft."""

    inputs: ForwardInput
    """The T tokens of the chunks, padding included; without media and kept rows."""
    last: Tensor
    """The index of each chunk's last token among the T tokens, int64 [S]."""
    results: TargetPass | None = None
    """What verify leaves: logits [S, V] of the last tokens."""


@dataclass(slots=True)
class Frame:
    """The static buffers of one iteration, with the rows of the batch's own requests.

    Addresses never change, so a stage that was captured over one frame serves every frame of its bucket. The last fields are
    what one stage leaves for later stages, and prompts that share verify's pass.
    """

    inputs: DecodeInputs
    draft: Draft
    verify: VerifyInputs
    extend: ExtendPlan
    outputs: VerifyOutputs
    verify_attention: AttentionMetadata
    """Metadata of verify's attention for the whole bucket, with a plan after the stage *verify attention*."""
    path_attention: AttentionMetadata | None
    """Metadata of the accepted path of a tree, with a plan after *extend attention*; None for chains."""
    seq_lens_host: HostSeqLens | None = None
    """Exact lengths of the bucket, if kernels plan attention on the host or attention takes host integers."""
    masks: Tensor | None = None
    """Token masks of guided requests, int32 [B, N, W]; None without one."""
    prompts: MixedPrompts | None = None
    """Prompt chunks in the pass of verify; None if verify computes the draft alone."""


def build_frame(buffers: StaticBuffers, batch: DecodeBatch) -> Frame:
    """Return the frame of ``batch``, with attention metadata that has no plan."""
    views, padded = buffers.views(batch.count, batch.drafted), buffers.views(batch.bucket, batch.drafted)
    tables, path = padded.inputs.tables, padded.extend.path
    return Frame(
        views.inputs,
        views.draft,
        views.verify,
        views.extend,
        views.outputs,
        padded.verify.attention(tables, max_kv=batch.max_kv),
        None if path is None else path.attention(tables, max_kv=batch.max_kv),
    )


class Stage(ABC):
    """Device work that is launched as one unit, by a call or from a graph.

    A stage neither branches on a device value nor waits: the step orders it. It enqueues in the scope of its stream, which
    the caller opens. It works on static memory, so a call, a replay of its own graph and a part of a larger graph compute the
    same.

    ``reads`` and ``writes`` name all memory that the stage accesses and that outlives it: a buffer, a group of buffers
    (:mod:`outrider.engine.state.buffers`), or state of requests. A stage may read what it wrote itself. The proof of the
    engine compares them with the accesses on the simulated device.
    """

    name: str
    on: str
    """The name of the stream, in :class:`~outrider.engine.fences.Streams`, on which the stage is enqueued."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    fills: str | None = None
    """The group of buffers that the stage starts for a new batch; its runner then writes the padding of this group."""
    needs_sampling_only = False
    """True if no feature but sampling changes the stage's work, so that graphs of other features and of draft lengths of each
    request are shared.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self.stream: Stream = getattr(parts.streams, self.on)

    @abstractmethod
    def run(self, batch: DecodeBatch, frame: Frame) -> None:
        """Enqueue the stage's work for ``batch``, which reads and writes the buffers of ``frame``."""

    def has_work(self, drafted: int) -> bool:
        """Return True if the stage has work in an iteration that drafts ``drafted`` tokens."""
        del drafted
        return True

    def host_params(self, drafted: int, seq_lens: HostSeqLens) -> Mapping[str, tuple[int, ...]]:
        """Return the host parameters of the stage's attention by name: the KV lengths of requests that have ``seq_lens``
        cached tokens. The default has none.
        """
        del drafted, seq_lens
        return {}


class Gather(Stage):
    """The copy of all shared state that the iteration reads into ``inputs.*``, private to the iteration.

    Probes check the relay of the previous iteration during the copy. This stage clears the findings of the batch.
    """

    name, on, fills = "gather", "forward", INPUTS
    reads = ("staged inputs", "request rows", "sampling options", "published lengths", "resolved lengths", "stash")
    writes = (INPUTS, "results")

    def run(self, batch: DecodeBatch, frame: Frame) -> None:
        """Copy the rows of the batch from lengths, sampling rows, block tables and relay into the static buffers."""
        parts, features, inputs = self._parts, batch.features, frame.inputs
        table, future = parts.rows, parts.future
        rows, found = parts.staging.decode_rows(batch.count), parts.results.probe_results(batch.count)
        parts.model.kernels.gather_requests(
            rows,
            future.seq_lens if batch.fused else future.batch_seq_lens[: batch.count],
            RequestRows(future.last_tokens, table.seeds, table.temperature, table.tables),
            RequestInputs(inputs.rows, inputs.seq_lens, inputs.last_tokens, inputs.seeds, inputs.temperature, inputs.tables),
            found,
            lens_by_row=batch.fused,
        )
        if batch.packed is not None:
            inputs.draft_lengths.copy_(parts.staging.draft_lengths(batch.count))
        if inputs.mrope_position_deltas is not None:
            inputs.mrope_position_deltas.copy_(table.mrope_position_deltas.index_select(0, rows))
        for name, value in future.relay.items():
            if name != "probs" or features.sampling:  # distributions are valid only if a request samples
                parts.probes.copy_checked(f"relay.{name}", value, rows, inputs.relay[name], found)
        parts.options.gather_into(features, rows, inputs)


class DraftStage(Stage):
    """The proposer's draft, copied through probes into ``draft.*``, where plan and verify read it."""

    name, on, needs_sampling_only = "draft", "forward", True
    reads = (INPUTS, "draft cache")
    writes = (DRAFT, "draft cache", "results")

    def has_work(self, drafted: int) -> bool:
        """Return True if the iteration drafts tokens."""
        return drafted > 0

    def host_params(self, drafted: int, seq_lens: HostSeqLens) -> Mapping[str, tuple[int, ...]]:
        """Return the host parameters of the draft passes for this draft length.

        A device may refuse to rebind parameters of passes that a graph lacks.
        """
        declared = self._parts.proposer.host_lengths_of(drafted) or {} if drafted else {}
        return {name: seq_lens.lengths_after(ahead) for name, ahead in declared.items() if not name.startswith("extend")}

    def run(self, batch: DecodeBatch, frame: Frame) -> None:
        """Write the draft into the static buffers; write nothing if the batch drafts no tokens."""
        if not batch.drafted:
            return
        draft, out, found = self._draft(batch, frame), frame.draft, self._parts.results.probe_results(batch.count)
        copy_checked = self._parts.probes.copy_checked
        # A prefix of a chain is a chain, so a proposer may draft more tokens than the batch asks for.
        tokens = draft.tokens[:, : batch.drafted].contiguous()
        copy_checked("draft.tokens", tokens, None, out.tokens, found)
        if out.probs is not None and draft.probs is not None:
            probs = draft.probs[:, : batch.drafted].contiguous()
            copy_checked("draft.probs", probs, None, out.probs, found)
        if out.tree is not None and draft.tree is not None:
            out.tree.parents.copy_(draft.tree.parents)
            out.tree.depths.copy_(draft.tree.depths)
            out.tree.mask.copy_(draft.tree.mask)

    def _draft(self, batch: DecodeBatch, frame: Frame) -> Draft:
        inputs = frame.inputs
        return self._parts.proposer.draft(
            DraftInputs(
                seq_lens=inputs.seq_lens,
                last_tokens=inputs.last_tokens,
                tables=inputs.tables,
                temperature=inputs.temperature,
                seeds=inputs.seeds,
                mrope_position_deltas=inputs.mrope_position_deltas,
                rows=inputs.rows,
                relay=inputs.relay,
                max_kv=batch.max_kv,
                sampling=batch.features.sampling,
                seq_lens_host=batch.seq_lens_host,
                count=batch.drafted,
            )
        )


class PlanPositions(Stage):
    """The first part of the plan, concurrent with the draft: positions, cache slots and lengths, from lengths and block
    tables only. The stages of the plan are idempotent.
    """

    name, on, fills = "plan positions", "plan", VERIFY
    reads = ("inputs.seq_lens", "inputs.tables", "inputs.mrope_position_deltas")
    writes = ("verify.positions", "verify.rope_positions", "verify.slots", "verify.seq_lens")

    def run(self, batch: DecodeBatch, frame: Frame) -> None:
        """Compute positions, cache slots and lengths of verify's tokens from the gathered state."""
        parts, inputs, verify = self._parts, frame.inputs, frame.verify
        shape = (batch.count, verify.width)
        # *Plan tokens* writes the positions of a tree again, because they depend on the tree's shape.
        parts.model.kernels.place_tokens(
            inputs.seq_lens,
            inputs.tables,
            parts.config.page_size,
            parts.last_position,
            verify.positions.view(shape),
            verify.slots.view(shape),
            verify.seq_lens.unsqueeze(1),
        )
        if verify.mask is None:
            verify.write_rope_positions(inputs.mrope_position_deltas)


class PlanTokens(Stage):
    """The second part of the plan, after the draft: tokens, and the mask and positions of a tree."""

    name, on = "plan tokens", "plan"
    reads = (INPUTS, DRAFT, "verify.rope_positions")
    writes = (
        "verify.tokens",
        "verify.mask",
        "verify.positions",
        "verify.rope_positions",
        "verify.static_rope_positions",
    )

    def run(self, batch: DecodeBatch, frame: Frame) -> None:
        """Write tokens and tree mask into the buffers that the first part started.

        Writes no tokens without a draft: verify then reads ``inputs.last_tokens``.
        """
        inputs, draft, verify = frame.inputs, frame.draft, frame.verify
        if batch.drafted:
            tokens = verify.tokens.view(-1, verify.width)
            torch.cat((inputs.last_tokens.unsqueeze(1), draft.tokens), dim=1, out=tokens)
        if verify.mask is not None and draft.tree is not None:
            positions = inputs.seq_lens.unsqueeze(1) + draft.tree.depths
            verify.positions.copy_(positions.clamp(max=self._parts.last_position).flatten())
            verify.write_rope_positions(inputs.mrope_position_deltas)
            verify.mask.copy_(draft.tree.mask.flatten(0, 1))
        if batch.captured:
            verify.copy_rope_positions_for_graph()


class VerifyAttention(Stage):
    """The plan of verify's attention, for the whole bucket."""

    name, on = "verify attention", "plan"
    reads = ("inputs.tables", "verify.seq_lens", "verify.mask")
    writes = ()

    def run(self, batch: DecodeBatch, frame: Frame) -> None:
        """Create the attention plan of verify, or update it for this batch."""
        width = batch.drafted + 1
        frame.verify_attention = self._parts.attention.plan(
            "verify", frame.verify_attention, frame.seq_lens_host, width, self.stream
        )


class Verify(Stage):
    """The target's pass over the draft, the acceptance, the published lengths and the results."""

    name, on = "verify", "forward"
    reads = (INPUTS, DRAFT, VERIFY, "target cache", "recurrent states", "sampling options", "token masks", "staged inputs")
    writes = (
        OUTPUTS,
        "target cache",
        "recurrent states",
        "published lengths",
        "stash",
        "results",
        "sampling options",
    )

    def host_params(self, drafted: int, seq_lens: HostSeqLens) -> Mapping[str, tuple[int, ...]]:
        """Return the lengths that include the verified tokens."""
        return {"verify": seq_lens.lengths_after(drafted + 1)}

    def run(self, batch: DecodeBatch, frame: Frame) -> None:
        """Verify, publish the lengths, and copy the hidden states that draft-extend reads into static buffers.

        In a fused iteration, the frame gets the hidden states themselves, which extend reads in the same graph.
        """
        hidden, aux_hidden_states = self._verify(batch, frame)
        if batch.fused:
            frame.outputs = replace(frame.outputs, hidden=hidden, aux_hidden_states=aux_hidden_states)
        elif self._parts.has_extend_work:
            frame.outputs.hidden.copy_(hidden)
            for kept, state in zip(frame.outputs.aux_hidden_states, aux_hidden_states, strict=True):
                kept.copy_(state)

    def _verify(self, batch: DecodeBatch, frame: Frame) -> tuple[Tensor, tuple[Tensor, ...] | SideBySide]:
        """Verify, and return the hidden states where the model left them."""
        parts, inputs, outputs, features = self._parts, frame.inputs, frame.outputs, batch.features
        kernels, results = parts.model.kernels, parts.results
        forward, packed = self._forward_input(batch, frame), self._packed_tokens(batch, frame)
        if packed is not None:
            forward = packed.select(forward)
        computed = run_target(parts, forward) if frame.prompts is None else self._run_mixed(forward, frame.prompts)
        hidden, aux_hidden_states, logits = computed.hidden, computed.aux_hidden_states, computed.logits
        if packed is not None:
            logits = packed.unpack(logits, kernels)
            if parts.has_extend_work:
                hidden = packed.unpack(hidden, kernels)
                aux_hidden_states = packed.unpack_states(aux_hidden_states, kernels)
        logits = logits.view(batch.count, batch.drafted + 1, -1)
        options = parts.options.options_from_inputs(features, inputs)
        tokens, path, accepted = self._accept(batch, frame, logits, options)
        if options is not None:
            options.commit(kernels, tokens)
        if features.logprobs is not None:
            along = logits if path is None else logits.gather(1, path.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
            results.write_logprobs(*kernels.logprobs(along, tokens, features.logprobs))
        kernels.publish_accepted(
            inputs.rows,
            inputs.seq_lens,
            (tokens, accepted),
            parts.future.seq_lens,
            parts.future.last_tokens,
            results.decode_rows(batch.count, tokens.shape[1]),
            (outputs.tokens, outputs.accepted),
            parts.cache.pending,
        )
        if parts.has_extend_work and outputs.path is not None and path is not None:
            outputs.path.copy_(path)
        return hidden, aux_hidden_states

    def _run_mixed(self, inputs: ForwardInput, prompts: MixedPrompts) -> TargetPass:
        """Run the target over ``inputs`` and the chunks of ``prompts``. Leave the results of the chunks in ``prompts``, and
        return the others.
        """
        count = inputs.tokens.shape[0]

        def chosen(hidden: Tensor) -> Tensor:
            return torch.cat((hidden[:count], hidden[count:].index_select(0, prompts.last)))

        computed = run_target(self._parts, ForwardInput.concatenated(inputs, prompts.inputs), chosen)
        prompts.results = computed.part(slice(count, None))
        return computed.part(slice(count))

    def _forward_input(self, batch: DecodeBatch, frame: Frame) -> ForwardInput:
        """Return the target's input: the tokens of the draft, after the last token of each request."""
        plan, attention = frame.verify, frame.verify_attention
        if batch.seq_lens_host is not None:
            attention = replace(attention, seq_lens_host=batch.seq_lens_host.host_param("verify", batch.drafted + 1))
        states = None if self._parts.model.config.recurrent is None else StateInput(frame.inputs.rows, decodes=True)
        positions = plan.static_rope_positions if batch.captured else plan.rope_positions
        return ForwardInput(plan.tokens, positions, plan.slots, attention, states=states)

    def _packed_tokens(self, batch: DecodeBatch, frame: Frame) -> PackedTokens | None:
        """Return the tokens that verify processes, if each request has a draft length of its own, else None."""
        if batch.packed is None:
            return None
        parts, lengths = self._parts, frame.inputs.draft_lengths
        return PackedTokens.of_lengths(
            lengths,
            frame.inputs.seq_lens,
            lane=parts.buffers.lane[: batch.drafted + 1],
            count=batch.packed,
            capacity=parts.capacity,
        )

    def _accept(
        self, batch: DecodeBatch, frame: Frame, logits: Tensor, options: BatchOptions | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Check the logits, apply token masks and options to them, and accept draft tokens.

        Return tokens [B, D+1], the path through the tree [B, D+1] (None for a chain) and accepted [B], all int64.
        """
        parts, inputs, plan = self._parts, frame.inputs, frame.verify
        kernels, found = parts.model.kernels, parts.results.probe_results(batch.count)
        if frame.masks is None and options is None and frame.draft.tree is None and not batch.features.sampling:
            # Nothing changes the logits, so the kernel that accepts also checks them.
            after = plan.positions.view(logits.shape[:2])[:, 1] if batch.drafted else inputs.seq_lens
            columns = parts.probes.result_columns("target.logits", found)
            draft_tokens = frame.draft.tokens
            if batch.packed is not None:  # no choice of the target equals -1, so acceptance ends before unverified tokens
                is_unverified = parts.buffers.lane[: batch.drafted] >= inputs.draft_lengths.unsqueeze(1)
                draft_tokens = draft_tokens.masked_fill(is_unverified, -1)
            tokens, accepted = kernels.verify_checked(logits, draft_tokens, inputs.temperature, inputs.seeds, after, columns)
            return tokens, None, accepted
        parts.probes.check_for_nan("target.logits", logits, found)
        if frame.masks is not None:
            logits = kernels.apply_token_bitmask(logits, frame.masks)
        if options is not None:
            logits = options.process(
                kernels,
                logits,
                temperature=inputs.temperature,
                tokens=plan.tokens.view(logits.shape[:2]),
                tree_mask=plan.mask,
                positions=plan.positions.view(logits.shape[:2]) + 1,
            )
        return self._accept_checked(batch, frame, logits)

    def _accept_checked(self, batch: DecodeBatch, frame: Frame, logits: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Accept draft tokens with logits that were checked and processed. The result is that of :meth:`_accept`."""
        kernels, inputs, draft, sampling = self._parts.model.kernels, frame.inputs, frame.draft, batch.features.sampling
        if draft.tree is None and batch.drafted:
            after = frame.verify.positions.view(batch.count, -1)[:, 1]
            probs = draft.probs if sampling else None
            tokens, accepted = kernels.verify_chain(logits, draft.tokens, probs, inputs.temperature, inputs.seeds, after)
            return tokens, None, accepted
        # Without sampling, no kernel reads the position, and one operation less lies between two iterations.
        after = inputs.seq_lens + 1 if sampling else inputs.seq_lens
        if draft.tree is None:  # nothing was drafted
            tokens = kernels.sample(logits.squeeze(1), inputs.temperature, inputs.seeds, after).unsqueeze(1)
            return tokens, None, self._parts.results.zero_accepted(batch.count)
        return kernels.verify_tree(
            logits,
            frame.verify.tokens.view(logits.shape[:2]),
            draft.tree.parents,
            inputs.temperature,
            inputs.seeds,
            after,
            depth=self._parts.proposer.depth,
            sampling=sampling,
        )


class PlanExtend(Stage):
    """The tokens of draft-extend; for a tree also the accepted path and the destination of its KV."""

    name, on, fills = "extend plan", "plan", EXTEND
    reads = (INPUTS, "verify.slots", OUTPUTS)
    writes = (EXTEND,)

    def run(self, batch: DecodeBatch, frame: Frame) -> None:
        """Write the accepted tokens and the decided one, padded with token 0, and for a tree the accepted path."""
        del batch
        inputs, outputs, extend = frame.inputs, frame.outputs, frame.extend
        tokens = extend.tokens.view(outputs.tokens.shape)
        self._parts.model.kernels.place_accepted(
            inputs.seq_lens, outputs.tokens, outputs.accepted, tokens, extend.last, extend.next_positions
        )
        if extend.path is not None and outputs.path is not None:
            self._plan_path(frame, outputs.path, extend.path)

    def _plan_path(self, frame: Frame, path: Tensor, plan: PathInputs) -> None:
        """Write the verify rows and cache slots of the accepted ``path``, and the consecutive slots that it moves to."""
        parts, inputs = self._parts, frame.inputs
        page_size, lane = parts.config.page_size, parts.buffers.lane[: path.shape[1]]
        node = torch.arange(path.shape[0], device=path.device).unsqueeze(1) * frame.verify.width + path
        positions = inputs.seq_lens.unsqueeze(1) + lane
        slots = slots_of(positions, inputs.tables, page_size)
        plan.gather.copy_(node.flatten())
        plan.positions.copy_(positions.clamp(max=parts.last_position).flatten())
        if inputs.mrope_position_deltas is not None:
            speculative_positions(plan.positions, inputs.mrope_position_deltas, out=plan.rope_positions)
        plan.slots.copy_(slots.flatten())
        plan.seq_lens.copy_((inputs.seq_lens + path.shape[1]).clamp(max=parts.capacity))
        # The root doesn't move. Slots after the accepted nodes are copied to themselves.
        sources = frame.verify.slots.index_select(0, node.flatten()).view(path.shape)
        is_accepted = lane <= frame.outputs.accepted.unsqueeze(1)
        plan.sources.copy_(torch.where(is_accepted, sources, slots)[:, 1:].flatten())
        plan.destinations.copy_(slots[:, 1:].flatten())


class ExtendAttention(Stage):
    """The plan of draft-extend's attention over the accepted path of a tree. A chain uses the plan of verify."""

    name, on = "extend attention", "plan"
    reads = ("inputs.tables", "extend.seq_lens")
    writes = ()

    def run(self, batch: DecodeBatch, frame: Frame) -> None:
        """Create or update the attention plan of a tree's accepted path."""
        del batch
        path = frame.path_attention
        if path is not None:
            frame.path_attention = self._parts.attention.plan("path", path, frame.seq_lens_host, path.max_query, self.stream)


class Extend(Stage):
    """The move of a tree's accepted KV into place, draft-extend, and the stash of the next-iteration state."""

    name, on, needs_sampling_only = "extend", "forward", True
    reads = (INPUTS, VERIFY, OUTPUTS, EXTEND, "target cache", "draft cache")
    writes = ("target cache", "draft cache", "stash")

    def has_work(self, drafted: int) -> bool:
        """Return True if draft-extend or a move of tree KV follows verify."""
        del drafted
        return self._parts.has_extend_work

    def host_params(self, drafted: int, seq_lens: HostSeqLens) -> Mapping[str, tuple[int, ...]]:
        """Return the host parameters of the draft's passes over the accepted tokens. A pass may have a minimum length."""
        declared, widths = self._parts.proposer.host_lengths or {}, self._parts.proposer.host_widths
        new_tokens = self._new_tokens(drafted)
        return {
            name: seq_lens.lengths_after(new_tokens + ahead, new_tokens + widths[name] if name in widths else 0)
            for name, ahead in declared.items()
            if name.startswith("extend")
        }

    def _new_tokens(self, drafted: int) -> int:
        """Return how many tokens per request the draft cache gains in draft-extend: those of verify, or the moved path of a
        tree.
        """
        return (self._parts.proposer.depth if self._parts.proposer.is_tree else drafted) + 1

    def run(self, batch: DecodeBatch, frame: Frame) -> None:
        """Move accepted tree KV into place, update the draft cache and store the next-iteration state."""
        along = frame.extend.path
        if along is not None:
            for k_cache, v_cache in self._parts.cache.layers:
                self._parts.model.kernels.move_cache(k_cache, v_cache, along.sources, along.destinations)

        if self._parts.proposer.extends:
            self._parts.future.stash_relay(frame.inputs.rows, self._extend_draft(batch, frame))

    def _extend_draft(self, batch: DecodeBatch, frame: Frame) -> Mapping[str, Tensor]:
        """Run the proposer's draft-extend over the accepted tokens and return its relay tensors by name."""
        inputs, verify, outputs, plan = frame.inputs, frame.verify, frame.outputs, frame.extend
        along = plan.path

        def accepted_rows(state: Tensor) -> Tensor:
            return state if along is None else state.index_select(0, along.gather)

        aux_hidden_states = outputs.aux_hidden_states
        if along is not None and aux_hidden_states:
            joined = accepted_rows(side_by_side(aux_hidden_states))
            aux_hidden_states = SideBySide(joined, aux_hidden_states[0].shape[-1])
        attention, seq_lens_host = self._attention(batch, frame)
        kept = None  # with exact host lengths, the host knows only the lengths that include all drafted tokens
        if seq_lens_host is None and batch.drafted:
            kept = self._last_rows(batch, frame, attention)
        places = verify if along is None else along
        static = batch.captured and along is None
        return self._parts.proposer.extend(
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
                rows=inputs.rows,
                relay=inputs.relay,
                continues=plan.continues,
                prompt=None,
                first_tokens=inputs.last_tokens,
                kept=kept,
                seq_lens_host=seq_lens_host,
            )
        )

    def _attention(self, batch: DecodeBatch, frame: Frame) -> tuple[AttentionMetadata, HostSeqLens | None]:
        """Return the attention over the verified tokens, or over a tree's accepted path, with the exact host lengths that
        the draft's passes add to.
        """
        attention, seq_lens_host = frame.path_attention or frame.verify_attention, batch.seq_lens_host
        if seq_lens_host is None or not self.host_params(batch.drafted, seq_lens_host):
            return attention, seq_lens_host
        seq_lens_host = replace(seq_lens_host, values=seq_lens_host.lengths_after(self._new_tokens(batch.drafted)))
        return replace(attention, seq_lens_host=seq_lens_host.host_param("extend", 0)), seq_lens_host

    def _last_rows(self, batch: DecodeBatch, frame: Frame, attention: AttentionMetadata) -> KeptRows:
        """Return the rows that the draft's last layer keeps: the last accepted token of each request."""
        plan = frame.extend
        # From lengths, which never exceed the block tables, not from positions: a request may have ended on the device.
        seq_lens = attention.seq_lens[: batch.count] - (self._new_tokens(batch.drafted) - 1)
        return KeptRows.one_per_sequence(attention, plan.last, plan.starts, seq_lens.add_(frame.outputs.accepted))


STAGES = (Gather, DraftStage, PlanPositions, PlanTokens, VerifyAttention, Verify, PlanExtend, ExtendAttention, Extend)
"""All stages, in the order in which an iteration launches them. A chain plans verify's attention before *plan tokens*."""


class Stages:
    """The stages of an engine of one rank, each on its stream."""

    def __init__(self, parts: EngineParts) -> None:
        self.gather = Gather(parts)
        self.draft = DraftStage(parts)
        self.plan_positions = PlanPositions(parts)
        self.plan_tokens = PlanTokens(parts)
        self.verify_attention = VerifyAttention(parts)
        self.verify = Verify(parts)
        self.plan_extend = PlanExtend(parts)
        self.extend_attention = ExtendAttention(parts)
        self.extend = Extend(parts)
        self._has_extend_work = parts.has_extend_work

    @property
    def on_device(self) -> tuple[Stage, ...]:
        """The stages that graphs capture, in launch order. Stages that plan attention are left out: they are called."""
        after = (self.plan_extend, self.extend) if self._has_extend_work else ()
        return (self.gather, self.draft, self.plan_positions, self.plan_tokens, self.verify, *after)


class Iteration(Stage):
    """The whole iteration as one stage on forward. Lengths and all other inputs come from the device."""

    name, on, reads = "iteration", "forward", ()
    writes = (INPUTS, DRAFT, VERIFY, OUTPUTS, EXTEND)

    def __init__(self, parts: EngineParts, stages: Stages) -> None:
        super().__init__(parts)
        self.stages = stages
        self._buffers = parts.buffers

    def run(self, batch: DecodeBatch, frame: Frame) -> None:
        """Run the stages in order, on a frame whose attention has no plan: a replay has other lengths than the capture."""
        batch, frame = replace(batch, fused=True), replace(build_frame(self._buffers, batch), prompts=frame.prompts)
        for stage in self.stages.on_device:
            stage.run(batch, frame)
