"""The bundled model: a small decoder with an EAGLE head and a block drafter, for trials, tests and documentation.

This module needs no torch.
"""

from __future__ import annotations

from pathlib import Path

from outrider.device.errors import ConfigError

BUNDLED_HEADS = ("eagle", "dflash")
"""Proposers for which the bundled model has a head."""


def bundled(part: str) -> Path:
    """Return the directory of the bundled ``target`` model, or of its head for one of :data:`BUNDLED_HEADS`.

    Raises :class:`ConfigError` for another name.
    """
    if part not in ("target", *BUNDLED_HEADS):
        raise ConfigError(f"the bundled model has no part {part!r}; expected target or {' or '.join(BUNDLED_HEADS)}")
    return Path(__file__).parent / part
