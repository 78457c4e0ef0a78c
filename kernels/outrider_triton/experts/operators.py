"""Operators of mixtures of experts (:mod:`outrider_triton.experts.jit`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from outrider.device.kernels.operators import expect
from outrider_triton.experts.jit import large_m
from outrider_triton.experts.jit import products as jit
from outrider_triton.launch import define, launch, power_of_two
from outrider_triton.products.jit.large_m_gates import GROUP
from outrider_triton.products.streamed import descriptor
from outrider_triton.quantized.activations import activation_dtype, quantized_rows
from outrider_triton.quantized.plan import TRITON_FORMATS, kernel_scales
from outrider_triton.tiles.configs import MatmulConfig

_PREFETCHED_BYTES = 24 << 20
"""Bytes of experts' weights that are prefetched while tokens are routed: about half of Hopper's second-level cache."""
_MAX_COMPARED_PAIRS = 64
"""Maximum number of token-expert pairs for which each program finds the distinct experts itself.

With more pairs, most experts have a token anyway.
"""
_MAX_SORTED_PAIRS = 16384
"""Maximum number of pairs that Triton's kernel sorts by expert; each of its programs reads all pairs, 1024 at a time."""
_PLACED_PAIRS = 512
"""Pairs per program of the kernels that count and place more pairs."""
_MAX_BINS = 1024
"""Maximum number of experts, plus one, whose pairs Triton's sorting kernel counts."""


def _route(
    logits: Tensor,
    count: int,
    renormalize: bool,
    first: int,
    last: int,
    pdl: bool,
    correction: Tensor | None = None,
    groups: int = 1,
    chosen_groups: int = 1,
    factor: float = 1.0,
    epsilon: float = 0.0,
    minimum: float = 0.0,
    softmax: bool = True,
) -> tuple[Tensor, Tensor]:
    expect(
        logits.dim() == 2 and 0 < count <= logits.shape[1] and logits.stride(1) == 1,
        lambda: f"{count} experts of a token, of router logits {tuple(logits.shape)}; expected [T, E], at most E of them",
    )
    tokens, experts = logits.shape
    weights = logits.new_empty((tokens, count), dtype=torch.float32)
    chosen = logits.new_empty((tokens, count), dtype=torch.int64)
    block = power_of_two(experts)
    launch(
        jit.route,
        (logits.shape[0],),
        *(logits, correction, weights, chosen, experts, logits.stride(0), count, first, last, factor, epsilon, minimum),
        SOFTMAX=softmax,
        GROUPS=groups,
        CHOSEN_GROUPS=chosen_groups,
        RENORMALIZE=renormalize,
        COUNT=power_of_two(count),
        BLOCK=block,
        pdl=pdl,
    )
    return weights, chosen


define("route.triton", _route)


def block_count(pairs: int, experts: int, size: int) -> int:
    """Return the maximum number of blocks of ``size`` token-expert pairs, if each block has one expert."""
    return (pairs + min(experts, pairs) * (size - 1)) // size


def sorted_pairs(chosen: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor]:
    """Sort token-expert pairs into blocks of ``size`` with one expert each.

    Return pair indices int64 [blocks * size], -1 for empty places, and each block's expert int64 [blocks]. The number of
    blocks depends on shapes only.
    """
    pairs, flat = chosen.numel(), chosen.flatten()
    blocks = block_count(pairs, experts, size)
    flat = torch.where(flat < 0, experts, flat)  # pairs without an expert come last
    counts = flat.new_zeros(experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    block_counts = (counts + (size - 1)) // size
    ends = block_counts[:experts].cumsum(0)  # last block of each expert
    experts_in_order, order = flat.sort(stable=True)
    offsets = (block_counts.cumsum(0) - block_counts) * size - (counts.cumsum(0) - counts)
    places = torch.arange(pairs, device=flat.device) + offsets.index_select(0, experts_in_order)
    places = torch.where(experts_in_order < experts, places, blocks * size)
    sorted_order = flat.new_full((blocks * size + 1,), -1).scatter_(0, places, order)[:-1]
    block_indices = torch.arange(blocks, device=flat.device)
    return sorted_order, torch.searchsorted(ends, block_indices, right=True).clamp_(max=experts - 1)


def laid_out_pairs(chosen: Tensor, experts: int, size: int, pdl: bool) -> tuple[Tensor, Tensor]:
    """Sort pairs like :func:`sorted_pairs`, in one kernel instead of about twenty, unless there are too many pairs or
    experts.
    """
    pairs = chosen.numel()
    if pairs > _MAX_SORTED_PAIRS or experts >= _MAX_BINS:
        return sorted_pairs(chosen, experts, size)
    blocks = block_count(pairs, experts, size)
    order = chosen.new_empty(blocks * size)
    expert_of = chosen.new_empty(blocks)
    launch(
        jit.lay_out_pairs,
        (experts,),
        *(chosen, order, expert_of, pairs, experts, size, blocks),
        BINS=power_of_two(experts + 1),
        BLOCK=1024,
        pdl=pdl,
        warps=8,
    )
    return order, expert_of


def blocks_of(
    chosen: Tensor, experts: int, size: int, most: int, pdl: bool
) -> tuple[Tensor | None, Tensor | None, int, dict[str, object]]:
    """Return the pair order and block experts if pairs are sorted (``size`` > 0), the number of program blocks, and the
    kernel's constants.

    ``most`` is the number of tokens per block if pairs aren't sorted.
    """
    m, count = chosen.shape
    constants: dict[str, object] = {"SORTED": bool(size), "PAIRS": 0, "COUNT": power_of_two(count)}
    if size:
        constants["BLOCK_M"] = size
        order, expert_of = laid_out_pairs(chosen, experts, size, pdl)
        return order, expert_of, expert_of.shape[0], constants
    expect(m <= most, lambda: f"{m} tokens in a block of {most}")
    compared = compared_pairs(m * count, experts)
    return None, None, m * count if compared else experts, constants | {"PAIRS": compared}


def compared_pairs(pairs: int, experts: int) -> int:
    """Return the constant PAIRS of kernels of ``pairs`` unsorted token-expert pairs: their power of two if each program
    compares them, else 0.
    """
    return power_of_two(pairs) if pairs <= _MAX_COMPARED_PAIRS and pairs < experts else 0


def sum_expert_rows(
    parts: Tensor, chosen: Tensor, x: Tensor, pdl: bool, placed: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return for each token the sum of its rows of ``parts``, one row per expert in ``chosen``. The result is shaped like
    ``x``.

    ``placed``: the weights float32 [T, C] by which rows are multiplied, and the places of the pairs in ``parts``.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    m, hidden = x.shape
    block = min(power_of_two(hidden), 1024)
    grid = (m, triton.cdiv(hidden, block))
    weights, places = placed or (None, None)
    launch(jit.add_experts, grid, parts, weights, chosen, places, out, chosen.shape[1], hidden, BLOCK=block, pdl=pdl)
    return out


def placed_pairs(
    chosen: Tensor, experts: int, size: int, pdl: bool, *, chunk: int = _PLACED_PAIRS
) -> tuple[Tensor, Tensor, Tensor]:
    """Give token-expert pairs places in blocks of ``size`` with one expert each, in order; a program places ``chunk`` pairs.

    Return each pair's place int64 [T, C], undefined without an expert, each block's expert int64 [blocks], and the number of
    blocks in use int64 [1]. The number of blocks depends on shapes only.
    """
    pairs, bins = chosen.numel(), power_of_two(experts + 1)
    expert_of = chosen.new_empty(block_count(pairs, experts, size))
    places, used, grid = torch.empty_like(chosen), chosen.new_empty(1), (triton.cdiv(pairs, chunk),)
    counts = chosen.new_empty((*grid, bins), dtype=torch.int32)
    launch(jit.count_pairs, grid, chosen, counts, pairs, experts, BINS=bins, BLOCK=chunk, pdl=pdl, warps=4)
    launch(
        jit.place_pairs,
        grid,
        *(chosen, counts, expert_of, places, used, pairs, experts, size, expert_of.shape[0]),
        BINS=bins,
        BLOCK=chunk,
        PIECE=32,
        pdl=pdl,
        warps=8,
    )
    return places, expert_of, used


def gathered_pairs(x: Tensor, chosen: Tensor, places: Tensor, count: int, pdl: bool) -> Tensor:
    """Return ``count`` rows [count, H]: at a pair's place its token's row of ``x`` [T, H], and uninitialised at other
    places.
    """
    m, hidden = x.shape
    rows, block = x.new_empty((count, hidden)), min(power_of_two(hidden), 2048)
    operands = x, chosen, places, rows, chosen.shape[1], hidden, x.stride(0)
    launch(jit.gather_pairs, (m, triton.cdiv(hidden, block)), *operands, BLOCK=block, pdl=pdl)
    return rows


def _multiply_places(
    x: Tensor,
    weight: Tensor,
    routing: tuple[Tensor, Tensor],
    config: MatmulConfig,
    processors: int,
    pdl: bool,
    *,
    gated: bool,
) -> Tensor:
    """Multiply sorted rows ``x`` [places, k] by their experts' ``weight`` [experts, n or 2 n, k] into rows [places, n]."""
    places, k = x.shape
    n = weight.shape[1] // (2 if gated else 1)
    tiles = -(-n // (2 * GROUP.value * (1 if gated else 2)))
    out = x.new_empty((places, n))
    launch(
        large_m.tall_experts,
        (min(processors, tiles * (places // config.block_m)),),
        *(descriptor(x, config.block_m, config.block_k), descriptor(weight.view(-1, k), config.block_n, config.block_k)),
        *(*routing, out, n, tiles),
        STEPS=-(-k // config.block_k),
        GATED=gated,
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        TOKEN_STAGES=config.prefetch_columns,
        maxnreg=128,
        pdl=pdl,
        warps=4,
    )
    return out


def _experts_large_m(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    processors: int,
    gates: list[int],
    outputs: list[int],
    pdl: bool,
) -> Tensor:
    """Compute the experts' outputs with tiles for large M (:mod:`outrider_triton.experts.jit.large_m`), one program for each
    of ``processors``. Blocks of both configurations have the same number of pairs.
    """
    _expect_one_dtype(x, gate_up, down)
    x = x if x.stride(-1) == 1 else x.contiguous()
    chosen, weights, size = chosen.contiguous(), weights.contiguous(), gates[0]
    places, expert_of, used = placed_pairs(chosen, gate_up.shape[0], size, pdl)
    rows, routing = gathered_pairs(x, chosen, places, expert_of.shape[0] * size, pdl), (expert_of, used)
    rows = _multiply_places(rows, gate_up, routing, MatmulConfig(*gates), processors, pdl, gated=True)
    rows = _multiply_places(rows, down, routing, MatmulConfig(*outputs), processors, pdl, gated=False)
    return sum_expert_rows(rows, chosen, x, pdl, (weights, places))


define("experts.triton_large_m", _experts_large_m)


def _expect_one_dtype(x: Tensor, gate_up: Tensor, down: Tensor) -> None:
    expect(
        gate_up.is_contiguous() and down.is_contiguous() and gate_up.dtype is x.dtype and down.dtype is x.dtype,
        lambda: f"experts of {x.dtype} with weights of {gate_up.dtype} and {down.dtype}; expected one dtype, and contiguous",
    )


def _experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    size: int,
    gates: list[int],
    outputs: list[int],
    pdl: bool,
    summed: bool = True,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float = 0.0,
    alpha: float = 0.0,
    activation: str = "silu",
) -> Tensor:
    """Compute the experts' outputs. ``size`` 0: few tokens, one block of all tokens per expert; else pairs are sorted into
    blocks of ``size``. ``gates`` and ``outputs`` are the tile configurations. Without ``summed``, return the rows [T, C, H]
    that :func:`sum_expert_rows` sums, undefined without an expert.
    """
    (m, hidden), count = x.shape, chosen.shape[1]
    experts, inner = gate_up.shape[0], gate_up.shape[1] // 2
    _expect_one_dtype(x, gate_up, down)
    x, chosen, weights = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, chosen, weights))
    chosen, weights = chosen.contiguous(), weights.contiguous()
    pairs = m * count
    order, expert_of, blocks, constants = blocks_of(chosen, experts, size, min(gates[0], outputs[0]), pdl)
    is_likely = pairs >= 2 * experts and hidden % 8 == 0  # most experts have a token
    prefetched = min(experts, _PREFETCHED_BYTES // (4 * inner * jit.PREFETCHED_COLUMNS.value)) if is_likely else 0
    activations = x.new_empty((pairs, inner))
    parts = x.new_empty((pairs, hidden))
    first = x, chosen, order, expert_of, gate_up, gate_up_bias, activations
    second = activations, weights, chosen, order, expert_of, down, down_bias, parts
    for kernel, config, operands, n, k in (
        (jit.expert_gates, gates, first, inner, hidden),
        (jit.expert_outputs, outputs, second, hidden, inner),
    ):
        tiling = MatmulConfig(*config)
        strides = (x.stride(0), prefetched) if kernel is jit.expert_gates else ()
        form = {"LIMIT": limit, "ALPHA": alpha, "GELU": activation == "gelu_tanh"} if kernel is jit.expert_gates else {}
        launch(
            kernel,
            (triton.cdiv(n, tiling.block_n), blocks),
            *(*operands, m, count, n, k, *strides),
            **(tiling.launch_constants(k) | constants | form),
            pdl=pdl,
        )
    return sum_expert_rows(parts, chosen, x, pdl) if summed else parts.view(m, count, hidden)


define("experts.triton", _experts)


# -- quantised weights -------------------------------------------------------------------------------------------------


def _activated(
    both: Tensor, chosen: Tensor, is_clamped: bool, limit: float, alpha: float, activation: str, pdl: bool
) -> Tensor:
    """Return the activation [pairs, I] of the gate and up products ``both`` [pairs, 2 I]: the clamped one, or that called
    ``activation``.
    """
    if not is_clamped and activation == "silu":
        return torch.ops.outrider.silu_mul.triton(both, pdl)  # type: ignore[no-any-return]  # torch.ops has no types
    pairs, inner = both.shape[0], both.shape[1] // 2
    out, block = both.new_empty((pairs, inner)), min(power_of_two(inner), 1024)
    launch(
        jit.activate_pairs,
        (pairs, triton.cdiv(inner, block)),
        *(both, chosen, out, inner),
        LIMIT=limit,
        ALPHA=alpha,
        GELU=not is_clamped,
        BLOCK=block,
        pdl=pdl,
    )
    return out


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
    summed: bool = True,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float = 0.0,
    alpha: float = 0.0,
    activation: str = "silu",
) -> Tensor:
    """Compute all experts with quantised weights.

    Each list has an entry for gate and up, then one for down; see :class:`outrider_triton.quantized.plan.ProductPlan`.
    ``size`` and ``summed`` are the same as for unquantized experts.
    """
    hidden, count = x.shape[1], chosen.shape[1]
    x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
    order, expert_of, blocks, constants = blocks_of(chosen, experts, size, min(gates[0], outputs[0]), pdl)
    gate_and_up, parts = (x.new_empty((chosen.numel(), width)) for width in (2 * inner, hidden))
    registered = TRITON_FORMATS[format]
    constants |= registered.launch_constants | {"FP8": fp8, "ASM": asm}
    gate_stack = gate_up, gate_up_scales, gate_up_zeros, gate_up_input, gate_up_block
    stacks = gate_stack, (down, down_scales, down_zeros, down_input, down_block)

    def multiply(rows: Tensor, out: Tensor, place: int, bias: Tensor | None) -> None:
        (stack, scales, zeros, input_scale, block), is_native = stacks[place], native[place]
        (n, k), x_scales, group, groups = (out.shape[1], rows.shape[1]), None, 0, 1
        if activations:
            group, dtype = activation_group if activation_group < k else 0, activation_dtype(stack, is_native)
            rows, x_scales = quantized_rows(rows, activations, group, input_scale, dtype, pdl)
            groups = x_scales.shape[1]
        tiling = MatmulConfig(*(gates, outputs)[place])
        launch(
            jit.expert_quantized,
            (triton.cdiv(n, tiling.block_n), blocks),
            *(rows, x_scales, registered.kernel_data(stack, native=is_native), kernel_scales(scales), zeros, bias),
            *(weights, chosen, order, expert_of, out, chosen.shape[0], count, n, k, rows.stride(0), groups, scales.shape[1]),
            BY_PAIR=bool(place),
            NATIVE=is_native,
            MODE=(gate_up_mode, down_mode)[place],
            ROWS=block[0],
            COLUMNS=columns[place],
            GROUP=group,
            SUB=min(at_once[place], tiling.block_k) if at_once[place] else tiling.block_k,
            **(tiling.launch_constants(k) | constants),
            pdl=pdl,
        )

    multiply(x, gate_and_up, 0, gate_up_bias)
    activated = _activated(gate_and_up, chosen, gate_up_bias is not None, limit, alpha, activation, pdl)
    multiply(activated, parts, 1, down_bias)
    return sum_expert_rows(parts, chosen, x, pdl) if summed else parts.view(*chosen.shape, hidden)


# An overload of the operator that has the same operands.
define("experts_quantized.triton", _experts_quantized)
