"""The part of the kernel set that multiplies e4m3 through rings, two products and the norm between them in two kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from outrider.device import KernelSet, QuantizedProduct, QuantizedWeight, RotaryArgs
from outrider_triton import fused_ops as _fused_ops  # noqa: F401  (these register the operators)
from outrider_triton import quantized_ops as _quantized_ops  # noqa: F401
from outrider_triton import variants
from outrider_triton.derive import Stored, choose, every
from outrider_triton.facts import DeviceFacts
from outrider_triton.launch import ahead
from outrider_triton.quantized_ops import LONGEST, Plan, kept_dtype, plan, quantized_rows
from outrider_triton.table import BUCKETS, MatmulConfig, bucket

_TRITON = torch.ops.outrider
FEW = 16
"""To so many tokens the second product quantises what it takes: each program does so anew."""
_MORE = tuple(size for size in BUCKETS if size > FEW)


class QuantizedRings(KernelSet):
    """Pairs of products whose operands come through rings (:mod:`outrider_triton.jit.streamed`).

    The first one adds to the residual and leaves its rows times the norm's weight, and for each program's share the sum of
    squares and the largest number; the second one divides by what they say, and rounds.
    """

    facts: DeviceFacts
    pdl: bool
    _scope: variants.Scope
    _derived_quantized: dict[tuple[object, ...], MatmulConfig | None]

    @abstractmethod
    def _uses(self, kernel: str, *operands: Tensor) -> bool:
        """Whether a kernel is Triton's for these operands."""

    def _multiplies(self, x: Tensor, weight: QuantizedWeight) -> bool:
        halves = x.dtype in (torch.bfloat16, torch.float16)
        return halves and bool(x.numel()) and self._uses("linear_quantized", x, weight.scales)

    def _gate(self, x: Tensor, weight: QuantizedWeight, way: Plan) -> tuple[Tensor, Tensor]:
        kept = group_of(weight), kept_dtype(weight.data, way.native)
        rows, scales = _TRITON.silu_mul.triton_quantize(x, weight.activations, *kept, self.pdl)
        return rows, scales

    def _rings(self, added: QuantizedProduct, residual: Tensor, norm: Tensor, weight: QuantizedWeight) -> bool:
        """Whether both products come through rings, with the norm between them. In bfloat16 alone: a row that isn't divided
        by its root mean square yet may be too large for float16.
        """
        width = added.x.shape[-1] // 2 if added.gated else added.x.shape[-1]
        alike = residual.dtype is torch.bfloat16 and norm.dtype is residual.dtype and added.x.dtype is residual.dtype
        if not alike or residual.dim() != 2 or not residual.is_contiguous() or max(width, residual.shape[1]) > LONGEST:
            return False
        if not self._multiplies(added.x, added.weight) or not self._uses("add_rms_norm", residual):
            return False
        ways = [plan(self.facts, each) for each in (added.weight, weight)]
        ringed = all(way is not None and way.ring and not way.planes for way in ways)
        return ringed and dynamic(added.weight) and dynamic(weight) and self._adding(4, added.weight) is not None

    def _stored(self, weight: QuantizedWeight) -> Stored:
        way = plan(self.facts, weight)
        assert way is not None, "asked of weights alone that come through a ring"
        return way.stored(weight.format)

    def _ringed(self, operator: str, m: int, weight: QuantizedWeight, stored: Stored, half: int = 0) -> MatmulConfig | None:
        n, k = weight.shape
        key = operator, stored, n, k, half, bucket(m)
        if key not in self._derived_quantized:
            self._derived_quantized[key] = choose(self.facts, operator, m=m, n=n, k=k, half=half, stored=stored)
        return self._derived_quantized[key]

    def _adding(self, m: int, weight: QuantizedWeight) -> MatmulConfig | None:
        return self._ringed("linear_add_scaled", m, weight, self._stored(weight))

    def _taking(self, residual: Tensor, weight: QuantizedWeight, rotary: RotaryArgs | None = None) -> MatmulConfig | None:
        """How the second product of a pair is cut up; None: not for so many tokens."""
        if residual.shape[0] > FEW:
            return None
        stored = replace(self._stored(weight), token_bytes=residual.dtype.itemsize)
        if rotary is None:
            return self._ringed("linear_parts", residual.shape[0], weight, stored)
        return self._ringed("linear_rope", residual.shape[0], weight, stored, rotary.k_cache.shape[3] // 2)

    def _added(self, added: QuantizedProduct, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The first product of a pair: rows times the norm's weight, and what the second is to divide them by."""
        way = plan(self.facts, added.weight)
        config = self._adding(residual.shape[0], added.weight)
        assert way is not None, "asked of weights alone that come through a ring"
        assert config is not None, "asked of few tokens alone"
        if added.gated:
            rows, scales = self._gate(added.x, added.weight, way)
        else:
            flat = added.x.reshape(-1, added.x.shape[-1])
            flat = flat if flat.stride(-1) == 1 else flat.contiguous()
            rows, scales = quantized_rows(flat, "fp8", 0, None, kept_dtype(added.weight.data, way.native), self.pdl)
        operands = rows, scales, *_weight(added.weight), added.bias, residual, norm
        made: tuple[Tensor, Tensor] = _TRITON.linear_add_scaled.triton_quantized(*operands, config.as_list(), self.pdl)
        return made

    def _taken(
        self,
        scaled: Tensor,
        squares: Tensor,
        weight: QuantizedWeight,
        bias: Tensor | None,
        eps: float,
        config: MatmulConfig,
    ) -> Tensor:
        return _TRITON.linear_quantized.triton_scaled(  # type: ignore[no-any-return]  # torch.ops has no types
            scaled, squares, *_weight(weight), bias, eps, config.as_list(), self.pdl
        )

    def _turned(
        self,
        scaled: Tensor,
        squares: Tensor,
        weight: QuantizedWeight,
        bias: Tensor | None,
        eps: float,
        rotary: RotaryArgs,
        config: MatmulConfig,
    ) -> Tensor:
        operands = scaled, None, squares, *_weight(weight), bias, eps, scaled.dtype, *rotary
        return _TRITON.rope_write_cache.triton_linear_quantized(  # type: ignore[no-any-return]  # torch.ops has no types
            *operands, config.as_list(), self.pdl
        )

    def _prepare_rings(
        self,
        added: QuantizedProduct,
        residual: Tensor,
        norm: Tensor,
        weight: QuantizedWeight,
        bias: Tensor | None,
        rotary: RotaryArgs | None,
    ) -> None:
        """Every configuration that such a pair has for some number of tokens; once, in the scope alone."""
        kept = None if rotary is None else (rotary.k_cache.dtype, rotary.k_cache.shape[1:])
        if not self._scope.first(("rings", added.weight.label, added.weight.shape, weight.label, weight.shape, kept)):
            return
        few = residual[:4].clone()
        x = torch.empty((few.shape[0], added.weight.shape[1]), dtype=added.weight.data.dtype, device=few.device)
        scales = torch.ones((few.shape[0], 1), dtype=torch.float32, device=few.device)
        for adding in self._every_ring("linear_add_scaled", added.weight, self._stored(added.weight)):
            operands = x, scales, *_weight(added.weight), added.bias, few, norm
            with ahead():
                scaled, squares = _TRITON.linear_add_scaled.triton_quantized(*operands, adding.as_list(), self.pdl)
            stored = replace(self._stored(weight), token_bytes=few.dtype.itemsize)
            half = 0 if rotary is None else rotary.k_cache.shape[3] // 2
            for taking in self._every_ring("linear_parts" if rotary is None else "linear_rope", weight, stored, half):
                with ahead():
                    if rotary is None:
                        self._taken(scaled, squares, weight, bias, 1e-5, taking)
                    else:
                        own = rotary._replace(cos=rotary.cos[:4], sin=rotary.sin[:4], slots=rotary.slots[:4])
                        self._turned(scaled, squares, weight, bias, 1e-5, own, taking)

    def _every_ring(self, operator: str, weight: QuantizedWeight, stored: Stored, half: int = 0) -> Iterator[MatmulConfig]:
        n, k = weight.shape
        yield from every(self.facts, operator, n=n, k=k, half=half, but=_MORE, stored=stored)


def _weight(weight: QuantizedWeight) -> tuple[Tensor, Tensor, int]:
    return weight.data, weight.scales, weight.block[0]


def group_of(weight: QuantizedWeight) -> int:
    """Columns of its activations that have a scale of their own; 0: the row has one."""
    return weight.activation_group if weight.activation_group < weight.shape[1] else 0


def dynamic(weight: QuantizedWeight) -> bool:
    """Whether its activations are quantised by scales that the kernel before can find: a power of two of columns each."""
    group = group_of(weight)
    return weight.activations is not None and weight.input_scale is None and group & (group - 1) == 0
