"""Records of products that a block has deferred: their operands, until a later kernel computes them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from outrider.device import KernelSet, QuantizedWeight


class Product(NamedTuple):
    """A matrix product that is not computed yet: ``x @ weight.T + bias``.

    ``x`` [T, in], ``weight`` [out, in], ``bias`` [out] or None, all of one dtype.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None


class QuantizedProduct(NamedTuple):
    """A :class:`Product` with a quantised weight [out, in].

    If ``gated``, ``x`` is [T, 2 in], and :meth:`~outrider.device.KernelSet.silu_mul` is applied before the product.

    ``maxima`` float32 [N, T], or None: the largest value of column t is the largest magnitude of row t of ``x``. The kernel
    that computed ``x`` may provide them to kernels that quantise ``x``. A kernel may ignore them.
    """

    x: Tensor
    weight: QuantizedWeight
    bias: Tensor | None
    gated: bool = False
    maxima: Tensor | None = None

    def silu_mul(self, kernels: KernelSet) -> Tensor:
        """Return the rows that the product multiplies, [T, in]: ``x``, or with ``gated`` the activation of ``x``."""
        return kernels.silu_mul(self.x) if self.gated else self.x
