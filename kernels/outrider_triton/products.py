"""Products that a block hasn't computed yet, and the fusions of this package composed of primitives.

A fusion whose kernels don't take its operands calls the composition here by ``super()``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, KernelSet, QuantizedWeight, RotaryArgs


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


class UnfusedProducts(KernelSet):
    """The fusions of this package, composed of primitives."""

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return :meth:`silu_mul` of the product ``x @ weight.T + bias`` → [..., I]. ``weight`` [2*I, in] holds the gate's
        rows, then those of up.
        """
        return self.silu_mul(self.linear(x, weight, bias))

    def linear_add_rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
    ) -> Tensor:
        """Add the product ``x @ weight.T + bias`` to ``residual`` [T, H] in place; return the norm of ``residual`` with
        ``norm`` [H]. The sum may be rounded once instead of twice.
        """
        return self.add_rms_norm(self.linear(x, weight, bias), residual, norm, eps)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Add :meth:`linear` of ``x`` to ``residual`` [T, H] in place; returns it. The sum may be rounded once."""
        return residual.add_(self.linear(x, weight, bias))

    def linear_rope_write_cache(self, product: Product, rotary: RotaryArgs) -> Tensor:
        """Compute queries, keys and values as one ``product`` with weights [(Hq + 2 Hkv) D, H], then
        :meth:`rope_write_cache` of them → queries [T, Hq, D].
        """
        q, k, v = rotary.split(self.linear(*product))
        self.rope_write_cache(q, k, v, *rotary)
        return q

    def norm_linear_silu_mul(
        self, added: Product, residual: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Add the product ``added`` to ``residual`` in place, multiply the norm of ``residual`` by ``weight`` with ``bias``,
        and return :meth:`silu_mul` of the result. The norm needn't be stored: its factor may be applied after the product.
        """
        return self.linear_silu_mul(self.linear_add_rms_norm(*added, residual, norm, eps), weight, bias)

    def norm_linear_rope_write_cache(
        self,
        added: Product,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        rotary: RotaryArgs,
    ) -> Tensor:
        """Add the product ``added`` to ``residual`` in place, multiply the norm of ``residual`` by ``weight`` with ``bias``,
        and call :meth:`rope_write_cache` with the result → queries. The norm's factor may be applied after the product.
        """
        normed = self.linear_add_rms_norm(*added, residual, norm, eps)
        return self.linear_rope_write_cache(Product(normed, weight, bias), rotary)

    def linear_quantized_add(self, added: QuantizedProduct, residual: Tensor) -> Tensor:
        """Add the product ``added`` to ``residual`` [T, H] in place; returns it. The sum may be rounded once."""
        x = self.silu_mul(added.x) if added.gated else added.x
        return residual.add_(self.linear_quantized(x, added.weight, added.bias))

    def linear_quantized_add_rms_norm(self, added: QuantizedProduct, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add the product ``added`` to ``residual`` [T, H] in place; return the norm of ``residual`` with ``norm`` [H]. The
        sum may be rounded once instead of twice.
        """
        x = self.silu_mul(added.x) if added.gated else added.x
        return self.add_rms_norm(self.linear_quantized(x, added.weight, added.bias), residual, norm, eps)

    def linear_quantized_rope_write_cache(
        self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, rotary: RotaryArgs
    ) -> Tensor:
        """Compute queries, keys and values as one :meth:`linear_quantized` of ``x`` [T, H], then :meth:`rope_write_cache`
        of them → queries [T, Hq, D].
        """
        q, k, v = rotary.split(self.linear_quantized(x, weight, bias))
        self.rope_write_cache(q, k, v, *rotary)
        return q

    def norm_linear_quantized(
        self,
        added: QuantizedProduct,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Add the product ``added`` to ``residual`` [T, H] in place, and return the product of the norm of ``residual`` with
        ``weight`` and ``bias`` → [T, out]. ``norm`` [H] is the weight of the norm.

        The sum may be rounded once instead of twice, and activations may be quantised from values that were not rounded.
        """
        return self.linear_quantized(self.linear_quantized_add_rms_norm(added, residual, norm, eps), weight, bias)

    def norm_linear_quantized_rope_write_cache(
        self,
        added: QuantizedProduct,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: QuantizedWeight,
        bias: Tensor | None,
        rotary: RotaryArgs,
    ) -> Tensor:
        """Compute queries, keys and values as one :meth:`norm_linear_quantized`, then :meth:`rope_write_cache` of them →
        queries [T, Hq, D].
        """
        q, k, v = rotary.split(self.norm_linear_quantized(added, residual, norm, eps, weight, bias))
        self.rope_write_cache(q, k, v, *rotary)
        return q

    def attention_norm_linear_quantized(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        output: QuantizedWeight,
        output_bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        *,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        """Compute attention, add its product with ``output`` [H, Hq D] to ``residual`` [T, H] in place, and return the
        product of the norm of ``residual`` with ``weight`` → [T, out].

        The attention output needn't be rounded to q's dtype, and may have any memory layout.
        """
        attended = self.paged_attention(q, k_cache, v_cache, metadata, scale=scale, window=window)
        added = QuantizedProduct(attended.reshape(q.shape[0], -1), output, output_bias)
        return self.norm_linear_quantized(added, residual, norm, eps, weight, bias)

    def attention_norm_linear_silu_mul_quantized(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        output: QuantizedWeight,
        output_bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: QuantizedWeight,
        bias: Tensor | None,
        down: QuantizedWeight,
        down_bias: Tensor | None,
        *,
        scale: float,
        window: int = 0,
    ) -> QuantizedProduct:
        """Compute :meth:`attention_norm_linear_quantized` with the gate and up rows ``weight`` [2 I, H]; return the product
        of its :meth:`silu_mul` with ``down`` [H, I], which is not computed yet.

        The kernel chooses between two forms of the returned record. Either ``x`` is [T, 2 I] and ``gated``, or the kernel has
        applied :meth:`silu_mul` and ``x`` is [T, I], perhaps with its ``maxima``.
        """
        operands = q, k_cache, v_cache, metadata, output, output_bias, residual, norm, eps, weight, bias
        both = self.attention_norm_linear_quantized(*operands, scale=scale, window=window)
        return QuantizedProduct(both, down, down_bias, gated=True)

    def embed_beside(self, tokens: Tensor, weight: Tensor, hidden: Tensor) -> Tensor:
        """Return :meth:`embedding` of ``tokens`` [T], concatenated with ``hidden`` [T, H'] → [T, H + H']."""
        return torch.cat((self.embedding(tokens, weight), hidden), dim=-1)
