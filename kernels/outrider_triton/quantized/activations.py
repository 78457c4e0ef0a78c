"""Operators that quantise activations (:mod:`outrider_triton.quantized.jit.activations`), by themselves or at the end of the
kernel that computes them: a norm, SwiGLU, the gate of heads, or the concatenation of embeddings and features.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from outrider.device.kernels.operators import expect
from outrider_triton.bookkeeping import expect_beside
from outrider_triton.launch import define, has_kernel, launch, power_of_two, warps_for
from outrider_triton.quantized.jit import activations
from outrider_triton.quantized.plan import TRITON_FORMATS

_GROUPED_ELEMENTS_PER_PROGRAM = 1024
"""Number of elements that one program quantises if the groups of a row have scales of their own."""
MAX_ROW_ELEMENTS = 1 << 15
"""Maximum number of elements of a row that one program holds."""
_HEADS_PER_PROGRAM = 4
"""Number of heads that one program gates, or more for a scale that more heads share."""


def activation_dtype(data: Tensor, native: bool) -> torch.dtype:
    """Return the dtype of quantised activations: the weight's if ``native``, else float16, which holds the values of either
    format.
    """
    return data.dtype if native else torch.float16


def allocate_quantized(like: Tensor, k: int, group: int, dtype: torch.dtype, by_group: int = 0) -> tuple[Tensor, Tensor]:
    """Return uninitialised quantised rows of ``k`` elements in ``dtype``, as many as ``like`` has, and their float32 scales,
    one per ``group`` columns (0: all).

    ``by_group``: the scales of a group are adjacent, and there are rows and scales for a multiple of ``by_group`` rows. The
    scales are returned for the rows of ``like``.
    """
    m, groups = like.numel() // like.shape[-1], -(-k // group) if group else 1
    padded = -(-m // by_group) * by_group if by_group else m
    shape = (groups, padded) if by_group else (padded, groups)
    scales = torch.empty(shape, dtype=torch.float32, device=like.device)
    return torch.empty((padded, k), dtype=dtype, device=like.device), scales.t()[:m] if by_group else scales


def quantized_rows(
    x: Tensor,
    format: str,
    group: int,
    input_scale: Tensor | None,
    dtype: torch.dtype,
    pdl: bool,
    *,
    plain: bool = False,
    by_group: int = 0,
) -> tuple[Tensor, Tensor]:
    """Quantise rows ``x`` [m, k]; return them in ``dtype`` and their scales, float32 [m, groups].

    ``plain``: multiply the rounded rows by their scales again. ``by_group``: see :func:`allocate_quantized`.
    """
    m, k = x.shape
    group = group if 0 < group < k else k
    expect(group <= MAX_ROW_ELEMENTS, lambda: f"activations in groups of {group}, expected at most {MAX_ROW_ELEMENTS}")
    out, scales = allocate_quantized(x, k, group, dtype, by_group)
    block = power_of_two(group)
    launch(
        activations.quantize_rows,
        (m, scales.shape[1]),
        *(x, input_scale, out, scales, k, x.stride(0), group, *scales.stride()),
        E4M3=TRITON_FORMATS[format].elements.is_float,
        PLAIN=plain,
        BLOCK=block,
        pdl=pdl,
        warps=warps_for(block // 2),
    )
    return out, scales


define("quantize_rows.triton", quantized_rows)


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


def _add_rms_norm_quantize(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    format: str,
    group: int,
    dtype: torch.dtype,
    by_group: int,
    unquantized: Tensor | None,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """Add ``x`` and the bias to the residual; return the quantised norm and its scales. Store the norm to ``unquantized``,
    too, if it is given.

    ``x`` is [T, H], or [parts, T, H] of a split product.
    """
    expect(
        x.shape[-2:] == residual.shape and residual.is_contiguous() and x.is_contiguous(),
        lambda: f"adding {tuple(x.shape)} to a residual of {tuple(residual.shape)}; expected equal, contiguous rows",
    )
    (m, size), block = residual.shape, power_of_two(residual.shape[1])
    out, scales = allocate_quantized(residual, size, group, dtype, by_group)
    launch(
        activations.add_rms_norm_quantize,
        (m,),
        *(x, bias, residual, weight, out, scales, unquantized, eps, size, residual.numel(), *scales.stride()),
        E4M3=TRITON_FORMATS[format].elements.is_float,
        GROUP=min(group, block),
        PARTS=1 if x.dim() == 2 else x.shape[0],
        BLOCK=block,
        pdl=pdl,
    )
    return out, scales


define("add_rms_norm.triton_quantize", _add_rms_norm_quantize, writes=("residual", "unquantized"))


def _silu_mul_quantize(
    gate_up: Tensor, format: str, group: int, dtype: torch.dtype, by_group: int, pdl: bool
) -> tuple[Tensor, Tensor]:
    size = gate_up.shape[-1] // 2
    block = min(power_of_two(size), max(group, _GROUPED_ELEMENTS_PER_PROGRAM)) if group else power_of_two(size)
    out, scales = allocate_quantized(gate_up, size, group, dtype, by_group)
    launch(
        activations.silu_mul_quantize,
        (scales.shape[0], triton.cdiv(size, block)),
        *(gate_up.contiguous(), out, scales, size, *scales.stride()),
        E4M3=TRITON_FORMATS[format].elements.is_float,
        GROUP=min(group, block),
        BLOCK=block,
        pdl=pdl,
    )
    return out, scales


define("silu_mul.triton_quantize", _silu_mul_quantize)
