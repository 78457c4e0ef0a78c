"""Torch reference of a product with a quantised weight, and of the dequantized weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device.kernels.formats import QUANTIZED_FORMATS, ElementFormat


def dequantize(
    data: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    format: str,
    block: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Return the dequantized weight [out, in] in ``dtype``, computed in float32 or wider and rounded once."""
    wide = torch.promote_types(dtype, torch.promote_types(scales.dtype, torch.float32))
    values = QUANTIZED_FORMATS[format].decode(data, shape[1], wide)
    if zero_points is not None:
        values = values - spread(zero_points, block, shape).to(wide)
    return (values * spread(scales, block, shape).to(wide)).to(dtype)


def spread(grid: Tensor, block: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Expand a tensor of one value per block to one value per element; a dimension with a single block keeps size 1."""
    for dim in (0, 1):
        if grid.shape[dim] > 1 and block[dim] > 1:
            grid = grid.repeat_interleave(block[dim], dim=dim)
        if grid.shape[dim] > 1:
            grid = grid.narrow(dim, 0, shape[dim])
    return grid


def quantize_activations(x: Tensor, format: str, group: int, input_scale: Tensor | None) -> Tensor:
    """Return ``x`` [..., in], quantised and then multiplied by its scales; see ``linear_quantized``."""
    wide, elements = x.to(torch.promote_types(x.dtype, torch.float32)), QUANTIZED_FORMATS[format]
    if input_scale is not None:
        scale = input_scale.to(wide.dtype)
        return (elements.round(wide / scale) * scale).to(x.dtype)
    if not group or group >= x.shape[-1]:
        return _scaled(wide, elements).to(x.dtype)
    width = x.shape[-1]
    grouped = F.pad(wide, (0, -width % group)).unflatten(-1, (-1, group))
    return _scaled(grouped, elements).flatten(-2)[..., :width].to(x.dtype)


def _scaled(x: Tensor, elements: ElementFormat) -> Tensor:
    """Return ``x`` [..., n], quantised with one scale per last dimension, from its largest magnitude. Zeros stay zeros."""
    assert elements.activation_divisor is not None  # a QuantizedWeight has no other activations
    scale = x.abs().amax(dim=-1, keepdim=True) / elements.activation_divisor
    scale = torch.where(scale > 0, scale, 1.0)
    return elements.round(x / scale) * scale


def linear_quantized(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    input_scale: Tensor | None,
    bias: Tensor | None,
    format: str,
    block: Sequence[int],
    shape: Sequence[int],
    activations: str,
    activation_group: int,
) -> Tensor:
    """Return ``x`` [..., in] times the transpose of the dequantized weight [out, in] → [..., out].

    ``activations`` names their format; empty if they aren't quantised. See ``KernelSet.linear_quantized``.
    """
    if activations:
        x = quantize_activations(x, activations, activation_group, input_scale)
    # Contiguous as in ``ModelKernels.linear``: a library may read a strided row past its end.
    return F.linear(x.contiguous(), dequantize(data, scales, zero_points, format, block, shape, x.dtype), bias)
