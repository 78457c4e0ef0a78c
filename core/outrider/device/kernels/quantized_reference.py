"""Torch reference of a product with a quantised weight, and of the dequantized weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_E4M3_MAX = 448.0
INT8_LARGEST = 127.5 + 2.0**-13
"""Divisor of a row's largest magnitude that gives the row's scale: half of the int8 range from -128 to 127, plus 2**-13.

With the divisor 127.5, the largest number would lie between two steps, and its last bit would decide the result.
"""


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
    if format == "int4":
        halves = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
        values = halves[:, : shape[1]].to(wide) - 8
    else:
        values = data.to(wide)
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
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if input_scale is not None:
        return _rounded(wide, input_scale.to(wide.dtype), format).to(x.dtype)
    if not group or group >= x.shape[-1]:
        return _scaled(wide, format).to(x.dtype)
    width = x.shape[-1]
    grouped = F.pad(wide, (0, -width % group)).unflatten(-1, (-1, group))
    return _scaled(grouped, format).flatten(-2)[..., :width].to(x.dtype)


def _scaled(x: Tensor, format: str) -> Tensor:
    """Quantise ``x`` by the largest magnitude of the last dimension. Zeros stay zeros."""
    largest = _E4M3_MAX if format == "fp8" else INT8_LARGEST
    scale = x.abs().amax(dim=-1, keepdim=True) / largest
    return _rounded(x, torch.where(scale > 0, scale, 1.0), format)


def _rounded(x: Tensor, scale: Tensor, format: str) -> Tensor:
    if format == "fp8":  # the conversion itself gives NaN beyond the range
        values = (x / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)
    else:
        values = (x / scale).round().clamp(-128, 127)
    return values * scale


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
    """Multiply with the dequantized weight; ``activations`` is empty if the activations aren't quantised."""
    if activations:
        x = quantize_activations(x, activations, activation_group, input_scale)
    # Contiguous as in ``ModelKernels.linear``: a library may read a strided row past its end.
    return F.linear(x.contiguous(), dequantize(data, scales, zero_points, format, block, shape, x.dtype), bias)
