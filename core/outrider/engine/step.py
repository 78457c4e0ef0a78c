"""One iteration, top to bottom, with every wait and every record.

    host:     stage inputs ─┐
    schedule: upload · unpack, resolve lengths ── inputs_ready ─┐
    forward:  prefill · gather ─ shared_reads_done ┬─ draft ─ draft_outputs_ready ─┐ join · verify ─┐ extend · stash · results
    plan:     first part (overlaps the draft) ─────┴─ second part ─ plan_ready ────┘ extend plan ───┘
    copy:     results of the iteration to the host

This is *staged* mode: each stage is called, or replayed from a graph of its own. :mod:`outrider.engine.fused_step` has fused
mode.

The host does not wait here, with three exceptions: the backend's policy makes the host wait for *published*, a policy needs
exact lengths on the host, or a request is guided. With a guided request, the stages are called in staged mode, whatever the
mode of the engine; :mod:`outrider.engine.guided` has the waits between draft and verify.

In an iteration without decode, first tokens leave for the host before the draft reads the prompts, unless one graph holds
both. Each stage declares what it reads and writes (:mod:`outrider.engine.stages`).
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.device import Decision, Waiter
from outrider.engine.graphs import Runner
from outrider.engine.guided import GuidedDecoding
from outrider.engine.prefill import Prefill, PrefilledChunks
from outrider.engine.requests.batch import Batch, BatchFeatures
from outrider.engine.stages import DecodeBatch, Stages, build_frame
from outrider.engine.state.input_upload import InputUpload
from outrider.engine.state.parts import EngineParts, ring_entries
from outrider.engine.state.plans import PlanAtJoin
from outrider.engine.state.results import PendingResult
from outrider.engine.state.staging import RESTORED_STATES, SAVED_STATES, Packer, PrefillBucket
from outrider.engine.state.transfer import StateTransfer
from outrider.speculative.proposer import HostSeqLens


class Step:
    """The launcher of iterations in staged mode: it enqueues each stage on its stream, with every wait and record.

    ``runner`` runs the stages; an eager runner runs them if a request is guided. ``prefill`` launches prompt chunks.
    """

    def __init__(self, parts: EngineParts, stages: Stages, runner: Runner, prefill: Prefill, guided: GuidedDecoding) -> None:
        self._parts = parts
        self._backend = parts.backend
        self._streams = parts.streams
        self._fences = parts.fences
        self._staging = parts.staging
        self._input_upload, self._transfer = InputUpload(parts), StateTransfer(parts)
        self._results = parts.results
        self.prefill = prefill
        self._stages = stages
        self.runner = runner
        self._eager_runner = Runner(parts)
        self._guided = guided
        self._entries = ring_entries(parts.config)
        self._launched = 0
        self._sync = parts.backend.speculative_sync
        self._plans_on_host = parts.attention.plans_on_host
        self._is_tree = parts.proposer.is_tree
        self._growth = parts.proposer.depth + 1  # maximum number of tokens that verify accepts
        self._writes_ahead = parts.proposer.slots - self._growth  # cache slots that an iteration writes after these tokens
        self._signal_initial_fences()

    def _signal_initial_fences(self) -> None:
        """Signal each fence that the first iteration waits for, so that no wait in the step is conditional."""
        streams, fences = self._streams, self._fences
        fences.shared_reads_done.signal(streams.forward)
        fences.published.signal(streams.forward)
        if streams.update is not None:
            fences.params_free.signal(streams.forward)

    def launch(self, requested: Batch) -> PendingResult:
        """Enqueue one iteration and return the pending result."""
        batch = requested.launched
        entry = self._launched % self._entries
        self._launched += 1
        bucket = self.prefill.bucket(batch)
        packer = self._input_upload.pack(batch, bucket)
        self._upload_inputs(requested, packer, entry)
        filled = self._launch_prompts(batch, packer, bucket)
        if not batch.decode:
            return self._finish_prefill_only(requested, filled, packer, entry)
        if filled is not None:
            self.prefill.extend(filled)
        self._copy_states(packer, SAVED_STATES)
        self._decode(requested, bucket, entry)
        return self._copy_results_to_host(requested, entry)

    def _decode(self, requested: Batch, bucket: PrefillBucket | None, entry: int) -> None:
        """Enqueue draft, verify, accept, publish, extend and stash on forward, and the plan concurrently with the draft.
        ``bucket`` is that of prompts, whose graphs hold no stages in this mode.
        """
        del bucket
        streams, fences, stages, batch = self._streams, self._fences, self._stages, requested.launched
        lengths = self._exact_seq_lens(batch, entry) if self._sync.exact_host_lengths else None
        runner = self._eager_runner if requested.features.guided else self.runner
        decode = self.decode_batch(runner, batch, requested.features, lengths)
        frame, run = build_frame(self._parts.buffers, decode), runner.run
        run(stages.gather, decode, frame)
        fences.shared_reads_done.signal(streams.forward)
        if streams.update is not None:
            fences.params_free.wait(streams.update)
            runner.bind(decode, streams.update)
            fences.params_bound.signal(streams.update)
            fences.params_bound.wait(streams.forward)
        run(stages.draft, decode, frame)
        fences.draft_outputs_ready.signal(streams.forward)

        fences.shared_reads_done.wait(streams.plan)
        run(stages.plan_positions, decode, frame)
        if self._plans_on_host:
            # The draft of this iteration was launched, so the host now waits only for the previous verify.
            frame.seq_lens_host = (lengths or self._exact_seq_lens(batch, entry)).padded(decode.bucket)
        if not self._is_tree:  # a tree's mask is one of the draft's outputs
            run(stages.verify_attention, decode, frame)
        fences.draft_outputs_ready.wait(streams.plan)
        run(stages.plan_tokens, decode, frame)
        if self._is_tree:
            run(stages.verify_attention, decode, frame)
        fences.plan_ready.signal(streams.plan)
        at_join = PlanAtJoin(frame.inputs, frame.verify, decode.captured)
        for name, buffer in at_join.written_again(self._sync).items():
            self._backend.mark_stale(buffer, f"{name} as they were before the join")

        if decode.features.guided:
            self._guided.mask_draft(batch, decode, frame, entry)
        fences.plan_ready.wait(streams.forward)
        with self._backend.on(streams.forward):
            self._sync.after_join(at_join)
        run(stages.verify, decode, frame)
        self._publish(entry)
        if self._parts.has_extend_work:
            fences.accept_ready.signal(streams.forward)

            fences.accept_ready.wait(streams.plan)
            run(stages.plan_extend, decode, frame)
            run(stages.extend_attention, decode, frame)
            fences.extend_plan_ready.signal(streams.plan)

            fences.extend_plan_ready.wait(streams.forward)
            run(stages.extend, decode, frame)
        if streams.update is not None:
            fences.params_free.signal(streams.forward)

    def _upload_inputs(self, requested: Batch, packer: Packer, entry: int) -> None:
        """Upload the host's decisions on schedule, unpack them, and resolve the lengths that the last iteration published.
        Forward waits for all of that.
        """
        fences, schedule, batch = self._fences, self._streams.schedule, requested.launched
        self._staging.upload(entry, packer.packed, schedule)
        fences.shared_reads_done.wait(schedule)
        self._guided.upload_prompt_masks(batch, entry)
        with self._backend.on(schedule):
            self._input_upload.unpack(batch, packer, entry)
        if self._sync.published_waiter is Waiter.HOST:
            fences.published.wait_host()
        else:
            fences.published.wait(schedule)
        with self._backend.on(schedule):
            self._input_upload.resolve_seq_lens(batch)
        fences.inputs_ready.signal(schedule)

        fences.inputs_ready.wait(self._streams.forward)

    def _launch_prompts(self, batch: Batch, packer: Packer, bucket: PrefillBucket | None) -> PrefilledChunks | None:
        """Enqueue on forward all work that precedes decode. Return the prompt chunks that the draft has not read, or None."""
        if batch.admitted:
            with self._backend.on(self._streams.forward):
                self._input_upload.write_token_counts(packer)
                self._input_upload.forget_pending(packer)
        if batch.arrivals:
            self._transfer.write_arrivals(batch.arrivals)
        self._copy_states(packer, RESTORED_STATES)
        return self.prefill.launch(batch, packer, bucket) if batch.prefill else None

    def _copy_states(self, packer: Packer, which: str) -> None:
        """Copy recurrent states on forward, if the batch has the segment ``which`` of pairs of rows."""
        if which in packer.segments:
            with self._backend.on(self._streams.forward):
                self._input_upload.copy_states(packer, which)

    def _finish_prefill_only(
        self, requested: Batch, filled: PrefilledChunks | None, packer: Packer, entry: int
    ) -> PendingResult:
        """Finish an iteration without decode: copy the results with the first tokens to the host, and enqueue the draft's
        pass over the prompts after them.

        If data-parallel groups share results, these leave at the end, because another group may decode.
        """
        self._publish(entry)  # before the results leave: once the host has read them, the ring entry is filled again
        pending = None if self._results.is_shared else self._copy_results_to_host(requested, entry)
        if filled is not None:
            self.prefill.extend(filled)
        self._copy_states(packer, SAVED_STATES)
        self._fences.shared_reads_done.signal(self._streams.forward)
        return pending or self._copy_results_to_host(requested, entry)

    def _copy_results_to_host(self, requested: Batch, entry: int) -> PendingResult:
        """Copy the results into ring ``entry`` on forward, then to the host on copy, which the next iteration overlaps."""
        streams, fences = self._streams, self._fences
        with self._backend.on(streams.forward):
            self._results.copy_on_device(requested, entry, streams.forward)
        fences.results_ready.signal(streams.forward)

        fences.results_ready.wait(streams.copy)
        pending = self._results.copy_out(requested, entry, streams.copy)
        fences.results_copied[entry].signal(streams.copy)
        return pending

    def _publish(self, entry: int) -> None:
        """Signal *published*; copy the lengths to the host if a policy or a plan needs exact lengths there."""
        streams, fences, ring = self._streams, self._fences, self._parts.seq_lens_ring
        for_host = self._sync.exact_host_lengths or self._plans_on_host
        if for_host:
            with self._backend.on(streams.forward):
                ring.copy_on_device(entry, streams.forward)
        fences.published.signal(streams.forward)
        if for_host:
            fences.published.wait(streams.copy)
            ring.copy_out(entry, streams.copy)
            fences.lengths_on_host[entry].signal(streams.copy)

    def _exact_seq_lens(self, batch: Batch, entry: int) -> HostSeqLens:
        """Wait on the host for the lengths that the previous iteration published, and return the lengths of the batch's
        decoding requests.
        """
        before = (entry - 1) % self._entries
        self._fences.lengths_on_host[before].wait_host()
        by_row: list[int] = self._parts.seq_lens_ring.read_entry(before).tolist()
        return HostSeqLens(tuple(by_row[request.row] for request in batch.decode), self._parts.capacity)

    def decode_batch(
        self, runner: Runner, batch: Batch, features: BatchFeatures, seq_lens_host: HostSeqLens | None = None
    ) -> DecodeBatch:
        """Return the description of ``batch`` that every stage receives from ``runner``."""
        # An earlier iteration grew each request by one path at most; this iteration also writes the slots of the whole tree.
        bound = max(request.length_bound(self._growth) for request in batch.decode) + self._writes_ahead
        bound, count = min(bound, self._parts.capacity), len(batch.decode)
        return runner.pad(
            DecodeBatch(count, count, batch.drafted, features, bound, seq_lens_host=seq_lens_host, packed=batch.verified)
        )

    def shape(self, batch: Batch | None) -> Mapping[str, Decision]:
        """Return the decisions about the launch of ``batch`` that other ranks must share."""
        del batch
        return {}
