"""ExpertProducts: the products of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, sqrt

import torch
import triton
from torch import Tensor

from outrider.device import ExpertActivation, ExpertBiases, QuantizedWeight
from outrider.device.kernels.model_kernels import activation_operands
from outrider_triton.experts.operators import compared_pairs  # the module registers the operators
from outrider_triton.launch import power_of_two
from outrider_triton.quantized.plan import ProductPlan
from outrider_triton.tiles.configs import BUCKETS, LARGE_M, MatmulConfig, bucket
from outrider_triton.tiles.derive.fits import MIN_STREAMED_COLUMNS, UNQUANTIZED, OperandStorage
from outrider_triton.tiles.derive.products import large_m_experts_config, rank_configs
from outrider_triton.tiles.facts import DeviceFacts

_TRITON = torch.ops.outrider
_MAX_UNSORTED_TOKENS = 32
"""Maximum number of tokens for which each chosen expert multiplies all tokens: the time is that of reading its weights."""
_MAX_MEAN_PAIRS = 60
"""Mean number of an expert's tokens up to which blocks have at most 64. Larger ones are faster only with more tokens."""
_MIN_TALL_TOKENS = 32
"""Tokens of a block from which tiles of gates have twice as many pairs of rows: each tile reads the block's tokens again."""


def sorted_block_tokens(tokens: int, chosen: int, experts: int) -> int:
    """Return the tokens of a sorted block: an expert's mean under uniform routing plus three standard deviations, but at most
    64 up to :data:`_MAX_MEAN_PAIRS`.

    Most experts then need one block. A second block reads the weights again from the cache; empty places cost no bytes.
    """
    mean = tokens * chosen / experts
    size = bucket(ceil(mean + 3 * sqrt(mean)))
    return size if mean > _MAX_MEAN_PAIRS else min(size, 64)


class ExpertProducts:
    """The launches of a mixture of experts' products.

    Tile configurations are derived as for one product with the weights of all experts that have a token.
    """

    def __init__(self, facts: DeviceFacts) -> None:
        self._facts, self._pdl = facts, facts.pdl
        self._derived: dict[tuple[object, ...], tuple[int, MatmulConfig, MatmulConfig]] = {}

    def launch_quantized_experts(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        first: ProductPlan,
        second: ProductPlan,
        *,
        biases: ExpertBiases | None = None,
        activation: ExpertActivation = "silu",
        summed: bool = True,
    ) -> Tensor:
        """Return the experts' outputs [T, H] for ``x`` [T, H], with quantised weights. ``first`` and ``second`` are the plans
        of the gate-up and down products. Without ``summed``, return each token's outputs [T, C, H].
        """
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
        asm = self._facts.capability >= 80 and not triton.knobs.runtime.interpret
        return _TRITON.experts_quantized.triton(  # type: ignore[no-any-return]  # torch.ops has no types
            *(x, weights, chosen, *weight_operands, *options, size, first.mode, second.mode, *lists),
            *(self._facts.fp8, asm, gates.as_list(), outputs.as_list(), self._pdl, summed),
            *activation_operands(biases, activation),
        )

    def samples(self, x: Tensor, weights: Tensor, chosen: Tensor, experts: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield operands (rows, shares, chosen experts) that together need every configuration of these experts, for
        compilation; their values are never used.
        """
        for tokens in self._token_counts(experts, chosen.shape[1]):
            shape = tokens, chosen.shape[1]
            yield x.new_empty((tokens, x.shape[1])), weights.new_empty(shape), chosen.new_zeros(shape)

    @staticmethod
    def _token_counts(experts: int, count: int) -> tuple[int, ...]:
        """Return numbers of tokens that together need every configuration of ``experts`` with ``count`` per token, and every
        number of compared pairs with it.
        """
        few = range(1, _MAX_UNSORTED_TOKENS + 1)
        unsorted = {(power_of_two(tokens), compared_pairs(tokens * count, experts)): tokens for tokens in few}.values()
        # Invert the block size, mean + 3 sqrt(mean), to the most tokens of each block.
        largest = (int((sqrt(size + 2.25) - 1.5) ** 2 * experts / count) for size in BUCKETS)
        return *unsorted, *(max(_MAX_UNSORTED_TOKENS + 1, tokens) for tokens in largest)

    def experts_config(
        self, tokens: int, chosen: int, gate_up: Tensor, *, large_m: bool = True
    ) -> tuple[int, MatmulConfig, MatmulConfig]:
        """Return the tokens of a sorted block (0: unsorted), and the tile configurations of gates and outputs. Without
        ``large_m``, they are none of tiles for large M.
        """
        shape = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
        operators, storages = ("linear_silu_mul", "linear"), (UNQUANTIZED, UNQUANTIZED)
        return self._configs(tokens, chosen, shape, operators, storages, large_m=large_m)

    def _configs(
        self,
        tokens: int,
        chosen: int,
        shape: tuple[int, int, int],
        operators: tuple[str, str],
        storages: tuple[OperandStorage, OperandStorage],
        *,
        large_m: bool = False,
    ) -> tuple[int, MatmulConfig, MatmulConfig]:
        """Return the result of :meth:`experts_config` for weights of ``shape`` (experts, inner size, hidden size)."""
        experts, inner, hidden = shape
        unsorted = tokens <= _MAX_UNSORTED_TOKENS
        block_tokens = power_of_two(tokens) if unsorted else sorted_block_tokens(tokens, chosen, experts)
        key = unsorted, block_tokens, chosen, *shape, *operators, *storages, large_m
        if key not in self._derived and not unsorted and large_m:
            gates_large, outputs_large = (large_m_experts_config(self._facts, block_tokens, k=k) for k in (hidden, inner))
            if gates_large and outputs_large:
                self._derived[key] = gates_large.block_m, gates_large, outputs_large
        if key not in self._derived:
            used = min(experts, block_tokens * chosen) if unsorted else experts
            gates = self._tile_config(operators[0], block_tokens, 2 * inner * used, hidden, storages[0])
            outputs = self._tile_config(operators[1], block_tokens, hidden * used, inner, storages[1])
            self._derived[key] = (0 if unsorted else gates.block_m, gates, outputs)
        return self._derived[key]

    def _tile_config(self, operator: str, m: int, n: int, k: int, stored: OperandStorage) -> MatmulConfig:
        """Return the best tile configuration with whole tiles for ``m`` tokens: a tile must not cross from one expert's rows
        to the next.
        """
        own = replace(stored, shares_units=False)  # programs that share units would replace all other candidates
        ranked = rank_configs(self._facts, operator, m=m, n=n, k=k, stored=own)
        whole = [each for each in ranked if not each.rows_per_program and not each.descriptor and each.split == 1]
        is_tall = operator == "linear_silu_mul" and m >= _MIN_TALL_TOKENS and stored == UNQUANTIZED
        # Narrow tiles leave shared memory for other programs, or for more rows.
        tall = (each for each in whole if is_tall and each.block_n >= 2 * m and each.block_k == MIN_STREAMED_COLUMNS)
        return next(tall, whole[0])

    def launch_experts(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        biases: ExpertBiases | None = None,
        activation: ExpertActivation = "silu",
        summed: bool = True,
    ) -> Tensor:
        """Return the experts' outputs [T, H] for ``x`` [T, H], with unquantized weights [E, 2 I, H] and [E, H, I]. Without
        ``summed``, return each token's outputs [T, C, H], except from tiles for large M, which compute SwiGLU alone.
        """
        is_swiglu = biases is None and activation == "silu"
        size, gates, outputs = self.experts_config(x.shape[0], chosen.shape[1], gate_up, large_m=is_swiglu)
        if gates.descriptor == LARGE_M:
            return _TRITON.experts.triton_large_m(  # type: ignore[no-any-return]
                *(x, weights, chosen, gate_up, down, self._facts.processors, gates.as_list(), outputs.as_list(), self._pdl)
            )
        return _TRITON.experts.triton(  # type: ignore[no-any-return]  # torch.ops has no types
            *(x, weights, chosen, gate_up, down, size, gates.as_list(), outputs.as_list(), self._pdl, summed),
            *activation_operands(biases, activation),
        )
