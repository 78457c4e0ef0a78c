"""The blocks of a layer with fewer kernels: products are deferred until the next norm, and fused with it.

The residual stream of these blocks carries a product, or attention and its product, that the next block computes together
with its norm and first product.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.device import (
    AttentionBlock,
    AttentionMetadata,
    AttentionTokens,
    Contribution,
    ExpertsBlock,
    KernelSet,
    LayerRows,
    MlpBlock,
    QuantizedWeight,
    RankBoundary,
    RecurrentBlock,
    RecurrentTokens,
    ResidualStream,
    Weight,
)
from outrider.device.kernels.blocks import (
    Attend,
    attended_rows,
    continued_queries,
    contributed,
    experts_stream,
    gated_heads,
    recurrent_heads,
    routed,
    split_gate,
    write_heads,
)
from outrider.device.kernels.residual import SINGLE_RANK, Computed
from outrider.device.kernels.weights import linear
from outrider_triton.attention.cached import CacheAttention
from outrider_triton.attention.prefill import PrefillOperands
from outrider_triton.experts.router import MAX_ROUTED_TOKENS, multiplies_router
from outrider_triton.launch import has_kernel
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
        out = attend(*self.operands, **self.block.attention_options)
        product = QuantizedProduct(out.reshape(out.shape[0], -1), self.output, self.block.output_bias)
        return DeferredQuantized(self.products, product)


@dataclass(frozen=True, slots=True)
class DeferredExperts(Contribution):
    """The results [T, C, H] of each token's experts, whose sum the next norm adds to the residual stream."""

    results: Tensor
    pdl: bool

    def add(self, rows: Tensor) -> Tensor:
        """Add the sums to the residual ``rows`` [T, H] and return them."""
        self.add_rms_norm(rows, rows.new_ones(rows.shape[1]), 1.0)
        return rows

    def add_rms_norm(self, rows: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add the sums to ``rows`` [T, H] and return the norm, in one kernel."""
        parts = self.results.transpose(0, 1)
        return torch.ops.outrider.add_rms_norm.triton(parts, None, rows, norm, eps, self.pdl)  # type: ignore[no-any-return]


class FusedBlocks(KernelSet):
    """The blocks of a layer, whose products are fused with the norms, rotations and activations around them."""

    pdl: bool
    dense: DenseProducts
    quantized: QuantizedProducts
    attention: CacheAttention
    _max_routed_tokens = MAX_ROUTED_TOKENS

    def attention_block(
        self, x: ResidualStream, block: AttentionBlock, tokens: AttentionTokens, *, attend: Attend | None = None
    ) -> ResidualStream:
        """Fuse norm, product and rotation where configurations allow it, and defer the output product."""
        q, gate = self._queries(x, block, tokens)
        scaled = block.gated or block.output_scales is not None or block.ranks.reduces
        if isinstance(block.output, QuantizedWeight) and not scaled:
            operands = continued_queries(self, q, tokens), *tokens.rotary[2:4], tokens.attention
            pending: Contribution = DeferredAttention(self, self.quantized, operands, block, block.output, attend)
        else:
            deferred = None
            if gate is not None and _defers_gate(block, tokens.rows):
                deferred, gate = HeadGate(gate.unflatten(1, q.shape[1:])), None
            attended = attended_rows(self, q, gate, block, tokens, attend or self.paged_attention)
            pending = self._contribution(attended, block.output, block.output_bias, block.ranks, deferred)
        return ResidualStream(x.kernels, tokens.rows.continued(self, x.rows), pending)

    def mlp_block(self, x: ResidualStream, block: MlpBlock) -> ResidualStream:
        """Fuse norm, gate and up product and activation where configurations allow it, and defer the down product."""
        pending, gate_up, bias = x.pending, block.gate_up, block.gate_up_bias
        norm, down = (x.rows, block.norm, block.eps), (block.down, block.down_bias)
        if block.ranks.reduces:
            normed = block.ranks.gather_tokens(x.norm(block.norm, block.eps))
            value = linear(self, self._gated_product(normed, gate_up, bias), *down)
            made: Contribution = Computed(self, block.ranks.scatter_tokens(value, x.rows.shape[0]), block.ranks)
        elif isinstance(pending, DeferredAttention) and isinstance(gate_up, QuantizedWeight):
            made = self._attended_mlp(pending, x, block, gate_up)
        elif isinstance(pending, DeferredProduct) and isinstance(gate_up, Tensor):
            made = self._contribution(self.dense.norm_linear_silu_mul(pending.product, *norm, gate_up, bias), *down)
        elif isinstance(pending, DeferredQuantized) and isinstance(gate_up, QuantizedWeight):
            both = self.quantized.norm_linear_quantized(pending.product, *norm, gate_up, bias)
            made = self._down_product(both, block)
        else:
            made = self._contribution(self._gated_product(x.norm(block.norm, block.eps), gate_up, bias), *down)
        return ResidualStream(x.kernels, x.rows, made)

    def experts_block(self, x: ResidualStream, block: ExpertsBlock) -> ResidualStream:
        """Mix the experts. The next norm adds up their results; the gate and up product of a shared expert applies the
        activation itself.
        """
        if block.shared is None and block.held is None and not block.ranks.reduces:
            normed, shares, chosen = routed(self, x, block)
            results = self._expert_results(normed, shares, chosen, block)
            if results.dim() == 3:
                return ResidualStream(x.kernels, x.rows, DeferredExperts(results, self.pdl))
            return contributed(self, x.rows, results, block.ranks)

        def mlp(normed: Tensor, shared: MlpBlock) -> Tensor:
            gated = self._gated_product(normed, shared.gate_up, shared.gate_up_bias)
            return linear(self, gated, shared.down, shared.down_bias)

        return experts_stream(self, x, block, mlp)

    def _router_logits(self, x: Tensor, block: ExpertsBlock) -> Tensor:
        """Multiply few tokens by a router in float32 without a copy of the tokens in float32."""
        if x.shape[0] > self._max_routed_tokens or not multiplies_router(x, block.router):
            return super()._router_logits(x, block)
        return torch.ops.outrider.router_logits.triton(x, block.router, block.router_bias, self.pdl)  # type: ignore[no-any-return]

    @abstractmethod
    def _expert_results(self, x: Tensor, shares: Tensor, chosen: Tensor, block: ExpertsBlock) -> Tensor: ...

    def _add_gated(self, value: Tensor, result: Tensor, x: Tensor, gate: Weight) -> None:
        """Multiply a shared expert's gate, apply the gate and add the expert's result in one kernel."""
        if isinstance(gate, Tensor) and has_kernel(x):
            torch.ops.outrider.add_gated.triton(value, result, x, gate, self.pdl)
        else:
            super()._add_gated(value, result, x, gate)

    def recurrent_block(self, x: ResidualStream, block: RecurrentBlock, tokens: RecurrentTokens) -> ResidualStream:
        """Compose the recurrent block of its kernels, and defer the output product until the next norm."""
        heads, values = recurrent_heads(self, self._projections(x, block), block, tokens)
        gate = HeadGate(values, block.rule.norm, block.eps) if _defers_gate(block, tokens.rows) else None
        rows = gated_heads(self, heads, values, block, tokens) if gate is None else heads.flatten(1)
        pending = self._contribution(rows, block.output, block.output_bias, block.ranks, gate)
        return ResidualStream(x.kernels, tokens.rows.continued(self, x.rows), pending)

    def _queries(self, x: ResidualStream, block: AttentionBlock, tokens: AttentionTokens) -> tuple[Tensor, Tensor | None]:
        """Return rotated queries [T, Hq, D] and the gate [T, Hq D]; write keys and values to the cache."""
        pending, qkv, bias, rotary = x.pending, block.qkv, block.qkv_bias, tokens.rotary
        # Without norms, scales and a gate between the product and the rotation, one kernel can do both.
        rotates_product = block.head_norms is None and block.input_scales is None and not block.gated
        made = None
        if block.norm is not None:
            norm = x.rows, block.norm, block.eps
            if isinstance(pending, DeferredProduct) and isinstance(qkv, Tensor) and rotates_product:
                return self.dense.norm_linear_rope_write_cache(pending.product, *norm, qkv, bias, rotary), None
            if isinstance(pending, DeferredQuantized) and isinstance(qkv, QuantizedWeight):
                operands = pending.product, *norm, qkv, bias
                if rotates_product:
                    return self.quantized.norm_linear_quantized_rope_write_cache(*operands, rotary), None
                made = self.quantized.norm_linear_quantized(*operands)
        if made is None:
            normed = x.norm(block.norm, block.eps)
            if rotates_product and isinstance(qkv, Tensor):
                return self.dense.linear_rope_write_cache(Product(normed, qkv, bias), rotary), None
            if rotates_product and isinstance(qkv, QuantizedWeight):
                return self.quantized.linear_quantized_rope_write_cache(normed, qkv, bias, rotary), None
            made = linear(self, normed, qkv, bias)
        heads, gate = split_gate(made, block)
        return write_heads(self, heads, block, tokens), gate

    def _projections(self, x: ResidualStream, block: RecurrentBlock) -> list[Tensor]:
        """Return the product [T, ...] of the normalised rows and each weight of ``block.projections``. The norm's kernel
        quantises the rows for a first weight with quantised activations.
        """
        (first, *others), pending = block.projections, x.pending
        if isinstance(pending, DeferredQuantized) and isinstance(first, QuantizedWeight) and has_dynamic_activations(first):
            norm = x.rows, block.norm, block.eps
            if not others:
                return [self.quantized.norm_linear_quantized(pending.product, *norm, first)]
            normed = torch.empty_like(x.rows)
            product = self.quantized.norm_linear_quantized(pending.product, *norm, first, unquantized=normed)
            return [product, *(linear(self, normed, each) for each in others)]
        normed = x.norm(block.norm, block.eps)
        return [linear(self, normed, each) for each in block.projections]

    def _attended_mlp(
        self, pending: DeferredAttention, x: ResidualStream, block: MlpBlock, gate_up: QuantizedWeight
    ) -> Contribution:
        """Compute the deferred attention ``pending`` and its output product, add the product to ``x``, and compute the MLP
        ``block`` of the norm. Return the MLP's down product, which stays deferred.

        A streamed gate and up product applies the activation itself, and returns the maxima of its rows for the kernel that
        quantises them.
        """
        following = x.rows, block.norm, block.eps, gate_up, block.gate_up_bias
        attention, made = pending.block, None
        if pending.attend is None:
            call = PrefillOperands(*pending.operands, **attention.attention_options)
            projected = x.rows[:, :1].expand(-1, pending.output.shape[1])  # only the shape and dtype are used
            added = QuantizedProduct(projected, pending.output, attention.output_bias)
            activates, taken = isinstance(block.down, QuantizedWeight), self.attention.rows_for(call, pending.output)
            made = self.quantized.norm_gates(added, *following, activates=activates, taken=taken)
        if made is None:
            made = self.quantized.norm_linear_quantized(pending.attended().product, *following), None
        rows, maxima = made
        if maxima is None or not isinstance(block.down, QuantizedWeight):
            return self._down_product(rows, block)
        return DeferredQuantized(self.quantized, QuantizedProduct(rows, block.down, block.down_bias, maxima=maxima))

    def _down_product(self, both: Tensor, block: MlpBlock) -> Contribution:
        """Return the MLP's deferred down product for ``both`` [T, 2 I], the results of gate and up."""
        if isinstance(block.down, QuantizedWeight):
            return DeferredQuantized(self.quantized, QuantizedProduct(both, block.down, block.down_bias, gated=True))
        return self._contribution(self.silu_mul(both), block.down, block.down_bias)

    def _gated_product(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """Return SwiGLU [T, I] of the rows ``x`` [T, H], multiplied by the gate and up ``weight``."""
        if isinstance(weight, Tensor):
            return self.dense.linear_silu_mul(x, weight, bias)
        return self.silu_mul(linear(self, x, weight, bias))

    def _contribution(
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
            return DeferredProduct(self.dense, Product(x, weight, bias))
        if not ranks.reduces and isinstance(weight, QuantizedWeight):
            return DeferredQuantized(self.quantized, QuantizedProduct(x, weight, bias, gate=gate))
        return Computed(self, linear(self, x, weight, bias), ranks)


def _defers_gate(block: AttentionBlock | RecurrentBlock, rows: LayerRows) -> bool:
    """Return True if the kernel that quantises rows for the block's output product can apply the block's gate."""
    return isinstance(block.output, QuantizedWeight) and not block.ranks.reduces and rows.kept is None
