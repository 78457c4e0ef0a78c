"""The fusions of Triton's kernels as their parts one after the other: what they are compared with."""

import torch

from outrider.device import KernelSet
from outrider_triton.products import Product, QuantizedProduct


class UnfusedProducts(KernelSet):
    """Each fusion composed of the primitives of the set."""

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
        return residual.add_(self.linear_quantized(added.silu_mul(self), added.weight, added.bias))

    def linear_quantized_add_rms_norm(self, added, residual, norm, eps):
        return self.add_rms_norm(self.linear_quantized(added.silu_mul(self), added.weight, added.bias), residual, norm, eps)

    def linear_quantized_rope_write_cache(self, x, weight, bias, rotary):
        return UnfusedProducts._turned(self, self.linear_quantized(x, weight, bias), rotary)

    def norm_linear_quantized(self, added, residual, norm, eps, weight, bias=None):
        return self.linear_quantized(self.linear_quantized_add_rms_norm(added, residual, norm, eps), weight, bias)

    def norm_linear_quantized_rope_write_cache(self, added, residual, norm, eps, weight, bias, rotary):
        return UnfusedProducts._turned(self, self.norm_linear_quantized(added, residual, norm, eps, weight, bias), rotary)

    def attention_norm_linear_quantized(
        self, q, k_cache, v_cache, metadata, output, output_bias, residual, norm, eps, weight, bias=None, *, scale, window=0
    ):
        attended = self.paged_attention(q, k_cache, v_cache, metadata, scale=scale, window=window)
        added = QuantizedProduct(attended.reshape(q.shape[0], -1), output, output_bias)
        return self.norm_linear_quantized(added, residual, norm, eps, weight, bias)

    def attention_norm_linear_silu_mul_quantized(self, *operands, scale, window=0):
        *joined, down, down_bias = operands
        both = self.attention_norm_linear_quantized(*joined, scale=scale, window=window)
        return QuantizedProduct(both, down, down_bias, gated=True)

    def embed_beside(self, tokens, weight, hidden):
        return torch.cat((self.embedding(tokens, weight), hidden), dim=-1)

    def _turned(self, qkv, rotary):
        q, k, v = rotary.split(qkv)
        self.rope_write_cache(q, k, v, *rotary)
        return q
