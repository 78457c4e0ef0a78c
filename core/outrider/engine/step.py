"""One iteration, top to bottom, with every wait and every record.

    host:     stage inputs ─┐
    schedule: upload · unpack, resolve lengths ── inputs_ready ─┐
    forward:  prefill · gather ── shared_reads_done ─┬─ draft ── draft_outputs_ready ─┐ join · verify ─┐ extend · stash · keep
    plan:     first part (overlaps the draft) ───────┴─ second part ── plan_ready ────┘ extend plan ───┘
    copy:     results of the iteration to the host

This is *staged* mode: each stage is called, or replayed from a graph of its own. In *fused* mode one graph on forward holds
all stages from gather to stash, and the plan stream has no work. Schedule only uploads, and forward unpacks. So no edge to
another stream lies between two graphs: an upload arrives while the graph before runs, and results leave while the next graph
runs. Inputs that equal those of the iteration before are not uploaded again.

The host does not wait here, with three exceptions: the backend's policy makes the host wait for *published*, a policy needs
exact lengths on the host, or a request is guided. With a guided request, the stages are called in staged mode, whatever the
mode of the engine, and these steps lie between draft and verify:

    forward:  draft ── draft_outputs_ready ─┐                                        ┌─ join · verify
    copy:               draft to the host ──┴─ draft_on_host ─┐                      │
    host:                                   walk the grammars ┴─ masks ─┐            │
    schedule:                                                    upload ┴ masks_ready ┘

In an iteration without decode, first tokens leave for the host before the draft reads the prompts, unless one graph holds
both. The records in :mod:`outrider.engine.stage_io` list the inputs and outputs of each stage.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from outrider.device import AttentionMetadata, Backend, Decision, StepMode, Waiter
from outrider.engine.fences import FenceSet
from outrider.engine.graphs import Runner
from outrider.engine.prefill import Prefill
from outrider.engine.prefill_graphs import PrefillGraphs
from outrider.engine.requests.batch import Batch
from outrider.engine.requests.features import Features
from outrider.engine.stage_io import (
    AttentionInput,
    DecodeBatch,
    DraftStageInput,
    ExtendAttentionInput,
    ExtendPlanInput,
    ExtendStageInput,
    GatherInput,
    IterationInput,
    PlanPositionsInput,
    PlanTokensInput,
    VerifyStageInput,
)
from outrider.engine.stages import Iteration, Stages
from outrider.engine.state.buffers import DecodeInputs, VerifyInputs, VerifyOutputs
from outrider.engine.state.input_upload import InputUpload
from outrider.engine.state.masks import Masks, late_guidance_indices
from outrider.engine.state.plans import PlanAtJoin, Plans
from outrider.engine.state.probes import GUIDE_LATE
from outrider.engine.state.results import PendingResult, Results
from outrider.engine.state.rows import SeqLensRing
from outrider.engine.state.staging import RESTORED_STATES, SAVED_STATES, Packer
from outrider.engine.state.state_copies import StateCopies
from outrider.engine.state.transfer import StateTransfer
from outrider.engine.streams import Streams
from outrider.model import ModelRanks
from outrider.speculative.host_seq_lens import HostSeqLens
from outrider.speculative.proposer import Draft, Proposer


class Step:
    """The launcher of iterations: it enqueues each stage on its stream, with every wait and record between them.

    ``runner`` runs the stages; ``called``, an eager runner, runs them if a request is guided. ``masks`` holds the token masks
    of guided requests. ``prefill_graphs`` replays prompt chunks; None if prefill is always called. ``state_copies`` copies
    recurrent states from and to the checkpoints of the prefix cache. ``entries`` is the number
    of ring entries of staging and results. ``capacity`` is the number of tokens that a block table holds. With
    ``plans_on_host``, the host plans attention from exact lengths. ``ranks`` are the ranks that share the model; None for
    one.
    """

    def __init__(
        self,
        backend: Backend,
        streams: Streams,
        fences: FenceSet,
        *,
        input_upload: InputUpload,
        transfer: StateTransfer,
        prefill: Prefill,
        prefill_graphs: PrefillGraphs | None,
        state_copies: StateCopies,
        stages: Stages,
        iteration: Iteration,
        runner: Runner,
        called: Runner,
        masks: Masks,
        plans: Plans,
        proposer: Proposer,
        results: Results,
        seq_lens_ring: SeqLensRing,
        plans_on_host: bool,
        mode: StepMode,
        entries: int,
        capacity: int,
        ranks: ModelRanks | None = None,
    ) -> None:
        self._ranks = ranks
        self._backend = backend
        self._streams = streams
        self._fences = fences
        self._input_upload = input_upload
        self._transfer = transfer
        self._prefill = prefill
        self._prefill_graphs = prefill_graphs
        self._state_copies = state_copies
        self._stages = stages
        self._iteration = iteration
        self._runner = runner
        self._called = called
        self._masks = masks
        self._walks = ranks is None or ranks.is_decider  # one rank walks the grammars; the others take its tokens
        self._plans = plans
        self._results = results
        self._seq_lens_ring = seq_lens_ring
        self._mode = mode
        self._entries = entries
        self._launched = 0
        self._sync = backend.speculative_sync
        self._plans_on_host = plans_on_host
        self._is_tree = proposer.is_tree
        self._nodes = proposer.nodes
        self._growth = proposer.depth + 1  # maximum number of tokens that verify accepts
        self._writes_ahead = proposer.slots - self._growth  # cache slots that an iteration writes after these tokens
        self._capacity = capacity
        self._signal_initial_fences()

    def _signal_initial_fences(self) -> None:
        """Signal each fence that the first iteration waits for, so that no wait in the step is conditional."""
        streams, fences = self._streams, self._fences
        fences.shared_reads_done.signal(streams.forward)
        fences.published.signal(streams.forward)
        if streams.update is not None:
            fences.params_free.signal(streams.forward)

    def shape(self, batch: Batch | None) -> Mapping[str, Decision]:
        """Return the decisions about ``batch`` that all ranks must share.

        ``mode`` is the mode of the decoding part and ``bucket`` its batch bucket. ``prompts`` is the number of tokens of a
        prefill that a graph replays. Each is None if the batch has no such part.
        """
        if batch is None:
            return {"prompts": None, "mode": None, "bucket": None}
        launched = batch.launched
        replayed = None if self._prefill_graphs is None else self._prefill_graphs.bucket(launched)
        mode, bucket = None, None
        if launched.decode:
            features = batch.features
            mode = "called" if features.guided else str(self._mode)
            runner = self._runner_for(features)
            bucket = runner.batch(len(launched.decode), self._drafted(launched), features, 0, None).bucket
        prompts = None if replayed is None else replayed.tokens
        return {"prompts": prompts, "mode": mode, "bucket": bucket}

    def launch(self, batch: Batch) -> PendingResult:
        """Enqueue one iteration and return the ticket for its results.

        With data-parallel groups, this rank enqueues the collectives of all groups, with idle requests if it has none of its
        own.
        """
        streams, fences = self._streams, self._fences
        requested, batch = batch, batch.launched
        if self._ranks is not None:
            self._ranks.use_stream(streams.forward)
            self._ranks.expect_pass_widths(() if requested.global_batch is None else requested.global_batch.widths)
        entry = self._launched % self._entries
        self._launched += 1
        bucket = None if self._prefill_graphs is None else self._prefill_graphs.bucket(batch)
        packer = self._input_upload.pack(batch, bucket)
        fused = self._mode is StepMode.FUSED and not requested.features.guided
        # A copy between two graphs costs time, so unchanged inputs are not copied again. Forward has already waited for the
        # upload that wrote them.
        inputs_unchanged = fused and self._input_upload.matches_previous(packer)
        self._upload_inputs(batch, packer, entry, fused=fused, inputs_unchanged=inputs_unchanged)

        fences.inputs_ready.wait(streams.forward)
        if fused:
            with self._backend.on(streams.forward):
                self._input_upload.unpack(batch, packer, None if inputs_unchanged else entry)
        if self._ranks is not None:
            with self._backend.on(streams.forward):
                self._results.clear_host_failures()
        if any(request.params.penalized for request in batch.admitted):
            with self._backend.on(streams.forward):
                self._input_upload.write_token_counts(packer)
        if batch.arrivals:
            self._transfer.write_arrivals(batch.arrivals)
        self._copy_states(packer, RESTORED_STATES)
        filled = None
        if bucket is not None and self._prefill_graphs is not None:
            self._prefill_graphs.launch(batch, bucket)
        elif batch.prefill:
            filled = self._prefill.launch(batch, packer)
        self._copy_states(packer, SAVED_STATES)
        ticket = None
        if not batch.decode:
            self._publish(entry)  # before the results leave: once the host has read them, the ring entry is filled again
            # First tokens leave before the draft reads the prompts. Data-parallel groups share results at the end, because
            # another group may decode.
            ticket = None if self._results.is_shared else self._copy_results_to_host(requested, entry)
        if filled is not None:
            self._prefill.extend(filled)
        if not batch.decode:
            fences.shared_reads_done.signal(streams.forward)
        elif fused:
            self._decode_fused(batch, requested.features)
        else:
            self._decode(batch, entry, requested.features)
        return self._copy_results_to_host(requested, entry) if ticket is None else ticket

    def _copy_states(self, packer: Packer, which: str) -> None:
        if which in packer.segments:
            with self._backend.on(self._streams.forward):
                self._state_copies.copy(packer, which)

    def _copy_results_to_host(self, requested: Batch, entry: int) -> PendingResult:
        """Copy the results into ring ``entry`` on forward, then to the host on copy, so that the next iteration can
        overlap.
        """
        streams, fences = self._streams, self._fences
        self._results.share(requested, streams.forward)
        with self._backend.on(streams.forward):
            self._results.copy_on_device(requested, entry)
        fences.results_ready.signal(streams.forward)

        fences.results_ready.wait(streams.copy)
        ticket = self._results.copy_out(requested, entry, streams.copy)
        fences.results_copied[entry].signal(streams.copy)
        return ticket

    def invalidate(self) -> None:
        """Upload all inputs in the next iteration, because a copy of an earlier iteration may have failed."""
        self._input_upload.invalidate()

    def _upload_inputs(self, batch: Batch, packer: Packer, entry: int, *, fused: bool, inputs_unchanged: bool) -> None:
        """Upload the host's decisions on schedule, unless they are unchanged.

        In a staged iteration schedule also unpacks them and resolves the lengths that the last iteration published. In a
        fused iteration forward does both.
        """
        fences, schedule = self._fences, self._streams.schedule
        masks = self._masks if self._walks and any(chunk.request.guidance is not None for chunk in batch.prefill) else None
        if not inputs_unchanged:
            self._input_upload.upload(packer, entry, schedule)
        if masks is not None or not fused:
            fences.shared_reads_done.wait(schedule)
        if masks is not None:
            masks.upload_prefill_masks(batch.prefill, entry, schedule)
        if not fused:
            with self._backend.on(schedule):
                self._input_upload.unpack(batch, packer, entry)
            if self._sync.published_waiter is Waiter.HOST:
                fences.published.wait_host()
            else:
                fences.published.wait(schedule)
            with self._backend.on(schedule):
                self._input_upload.resolve_seq_lens(batch)
        fences.inputs_ready.signal(schedule)

    def _decode(self, batch: Batch, entry: int, features: Features) -> None:
        """Enqueue draft, verify, accept, publish, extend and stash on forward, and the plan concurrently with the draft."""
        streams, fences, stages = self._streams, self._fences, self._stages
        seq_lens_host = self._exact_seq_lens(batch, entry) if self._sync.exact_host_lengths else None
        decode = self._decode_batch(batch, features, seq_lens_host)
        runner = self._runner_for(decode.features)
        run = runner.run

        rows, seq_lens = self._input_upload.decoding(decode.count)
        inputs = run(stages.gather, GatherInput(decode, rows, seq_lens))
        fences.shared_reads_done.signal(streams.forward)
        if streams.update is not None:
            fences.params_free.wait(streams.update)
            runner.bind(decode, streams.update)
            fences.params_bound.signal(streams.update)
            fences.params_bound.wait(streams.forward)
        draft = run(stages.draft, DraftStageInput(decode, inputs))
        fences.draft_outputs_ready.signal(streams.forward)

        fences.shared_reads_done.wait(streams.plan)
        verify = run(stages.place, PlanPositionsInput(decode, inputs))
        if self._plans_on_host:
            # The draft of this iteration was launched, so the host now waits only for the previous verify.
            seq_lens_host = (seq_lens_host or self._exact_seq_lens(batch, entry)).padded(decode.bucket)
        if not self._is_tree:  # a tree's mask is one of the draft's outputs
            attention = run(stages.verify_attention, AttentionInput(decode, seq_lens_host))
        fences.draft_outputs_ready.wait(streams.plan)
        verify = run(stages.fill, PlanTokensInput(decode, inputs, draft, verify))
        if self._is_tree:
            attention = run(stages.verify_attention, AttentionInput(decode, seq_lens_host))
        fences.plan_ready.signal(streams.plan)
        at_join = PlanAtJoin(self._plans, inputs, verify, decode.captured)
        for name, buffer in at_join.written_again(self._sync).items():
            self._backend.mark_stale(buffer, f"{name} as they were before the join")

        masks = self._mask(batch, decode, draft, entry) if decode.features.guided and self._walks else None
        fences.plan_ready.wait(streams.forward)
        with self._backend.on(streams.forward):
            self._sync.after_join(at_join)
        outputs = run(stages.verify, VerifyStageInput(decode, inputs, draft, verify, attention, masks))
        self._publish(entry)
        if stages.extends:
            self._extend(decode, inputs, verify, outputs, attention, seq_lens_host)
        if streams.update is not None:
            fences.params_free.signal(streams.forward)

    def _mask(self, batch: Batch, decode: DecodeBatch, draft: Draft, entry: int) -> Tensor:
        """Return the token masks for each position of the draft. The host waits for the draft and walks each grammar along
        it.
        """
        streams, fences, masks = self._streams, self._fences, self._masks
        if decode.drafted:
            fences.draft_outputs_ready.wait(streams.copy)
            masks.copy_out(draft, entry, streams.copy)
            fences.draft_on_host[entry].signal(streams.copy)
        token_masks = masks.upload_draft_masks(
            batch.decode, decode.drafted, entry, fences.draft_on_host[entry], streams.schedule
        )
        if self._ranks is not None:  # no other rank has walked
            with self._backend.on(streams.forward):
                self._results.write_host_failures(GUIDE_LATE, dict.fromkeys(late_guidance_indices(batch.decode), ""))
        fences.masks_ready.signal(streams.schedule)
        fences.masks_ready.wait(streams.forward)
        return token_masks

    def _extend(
        self,
        decode: DecodeBatch,
        inputs: DecodeInputs,
        verify: VerifyInputs,
        outputs: VerifyOutputs,
        attention: AttentionMetadata,
        seq_lens_host: HostSeqLens | None,
    ) -> None:
        """Enqueue draft-extend. Its plan always waits for verify, and draft-extend waits for its plan."""
        streams, fences, stages, run = self._streams, self._fences, self._stages, self._runner_for(decode.features).run
        fences.accept_ready.signal(streams.forward)

        fences.accept_ready.wait(streams.plan)
        plan = run(stages.plan_extend, ExtendPlanInput(decode, inputs, verify, outputs))
        along = run(stages.extend_attention, ExtendAttentionInput(decode, attention, seq_lens_host))
        fences.extend_plan_ready.signal(streams.plan)

        fences.extend_plan_ready.wait(streams.forward)
        run(stages.extend, ExtendStageInput(decode, inputs, verify, outputs, plan, along))

    def _decode_fused(self, batch: Batch, features: Features) -> None:
        """Launch the whole iteration as one graph. Of the host's decisions the graph reads only the staged rows."""
        self._runner.run(self._iteration, IterationInput(self._decode_batch(batch, features, None)))
        self._fences.shared_reads_done.signal(self._streams.forward)

    def _publish(self, entry: int) -> None:
        """Signal *published*; copy the lengths to the host if a policy or a plan needs exact lengths there."""
        streams, fences = self._streams, self._fences
        for_host = self._sync.exact_host_lengths or self._plans_on_host
        if for_host:
            with self._backend.on(streams.forward):
                self._seq_lens_ring.copy_on_device(entry)
        fences.published.signal(streams.forward)
        if for_host:
            fences.published.wait(streams.copy)
            self._seq_lens_ring.copy_out(entry, streams.copy)
            fences.lengths_on_host[entry].signal(streams.copy)

    def _exact_seq_lens(self, batch: Batch, entry: int) -> HostSeqLens:
        """Wait on the host for the lengths that the previous iteration published, and return those of ``batch``."""
        before = (entry - 1) % self._entries
        by_row = self._seq_lens_ring.read_entry(before, self._fences.lengths_on_host[before])
        return HostSeqLens(tuple(by_row[request.row] for request in batch.decode), self._capacity)

    def _decode_batch(self, batch: Batch, features: Features, seq_lens_host: HostSeqLens | None) -> DecodeBatch:
        """Return the description of ``batch`` that every stage receives."""
        # An earlier iteration grew each request by one path at most; this iteration also writes the slots of the whole tree.
        bound = max(request.length_bound(self._growth) for request in batch.decode) + self._writes_ahead
        return self._runner_for(features).batch(
            len(batch.decode), self._drafted(batch), features, min(bound, self._capacity), seq_lens_host
        )

    def _drafted(self, batch: Batch) -> int:
        return self._nodes if batch.drafted is None else batch.drafted

    def _runner_for(self, features: Features) -> Runner:
        """Return the eager runner for a batch with a guided request, since graphs have no masks; else the configured
        runner.
        """
        return self._called if features.guided else self._runner
