"""What the kernels that rotate queries and keys and write the cache expect of their operands."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import RotaryArgs
from outrider.device.kernels.checks import expect


def rotates(rotary: RotaryArgs, x: Tensor) -> bool:
    """Whether keys and values that a product makes in ``x``'s dtype can be turned and written by a kernel of ours."""
    cos, sin, k_cache, v_cache, slots = rotary
    straight = cos.stride(1) == 1 and slots.is_contiguous() and _laid_out(cos, sin, k_cache, v_cache)
    return straight and k_cache.dtype in (x.dtype, torch.float8_e4m3fn) and k_cache.shape[3] % 2 == 0


def expect_laid_out(cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise for operands that a kernel would read or write wrongly."""
    expect(
        _laid_out(cos, sin, k_cache, v_cache),
        lambda: "rope_write_cache: caches must be contiguous, and cos and sin laid out alike",
    )


def _laid_out(cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    return k_cache.is_contiguous() and v_cache.is_contiguous() and cos.stride() == sin.stride()
