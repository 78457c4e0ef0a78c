"""Operand requirements of the kernels that rotate queries and keys and write the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import RotaryArgs
from outrider.device.kernels.checks import expect


def rotates(rotary: RotaryArgs, x: Tensor, *, partly: bool = False) -> bool:
    """Return True if a Triton kernel can rotate and write keys and values that a product computes in the dtype of ``x``.

    ``partly``: the kernel can rotate only the first dimensions of a head, too.
    """
    cos, sin, k_cache, v_cache, slots = rotary
    contiguous = cos.stride(1) == 1 and slots.is_contiguous() and _laid_out(cos, sin, k_cache, v_cache)
    rotated, size = cos.shape[1], k_cache.shape[3]
    return contiguous and k_cache.dtype in (x.dtype, torch.float8_e4m3fn) and size % 2 == 0 and (partly or rotated == size)


def expect_laid_out(cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, *, partly: bool = False) -> None:
    """Raise RuntimeError for angles or caches whose strides the rotating kernels don't support, and, unless ``partly``, for
    angles that rotate only a part of each head.
    """
    expect(
        _laid_out(cos, sin, k_cache, v_cache),
        lambda: "rope_write_cache: caches must be contiguous, and cos and sin laid out alike",
    )
    expect(
        cos.shape[1] == k_cache.shape[3] or partly,
        lambda: f"rope_write_cache: cos of {cos.shape[1]} for heads of {k_cache.shape[3]}; expected all of a head rotated",
    )


def _laid_out(cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    return k_cache.is_contiguous() and v_cache.is_contiguous() and cos.stride() == sin.stride()
