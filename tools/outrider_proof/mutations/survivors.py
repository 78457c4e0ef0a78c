"""Changes that the programs don't tell from the engine as it is, and why."""

from __future__ import annotations

REASONS: dict[str, str] = {
    "MtpProposer.relay: one more: 0 → 1": "equivalent: all heads have one target (a single head: IndexError)",
    "DynamicTree._choose: one more: 1 → 2 (9)": "equivalent: the root's parent is any number below 0",
    "GraphRunner.run: leave an operand out: not isinstance(stage, Capturable) or stage not in self._which": (
        "equivalent: a stage that isn't captured has no work, and then isn't replayed either"
    ),
    "HostSeqLens.padded: one more: 0 → 1": "equivalent: what attention gives for padding is dropped, and page 0 can be read",
    "self.captured_prefill = None if prefill_graphs is None else": (
        "a report: tests/engine/test_prefill_graphs.py reads it, no program does"
    ),
    "Plans.into_graph: leave out: verify.static_rope_positions.copy_": (
        "programs with images run staged here; tests/engine/test_vision_requests.py leaves the copy out, and it's named"
    ),
    "EagleTreeProposer.draft: leave an operand out: outputs is None or features is None": (
        "equivalent: both are there, or neither"
    ),
    "NgramProposer.draft: turn a comparison: best.values >= 0 → best.values > 0": (
        "equivalent: the score of a match is the text's length at least, that of none is -1"
    ),
}
"""Part of a change's name → why it survives."""


def explained(name: str) -> str | None:
    """Why the change of this name survives; None: nobody knows."""
    return next((reason for pattern, reason in REASONS.items() if pattern in name), None)
