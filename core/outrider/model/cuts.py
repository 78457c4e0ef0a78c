"""Cut: what of a checkpoint's tensor is read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """``start`` to ``stop`` (exclusive) of dimension ``dim``, the first or the second."""

    dim: int
    start: int
    stop: int
