"""The bundled model: a small decoder with an EAGLE head and a block drafter, for trials, tests and documentation.

Heads of another model, SmolLM2-135M-Instruct, lie next to it.

This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from outrider.device.errors import ConfigError

BUNDLED_HEADS = ("eagle", "dflash")
"""Proposers for which the bundled model has a head."""

_DIRECTORY = Path(__file__).parent
SMOLLM2_HEADS: Mapping[str, str] = MappingProxyType(
    {f"smollm2_{kind}": kind for kind in ("eagle3", "dflash") if (_DIRECTORY / f"smollm2_{kind}").is_dir()}
)
"""Proposer of each bundled head for SmolLM2-135M-Instruct, by the head's name, which ``--draft`` takes too."""


def bundled(part: str) -> Path:
    """Return the directory of the bundled ``target`` model, of its head for one of :data:`BUNDLED_HEADS`, or of one of
    :data:`SMOLLM2_HEADS`.

    Raises :class:`ConfigError` for another name.
    """
    parts = ("target", *BUNDLED_HEADS, *SMOLLM2_HEADS)
    if part not in parts:
        raise ConfigError(f"the bundled model has no part {part!r}; expected {' or '.join(parts)}")
    return _DIRECTORY / part
