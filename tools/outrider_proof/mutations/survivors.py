"""Changes that the programs don't tell from the engine as it is, and why."""

from __future__ import annotations

REASONS: dict[str, str] = {
    "Request.take: leave out: self.logprobs.extend(kept)": (
        "log-probabilities: no program asks for any; the engine's own tests hold them against the reference"
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
