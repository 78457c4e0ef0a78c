"""The part of the kernel set that multiplies with quantised weights at the ends of a stack, and of a draft."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import QuantizedProduct, QuantizedWeight
from outrider_triton.launch import ahead
from outrider_triton.quantized import Rows, TritonQuantized, dynamic, kept_as
from outrider_triton.quantized_ops import LONGEST, plan
from outrider_triton.table import STREAMED, MatmulConfig

_TRITON = torch.ops.outrider


class TritonEnds(TritonQuantized):
    """Products that have no other with a quantised weight ahead or behind: rows are quantised by what makes them, or by the
    maxima that it left.
    """

    def embed_beside_linear_quantized(
        self, tokens: Tensor, embedding: Tensor, hidden: Tensor, weight: QuantizedWeight, bias: Tensor | None = None
    ) -> Tensor:
        """What reads embeddings quantises them, with what is beside them."""
        way, config, k = plan(self.facts, weight), None, weight.shape[1]
        able = hidden.dim() == 2 and hidden.stride(1) == 1 and hidden.dtype is embedding.dtype and embedding.is_contiguous()
        able = able and k <= LONGEST and dynamic(weight) and self._uses("embed_beside", embedding, hidden)
        if way is not None and able and self._multiplies(hidden, weight):
            whole = hidden[:, :1].expand(-1, k)  # for its shape and dtype
            config = self.quantized_config(whole, weight, way)
            self._prepare(whole, weight, bias)
        if way is None or config is None:
            return super().embed_beside_linear_quantized(tokens, embedding, hidden, weight, bias)
        kept = kept_as(weight, way)
        x, scales = _TRITON.embed_beside.triton_quantize(tokens, embedding, hidden, *kept, self.pdl)
        return self._skinny(x, weight, bias, way, config, dtype=hidden.dtype, scales=scales)

    def linear_quantized_add(self, added: QuantizedProduct, residual: Tensor) -> Tensor:
        """A product through a ring adds itself: torch's sum is a kernel more, which neither begins early nor lets others."""
        first = self._first(added, residual, parts=False)
        if first is None:
            return super().linear_quantized_add(added, residual)
        (way, config), weight = first, added.weight
        ring = way.ring and not way.planes
        if self._scope.first(("linear_quantized_add", residual.dtype, weight.shape, weight.label, added.bias is None)):
            self._compile_activation(added, way)
            few = residual[:4]
            for each in self._every(residual, weight, way):
                if ring and each.descriptor == STREAMED:
                    with ahead():
                        self._added(Rows(few.new_empty((few.shape[0], weight.shape[1])), None, False), added, few, each)
        rows = self._taken(added, way, config)
        if ring and config.descriptor == STREAMED:
            self._added(rows, added, residual, config)
            return residual
        x, scales, laid, gated = rows
        made = self._skinny(x, weight, added.bias, way, config, dtype=residual.dtype, scales=scales, laid=laid, gated=gated)
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
        own = weight.shape, weight.label, added.bias is None
        if self._scope.first(("linear_quantized_add_rms_norm", residual.dtype, *own)):
            self._compile_activation(added, way)
            for split in {each.split for each in self._every(residual, weight, way)}:
                few = residual[:4].clone()
                parts = few.new_empty((split, *few.shape), dtype=torch.float32) if split > 1 else few
                with ahead():
                    bias = added.bias if split > 1 else None
                    _TRITON.add_parts_rms_norm.triton(parts, bias, few, norm, 1e-5, self.pdl)
        product, left = self._product(added, *first, residual.dtype)
        return _TRITON.add_parts_rms_norm.triton(product, left, residual, norm, eps, self.pdl)  # type: ignore[no-any-return]
