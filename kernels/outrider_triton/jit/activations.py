"""Quantised activations: rows divided by their scales and rounded, alone or by the kernel that makes them."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.device.kernels.quantized_reference import INT8_LARGEST
from outrider_triton.jit.dependent import begin
from outrider_triton.jit.matmul import gated
from outrider_triton.jit.rows import add_row, nearest_e4m3, norm

_INT8_LARGEST = tl.constexpr(INT8_LARGEST)


@triton.jit
def _whole(value):
    """The nearest whole number, ties to even, of magnitudes below 2**22."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def _rounded(quotient, FORMAT: tl.constexpr):
    """The nearest number of the format. NaN becomes 0: the scale says it, and a whole number couldn't."""
    quotient = tl.where(quotient == quotient, quotient, 0.0)
    if FORMAT == "fp8":
        return nearest_e4m3(tl.minimum(tl.maximum(quotient, -448.0), 448.0))
    else:
        return tl.minimum(tl.maximum(_whole(quotient), -128.0), 127.0)


@triton.jit
def _scale_of(most, FORMAT: tl.constexpr):
    """What numbers are divided by whose largest magnitude is ``most``; 1 for none but zeros."""
    largest: tl.constexpr = 448.0 if FORMAT == "fp8" else _INT8_LARGEST
    return tl.where(most / largest > 0, most / largest, 1.0)


@triton.jit
def _quantize_row(value, row, out, scales, size, FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """A row as :func:`quantize_rows` leaves it, with a scale for each GROUP numbers (0: one). Behind ``size`` it's 0."""
    WIDTH: tl.constexpr = GROUP if GROUP else BLOCK
    COUNT: tl.constexpr = BLOCK // WIDTH
    value = tl.reshape(value, [COUNT, WIDTH])
    magnitude = tl.abs(value)
    scale = _scale_of(tl.max(magnitude, axis=1), FORMAT)
    wrong = tl.max((magnitude < float("inf")).to(tl.int32) ^ 1, axis=1)
    divided = _rounded(value / scale[:, None], FORMAT)
    lane = tl.arange(0, COUNT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(out + row * size + lane, divided.to(out.dtype.element_ty), mask=lane < size)
    groups = tl.cdiv(size, WIDTH)
    place = tl.arange(0, COUNT)
    tl.store(scales + row * groups + place, tl.where(wrong > 0, float("nan"), scale), mask=place < groups)


@triton.jit
def quantize_rows(
    x,
    given,
    out,
    scales,
    k,
    x_stride,
    group,
    groups,
    FORMAT: tl.constexpr,
    GIVEN: tl.constexpr,
    PLAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One group of one row: what ``x`` is divided by goes to ``scales [m, groups]``, the quotient to ``out [m, k]`` in out's
    dtype. GIVEN: divided by ``given``. PLAIN: ``out`` is multiplied by its scale again. NaN makes the scale NaN.
    """
    begin(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    column = part * group + lane
    inside = (lane < group) & (column < k)
    value = tl.load(x + row.to(tl.int64) * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if GIVEN:
        scale = tl.load(given)
        wrong = tl.max((value != value).to(tl.int32), axis=0)
    else:
        magnitude = tl.abs(value)
        scale = _scale_of(tl.max(magnitude, axis=0), FORMAT)
        wrong = tl.max((magnitude < float("inf")).to(tl.int32) ^ 1, axis=0)
    divided = _rounded(value / scale, FORMAT)
    scale = tl.where(wrong > 0, float("nan"), scale)
    if PLAIN:
        divided *= scale
    tl.store(out + row.to(tl.int64) * k + column, divided.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row * groups + part, scale)


@triton.jit(do_not_specialize=["shares"])
def quantize_by_maxima(
    x,
    maxima,
    out,
    scales,
    size,
    shares,
    FORMAT: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK numbers of a row, program (row, block): what :func:`quantize_rows` leaves of it. What made ``x [m, size]`` left
    the largest magnitudes of each row, ``maxima [shares, m]``; infinity there makes the scale NaN.
    """
    begin(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    place = row.to(tl.int64) * size + column
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    share = tl.arange(0, SHARES)
    found = tl.max(tl.load(maxima + share * tl.num_programs(0) + row, mask=share < shares, other=0.0), axis=0)
    scale = _scale_of(found, FORMAT)
    tl.store(out + place, _rounded(value / scale, FORMAT).to(out.dtype.element_ty), mask=inside)
    if part == 0:
        tl.store(scales + row, tl.where(found < float("inf"), scale, float("nan")))


@triton.jit(do_not_specialize=["part_stride"])
def add_rms_norm_quantize(
    x,
    bias,
    residual,
    weight,
    out,
    scales,
    eps,
    size,
    part_stride,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """:func:`outrider_triton.jit.rows.add_rms_norm`, and then the row is quantised."""
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    factor = tl.load(weight + lane, mask=inside, other=0.0)
    row = tl.program_id(0).to(tl.int64)
    kept = add_row(x, bias, residual, row, size, part_stride, PARTS, HAS_BIAS, BLOCK, PDL)
    normed = norm(kept.to(tl.float32), factor, residual.dtype.element_ty, size, eps)
    _quantize_row(normed.to(tl.float32), row, out, scales, size, FORMAT, GROUP, BLOCK)


@triton.jit
def silu_mul_quantize(
    gate_up,
    out,
    scales,
    size,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: :func:`outrider_triton.jit.rows.silu_mul`, and then it's quantised."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    gate = tl.load(gate_up + row * 2 * size + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + lane, mask=inside, other=0.0).to(tl.float32)
    made = gated(gate, up, gate_up.dtype.element_ty)
    _quantize_row(made.to(tl.float32), row, out, scales, size, FORMAT, GROUP, BLOCK)


@triton.jit
def embed_beside_quantize(
    tokens,
    weight,
    hidden,
    out,
    scales,
    size,
    beside,
    hidden_stride,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: :func:`outrider_triton.jit.bookkeeping.embed_beside`, and then it's quantised."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    token = tl.load(tokens + row)
    other = tl.load(hidden + row * hidden_stride + lane - size, mask=(lane >= size) & (lane < size + beside), other=0.0)
    embedded = tl.load(weight + token * size + lane, mask=lane < size, other=0.0)
    value = tl.where(lane < size, embedded, other)
    _quantize_row(value.to(tl.float32), row, out, scales, size + beside, FORMAT, GROUP, BLOCK)
