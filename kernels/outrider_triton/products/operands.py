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


class HeadGate(NamedTuple):
    """A gate of the heads of rows [T, heads * E]: their norm times SiLU of ``values``, or the rows times the sigmoid."""

    values: Tensor
    """[T, heads, E]."""
    norm: Tensor | None = None
    """[E]: weight of the norm; None: the sigmoid, without a norm."""
    eps: float = 0.0

    def apply(self, kernels: KernelSet, x: Tensor) -> Tensor:
        """Return the gated rows of ``x`` [T, heads * E]."""
        if self.norm is None:
            return kernels.sigmoid_mul(x, self.values.flatten(1))
        return kernels.gated_rms_norm(x.view(self.values.shape), self.values, self.norm, self.eps).flatten(1)


class QuantizedProduct(NamedTuple):
    """A :class:`Product` with a quantised weight [out, in].

    If ``gated``, ``x`` is [T, 2 in], and :meth:`~outrider.device.KernelSet.silu_mul` is applied before the product. A
    ``gate`` is applied to ``x`` [T, in].

    ``maxima`` float32 [N, T], or None: the largest value of column t is the largest magnitude of row t of ``x``. The kernel
    that computed ``x`` may provide them to kernels that quantise ``x``. A kernel may ignore them.
    """

    x: Tensor
    weight: QuantizedWeight
    bias: Tensor | None
    gated: bool = False
    maxima: Tensor | None = None
    gate: HeadGate | None = None

    def gate_rows(self, kernels: KernelSet) -> Tensor:
        """Return the rows that the product multiplies, [T, in]: ``x``, or with ``gated`` or a ``gate`` the gated ``x``."""
        if self.gate is not None:
            return self.gate.apply(kernels, self.x)
        return kernels.silu_mul(self.x) if self.gated else self.x
