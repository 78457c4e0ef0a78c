"""Quantisation of activations: rows are divided by their scales and rounded, in a kernel of their own or at the end of the
producing kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.device.kernels.formats import INT8_LARGEST
from outrider_triton.jit.dependent import begin
from outrider_triton.jit.recurrent_steps import gated_norm, sigmoid_product
from outrider_triton.jit.rows import add_row, nearest_e4m3, norm
from outrider_triton.products.jit.matmul import swiglu

_INT8_LARGEST = tl.constexpr(INT8_LARGEST)
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _round_to_integer(value):
    """Return ``value``, float32, rounded to the nearest integer, ties to even. Valid for magnitudes below 2**22."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def _round_to_format(quotient, E4M3: tl.constexpr):
    """Return ``quotient`` rounded to the nearest value of the format, e4m3 or int8. NaN becomes 0, since integers can't
    represent it: the scale is NaN instead.
    """
    quotient = tl.where(quotient == quotient, quotient, 0.0)
    if E4M3:
        return nearest_e4m3(tl.minimum(tl.maximum(quotient, -448.0), 448.0))
    else:
        return tl.minimum(tl.maximum(_round_to_integer(quotient), -128.0), 127.0)


@triton.jit
def _as_stored(quotient, out, E4M3: tl.constexpr):
    """Return ``quotient`` rounded to the format, in the dtype of the pointers ``out``. The device's own conversion to e4m3
    rounds and clamps in one instruction; the interpreter's rounds incorrectly.
    """
    if E4M3 and out.dtype.element_ty == tl.float8e4nv and not _IS_INTERPRETED:
        return quotient.to(tl.float8e4nv)
    else:
        return _round_to_format(quotient, E4M3).to(out.dtype.element_ty)


@triton.jit
def _largest_magnitude(value, AXIS: tl.constexpr):
    """Return the largest magnitude of float32 values along an axis. It isn't finite if any of them isn't: as integers, the
    bits of magnitudes have the order of their values, infinity comes next, and NaN last.
    """
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=AXIS).to(tl.float32, bitcast=True)


@triton.jit
def _scale_of(maximum, E4M3: tl.constexpr):
    """Return the scale of values whose largest magnitude is ``maximum``: the format's largest value then represents it. The
    scale is 1 if all are zero, and NaN if one isn't finite.
    """
    largest: tl.constexpr = 448.0 if E4M3 else _INT8_LARGEST
    scale = tl.where(maximum / largest > 0, maximum / largest, 1.0)
    return tl.where(maximum < float("inf"), scale, float("nan"))


@triton.jit
def _quantize_row(
    value,
    row,
    begins,
    out,
    scales,
    size,
    scale_row,
    scale_group,
    E4M3: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise the BLOCK elements from ``begins`` on of a row of ``size`` elements, and store them as :func:`quantize_rows`
    does, with a scale per GROUP elements (0: one scale, and the block is the row).

    ``value`` must be 0 from ``size`` on. ``begins`` is a multiple of GROUP.
    """
    WIDTH: tl.constexpr = GROUP if GROUP else BLOCK
    COUNT: tl.constexpr = BLOCK // WIDTH
    value = tl.reshape(value, [COUNT, WIDTH])
    scale = _scale_of(_largest_magnitude(value, 1), E4M3)
    lane = begins + tl.arange(0, COUNT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(out + row * size + lane, _as_stored(value / scale[:, None], out, E4M3), mask=lane < size)
    group = begins // WIDTH + tl.arange(0, COUNT)
    tl.store(scales + row * scale_row + group * scale_group, scale, mask=group < tl.cdiv(size, WIDTH))


@triton.jit(do_not_specialize=["scale_row", "scale_group"])
def quantize_rows(
    x,
    given,
    out,
    scales,
    k,
    x_stride,
    group,
    scale_row,
    scale_group,
    E4M3: tl.constexpr,
    PLAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise one group of one row: store the scale to ``scales [m, groups]``, with strides ``scale_row`` and
    ``scale_group``, and the rounded quotient to ``out [m, k]`` in its dtype; one program per (row, group).

    With ``given``, divide by this scale. PLAIN: multiply the quotient by the scale again. NaN makes the scale NaN.
    """
    begin(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    column = part * group + lane
    mask = (lane < group) & (column < k)
    value = tl.load(x + row.to(tl.int64) * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if given is not None:
        divisor = tl.load(given)
        scale = tl.where(tl.max((value != value).to(tl.int32), axis=0) > 0, float("nan"), divisor)
    else:
        divisor = _scale_of(_largest_magnitude(value, 0), E4M3)
        scale = divisor
    if PLAIN:
        quotient = (_round_to_format(value / divisor, E4M3) * scale).to(out.dtype.element_ty)
    else:
        quotient = _as_stored(value / divisor, out, E4M3)
    tl.store(out + row.to(tl.int64) * k + column, quotient, mask=mask)
    tl.store(scales + row * scale_row + part * scale_group, scale)


@triton.jit(do_not_specialize=["shares"])
def quantize_by_maxima(
    x,
    maxima,
    out,
    scales,
    size,
    shares,
    E4M3: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise BLOCK elements of a row as :func:`quantize_rows` does; one program per (row, block).

    The producer of ``x [m, size]`` stored the largest magnitudes of each row, ``maxima [shares, m]``. Infinity there makes
    the scale NaN.
    """
    begin(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    place = row.to(tl.int64) * size + column
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    share = tl.arange(0, SHARES)
    maximum = tl.max(tl.load(maxima + share * tl.num_programs(0) + row, mask=share < shares, other=0.0), axis=0)
    scale = _scale_of(maximum, E4M3)
    tl.store(out + place, _as_stored(value / scale, out, E4M3), mask=inside)
    if part == 0:
        tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["part_stride", "scale_row", "scale_group"])
def add_rms_norm_quantize(
    x,
    bias,
    residual,
    weight,
    out,
    scales,
    unquantized,
    eps,
    size,
    part_stride,
    scale_row,
    scale_group,
    E4M3: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute :func:`outrider_triton.jit.rows.add_rms_norm` for one row, quantise the norm, and store it to ``out`` with
    its ``scales``. ``unquantized`` receives the norm itself, if it isn't None.
    """
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    factor = tl.load(weight + lane, mask=inside, other=0.0)
    row = tl.program_id(0).to(tl.int64)
    kept = add_row(x, bias, residual, row, size, part_stride, size, PARTS, BLOCK, PDL)
    normed = norm(kept.to(tl.float32), factor, residual.dtype.element_ty, size, eps)
    if unquantized is not None:
        tl.store(unquantized + row * size + lane, normed, mask=inside)
    _quantize_row(normed.to(tl.float32), row, 0, out, scales, size, scale_row, scale_group, E4M3, GROUP, BLOCK)


@triton.jit(do_not_specialize=["scale_row", "scale_group"])
def silu_mul_quantize(
    gate_up,
    out,
    scales,
    size,
    scale_row,
    scale_group,
    E4M3: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute SwiGLU of BLOCK elements of a row of ``gate_up`` [rows, 2 size], quantise them, and store them to ``out`` with
    their ``scales``; one program per (row, block). Without groups the block is the row.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    begins = tl.program_id(1) * BLOCK
    lane = begins + tl.arange(0, BLOCK)
    mask = lane < size
    gate = tl.load(gate_up + row * 2 * size + lane, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + lane, mask=mask, other=0.0).to(tl.float32)
    activation = swiglu(gate, up, gate_up.dtype.element_ty)
    _quantize_row(activation.to(tl.float32), row, begins, out, scales, size, scale_row, scale_group, E4M3, GROUP, BLOCK)


@triton.jit(do_not_specialize=["scale_row", "scale_group"])
def embed_beside_quantize(
    tokens,
    weight,
    hidden,
    out,
    scales,
    size,
    hidden_size,
    hidden_stride,
    scale_row,
    scale_group,
    E4M3: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join one token's embedding and hidden state as :func:`outrider_triton.jit.bookkeeping.embed_beside` does,
    quantise the row, and store it to ``out`` with its ``scales``.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    token = tl.load(tokens + row)
    features = tl.load(
        hidden + row * hidden_stride + lane - size, mask=(lane >= size) & (lane < size + hidden_size), other=0.0
    )
    embedded = tl.load(weight + token * size + lane, mask=lane < size, other=0.0)
    value = tl.where(lane < size, embedded, features)
    _quantize_row(value.to(tl.float32), row, 0, out, scales, size + hidden_size, scale_row, scale_group, E4M3, GROUP, BLOCK)


@triton.jit(do_not_specialize=["scale_row", "scale_group"])
def gate_quantize(
    x,
    gate,
    weight,
    out,
    scales,
    eps,
    heads,
    gate_stride,
    scale_row,
    scale_group,
    E4M3: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gate HEADS of the ``heads`` heads of a row of ``x`` [rows, heads, E] as :func:`outrider_triton.jit.recurrent_steps`
    does, quantise them, and store them to ``out`` with their ``scales``; one program per (row, HEADS). Without a norm's
    ``weight``, heads are multiplied by the sigmoid.
    """
    column = tl.arange(0, E)[None, :]
    if weight is not None:
        scale = tl.load(weight + column)
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    head = first + tl.arange(0, HEADS)[:, None]
    inside = (head < heads) & (column < E)
    lane = head * E + column
    value = tl.load(x + row * heads * E + lane, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_stride + lane, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        inverse = tl.rsqrt(tl.sum(value * value, axis=1) / E + eps)
        made = gated_norm(value * inverse[:, None], z, scale, x.dtype.element_ty)
    else:
        made = sigmoid_product(value, z, x.dtype.element_ty)
    _quantize_row(made.to(tl.float32), row, first * E, out, scales, heads * E, scale_row, scale_group, E4M3, GROUP, HEADS * E)
