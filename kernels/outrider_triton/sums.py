"""The part of the kernel set that adds products with quantised weights to the residual, with no such product behind them."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import QuantizedProduct
from outrider_triton.launch import ahead
from outrider_triton.quantized import Rows, TritonQuantized
from outrider_triton.quantized_ops import LONGEST
from outrider_triton.table import STREAMED, MatmulConfig

_TRITON = torch.ops.outrider


class TritonSums(TritonQuantized):
    """A stack's last layer and a draft's: rows are quantised as between layers, by what made them where that left maxima."""

    def linear_quantized_add(self, added: QuantizedProduct, residual: Tensor) -> Tensor:
        """A product through a ring adds itself: torch's sum is a kernel more, which neither begins early nor lets others."""
        first = self._first(added, residual, parts=False)
        if first is None:
            return super().linear_quantized_add(added, residual)
        (way, config), weight = first, added.weight
        ring = way.ring and not way.planes
        if self._scope.first(("linear_quantized_add", residual.dtype, weight.shape, weight.label)):
            self._compile_activation(added, way)
            few = residual[:4]
            for each in self._every(weight, way):
                if ring and each.descriptor == STREAMED:
                    with ahead():
                        self._added(Rows(few.new_empty((few.shape[0], weight.shape[1])), None, False), added, few, each)
        rows = self._taken(added, way, config)
        if ring and config.descriptor == STREAMED:
            self._added(rows, added, residual, config)
            return residual
        x, scales, laid = rows
        made = self._skinny(x, weight, added.bias, way, config, dtype=residual.dtype, scales=scales, laid=laid)
        return residual.add_(made)

    def _added(self, rows: Rows, added: QuantizedProduct, residual: Tensor, config: MatmulConfig) -> None:
        weight = added.weight
        held = weight.data, weight.scales, weight.input_scale, added.bias, weight.block[0], weight.activations or ""
        x = rows.x if rows.x.stride(-1) == 1 else rows.x.contiguous()
        _TRITON.linear_quantized.triton_add(x, *held, rows.scales, residual, config.as_list(), self.pdl)

    def linear_quantized_add_rms_norm(self, added: QuantizedProduct, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """The norm adds the product's parts up."""
        able = norm.dtype is residual.dtype and residual.shape[-1] <= LONGEST and self._uses("add_rms_norm", residual)
        first = self._first(added, residual) if able else None
        if first is None:
            return super().linear_quantized_add_rms_norm(added, residual, norm, eps)
        way, weight = first[0], added.weight
        if self._scope.first(("linear_quantized_add_rms_norm", residual.dtype, weight.shape, weight.label)):
            self._compile_activation(added, way)
            for split in {each.split for each in self._every(weight, way)}:
                few = residual[:4].clone()
                parts = few.new_empty((split, *few.shape), dtype=torch.float32) if split > 1 else few
                with ahead():
                    bias = added.bias if split > 1 else None
                    _TRITON.add_parts_rms_norm.triton(parts, bias, few, norm, 1e-5, self.pdl)
        product, left = self._product(added, *first, residual.dtype)
        return _TRITON.add_parts_rms_norm.triton(product, left, residual, norm, eps, self.pdl)  # type: ignore[no-any-return]
