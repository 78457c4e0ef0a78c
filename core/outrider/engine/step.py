"""One iteration, top to bottom, with every wait and every record in sight.

    host      stage inputs ─┐
    schedule  upload, resolve lengths ── inputs_ready ─┐
    forward   prefill · gather · draft ── draft_outputs_ready ─┐   join · verify · accept ─┐   draft-extend · stash
    plan      first part (overlaps the draft) · second part ── plan_ready ┘   extend plan ──┘
    copy      results of the iteration to the host

Core runs ahead of the device: nothing here waits on the host, except for a free slot of the staging ring (an iteration
long over) and where the backend's policy says that the host waits for *published*.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import Backend, Recompute, Stream, Waiter
from outrider.engine.buffers import StepBuffers, TreeInputs, VerifyInputs
from outrider.engine.fences import FenceSet
from outrider.engine.options import OptionTable
from outrider.engine.results import Results, Ticket, logprobs_of
from outrider.engine.rows import FutureMap, RowTable
from outrider.engine.staging import Batch, Packer, Staging, pack, prefill_attention, prefill_inputs
from outrider.model import Decoder, ForwardInput, KVCache
from outrider.speculative.proposer import Draft, DraftInputs, ExtendInputs, Proposer
from outrider.speculative.slots import slots_of


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of an engine."""

    schedule: Stream
    forward: Stream
    plan: Stream
    copy: Stream


@dataclass(frozen=True, slots=True)
class StepParts:
    """What the step works with; owned by the engine, and alive as long as it."""

    backend: Backend
    streams: Streams
    fences: FenceSet
    model: Decoder
    cache: KVCache
    proposer: Proposer
    rows: RowTable
    options: OptionTable
    future: FutureMap
    buffers: StepBuffers
    staging: Staging
    results: Results
    page_size: int
    max_context: int


class _TextJoin:
    """The joined plan of a text batch: positions have one dimension and no graph holds a copy of them."""

    idle = False

    def recompute(self, what: Recompute) -> None:
        """A text model has no mrope positions."""

    def refresh(self, buffer: str) -> None:
        """No graph is used."""


def _along(state: Tensor, tree: TreeInputs | None) -> Tensor:
    """Rows of verify that were accepted, of a tree; all rows of a chain."""
    return state if tree is None else state.index_select(0, tree.gather)


class Step:
    """Launches iterations."""

    def __init__(self, parts: StepParts, *, slots: int) -> None:
        self._parts = parts
        self._slots = slots
        self._launched = 0
        self._sync = parts.backend.speculative_sync
        self._width = parts.proposer.nodes + 1  # tokens that verify takes in
        self._growth = parts.proposer.depth + 1  # the most tokens that it lets through
        self._signal_what_is_free()

    def _signal_what_is_free(self) -> None:
        """Everything is free at the start: say so once, so that no wait in the step is conditional."""
        streams, fences = self._parts.streams, self._parts.fences
        for fence in fences.staging_free:
            fence.signal(streams.schedule)
        fences.step_reads_done.signal(streams.forward)
        fences.verify_inputs_free.signal(streams.forward)
        fences.published.signal(streams.forward)
        fences.results_taken.signal(streams.copy)

    def launch(self, batch: Batch) -> Ticket:
        """Enqueue one iteration; returns the ticket for its results."""
        parts, streams, fences = self._parts, self._parts.streams, self._parts.fences
        slot = self._launched % self._slots
        self._launched += 1

        packer = pack(batch, page_size=parts.page_size, table_width=parts.rows.tables.shape[1])
        parts.options.pack(batch.admitted, packer)
        self._stage(batch, packer, slot)

        fences.inputs_ready.wait(streams.forward)
        fences.results_taken.wait(streams.forward)
        if any(request.params.penalized for request in batch.admitted):
            with parts.backend.on(streams.forward):
                parts.options.begin(parts.staging.view, packer.segments)
        if batch.prefill:
            self._prefill(batch, packer)
        if batch.decode:
            self._decode(batch, packer)
        else:
            fences.step_reads_done.signal(streams.forward)
        fences.results_ready.signal(streams.forward)

        fences.results_ready.wait(streams.copy)
        ticket = parts.results.copy_out(batch, slot, streams.copy)
        fences.results_taken.signal(streams.copy)
        fences.results_copied[slot].signal(streams.copy)
        return ticket

    # -- schedule --------------------------------------------------------------------------------------------------

    def _stage(self, batch: Batch, packer: Packer, slot: int) -> None:
        """Upload what the host decided, and resolve the lengths that the last iteration published."""
        parts, fences, schedule = self._parts, self._parts.fences, self._parts.streams.schedule
        fences.step_reads_done.wait(schedule)
        parts.staging.upload(slot, packer.values, fences.staging_free[slot], schedule)
        view = parts.staging.view
        with parts.backend.on(schedule):
            if batch.admitted:
                bits = view(packer.segments["temperature"]).to(torch.int32)
                parts.rows.admit(view(packer.segments["admitted"]), bits.view(torch.float32), view(packer.segments["seeds"]))
                parts.options.admit(view, packer.segments)
            if batch.table_updates:
                parts.rows.append(view(packer.segments["entries"]), view(packer.segments["pages"]))
        if self._sync.published_waiter is Waiter.HOST:
            fences.published.wait_host()
        else:
            fences.published.wait(schedule)
        with parts.backend.on(schedule):
            if batch.decode:
                rows = view(packer.segments["decode_rows"])
                parts.buffers.resolved_lens[: len(batch.decode)] = parts.future.lengths.index_select(0, rows)
        fences.inputs_ready.signal(schedule)

    # -- prefill ---------------------------------------------------------------------------------------------------

    def _prefill(self, batch: Batch, packer: Packer) -> None:
        """Prompt chunks, on forward alone. Only a prompt's last chunk publishes and stashes."""
        parts, forward = self._parts, self._parts.streams.forward
        kernels = parts.model.kernels
        requests = tuple(chunk.request for chunk in batch.prefill)
        reported = logprobs_of(requests)
        sampling = any(chunk.request.params.temperature > 0 for chunk in batch.prefill)
        with parts.backend.on(forward):
            inputs = prefill_inputs(batch, parts.staging, packer.segments)
            tables = parts.rows.tables.index_select(0, inputs.rows)
            temperature = parts.rows.temperature.index_select(0, inputs.rows)
            seeds = parts.rows.seeds.index_select(0, inputs.rows)
            attention = prefill_attention(inputs, tables)
            flat = ForwardInput(inputs.tokens, inputs.positions, inputs.slots, attention)
            hidden, captured = self._forward(flat)
            logits = parts.model.logits(hidden[inputs.last])
            options = parts.options.gather(requests, inputs.rows)
            shaped = logits
            if options is not None:
                shaped = options.process(
                    kernels,
                    logits.unsqueeze(1),
                    temperature=temperature,
                    tokens=inputs.ends.unsqueeze(1),  # a single node has no drafted token: not read
                    tree_mask=None,
                    positions=inputs.ends.unsqueeze(1),
                ).squeeze(1)
            first = kernels.sample(shaped, temperature, seeds, inputs.ends)
            if options is not None:
                options.commit(kernels, torch.where(inputs.final, first, -1).unsqueeze(1))
            if reported is not None:
                parts.results.write_prefill_logprobs(*kernels.logprobs(logits.unsqueeze(1), first.unsqueeze(1), reported))
            parts.results.write_prefill(first)
            # Row 0 takes what an unfinished prompt must not publish.
            rows = torch.where(inputs.final, inputs.rows, 0)
            parts.future.publish(rows, inputs.ends)
            self._parts.fences.published.signal(forward)
            if parts.proposer.extends:
                following = inputs.following.index_copy(
                    0, inputs.last, torch.where(inputs.final, first, inputs.following[inputs.last])
                )
                relay = parts.proposer.extend(
                    ExtendInputs(
                        tokens=following,
                        hidden=hidden,
                        captured=captured,
                        positions=inputs.positions,
                        slots=inputs.slots,
                        attention=attention,
                        last=inputs.last,
                        next_positions=inputs.ends + 1,
                        temperature=temperature,
                        seeds=seeds,
                        sampling=sampling,
                        relay=parts.future.resolve(inputs.rows).relay,
                        continues=inputs.continues,
                        prompt=inputs.tokens,
                    )
                )
            else:
                relay = {}
            # A chunk that isn't the last stashes too, for the next one; its row isn't drafted for before that.
            parts.future.stash(inputs.rows, first, relay)

    # -- decode ----------------------------------------------------------------------------------------------------

    def _decode(self, batch: Batch, packer: Packer) -> None:
        """Draft, verify, accept, publish, extend, stash."""
        parts, streams, fences = self._parts, self._parts.streams, self._parts.fences
        backend, kernels, proposer = parts.backend, parts.model.kernels, parts.proposer
        count = len(batch.decode)
        verify = parts.buffers.verify(count)
        bound = max(request.length_bound(self._growth) for request in batch.decode)
        # Earlier iterations grew each request by a path at most; this one also writes the slots of the whole tree.
        bound += proposer.slots - self._growth
        max_kv = min(bound, parts.rows.tables.shape[1] * parts.page_size)
        sampling = any(request.params.temperature > 0 for request in batch.decode)
        rows = parts.staging.view(packer.segments["decode_rows"])

        reported = logprobs_of(batch.decode)
        with backend.on(streams.forward):
            private = self._draft_inputs(rows, count, max_kv, sampling)
            options = parts.options.gather(batch.decode, rows)
            draft = proposer.draft(private)
        fences.draft_outputs_ready.signal(streams.forward)

        fences.inputs_ready.wait(streams.plan)
        fences.verify_inputs_free.wait(streams.plan)
        with backend.on(streams.plan):
            self._plan_from_lengths(rows, verify)
        fences.draft_outputs_ready.wait(streams.plan)
        with backend.on(streams.plan):
            self._plan_from_draft(private.last_tokens, draft, verify)
            attention = kernels.plan_attention(verify.attention(max_query=self._width, max_kv=max_kv), stream=streams.plan)
        fences.plan_ready.signal(streams.plan)

        fences.plan_ready.wait(streams.forward)
        fences.step_reads_done.signal(streams.forward)
        with backend.on(streams.forward):
            self._sync.after_join(_TextJoin())
            flat = ForwardInput(verify.tokens, verify.positions, verify.slots, attention)
            hidden, captured = self._forward(flat)
            logits = parts.model.logits(hidden).view(count, self._width, -1)
            shaped = logits
            if options is not None:
                shaped = options.process(
                    kernels,
                    logits,
                    temperature=verify.temperature,
                    tokens=verify.tokens.view(count, self._width),
                    tree_mask=attention.tree_mask,
                    positions=verify.positions.view(count, self._width) + 1,
                )
            tokens, path, accepted = self._accept(shaped, draft, verify, sampling)
            if options is not None:
                options.commit(kernels, tokens)
            if reported is not None:
                shown = logits
                if path is not None:
                    shown = logits.gather(1, path.unsqueeze(-1).expand(*path.shape, logits.shape[-1]))
                parts.results.write_decode_logprobs(*kernels.logprobs(shown, tokens, reported))
            parts.future.publish(verify.rows, verify.lens + accepted + 1)
        fences.published.signal(streams.forward)
        fences.accept_ready.signal(streams.forward)

        fences.accept_ready.wait(streams.plan)
        with backend.on(streams.plan):
            extend_attention = attention
            self._plan_extend(tokens, accepted, verify)
            if verify.tree is not None and path is not None:
                self._plan_path(path, accepted, verify, verify.tree)
                extend_attention = verify.path_attention(verify.tree, max_query=self._growth, max_kv=max_kv)
                extend_attention = kernels.plan_attention(extend_attention, stream=streams.plan)
        fences.extend_plan_ready.signal(streams.plan)

        fences.extend_plan_ready.wait(streams.forward)
        with backend.on(streams.forward):
            if verify.tree is not None:
                for k_cache, v_cache in parts.cache.layers:
                    kernels.move_cache(k_cache, v_cache, verify.tree.sources, verify.tree.destinations)
            relay = {}
            if proposer.extends:
                along = verify.tree or verify
                relay = dict(
                    proposer.extend(
                        ExtendInputs(
                            tokens=verify.extend_tokens,
                            hidden=_along(hidden, verify.tree),
                            captured=tuple(_along(state, verify.tree) for state in captured),
                            positions=along.positions,
                            slots=along.slots,
                            attention=extend_attention,
                            last=verify.extend_last,
                            next_positions=verify.lens + accepted + 2,
                            temperature=verify.temperature,
                            seeds=verify.seeds,
                            sampling=sampling,
                            relay=private.relay,
                            continues=torch.ones_like(accepted, dtype=torch.bool),
                            prompt=None,
                        )
                    )
                )
            decided = tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)
            parts.future.stash(verify.rows, decided, relay)
            parts.results.write_decode(accepted, tokens)
        fences.verify_inputs_free.signal(streams.forward)

    def _forward(self, flat: ForwardInput) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The target's final hidden states, and those of inner layers that the proposer wants to see."""
        return self._parts.model.forward_captured(flat, self._parts.cache, self._parts.proposer.capture_layers)

    def _accept(
        self, logits: Tensor, draft: Draft, verify: VerifyInputs, sampling: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Tokens [B, D+1], the path through the tree [B, D+1] (None for a chain) and accepted [B]."""
        kernels, temperature, seeds = self._parts.model.kernels, verify.temperature, verify.seeds
        if self._width == 1:  # nothing was drafted
            tokens = kernels.sample(logits.squeeze(1), temperature, seeds, verify.lens + 1).unsqueeze(1)
            return tokens, None, torch.zeros_like(verify.lens)
        if draft.tree is None:
            tokens, accepted = kernels.verify_chain(logits, draft.tokens, draft.probs, temperature, seeds, verify.lens + 1)
            return tokens, None, accepted
        return kernels.verify_tree(
            logits,
            verify.tokens.view(logits.shape[:2]),
            draft.tree.parents,
            temperature,
            seeds,
            verify.lens + 1,
            depth=self._growth - 1,
            sampling=sampling,
        )

    def _draft_inputs(self, rows: Tensor, count: int, max_kv: int, sampling: bool) -> DraftInputs:
        """Private copies of everything shared that the draft reads."""
        parts = self._parts
        resolved = parts.future.resolve(rows)
        return DraftInputs(
            lens=parts.buffers.resolved_lens[:count].clone(),
            last_tokens=resolved.last_tokens,
            tables=parts.rows.tables.index_select(0, rows),
            temperature=parts.rows.temperature.index_select(0, rows),
            seeds=parts.rows.seeds.index_select(0, rows),
            relay=resolved.relay,
            max_kv=max_kv,
            sampling=sampling,
        )

    # -- plan ------------------------------------------------------------------------------------------------------

    def _plan_from_lengths(self, rows: Tensor, verify: VerifyInputs) -> None:
        """First part: what needs lengths and tables alone. Runs beside the draft."""
        parts = self._parts
        lens = parts.buffers.resolved_lens[: rows.shape[0]]
        verify.rows.copy_(rows)
        verify.lens.copy_(lens)
        verify.seeds.copy_(parts.rows.seeds.index_select(0, rows))
        verify.temperature.copy_(parts.rows.temperature.index_select(0, rows))
        verify.tables.copy_(parts.rows.tables.index_select(0, rows))
        places = lens.unsqueeze(1) + parts.buffers.lane
        verify.slots.copy_(slots_of(places, verify.tables, parts.page_size).flatten())
        capacity = verify.tables.shape[1] * parts.page_size
        verify.kv_lens.copy_((lens + self._width).clamp(max=capacity))
        if verify.tree is None:
            verify.positions.copy_(self._valid(places).flatten())

    def _plan_from_draft(self, last_tokens: Tensor, draft: Draft, verify: VerifyInputs) -> None:
        """Second part: what the draft produced. A tree's shape is one of its outputs."""
        verify.tokens.copy_(torch.cat((last_tokens.unsqueeze(1), draft.tokens), dim=1).flatten())
        if verify.tree is not None and draft.tree is not None:
            verify.positions.copy_(self._valid(verify.lens.unsqueeze(1) + draft.tree.depths).flatten())
            verify.tree.mask.copy_(draft.tree.mask.flatten(0, 1))

    def _plan_extend(self, tokens: Tensor, accepted: Tensor, verify: VerifyInputs) -> None:
        """Static inputs of draft-extend: what was accepted, padded with token 0 behind the decided one."""
        verify.extend_tokens.copy_(tokens.clamp(min=0).flatten())
        first = torch.arange(0, accepted.shape[0] * self._growth, self._growth, device=accepted.device)
        verify.extend_last.copy_(first + accepted)

    def _plan_path(self, path: Tensor, accepted: Tensor, verify: VerifyInputs, tree: TreeInputs) -> None:
        """Where the accepted path lies among verify's rows and slots, and where it goes: behind one another."""
        parts, width = self._parts, self._width
        lane = parts.buffers.lane[: self._growth]
        row = torch.arange(path.shape[0], device=path.device).unsqueeze(1)
        node = row * width + path
        places = verify.lens.unsqueeze(1) + lane
        slots = slots_of(places, verify.tables, parts.page_size)
        tree.gather.copy_(node.flatten())
        tree.positions.copy_(self._valid(places).flatten())
        tree.slots.copy_(slots.flatten())
        capacity = verify.tables.shape[1] * parts.page_size
        tree.kv_lens.copy_((verify.lens + self._growth).clamp(max=capacity))
        # The root is where it belongs. What wasn't accepted stays in its place.
        sources = verify.slots.index_select(0, node.flatten()).view(path.shape)
        moved = lane <= accepted.unsqueeze(1)
        tree.sources.copy_(torch.where(moved, sources, slots)[:, 1:].flatten())
        tree.destinations.copy_(slots[:, 1:].flatten())

    def _valid(self, positions: Tensor) -> Tensor:
        """Positions that exist. A request that is over on the device, while the host doesn't know yet, runs past its end
        once: its tokens are discarded, so their positions only have to be valid.
        """
        return positions.clamp(max=self._parts.max_context - 1)
