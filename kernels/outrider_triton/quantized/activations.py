"""Operators that quantise activations inside the kernel that computes them.

:mod:`outrider_triton.products.jit.streamed` computes gate and up in e4m3. :mod:`outrider_triton.quantized.jit.activations`
quantises the gated rows afterwards, and quantises embeddings while it reads them, and heads while it gates them.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from outrider_triton.bookkeeping import expect_beside
from outrider_triton.launch import define, has_kernel, launch, power_of_two, warps_for
from outrider_triton.products.streamed import silu_mul
from outrider_triton.quantized.formats import TRITON_FORMATS
from outrider_triton.quantized.jit import activations
from outrider_triton.quantized.operators import MAX_ROW_ELEMENTS, allocate_quantized
from outrider_triton.tiles.configs import MatmulConfig

_HEADS_PER_PROGRAM = 4
"""Number of heads that one program gates, or more for a scale that more heads share."""


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
    tokens: Tensor,
    weight: Tensor,
    hidden: Tensor,
    format: str,
    group: int,
    dtype: torch.dtype,
    by_group: int,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """Concatenate each token's embedding and ``hidden`` row, and quantise the concatenation as one row."""
    expect_beside(weight, hidden)
    size, hidden_size = weight.shape[1], hidden.shape[1]
    out, scales = allocate_quantized(hidden, size + hidden_size, group, dtype, by_group)
    block = power_of_two(size + hidden_size)
    launch(
        activations.embed_beside_quantize,
        (scales.shape[0],),
        *(tokens.contiguous(), weight, hidden, out, scales, size, hidden_size, hidden.stride(0), *scales.stride()),
        E4M3=TRITON_FORMATS[format].elements.is_float,
        GROUP=min(group, block),
        BLOCK=block,
        pdl=pdl,
    )
    return out, scales


define("embed_beside.triton_quantize", _embed_beside_quantize)


def quantizes_gated(gate: Tensor, group: int) -> bool:
    """Return True if :func:`_gate_quantize` takes this gate [T, heads, E], with a scale per ``group`` columns (0: all)."""
    heads, size = gate.shape[1:]
    in_rows = gate.stride(1) == size and gate.stride(2) == 1 and has_kernel(gate)
    return in_rows and power_of_two(size) == size and power_of_two(heads) * size <= MAX_ROW_ELEMENTS and group <= size * heads


def _gate_quantize(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    format: str,
    group: int,
    dtype: torch.dtype,
    by_group: int,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """Apply a :class:`~outrider_triton.products.operands.HeadGate` to ``x`` [T, heads * E] and quantise the rows."""
    heads, size = gate.shape[1:]
    count = max(_HEADS_PER_PROGRAM, group // size) if group else power_of_two(heads)
    out, scales = allocate_quantized(x, heads * size, group, dtype, by_group)
    launch(
        activations.gate_quantize,
        (scales.shape[0], triton.cdiv(heads, count)),
        *(x.contiguous(), gate, weight, out, scales, eps, heads, gate.stride(0), *scales.stride()),
        E4M3=TRITON_FORMATS[format].elements.is_float,
        GROUP=group,
        E=size,
        HEADS=count,
        pdl=pdl,
        warps=max(4, warps_for(count * size)),
    )
    return out, scales


define("gated_rms_norm.triton_quantize", _gate_quantize)
