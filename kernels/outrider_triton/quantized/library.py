"""Products with quantised weights by torch's library (cuBLAS and the like): of operands as stored, or of
dequantized weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from outrider.device import QuantizedWeight
from outrider_triton.launch import define, launch
from outrider_triton.quantized.activations import quantized_rows
from outrider_triton.quantized.jit import products as quantized
from outrider_triton.quantized.operators import flat_rows
from outrider_triton.quantized.plan import TRITON_FORMATS, kernel_scales

ROWS_MULTIPLE = 4
"""Number of rows of which cuBLAS takes multiples if each group of their columns has a scale: 16 bytes of scales."""


def dequantized_weight(weight: QuantizedWeight, dtype: torch.dtype, *, fp8: bool, pdl: bool) -> Tensor:
    """Return the weight [n, k] dequantized to ``dtype``: computed in float32 and rounded once."""
    (n, k), (rows, columns), block = weight.shape, weight.block, 256
    aligned = columns >= k or columns % block == 0
    width = block if aligned else columns if block % columns == 0 else 0
    out = torch.empty((n, k), dtype=dtype, device=weight.device)
    launch(
        quantized.dequantize,
        (triton.cdiv(n, 16), triton.cdiv(k, block)),
        *(
            TRITON_FORMATS[weight.format].kernel_data(weight.data, native=False),
            kernel_scales(weight.scales),
            weight.zero_points,
            out,
            n,
            k,
            weight.scales.shape[1],
        ),
        ROWS=rows,
        COLUMNS=columns,
        WIDTH=width,
        **TRITON_FORMATS[weight.format].launch_constants,
        FP8=fp8,
        BLOCK_N=16,
        BLOCK_K=block,
        pdl=pdl,
        warps=4,
    )
    return out


def scaled_products(
    sums: Tensor, x_scales: Tensor, scales: Tensor, bias: Tensor | None, rows: int, dtype: torch.dtype, pdl: bool
) -> Tensor:
    """Return products [m, n] in ``dtype`` from the library's integer ``sums`` [m, n]; ``rows`` weight rows share one of
    ``scales``.
    """
    (m, n), block = sums.shape, 1024
    out = torch.empty((m, n), dtype=dtype, device=sums.device)
    launch(
        quantized.scale_products,
        (m, triton.cdiv(n, block)),
        *(sums, x_scales, scales, bias, out, n),
        ROWS=rows,
        BLOCK=block,
        pdl=pdl,
        warps=4,
    )
    return out


define("scale_products.triton", scaled_products)


def _multiply_rows(
    rows: Tensor,
    x_scales: Tensor,
    data: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    format: str,
    shared: int,
    dtype: torch.dtype,
    pdl: bool,
) -> Tensor:
    """Return the library's product [m, n] in ``dtype`` of quantised ``rows`` with ``x_scales`` [m, groups] and a weight as
    stored; ``shared`` weight rows have one scale. Several groups: see ``by_group`` of
    :func:`outrider_triton.quantized.activations.allocate_quantized`.

    With a scale per row, sums stay in the matrix unit, which keeps about 14 bits, as in other engines. Moving them to float32
    now and then would take a tenth more time; the relative error is 0.002 to 0.003 instead of 0.0017 with 4,096 and 14,336
    columns, where rounding to 8 bits has 0.04.
    """
    m, groups = x_scales.shape
    if groups > 1:
        x_scales = x_scales.as_strided((rows.shape[0], groups), x_scales.stride())
        product = torch._scaled_mm(
            rows, data.t(), scale_a=x_scales, scale_b=scales.float().t(), out_dtype=torch.bfloat16, use_fast_accum=False
        )[:m]
    elif TRITON_FORMATS[format].scales_library_sums:
        return scaled_products(torch._int_mm(rows, data.t()), x_scales, scales, bias, shared, dtype, pdl)
    else:
        n, by_column = data.shape[0], scales.float().reshape(1, -1)
        if by_column.shape[1] != n:
            by_column = by_column.repeat_interleave(shared, dim=1)[:, :n]
        product = torch._scaled_mm(
            rows, data.t(), scale_a=x_scales, scale_b=by_column.contiguous(), out_dtype=torch.bfloat16, use_fast_accum=True
        )
    product = product.to(dtype)
    return product if bias is None else product + bias


define("linear_quantized.library_rows", _multiply_rows)


def _library(
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
    scaled: bool,
    fp8: bool,
    pdl: bool,
) -> Tensor:
    """Return the library's product of ``x`` and the weight: of the operands as stored if ``scaled``, else of the dequantized
    weight.
    """
    flat, n = flat_rows(x, shape), shape[0]
    if scaled:
        group = activation_group if activation_group < shape[1] else 0
        rows, x_scales = quantized_rows(
            flat, activations, group, input_scale, data.dtype, pdl, by_group=ROWS_MULTIPLE if group else 0
        )
        product = _multiply_rows(rows, x_scales, data, scales, bias, format, block[0], x.dtype, pdl)
    else:
        if activations:
            flat, _ = quantized_rows(flat, activations, activation_group, input_scale, x.dtype, pdl, plain=True)
        size, scaled_block = (n, shape[1]), (block[0], block[1])
        weight = QuantizedWeight(
            format=format, data=data, scales=scales, block=scaled_block, shape=size, zero_points=zero_points
        )
        product = F.linear(flat, dequantized_weight(weight, x.dtype, fp8=fp8, pdl=pdl), bias)
    return product.view(*x.shape[:-1], n)


define("linear_quantized.library", _library)
