"""The part of the kernel set that multiplies with quantised weights."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from outrider.device import KernelSet, QuantizedProduct, QuantizedWeight, RotaryArgs
from outrider_triton import activated_ops as _activated_ops  # noqa: F401  (these register the operators)
from outrider_triton import library_ops as _library_ops  # noqa: F401
from outrider_triton import quantized_ops as _quantized_ops  # noqa: F401
from outrider_triton import variants
from outrider_triton.derive import MOST, choose, every, size_of
from outrider_triton.derive_quantized import OURS
from outrider_triton.facts import DeviceFacts
from outrider_triton.launch import ahead
from outrider_triton.planes_ops import DIGITS, activates, laying, room
from outrider_triton.quantized_ops import LONGEST, Plan, added, kept_dtype, plan
from outrider_triton.rotary import rotates
from outrider_triton.table import BUCKETS, MatmulConfig

_TRITON = torch.ops.outrider


class Rows(NamedTuple):
    """What a product takes: ``x`` as it was made, quantised by ``scales``, or ``laid`` out in planes; ``gated``: gate and up,
    and the product computes SwiGLU.
    """

    x: Tensor
    scales: Tensor | None
    laid: bool
    gated: bool = False


class Normed(NamedTuple):
    """What a norm leaves for the product behind it: rows, quantised where there are scales, and how they're multiplied."""

    rows: Tensor
    scales: Tensor | None
    way: Plan
    config: MatmulConfig


class TritonQuantized(KernelSet):
    """Products with quantised weights: skinny ones in one kernel, others the library's.

    What decides is what the estimate says for as many bytes (:mod:`outrider_triton.derive`): no device was measured.
    """

    facts: DeviceFacts
    pdl: bool
    _scope: variants.Scope
    _derived_quantized: dict[tuple[object, ...], MatmulConfig | None]

    @abstractmethod
    def _uses(self, kernel: str, *operands: Tensor) -> bool:
        """Whether a kernel is Triton's for these operands."""

    def quantized_config(self, x: Tensor, weight: QuantizedWeight, way: Plan, *, parts: bool = True) -> MatmulConfig | None:
        """The configuration for ``x [..., K]`` and such a weight; None: the library's product. ``parts``: see
        :meth:`_derive`.
        """
        m = x.numel() // x.shape[-1]
        return None if m > OURS and _librarys(x, weight, way) else self._derive(m, weight, way, parts=parts)

    def _derive(
        self, m: int, weight: QuantizedWeight, way: Plan, *, half: int = 0, gated: bool = False, parts: bool = True
    ) -> MatmulConfig | None:
        """Kept for each bucket of tokens. ``half``: of a head, for a product that turns its rows; ``gated``: one of gate and
        up. ``parts``: whether it may be split; what comes behind it adds the parts up, or a kernel of its own.
        """
        if not 0 < m <= MOST:
            return None
        stored, (n, k) = way.stored(weight.format), weight.shape
        operator = "linear_rope" if half else "linear_silu_mul" if gated else "linear_parts" if parts else "linear"
        key = operator, stored, n, k, size_of(m, stored), half
        if key not in self._derived_quantized:
            self._derived_quantized[key] = choose(self.facts, operator, m=m, n=n, k=k, half=half, stored=stored)
        return self._derived_quantized[key]

    def linear_quantized(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        """Up to 128 tokens in one kernel, behind one that quantises them (64 in e4m3 by rows); more: the library, with plain
        numbers where it takes no others. In float32 and float64 the reference's.
        """
        if not self._multiplies(x, weight):
            return super().linear_quantized(x, weight, bias)
        self._prepare(x, weight, bias)
        way = plan(self.facts, weight)
        config = None if way is None else self.quantized_config(x, weight, way)
        if way is None or config is None:
            scaled = _scales(x, weight, way)
            return _TRITON.linear_quantized.library(  # type: ignore[no-any-return]  # torch.ops has no types
                x, *_operands(weight, bias), scaled, self.facts.fp8, self.pdl
            )
        return self._skinny(x, weight, bias, way, config)

    def _multiplies(self, x: Tensor, weight: QuantizedWeight) -> bool:
        halves = x.dtype in (torch.bfloat16, torch.float16)
        return halves and bool(x.numel()) and self._uses("linear_quantized", x, weight.scales)

    def _skinny(
        self,
        x: Tensor,
        weight: QuantizedWeight,
        bias: Tensor | None,
        way: Plan,
        config: MatmulConfig,
        *,
        dtype: torch.dtype | None = None,
        scales: Tensor | None = None,
        parts: bool = False,
        laid: bool = False,
        gated: bool = False,
    ) -> Tensor:
        """``scales``: ``x`` was quantised, of a ``dtype``. ``parts``: one that is split is left so, without its bias.
        ``laid``: ``x`` is in planes. ``gated``: it's gate and up of one token.
        """
        asm = self.facts.capability >= 80 and not triton.knobs.runtime.interpret
        if gated:
            product = _TRITON.linear_quantized.triton_gated_planes(
                x, weight.data, weight.scales, bias, config.as_list(), self.pdl
            )
            return product if parts or config.split == 1 else added(product, bias, x, x.dtype, self.pdl)
        if way.planes:
            operands = x, weight.data, weight.scales, weight.zero_points, bias, list(weight.block)
            kind = dtype or x.dtype
            own = kind if laid else None, way.mode, way.columns, way.at_once, asm, config.as_list(), self.pdl
            product = _TRITON.linear_quantized.triton_planes(*operands, *own)
            whole = parts or config.split == 1
            return product if whole else added(product, bias, x, kind, self.pdl)
        made = scales, dtype or x.dtype, parts, way.mode, way.columns, way.at_once, way.native, self.facts.fp8, asm
        return _TRITON.linear_quantized.triton(  # type: ignore[no-any-return]  # torch.ops has no types
            x, *_operands(weight, bias), *made, config.as_list(), self.pdl
        )

    def norm_linear_quantized(
        self,
        added: QuantizedProduct,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Three kernels for few tokens: the norm adds parts of the first product up, and quantises what the second takes."""
        normed = self._normed(added, residual, norm, eps, weight, bias, parts=False)
        if normed is None:
            return super().norm_linear_quantized(added, residual, norm, eps, weight, bias)
        return self._behind(normed, residual, weight, bias, parts=False)

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
        """Four kernels for few tokens: what turns queries and keys adds parts of their product up. Three where the product
        comes through a ring and turns them itself.
        """
        normed = None
        if self._turns(residual, rotary):
            normed = self._normed(added, residual, norm, eps, weight, bias, parts=True)
        if normed is None:
            return super().norm_linear_quantized_rope_write_cache(added, residual, norm, eps, weight, bias, rotary)
        return self._turned_behind(normed, residual, weight, bias, rotary)

    def linear_quantized_rope_write_cache(
        self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, rotary: RotaryArgs
    ) -> Tensor:
        """Behind the kernel that makes rows as a product takes them, as behind a norm."""
        way, config = plan(self.facts, weight), None
        if way is not None and x.dim() == 2 and self._multiplies(x, weight) and self._turns(x, rotary):
            config = self.quantized_config(x, weight, way)
        if way is None or config is None:
            return super().linear_quantized_rope_write_cache(x, weight, bias, rotary)
        self._prepare(x, weight, bias)
        return self._turned_behind(self._as_taken(x, weight, way, config), x, weight, bias, rotary)

    def _turns(self, x: Tensor, rotary: RotaryArgs) -> bool:
        """Whether our kernels turn and write what a product makes in the dtype of ``x``."""
        return rotates(rotary, x) and self._uses("rope_write_cache", x)

    def _as_taken(self, x: Tensor, weight: QuantizedWeight, way: Plan, config: MatmulConfig) -> Normed:
        """Rows of ``x`` [T, K] as a product takes them, where nothing ahead made them so."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        if way.planes:
            return Normed(_TRITON.lay_in_planes.triton(x, self.pdl, laying(config)), None, way, config)
        if weight.activations is None:
            return Normed(x, None, way, config)
        format, group, kept = kept_as(weight, way)
        rows, scales = _TRITON.quantize_rows.triton(x, format, group, weight.input_scale, kept, self.pdl)
        return Normed(rows, scales, way, config)

    def _turned_behind(
        self, normed: Normed, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, rotary: RotaryArgs
    ) -> Tensor:
        """The product of ``normed`` rows in the dtype of ``x``: turned by the product, or by what adds its parts."""
        way, kind, k_cache = normed.way, x.dtype, rotary.k_cache
        caches = k_cache.shape[1:], k_cache.dtype
        if self._scope.first(("rope_of_quantized", kind, weight.shape, weight.label, bias is None, *caches)):
            self._compile_rotary(x, weight, bias, rotary, way)
        turning = self._derive(x.shape[0], weight, way, half=k_cache.shape[3] // 2) if way.ring else None
        # Rows that lie otherwise are those of a product without a ring.
        if turning is not None and (laying(normed.config) == DIGITS if way.planes else normed.scales is not None):
            return self._turned(normed.rows, normed.scales, weight, bias, rotary, kind, turning)
        made = self._behind(normed, x, weight, bias, parts=True)
        left = bias if made.dim() == 3 else None
        return _TRITON.rope_write_cache.triton_parts(made, left, *rotary, kind, self.pdl)  # type: ignore[no-any-return]

    def _turned(
        self,
        rows: Tensor,
        scales: Tensor | None,
        weight: QuantizedWeight,
        bias: Tensor | None,
        rotary: RotaryArgs,
        dtype: torch.dtype,
        config: MatmulConfig,
    ) -> Tensor:
        """The product through a ring, which turns what it makes; rows without ``scales`` are in digits."""
        if scales is None:
            return _TRITON.rope_write_cache.triton_linear_planes(  # type: ignore[no-any-return]  # torch.ops has no types
                rows, weight.data, weight.scales, bias, dtype, *rotary, config.as_list(), self.pdl
            )
        operands = weight.data, weight.scales, weight.block[0], bias, dtype
        return _TRITON.rope_write_cache.triton_linear_quantized(  # type: ignore[no-any-return]
            rows, scales, *operands, *rotary, config.as_list(), self.pdl
        )

    def _compile_rotary(
        self, residual: Tensor, weight: QuantizedWeight, bias: Tensor | None, rotary: RotaryArgs, way: Plan
    ) -> None:
        """What turns queries and keys of such a weight's product, for any number of tokens: rings, and the sum of parts."""
        cos, sin, k_cache, v_cache, slots = rotary
        few, turned, (n, k) = residual[:4], (cos[:4], sin[:4], k_cache, v_cache, slots[:4]), weight.shape
        for split in {each.split for each in self._every(residual, weight, way)}:
            shape = few.shape[0], n
            made = few.new_empty((split, *shape), dtype=torch.float32) if split > 1 else few.new_empty(shape)
            with ahead():
                _TRITON.rope_write_cache.triton_parts(made, bias if split > 1 else None, *turned, few.dtype, self.pdl)
        if not way.ring:
            return
        if way.planes:
            rows, scales = room(few, few.shape, DIGITS)[0], None
        else:
            rows, scales = torch.empty_like(few, dtype=weight.data.dtype), few.new_empty((4, 1), dtype=torch.float32)
        half, stored = k_cache.shape[3] // 2, way.stored(weight.format)
        for each in every(self.facts, "linear_rope", n=n, k=k, half=half, stored=stored):
            with ahead():
                self._turned(rows, scales, weight, bias, RotaryArgs(*turned), few.dtype, each)

    def _behind(
        self, normed: Normed, residual: Tensor, weight: QuantizedWeight, bias: Tensor | None, *, parts: bool
    ) -> Tensor:
        """The second product; ``parts`` as in :meth:`_skinny`."""
        laid = normed.scales is None and normed.way.planes
        return self._skinny(
            normed.rows,
            weight,
            bias,
            normed.way,
            normed.config,
            dtype=residual.dtype,
            scales=normed.scales,
            parts=parts,
            laid=laid,
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
        taken: Callable[[Plan, MatmulConfig], Rows] | None = None,
    ) -> Normed | None:
        """:meth:`norm_linear_quantized` up to its second product, which may be in ``parts``; None, and nothing was done: not
        for these. ``taken`` makes what the first product takes, ``added.x`` having its shape and dtype alone.
        """
        able = self._multiplies(residual, weight) and norm.dtype is residual.dtype and residual.shape[-1] <= LONGEST
        second = plan(self.facts, weight) if able and self._uses("add_rms_norm", residual) else None
        first = None if second is None else self._first(added, residual)
        if first is None or second is None:
            return None
        two = self.quantized_config(residual, weight, second, parts=parts)
        self._prepare(residual, weight, bias)
        if two is None:
            return None
        both = added.weight.shape, added.weight.label, added.bias is None, weight.shape, weight.label
        if self._scope.first(("norm_linear_quantized", residual.dtype, *both)):
            self._compile_norms(added, first[0], residual, norm, weight, second)
        product, left = self._product(added, *first, residual.dtype, taken)
        if not dynamic(weight):
            laid_as = laying(two) if second.planes else 0
            normed = _TRITON.add_parts_rms_norm.triton(product, left, residual, norm, eps, self.pdl, laid_as)
            return Normed(normed, None, second, two)
        normed, scales = self._norm(product, left, residual, norm, eps, weight, second)
        return Normed(normed, scales, second, two)

    def _first(self, added: QuantizedProduct, residual: Tensor, *, parts: bool = True) -> tuple[Plan, MatmulConfig] | None:
        """How a product that's added to ``residual`` is made, perhaps in ``parts``; None: not by a kernel of ours."""
        width = added.x.shape[-1] // 2 if added.gated else added.x.shape[-1]
        narrow, way = added.x[..., :width], plan(self.facts, added.weight)
        able = self._multiplies(narrow, added.weight) and self._multiplies(residual, added.weight)
        able = able and residual.dim() == 2 and residual.is_contiguous() and added.x.dtype is residual.dtype
        if not able or way is None or width > LONGEST:
            return None
        config = self.quantized_config(narrow, added.weight, way, parts=parts)
        self._prepare(narrow, added.weight, added.bias)
        return None if config is None else (way, config)

    def _product(
        self,
        added: QuantizedProduct,
        way: Plan,
        config: MatmulConfig,
        dtype: torch.dtype,
        taken: Callable[[Plan, MatmulConfig], Rows] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The product for a norm that adds its parts up, and the bias that these lack. ``taken``: see :meth:`_normed`."""
        x, scales, laid, gated = self._taken(added, way, config) if taken is None else taken(way, config)
        product = self._skinny(
            x, added.weight, added.bias, way, config, dtype=dtype, scales=scales, parts=True, laid=laid, gated=gated
        )
        return product, added.bias if config.split > 1 else None

    def _activated(
        self, normed: Normed, residual: Tensor, weight: QuantizedWeight, bias: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """:meth:`silu_mul` of the second product, gate and up, by the product itself, with the maxima of its rows; None, and
        nothing was done: not for these.
        """
        way = normed.way
        config = self._derive(residual.shape[0], weight, way, gated=True) if way.ring and not way.planes else None
        if config is None or normed.scales is None or not self._uses("silu_mul", residual):
            return None
        own = weight.data, weight.scales, weight.block[0], bias, residual.dtype
        if self._scope.first(("linear_quantized_silu_mul", residual.dtype, weight.shape, weight.label, bias is None)):
            (n, k), stored = weight.shape, way.stored(weight.format)
            for each in every(self.facts, "linear_silu_mul", n=n, k=k, stored=stored):
                with ahead():
                    few = _TRITON.linear_silu_mul.triton_quantized(
                        normed.rows[:4], normed.scales[:4], *own, each.as_list(), self.pdl
                    )
                    _TRITON.quantize_by_maxima.triton(*few, weight.activations or "", weight.data.dtype, self.pdl)
        made: tuple[Tensor, Tensor] = _TRITON.linear_silu_mul.triton_quantized(
            normed.rows, normed.scales, *own, config.as_list(), self.pdl
        )
        return made

    def _taken(self, added: QuantizedProduct, way: Plan, config: MatmulConfig) -> Rows:
        x, weight = added.x, added.weight
        if added.maxima is not None and not added.gated and dynamic(weight) and not _group(weight):
            format, _, kept = kept_as(weight, way)
            rows, scales = _TRITON.quantize_by_maxima.triton(x, added.maxima, format, kept, self.pdl)
            return Rows(rows, scales, False)
        if not added.gated:
            return Rows(x, None, False)
        if dynamic(weight):
            rows, scales = _TRITON.silu_mul.triton_quantize(x, *kept_as(weight, way), self.pdl)
            return Rows(rows, scales, False)
        laid = way.planes and self._uses("silu_mul", x)
        if laid and activates(config, x.shape[0]) and x.dim() == 2:
            return Rows(x, None, False, gated=True)
        return Rows(_TRITON.silu_mul.triton(x, self.pdl, laying(config)) if laid else self.silu_mul(x), None, laid)

    def _norm(
        self,
        product: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: QuantizedWeight,
        way: Plan,
    ) -> tuple[Tensor, Tensor]:
        kept = kept_as(weight, way)
        rows, scales = _TRITON.add_rms_norm.triton_quantize(product, bias, residual, norm, eps, *kept, self.pdl)
        return rows, scales

    def _prepare(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
        """Every configuration that such a weight has for some number of tokens; once, in the scope alone."""
        if not self._scope.first(("linear_quantized", x.dtype, weight.label, weight.shape, bias is None)):
            return
        few, way = x.reshape(-1, x.shape[-1])[:4], plan(self.facts, weight)
        with ahead():
            _TRITON.linear_quantized.library(few, *_operands(weight, bias), False, self.facts.fp8, self.pdl)
            if weight.format == "int8" and way is not None and _as_stored(x, weight, way):
                sums = few.new_empty((few.shape[0], weight.shape[0]), dtype=torch.int32)
                by_row = few.new_empty((few.shape[0], 1), dtype=torch.float32)
                _TRITON.scale_products.triton(sums, by_row, weight.scales, bias, weight.block[0], x.dtype, self.pdl)
        if way is not None:
            for each in self._every(x, weight, way):
                with ahead():
                    self._skinny(few, weight, bias, way, each)

    def _every(self, like: Tensor, weight: QuantizedWeight, way: Plan) -> tuple[MatmulConfig, ...]:
        """Each configuration that such a weight has for some number of tokens, of the dtype and device of ``like``."""
        (n, k), stored = weight.shape, way.stored(weight.format)
        but = [size for size in BUCKETS if size > OURS and _librarys(like, weight, way)]
        found = (every(self.facts, operator, n=n, k=k, but=but, stored=stored) for operator in ("linear_parts", "linear"))
        return tuple(dict.fromkeys(itertools.chain.from_iterable(found)))

    def _compile_activation(self, added: QuantizedProduct, way: Plan) -> None:
        """SwiGLU that leaves its rows as the product behind it may take them."""
        if added.gated and way.planes and not dynamic(added.weight) and self._uses("silu_mul", added.x):
            configs = self._every(added.x, added.weight, way)
            for how in {laying(each) for each in configs}:
                with ahead():
                    _TRITON.silu_mul.triton(added.x[:4], self.pdl, how)
            for each in configs:
                if activates(each, 1):
                    with ahead():
                        self._skinny(added.x[:1], added.weight, added.bias, way, each, parts=True, gated=True)

    def _compile_norms(
        self,
        added: QuantizedProduct,
        first: Plan,
        residual: Tensor,
        norm: Tensor,
        weight: QuantizedWeight,
        second: Plan,
    ) -> None:
        """The norm behind as many parts as the first product may have, and rows laid out as either product may take them."""
        self._compile_activation(added, first)
        hows = {laying(each) if second.planes else 0 for each in self._every(residual, weight, second)}
        splits = {each.split for each in self._every(residual, added.weight, first)}
        for split, how in itertools.product(splits, hows):
            few = residual[:4].clone()
            parts = few.new_empty((split, *few.shape), dtype=torch.float32) if split > 1 else few
            left = added.bias if split > 1 else None
            with ahead():
                if dynamic(weight):
                    self._norm(parts, left, few, norm, 1e-5, weight, second)
                else:
                    _TRITON.add_parts_rms_norm.triton(parts, left, few, norm, 1e-5, self.pdl, how)


def _operands(weight: QuantizedWeight, bias: Tensor | None) -> tuple[object, ...]:
    held = weight.data, weight.scales, weight.zero_points, weight.input_scale, bias
    block, shape = list(weight.block), list(weight.shape)
    return *held, weight.format, block, shape, weight.activations or "", weight.activation_group


def _group(weight: QuantizedWeight) -> int:
    return weight.activation_group if weight.activation_group < weight.shape[1] else 0


def kept_as(weight: QuantizedWeight, way: Plan) -> tuple[str, int, torch.dtype]:
    """As what rows are left for a product with ``dynamic`` activations: format, columns of a scale (0: all), dtype."""
    return weight.activations or "", _group(weight), kept_dtype(weight.data, way.native)


def dynamic(weight: QuantizedWeight) -> bool:
    """Whether its activations are quantised by scales that the kernel before can find: a power of two of columns each."""
    group = _group(weight)
    return weight.activations is not None and weight.input_scale is None and group & (group - 1) == 0


def _scales(x: Tensor, weight: QuantizedWeight, way: Plan | None) -> bool:
    """Whether the library multiplies ``x`` and the weight as they're stored, with a scale a row and a column."""
    return way is not None and x.numel() > 16 * x.shape[-1] and _as_stored(x, weight, way)


def _as_stored(like: Tensor, weight: QuantizedWeight, way: Plan) -> bool:
    """Whether it does so with more than 16 tokens, whose dtype and device are those of ``like``."""
    if not way.native or way.mode != "row" or 0 < weight.activation_group < weight.shape[1]:
        return False
    if like.device.type != "cuda" or any(size % 16 for size in weight.shape):
        return False
    return weight.format == "int8" or like.dtype is torch.bfloat16


def _librarys(like: Tensor, weight: QuantizedWeight, way: Plan) -> bool:
    """Whether more than 64 tokens like these are the library's: it takes e4m3 as it's stored, and in a layer that is faster
    (docs/evidence/2026-11-28-many-tokens.md).
    """
    return weight.format == "fp8" and _as_stored(like, weight, way)
