"""Mutants that the programs cannot tell from the unchanged engine, with the reason of each."""

from __future__ import annotations

REASONS: dict[str, str] = {
    "MtpProposer.relay: one more: 0 → 1": "equivalent: all heads have one target (a single head: IndexError)",
    "DynamicTree._select_nodes: one more: 1 → 2 (9)": "equivalent: the root's parent is any number below 0",
    "HostSeqLens.padded: one more: 0 → 1": "equivalent: what attention gives for padding is dropped, and page 0 can be read",
    "VerifyInputs.copy_rope_positions_for_graph: leave out: self.static_rope_positions.copy_": (
        "programs with images run staged here; tests/engine/test_vision_requests.py leaves the copy out, and it's named"
    ),
    "EagleTreeProposer.draft: leave an operand out: outputs is None or features is None": (
        "equivalent: both are there, or neither"
    ),
    "NgramProposer.draft: turn a comparison: best.values >= 0 → best.values > 0": (
        "equivalent: the score of a match is the text's length at least, that of none is -1"
    ),
    "Guidance.fill_next_mask: one more: 0 → 1": "after an interrupt: tests/engine/test_guided.py (an interrupted walk)",
    "_build_scheduler: change a sign: proposer.nodes + 1": "a default: tests/engine/test_mixed_batches.py reads it",
    "_build_scheduler: min and max: min(config.prefill_chunk": "a default: tests/engine/test_mixed_batches.py reads it",
    "Loop._handle_oldest: one more: 1 → 2": "what a policy is told: tests/engine/test_draft_length.py",
    "AttentionPlans.plan: turn a comparison: what == 'prefill'": "kernels that plan: tests/engine/test_host_plans.py",
    "AttentionPlans.plan: one more: 0 → 1": "equivalent: another key, which is nobody's",
    "_Decisions.decide_sizes: leave out: self.add('prefill_chunk'": "a choice of sizes: tests/engine/test_resolve.py",
    "measure_captures: negate: limited": "a report: tests/engine/test_prefill_graphs.py reads it",
    "SamplingParams.truncated: leave an operand out: self.samples": "costs alone: tests/engine/test_sampling_params.py",
    "prefill_inputs: turn a comparison: most is None": "kernels that plan: tests/engine/test_host_plans.py",
    "prefill_inputs: negate: most is None": "kernels that plan: tests/engine/test_host_plans.py",
    "prefill_inputs: one more: 0 → 1 (6)": "drafts of several heads: tests/speculative/test_draft_state.py",
    "_Decisions.decide_launches: negate: captures": "a reason's text: tests/engine/test_resolve.py reads it",
    "PageKey.__eq__: leave an operand out: isinstance(other, PageKey) and self.parent is other.parent and (self.tokens": (
        "matters where two hashes are the same: tests/engine/test_pages.py compares such keys"
    ),
    "DraftPositions.pass_input: one more: 1 → 2 (2)": (
        "kernels that take queries apart: tests/speculative/test_proposers.py (uniform)"
    ),
    "PrefillGraphs.bucket: change a flag: True → False": "costs alone: tests/engine/test_prefill_graphs.py",
    "Verify._verify: turn a comparison: outputs.path is not None": (
        "trees' own caches: tests/speculative/test_draft_state.py"
    ),
    "Verify.run: change a flag: True → False": "equivalent: a model gives as many states as it's asked for",
    "Scheduler._admit: leave an operand out: short and (not request.pages)": "who waits: tests/engine/test_pages.py",
    "Scheduler._chunks: leave an operand out: budget == 0 or len(chunks) == MAX_PREFILL_SEQUENCES → budget": (
        "300 prompts at once: tests/engine/test_mixed_batches.py"
    ),
    "groups_by_load: negate: count == 1": "several groups: tests/engine/test_mixed_batches.py",
    "groups_by_load: turn a comparison: count == 1": "several groups: tests/engine/test_mixed_batches.py",
    "groups_by_load: one more: 1 → 2": "several groups: tests/engine/test_mixed_batches.py",
    "Scheduler._gathers: leave an operand out: bool(pending)": "who waits: tests/engine/test_mixed_batches.py",
    "Scheduler._gathers: turn a comparison: self._gathered_iterations": "who waits: tests/engine/test_mixed_batches.py",
    "Scheduler._grow: leave an operand out: not self._can_decode(request)": "pages taken in vain: tests/engine/test_pages.py",
    "Scheduler.max_pages: change a sign": "what is refused: tests/engine/test_pages.py",
    "NgramProposer.__init__: one more: 0 → 1 (3)": "equivalent: the engine allocates before anything reads it",
    "pack_prefill: one more: 0 → 1 (7)": "equivalent: the proposer that reads it takes no padding",
    "Results._read_logprobs: change a flag: True → False": "equivalent: both are made from the same chunks",
    "EngineConfig.__post_init__: leave out: _check_int": "what is refused: tests/engine/test_requests.py",
    "Admission.check: leave out: _check_pages": "what is refused: tests/engine/test_requests.py",
    "WatchedFence.wait_host: negate: limit is None": "a device that is stuck: tests/engine/test_watchdog.py",
    "WatchedFence.wait_host: leave out: self._watchdog.passed": "an error's text: tests/engine/test_watchdog.py",
    "WatchedFence.signal: leave out: self.generation += 1": "an error's text: tests/engine/test_watchdog.py",
    "Watchdog.__init__: leave out: self.passed": "an error's text: tests/engine/test_watchdog.py",
    "Probes.__init__: negate: ranks": "several ranks: tests/ranks/test_alone.py",
    "HostCopyRing.copy_on_device: leave out: self._data.all_gather(": "several ranks: tests/ranks/test_alone.py",
    "token_buckets: turn a comparison: size < most": "a graph captured twice: tests/engine/test_prefill_graphs.py",
    "buckets_up_to: one more: 8 → 9": "sizes of graphs: tests/engine/test_graphs.py",
    "Guidance.fill_draft_masks: leave out: words.fill_(ALLOW_ALL_WORD)": (
        "rows that nobody walks: tests/engine/test_guided.py"
    ),
    "Guidance.fill_draft_masks: one more: 0 → 1 (3)": "trees under guides: tests/engine/test_guided.py",
    "Results.__init__: one more: 1 → 2 (3)": "equivalent: a column more, which nobody reads",
    "_build_scheduler: one more: 1 → 2 (3)": "a default: tests/engine/test_mixed_batches.py reads it",
    "Results.__init__: one more: 2 → 3 (2)": "equivalent: rows more, which nobody reads",
    "MtpProposer._pass_input: one more: 0 → 1 (4)": "equivalent: what attention gives for padding is dropped",
    "MtpProposer.__init__: one more: 0 → 1 (2)": "equivalent: all heads have one config (a single head: IndexError)",
    "MtpProposer.__init__: one more: 0 → 1 (3)": "equivalent: all heads have one target (a single head: IndexError)",
    "Request.append_tokens: turn a comparison: self.finish_reason is FinishReason.ERROR": (
        "a report: tests/engine/test_requests.py reads it"
    ),
    "EngineParts.last_position: change a sign: self.config.max_context - 1": (
        "discarded drafts: tests/speculative/test_proposers.py"
    ),
    "_spans: one more: 1 → 2": "where images are: tests/engine/test_requests.py",
    "DraftStage.run: turn a comparison: out.probs is not None": "sampled drafts: tests/speculative/test_proposers.py",
}
"""Reason why a change survives, by a part of its name.

These survivors of 2026-11-23 have no reason yet: ``Prefill.launch`` (``is not None`` → ``is None``: every test has its slow
guide in a draft), ``Results.__init__`` (2 → 3), ``_token_ids`` (``+ 1`` →
``- 1``) and
``_run_accepted`` of draft models (1 → 2).
"""


def explained(name: str) -> str | None:
    """Return the recorded reason why the mutant of this name survives, or None if there is none."""
    return next((reason for pattern, reason in REASONS.items() if pattern in name), None)
