"""Torch references of a mixture of experts: the router and the experts' computation.

Shapes: T tokens, E experts, k experts of a token, H hidden size, I inner size of an expert. The operands' shapes determine
every shape, so nothing is read from the device, and a capture works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu

from outrider.device.kernels.reference.model import dequantize, quantize_activations, silu_mul

_MAX_GATHERED_BYTES = 64 << 20
"""Maximum number of bytes of weights that are copied at a time; the weights of one expert are always copied."""


def route(
    logits: Tensor,
    count: int,
    renormalize: bool,
    first: int,
    last: int,
    correction: Tensor | None = None,
    groups: int = 1,
    chosen_groups: int = 1,
    factor: float = 1.0,
    epsilon: float = 0.0,
    minimum: float = 0.0,
    softmax: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return float weights [T, count] and int64 numbers [T, count] of the ``count`` likeliest experts of ``logits`` [T, E].

    With ``renormalize``, the weights of each token have sum 1. Numbers count from ``first``. Weights and numbers of experts
    before it, and from ``last`` on, become 0 and -1. ``correction`` [E] and the operands after it are the fields of a
    :class:`~outrider.device.CorrectedRouting`. See ``KernelSet.route``.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.softmax(-1) if softmax else wide.sigmoid()
    ranked = scores if correction is None else _in_best_groups(scores + correction, groups, chosen_groups)
    # A stable sort puts the lower expert first among equals, on every device.
    chosen = ranked.sort(dim=-1, descending=True, stable=True)[1][:, :count].contiguous()
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + epsilon).clamp(min=minimum)
    weights = factor * weights
    if (first, last) == (0, logits.shape[1]):
        return weights, chosen
    is_held = (chosen >= first) & (chosen < last)
    return torch.where(is_held, weights, 0.0), torch.where(is_held, chosen - first, -1)


def _in_best_groups(scores: Tensor, groups: int, chosen: int) -> Tensor:
    """Return ``scores`` [T, E] with minus infinity for all experts outside the ``chosen`` of ``groups`` groups."""
    if groups == 1:
        return scores
    members = scores.unflatten(1, (groups, -1))
    best = members.topk(min(2, members.shape[2]), dim=-1)[0].sum(-1)
    order = best.sort(dim=-1, descending=True, stable=True)[1]
    is_left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, order[:, :chosen], False)
    kept: Tensor = members.masked_fill(is_left_out.unsqueeze(-1), float("-inf"))
    return kept.flatten(1)


def clamped_mul(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """Return the :class:`~outrider.device.ClampedActivation` [..., I] of the two halves of ``gate_up`` [..., 2 I], computed
    in float32 or wider.
    """
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * (gate * torch.sigmoid(alpha * gate))).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return the GELU [..., I] of the first half of ``gate_up`` [..., 2 I], approximated by a hyperbolic tangent, times the
    second half.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh") * up


def _activated(gate_up: Tensor, own: Tensor, bias: Tensor | None, limit: float, alpha: float, activation: str) -> Tensor:
    """Return the activation of ``gate_up`` [blocks, rows, 2 I], the products of the experts ``own`` [blocks]: that of
    :func:`clamped_mul` if the experts have a ``bias`` [E, 2 I].
    """
    if bias is not None:
        return clamped_mul(_with_bias(gate_up, own, bias), limit, alpha)
    return gelu_mul(gate_up) if activation == "gelu_tanh" else silu_mul(gate_up)


def _with_bias(products: Tensor, own: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``products`` [blocks, rows, N] of the experts ``own`` [blocks] plus their rows of ``bias`` [E, N]."""
    return products if bias is None else products + bias.index_select(0, own).unsqueeze(1)


def experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float = 0.0,
    alpha: float = 0.0,
    activation: str = "silu",
) -> Tensor:
    """Return the weighted sum [T, H] of the outputs of each token's experts. See ``KernelSet.experts``."""
    expert_bytes = (gate_up[0].numel() + down[0].numel()) * gate_up.element_size()

    def multiply(rows: Tensor, own: Tensor) -> Tensor:
        both, second = torch.bmm(rows, gate_up.index_select(0, own).mT), down.index_select(0, own).mT
        activated = _activated(both, own, gate_up_bias, limit, alpha, activation)
        return _with_bias(torch.bmm(activated, second), own, down_bias)

    return _mixed(x, weights, chosen, multiply, count=gate_up.shape[0], expert_bytes=expert_bytes)


def experts_quantized(
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
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float = 0.0,
    alpha: float = 0.0,
    activation: str = "silu",
) -> Tensor:
    """Compute :func:`experts` with the dequantized weights of a block's experts.

    ``activations`` is empty if the activations aren't quantised.
    """
    hidden = x.shape[1]

    def dequantized(
        own: Tensor, data: Tensor, scales: Tensor, zeros: Tensor | None, block: Sequence[int], shape: tuple[int, int]
    ) -> Tensor:
        rows = own.shape[0] * shape[0]
        return dequantize(
            _of_experts(data, own, experts),
            _of_experts(scales, own, experts),
            None if zeros is None else _of_experts(zeros, own, experts),
            format,
            block,
            (rows, shape[1]),
            x.dtype,
        ).view(-1, *shape)

    def quantized(rows: Tensor, scale: Tensor | None) -> Tensor:
        return quantize_activations(rows, activations, activation_group, scale) if activations else rows

    def multiply(rows: Tensor, own: Tensor) -> Tensor:
        first = dequantized(own, gate_up, gate_up_scales, gate_up_zeros, gate_up_block, (2 * inner, hidden))
        both = torch.bmm(quantized(rows, gate_up_input), first.mT)
        activated = _activated(both, own, gate_up_bias, limit, alpha, activation)
        second = dequantized(own, down, down_scales, down_zeros, down_block, (hidden, inner))
        return _with_bias(torch.bmm(quantized(activated, down_input), second.mT), own, down_bias)

    return _mixed(x, weights, chosen, multiply, count=experts, expert_bytes=3 * inner * hidden * x.element_size())


def _of_experts(stack: Tensor, own: Tensor, experts: int) -> Tensor:
    """Return the rows of the experts ``own``, concatenated, from a stack of all experts' weights."""
    stored = stack.view(torch.uint8) if stack.dtype.itemsize == 1 else stack  # torch indexes no floats of 8 bits
    return stored.view(experts, -1, stack.shape[-1]).index_select(0, own).flatten(0, 1).view(stack.dtype)


def _mixed(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    multiply: Callable[[Tensor, Tensor], Tensor],
    *,
    count: int,
    expert_bytes: int,
) -> Tensor:
    """Return the weighted sum of ``multiply(rows [blocks, rows, H], experts [blocks])`` over each token's experts.

    The pairs of token and expert are sorted by expert and laid out in blocks of one expert each, so that a block is a matrix
    product. The weights of several blocks are gathered into one tensor, which moves about three times the bytes that a kernel
    would read. A block has as many rows as an expert has tokens if tokens are evenly distributed. So one token copies only
    the weights of its own experts, and many tokens copy each expert's weights about twice. ``expert_bytes`` is the size of
    one expert's weights.
    """
    tokens, chosen_each = chosen.shape
    chosen = chosen.clamp(min=0)  # -1, no expert, has the weight 0
    size = _block(tokens * chosen_each, count)
    rows, expert_of, place = _blocks(chosen, count, size)
    padded = x.index_select(0, rows).view(-1, size, x.shape[1])  # [blocks, rows of a block, H]
    at_once = max(1, _MAX_GATHERED_BYTES // expert_bytes)
    products = [multiply(part, own) for part, own in zip(padded.split(at_once), expert_of.split(at_once), strict=True)]
    out = torch.cat(products).flatten(0, 1).index_select(0, place).view(tokens, chosen_each, -1)
    return (out.to(weights.dtype) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _block(pairs: int, experts: int) -> int:
    """Return the number of token rows in a block of one expert: a power of two."""
    size = 1
    while size * experts < pairs:
        size *= 2
    return size


def _blocks(chosen: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token of each row, the expert of each block, and the row of each pair of token and expert."""
    tokens, count = chosen.shape
    pairs, flat = tokens * count, chosen.flatten()
    index = torch.arange(pairs, device=chosen.device)
    if size == 1:
        return index // count, flat, index
    blocks = (pairs + min(experts, pairs) * (size - 1)) // size  # an upper bound
    counts = flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))
    ends = ((counts + size - 1) // size).cumsum(0)
    first_row = (ends - (counts + size - 1) // size) * size
    ordered, order = flat.sort(stable=True)
    rank = index - (counts.cumsum(0) - counts).index_select(0, ordered)  # among the pairs of the same expert
    row = first_row.index_select(0, ordered) + rank
    token_of = flat.new_zeros(blocks * size).scatter_(0, row, order // count)  # rows without a pair compute the first token
    place = torch.empty_like(row).scatter_(0, order, row)
    expert_of = torch.searchsorted(ends, torch.arange(blocks, device=chosen.device), right=True).clamp_(max=experts - 1)
    return token_of, expert_of, place
