"""The bundled model: a small decoder with an EAGLE head and a block drafter, for trials, tests and documentation.

An EAGLE-3 head of another model, SmolLM2-135M-Instruct, lies next to it.

This module needs no torch.
"""

from __future__ import annotations

from pathlib import Path

from outrider.device.errors import ConfigError

BUNDLED_HEADS = ("eagle", "dflash")
"""Proposers for which the bundled model has a head."""


def bundled(part: str) -> Path:
    """Return the directory of the bundled ``target`` model, of its head for one of :data:`BUNDLED_HEADS`, or of
    ``smollm2_eagle3``.

    Raises :class:`ConfigError` for another name.
    """
    parts = ("target", *BUNDLED_HEADS, "smollm2_eagle3")
    if part not in parts:
        raise ConfigError(f"the bundled model has no part {part!r}; expected {' or '.join(parts)}")
    return Path(__file__).parent / part
