"""Records of products that a block has deferred, and operands of other numbers of tokens, for compilation."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from outrider.device import KernelSet, QuantizedWeight, RotaryArgs


def rows_like(x: Tensor, count: int) -> Tensor:
    """Return ``count`` uninitialised rows [count, K] with the dtype and the strides of ``x`` [..., K]."""
    rows, columns = x.reshape(-1, x.shape[-1]), x.shape[-1]
    stride = max(rows.stride(0), columns)
    return x.new_empty(count * stride).as_strided((count, columns), (stride, 1))


def rotary_like(rotary: RotaryArgs, count: int) -> RotaryArgs:
    """Return the rotary arguments of ``count`` tokens, all in the reserved slot."""
    cos, sin = rows_like(rotary.cos, count), rows_like(rotary.sin, count)
    return rotary._replace(cos=cos, sin=sin, slots=rotary.slots.new_zeros(count))


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

    @property
    def variant(self) -> tuple[object, ...]:
        """The properties that select the product's kernels, besides the number of tokens."""
        gate = None if self.gate is None else (self.gate.norm is None, self.gate.values.shape[1:])
        weight = self.weight.shape, self.weight.label, self.bias is None
        return self.x.dtype, *weight, self.gated, self.maxima is None, gate

    def like(self, count: int) -> QuantizedProduct:
        """Return the product of ``count`` uninitialised rows."""
        maxima, gate = self.maxima, self.gate
        if maxima is not None:
            maxima = maxima.new_empty((maxima.shape[0], count))
        if gate is not None:
            gate = gate._replace(values=rows_like(gate.values.flatten(1), count).unflatten(1, gate.values.shape[1:]))
        return self._replace(x=rows_like(self.x, count), maxima=maxima, gate=gate)
