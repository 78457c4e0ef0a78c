"""The part of the kernel set that computes mixtures of experts."""

from __future__ import annotations

from abc import abstractmethod
from math import ceil, sqrt

import torch
import triton
from torch import Tensor

from outrider.device import KernelSet, QuantizedWeight
from outrider_triton import expert_ops as _expert_ops  # noqa: F401  (these register the operators)
from outrider_triton import expert_quantized_ops as _expert_quantized_ops  # noqa: F401
from outrider_triton import variants
from outrider_triton.derive import rank
from outrider_triton.derive_quantized import PLAIN, Stored
from outrider_triton.facts import DeviceFacts
from outrider_triton.launch import ahead, power_of_two
from outrider_triton.quantized_ops import Plan, plan
from outrider_triton.table import BUCKETS, MatmulConfig, bucket

_TRITON = torch.ops.outrider
_FEW = 32
"""Tokens up to which each expert multiplies all of them: its weights are what takes the time."""
_CHOICES = 1024
"""The most experts that a program holds at once."""


def _block(tokens: int, chosen: int, experts: int) -> int:
    """Tokens of a sorted block: what an expert has on average and three standard deviations of drawing evenly, so that most
    experts are one block.

    A second block reads the weights again, though out of the cache; tokens that aren't there cost no bytes.
    """
    mean = tokens * chosen / experts
    return bucket(ceil(mean + 3 * sqrt(mean)))


class TritonExperts(KernelSet):
    """Routing, and experts' products. How they're cut up is derived as for one product with all experts that have a token."""

    facts: DeviceFacts
    pdl: bool
    _scope: variants.Scope
    _derived_experts: dict[tuple[object, ...], tuple[int, MatmulConfig, MatmulConfig]]

    @abstractmethod
    def _uses(self, kernel: str, *operands: Tensor) -> bool:
        """Whether a kernel is Triton's for these operands."""

    def route(self, logits: Tensor, count: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
        """A program a token; up to 1024 experts."""
        if not self._uses("route", logits) or logits.shape[1] > _CHOICES or logits.stride(1) != 1:
            return super().route(logits, count, renormalize=renormalize)
        weights, chosen = _TRITON.route.triton(logits, count, renormalize, self.pdl)
        return weights, chosen

    def experts_quantized(
        self, x: Tensor, weights: Tensor, chosen: Tensor, gate_up: QuantizedWeight, down: QuantizedWeight
    ) -> Tensor:
        """As :meth:`experts`, and one more kernel for activations. Weights that ``linear_quantized`` makes plain are the
        reference's.
        """
        ways = [plan(self.facts, each, planes=False) for each in (gate_up, down)]
        halves = x.dtype in (torch.bfloat16, torch.float16) and x.numel()
        if None in ways or not halves or not self._uses("experts_quantized", x, weights, gate_up.scales):
            return super().experts_quantized(x, weights, chosen, gate_up, down)
        first, second = (each for each in ways if each is not None)
        if self._scope.first(("experts_quantized", x.dtype, gate_up.label, gate_up.shape, chosen.shape[1])):
            count = chosen.shape[1]
            for tokens in self._every_count(gate_up.shape[0] // (2 * down.shape[1]), count):
                made = (
                    x.new_empty((tokens, x.shape[1])),
                    weights.new_empty((tokens, count)),
                    chosen.new_zeros((tokens, count)),
                )
                with ahead():
                    self._mixed(*made, gate_up, down, first, second)
        return self._mixed(x, weights, chosen, gate_up, down, first, second)

    def _mixed(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        first: Plan,
        second: Plan,
    ) -> Tensor:
        hidden, inner = x.shape[1], down.shape[1]
        experts = down.shape[0] // hidden
        few = x.shape[0] <= _FEW
        rows = power_of_two(x.shape[0]) if few else _block(x.shape[0], chosen.shape[1], experts)
        used = min(experts, rows * chosen.shape[1]) if few else experts
        key = few, rows, used, gate_up.label, gate_up.shape, down.shape
        if key not in self._derived_experts:
            gates = self._cut("linear_parts", rows, 2 * inner * used, hidden, first.stored(gate_up.format))
            outputs = self._cut("linear_parts", rows, hidden * used, inner, second.stored(down.format))
            self._derived_experts[key] = (0 if few else gates.block_m, gates, outputs)
        size, gates, outputs = self._derived_experts[key]
        held = [
            part
            for each in (gate_up, down)
            for part in (each.data, each.scales, each.zero_points, each.input_scale, list(each.block))
        ]
        said = experts, gate_up.format, gate_up.activations or "", gate_up.activation_group, inner
        lists = [[getattr(way, name) for way in (first, second)] for name in ("mode", "columns", "at_once", "native")]
        asm = self.facts.capability >= 80 and not triton.knobs.runtime.interpret
        return _TRITON.experts_quantized.triton(  # type: ignore[no-any-return]  # torch.ops has no types
            *(x, weights, chosen, *held, *said, size, *lists, self.facts.fp8, asm, gates.as_list(), outputs.as_list()),
            self.pdl,
        )

    @staticmethod
    def _every_count(experts: int, count: int) -> tuple[int, ...]:
        """Numbers of tokens among which each configuration is."""
        few = [1 << power for power in range(power_of_two(_FEW).bit_length())]
        # The most tokens of each block: mean + 3 sqrt(mean) is its size.
        most = (int((sqrt(size + 2.25) - 1.5) ** 2 * experts / count) for size in BUCKETS)
        return *few, *(max(_FEW + 1, tokens) for tokens in most)

    def experts_config(self, tokens: int, chosen: int, gate_up: Tensor) -> tuple[int, MatmulConfig, MatmulConfig]:
        """Tokens of a sorted block (0: they aren't sorted), and how gates and outputs are cut up."""
        experts, inner, hidden = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
        few = tokens <= _FEW
        rows = power_of_two(tokens) if few else _block(tokens, chosen, experts)
        key = few, rows, chosen, experts, inner, hidden
        if key not in self._derived_experts:
            used = min(experts, rows * chosen) if few else experts
            gates = self._cut("linear_silu_mul", rows, 2 * inner * used, hidden)
            outputs = self._cut("linear", rows, hidden * used, inner)
            self._derived_experts[key] = (0 if few else gates.block_m, gates, outputs)
        return self._derived_experts[key]

    def _cut(self, operator: str, m: int, n: int, k: int, stored: Stored = PLAIN) -> MatmulConfig:
        """The best whose programs have whole tiles: an expert's rows end with it."""
        ranked = rank(self.facts, operator, m=m, n=n, k=k, stored=stored)
        return next(config for config in ranked if not config.each and not config.descriptor and config.split == 1)

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Three kernels, and behind 32 tokens one ahead of them that sorts. In float32 and float64 the reference's."""
        halves = x.dtype in (torch.bfloat16, torch.float16) and gate_up.dtype is x.dtype
        if not halves or not x.numel() or not self._uses("experts", x, weights) or not gate_up.is_contiguous():
            return super().experts(x, weights, chosen, gate_up, down)
        operands = weights, chosen, gate_up, down
        if self._scope.first(("experts", x.dtype, gate_up.shape, chosen.shape[1])):
            self._compile_experts(x, *operands)
        size, gates, outputs = self.experts_config(x.shape[0], chosen.shape[1], gate_up)
        return _TRITON.experts.triton(  # type: ignore[no-any-return]  # torch.ops has no types
            x, *operands, size, gates.as_list(), outputs.as_list(), self.pdl
        )

    def _compile_experts(self, x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> None:
        """Every configuration that these experts have for some number of tokens."""
        count = chosen.shape[1]
        for tokens in self._every_count(gate_up.shape[0], count):
            size, gates, outputs = self.experts_config(tokens, count, gate_up)
            # As many tokens, of which none is anywhere: nothing of this runs.
            made = x.new_empty((tokens, x.shape[1])), weights.new_empty((tokens, count)), chosen.new_zeros((tokens, count))
            with ahead():
                _TRITON.experts.triton(*made, gate_up, down, size, gates.as_list(), outputs.as_list(), self.pdl)
