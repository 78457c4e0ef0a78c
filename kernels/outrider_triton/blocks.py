"""The blocks of a layer with fewer kernels: products are deferred until the next norm, and fused with it.

The residual stream of these blocks carries a product, or attention and its product, that the next block computes together
with its norm and first product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import (
    AttentionBlock,
    AttentionMetadata,
    AttentionTokens,
    Contribution,
    KernelSet,
    LayerRows,
    MlpBlock,
    QuantizedWeight,
    RankBoundary,
    RecurrentBlock,
    ResidualStream,
    RotaryArgs,
    Weight,
)
from outrider.device.kernels.blocks import (
    Attend,
    split_gate,
    write_heads,
)
from outrider.device.kernels.residual import SINGLE_RANK, Computed
from outrider.device.kernels.weights import linear
from outrider_triton.attention.cached import CacheAttention
from outrider_triton.attention.prefill import PrefillOperands
from outrider_triton.products.dense import DenseProducts
from outrider_triton.products.operands import HeadGate, Product, QuantizedProduct
from outrider_triton.quantized.products import QuantizedProducts, has_dynamic_activations


@dataclass(frozen=True, slots=True)
class DeferredProduct(Contribution):
    """An unquantized product whose result the next norm adds to the residual stream."""

    products: DenseProducts
    product: Product

    def add(self, rows: Tensor) -> Tensor:
        """Add the product to the residual ``rows`` [T, H] and return them; the product's own kernel adds if that was measured
        to be faster.
        """
        return self.products.linear_add(*self.product, rows)

    def add_rms_norm(self, rows: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add the product to ``rows`` [T, H] and return the norm; the norm's kernel adds the parts of a split product."""
        return self.products.linear_add_rms_norm(*self.product, rows, norm, eps)


@dataclass(frozen=True, slots=True)
class DeferredQuantized(Contribution):
    """A product with a quantised weight whose result the next norm adds to the residual stream."""

    products: QuantizedProducts
    product: QuantizedProduct

    def add(self, rows: Tensor) -> Tensor:
        """Add the product to the residual ``rows`` [T, H] and return them; a streamed product adds in its own kernel."""
        return self.products.linear_quantized_add(self.product, rows)

    def add_rms_norm(self, rows: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add the product to ``rows`` [T, H] and return the norm; the norm's kernel adds the parts of a split product."""
        return self.products.linear_quantized_add_rms_norm(self.product, rows, norm, eps)


@dataclass(frozen=True, slots=True)
class DeferredAttention(Contribution):
    """Attention and its output product with a quantised weight, both deferred to the next norm. The kernel that joins
    attention's splits may store its rows in the product's layout.
    """

    kernels: KernelSet
    products: QuantizedProducts
    operands: tuple[Tensor, Tensor, Tensor, AttentionMetadata]
    block: AttentionBlock
    output: QuantizedWeight
    attend: Attend | None
    """Attention of another kernel set, which isn't fused with the product; None for Triton's."""

    def add(self, rows: Tensor) -> Tensor:
        """Compute attention, and add its output product to the residual ``rows`` [T, H]."""
        return self.attended().add(rows)

    def add_rms_norm(self, rows: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Compute attention, and add its output product to ``rows`` [T, H] in the kernel of the norm. Return the norm."""
        return self.attended().add_rms_norm(rows, norm, eps)

    def attended(self) -> DeferredQuantized:
        """Compute attention now, and return its output product, which stays deferred."""
        attend = self.attend or self.kernels.paged_attention
        out = attend(*self.operands, scale=self.block.scale, window=self.block.window)
        product = QuantizedProduct(out.reshape(out.shape[0], -1), self.output, self.block.output_bias)
        return DeferredQuantized(self.products, product)


class FusedBlocks:
    """The parts of attention and MLP blocks whose products are fused with the norms, rotations and activations
    around them.
    """

    def __init__(
        self, kernels: KernelSet, dense: DenseProducts, quantized: QuantizedProducts, attention: CacheAttention
    ) -> None:
        self._kernels, self._dense, self._quantized, self._attention = kernels, dense, quantized, attention

    def queries(self, x: ResidualStream, block: AttentionBlock, tokens: AttentionTokens) -> tuple[Tensor, Tensor | None]:
        """Return rotated queries [T, Hq, D] and the gate [T, Hq D]; write keys and values to the cache."""
        pending, qkv, rotary = x.pending, block.qkv, tokens.rotary
        # Without norms, scales and a gate between the product and the rotation, one kernel can do both.
        rotates_product = block.head_norms is None and block.input_scales is None and not block.gated
        if block.norm is not None:
            norm, bias = (x.rows, block.norm, block.eps), block.qkv_bias
            if isinstance(pending, DeferredProduct) and isinstance(qkv, Tensor) and rotates_product:
                return self._dense.norm_linear_rope_write_cache(pending.product, *norm, qkv, bias, rotary), None
            if isinstance(pending, DeferredQuantized) and isinstance(qkv, QuantizedWeight):
                if rotates_product:
                    return self._quantized.norm_linear_quantized_rope_write_cache(
                        pending.product, *norm, qkv, bias, rotary
                    ), None
                heads, gate = split_gate(self._quantized.norm_linear_quantized(pending.product, *norm, qkv, bias), block)
                return write_heads(self._kernels, heads, block, tokens), gate
        normed = x.norm(block.norm, block.eps)
        if rotates_product:
            return self._rotated(normed, qkv, block.qkv_bias, rotary), None
        heads, gate = split_gate(linear(self._kernels, normed, qkv, block.qkv_bias), block)
        return write_heads(self._kernels, heads, block, tokens), gate

    def projections(self, x: ResidualStream, block: RecurrentBlock) -> list[Tensor]:
        """Return the product [T, ...] of the normalised rows and each weight of ``block.projections``. The norm's kernel
        quantises the rows for a first weight with quantised activations.
        """
        (first, *others), pending = block.projections, x.pending
        if isinstance(pending, DeferredQuantized) and isinstance(first, QuantizedWeight) and has_dynamic_activations(first):
            norm = x.rows, block.norm, block.eps
            if not others:
                return [self._quantized.norm_linear_quantized(pending.product, *norm, first)]
            normed = torch.empty_like(x.rows)
            product = self._quantized.norm_linear_quantized(pending.product, *norm, first, unquantized=normed)
            return [product, *(linear(self._kernels, normed, each) for each in others)]
        normed = x.norm(block.norm, block.eps)
        return [linear(self._kernels, normed, each) for each in block.projections]

    def _rotated(self, x: Tensor, weight: Weight, bias: Tensor | None, rotary: RotaryArgs) -> Tensor:
        if isinstance(weight, Tensor):
            return self._dense.linear_rope_write_cache(Product(x, weight, bias), rotary)
        if isinstance(weight, QuantizedWeight):
            return self._quantized.linear_quantized_rope_write_cache(x, weight, bias, rotary)
        return self._kernels.head_norm_rope_write_cache(linear(self._kernels, x, weight, bias), None, rotary)

    def attended_mlp(
        self, pending: DeferredAttention, x: ResidualStream, block: MlpBlock, gate_up: QuantizedWeight
    ) -> Contribution:
        """Compute the deferred attention ``pending`` and its output product, add the product to ``x``, and compute the MLP
        ``block`` of the norm. Return the MLP's down product, which stays deferred.

        A streamed gate and up product applies the activation itself, and returns the maxima of its rows for the kernel that
        quantises them.
        """
        following = x.rows, block.norm, block.eps, gate_up, block.gate_up_bias
        attention, normed = pending.block, None
        if pending.attend is None:
            call = PrefillOperands(*pending.operands, attention.scale, attention.window)
            normed = self._attention.attention_normed(call, pending.output, attention.output_bias, *following)
        if normed is None:
            return self.down_product(self._quantized.norm_linear_quantized(pending.attended().product, *following), block)
        if isinstance(block.down, QuantizedWeight):
            activated = self._quantized.activated(normed, x.rows, gate_up, block.gate_up_bias)
            if activated is not None:
                gated, maxima = activated
                return DeferredQuantized(self._quantized, QuantizedProduct(gated, block.down, block.down_bias, maxima=maxima))
        return self.down_product(
            self._quantized.second_product(normed, x.rows, gate_up, block.gate_up_bias, parts=False), block
        )

    def down_product(self, both: Tensor, block: MlpBlock) -> Contribution:
        """Return the MLP's deferred down product for ``both`` [T, 2 I], the results of gate and up."""
        if isinstance(block.down, QuantizedWeight):
            return DeferredQuantized(self._quantized, QuantizedProduct(both, block.down, block.down_bias, gated=True))
        return self.contribution(self._kernels.silu_mul(both), block.down, block.down_bias)

    def gated_product(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """Return SwiGLU [T, I] of the rows ``x`` [T, H], multiplied by the gate and up ``weight``."""
        if isinstance(weight, Tensor):
            return self._dense.linear_silu_mul(x, weight, bias)
        return self._kernels.silu_mul(linear(self._kernels, x, weight, bias))

    def defers_gate(self, block: AttentionBlock | RecurrentBlock, rows: LayerRows) -> bool:
        """Return True if the kernel that quantises rows for the block's output product can apply the block's gate."""
        return isinstance(block.output, QuantizedWeight) and not block.ranks.reduces and rows.kept is None

    def mlp(self, x: Tensor, block: MlpBlock) -> Tensor:
        """Return the MLP's output [T, H] for the normalised rows ``x`` [T, H]."""
        return linear(self._kernels, self.gated_product(x, block.gate_up, block.gate_up_bias), block.down, block.down_bias)

    def contribution(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        ranks: RankBoundary = SINGLE_RANK,
        gate: HeadGate | None = None,
    ) -> Contribution:
        """Return the product of ``x``, to which the ``gate`` is applied, and ``weight`` as a contribution to the residual
        stream, deferred if there is one rank. A quantised weight takes a gate.
        """
        if not ranks.reduces and isinstance(weight, Tensor):
            return DeferredProduct(self._dense, Product(x, weight, bias))
        if not ranks.reduces and isinstance(weight, QuantizedWeight):
            return DeferredQuantized(self._quantized, QuantizedProduct(x, weight, bias, gate=gate))
        return Computed(self._kernels, linear(self._kernels, x, weight, bias), ranks)
