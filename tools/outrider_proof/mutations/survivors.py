"""Changes that the programs don't tell from the engine as it is, and why."""

from __future__ import annotations

REASONS: dict[str, str] = {}


def explained(name: str) -> str | None:
    """Why the change of this name survives; None: nobody knows."""
    return next((reason for pattern, reason in REASONS.items() if pattern in name), None)
