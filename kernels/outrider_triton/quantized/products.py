"""QuantizedProducts: products with quantised weights, alone and fused with the kernels around them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from outrider.device import KernelSet, QuantizedWeight, RotaryArgs
from outrider_triton.launch import compile_only, has_kernel
from outrider_triton.products.operands import QuantizedProduct
from outrider_triton.quantized import library
from outrider_triton.quantized import operators as _quantized_ops  # noqa: F401
from outrider_triton.quantized.activations import quantizes_gated
from outrider_triton.quantized.formats import TRITON_FORMATS
from outrider_triton.quantized.nibble_planes import INT8_COMPONENTS, allocate_rows, computes_swiglu, row_layout
from outrider_triton.quantized.operators import (
    MAX_ROW_ELEMENTS,
    ProductPlan,
    activation_dtype,
    plan,
    quantized_rows,
    sum_parts,
)
from outrider_triton.rows import rotates
from outrider_triton.tiles.configs import STREAMED, MatmulConfig
from outrider_triton.tiles.derive.quantized import OperandStorage
from outrider_triton.tiles.selection import TileSelection

_TRITON = torch.ops.outrider


class TokenRows(NamedTuple):
    """The token rows of a product, in the format that its kernel reads."""

    x: Tensor
    """The rows [T, K] as computed, quantised or in nibble-plane layout."""
    scales: Tensor | None
    """Scales of quantised rows; None if the rows are not quantised."""
    in_planes: bool = False
    """True if ``x`` has a nibble-plane layout."""
    gated: bool = False
    """True if ``x`` has gate and up, [T, 2 K], and the product's kernel computes SwiGLU."""


class NormedRows(NamedTuple):
    """The rows of a norm, and the plan of the product that multiplies them next."""

    rows: Tensor
    """Normalised rows, quantised if ``scales`` aren't None, in the layout that the product takes."""
    scales: Tensor | None
    product_plan: ProductPlan
    """Plan of the following product."""
    config: MatmulConfig | None
    """Tile configuration of the following product; None: the library multiplies the quantised rows."""


class QuantizedProducts:
    """The launches of products with quantised weights: one kernel for few tokens, else the library.

    The estimated time for the stored bytes decides (:mod:`outrider_triton.tiles.derive.products`); tables have no
    measurements of them. ``kernels`` computes the parts of a product that isn't fused.
    """

    def __init__(self, kernels: KernelSet, tiles: TileSelection) -> None:
        self._kernels, self._tiles, self._scope = kernels, tiles, tiles.scope
        self._facts, self._pdl = tiles.facts, tiles.facts.pdl

    def quantized_config(
        self, x: Tensor, weight: QuantizedWeight, product_plan: ProductPlan, *, parts: bool = True
    ) -> MatmulConfig | None:
        """Return the configuration for ``x [..., K]`` and this weight; None: the library's product.

        ``parts``: see :meth:`_derive`.
        """
        return self._derive(x.numel() // x.shape[-1], weight, product_plan, parts=parts, like=x)

    def _derive(
        self,
        m: int,
        weight: QuantizedWeight,
        product_plan: ProductPlan,
        *,
        half: int = 0,
        gated: bool = False,
        parts: bool = True,
        like: Tensor | None = None,
    ) -> MatmulConfig | None:
        """Return the derived configuration for ``m`` tokens and this weight, or None if the library is expected to be faster.

        ``half`` is half a head's size for a product that rotates its rows. ``gated``: gate and up. ``parts``: the product may
        be split; its consumer or a separate kernel adds the parts. ``like``: rows that the library may multiply instead.
        """
        stored, (n, k) = _stored(weight, product_plan, like), weight.shape
        operator = "linear_rope" if half else "linear_silu_mul" if gated else "linear_parts" if parts else "linear"
        return self._tiles.derived(operator, m=m, n=n, k=k, half=half, stored=stored)

    def takes_rows(self, x: Tensor, weight: QuantizedWeight, product_plan: ProductPlan, config: MatmulConfig | None) -> bool:
        """Return True if a product of rows like ``x`` [..., K] takes them from the kernel before it: a product with a
        ``config``, or the library's, of rows that this kernel can quantise.
        """
        return config is not None or (has_dynamic_activations(weight) and library_scales(x, weight, product_plan))

    def multiplies(self, x: Tensor, weight: QuantizedWeight) -> bool:
        """Return True if Triton's kernels support rows of the dtype of ``x`` and this weight's format."""
        is_half = x.dtype in (torch.bfloat16, torch.float16)
        return is_half and weight.format in TRITON_FORMATS and bool(x.numel()) and has_kernel(x, weight.scales)

    def launch_product(
        self,
        x: Tensor,
        weight: QuantizedWeight,
        bias: Tensor | None,
        product_plan: ProductPlan,
        config: MatmulConfig | None,
        *,
        dtype: torch.dtype | None = None,
        scales: Tensor | None = None,
        parts: bool = False,
        laid: bool = False,
        gated: bool = False,
    ) -> Tensor:
        """Launch the Triton product of ``x`` and ``weight``, or without a ``config`` the library's, and return its result.

        ``scales``: ``x`` was quantised from ``dtype``. ``parts``: return a split product in parts, without its bias.
        ``laid``: ``x`` has a nibble-plane layout. ``gated``: ``x`` is gate and up of one token.
        """
        if config is None:
            return self._launch_library(x, weight, bias, product_plan, scales, dtype or x.dtype)
        asm = self._facts.capability >= 80 and not triton.knobs.runtime.interpret
        columns = product_plan.mode, product_plan.columns, product_plan.at_once
        if gated:
            product = _TRITON.linear_quantized.triton_gated_planes(
                x, weight.data, weight.scales, bias, config.as_list(), self._pdl
            )
            return product if parts or config.split == 1 else sum_parts(product, bias, x, x.dtype, self._pdl)
        if product_plan.planes:
            operands = x, weight.data, weight.scales, weight.zero_points, bias, list(weight.block)
            kind = dtype or x.dtype
            layout = kind if laid else None
            product = _TRITON.linear_quantized.triton_planes(*operands, layout, *columns, asm, config.as_list(), self._pdl)
            whole = parts or config.split == 1
            return product if whole else sum_parts(product, bias, x, kind, self._pdl)
        options = scales, dtype or x.dtype, parts, *columns, product_plan.native, self._facts.fp8, asm
        return _TRITON.linear_quantized.triton(  # type: ignore[no-any-return]  # torch.ops has no types
            x, *library_operands(weight, bias), *options, config.as_list(), self._pdl
        )

    def _launch_library(
        self,
        x: Tensor,
        weight: QuantizedWeight,
        bias: Tensor | None,
        product_plan: ProductPlan | None,
        scales: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the library's product in ``dtype`` of ``x`` and ``weight``; with ``scales``, ``x`` is quantised already."""
        if scales is None:
            scaled = library_scales(x, weight, product_plan)
            return _TRITON.linear_quantized.library(  # type: ignore[no-any-return]  # torch.ops has no types
                x, *library_operands(weight, bias), scaled, self._facts.fp8, self._pdl
            )
        return _TRITON.linear_quantized.library_rows(  # type: ignore[no-any-return]
            x, scales, weight.data, weight.scales, bias, weight.format, weight.block[0], dtype, self._pdl
        )

    def multiply(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        """Return the product [..., N] of rows ``x`` [..., K] that :meth:`multiplies` allows; their number decides how."""
        self.compile_configs(x, weight, bias)
        product_plan = plan(self._facts, weight)
        config = None if product_plan is None else self.quantized_config(x, weight, product_plan)
        if product_plan is None or config is None:
            return self._launch_library(x, weight, bias, product_plan, None, x.dtype)
        return self.launch_product(x, weight, bias, product_plan, config)

    def norm_linear_quantized(
        self,
        added: QuantizedProduct,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        *,
        unquantized: Tensor | None = None,
    ) -> Tensor:
        """Multiply, add to the residual, normalise, and multiply the norm by a quantised weight, in three kernels for few
        tokens.

        The norm kernel adds the parts of the first product and quantises the rows for the second. ``unquantized`` [T, H]
        also receives the unquantised norm; the weight then has dynamic activations.
        """
        normed = self.normed_rows(added, residual, norm, eps, weight, bias, parts=False, unquantized=unquantized)
        if normed is None:
            rows = self.linear_quantized_add_rms_norm(added, residual, norm, eps)
            if unquantized is not None:
                unquantized.copy_(rows)
            return self._kernels.linear_quantized(rows, weight, bias)
        return self.second_product(normed, residual, weight, bias, parts=False)

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
        """Add a product to the residual, multiply its norm to queries, keys and values, rotate them and write the cache.

        Uses four kernels for few tokens. The rotating kernel adds the parts of the second product. A streamed product rotates
        its own rows: three kernels.
        """
        normed = None
        if rotates(rotary, residual):
            normed = self.normed_rows(added, residual, norm, eps, weight, bias, parts=True)
        if normed is None:
            qkv = self.norm_linear_quantized(added, residual, norm, eps, weight, bias)
            return self._kernels.head_norm_rope_write_cache(qkv, None, rotary)
        return self._rotated_product(normed, residual, weight, bias, rotary)

    def linear_quantized_rope_write_cache(
        self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, rotary: RotaryArgs
    ) -> Tensor:
        """Multiply rows to queries, keys and values, rotate them and write the cache, after a kernel that
        converts the rows.
        """
        product_plan, config = plan(self._facts, weight), None
        if product_plan is not None and x.dim() == 2 and self.multiplies(x, weight) and rotates(rotary, x):
            config = self.quantized_config(x, weight, product_plan)
        if product_plan is None or config is None:  # no kernel precedes that could quantise rows for the library
            return self._kernels.head_norm_rope_write_cache(self._kernels.linear_quantized(x, weight, bias), None, rotary)
        self.compile_configs(x, weight, bias)
        return self._rotated_product(self._convert_rows(x, weight, product_plan, config), x, weight, bias, rotary)

    def _convert_rows(
        self, x: Tensor, weight: QuantizedWeight, product_plan: ProductPlan, config: MatmulConfig
    ) -> NormedRows:
        """Convert rows ``x`` [T, K] to the format of a product, if the preceding kernel didn't."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        if product_plan.planes:
            return NormedRows(_TRITON.lay_in_planes.triton(x, self._pdl, row_layout(config)), None, product_plan, config)
        if weight.activations is None:
            return NormedRows(x, None, product_plan, config)
        format, group, row_dtype, _ = activation_format(weight, product_plan, config)
        rows, scales = _TRITON.quantize_rows.triton(x, format, group, weight.input_scale, row_dtype, self._pdl)
        return NormedRows(rows, scales, product_plan, config)

    def _rotated_product(
        self, normed: NormedRows, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, rotary: RotaryArgs
    ) -> Tensor:
        """Multiply ``normed`` rows and rotate the product in the dtype of ``x``, in the product or in the kernel that adds
        its parts.
        """
        product_plan, dtype, k_cache = normed.product_plan, x.dtype, rotary.k_cache
        caches = k_cache.shape[1:], k_cache.dtype
        if self._scope.must_compile(("rope_of_quantized", dtype, weight.shape, weight.label, bias is None, *caches)):
            self._compile_rotary(x, weight, bias, rotary, product_plan)
        rotated_config = (
            self._derive(x.shape[0], weight, product_plan, half=k_cache.shape[3] // 2)
            if product_plan.can_stream and normed.config is not None
            else None
        )
        # Rows in another layout belong to an unstreamed product.
        in_planes = normed.config is not None and row_layout(normed.config) == INT8_COMPONENTS
        if rotated_config is not None and (in_planes if product_plan.planes else normed.scales is not None):
            return self._launch_rotated(normed.rows, normed.scales, weight, bias, rotary, dtype, rotated_config)
        product = self.second_product(normed, x, weight, bias, parts=True)
        remaining_bias = bias if product.dim() == 3 else None
        return _TRITON.rope_write_cache.triton_parts(product, remaining_bias, *rotary, dtype, self._pdl)  # type: ignore[no-any-return]

    def _launch_rotated(
        self,
        rows: Tensor,
        scales: Tensor | None,
        weight: QuantizedWeight,
        bias: Tensor | None,
        rotary: RotaryArgs,
        dtype: torch.dtype,
        config: MatmulConfig,
    ) -> Tensor:
        """Launch the streamed product that rotates its own rows and writes the cache; return queries. Rows without ``scales``
        are int8 components.
        """
        if scales is None:
            return _TRITON.rope_write_cache.triton_linear_planes(  # type: ignore[no-any-return]  # torch.ops has no types
                rows, weight.data, weight.scales, bias, dtype, *rotary, config.as_list(), self._pdl
            )
        quantized = scales, weight.scales, weight.block[0], dtype
        return _TRITON.rope_write_cache.triton_linear(  # type: ignore[no-any-return]
            rows, None, weight.data, bias, 0.0, *rotary, config.as_list(), self._pdl, *quantized
        )

    def _compile_rotary(
        self, residual: Tensor, weight: QuantizedWeight, bias: Tensor | None, rotary: RotaryArgs, product_plan: ProductPlan
    ) -> None:
        """Compile the rotation of this weight's product for any number of tokens: streamed products, and sums of parts."""
        cos, sin, k_cache, v_cache, slots = rotary
        sample, sample_rotary, (n, k) = residual[:4], (cos[:4], sin[:4], k_cache, v_cache, slots[:4]), weight.shape
        for split in self._every_split(residual, weight, product_plan):
            shape = sample.shape[0], n
            product = sample.new_empty((split, *shape), dtype=torch.float32) if split > 1 else sample.new_empty(shape)
            with compile_only():
                _TRITON.rope_write_cache.triton_parts(
                    product, bias if split > 1 else None, *sample_rotary, sample.dtype, self._pdl
                )
        if not product_plan.can_stream:
            return
        if product_plan.planes:
            rows, scales = allocate_rows(sample, sample.shape, INT8_COMPONENTS)[0], None
        else:
            rows, scales = torch.empty_like(sample, dtype=weight.data.dtype), sample.new_empty((4, 1), dtype=torch.float32)
        half, stored = k_cache.shape[3] // 2, product_plan.stored(weight.format)
        for tiling in self._tiles.every_derived("linear_rope", n=n, k=k, half=half, stored=stored):
            with compile_only():
                self._launch_rotated(rows, scales, weight, bias, RotaryArgs(*sample_rotary), sample.dtype, tiling)

    def second_product(
        self, normed: NormedRows, residual: Tensor, weight: QuantizedWeight, bias: Tensor | None, *, parts: bool
    ) -> Tensor:
        """Launch the product of ``normed.rows`` and ``weight``, and return it in the dtype of ``residual``; ``parts`` as in
        :meth:`launch_product`.
        """
        laid = normed.scales is None and normed.product_plan.planes
        return self.launch_product(
            normed.rows,
            weight,
            bias,
            normed.product_plan,
            normed.config,
            dtype=residual.dtype,
            scales=normed.scales,
            parts=parts,
            laid=laid,
        )

    def normed_rows(
        self,
        added: QuantizedProduct,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: QuantizedWeight,
        bias: Tensor | None,
        *,
        parts: bool,
        taken: Callable[[ProductPlan, MatmulConfig | None], TokenRows] | None = None,
        unquantized: Tensor | None = None,
    ) -> NormedRows | None:
        """Run :meth:`norm_linear_quantized` up to its second product, which may be in ``parts``.

        Return None, and run nothing, if a kernel is missing. ``taken`` computes the rows of the first product; ``added.x``
        then only has their shape and dtype. ``unquantized``: see :meth:`norm_linear_quantized`.
        """
        supported = self.multiplies(residual, weight) and residual.shape[-1] <= MAX_ROW_ELEMENTS
        second = plan(self._facts, weight) if supported else None
        first = None if second is None else self._first(added, residual)
        if first is None or second is None:
            return None
        second_config = self.quantized_config(residual, weight, second, parts=parts)
        self.compile_configs(residual, weight, bias)
        if not self.takes_rows(residual, weight, second, second_config):
            return None
        weight_keys = added.weight.shape, added.weight.label, added.bias is None, weight.shape, weight.label
        outputs = unquantized is not None, norm.dtype, residual.dtype
        if self._scope.must_compile(("norm_linear_quantized", *outputs, *weight_keys)):
            self._compile_norms(added, first[0], residual, norm, weight, second, unquantized)
        product, remaining_bias = self._product(added, *first, residual.dtype, taken)
        if second_config is not None and not has_dynamic_activations(weight):
            layout = row_layout(second_config) if second.planes else 0
            normed = _TRITON.add_rms_norm.triton(product, remaining_bias, residual, norm, eps, self._pdl, layout)
            return NormedRows(normed, None, second, second_config)
        row_format = activation_format(weight, second, second_config)
        normed, scales = self._norm(product, remaining_bias, residual, norm, eps, row_format, unquantized)
        return NormedRows(normed, scales, second, second_config)

    def _first(
        self, added: QuantizedProduct, residual: Tensor, *, parts: bool = True
    ) -> tuple[ProductPlan, MatmulConfig | None] | None:
        """Return plan and configuration of a product that is added to ``residual``, perhaps in ``parts``; None if Triton has
        no kernel for it, and the library doesn't take quantised rows.
        """
        width = added.x.shape[-1] // 2 if added.gated else added.x.shape[-1]
        operand, product_plan = added.x[..., :width], plan(self._facts, added.weight)
        supported = self.multiplies(operand, added.weight) and self.multiplies(residual, added.weight)
        supported = supported and residual.dim() == 2 and residual.is_contiguous() and added.x.dtype is residual.dtype
        if not supported or product_plan is None or width > MAX_ROW_ELEMENTS:
            return None
        config = self.quantized_config(operand, added.weight, product_plan, parts=parts)
        self.compile_configs(operand, added.weight, added.bias)
        return (product_plan, config) if self.takes_rows(operand, added.weight, product_plan, config) else None

    def _product(
        self,
        added: QuantizedProduct,
        product_plan: ProductPlan,
        config: MatmulConfig | None,
        dtype: torch.dtype,
        taken: Callable[[ProductPlan, MatmulConfig | None], TokenRows] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the product for a norm that adds its parts, and the bias that the parts lack. ``taken``: see
        :meth:`normed_rows`.
        """
        x, scales, laid, gated = self._taken(added, product_plan, config) if taken is None else taken(product_plan, config)
        product = self.launch_product(
            x, added.weight, added.bias, product_plan, config, dtype=dtype, scales=scales, parts=True, laid=laid, gated=gated
        )
        return product, added.bias if config is not None and config.split > 1 else None

    def activated(
        self, normed: NormedRows, residual: Tensor, weight: QuantizedWeight, bias: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Multiply by gate and up and apply SwiGLU in one kernel; return the activation and the maxima of its rows.

        Return None, and run nothing, if a kernel is missing.
        """
        product_plan = normed.product_plan
        config = (
            self._derive(residual.shape[0], weight, product_plan, gated=True)
            if product_plan.can_stream and not product_plan.planes
            else None
        )
        if config is None or normed.scales is None:
            return None
        operands = weight.data, weight.scales, weight.block[0], bias, residual.dtype
        if self._scope.must_compile(("linear_quantized_silu_mul", residual.dtype, weight.shape, weight.label, bias is None)):
            (n, k), stored = weight.shape, product_plan.stored(weight.format)
            for each in self._tiles.every_derived("linear_silu_mul", n=n, k=k, stored=stored):
                with compile_only():
                    sample = _TRITON.linear_silu_mul.triton_quantized(
                        normed.rows[:4], normed.scales[:4], *operands, each.as_list(), self._pdl
                    )
                    _TRITON.quantize_by_maxima.triton(*sample, weight.activations or "", weight.data.dtype, self._pdl)
        activated: tuple[Tensor, Tensor] = _TRITON.linear_silu_mul.triton_quantized(
            normed.rows, normed.scales, *operands, config.as_list(), self._pdl
        )
        return activated

    def _taken(self, added: QuantizedProduct, product_plan: ProductPlan, config: MatmulConfig | None) -> TokenRows:
        x, weight = added.x, added.weight
        if has_dynamic_activations(weight):
            row_format = format, group, row_dtype, _ = activation_format(weight, product_plan, config)
            if added.maxima is not None and not added.gated and not group:
                return TokenRows(*_TRITON.quantize_by_maxima.triton(x, added.maxima, format, row_dtype, self._pdl))
            if added.gate is not None and quantizes_gated(added.gate.values, group):
                return TokenRows(*_TRITON.gated_rms_norm.triton_quantize(x, *added.gate, *row_format, self._pdl))
            if added.gated:
                return TokenRows(*_TRITON.silu_mul.triton_quantize(x, *row_format, self._pdl))
        if not added.gated:
            return TokenRows(added.gate_rows(self._kernels), None, False)
        if config is None or not product_plan.planes:
            return TokenRows(self._kernels.silu_mul(x), None, False)
        if computes_swiglu(config, x.shape[0]) and x.dim() == 2:
            return TokenRows(x, None, False, gated=True)
        return TokenRows(_TRITON.silu_mul.triton(x, self._pdl, row_layout(config)), None, True)

    def _norm(
        self,
        product: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        row_format: tuple[str, int, torch.dtype, int],
        unquantized: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rows, scales = _TRITON.add_rms_norm.triton_quantize(
            product, bias, residual, norm, eps, *row_format, unquantized, self._pdl
        )
        return rows, scales

    def compile_configs(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
        """Compile every configuration of this weight's product for any number of tokens, once, inside the scope."""
        if not self._scope.must_compile(("linear_quantized", x.dtype, weight.label, weight.shape, bias is None)):
            return
        sample, product_plan = x.reshape(-1, x.shape[-1])[:4], plan(self._facts, weight)
        with compile_only():
            _TRITON.linear_quantized.library(sample, *library_operands(weight, bias), False, self._facts.fp8, self._pdl)
            if product_plan is not None and product_plan.library_blocks:
                options = weight.activations or "", _group(weight), weight.input_scale, weight.data.dtype, self._pdl
                quantized_rows(sample, *options, by_group=library.ROWS_MULTIPLE)
            scales_sums = TRITON_FORMATS[weight.format].scales_library_sums
            if scales_sums and product_plan is not None and _library_takes_stored(x, weight, product_plan):
                sums = sample.new_empty((sample.shape[0], weight.shape[0]), dtype=torch.int32)
                by_row = sample.new_empty((sample.shape[0], 1), dtype=torch.float32)
                _TRITON.scale_products.triton(sums, by_row, weight.scales, bias, weight.block[0], x.dtype, self._pdl)
        if product_plan is not None:
            for tiling in self.every_config(x, weight, product_plan):
                with compile_only():
                    self.launch_product(sample, weight, bias, product_plan, tiling)

    def every_config(self, like: Tensor, weight: QuantizedWeight, product_plan: ProductPlan) -> tuple[MatmulConfig, ...]:
        """Return every configuration that this weight may need, over all numbers of tokens with the dtype and device of
        ``like``.
        """
        (n, k), stored = weight.shape, _stored(weight, product_plan, like)
        found = (self._tiles.every_derived(operator, n=n, k=k, stored=stored) for operator in ("linear_parts", "linear"))
        return tuple(dict.fromkeys(itertools.chain.from_iterable(found)))

    def _every_split(self, like: Tensor, weight: QuantizedWeight, product_plan: ProductPlan) -> set[int]:
        """Return every number of parts of this weight's product, over all numbers of tokens. The library's is whole."""
        splits = {each.split for each in self.every_config(like, weight, product_plan)}
        takes_rows = has_dynamic_activations(weight) and _library_takes_stored(like, weight, product_plan)
        return splits | {1} if takes_rows else splits

    def _compile_activation(self, added: QuantizedProduct, product_plan: ProductPlan) -> None:
        """Compile SwiGLU with each row layout that the following product may take, or with its quantisation."""
        if added.gated and has_dynamic_activations(added.weight):
            with compile_only():
                _TRITON.silu_mul.triton_quantize(added.x[:4], *activation_format(added.weight, product_plan, None), self._pdl)
        if added.gated and product_plan.planes and not has_dynamic_activations(added.weight):
            configs = self.every_config(added.x, added.weight, product_plan)
            for layout in {row_layout(tiling) for tiling in configs}:
                with compile_only():
                    _TRITON.silu_mul.triton(added.x[:4], self._pdl, layout)
            for tiling in configs:
                if computes_swiglu(tiling, 1):
                    with compile_only():
                        self.launch_product(
                            added.x[:1], added.weight, added.bias, product_plan, tiling, parts=True, gated=True
                        )

    def _compile_norms(
        self,
        added: QuantizedProduct,
        first: ProductPlan,
        residual: Tensor,
        norm: Tensor,
        weight: QuantizedWeight,
        second: ProductPlan,
        unquantized: Tensor | None,
    ) -> None:
        """Compile the norm with every number of parts of the first product and every row layout of the products."""
        self._compile_activation(added, first)
        layouts = {row_layout(each) if second.planes else 0 for each in self.every_config(residual, weight, second)} or {0}
        splits = self._every_split(residual, added.weight, first)
        for split, layout in itertools.product(splits, layouts):
            sample = residual[:4].clone()
            parts = sample.new_empty((split, *sample.shape), dtype=torch.float32) if split > 1 else sample
            remaining_bias = added.bias if split > 1 else None
            with compile_only():
                if has_dynamic_activations(weight):
                    also = None if unquantized is None else torch.empty_like(sample)
                    row_format = activation_format(weight, second, None)
                    self._norm(parts, remaining_bias, sample, norm, 1e-5, row_format, also)
                else:
                    _TRITON.add_rms_norm.triton(parts, remaining_bias, sample, norm, 1e-5, self._pdl, layout)

    def fuse_embedding_quantized(
        self, tokens: Tensor, embedding: Tensor, hidden: Tensor, weight: QuantizedWeight, bias: Tensor | None = None
    ) -> Tensor | None:
        """Quantise each token's embedding and hidden features while they are read, then multiply.

        Return None, and run nothing, if a kernel is missing.
        """
        product_plan, k = plan(self._facts, weight), weight.shape[1]
        supported = (
            hidden.dim() == 2 and hidden.stride(1) == 1 and hidden.dtype is embedding.dtype and embedding.is_contiguous()
        )
        supported = supported and k <= MAX_ROW_ELEMENTS and has_dynamic_activations(weight) and has_kernel(embedding, hidden)
        if product_plan is None or not supported or not self.multiplies(hidden, weight):
            return None
        concatenated = hidden[:, :1].expand(-1, k)  # only the shape and dtype are used
        config = self.quantized_config(concatenated, weight, product_plan, parts=False)
        self.compile_configs(concatenated, weight, bias)
        if not self.takes_rows(concatenated, weight, product_plan, config):
            return None
        row_format = activation_format(weight, product_plan, config)
        x, scales = _TRITON.embed_beside.triton_quantize(tokens, embedding, hidden, *row_format, self._pdl)
        return self.launch_product(x, weight, bias, product_plan, config, dtype=hidden.dtype, scales=scales)

    def linear_quantized_add(self, added: QuantizedProduct, residual: Tensor) -> Tensor:
        """Add a quantised product to the residual.

        A streamed product adds to the residual itself. Torch's addition is one kernel more, which starts after its
        predecessor has ended and doesn't let its successor start early.
        """
        first = self._first(added, residual, parts=False)
        if first is None:
            return residual.add_(self._kernels.linear_quantized(added.gate_rows(self._kernels), added.weight, added.bias))
        (product_plan, config), weight = first, added.weight
        can_stream = product_plan.can_stream and not product_plan.planes
        if self._scope.must_compile(("linear_quantized_add", residual.dtype, weight.shape, weight.label, added.bias is None)):
            self._compile_activation(added, product_plan)
            sample = residual[:4]
            for tiling in self.every_config(residual, weight, product_plan):
                if can_stream and tiling.descriptor == STREAMED:
                    with compile_only():
                        self._launch_add(
                            TokenRows(sample.new_empty((sample.shape[0], weight.shape[1])), None, False),
                            added,
                            sample,
                            tiling,
                        )
        rows = self._taken(added, product_plan, config)
        if can_stream and config is not None and config.descriptor == STREAMED:
            self._launch_add(rows, added, residual, config)
            return residual
        x, scales, laid, gated = rows
        product = self.launch_product(
            x, weight, added.bias, product_plan, config, dtype=residual.dtype, scales=scales, laid=laid, gated=gated
        )
        return residual.add_(product)

    def _launch_add(self, rows: TokenRows, added: QuantizedProduct, residual: Tensor, config: MatmulConfig) -> None:
        weight = added.weight
        tensors = weight.data, weight.scales, weight.input_scale, added.bias
        x = rows.x if rows.x.stride(-1) == 1 else rows.x.contiguous()
        options = weight.block[0], weight.activations or "", _group(weight), rows.scales
        _TRITON.linear_quantized.triton_add(x, *tensors, *options, residual, config.as_list(), self._pdl)

    def linear_quantized_add_rms_norm(self, added: QuantizedProduct, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Multiply by a quantised weight; the norm kernel adds the product's parts to the residual and returns the norm."""
        first = self._first(added, residual) if residual.shape[-1] <= MAX_ROW_ELEMENTS else None
        if first is None:
            product = self._kernels.linear_quantized(added.gate_rows(self._kernels), added.weight, added.bias)
            return self._kernels.add_rms_norm(product, residual, norm, eps)
        product_plan, weight = first[0], added.weight
        weight_key = norm.dtype, weight.shape, weight.label, added.bias is None
        if self._scope.must_compile(("linear_quantized_add_rms_norm", residual.dtype, *weight_key)):
            self._compile_activation(added, product_plan)
            for split in self._every_split(residual, weight, product_plan):
                sample = residual[:4].clone()
                parts = sample.new_empty((split, *sample.shape), dtype=torch.float32) if split > 1 else sample
                with compile_only():
                    bias = added.bias if split > 1 else None
                    _TRITON.add_rms_norm.triton(parts, bias, sample, norm, 1e-5, self._pdl)
        product, remaining_bias = self._product(added, *first, residual.dtype)
        return _TRITON.add_rms_norm.triton(product, remaining_bias, residual, norm, eps, self._pdl)  # type: ignore[no-any-return]


def library_operands(weight: QuantizedWeight, bias: Tensor | None) -> tuple[object, ...]:
    """Return the operands that describe ``weight`` and ``bias`` to the library's operator, in the order of its schema."""
    tensors = weight.data, weight.scales, weight.zero_points, weight.input_scale, bias
    block, shape = list(weight.block), list(weight.shape)
    return *tensors, weight.format, block, shape, weight.activations or "", weight.activation_group


def _group(weight: QuantizedWeight) -> int:
    return weight.activation_group if weight.activation_group < weight.shape[1] else 0


def activation_format(
    weight: QuantizedWeight, product_plan: ProductPlan, config: MatmulConfig | None
) -> tuple[str, int, torch.dtype, int]:
    """Return the format, the columns per scale (0: all), the dtype and the padding (``by_group`` of
    :func:`outrider_triton.quantized.operators.allocate_quantized`) of the quantised rows that a product with this weight
    multiplies: with a ``config``, or the library's. The weight has dynamic activation scales.
    """
    group = _group(weight)
    padding = library.ROWS_MULTIPLE if config is None and group else 0
    return weight.activations or "", group, activation_dtype(weight.data, product_plan.native), padding


def has_dynamic_activations(weight: QuantizedWeight) -> bool:
    """Return True if the kernel that computes the activations can also quantise them: their scales are dynamic, and a scale
    is shared by a whole row or by a power of two of columns.
    """
    group = _group(weight)
    return weight.activations is not None and weight.input_scale is None and group & (group - 1) == 0


def library_scales(x: Tensor, weight: QuantizedWeight, product_plan: ProductPlan | None) -> bool:
    """Return True if the library multiplies ``x`` and the weight as stored, with a scale per row of each."""
    return product_plan is not None and x.numel() > 16 * x.shape[-1] and _library_takes_stored(x, weight, product_plan)


def _stored(weight: QuantizedWeight, product_plan: ProductPlan, like: Tensor | None) -> OperandStorage:
    """Return the storage of the operands of a product that the library may multiply instead if there are rows ``like``."""
    stored = product_plan.stored(weight.format)
    if like is None or not TRITON_FORMATS[weight.format].prefers_library:
        return stored
    return replace(stored, library=_library_takes_stored(like, weight, product_plan))


def _library_takes_stored(like: Tensor, weight: QuantizedWeight, product_plan: ProductPlan) -> bool:
    """Return True if the library multiplies this weight as stored by more than 16 tokens of the dtype and
    device of ``like``.
    """
    by_row = product_plan.mode == "row" and not _group(weight)
    if not product_plan.native or not (by_row or product_plan.library_blocks):
        return False
    if like.device.type != "cuda" or any(size % 16 for size in weight.shape):
        return False
    return like.dtype in TRITON_FORMATS[weight.format].library_dtypes
