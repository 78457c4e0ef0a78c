"""DenseProducts: products with unquantized weights, alone and fused with the kernels around them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from outrider.device import KernelSet, RotaryArgs
from outrider_triton import rows as _row_operators  # noqa: F401  (registers the operators)
from outrider_triton.launch import has_kernel
from outrider_triton.products import operators as _product_operators  # noqa: F401  (registers the operators)
from outrider_triton.products.operands import Product, rotary_like, rows_like
from outrider_triton.rows import rotates
from outrider_triton.tiles.configs import PREFILL_GATES, STREAMED, MatmulConfig
from outrider_triton.tiles.selection import TileSelection

_TRITON = torch.ops.outrider


class DenseProducts:
    """Products with unquantized weights: Triton's where a measurement or an estimate prefers them to the library's.

    ``kernels`` computes the parts of a product that isn't fused. In the scope of variants, each method first computes
    uninitialised rows of other numbers of tokens, which compiles the kernels that they need.
    """

    def __init__(self, kernels: KernelSet, tiles: TileSelection) -> None:
        self._kernels, self._tiles, self._pdl = kernels, tiles, tiles.facts.pdl

    def samples(self, operator: str, x: Tensor, weight: Tensor, *variant: object) -> Iterator[int]:
        """Yield :meth:`~outrider_triton.tiles.selection.TileSelection.samples` of this weight and rows like ``x``, or nothing
        for operands without a kernel.
        """
        return self._tiles.samples(operator, x.dtype, weight.shape, *variant) if _has_product(x, weight) else iter(())

    def matmul_config(self, operator: str, x: Tensor, weight: Tensor, *, half: int = 0) -> MatmulConfig | None:
        """Return the configuration for ``x [..., K] @ weight.T``, or None for torch's product.

        ``operator`` is one of :data:`outrider_triton.tiles.derive.fits.OPERATORS`. The weight of a gated product holds
        gate and up. The consumer of ``linear_parts`` adds the parts of a split product. ``half`` is half a head's size, for
        ``linear_rope``.
        """
        if not _has_product(x, weight):
            return None
        n, k = weight.shape
        return self._tiles.product(operator, str(x.dtype)[6:], m=x.numel() // x.shape[-1], n=n, k=k, half=half)

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply by the gate and up weights and apply SwiGLU, in one kernel if that was faster."""
        for count in self.samples("linear_silu_mul", x, weight, bias is None):
            self.linear_silu_mul(rows_like(x, count), weight, bias)
        config = self.matmul_config("linear_silu_mul", x, weight)
        if config is None or (bias is not None and config.descriptor == PREFILL_GATES):
            return self._kernels.silu_mul(self._kernels.linear(x, weight, bias))
        return _TRITON.linear_silu_mul.triton(x, weight, bias, config.as_list(), self._pdl)  # type: ignore[no-any-return]

    def linear_add_rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
    ) -> Tensor:
        """Multiply, add the product to the residual and return the norm; the norm kernel sums the parts of a
        split product.
        """
        for count in self.samples("linear_add_rms_norm", x, weight, bias is None, residual.dtype, norm.dtype):
            self.linear_add_rms_norm(rows_like(x, count), weight, bias, rows_like(residual, count), norm, eps)
        config = self.matmul_config("linear_parts", x, weight)
        if config is None or not has_kernel(residual):
            return self._kernels.add_rms_norm(self._kernels.linear(x, weight, bias), residual, norm, eps)
        parts = _TRITON.linear_parts.triton(x, weight, config.as_list(), self._pdl)
        return _TRITON.add_rms_norm.triton(parts, bias, residual, norm, eps, self._pdl)  # type: ignore[no-any-return]

    def _pair(
        self, added: Product, residual: Tensor, norm: Tensor, consumer: str, weight: Tensor, *, half: int = 0
    ) -> tuple[MatmulConfig, MatmulConfig] | None:
        """Return the configurations of a product that ends a residual row, and of the following product that reads the row's
        norm; None if they aren't fused.

        Only bfloat16 is fused: a row before the division by its root mean square may overflow float16.
        """
        if residual.dtype is not torch.bfloat16 or not residual.is_contiguous() or not has_kernel(norm):
            return None
        adding = self.matmul_config("linear_add_scaled", added.x, added.weight)
        taking = self.matmul_config(consumer, residual, weight, half=half)
        return None if adding is None or taking is None else (adding, taking)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Add the product to the residual in place, in one kernel if that was measured to be faster."""
        for count in self.samples("linear_add", x, weight, bias is None, residual.dtype):
            self.linear_add(rows_like(x, count), weight, bias, rows_like(residual, count))
        config = self.matmul_config("linear_add", x, weight)
        if config is None or residual.dtype is not x.dtype or not residual.is_contiguous():
            return residual.add_(self._kernels.linear(x, weight, bias))
        _TRITON.linear_add.triton(x, weight, bias, residual, config.as_list(), self._pdl)
        return residual

    def linear_rope_write_cache(self, product: Product, rotary: RotaryArgs) -> Tensor:
        """Multiply to queries, keys and values, rotate them and write the cache, in one kernel if that was faster."""
        x, weight, bias = product
        half, config = rotary.k_cache.shape[3] // 2, None
        if rotates(rotary, x):
            for count in self.samples("linear_rope", x, weight, bias is None, *_cache_variant(rotary)):
                self.linear_rope_write_cache(Product(rows_like(x, count), weight, bias), rotary_like(rotary, count))
            config = self.matmul_config("linear_rope", x, weight, half=half)
        if config is None or not _boxes_fit_heads(config, half):
            return self._kernels.head_norm_rope_write_cache(self._kernels.linear(*product), None, rotary)
        return _TRITON.rope_write_cache.triton_linear(  # type: ignore[no-any-return]
            x, None, weight, bias, 0.0, *rotary, config.as_list(), self._pdl
        )

    def norm_linear_silu_mul(
        self, added: Product, residual: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Add a product to the residual, multiply its norm by the gate and up weights and apply SwiGLU.

        Uses two kernels if they were measured to be faster than three.
        """
        variant = bias is None, added.weight.shape, added.bias is None, norm.dtype
        for count in self.samples("norm_linear_silu_mul", residual, weight, *variant):
            sample = added._replace(x=rows_like(added.x, count)), rows_like(residual, count)
            self.norm_linear_silu_mul(*sample, norm, eps, weight, bias)
        pair = self._pair(added, residual, norm, "scaled_silu_mul", weight)
        if pair is None:
            return self.linear_silu_mul(self.linear_add_rms_norm(*added, residual, norm, eps), weight, bias)
        adding, taking = (config.as_list() for config in pair)
        scaled, squares = _TRITON.linear_add_scaled.triton(*added, residual, norm, adding, self._pdl)
        return _TRITON.linear_silu_mul.triton(scaled, weight, bias, taking, self._pdl, squares, eps)  # type: ignore[no-any-return]

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
        """Add a product to the residual, multiply its norm to queries, keys and values, rotate them and write the cache.

        Uses two kernels if they were measured to be faster than four.
        """
        half, pair = rotary.k_cache.shape[3] // 2, None
        if rotates(rotary, residual):
            variant = bias is None, added.weight.shape, added.bias is None, norm.dtype, *_cache_variant(rotary)
            for count in self.samples("norm_linear_rope", residual, weight, *variant):
                sample = added._replace(x=rows_like(added.x, count)), rows_like(residual, count)
                self.norm_linear_rope_write_cache(*sample, norm, eps, weight, bias, rotary_like(rotary, count))
            pair = self._pair(added, residual, norm, "linear_rope", weight, half=half)
        if pair is None or not _boxes_fit_heads(pair[1], half):
            normed = self.linear_add_rms_norm(*added, residual, norm, eps)
            return self.linear_rope_write_cache(Product(normed, weight, bias), rotary)
        adding, taking = (config.as_list() for config in pair)
        scaled, squares = _TRITON.linear_add_scaled.triton(*added, residual, norm, adding, self._pdl)
        return _TRITON.rope_write_cache.triton_linear(  # type: ignore[no-any-return]
            scaled, squares, weight, bias, eps, *rotary, taking, self._pdl
        )


def _has_product(x: Tensor, weight: Tensor) -> bool:
    """Return True if Triton's product kernels accept operands of these dtypes."""
    return x.dtype in (torch.bfloat16, torch.float16) and x.dtype is weight.dtype and weight.is_contiguous()


def _cache_variant(rotary: RotaryArgs) -> tuple[object, ...]:
    return rotary.k_cache.dtype, rotary.k_cache.shape[1:]


def _boxes_fit_heads(config: MatmulConfig, half: int) -> bool:
    """Return True unless a copy-engine box of a streamed product has rows of both halves of a head, of ``half`` rows each.
    Unstreamed kernels rotate row by row.
    """
    return config.descriptor != STREAMED or half % config.block_n == 0
