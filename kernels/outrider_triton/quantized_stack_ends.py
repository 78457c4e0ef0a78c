"""TritonStackEnds: products with quantised weights at the ends of a layer stack and of a draft model."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.device import QuantizedProduct, QuantizedWeight
from outrider_triton.launch import compile_only, has_kernel
from outrider_triton.quantized import TokenRows, TritonQuantized, activation_format, has_dynamic_activations
from outrider_triton.quantized_ops import MAX_ROW_ELEMENTS, plan
from outrider_triton.table import STREAMED, MatmulConfig

_TRITON = torch.ops.outrider


class TritonStackEnds(TritonQuantized):
    """Quantised products without another quantised product before or after them.

    Rows are quantised by the kernel that computes them, or from the row maxima that this kernel stored.
    """

    def embed_beside_linear_quantized(
        self, tokens: Tensor, embedding: Tensor, hidden: Tensor, weight: QuantizedWeight, bias: Tensor | None = None
    ) -> Tensor:
        """Quantise each token's embedding and hidden features while they are read, then multiply."""
        product_plan, config, k = plan(self.facts, weight), None, weight.shape[1]
        supported = (
            hidden.dim() == 2 and hidden.stride(1) == 1 and hidden.dtype is embedding.dtype and embedding.is_contiguous()
        )
        supported = supported and k <= MAX_ROW_ELEMENTS and has_dynamic_activations(weight) and has_kernel(embedding, hidden)
        if product_plan is not None and supported and self._multiplies(hidden, weight):
            concatenated = hidden[:, :1].expand(-1, k)  # only the shape and dtype are used
            config = self.quantized_config(concatenated, weight, product_plan)
            self._prepare(concatenated, weight, bias)
        if product_plan is None or config is None:
            return super().embed_beside_linear_quantized(tokens, embedding, hidden, weight, bias)
        row_format = activation_format(weight, product_plan)
        x, scales = _TRITON.embed_beside.triton_quantize(tokens, embedding, hidden, *row_format, self.pdl)
        return self._skinny(x, weight, bias, product_plan, config, dtype=hidden.dtype, scales=scales)

    def linear_quantized_add(self, added: QuantizedProduct, residual: Tensor) -> Tensor:
        """Add a quantised product to the residual.

        A streamed product adds to the residual itself. Torch's addition is one kernel more, which starts after its
        predecessor has ended and doesn't let its successor start early.
        """
        first = self._first(added, residual, parts=False)
        if first is None:
            return super().linear_quantized_add(added, residual)
        (product_plan, config), weight = first, added.weight
        can_stream = product_plan.can_stream and not product_plan.planes
        if self._scope.must_compile(("linear_quantized_add", residual.dtype, weight.shape, weight.label, added.bias is None)):
            self._compile_activation(added, product_plan)
            sample = residual[:4]
            for tiling in self._every(residual, weight, product_plan):
                if can_stream and tiling.descriptor == STREAMED:
                    with compile_only():
                        self._launch_add(
                            TokenRows(sample.new_empty((sample.shape[0], weight.shape[1])), None, False),
                            added,
                            sample,
                            tiling,
                        )
        rows = self._taken(added, product_plan, config)
        if can_stream and config.descriptor == STREAMED:
            self._launch_add(rows, added, residual, config)
            return residual
        x, scales, laid, gated = rows
        product = self._skinny(
            x, weight, added.bias, product_plan, config, dtype=residual.dtype, scales=scales, laid=laid, gated=gated
        )
        return residual.add_(product)

    def _launch_add(self, rows: TokenRows, added: QuantizedProduct, residual: Tensor, config: MatmulConfig) -> None:
        weight = added.weight
        tensors = weight.data, weight.scales, weight.input_scale, added.bias
        x = rows.x if rows.x.stride(-1) == 1 else rows.x.contiguous()
        options = weight.block[0], weight.activations or "", rows.scales
        _TRITON.linear_quantized.triton_add(x, *tensors, *options, residual, config.as_list(), self.pdl)

    def linear_quantized_add_rms_norm(self, added: QuantizedProduct, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Multiply; the norm kernel adds the product's parts to the residual."""
        supported = norm.dtype is residual.dtype and residual.shape[-1] <= MAX_ROW_ELEMENTS
        first = self._first(added, residual) if supported else None
        if first is None:
            return super().linear_quantized_add_rms_norm(added, residual, norm, eps)
        product_plan, weight = first[0], added.weight
        weight_key = weight.shape, weight.label, added.bias is None
        if self._scope.must_compile(("linear_quantized_add_rms_norm", residual.dtype, *weight_key)):
            self._compile_activation(added, product_plan)
            for split in {each.split for each in self._every(residual, weight, product_plan)}:
                sample = residual[:4].clone()
                parts = sample.new_empty((split, *sample.shape), dtype=torch.float32) if split > 1 else sample
                with compile_only():
                    bias = added.bias if split > 1 else None
                    _TRITON.add_rms_norm.triton(parts, bias, sample, norm, 1e-5, self.pdl)
        product, remaining_bias = self._product(added, *first, residual.dtype)
        return _TRITON.add_rms_norm.triton(product, remaining_bias, residual, norm, eps, self.pdl)  # type: ignore[no-any-return]
