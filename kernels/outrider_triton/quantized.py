"""The part of the kernel set that multiplies with quantised weights."""

from __future__ import annotations

from abc import abstractmethod

import torch
import triton
from torch import Tensor

from outrider.device import KernelSet, QuantizedWeight
from outrider_triton import quantized_ops as _quantized_ops  # noqa: F401  (registers the operators)
from outrider_triton import variants
from outrider_triton.derive import MOST, choose, every
from outrider_triton.facts import DeviceFacts
from outrider_triton.launch import ahead
from outrider_triton.quantized_ops import Plan, plan
from outrider_triton.table import MatmulConfig, bucket

_TRITON = torch.ops.outrider


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

    def quantized_config(self, x: Tensor, weight: QuantizedWeight, way: Plan) -> MatmulConfig | None:
        """The configuration for ``x [..., K]`` and such a weight; None: the library's product."""
        m, (n, k) = x.numel() // x.shape[-1], weight.shape
        if not 0 < m <= MOST:
            return None
        stored = way.stored(weight.format)
        key = stored, n, k, bucket(m)
        if key not in self._derived_quantized:
            self._derived_quantized[key] = choose(self.facts, "linear_parts", m=m, n=n, k=k, stored=stored)
        return self._derived_quantized[key]

    def linear_quantized(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        """Up to 64 tokens in one kernel, behind one that quantises them; more: the library, with plain numbers where it takes
        no others. In float32 and float64 the reference's.
        """
        halves = x.dtype in (torch.bfloat16, torch.float16)
        if not halves or not x.numel() or not self._uses("linear_quantized", x, weight.scales):
            return super().linear_quantized(x, weight, bias)
        way = plan(self.facts, weight)
        operands = _operands(weight, bias)
        if self._scope.first(("linear_quantized", x.dtype, weight.label, weight.shape, bias is None)):
            self._compile_quantized(x, weight, way, operands)
        config = None if way is None else self.quantized_config(x, weight, way)
        if way is None or config is None:
            scaled = _scales(x, weight, way)
            return _TRITON.linear_quantized.library(x, *operands, scaled, self.facts.fp8, self.pdl)  # type: ignore[no-any-return]
        return _TRITON.linear_quantized.triton(  # type: ignore[no-any-return]
            x, *operands, *self._way(way), config.as_list(), self.pdl
        )

    def _way(self, way: Plan) -> tuple[object, ...]:
        asm = self.facts.capability >= 80 and not triton.knobs.runtime.interpret
        return way.mode, way.columns, way.at_once, way.native, self.facts.fp8, asm

    def _compile_quantized(self, x: Tensor, weight: QuantizedWeight, way: Plan | None, operands: tuple[object, ...]) -> None:
        """Every configuration that such a weight has for some number of tokens."""
        few = x.reshape(-1, x.shape[-1])[:4]
        with ahead():
            _TRITON.linear_quantized.library(few, *operands, False, self.facts.fp8, self.pdl)
        if way is None:
            return
        n, k = weight.shape
        for each in every(self.facts, "linear_parts", n=n, k=k, stored=way.stored(weight.format)):
            with ahead():
                _TRITON.linear_quantized.triton(few, *operands, *self._way(way), each.as_list(), self.pdl)


def _operands(weight: QuantizedWeight, bias: Tensor | None) -> tuple[object, ...]:
    held = weight.data, weight.scales, weight.zero_points, weight.input_scale, bias
    block, shape = list(weight.block), list(weight.shape)
    return *held, weight.format, block, shape, weight.activations or "", weight.activation_group


def _scales(x: Tensor, weight: QuantizedWeight, way: Plan | None) -> bool:
    """Whether the library multiplies both operands as they're stored, with a scale a row and a column."""
    if way is None or not way.native or way.mode != "row" or 0 < weight.activation_group < weight.shape[1]:
        return False
    if x.device.type != "cuda" or any(size % 16 for size in weight.shape):
        return False
    m = x.numel() // x.shape[-1]
    return m > 16 and (weight.format == "int8" or x.dtype is torch.bfloat16)
