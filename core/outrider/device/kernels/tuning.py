"""What tuning is told and what it returns: see ``KernelSet.tune``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """Sizes of a decoder on one device (a rank's shard where there are ranks) that the speed of kernels depends on.

    ``hidden`` numbers of a token; ``heads`` and ``kv_heads`` of ``head_size`` numbers; ``inner``: the gated MLP's width;
    ``vocabulary``: rows of the last product. ``fused``: columns of an EAGLE head's first product, 0 without one. ``bias``:
    queries, keys and values have one. ``qk_norm``: queries and keys are normed by head before they turn. ``dtype``: that of
    the weights.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    fused: int = 0
    bias: bool = False
    qk_norm: bool = False
    dtype: torch.dtype = torch.bfloat16


TuningProgress = Callable[[int, int, str], None]
"""Called as tuning goes on: steps done, steps in all, and what was found just now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningResult:
    """What came of tuning one shape.

    ``measured``: candidates that were timed. ``kept``: choices that were written, each when it was made. ``complete``: every
    step was taken; False where the deadline came first. ``seconds``: how long it took. ``before_us`` and ``after_us``:
    microseconds of a layer, summed over the numbers of tokens that were measured.
    """

    measured: int
    kept: int
    complete: bool
    seconds: float
    before_us: float
    after_us: float
