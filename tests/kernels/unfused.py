"""The fusions of Triton's kernels as their parts one after the other: what they are compared with."""

import torch

from outrider.device import AttentionBlock, KernelSet, MlpBlock, ResidualStream
from outrider_triton.blocks import DeferredAttention
from outrider_triton.products.operands import Product, QuantizedProduct


class UnfusedProducts(KernelSet):
    """Each fusion composed of the primitives of the set."""

    @property
    def dense(self):
        return self

    @property
    def quantized(self):
        return self

    def linear_silu_mul(self, x, weight, bias=None):
        return self.silu_mul(self.linear(x, weight, bias))

    def linear_add_rms_norm(self, x, weight, bias, residual, norm, eps):
        return self.add_rms_norm(self.linear(x, weight, bias), residual, norm, eps)

    def linear_add(self, x, weight, bias, residual):
        return residual.add_(self.linear(x, weight, bias))

    def linear_rope_write_cache(self, product, rotary):
        return UnfusedProducts._turned(self, self.linear(*product), rotary)

    def norm_linear_silu_mul(self, added, residual, norm, eps, weight, bias):
        normed = UnfusedProducts.linear_add_rms_norm(self, *added, residual, norm, eps)
        return UnfusedProducts.linear_silu_mul(self, normed, weight, bias)

    def norm_linear_rope_write_cache(self, added, residual, norm, eps, weight, bias, rotary):
        normed = UnfusedProducts.linear_add_rms_norm(self, *added, residual, norm, eps)
        return UnfusedProducts.linear_rope_write_cache(self, Product(normed, weight, bias), rotary)

    def linear_quantized_add(self, added, residual):
        return residual.add_(self.linear_quantized(added.gate_rows(self), added.weight, added.bias))

    def linear_quantized_add_rms_norm(self, added, residual, norm, eps):
        return self.add_rms_norm(self.linear_quantized(added.gate_rows(self), added.weight, added.bias), residual, norm, eps)

    def linear_quantized_rope_write_cache(self, x, weight, bias, rotary):
        return UnfusedProducts._turned(self, self.linear_quantized(x, weight, bias), rotary)

    def norm_linear_quantized(self, added, residual, norm, eps, weight, bias=None):
        normed = self.quantized.linear_quantized_add_rms_norm(added, residual, norm, eps)
        return self.linear_quantized(normed, weight, bias)

    def norm_linear_quantized_rope_write_cache(self, added, residual, norm, eps, weight, bias, rotary):
        return UnfusedProducts._turned(
            self, self.quantized.norm_linear_quantized(added, residual, norm, eps, weight, bias), rotary
        )

    def embed_beside(self, tokens, weight, hidden):
        return torch.cat((self.gather_rows(weight, tokens), hidden), dim=-1)

    def _turned(self, qkv, rotary):
        q, k, v = rotary.split(qkv)
        self.rope_write_cache(q, k, v, *rotary)
        return q


def attended_mlp(
    kernels, q, k_cache, v_cache, metadata, output, bias, residual, norm, eps, weight, weight_bias, down, down_bias, *, scale
):
    """Return what the down product of an MLP behind attention takes, as the blocks of Triton's ``kernels`` compute it."""
    attention = AttentionBlock(norm=None, eps=eps, qkv=output, output=output, output_bias=bias, scale=scale)
    mlp = MlpBlock(norm=norm, eps=eps, gate_up=weight, gate_up_bias=weight_bias, down=down, down_bias=down_bias)
    pending = DeferredAttention(kernels, kernels.quantized, (q, k_cache, v_cache, metadata), attention, output, None)
    return kernels.mlp_block(ResidualStream(kernels, residual, pending), mlp).pending.product


def unfused_mlp(
    kernels, q, k_cache, v_cache, metadata, output, bias, residual, norm, eps, weight, weight_bias, down, down_bias, *, scale
):
    """Return the same with attention and the product behind it by themselves."""
    attended = kernels.paged_attention(q, k_cache, v_cache, metadata, scale=scale)
    added = QuantizedProduct(attended.reshape(q.shape[0], -1), output, bias)
    both = kernels.quantized.norm_linear_quantized(added, residual, norm, eps, weight, weight_bias)
    return QuantizedProduct(both, down, down_bias, gated=True)


def scaled_mm(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
    """Return cuBLAS's product of e4m3 operands, with a scale per row, or per group of 128 columns and block of 128 x 128.

    It wants the scales of a group of columns next to each other, and rows in multiples of four.
    """
    (m, k), n = a.shape, b.shape[1]
    by_group = scale_a.shape[1] > 1
    assert use_fast_accum is not by_group
    if by_group:
        assert m % 4 == 0
        assert scale_a.shape == (m, k // 128)
        assert scale_a.stride() == (1, m)
        assert scale_b.shape == (k // 128, n // 128)
        assert scale_b.stride() == (1, k // 128)
        scale_a, scale_b = scale_a.repeat_interleave(128, 1), scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)
