"""Numbers in float64 with a bound of their error, carried through each operation of a kernel.

A bound comes from the operation: its length, the magnitudes that it adds, and the unit roundoff of the dtype. Kernels add up
float16 and bfloat16 in float32. Sums of n terms use Higham and Mary's probabilistic bound (2019), lambda * sqrt(n) * u times
the sum of magnitudes, which no order of summation exceeds in practice; never more than the certain bound n * u.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TINY = {torch.float64: 2.0**-1074, torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
_LAMBDA = 8.0
_EXPONENT = 100.0
"""Largest magnitude of an argument whose float32 exponential is neither 0 nor infinite, rounded up."""
_BASE_CHANGE = 1.25
"""Roundings of the argument of an exponential by a kernel that computes powers of 2: of the product, and of the constant."""
_OVERFLOWN = 2.0**-126
"""Smallest reciprocal of a float32 exponential that isn't infinite, rounded up."""
_PARTS = 2.0
"""Number of roundings of partial sums to a half dtype: a library may split a sum among programs that round their parts."""


@dataclass(frozen=True, slots=True)
class Number:
    """A float64 ``value``, and the ``error`` of the same shape by which a result may differ from it. An infinite error allows
    any finite number.
    """

    value: Tensor
    error: Tensor

    def __getitem__(self, index: Any) -> Number:
        """Return a part of the numbers, selected as in a tensor."""
        return Number(self.value[index], self.error[index])


def exact(x: Tensor) -> Number:
    """Return the operand as a :class:`Number` with an error of 0."""
    value = x.to(torch.float64, copy=True)
    return Number(value, torch.zeros_like(value))


def wide(dtype: torch.dtype) -> float:
    """Return the unit roundoff of the dtype in which kernels add up ``dtype``."""
    return UNIT[torch.float64 if dtype is torch.float64 else torch.float32]


def smallest_normal(dtype: torch.dtype) -> float:
    """Return the smallest normal number of the dtype in which kernels add up ``dtype``; they may flush smaller ones to 0."""
    return torch.finfo(_statistics(dtype)).tiny


def growth(count: int, unit: float) -> float:
    """Return the error of adding ``count`` terms, relative to the sum of their magnitudes."""
    return float(min(count, _LAMBDA * count**0.5) * unit)


def rounded(x: Number, dtype: torch.dtype, times: float = 1.0) -> Number:
    """Return ``x`` with its error increased by ``times`` roundings to ``dtype``."""
    return Number(x.value, x.error + times * UNIT[dtype] * (x.value.abs() + x.error) + times * TINY[dtype])


def add(x: Number, y: Number, dtype: torch.dtype) -> Number:
    """Return ``x + y`` with its error, rounded to ``dtype``. The caller rounds the operands if a kernel may."""
    return rounded(Number(x.value + y.value, x.error + y.error), dtype)


def product(x: Number, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Number:
    """Return ``x @ weight.T + bias``, rounded to ``dtype``."""
    w = weight.double()
    magnitude = x.value.abs() @ w.abs().T
    value = x.value @ w.T
    error = x.error @ w.abs().T + growth(w.shape[-1], wide(dtype)) * magnitude
    if dtype in (torch.float16, torch.bfloat16):
        error = error + _PARTS * UNIT[dtype] * magnitude
    if bias is None:
        return rounded(Number(value, error), dtype)
    error = error + UNIT[dtype] * value.abs()  # the bias may meet a product that is rounded already,
    error = error + growth(w.shape[-1], wide(dtype)) * bias.double().abs()  # or the sum may begin with it
    return rounded(Number(value + bias.double(), error), dtype)


def silu_mul(gate: Number, up: Number, dtype: torch.dtype) -> Number:
    """Return ``silu(gate) * up`` with activation and product rounded. The slope of silu stays below 1.1.

    A kernel also rounds the argument of the exponential, to a base of 2: the relative error grows with the argument. If the
    exponential overflows, the result is 0.
    """
    value = gate.value * torch.sigmoid(gate.value)
    relative = _BASE_CHANGE * wide(dtype) * gate.value.abs().clamp(max=_EXPONENT)
    active = Number(value, 1.1 * gate.error + relative * value.abs() + _OVERFLOWN * gate.value.abs())
    active = rounded(rounded(active, dtype), _statistics(dtype), 8.0)
    error = active.error * (up.value.abs() + up.error) + active.value.abs() * up.error
    return rounded(Number(active.value * up.value, error), dtype)


def gelu_mul(gate: Number, up: Number, dtype: torch.dtype) -> Number:
    """Return ``gelu(gate) * up`` with activation and product rounded; see :func:`silu_mul`. GELU is approximated by a
    hyperbolic tangent, whose sum with 1 loses digits of a negative argument. Its slope stays below 1.2.
    """
    twice = 2 * (2 / torch.pi) ** 0.5 * (gate.value + 0.044715 * gate.value**3)
    value = gate.value * torch.sigmoid(twice)
    relative = 4.0 * wide(dtype) * twice.abs().clamp(max=_EXPONENT)
    error = 1.2 * gate.error + relative * value.abs() + (2.0 * wide(dtype) + _OVERFLOWN) * gate.value.abs()
    active = rounded(rounded(Number(value, error), dtype), _statistics(dtype), 8.0)
    error = active.error * (up.value.abs() + up.error) + active.value.abs() * up.error
    return rounded(Number(active.value * up.value, error), dtype)


def clamped_mul(gate: Number, up: Number, limit: float, alpha: float, dtype: torch.dtype) -> Number:
    """Return ``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped operands; see ``ClampedActivation``. A clamp adds no
    error, and the slope of the gate's function stays below 1.1 as in :func:`silu_mul`.
    """
    clamped, added = gate.value.clamp(max=limit), up.value.clamp(-limit, limit) + 1
    value = clamped * torch.sigmoid(alpha * clamped)
    relative = _BASE_CHANGE * wide(dtype) * (alpha * clamped.abs()).clamp(max=_EXPONENT)
    active = Number(value, 1.1 * gate.error + relative * value.abs() + _OVERFLOWN * clamped.abs())
    active = rounded(rounded(active, dtype), _statistics(dtype), 8.0)
    plus_one = rounded(Number(added, up.error), dtype)
    error = active.error * (plus_one.value.abs() + plus_one.error) + active.value.abs() * plus_one.error
    return rounded(Number(active.value * plus_one.value, error), dtype)


def sigmoid_mul(x: Number, gate: Number, dtype: torch.dtype) -> Number:
    """Return ``x * sigmoid(gate)`` with sigmoid and product rounded; see :func:`silu_mul`."""
    value = torch.sigmoid(gate.value)
    relative = _BASE_CHANGE * wide(dtype) * gate.value.abs().clamp(max=_EXPONENT)
    active = Number(value, 0.25 * gate.error + relative * value + _OVERFLOWN)
    active = rounded(rounded(active, dtype), _statistics(dtype), 8.0)
    error = active.error * (x.value.abs() + x.error) + active.value * x.error
    return rounded(Number(active.value * x.value, error), dtype)


def rms_norm(x: Number, weight: Tensor, eps: float, dtype: torch.dtype) -> Number:
    """Return the root-mean-square norm of ``x`` over the last dimension times ``weight``. The error allows a factor computed
    in float32, and two roundings of the row to ``dtype``: before and after the product with ``weight``.
    """
    size = x.value.shape[-1]
    mean = x.value.square().mean(-1, keepdim=True) + eps
    factor = mean.rsqrt()
    low = (x.value.abs() - x.error).clamp(min=0).square().mean(-1, keepdim=True) + eps
    high = (x.value.abs() + x.error).square().mean(-1, keepdim=True) + eps
    moved = torch.maximum((mean / low).sqrt() - 1, 1 - (mean / high).sqrt())
    relative = moved + growth(size, wide(dtype)) + 8 * wide(dtype)
    normed = x.value * factor
    error = x.error * factor * (1 + relative) + normed.abs() * relative
    error = torch.minimum(error, normed.abs() + size**0.5 * (1 + relative - moved))  # a norm is no larger, whatever x is
    w = weight.double()
    return rounded(Number(normed * w, error * w.abs()), dtype, 2.0)


def rotate(x: Number, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Number:
    """Return the rotation of ``x`` [T, heads, D] by [T, Dr], which turns the two halves of its first Dr numbers: two products
    and their sum, each rounded.
    """
    turning = cos.shape[-1]
    if turning < x.value.shape[-1]:
        first, rest = rotate(x[..., :turning], cos, sin, dtype), x[..., turning:]
        return Number(torch.cat((first.value, rest.value), dim=-1), torch.cat((first.error, rest.error), dim=-1))
    half = x.value.shape[-1] // 2
    c, s = cos.double().unsqueeze(1), sin.double().unsqueeze(1)

    def turned(part: Tensor, sign: float) -> Tensor:
        return torch.cat((sign * part[..., half:], part[..., :half]), dim=-1)

    value = x.value * c + turned(x.value, -1.0) * s
    magnitude = x.value.abs() * c.abs() + turned(x.value.abs(), 1.0) * s.abs()
    error = x.error * c.abs() + turned(x.error, 1.0) * s.abs()
    return Number(value, error + 3 * UNIT[dtype] * (magnitude + error) + 3 * TINY[dtype])


def stored(x: Number, dtype: torch.dtype) -> Number:
    """Return ``x`` as a cache of ``dtype`` stores it: clamped and rounded to the nearest.

    Both operations are monotone, so the stored value lies between the stored ends of the bound. NaN stays NaN.
    """
    most = torch.finfo(dtype).max
    low, high = ((x.value + off).clamp(-most, most).to(dtype).double() for off in (-x.error, x.error))
    return Number((low + high) / 2, (high - low) / 2)


def _statistics(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def compare(made: Tensor, wanted: Number, what: str) -> None:
    """Fail if ``made``, on the host, is outside the bound. NaN and infinity must be at the same positions.

    Raises :class:`AssertionError` that names the first wrong element.
    """
    assert tuple(made.shape) == tuple(wanted.value.shape), (
        f"{what}: shape {tuple(made.shape)}, expected {tuple(wanted.value.shape)}"
    )
    found, free = made.double(), wanted.error.isinf()
    assert not (free & ~found.isfinite() & wanted.value.isfinite()).any(), f"{what}: NaN or infinity for padding"
    alike = (found == wanted.value) | (found.isnan() & wanted.value.isnan()) | free
    off = (found - wanted.value).abs()
    bad = ~alike & ~(off <= wanted.error)
    if not bad.any():
        return
    first = [int(index) for index in bad.nonzero()[0]]
    at = tuple(first)
    raise AssertionError(
        f"{what}: {int(bad.sum())} of {bad.numel()} are further off than rounding allows; at {first} found "
        f"{found[at].item():.9g}, expected {wanted.value[at].item():.9g} within {wanted.error[at].item():.3g}"
    )
