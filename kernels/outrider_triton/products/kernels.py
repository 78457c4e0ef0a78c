"""TritonProducts: the part of the kernel set that multiplies by unquantized weights, alone and fused with what follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from outrider.device import RotaryArgs
from outrider_triton.launch import compile_only, has_kernel
from outrider_triton.products import fused_operators as _fused_ops  # noqa: F401  (these register the operators)
from outrider_triton.products.operands import Product
from outrider_triton.rows import operators as _ops  # noqa: F401
from outrider_triton.rows.rotary import rotates
from outrider_triton.tiles import variants
from outrider_triton.tiles.configs import STREAMED, MatmulConfig, bucket
from outrider_triton.tiles.derive.products import MAX_TOKENS_TUNED, choose_config
from outrider_triton.tiles.facts import DeviceFacts
from outrider_triton.tiles.store.table import Table

_TRITON = torch.ops.outrider


class TritonProducts(variants.WarmedKernels):
    """Products with unquantized weights: Triton's where a measurement or an estimate prefers them to the library's."""

    def __init__(self, facts: DeviceFacts, table: Table | None = None) -> None:
        super().__init__(facts, table)
        self._derived: dict[tuple[str, int, int, int, int], MatmulConfig | None] = {}

    def _products(
        self, operator: str, x: Tensor, weight: Tensor, *, scaled: bool = False, rotary: RotaryArgs | None = None
    ) -> Iterator[list[int]]:
        """Yield every configuration to compile for this weight, once, inside the scope.

        ``scaled``: ``x`` is still to be divided by its root mean square. ``rotary``: the product rotates and writes the
        cache.
        """
        if x.dtype not in (torch.bfloat16, torch.float16) or x.dtype is not weight.dtype or not weight.is_contiguous():
            return
        n, k = weight.shape
        half, cache_dtype = (0, None) if rotary is None else (rotary.k_cache.shape[3] // 2, rotary.k_cache.dtype)
        if self._scope.must_compile((operator, x.dtype, n, k, scaled, cache_dtype, self._layer)):
            for config in self.every_config(operator, str(x.dtype)[6:], n, k, half=half):
                with compile_only():
                    yield config.as_list()

    def every_config(self, operator: str, dtype: str, n: int, k: int, *, half: int = 0) -> Iterable[MatmulConfig]:
        """Return the configurations of :meth:`matmul_config` for any number of tokens."""
        return variants.product_configs(self.facts, self.table, operator, dtype, n=n, k=k, half=half, layer=self._layer)

    def matmul_config(self, operator: str, x: Tensor, weight: Tensor, *, half: int = 0) -> MatmulConfig | None:
        """Return the configuration for ``x [..., K] @ weight.T``, or None for torch's product.

        ``operator`` is one of :data:`outrider_triton.tiles.derive.products.OPERATORS`. The weight of a gated product holds
        gate and up. The consumer of ``linear_parts`` adds the parts of a split product. ``half`` is half a head's size, for
        ``linear_rope``.
        """
        if x.dtype not in (torch.bfloat16, torch.float16) or not weight.is_contiguous() or x.dtype is not weight.dtype:
            return None
        m, (n, k) = x.numel() // x.shape[-1], weight.shape
        if not 0 < m <= MAX_TOKENS_TUNED:
            return None
        table = self.table
        entry = None if table is None else table.entry(operator, str(x.dtype)[6:], n=n, k=k, m=m, layer=self._layer)
        if entry is not None:
            return entry.config
        key = operator, n, k, half, bucket(m)
        if key not in self._derived:
            self._derived[key] = choose_config(self.facts, operator, m=m, n=n, k=k, half=half)
        return self._derived[key]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply with Triton's kernel if it was measured to be faster than the library's for this weight shape and token
        count.
        """
        for config_list in self._products("linear", x, weight):
            _TRITON.linear.triton(_sample(x), weight, bias, config_list, self.pdl)
        config = self.matmul_config("linear", x, weight)
        if config is None:
            return super().linear(x, weight, bias)
        return _TRITON.linear.triton(x, weight, bias, config.as_list(), self.pdl)  # type: ignore[no-any-return]

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply by the gate and up weights and apply SwiGLU, in one kernel if that was faster."""
        for config_list in self._products("linear_silu_mul", x, weight):
            _TRITON.linear_silu_mul.triton(_sample(x), weight, bias, config_list, self.pdl)
        config = self.matmul_config("linear_silu_mul", x, weight)
        if config is None:
            return self.silu_mul(self.linear(x, weight, bias))
        return _TRITON.linear_silu_mul.triton(x, weight, bias, config.as_list(), self.pdl)  # type: ignore[no-any-return]

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
        for config_list in self._products("linear_parts", x, weight) if has_kernel(residual) else ():
            parts = _TRITON.linear_parts.triton(_sample(x), weight, config_list, self.pdl)
            # The kernel writes the residual, so compile with a copy.
            _TRITON.add_rms_norm.triton(parts, bias, _sample(residual).clone(), norm, eps, self.pdl)
        config = self.matmul_config("linear_parts", x, weight)
        if config is None or not has_kernel(residual):
            return self.add_rms_norm(self.linear(x, weight, bias), residual, norm, eps)
        parts = _TRITON.linear_parts.triton(x, weight, config.as_list(), self.pdl)
        return _TRITON.add_rms_norm.triton(parts, bias, residual, norm, eps, self.pdl)  # type: ignore[no-any-return]

    def _pair(
        self, added: Product, residual: Tensor, norm: Tensor, consumer: str, weight: Tensor, *, half: int = 0
    ) -> tuple[MatmulConfig, MatmulConfig] | None:
        """Return configurations of a product that ends a residual row and of the product that takes its norm; None: not
        fused.

        Only bfloat16 is fused: a row before the division by its root mean square may overflow float16.
        """
        if residual.dtype is not torch.bfloat16 or not residual.is_contiguous() or not has_kernel(norm):
            return None
        adding = self.matmul_config("linear_add_scaled", added.x, added.weight)
        taking = self.matmul_config(consumer, residual, weight, half=half)
        return None if adding is None or taking is None else (adding, taking)

    def _scaled(self, added: Product, residual: Tensor, norm: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the scaled row and squares of each variant of a pair's first product; nothing outside the scope."""
        if residual.dtype is torch.bfloat16 and residual.is_contiguous() and has_kernel(norm):
            for config_list in self._products("linear_add_scaled", added.x, added.weight):
                yield _TRITON.linear_add_scaled.triton(
                    _sample(added.x), added.weight, added.bias, _sample(residual).clone(), norm, config_list, self.pdl
                )

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Add the product to the residual in place, in one kernel if that was measured to be faster."""
        for config_list in self._products("linear_add", x, weight) if residual.dtype is x.dtype else ():
            _TRITON.linear_add.triton(_sample(x), weight, bias, _sample(residual).clone(), config_list, self.pdl)
        config = self.matmul_config("linear_add", x, weight)
        if config is None or residual.dtype is not x.dtype or not residual.is_contiguous():
            return residual.add_(self.linear(x, weight, bias))
        _TRITON.linear_add.triton(x, weight, bias, residual, config.as_list(), self.pdl)
        return residual

    def linear_rope_write_cache(self, product: Product, rotary: RotaryArgs) -> Tensor:
        """Multiply to queries, keys and values, rotate them and write the cache, in one kernel if that was faster."""
        half = rotary.k_cache.shape[3] // 2
        for config_list in (
            self._products("linear_rope", product.x, product.weight, rotary=rotary) if rotates(rotary, product.x) else ()
        ):
            if not _boxes_fit_heads(config_list, rotary):
                continue
            sample = _sample(product.x), None, product.weight, product.bias
            _TRITON.rope_write_cache.triton_linear(*sample, 0.0, *_sample_rotary(rotary), config_list, self.pdl)
        config = self.matmul_config("linear_rope", product.x, product.weight, half=half)
        if config is None or not rotates(rotary, product.x) or not _boxes_fit_heads(config.as_list(), rotary):
            return self.head_norm_rope_write_cache(self.linear(*product), None, rotary)
        return _TRITON.rope_write_cache.triton_linear(  # type: ignore[no-any-return]
            product.x, None, product.weight, product.bias, 0.0, *rotary, config.as_list(), self.pdl
        )

    def norm_linear_silu_mul(
        self, added: Product, residual: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Add a product to the residual, multiply its norm by the gate and up weights and apply SwiGLU.

        Uses two kernels if they were measured to be faster than three.
        """
        for scaled, squares in self._scaled(added, residual, norm):
            for config_list in self._products("scaled_silu_mul", scaled, weight):
                _TRITON.linear_silu_mul.triton(scaled, weight, bias, config_list, self.pdl, squares, eps)
        pair = self._pair(added, residual, norm, "scaled_silu_mul", weight)
        if pair is None:
            return self.linear_silu_mul(self.linear_add_rms_norm(*added, residual, norm, eps), weight, bias)
        adding, taking = (config.as_list() for config in pair)
        scaled, squares = _TRITON.linear_add_scaled.triton(*added, residual, norm, adding, self.pdl)
        return _TRITON.linear_silu_mul.triton(scaled, weight, bias, taking, self.pdl, squares, eps)  # type: ignore[no-any-return]

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
            for config_list in self._products("linear_rope", first[0], weight, scaled=True, rotary=rotary):
                if not _boxes_fit_heads(config_list, rotary):
                    continue
                _TRITON.rope_write_cache.triton_linear(
                    *first, weight, bias, eps, *_sample_rotary(rotary), config_list, self.pdl
                )
        pair = self._pair(added, residual, norm, "linear_rope", weight, half=half)
        if pair is None or not rotates(rotary, residual) or not _boxes_fit_heads(pair[1].as_list(), rotary):
            normed = self.linear_add_rms_norm(*added, residual, norm, eps)
            return self.linear_rope_write_cache(Product(normed, weight, bias), rotary)
        adding, taking = (config.as_list() for config in pair)
        scaled, squares = _TRITON.linear_add_scaled.triton(*added, residual, norm, adding, self.pdl)
        return _TRITON.rope_write_cache.triton_linear(  # type: ignore[no-any-return]
            scaled, squares, weight, bias, eps, *rotary, taking, self.pdl
        )


def _sample(x: Tensor) -> Tensor:
    """Return at most the first rows of ``x``: the number of rows does not select a kernel variant."""
    return x.reshape(-1, x.shape[-1])[:4]


def _boxes_fit_heads(config: list[int], rotary: RotaryArgs) -> bool:
    """Return True unless boxes of rows straddle half a head; unstreamed kernels rotate row by row."""
    return config[7] != STREAMED or rotary.k_cache.shape[3] // 2 % config[1] == 0


def _sample_rotary(rotary: RotaryArgs) -> RotaryArgs:
    """Return the rotary arguments of the first rows."""
    return rotary._replace(cos=rotary.cos[:4], sin=rotary.sin[:4], slots=rotary.slots[:4])
