"""DenseProducts: products with unquantized weights, alone and fused with the kernels around them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from outrider.device import KernelSet, RotaryArgs
from outrider_triton import rows as _row_operators  # noqa: F401  (registers the operators)
from outrider_triton.launch import compile_only, has_kernel
from outrider_triton.products import operators as _product_operators  # noqa: F401  (registers the operators)
from outrider_triton.products.operands import Product
from outrider_triton.rows import rotates
from outrider_triton.tiles.configs import STREAMED, MatmulConfig
from outrider_triton.tiles.selection import TileSelection

_TRITON = torch.ops.outrider


class DenseProducts:
    """Products with unquantized weights: Triton's where a measurement or an estimate prefers them to the library's.

    ``kernels`` computes the parts of a product that isn't fused.
    """

    def __init__(self, kernels: KernelSet, tiles: TileSelection) -> None:
        self._kernels, self._tiles, self._pdl = kernels, tiles, tiles.facts.pdl

    def uncompiled(
        self, operator: str, x: Tensor, weight: Tensor, *, scaled: bool = False, rotary: RotaryArgs | None = None
    ) -> Iterator[list[int]]:
        """Yield every tile configuration of this weight's product. The caller launches each, which only compiles it. Yield
        nothing outside the scope of variants, or for a weight whose variants were compiled before.

        ``scaled``: ``x`` is still to be divided by its root mean square. ``rotary``: the product rotates and writes the
        cache.
        """
        if not _has_product(x, weight):
            return
        n, k = weight.shape
        half, cache_dtype = (0, None) if rotary is None else (rotary.k_cache.shape[3] // 2, rotary.k_cache.dtype)
        tiles = self._tiles
        if tiles.scope.must_compile((operator, x.dtype, n, k, scaled, cache_dtype, tiles.layer)):
            for config in tiles.every_product(operator, str(x.dtype)[6:], n=n, k=k, half=half):
                with compile_only():
                    yield config.as_list()

    def matmul_config(self, operator: str, x: Tensor, weight: Tensor, *, half: int = 0) -> MatmulConfig | None:
        """Return the configuration for ``x [..., K] @ weight.T``, or None for torch's product.

        ``operator`` is one of :data:`outrider_triton.tiles.derive.products.OPERATORS`. The weight of a gated product holds
        gate and up. The consumer of ``linear_parts`` adds the parts of a split product. ``half`` is half a head's size, for
        ``linear_rope``.
        """
        if not _has_product(x, weight):
            return None
        n, k = weight.shape
        return self._tiles.product(operator, str(x.dtype)[6:], m=x.numel() // x.shape[-1], n=n, k=k, half=half)

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply by the gate and up weights and apply SwiGLU, in one kernel if that was faster."""
        for config_list in self.uncompiled("linear_silu_mul", x, weight):
            _TRITON.linear_silu_mul.triton(first_rows(x), weight, bias, config_list, self._pdl)
        config = self.matmul_config("linear_silu_mul", x, weight)
        if config is None:
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
        for config_list in self.uncompiled("linear_parts", x, weight) if has_kernel(residual) else ():
            parts = _TRITON.linear_parts.triton(first_rows(x), weight, config_list, self._pdl)
            # The kernel writes the residual, so compile with a copy.
            _TRITON.add_rms_norm.triton(parts, bias, first_rows(residual).clone(), norm, eps, self._pdl)
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

    def _scaled(self, added: Product, residual: Tensor, norm: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the scaled row and the squares of each variant of a fused pair's first product, for compilation; nothing
        outside the scope of variants.
        """
        if residual.dtype is torch.bfloat16 and residual.is_contiguous() and has_kernel(norm):
            for config_list in self.uncompiled("linear_add_scaled", added.x, added.weight):
                yield _TRITON.linear_add_scaled.triton(
                    first_rows(added.x), added.weight, added.bias, first_rows(residual).clone(), norm, config_list, self._pdl
                )

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Add the product to the residual in place, in one kernel if that was measured to be faster."""
        for config_list in self.uncompiled("linear_add", x, weight) if residual.dtype is x.dtype else ():
            _TRITON.linear_add.triton(first_rows(x), weight, bias, first_rows(residual).clone(), config_list, self._pdl)
        config = self.matmul_config("linear_add", x, weight)
        if config is None or residual.dtype is not x.dtype or not residual.is_contiguous():
            return residual.add_(self._kernels.linear(x, weight, bias))
        _TRITON.linear_add.triton(x, weight, bias, residual, config.as_list(), self._pdl)
        return residual

    def linear_rope_write_cache(self, product: Product, rotary: RotaryArgs) -> Tensor:
        """Multiply to queries, keys and values, rotate them and write the cache, in one kernel if that was faster."""
        half = rotary.k_cache.shape[3] // 2
        for config_list in (
            self.uncompiled("linear_rope", product.x, product.weight, rotary=rotary) if rotates(rotary, product.x) else ()
        ):
            if not _boxes_fit_heads(config_list, rotary):
                continue
            sample = first_rows(product.x), None, product.weight, product.bias
            _TRITON.rope_write_cache.triton_linear(*sample, 0.0, *_sample_rotary(rotary), config_list, self._pdl)
        config = self.matmul_config("linear_rope", product.x, product.weight, half=half)
        if config is None or not rotates(rotary, product.x) or not _boxes_fit_heads(config.as_list(), rotary):
            return self._kernels.head_norm_rope_write_cache(self._kernels.linear(*product), None, rotary)
        return _TRITON.rope_write_cache.triton_linear(  # type: ignore[no-any-return]
            product.x, None, product.weight, product.bias, 0.0, *rotary, config.as_list(), self._pdl
        )

    def norm_linear_silu_mul(
        self, added: Product, residual: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Add a product to the residual, multiply its norm by the gate and up weights and apply SwiGLU.

        Uses two kernels if they were measured to be faster than three.
        """
        for scaled, squares in self._scaled(added, residual, norm):
            for config_list in self.uncompiled("scaled_silu_mul", scaled, weight):
                _TRITON.linear_silu_mul.triton(scaled, weight, bias, config_list, self._pdl, squares, eps)
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
        half = rotary.k_cache.shape[3] // 2
        for first in self._scaled(added, residual, norm) if rotates(rotary, residual) else ():
            for config_list in self.uncompiled("linear_rope", first[0], weight, scaled=True, rotary=rotary):
                if not _boxes_fit_heads(config_list, rotary):
                    continue
                _TRITON.rope_write_cache.triton_linear(
                    *first, weight, bias, eps, *_sample_rotary(rotary), config_list, self._pdl
                )
        pair = self._pair(added, residual, norm, "linear_rope", weight, half=half)
        if pair is None or not rotates(rotary, residual) or not _boxes_fit_heads(pair[1].as_list(), rotary):
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


def first_rows(x: Tensor) -> Tensor:
    """Return at most four rows of ``x``, as operands for compilation: the number of rows does not select a kernel variant."""
    return x.reshape(-1, x.shape[-1])[:4]


def _boxes_fit_heads(config: list[int], rotary: RotaryArgs) -> bool:
    """Return True unless a copy-engine box of a streamed product has rows of both halves of a head. Unstreamed kernels rotate
    row by row.
    """
    return config[7] != STREAMED or rotary.k_cache.shape[3] // 2 % config[1] == 0


def _sample_rotary(rotary: RotaryArgs) -> RotaryArgs:
    """Return the rotary arguments of at most four tokens, as operands for compilation."""
    return rotary._replace(cos=rotary.cos[:4], sin=rotary.sin[:4], slots=rotary.slots[:4])
