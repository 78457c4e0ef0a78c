"""Arguments and results of tuning: see ``KernelSet.tune``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """Sizes of a decoder on one device that determine the speed of kernels. With several ranks: of one rank's shard."""

    hidden: int
    """Hidden size, the width of the residual stream."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key heads."""
    head_size: int
    inner: int
    """Width of the gated MLP: half the rows of its first product."""
    vocabulary: int
    """Rows of the last product, which gives the logits."""
    fused: int = 0
    """Columns of the first product of an EAGLE head; 0 without a head."""
    bias: bool = False
    """True if the product that makes queries, keys and values has a bias."""
    qk_norm: bool = False
    """True if queries and keys are normed per head before they are rotated."""
    dtype: torch.dtype = torch.bfloat16
    """The dtype of the weights, which activations share."""


TuningProgress = Callable[[int, int, str], None]
"""A callback of tuning: number of finished steps, total number of steps, and the latest result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningResult:
    """The outcome of one ``KernelSet.tune``: counts of candidates and choices, and the speed before and after."""

    measured: int
    """Number of timed candidates."""
    kept: int
    """Number of choices that were written to the directory."""
    complete: bool
    """True if every step was finished before the deadline."""
    seconds: float
    """Duration of the tuning in seconds."""
    before_us: float
    """Microseconds of a layer before tuning, summed over the measured numbers of tokens."""
    after_us: float
    """Microseconds of a layer after tuning, summed over the measured numbers of tokens."""
