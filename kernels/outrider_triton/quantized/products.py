"""QuantizedProducts: products with quantised weights, alone and fused with the kernels around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from outrider.device import KernelSet, QuantizedWeight, RotaryArgs
from outrider_triton.launch import has_kernel
from outrider_triton.products.operands import QuantizedProduct, rotary_like, rows_like
from outrider_triton.quantized import library
from outrider_triton.quantized import operators as _quantized_ops  # noqa: F401
from outrider_triton.quantized.activations import MAX_ROW_ELEMENTS, activation_dtype, quantizes_gated
from outrider_triton.quantized.nibble_planes import INT8_COMPONENTS, computes_swiglu, row_layout
from outrider_triton.quantized.operators import sum_parts
from outrider_triton.quantized.plan import TRITON_FORMATS, ProductPlan, plan
from outrider_triton.rows import rotates
from outrider_triton.tiles.configs import STREAMED, MatmulConfig
from outrider_triton.tiles.derive.fits import OperandStorage
from outrider_triton.tiles.selection import TileSelection

_TRITON = torch.ops.outrider


class TokenRows(NamedTuple):
    """The token rows of a product, in the format that its kernel reads."""

    x: Tensor
    """The rows [T, K] as computed, quantised or in nibble-plane layout."""
    scales: Tensor | None = None
    """Scales of quantised rows; None if the rows are not quantised."""
    in_planes: bool = False
    """True if ``x`` has a nibble-plane layout."""
    gated: bool = False
    """True if ``x`` has gate and up, [T, 2 K], and the product's kernel computes SwiGLU."""


class PlannedProduct(NamedTuple):
    """A product with a quantised weight, and the kernel that computes it for a number of tokens."""

    weight: QuantizedWeight
    bias: Tensor | None
    plan: ProductPlan
    config: MatmulConfig | None
    """Tile configuration; None: the library multiplies."""

    @property
    def row_format(self) -> tuple[str, int, torch.dtype, int]:
        """Format, columns per scale (0: all), dtype and padding (``by_group`` of
        :func:`outrider_triton.quantized.activations.allocate_quantized`) of the quantised rows that the product multiplies.
        The weight has dynamic activation scales.
        """
        weight, group = self.weight, _group(self.weight)
        padding = library.ROWS_MULTIPLE if self.config is None and group else 0
        return weight.activations or "", group, activation_dtype(weight.data, self.plan.native), padding

    def takes_rows(self, x: Tensor) -> bool:
        """Return True if the product of rows like ``x`` [..., K] takes them from the kernel before it: a product with a
        configuration, or the library's, of rows that this kernel can quantise.
        """
        return self.config is not None or (has_dynamic_activations(self.weight) and library_scales(x, self.weight, self.plan))


class QuantizedProducts:
    """The launches of products with quantised weights: one kernel for few tokens, else the library.

    The estimated time for the stored bytes decides (:mod:`outrider_triton.tiles.derive.products`); tables have no
    measurements of them. ``kernels`` computes the parts of a product that isn't fused. In the scope of variants, each method
    first computes uninitialised rows of other numbers of tokens, which compiles the kernels that they need.
    """

    def __init__(self, kernels: KernelSet, tiles: TileSelection) -> None:
        self._kernels, self._tiles = kernels, tiles
        self._facts, self._pdl = tiles.facts, tiles.facts.pdl

    # -- choices ---------------------------------------------------------------------------------------------------

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

    def every_config(self, like: Tensor, weight: QuantizedWeight, product_plan: ProductPlan) -> set[MatmulConfig]:
        """Return every configuration of this weight's product, over all numbers of tokens like ``like``."""
        counts = self._tiles.token_counts()
        found = {self._derive(count, weight, product_plan, like=like) for count in counts}
        return {config for config in found if config is not None}

    def _planned(
        self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, *, parts: bool = True
    ) -> PlannedProduct | None:
        """Return the product of rows like ``x`` [..., K], perhaps in ``parts``; None if no kernel multiplies them."""
        product_plan = plan(self._facts, weight) if self.multiplies(x, weight) else None
        if product_plan is None:
            return None
        return PlannedProduct(weight, bias, product_plan, self.quantized_config(x, weight, product_plan, parts=parts))

    def multiplies(self, x: Tensor, weight: QuantizedWeight) -> bool:
        """Return True if Triton's kernels support rows of the dtype of ``x`` and this weight's format."""
        is_half = x.dtype in (torch.bfloat16, torch.float16)
        return is_half and weight.format in TRITON_FORMATS and bool(x.numel()) and has_kernel(x, weight.scales)

    def _samples(
        self, operator: str, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, *variant: object
    ) -> Iterator[int]:
        """Yield :meth:`~outrider_triton.tiles.selection.TileSelection.samples` of this weight and rows like ``x``, or nothing
        for operands without a kernel.
        """
        if self.multiplies(x, weight):
            yield from self._tiles.samples(operator, x.dtype, weight.shape, weight.label, bias is None, *variant)

    # -- launches --------------------------------------------------------------------------------------------------

    def launch_product(self, rows: TokenRows, product: PlannedProduct, dtype: torch.dtype, *, parts: bool = False) -> Tensor:
        """Launch the product of ``rows``, Triton's or without a configuration the library's, and return its result in
        ``dtype``. ``parts``: return a split product in parts, without its bias.
        """
        weight, bias, product_plan, config = product
        x, scales, in_planes, gated = rows
        if config is None:
            return self._launch_library(rows, weight, bias, product_plan, dtype)
        asm = self._facts.capability >= 80 and not triton.knobs.runtime.interpret
        columns = product_plan.mode, product_plan.columns, product_plan.at_once
        if not product_plan.planes:
            options = scales, dtype, parts, *columns, product_plan.native, self._facts.fp8, asm
            return _TRITON.linear_quantized.triton(  # type: ignore[no-any-return]  # torch.ops has no types
                x, *library_operands(weight, bias), *options, config.as_list(), self._pdl
            )
        if gated:
            made = _TRITON.linear_quantized.triton_gated_planes(
                x, weight.data, weight.scales, bias, config.as_list(), self._pdl
            )
        else:
            operands = x, weight.data, weight.scales, weight.zero_points, bias, list(weight.block)
            layout = dtype if in_planes else None
            made = _TRITON.linear_quantized.triton_planes(*operands, layout, *columns, asm, config.as_list(), self._pdl)
        return made if parts or config.split == 1 else sum_parts(made, bias, x, dtype, self._pdl)

    def _launch_library(
        self,
        rows: TokenRows,
        weight: QuantizedWeight,
        bias: Tensor | None,
        product_plan: ProductPlan | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the library's product of ``rows`` and ``weight`` in ``dtype``."""
        if rows.scales is None:
            scaled = library_scales(rows.x, weight, product_plan)
            return _TRITON.linear_quantized.library(  # type: ignore[no-any-return]  # torch.ops has no types
                rows.x, *library_operands(weight, bias), scaled, self._facts.fp8, self._pdl
            )
        return _TRITON.linear_quantized.library_rows(  # type: ignore[no-any-return]
            *rows[:2], weight.data, weight.scales, bias, weight.format, weight.block[0], dtype, self._pdl
        )

    def multiply(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        """Return the product [..., N] of rows ``x`` [..., K] that :meth:`multiplies` allows; their number decides how."""
        for count in self._samples("linear_quantized", x, weight, bias):
            self.multiply(rows_like(x, count), weight, bias)
        product = self._planned(x, weight, bias)
        if product is None:
            return self._launch_library(TokenRows(x), weight, bias, None, x.dtype)
        return self.launch_product(TokenRows(x), product, x.dtype)

    def fuse_embedding_quantized(
        self, tokens: Tensor, embedding: Tensor, hidden: Tensor, weight: QuantizedWeight, bias: Tensor | None = None
    ) -> Tensor | None:
        """Quantise each token's embedding and hidden features while they are read, then multiply.

        Return None, and run nothing, if a kernel is missing.
        """
        k = weight.shape[1]
        supported = (
            hidden.dim() == 2 and hidden.stride(1) == 1 and hidden.dtype is embedding.dtype and embedding.is_contiguous()
        )
        supported = supported and k <= MAX_ROW_ELEMENTS and has_dynamic_activations(weight) and has_kernel(embedding, hidden)
        if not supported:
            return None
        for count in self._samples("fuse_embedding", hidden, weight, bias):
            self._kernels.fuse_embedding(tokens.new_zeros(count), embedding, rows_like(hidden, count), weight, bias)
        concatenated = hidden[:, :1].expand(-1, k)  # only the shape and dtype are used
        product = self._planned(concatenated, weight, bias, parts=False)
        if product is None or not product.takes_rows(concatenated):
            return None
        rows = _TRITON.embed_beside.triton_quantize(tokens, embedding, hidden, *product.row_format, self._pdl)
        return self.launch_product(TokenRows(*rows), product, hidden.dtype)

    # -- products added to the residual, and norms ---------------------------------------------------------------------

    def linear_quantized_add(self, added: QuantizedProduct, residual: Tensor) -> Tensor:
        """Add a quantised product to the residual.

        A streamed product adds to the residual itself. Torch's addition is one kernel more, which starts after its
        predecessor has ended and doesn't let its successor start early.
        """
        weight, bias = added.weight, added.bias
        for count in self._samples("linear_quantized_add", residual, weight, bias, *added.variant):
            self.linear_quantized_add(added.like(count), rows_like(residual, count))
        product = self._added(added, residual, parts=False)
        if product is None:
            return residual.add_(self._kernels.linear_quantized(added.gate_rows(self._kernels), weight, bias))
        rows, config = self._token_rows(added, product), product.config
        if config is None or config.descriptor != STREAMED or not product.plan.can_stream or product.plan.planes:
            return residual.add_(self.launch_product(rows, product, residual.dtype))
        x = rows.x if rows.x.stride(-1) == 1 else rows.x.contiguous()
        tensors = weight.data, weight.scales, weight.input_scale, bias
        options = weight.block[0], weight.activations or "", _group(weight), rows.scales
        _TRITON.linear_quantized.triton_add(x, *tensors, *options, residual, config.as_list(), self._pdl)
        return residual

    def linear_quantized_add_rms_norm(self, added: QuantizedProduct, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Multiply by a quantised weight; the norm kernel adds the product's parts to the residual and returns the norm."""
        weight, bias = added.weight, added.bias
        for count in self._samples("linear_quantized_add_rms_norm", residual, weight, bias, *added.variant, norm.dtype):
            self.linear_quantized_add_rms_norm(added.like(count), rows_like(residual, count), norm, eps)
        product = self._added(added, residual) if residual.shape[-1] <= MAX_ROW_ELEMENTS else None
        if product is None:
            rows = self._kernels.linear_quantized(added.gate_rows(self._kernels), weight, bias)
            return self._kernels.add_rms_norm(rows, residual, norm, eps)
        parts = self._parts(product, self._token_rows(added, product), residual.dtype)
        return _TRITON.add_rms_norm.triton(*parts, residual, norm, eps, self._pdl)  # type: ignore[no-any-return]

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
        variant = *added.variant, norm.dtype, unquantized is None
        for count in self._samples("norm_linear_quantized", residual, weight, bias, *variant):
            also, sample = None if unquantized is None else rows_like(unquantized, count), rows_like(residual, count)
            self.norm_linear_quantized(added.like(count), sample, norm, eps, weight, bias, unquantized=also)
        normed = self._normed(added, residual, norm, eps, weight, bias, parts=False, unquantized=unquantized)
        if normed is None:
            rows = self.linear_quantized_add_rms_norm(added, residual, norm, eps)
            if unquantized is not None:
                unquantized.copy_(rows)
            return self._kernels.linear_quantized(rows, weight, bias)
        return self.launch_product(*normed, residual.dtype)

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
            variant = *added.variant, norm.dtype, rotary.k_cache.shape[1:], rotary.k_cache.dtype
            for count in self._samples("norm_linear_quantized_rope", residual, weight, bias, *variant):
                sample = added.like(count), rows_like(residual, count), norm, eps, weight, bias, rotary_like(rotary, count)
                self.norm_linear_quantized_rope_write_cache(*sample)
            normed = self._normed(added, residual, norm, eps, weight, bias, parts=True)
        if normed is None:
            qkv = self.norm_linear_quantized(added, residual, norm, eps, weight, bias)
            return self._kernels.head_norm_rope_write_cache(qkv, None, rotary)
        return self._rotated_product(*normed, residual.dtype, rotary)

    def linear_quantized_rope_write_cache(
        self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, rotary: RotaryArgs
    ) -> Tensor:
        """Multiply rows to queries, keys and values, rotate them and write the cache, after a kernel that
        converts the rows.
        """
        product = None
        if x.dim() == 2 and rotates(rotary, x):
            caches = rotary.k_cache.shape[1:], rotary.k_cache.dtype
            for count in self._samples("linear_quantized_rope", x, weight, bias, *caches):
                self.linear_quantized_rope_write_cache(rows_like(x, count), weight, bias, rotary_like(rotary, count))
            product = self._planned(x, weight, bias)
        if product is None or product.config is None:  # no kernel precedes that could quantise rows for the library
            return self._kernels.head_norm_rope_write_cache(self._kernels.linear_quantized(x, weight, bias), None, rotary)
        x = x if x.stride(-1) == 1 else x.contiguous()
        if product.plan.planes:
            rows = TokenRows(_TRITON.lay_in_planes.triton(x, self._pdl, row_layout(product.config)), in_planes=True)
        elif weight.activations is None:
            rows = TokenRows(x)
        else:
            format, group, row_dtype, _ = product.row_format
            rows = TokenRows(*_TRITON.quantize_rows.triton(x, format, group, weight.input_scale, row_dtype, self._pdl))
        return self._rotated_product(rows, product, x.dtype, rotary)

    def norm_gates(
        self,
        added: QuantizedProduct,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: QuantizedWeight,
        bias: Tensor | None,
        *,
        activates: bool,
        taken: Callable[[PlannedProduct], TokenRows] | None = None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Add a product to the residual, and multiply its norm by gate and up. Return the product [T, 2 I] and None. If a
        kernel ``activates``, return SwiGLU of the product [T, I] and the maxima of its rows.

        Return None, and run nothing, if a kernel is missing. ``taken`` computes the rows of the first product; ``added.x``
        then only has their shape and dtype.
        """
        for count in self._samples("norm_gates", residual, weight, bias, *added.variant, norm.dtype, activates):
            sample = added.like(count), rows_like(residual, count), norm, eps, weight, bias
            made = self.norm_gates(*sample, activates=activates)
            if made is None:
                self.norm_linear_quantized(*sample)
            elif made[1] is not None:
                _TRITON.quantize_by_maxima.triton(*made, weight.activations or "", weight.data.dtype, self._pdl)
        normed = self._normed(added, residual, norm, eps, weight, bias, parts=False, taken=taken)
        if normed is None:
            return None
        (rows, product), m, config = normed, residual.shape[0], None
        if activates and rows.scales is not None and product.plan.can_stream and not product.plan.planes:
            config = self._derive(m, weight, product.plan, gated=True)
        if config is None:
            return self.launch_product(rows, product, residual.dtype), None
        operands = *rows[:2], weight.data, weight.scales, weight.block[0], bias, residual.dtype
        activated: tuple[Tensor, Tensor] = _TRITON.linear_silu_mul.triton_quantized(*operands, config.as_list(), self._pdl)
        return activated

    # -- parts of fused products -----------------------------------------------------------------------------------

    def _rotated_product(self, rows: TokenRows, product: PlannedProduct, dtype: torch.dtype, rotary: RotaryArgs) -> Tensor:
        """Multiply ``rows`` and rotate the product in ``dtype``, in the product or in the kernel that adds its parts; return
        queries.
        """
        weight, bias, product_plan, config = product
        streamed = None
        if product_plan.can_stream and config is not None:
            # Rows in another layout belong to an unstreamed product.
            is_laid_out = row_layout(config) == INT8_COMPONENTS if product_plan.planes else rows.scales is not None
            half = rotary.k_cache.shape[3] // 2
            streamed = self._derive(rows.x.shape[0], weight, product_plan, half=half) if is_laid_out else None
        if streamed is None:
            made = self.launch_product(rows, product, dtype, parts=True)
            remaining_bias = bias if made.dim() == 3 else None
            return _TRITON.rope_write_cache.triton_parts(made, remaining_bias, *rotary, dtype, self._pdl)  # type: ignore[no-any-return]
        tiling = streamed.as_list()
        if rows.scales is None:
            return _TRITON.rope_write_cache.triton_linear_planes(  # type: ignore[no-any-return]  # torch.ops has no types
                rows.x, weight.data, weight.scales, bias, dtype, *rotary, tiling, self._pdl
            )
        quantized = rows.scales, weight.scales, weight.block[0], dtype
        return _TRITON.rope_write_cache.triton_linear(  # type: ignore[no-any-return]
            rows.x, None, weight.data, bias, 0.0, *rotary, tiling, self._pdl, *quantized
        )

    def _normed(
        self,
        added: QuantizedProduct,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: QuantizedWeight,
        bias: Tensor | None,
        *,
        parts: bool,
        taken: Callable[[PlannedProduct], TokenRows] | None = None,
        unquantized: Tensor | None = None,
    ) -> tuple[TokenRows, PlannedProduct] | None:
        """Run :meth:`norm_linear_quantized` up to its second product, which may be in ``parts``. Return the normalised rows
        in the layout that the product takes, and the product.

        Return None, and run nothing, if a kernel is missing. ``taken``: see :meth:`norm_gates`.
        """
        fits = residual.shape[-1] <= MAX_ROW_ELEMENTS
        second = self._planned(residual, weight, bias, parts=parts) if fits else None
        first = None if second is None or not second.takes_rows(residual) else self._added(added, residual)
        if first is None or second is None:
            return None
        rows = self._token_rows(added, first) if taken is None else taken(first)
        operands = *self._parts(first, rows, residual.dtype), residual, norm, eps
        if second.config is not None and not has_dynamic_activations(weight):
            layout = row_layout(second.config) if second.plan.planes else 0
            normed = _TRITON.add_rms_norm.triton(*operands, self._pdl, layout)
            return TokenRows(normed, in_planes=second.plan.planes), second
        quantized = _TRITON.add_rms_norm.triton_quantize(*operands, *second.row_format, unquantized, self._pdl)
        return TokenRows(*quantized), second

    def _added(self, added: QuantizedProduct, residual: Tensor, *, parts: bool = True) -> PlannedProduct | None:
        """Return the product that is added to ``residual``, perhaps in ``parts``; None if Triton has no kernel for it, and
        the library doesn't take quantised rows.
        """
        width = added.x.shape[-1] // 2 if added.gated else added.x.shape[-1]
        supported = self.multiplies(residual, added.weight) and width <= MAX_ROW_ELEMENTS
        if not supported or residual.dim() != 2 or not residual.is_contiguous() or added.x.dtype is not residual.dtype:
            return None
        operand = added.x[..., :width]
        product = self._planned(operand, added.weight, added.bias, parts=parts)
        return product if product is not None and product.takes_rows(operand) else None

    def _parts(self, product: PlannedProduct, rows: TokenRows, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the product for a norm that adds its parts, and the bias that the parts lack."""
        is_split = product.config is not None and product.config.split > 1
        return self.launch_product(rows, product, dtype, parts=True), product.bias if is_split else None

    def _token_rows(self, added: QuantizedProduct, product: PlannedProduct) -> TokenRows:
        """Return the rows of ``added`` in the format that its ``product`` takes."""
        x, config = added.x, product.config
        if has_dynamic_activations(added.weight):
            row_format = format, group, row_dtype, _ = product.row_format
            if added.maxima is not None and not added.gated and not group:
                return TokenRows(*_TRITON.quantize_by_maxima.triton(x, added.maxima, format, row_dtype, self._pdl))
            if added.gate is not None and quantizes_gated(added.gate.values, group):
                return TokenRows(*_TRITON.gated_rms_norm.triton_quantize(x, *added.gate, *row_format, self._pdl))
            if added.gated:
                return TokenRows(*_TRITON.silu_mul.triton_quantize(x, *row_format, self._pdl))
        if not added.gated:
            return TokenRows(added.gate_rows(self._kernels))
        if config is None or not product.plan.planes:
            return TokenRows(self._kernels.silu_mul(x))
        if computes_swiglu(config, x.shape[0]) and x.dim() == 2:
            return TokenRows(x, gated=True)
        return TokenRows(_TRITON.silu_mul.triton(x, self._pdl, row_layout(config)), in_planes=True)


def library_operands(weight: QuantizedWeight, bias: Tensor | None) -> tuple[object, ...]:
    """Return the operands that describe ``weight`` and ``bias`` to the library's operator, in the order of its schema."""
    tensors = weight.data, weight.scales, weight.zero_points, weight.input_scale, bias
    block, shape = list(weight.block), list(weight.shape)
    return *tensors, weight.format, block, shape, weight.activations or "", weight.activation_group


def _group(weight: QuantizedWeight) -> int:
    return weight.activation_group if weight.activation_group < weight.shape[1] else 0


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
