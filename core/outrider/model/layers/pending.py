"""Contributions of a layer to the residual stream that stay pending until the next norm, so that one kernel can do both."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from outrider.device import KernelSet, Product
from outrider.model.layers.products import Attending, OtherProduct, multiply, quantized_product
from outrider.model.layers.ranks import ModelRanks


class Partial(NamedTuple):
    """One rank's part [T, H] of a sum over tensor-parallel ranks."""

    value: Tensor
    ranks: ModelRanks


class Made(NamedTuple):
    """A complete contribution [T, H]."""

    value: Tensor


Pending = Product | OtherProduct | Partial | Made
Attended = Product | OtherProduct | Partial | Attending
"""Pending contributions of attention."""


def add(pending: Pending, residual: Tensor, kernels: KernelSet) -> Tensor:
    """Add ``pending`` to ``residual`` [T, H] in place. Return ``residual``."""
    if isinstance(pending, Partial):
        return pending.ranks.add(pending.value, residual)
    if isinstance(pending, Made):
        return residual.add_(pending.value)
    if isinstance(pending, OtherProduct):
        quantized = quantized_product(pending)
        if quantized is not None:
            return kernels.linear_quantized_add(quantized, residual)
        return residual.add_(multiply(kernels, pending))
    return kernels.linear_add(*pending, residual)


def add_rms_norm(pending: Pending, residual: Tensor, norm: Tensor, eps: float, kernels: KernelSet) -> Tensor:
    """Add ``pending`` to ``residual`` [T, H] in place. Return the RMS norm of ``residual`` with weight ``norm`` [H]."""
    if isinstance(pending, Partial):
        return pending.ranks.add_rms_norm(kernels, pending.value, residual, norm, eps)
    if isinstance(pending, Made):
        return kernels.add_rms_norm(pending.value, residual, norm, eps)
    if isinstance(pending, OtherProduct):
        quantized = quantized_product(pending)
        if quantized is not None:
            return kernels.linear_quantized_add_rms_norm(quantized, residual, norm, eps)
        return kernels.add_rms_norm(multiply(kernels, pending), residual, norm, eps)
    return kernels.linear_add_rms_norm(*pending, residual, norm, eps)
