"""Programs over a hybrid model on the host, and faults of other engines with recurrent states, put back one at a time."""

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from outrider.device.kernels import blocks
from outrider.device.kernels.bookkeeping_kernels import BookkeepingKernels
from outrider.device.kernels.recurrent_kernels import RecurrentKernels
from outrider.device.kernels.reference import recurrent
from outrider.engine import stages
from outrider.engine.requests.pages import StateCheckpoints
from outrider.engine.requests.scheduler import Scheduler
from outrider.engine.state import parts
from outrider.engine.state.buffers import StaticBuffers
from outrider.engine.state.input_upload import InputUpload
from outrider.engine.state.transfer import StateTransfer
from outrider.engine.step import Step
from outrider.model import Decoder, StateInput
from outrider.speculative.draft_model import HybridDraftModelProposer
from outrider_proof import tiny
from outrider_proof.engine_setups import HYBRID, host_models, random_host_program, reference_tokens
from proof.setups import RecordedServing


def wrong_requests(proposer, number, mode="staged"):
    """Requests of a program whose tokens aren't those of non-speculative decoding, and counts of what the program had."""
    name, program = proposer + HYBRID, random_host_program(number)
    wanted = [reference_tokens(name, arrival) for arrival in program.arrivals]
    moves = any(arrival.moves for arrival in program.arrivals)
    engines = [host_models(name).engine(program, mode=mode, overlap=bool(number % 3)) for _ in range(2 if moves else 1)]
    served, wrong = RecordedServing(engines, program, name), []
    if proposer.endswith("itself"):
        for engine in engines:
            engine.step = _with_equal_states(engine, wrong)
    served.step_until_idle()
    for index, tokens in enumerate(wanted):
        got = tuple(served.tokens[index])
        if got != (tokens[: len(got)] if served.ended[index] == "abort" else tokens):
            wrong.append(index)
    records = served.records.values()
    return wrong, {
        "requests": len(wanted),
        "hits": sum(record.prefill_start > 0 for record in records),
        "preempted": sum(record.preemptions > 0 for record in records),
        "moved": served.moved,
    }


def _with_equal_states(engine, wrong):
    """A step that compares the states of a draft with those of the target, if both are one model.

    The rows are those of checkpoints and of requests that have not ended on the device, beyond which pages are missing. The
    target's are settled first.
    """
    step, parts, scheduler = engine.step, engine._parts, engine._loop.scheduler
    pairs = [
        pair for layers in zip(parts.cache.states, parts.proposer.states, strict=True) for pair in zip(*layers, strict=True)
    ]

    def goes_on(request):
        return parts.future.seq_lens[request.row] < len(request.prompt) + request.params.max_tokens

    def stepped():
        made = step()
        running = [each.row for each in scheduler.running if goes_on(each)]
        if running:
            parts.model.settle(parts.cache, torch.tensor(running))
        rows = [*scheduler.pages.checkpoints._row_of.values(), *running]
        if any(not torch.allclose(target[rows], draft[rows]) for target, draft in pairs):
            wrong.append("the draft's states")
        return made

    return stepped


def _accepts(change):
    """Change the numbers of accepted drafts that become pending: ``change`` gets the numbers and the sizes of windows."""
    real = BookkeepingKernels.publish_accepted

    def publish(self, rows, lens, decided, lengths, last_tokens, results, own, pending=None):
        real(self, rows, lens, decided, lengths, last_tokens, results, own, pending)
        if pending is not None:
            pending[rows] = pending[rows].sign() * (change(decided[1], decided[0].shape[1]) + 1)

    return patch.object(BookkeepingKernels, "publish_accepted", publish)


def _convolves(change):
    """Replace the short convolution: ``change`` gets the real one and its arguments."""
    real = RecurrentKernels.short_convolution

    def convolve(self, x, weight, state, batch, window=None):
        return change(real, self, x, weight, state, batch, window)

    return patch.object(RecurrentKernels, "short_convolution", convolve)


def a_row_without_drafts_reads_another_row():
    return patch.object(stages, "StateInput", lambda rows, *, decodes: StateInput(rows.roll(1), decodes=decodes))


def the_window_ends_with_the_drafts():
    def convolve(real, kernels, x, weight, state, batch, window):
        if window is not None:
            most = torch.full_like(batch.pending, window.shape[1])
            batch = batch._replace(pending=torch.where(batch.pending == 0, 0, most))
        return real(kernels, x, weight, state, batch, window)

    return _convolves(convolve)


def what_rejects_every_draft_commits_nothing():
    return _accepts(lambda accepted, width: accepted - 1)


def placeholders_enter_the_state():
    return _accepts(lambda accepted, width: torch.full_like(accepted, width - 1))


def counts_are_those_of_the_iteration_before():
    known = []

    def change(accepted, width):
        before, known[:] = known[:], [accepted.clone()]
        return before[0] if before and before[0].shape == accepted.shape else accepted

    return _accepts(change)


def counts_belong_to_other_rows():
    return _accepts(lambda accepted, width: accepted.roll(1))


def the_first_layer_resets_the_counts():
    real, first = RecurrentKernels.gated_delta_rule, []

    def rule(self, mixed, gates, a_log, dt_bias, state, batch, updates=None):
        first[:] = first or [a_log]
        if updates is not None and a_log is not first[0]:
            batch = batch._replace(pending=batch.pending.sign())
        return real(self, mixed, gates, a_log, dt_bias, state, batch, updates)

    return patch.object(RecurrentKernels, "gated_delta_rule", rule)


def a_new_request_keeps_pending_tokens():
    return patch.object(InputUpload, "forget_pending", lambda self, packer: None)


def a_half_is_not_switched():
    real = BookkeepingKernels.publish_accepted

    def publish(self, *operands):
        real(self, *operands)
        if operands[-1] is not None:
            operands[-1].abs_()

    return patch.object(BookkeepingKernels, "publish_accepted", publish)


def _settles(where):
    """Leave out the settling of rows by ``where``, a method of a class that calls the model."""
    owner, name = where
    real = getattr(owner, name)

    def unsettled(self, *arguments):
        with patch.object(Decoder, "settle", lambda self, cache, rows: None):
            return real(self, *arguments)

    return patch.object(owner, name, unsettled)


def a_checkpoint_lacks_pending_tokens():
    return _settles((InputUpload, "copy_states"))


def a_hand_over_lacks_pending_tokens():
    return _settles((StateTransfer, "_state"))


def gates_are_not_gathered_with_the_rest():
    real = recurrent._RuleOperands.from_inputs.__func__

    def of(cls, mixed, gates, *rest):
        return real(cls, mixed, gates.roll(1, 0), *rest)

    return patch.object(recurrent._RuleOperands, "from_inputs", classmethod(of))


def a_prompt_of_few_tokens_leaves_no_state():
    real = blocks.recurrent_heads

    def heads(kernels, projected, block, tokens):
        if not tokens.decodes and tokens.batch.max_query <= 4:
            tokens = tokens._replace(convolution=tokens.convolution.clone(), delta=tokens.delta.clone())
        return real(kernels, projected, block, tokens)

    return patch.object(blocks, "recurrent_heads", heads)


def a_new_request_continues_an_old_state():
    def state_of(self, state, rows):
        return state.index_select(0, rows)

    return patch.object(recurrent._SequenceLanes, "state_of", state_of)


def a_short_chunk_writes_the_window_alone():
    def convolve(real, kernels, x, weight, state, batch, window):
        made = real(kernels, x, weight, state, batch, window)
        missing = weight.shape[1] - 1 - batch.max_query
        if window is None and missing > 0:
            state[batch.rows, :missing] = 0
        return made

    return _convolves(convolve)


def a_state_is_kept_between_boundaries():
    def checkpoint(self, chunk):
        if chunk.request.page_key is None:
            return []
        row = self.pages.checkpoints.allocate_row(chunk.request.page_key)
        return [] if row is None else [(chunk.request.row, row)]

    return patch.object(Scheduler, "_checkpoint", checkpoint)


def a_decoded_state_is_kept_at_any_length():
    real = Scheduler._publish_decoded

    def publish(self, request):
        if not request.decoded_state.awaited and not request.finished:
            request.decoded_state.is_exact = request.decoded_state.length > 0
        real(self, request)

    return patch.object(Scheduler, "_publish_decoded", publish)


def a_hit_restores_keys_alone():
    return patch.object(Scheduler, "_restore", lambda self, request, key: None)


@contextmanager
def a_hit_needs_no_state():
    def restore(self, request, key):
        row = None if key is None else self.pages.checkpoints.row_of(key)
        self._restored_states += [] if row is None else [(row, request.row)]

    with patch.object(StateCheckpoints, "has", lambda self, key: True), patch.object(Scheduler, "_restore", restore):
        yield


def the_first_request_alone_keeps_its_state():
    real = Step._copy_states

    def copy(self, packer, which):
        if which in packer.segments:
            start, end = packer.segments[which]
            packer._segments[which] = (start, min(end, start + 2))
        real(self, packer, which)

    return patch.object(Step, "_copy_states", copy)


def states_are_kept_before_the_prefill():
    real = Step._copy_states

    def copy(self, packer, which):
        if which == "restored_states":
            real(self, packer, "saved_states")
            real(self, packer, which)

    return patch.object(Step, "_copy_states", copy)


def two_prefixes_share_a_checkpoint():
    real = StateCheckpoints.allocate_row

    def take(self, key):
        row = real(self, key)
        return row if row is None else self._row_of.setdefault(key, row) and min(self._row_of.values())

    return patch.object(StateCheckpoints, "allocate_row", take)


def _padding(row):
    """Let the rows of a bucket without a request name ``row`` instead of the reserved one."""
    real = parts.step_buffers

    def buffers(*arguments, **options):
        specs = real(*arguments, **options)
        return tuple(replace(spec, padding=row) if spec.name == "inputs.rows" else spec for spec in specs)

    return patch.object(parts, "step_buffers", buffers)


def padding_goes_to_the_first_request():
    return _padding(1)


def padding_keeps_stale_rows():
    real = StaticBuffers.pad

    def pad(self, prefix, *, count, bucket, drafted):
        rows = self.rows("inputs.rows", count, bucket, drafted=drafted).clone()
        real(self, prefix, count=count, bucket=bucket, drafted=drafted)
        if prefix == "inputs":
            self.rows("inputs.rows", count, bucket, drafted=drafted).copy_(rows)

    return patch.object(StaticBuffers, "pad", pad)


def _handed_over(change):
    real = StateTransfer._state

    def state(self, request, length):
        *others, states = real(self, request, length)
        return *others, tuple(change(each) for each in states)

    return patch.object(StateTransfer, "_state", state)


def a_hand_over_loses_the_states():
    return _handed_over(torch.zeros_like)


def a_hand_over_loses_the_window():
    return _handed_over(lambda state: torch.zeros_like(state) if state.dim() == 3 else state)


def a_draft_advances_the_states_themselves():
    real = HybridDraftModelProposer.allocate_states

    def allocate(self, **options):
        real(self, **options)
        self._drafted = replace(self._cache, windows=(), pending=None)

    return patch.object(HybridDraftModelProposer, "allocate_states", allocate)


def rejected_drafts_enter_the_drafts_state():
    real = HybridDraftModelProposer.extend

    def extend(self, inputs):
        if inputs.first_tokens is not None:
            width = inputs.tokens.shape[0] // inputs.last.shape[0]
            inputs = replace(inputs, last=inputs.last + (width - 1 - inputs.last % width))
        return real(self, inputs)

    return patch.object(HybridDraftModelProposer, "extend", extend)


def states_are_kept_before_the_draft_reads_the_prompt():
    real = Step._launch_prompts

    def launch(self, batch, packer, bucket):
        filled = real(self, batch, packer, bucket)
        self._copy_states(packer, "saved_states")
        packer._segments.pop("saved_states", None)
        return filled

    return patch.object(Step, "_launch_prompts", launch)


def the_targets_states_alone_are_copied():
    real = InputUpload.copy_states

    def copy(self, packer, which):
        self._states = self._states[: len(tiny.RECURRENT.layers)]
        real(self, packer, which)

    return patch.object(InputUpload, "copy_states", copy)


def a_hand_over_loses_the_drafts_states():
    real = StateTransfer._state

    def state(self, request, length):
        *others, states = real(self, request, length)
        own = 2 * len(tiny.RECURRENT.layers)
        return *others, (*states[:own], *(torch.zeros_like(each) for each in states[own:]))

    return patch.object(StateTransfer, "_state", state)


FAULTS = {
    "vllm 39273, 39463": (a_row_without_drafts_reads_another_row, "none", 0, "staged"),
    "vllm 40738": (the_window_ends_with_the_drafts, "ngram", 0, "staged"),
    "vllm 56419": (what_rejects_every_draft_commits_nothing, "ngram", 0, "staged"),
    "vllm 55178, 47466": (placeholders_enter_the_state, "ngram", 0, "staged"),
    "vllm 51571": (counts_are_those_of_the_iteration_before, "ngram", 2, "staged"),
    "TensorRT-LLM 13151": (counts_belong_to_other_rows, "ngram", 2, "staged"),
    "vllm 50432": (the_first_layer_resets_the_counts, "ngram", 7, "staged"),
    "vllm 51812": (gates_are_not_gathered_with_the_rest, "none", 0, "staged"),
    "vllm 53051": (a_prompt_of_few_tokens_leaves_no_state, "none", 0, "staged"),
    "vllm-metal 488, sglang 30986": (a_new_request_continues_an_old_state, "none", 0, "staged"),
    "vllm 56196": (a_short_chunk_writes_the_window_alone, "none", 0, "staged"),
    "vllm 51113, 53912": (a_state_is_kept_between_boundaries, "ngram", 26, "staged"),
    "keys without the state": (a_hit_restores_keys_alone, "none", 2, "staged"),
    "a prefix without a state": (a_hit_needs_no_state, "none", 0, "staged"),
    "sglang 37836": (the_first_request_alone_keeps_its_state, "none", 18, "staged"),
    "a state kept too early": (states_are_kept_before_the_prefill, "none", 6, "staged"),
    "vllm 55601": (two_prefixes_share_a_checkpoint, "none", 6, "staged"),
    "sglang 38485": (a_hand_over_loses_the_states, "none", 1, "staged"),
    "a window lost on the way": (a_hand_over_loses_the_window, "none", 1, "staged"),
    "tokenspeed 700": (padding_goes_to_the_first_request, "none", 2, "graphs"),
    "vllm 41841": (padding_keeps_stale_rows, "ngram", 0, "graphs"),
    "pending tokens of another request": (a_new_request_keeps_pending_tokens, "ngram", 0, "staged"),
    "half of the updates": (a_half_is_not_switched, "ngram", 0, "staged"),
    "a hand-over too early": (a_hand_over_lacks_pending_tokens, "ngram", 3, "staged"),
    "a draft without a copy": (a_draft_advances_the_states_themselves, "hybrid-draft, itself", 0, "staged"),
    "rejected drafts": (rejected_drafts_enter_the_drafts_state, "suffix+hybrid-draft, itself", 0, "staged"),
    "a draft's state kept too early": (
        states_are_kept_before_the_draft_reads_the_prompt,
        "hybrid-draft, itself",
        6,
        "staged",
    ),
    "a hit without the draft's state": (the_targets_states_alone_are_copied, "hybrid-draft, itself", 2, "fused"),
    "a hand-over without the draft's state": (a_hand_over_loses_the_drafts_states, "hybrid-draft, itself", 1, "staged"),
}
"""Faults by the threads that report them, or in words, each with a program that shows it: proposer, number and mode."""
