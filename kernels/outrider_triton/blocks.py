"""The blocks of a layer with fewer kernels: products are deferred until the next norm, and fused with it.

The residual stream of these blocks carries a product, or attention and its product, that the next block computes together
with its norm and first product.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.device import (
    AttentionBlock,
    AttentionMetadata,
    AttentionTokens,
    Contribution,
    ExpertsBlock,
    MlpBlock,
    QuantizedWeight,
    RankBoundary,
    RecurrentBlock,
    RecurrentTokens,
    ResidualStream,
    RotaryArgs,
    Weight,
)
from outrider.device.kernels.blocks import (
    Attend,
    attended_rows,
    continued_queries,
    experts_stream,
    recurrent_heads,
    split_gate,
    write_heads,
)
from outrider.device.kernels.residual import SINGLE_RANK, Computed
from outrider.device.kernels.weights import linear
from outrider_triton.attention.kernels import TritonAttention
from outrider_triton.attention.prefill import PrefillOperands
from outrider_triton.products.kernels import TritonProducts
from outrider_triton.products.operands import Product, QuantizedProduct


@dataclass(frozen=True, slots=True)
class DeferredProduct(Contribution):
    """A product that the norm after it adds to the stream."""

    kernels: TritonBlocks
    product: Product

    def add(self, rows: Tensor) -> Tensor:
        """Add the product in its own kernel, if that was faster."""
        return self.kernels.linear_add(*self.product, rows)

    def add_rms_norm(self, rows: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add the parts of a split product in the kernel of the norm."""
        return self.kernels.linear_add_rms_norm(*self.product, rows, norm, eps)


@dataclass(frozen=True, slots=True)
class DeferredQuantized(Contribution):
    """A product with a quantised weight that the norm after it adds to the stream."""

    kernels: TritonBlocks
    product: QuantizedProduct

    def add(self, rows: Tensor) -> Tensor:
        """Add the product in its own kernel if it is streamed."""
        return self.kernels.linear_quantized_add(self.product, rows)

    def add_rms_norm(self, rows: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add the parts of a split product in the kernel of the norm."""
        return self.kernels.linear_quantized_add_rms_norm(self.product, rows, norm, eps)


@dataclass(frozen=True, slots=True)
class DeferredAttention(Contribution):
    """Attention and its product with a quantised weight. The kernel that joins the splits may store rows for the product."""

    kernels: TritonBlocks
    operands: tuple[Tensor, Tensor, Tensor, AttentionMetadata]
    block: AttentionBlock
    output: QuantizedWeight
    attend: Attend | None
    """Attention of another kernel set. It isn't fused with the product."""

    def add(self, rows: Tensor) -> Tensor:
        """Attend, then add the product."""
        return self.attended().add(rows)

    def add_rms_norm(self, rows: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Attend, then add the product in the kernel of the norm."""
        return self.attended().add_rms_norm(rows, norm, eps)

    def attended(self) -> DeferredQuantized:
        """Attend, and return the product that is still deferred."""
        attend = self.attend or self.kernels.paged_attention
        out = attend(*self.operands, scale=self.block.scale, window=self.block.window)
        product = QuantizedProduct(out.reshape(out.shape[0], -1), self.output, self.block.output_bias)
        return DeferredQuantized(self.kernels, product)


class TritonBlocks(TritonProducts, TritonAttention):
    """Blocks whose products are fused with the norms, rotations and activations around them."""

    def attention_block(
        self, x: ResidualStream, block: AttentionBlock, tokens: AttentionTokens, *, attend: Attend | None = None
    ) -> ResidualStream:
        """Fuse norm, product and rotation where configurations allow it, and defer the output product."""
        q, gate = self._queries(x, block, tokens)
        scaled = block.gated or block.output_scales is not None or block.ranks.reduces
        if isinstance(block.output, QuantizedWeight) and not scaled:
            operands = continued_queries(self, q, tokens), *tokens.rotary[2:4], tokens.attention
            pending: Contribution = DeferredAttention(self, operands, block, block.output, attend)
        else:
            attended = attended_rows(self, q, gate, block, tokens, attend or self.paged_attention)
            pending = self._contribution(attended, block.output, block.output_bias, block.ranks)
        return ResidualStream(x.kernels, tokens.rows.continued(self, x.rows), pending)

    def _queries(self, x: ResidualStream, block: AttentionBlock, tokens: AttentionTokens) -> tuple[Tensor, Tensor | None]:
        """Return rotated queries [T, Hq, D] and the gate [T, Hq D]; write keys and values to the cache."""
        pending, qkv, rotary = x.pending, block.qkv, tokens.rotary
        # Without norms, scales and a gate between the product and the rotation, one kernel can do both.
        rotates_product = block.head_norms is None and block.input_scales is None and not block.gated
        if block.norm is not None:
            norm, bias = (x.rows, block.norm, block.eps), block.qkv_bias
            if isinstance(pending, DeferredProduct) and isinstance(qkv, Tensor) and rotates_product:
                return self.norm_linear_rope_write_cache(pending.product, *norm, qkv, bias, rotary), None
            if isinstance(pending, DeferredQuantized) and isinstance(qkv, QuantizedWeight):
                if rotates_product:
                    return self.norm_linear_quantized_rope_write_cache(pending.product, *norm, qkv, bias, rotary), None
                heads, gate = split_gate(self.norm_linear_quantized(pending.product, *norm, qkv, bias), block)
                return write_heads(self, heads, block, tokens), gate
        normed = x.norm(block.norm, block.eps)
        if rotates_product:
            return self._rotated(normed, qkv, block.qkv_bias, rotary), None
        heads, gate = split_gate(linear(self, normed, qkv, block.qkv_bias), block)
        return write_heads(self, heads, block, tokens), gate

    def _rotated(self, x: Tensor, weight: Weight, bias: Tensor | None, rotary: RotaryArgs) -> Tensor:
        if isinstance(weight, Tensor):
            return self.linear_rope_write_cache(Product(x, weight, bias), rotary)
        if isinstance(weight, QuantizedWeight):
            return self.linear_quantized_rope_write_cache(x, weight, bias, rotary)
        return self.head_norm_rope_write_cache(linear(self, x, weight, bias), None, rotary)

    def mlp_block(self, x: ResidualStream, block: MlpBlock) -> ResidualStream:
        """Fuse norm, gate and up product and activation where configurations allow it, and defer the down product."""
        pending, gate_up, bias = x.pending, block.gate_up, block.gate_up_bias
        norm, down = (x.rows, block.norm, block.eps), (block.down, block.down_bias)
        if block.ranks.reduces:
            normed = block.ranks.gather_tokens(x.norm(block.norm, block.eps))
            value = linear(self, self._gated(normed, gate_up, bias), *down)
            made: Contribution = Computed(self, block.ranks.scatter_tokens(value, x.rows.shape[0]), block.ranks)
        elif isinstance(pending, DeferredAttention) and isinstance(gate_up, QuantizedWeight):
            made = self._attended_mlp(pending, x, block, gate_up)
        elif isinstance(pending, DeferredProduct) and isinstance(gate_up, Tensor):
            made = self._contribution(self.norm_linear_silu_mul(pending.product, *norm, gate_up, bias), *down)
        elif isinstance(pending, DeferredQuantized) and isinstance(gate_up, QuantizedWeight):
            both = self.norm_linear_quantized(pending.product, *norm, gate_up, bias)
            made = self._down(both, block)
        else:
            made = self._contribution(self._gated(x.norm(block.norm, block.eps), gate_up, bias), *down)
        return ResidualStream(x.kernels, x.rows, made)

    def _attended_mlp(
        self, pending: DeferredAttention, x: ResidualStream, block: MlpBlock, gate_up: QuantizedWeight
    ) -> Contribution:
        """Attend, multiply, add and norm, then multiply by gate and up. A streamed product applies the activation itself and
        returns the maxima of its rows: several programs per row then quantise it.
        """
        following = x.rows, block.norm, block.eps, gate_up, block.gate_up_bias
        attention, normed = pending.block, None
        if pending.attend is None:
            call = PrefillOperands(*pending.operands, attention.scale, attention.window)
            normed = self.attention_normed(call, pending.output, attention.output_bias, *following)
        if normed is None:
            return self._down(self.norm_linear_quantized(pending.attended().product, *following), block)
        if isinstance(block.down, QuantizedWeight):
            activated = self._activated(normed, x.rows, gate_up, block.gate_up_bias)
            if activated is not None:
                gated, maxima = activated
                return DeferredQuantized(self, QuantizedProduct(gated, block.down, block.down_bias, maxima=maxima))
        return self._down(self._second_product(normed, x.rows, gate_up, block.gate_up_bias, parts=False), block)

    def _down(self, both: Tensor, block: MlpBlock) -> Contribution:
        """Return the contribution of an MLP for ``both`` [T, 2 I], the results of gate and up."""
        if isinstance(block.down, QuantizedWeight):
            return DeferredQuantized(self, QuantizedProduct(both, block.down, block.down_bias, gated=True))
        return self._contribution(self.silu_mul(both), block.down, block.down_bias)

    def _gated(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, Tensor):
            return self.linear_silu_mul(x, weight, bias)
        return self.silu_mul(linear(self, x, weight, bias))

    def _mlp(self, x: Tensor, block: MlpBlock) -> Tensor:
        return linear(self, self._gated(x, block.gate_up, block.gate_up_bias), block.down, block.down_bias)

    def experts_block(self, x: ResidualStream, block: ExpertsBlock) -> ResidualStream:
        """Mix the experts; the gate and up product of a shared expert applies the activation itself."""
        return experts_stream(self, x, block, self._mlp)

    def recurrent_block(self, x: ResidualStream, block: RecurrentBlock, tokens: RecurrentTokens) -> ResidualStream:
        """Compose the block, and defer the output product until the next norm."""
        heads = recurrent_heads(self, x.norm(block.norm, block.eps), block, tokens)
        pending = self._contribution(heads, block.output, block.output_bias, block.ranks)
        return ResidualStream(x.kernels, tokens.rows.continued(self, x.rows), pending)

    def _contribution(
        self, x: Tensor, weight: Weight, bias: Tensor | None, ranks: RankBoundary = SINGLE_RANK
    ) -> Contribution:
        """Return the product as a contribution: deferred on one rank."""
        if not ranks.reduces and isinstance(weight, Tensor):
            return DeferredProduct(self, Product(x, weight, bias))
        if not ranks.reduces and isinstance(weight, QuantizedWeight):
            return DeferredQuantized(self, QuantizedProduct(x, weight, bias))
        return Computed(self, linear(self, x, weight, bias), ranks)
