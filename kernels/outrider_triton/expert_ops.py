"""Mixtures of experts as operators (:mod:`outrider_triton.jit.experts`)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from outrider.device.kernels.checks import expect
from outrider_triton.define import define
from outrider_triton.jit import experts as jit
from outrider_triton.launch import launch, power_of_two, warps_for

_COMPARED = 64
"""Of so many pairs a program finds the experts by itself; with more, most experts have a token anyway."""
_LAID_OUT = 16384
"""So many pairs are laid out by a kernel of ours: each of its programs looks at all of them, 1024 at a time."""
_BINS = 1024
"""The most experts, and one more, whose pairs it counts."""


def _route(logits: Tensor, count: int, renormalize: bool, pdl: bool) -> tuple[Tensor, Tensor]:
    weights, chosen = _routed(logits, count)
    experts = logits.shape[1]
    block = power_of_two(experts)
    launch(
        jit.route,
        (logits.shape[0],),
        *(logits, weights, chosen, experts, logits.stride(0), count),
        RENORMALIZE=renormalize,
        COUNT=power_of_two(count),
        BLOCK=block,
        pdl=pdl,
        warps=warps_for(block),
    )
    return weights, chosen


def _routed(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    expect(
        logits.dim() == 2 and 0 < count <= logits.shape[1] and logits.stride(1) == 1,
        lambda: f"{count} experts of a token, of router logits {tuple(logits.shape)}; expected [T, E], at most E of them",
    )
    shape = logits.shape[0], count
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


define(
    "route.triton(Tensor logits, int count, bool renormalize, bool pdl) -> (Tensor, Tensor)",
    _route,
    lambda logits, count, renormalize, pdl: _routed(logits, count),
)


def block_count(pairs: int, experts: int, size: int) -> int:
    """Blocks of ``size`` that pairs need at most, each with one expert."""
    return (pairs + min(experts, pairs) * (size - 1)) // size


def sorted_pairs(chosen: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor]:
    """Pairs of token and expert in blocks of ``size`` with one expert each: pairs int64 [blocks * size], -1 where a place has
    none, and each block's expert int64 [blocks]. How many blocks there are depends on shapes alone.
    """
    pairs, flat = chosen.numel(), chosen.flatten()
    blocks = block_count(pairs, experts, size)
    counts = flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))
    ends = ((counts + (size - 1)) // size).cumsum(0)  # of each expert, in blocks
    names, order = flat.sort(stable=True)
    begins = (ends - (counts + (size - 1)) // size) * size - (counts.cumsum(0) - counts)
    places = torch.arange(pairs, device=flat.device) + begins.index_select(0, names)
    laid = flat.new_full((blocks * size,), -1).scatter_(0, places, order)
    numbers = torch.arange(blocks, device=flat.device)
    return laid, torch.searchsorted(ends, numbers, right=True).clamp_(max=experts - 1)


def laid_out_pairs(chosen: Tensor, experts: int, size: int, pdl: bool) -> tuple[Tensor, Tensor]:
    """As :func:`sorted_pairs`, in one kernel instead of about twenty, unless there are very many pairs or experts."""
    pairs = chosen.numel()
    if pairs > _LAID_OUT or experts >= _BINS:
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
    """Pairs and experts of sorted blocks, if they are (``size``), how many programs look for an expert, and what they know.

    ``most``: tokens of a block where nothing is sorted.
    """
    m, count = chosen.shape
    own: dict[str, object] = {"SORTED": bool(size), "PAIRS": 0, "COUNT": power_of_two(count)}
    if size:
        order, expert_of = laid_out_pairs(chosen, experts, size, pdl)
        return order, expert_of, expert_of.shape[0], own
    expect(m <= most, lambda: f"{m} tokens in a block of {most}")
    pairs = m * count
    if pairs <= _COMPARED and pairs < experts:
        return None, None, pairs, own | {"PAIRS": power_of_two(pairs)}
    return None, None, experts, own


def added(parts: Tensor, x: Tensor, count: int, pdl: bool) -> Tensor:
    """Rows like those of ``x``: sums of ``count`` rows of ``parts`` each."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    m, hidden = x.shape
    block = min(power_of_two(hidden), 1024)
    grid = (m, triton.cdiv(hidden, block))
    launch(jit.add_experts, grid, parts, out, count, hidden, BLOCK=block, pdl=pdl, warps=warps_for(block))
    return out


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
) -> Tensor:
    """``size`` 0: few tokens, one block of tokens an expert; else pairs are sorted into blocks of so many."""
    (m, hidden), count = x.shape, chosen.shape[1]
    experts, inner = gate_up.shape[0], gate_up.shape[1] // 2
    expect(
        gate_up.is_contiguous() and down.is_contiguous() and gate_up.dtype is x.dtype and down.dtype is x.dtype,
        lambda: f"experts of {x.dtype} with weights of {gate_up.dtype} and {down.dtype}; expected one dtype, and contiguous",
    )
    x, chosen, weights = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, chosen, weights))
    chosen, weights = chosen.contiguous(), weights.contiguous()
    pairs = m * count
    order, expert_of, blocks, own = blocks_of(chosen, experts, size, min(gates[0], outputs[0]), pdl)
    made = x.new_empty((pairs, inner))
    parts = x.new_empty((pairs, hidden))
    for kernel, config, operands, n, k in (
        (jit.expert_gates, gates, (x, chosen, order, expert_of, gate_up, made), inner, hidden),
        (jit.expert_outputs, outputs, (made, weights, chosen, order, expert_of, down, parts), hidden, inner),
    ):
        block_m, block_n, block_k, _, warps, stages, *_rest = config
        strides = (x.stride(0),) if kernel is jit.expert_gates else ()
        launch(
            kernel,
            (triton.cdiv(n, block_n), blocks),
            *(*operands, m, count, n, k, *strides),
            **own,
            BLOCK_M=size or block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            EVEN=k % block_k == 0,
            num_stages=stages,
            pdl=pdl,
            warps=warps,
        )
    return added(parts, x, count, pdl)


define(
    "experts.triton(Tensor x, Tensor weights, Tensor chosen, Tensor gate_up, Tensor down, int size, int[] gates, "
    "int[] outputs, bool pdl) -> Tensor",
    _experts,
    lambda x, *rest: torch.empty_like(x, memory_format=torch.contiguous_format),
)
