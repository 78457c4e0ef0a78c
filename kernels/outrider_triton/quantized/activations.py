"""Operators that quantise activations inside the kernel that computes them.

:mod:`outrider_triton.products.jit.streamed` computes gate and up in e4m3. :mod:`outrider_triton.quantized.jit.activations`
quantises the gated rows afterwards, and quantises embeddings while it reads them.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from outrider_triton.bookkeeping.operators import expect_beside
from outrider_triton.launch import define, launch, power_of_two
from outrider_triton.products.streamed import silu_mul
from outrider_triton.quantized.formats import TRITON_FORMATS
from outrider_triton.quantized.jit import activations
from outrider_triton.quantized.operators import allocate_quantized
from outrider_triton.tiles.configs import MatmulConfig


def _silu_mul_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    rows: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: list[int],
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """Multiply e4m3 rows ``x`` by gate and up rows in e4m3, and apply SwiGLU.

    Return the activation [T, I] in ``dtype`` and the largest magnitude per program and row, float32 [programs, T].
    """
    m, n, tiling = x.shape[0], weight.shape[0] // 2, MatmulConfig(*config)
    out = x.new_empty((m, n), dtype=dtype)
    maxima = x.new_empty((-(-n // tiling.rows_per_program), m), dtype=torch.float32)
    silu_mul(x, None, weight, bias, out, 0.0, tiling, pdl, quantized=(x_scales, scales, rows), maxima=maxima)
    return out, maxima


define("linear_silu_mul.triton_quantized", _silu_mul_linear)


def _quantize_by_maxima(x: Tensor, maxima: Tensor, format: str, dtype: torch.dtype, pdl: bool) -> tuple[Tensor, Tensor]:
    """Quantise rows ``x`` [m, k] like :func:`quantized_rows`, with scales computed from the producer's ``maxima`` [programs,
    m].
    """
    (m, k), programs, block = x.shape, maxima.shape[0], 1024
    out, scales = allocate_quantized(x, k, 0, dtype)
    launch(
        activations.quantize_by_maxima,
        (m, triton.cdiv(k, block)),
        *(x.contiguous(), maxima.contiguous(), out, scales, k, programs),
        E4M3=TRITON_FORMATS[format].elements.is_float,
        SHARES=power_of_two(programs),
        BLOCK=block,
        pdl=pdl,
        warps=4,
    )
    return out, scales


define("quantize_by_maxima.triton", _quantize_by_maxima)


def _embed_beside_quantize(
    tokens: Tensor, weight: Tensor, hidden: Tensor, format: str, group: int, dtype: torch.dtype, pdl: bool
) -> tuple[Tensor, Tensor]:
    """Concatenate each token's embedding and ``hidden`` row, and quantise the concatenation as one row."""
    expect_beside(weight, hidden)
    size, hidden_size = weight.shape[1], hidden.shape[1]
    out, scales = allocate_quantized(hidden, size + hidden_size, group, dtype)
    block = power_of_two(size + hidden_size)
    launch(
        activations.embed_beside_quantize,
        (out.shape[0],),
        *(tokens.contiguous(), weight, hidden, out, scales, size, hidden_size, hidden.stride(0)),
        E4M3=TRITON_FORMATS[format].elements.is_float,
        GROUP=min(group, block),
        BLOCK=block,
        pdl=pdl,
    )
    return out, scales


define("embed_beside.triton_quantize", _embed_beside_quantize)
