"""One iteration, top to bottom, with every wait and every record in sight.

    host      stage inputs ─┐
    schedule  upload, resolve lengths ── inputs_ready ─┐
    forward   prefill · gather ── shared_reads_done ─┬─ draft ── draft_outputs_ready ─┐   join · verify ─┐   extend · stash
    plan      first part (overlaps the draft) ───────┴─ second part ── plan_ready ────┘   extend plan ───┘
    copy      results of the iteration to the host

That is *staged*; each stage is called, or replayed from a graph of its own. In *fused* mode one graph on forward holds
everything from gather to stash, and plan has nothing to do. Core runs ahead of the device: nothing here waits on the host,
except where the backend's policy says that the host waits for *published*, or needs lengths itself.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.device import AttentionMetadata, StepMode, Waiter
from outrider.engine.graphs import Runner
from outrider.engine.parts import StepParts
from outrider.engine.prefill import Prefill
from outrider.engine.requests.batch import Batch
from outrider.engine.requests.features import Features
from outrider.engine.stages import Call, Stage, Stages
from outrider.engine.state.buffers import EXTEND, INPUTS, VERIFY, Views
from outrider.engine.state.plans import PlanAtJoin
from outrider.engine.state.results import Ticket
from outrider.engine.state.staging import Packer, pack
from outrider.engine.state.transfer import bring_in
from outrider.speculative.lengths import HostLengths


class Step:
    """Launches iterations, whose stages ``runner`` runs."""

    def __init__(self, parts: StepParts, stages: Stages, runner: Runner, *, mode: StepMode, slots: int) -> None:
        self._parts = parts
        self._stages = stages
        self._runner = runner
        self._mode = mode
        self._slots = slots
        self._launched = 0
        self._prefill = Prefill(parts)
        self._sync = parts.backend.speculative_sync
        self._lengths_on_host = self._sync.exact_host_lengths or parts.attention.on_host
        self._growth = parts.proposer.depth + 1  # the most tokens that verify lets through
        self._capacity = parts.rows.tables.shape[1] * parts.page_size  # tokens that a block table holds
        self._signal_what_is_free()

    def _signal_what_is_free(self) -> None:
        """Everything is free at the start: say so once, so that no wait in the step is conditional."""
        streams, fences = self._parts.streams, self._parts.fences
        fences.shared_reads_done.signal(streams.forward)
        fences.published.signal(streams.forward)
        fences.results_taken.signal(streams.copy)
        if streams.update is not None:
            fences.params_free.signal(streams.forward)

    def launch(self, batch: Batch) -> Ticket:
        """Enqueue one iteration; returns the ticket for its results."""
        parts, streams, fences = self._parts, self._parts.streams, self._parts.fences
        slot = self._launched % self._slots
        self._launched += 1

        packer = pack(
            batch,
            page_size=parts.page_size,
            table_width=parts.rows.tables.shape[1],
            max_requests=parts.staging.max_requests,
            rope=parts.model.config.rope,
        )
        parts.options.pack(batch.admitted, packer)
        self._stage(batch, packer, slot)

        fences.inputs_ready.wait(streams.forward)
        fences.results_taken.wait(streams.forward)
        if any(request.params.penalized for request in batch.admitted):
            with parts.backend.on(streams.forward):
                parts.options.begin(parts.staging.view, packer.segments)
        if batch.arrivals:
            bring_in(parts, batch.arrivals)
        if batch.prefill:
            self._prefill.launch(batch, packer)
        if not batch.decode:
            fences.shared_reads_done.signal(streams.forward)
            self._publish(slot)
        elif self._mode is StepMode.FUSED:
            self._decode_fused(batch)
        else:
            self._decode(batch, slot)
        fences.results_ready.signal(streams.forward)

        fences.results_ready.wait(streams.copy)
        ticket = parts.results.copy_out(batch, slot, streams.copy)
        fences.results_taken.signal(streams.copy)
        fences.results_copied[slot].signal(streams.copy)
        return ticket

    def _stage(self, batch: Batch, packer: Packer, slot: int) -> None:
        """Upload what the host decided, and resolve the lengths that the last iteration published."""
        parts, fences, schedule = self._parts, self._parts.fences, self._parts.streams.schedule
        fences.shared_reads_done.wait(schedule)
        parts.staging.upload(slot, packer.values, schedule)
        with parts.backend.on(schedule):
            parts.rows.take_over(batch, parts.staging.view, packer.segments)
            if batch.admitted:
                parts.options.admit(parts.staging.view, packer.segments)
        if self._mode is not StepMode.FUSED:
            if self._sync.published_waiter is Waiter.HOST:
                fences.published.wait_host()
            else:
                fences.published.wait(schedule)
            with parts.backend.on(schedule):
                parts.future.resolve_lengths(parts.staging.decode_rows(len(batch.decode)))
        fences.inputs_ready.signal(schedule)

    def _decode(self, batch: Batch, slot: int) -> None:
        """Draft, verify, accept, publish, extend, stash; planning beside the draft."""
        parts, streams, fences = self._parts, self._parts.streams, self._parts.fences
        backend, stages, runner, plans = parts.backend, self._stages, self._runner, parts.plans
        lengths = self._exact_lengths(batch, slot) if self._sync.exact_host_lengths else None
        call = self._call(batch, lengths)
        count, bucket = len(batch.decode), call.views.count
        views = parts.buffers.views(count)

        with backend.on(streams.forward):
            parts.buffers.mark_over(INPUTS, bucket=bucket)
            self._stages.gather(replace(call, views=views), parts.staging.decode_rows(count), parts.future.resolved[:count])
            parts.buffers.pad(INPUTS, count=count, bucket=bucket)
        fences.shared_reads_done.signal(streams.forward)
        if streams.update is not None:
            fences.params_free.wait(streams.update)
            runner.bind(call, streams.update)
            fences.params_bound.signal(streams.update)
            fences.params_bound.wait(streams.forward)
        if self._stages.drafts:
            runner.run(Stage.DRAFT, call)
        fences.draft_outputs_ready.signal(streams.forward)

        fences.shared_reads_done.wait(streams.plan)
        with backend.on(streams.plan):
            parts.buffers.mark_over(VERIFY, bucket=bucket)
            plans.from_lengths(views)
            parts.buffers.pad(VERIFY, count=count, bucket=bucket)
        if parts.attention.on_host:
            # The draft of this iteration is on its way: what the host now waits for is only the verify before it.
            lengths = (lengths or self._exact_lengths(batch, slot)).padded(bucket)
        tree = views.verify.mask is not None  # whose mask is one of the draft's outputs
        if not tree:
            with backend.on(streams.plan):
                attention = stages.plan_verify(call, lengths, streams.plan)
        fences.draft_outputs_ready.wait(streams.plan)
        with backend.on(streams.plan):
            plans.from_draft(views)
            plans.into_graph(views, static=call.static)
            if tree:
                attention = stages.plan_verify(call, lengths, streams.plan)
        fences.plan_ready.signal(streams.plan)
        for name, buffer in plans.before_join(views, self._sync, static=call.static).items():
            backend.mark_stale(buffer, f"{name} as they were before the join")

        fences.plan_ready.wait(streams.forward)
        with backend.on(streams.forward):
            self._sync.after_join(PlanAtJoin(plans, views, static=call.static))
        runner.run(Stage.VERIFY, call, attention)
        self._publish(slot)
        if self._stages.extends:
            self._extend(call, views, attention, lengths)
        if streams.update is not None:
            fences.params_free.signal(streams.forward)

    def _extend(self, call: Call, views: Views, attention: AttentionMetadata, lengths: HostLengths | None) -> None:
        """Draft-extend: its plan always waits for verify, and it always for its plan."""
        parts, streams, fences = self._parts, self._parts.streams, self._parts.fences
        count, bucket = views.count, call.views.count
        fences.accept_ready.signal(streams.forward)

        fences.accept_ready.wait(streams.plan)
        with parts.backend.on(streams.plan):
            parts.buffers.mark_over(EXTEND, bucket=bucket)
            parts.plans.from_accepted(views)
            parts.buffers.pad(EXTEND, count=count, bucket=bucket)
            along = self._stages.plan_extend(call, attention, lengths, streams.plan)
        fences.extend_plan_ready.signal(streams.plan)

        fences.extend_plan_ready.wait(streams.forward)
        self._runner.run(Stage.EXTEND, call, along)

    def _decode_fused(self, batch: Batch) -> None:
        """One launch; all that it reads of what the host decided are the staged rows."""
        self._runner.run(Stage.ITERATION, self._call(batch, None))
        self._parts.fences.shared_reads_done.signal(self._parts.streams.forward)

    def _publish(self, slot: int) -> None:
        """The lengths of this iteration are there; a copy goes to the host where a policy or a plan needs them exact."""
        parts, streams, fences = self._parts, self._parts.streams, self._parts.fences
        fences.published.signal(streams.forward)
        if self._lengths_on_host:
            fences.published.wait(streams.copy)
            parts.lengths.copy_out(slot, parts.future.lengths, streams.copy)
            fences.lengths_on_host[slot].signal(streams.copy)

    def _exact_lengths(self, batch: Batch, slot: int) -> HostLengths:
        """What the iteration before published: the host waits for that."""
        before = (slot - 1) % self._slots
        known = self._parts.lengths.read(before, self._parts.fences.lengths_on_host[before])
        return HostLengths(tuple(known[request.row] for request in batch.decode), self._capacity)

    def _call(self, batch: Batch, lengths: HostLengths | None) -> Call:
        """What the stages are run for."""
        bound = max(request.length_bound(self._growth) for request in batch.decode)
        # Earlier iterations grew each request by a path at most; this one also writes the slots of the whole tree.
        bound += self._parts.proposer.slots - self._growth
        max_kv = min(bound, self._capacity)
        return self._runner.call(len(batch.decode), Features.of(batch.decode), max_kv, lengths)
