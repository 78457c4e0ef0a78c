"""Operator of mixtures of experts with quantised weights (:mod:`outrider_triton.experts.jit.quantized`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from outrider_triton.experts.jit import quantized as jit
from outrider_triton.experts.operators import blocks_of, sum_expert_rows
from outrider_triton.launch import define, launch
from outrider_triton.quantized.formats import TRITON_FORMATS
from outrider_triton.quantized.operators import activation_dtype, quantized_rows
from outrider_triton.tiles.configs import MatmulConfig


def _experts_quantized(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    gate_up_input: Tensor | None,
    gate_up_block: Sequence[int],
    down: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    down_input: Tensor | None,
    down_block: Sequence[int],
    experts: int,
    format: str,
    activations: str,
    activation_group: int,
    inner: int,
    size: int,
    gate_up_mode: str,
    down_mode: str,
    columns: Sequence[int],
    at_once: Sequence[int],
    native: Sequence[bool],
    fp8: bool,
    asm: bool,
    gates: list[int],
    outputs: list[int],
    pdl: bool,
) -> Tensor:
    """Compute all experts with quantised weights.

    Each list has an entry for gate and up, then one for down; see :class:`outrider_triton.quantized.operators.Plan`. ``size``
    is the same as for unquantized experts.
    """
    hidden, count = x.shape[1], chosen.shape[1]
    x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
    pairs = chosen.numel()
    order, expert_of, blocks, constants = blocks_of(chosen, experts, size, min(gates[0], outputs[0]), pdl)
    gate_and_up = x.new_empty((pairs, 2 * inner))
    parts = x.new_empty((pairs, hidden))

    registered = TRITON_FORMATS[format]
    gate_stack = gate_up, gate_up_scales, gate_up_zeros, gate_up_input, gate_up_block
    stacks = gate_stack, (down, down_scales, down_zeros, down_input, down_block)

    def multiply(rows: Tensor, out: Tensor, place: int) -> None:
        stack, scales, zeros, input_scale, block = stacks[place]
        (n, k), x_scales, groups = (out.shape[1], rows.shape[1]), None, 1
        group = activation_group if activation_group < k else 0
        if activations:
            rows, x_scales = quantized_rows(
                rows, activations, group, input_scale, activation_dtype(stack, native[place]), pdl
            )
            groups = x_scales.shape[1]
        tiling = MatmulConfig(*(gates, outputs)[place])
        launch(
            jit.expert_quantized,
            (triton.cdiv(n, tiling.block_n), blocks),
            *(rows, x_scales, registered.kernel_data(stack, native=native[place]), scales, zeros),
            *(weights, chosen, order, expert_of, out, chosen.shape[0], count, n, k, rows.stride(0), groups, scales.shape[1]),
            BY_PAIR=bool(place),
            **registered.launch_constants,
            NATIVE=native[place],
            MODE=(gate_up_mode, down_mode)[place],
            ROWS=block[0],
            COLUMNS=columns[place],
            GROUP=group if activations else 0,
            FP8=fp8,
            ASM=asm,
            SUB=min(at_once[place], tiling.block_k) if at_once[place] else tiling.block_k,
            **(tiling.launch_constants(k) | constants),
            pdl=pdl,
        )

    multiply(x, gate_and_up, 0)
    multiply(torch.ops.outrider.silu_mul.triton(gate_and_up, pdl), parts, 1)
    return sum_expert_rows(parts, chosen, x, pdl)


# An overload of the operator that has the same operands.
define("experts_quantized.triton", _experts_quantized)
