"""TritonExperts: the part of the kernel set that computes mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, sqrt

import torch
import triton
from torch import Tensor

from outrider.device import QuantizedWeight
from outrider_triton.experts import operators as _expert_ops  # noqa: F401  (these register the operators)
from outrider_triton.experts import quantized_operators as _expert_quantized_ops  # noqa: F401
from outrider_triton.launch import compile_only, has_kernel, power_of_two
from outrider_triton.quantized.operators import ProductPlan, plan
from outrider_triton.tiles import variants
from outrider_triton.tiles.configs import BUCKETS, MatmulConfig, bucket
from outrider_triton.tiles.derive.products import rank_configs
from outrider_triton.tiles.derive.quantized import UNQUANTIZED, OperandStorage
from outrider_triton.tiles.facts import DeviceFacts
from outrider_triton.tiles.store.table import Table

_TRITON = torch.ops.outrider
_MAX_UNSORTED_TOKENS = 32
"""Maximum number of tokens for which each expert multiplies all of them: reading its weights takes the time."""
_MAX_EXPERTS = 1024
"""Maximum number of experts that the routing kernel holds in one program."""


def sorted_block_tokens(tokens: int, chosen: int, experts: int) -> int:
    """Return the tokens of a sorted block: an expert's mean under uniform routing plus three standard deviations.

    Most experts then need one block. A second block reads the weights again from the cache; empty places cost no bytes.
    """
    mean = tokens * chosen / experts
    return bucket(ceil(mean + 3 * sqrt(mean)))


class TritonExperts(variants.WarmedKernels):
    """Routing, and the products of the chosen experts.

    Tile configurations are derived as for one product with the weights of all experts that have a token.
    """

    def __init__(self, facts: DeviceFacts, table: Table | None = None) -> None:
        super().__init__(facts, table)
        self._derived_experts: dict[tuple[object, ...], tuple[int, MatmulConfig, MatmulConfig]] = {}

    def route(self, logits: Tensor, count: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
        """Route each token to its experts, one program per token; at most 1024 experts."""
        if not has_kernel(logits) or logits.shape[1] > _MAX_EXPERTS or logits.stride(1) != 1:
            return super().route(logits, count, renormalize=renormalize)
        weights, chosen = _TRITON.route.triton(logits, count, renormalize, self.pdl)
        return weights, chosen

    def experts_quantized(
        self, x: Tensor, weights: Tensor, chosen: Tensor, gate_up: QuantizedWeight, down: QuantizedWeight
    ) -> Tensor:
        """Compute experts with quantised weights: :meth:`experts` plus a kernel that quantises activations.

        The reference computes weights that ``linear_quantized`` would have to dequantise first.
        """
        plans = [plan(self.facts, each, planes=False) for each in (gate_up, down)]
        is_half = x.dtype in (torch.bfloat16, torch.float16) and x.numel()
        if None in plans or not is_half or not has_kernel(x, weights, gate_up.scales):
            return super().experts_quantized(x, weights, chosen, gate_up, down)
        first, second = (each for each in plans if each is not None)
        if self._scope.must_compile(("experts_quantized", x.dtype, gate_up.label, gate_up.shape, chosen.shape[1])):
            for sample in self._samples(x, weights, chosen, down.shape[0] // x.shape[1]):
                with compile_only():
                    self._launch_quantized(*sample, gate_up, down, first, second)
        return self._launch_quantized(x, weights, chosen, gate_up, down, first, second)

    def _launch_quantized(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        first: ProductPlan,
        second: ProductPlan,
    ) -> Tensor:
        experts, inner = down.shape[0] // x.shape[1], down.shape[1]
        storages = first.stored(gate_up.format), second.stored(down.format)
        size, gates, outputs = self._configs(
            x.shape[0], chosen.shape[1], (experts, inner, x.shape[1]), ("linear_parts", "linear_parts"), storages
        )
        weight_operands = [
            part
            for each in (gate_up, down)
            for part in (each.data, each.scales, each.zero_points, each.input_scale, list(each.block))
        ]
        options = experts, gate_up.format, gate_up.activations or "", gate_up.activation_group, inner
        lists = [[getattr(each, name) for each in (first, second)] for name in ("columns", "at_once", "native")]
        asm = self.facts.capability >= 80 and not triton.knobs.runtime.interpret
        return _TRITON.experts_quantized.triton(  # type: ignore[no-any-return]  # torch.ops has no types
            *(x, weights, chosen, *weight_operands, *options, size, first.mode, second.mode, *lists),
            *(self.facts.fp8, asm, gates.as_list(), outputs.as_list(), self.pdl),
        )

    def _samples(self, x: Tensor, weights: Tensor, chosen: Tensor, experts: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield operands that together need every configuration of these experts; nothing is run with them."""
        for tokens in self._token_counts(experts, chosen.shape[1]):
            shape = tokens, chosen.shape[1]
            yield x.new_empty((tokens, x.shape[1])), weights.new_empty(shape), chosen.new_zeros(shape)

    @staticmethod
    def _token_counts(experts: int, count: int) -> tuple[int, ...]:
        """Return token counts that together need every configuration."""
        unsorted = [1 << power for power in range(power_of_two(_MAX_UNSORTED_TOKENS).bit_length())]
        # Invert the block size, mean + 3 sqrt(mean), to the most tokens of each block.
        largest = (int((sqrt(size + 2.25) - 1.5) ** 2 * experts / count) for size in BUCKETS)
        return *unsorted, *(max(_MAX_UNSORTED_TOKENS + 1, tokens) for tokens in largest)

    def experts_config(self, tokens: int, chosen: int, gate_up: Tensor) -> tuple[int, MatmulConfig, MatmulConfig]:
        """Return the tokens of a sorted block (0: unsorted), and the tile configurations of gates and outputs."""
        shape = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
        return self._configs(tokens, chosen, shape, ("linear_silu_mul", "linear"), (UNQUANTIZED, UNQUANTIZED))

    def _configs(
        self,
        tokens: int,
        chosen: int,
        shape: tuple[int, int, int],
        operators: tuple[str, str],
        storages: tuple[OperandStorage, OperandStorage],
    ) -> tuple[int, MatmulConfig, MatmulConfig]:
        """Return :meth:`experts_config` for weights of ``shape``: experts, inner size, hidden size."""
        experts, inner, hidden = shape
        unsorted = tokens <= _MAX_UNSORTED_TOKENS
        block_tokens = power_of_two(tokens) if unsorted else sorted_block_tokens(tokens, chosen, experts)
        key = unsorted, block_tokens, chosen, *shape, *operators, *storages
        if key not in self._derived_experts:
            used = min(experts, block_tokens * chosen) if unsorted else experts
            gates = self._tile_config(operators[0], block_tokens, 2 * inner * used, hidden, storages[0])
            outputs = self._tile_config(operators[1], block_tokens, hidden * used, inner, storages[1])
            self._derived_experts[key] = (0 if unsorted else gates.block_m, gates, outputs)
        return self._derived_experts[key]

    def _tile_config(self, operator: str, m: int, n: int, k: int, stored: OperandStorage) -> MatmulConfig:
        """Return the best configuration with whole tiles: a tile must not cross from one expert's rows to the next."""
        ranked = rank_configs(self.facts, operator, m=m, n=n, k=k, stored=stored)
        return next(
            config for config in ranked if not config.rows_per_program and not config.descriptor and config.split == 1
        )

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Compute the chosen experts in three kernels, above 32 tokens after one that sorts; float32 and float64 use the
        reference.
        """
        is_half = x.dtype in (torch.bfloat16, torch.float16) and gate_up.dtype is x.dtype
        if not is_half or not x.numel() or not has_kernel(x, weights) or not gate_up.is_contiguous():
            return super().experts(x, weights, chosen, gate_up, down)
        if self._scope.must_compile(("experts", x.dtype, gate_up.shape, chosen.shape[1])):
            for sample in self._samples(x, weights, chosen, gate_up.shape[0]):
                with compile_only():
                    self._launch_experts(*sample, gate_up, down)
        return self._launch_experts(x, weights, chosen, gate_up, down)

    def _launch_experts(self, x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        size, gates, outputs = self.experts_config(x.shape[0], chosen.shape[1], gate_up)
        return _TRITON.experts.triton(  # type: ignore[no-any-return]  # torch.ops has no types
            x, weights, chosen, gate_up, down, size, gates.as_list(), outputs.as_list(), self.pdl
        )
