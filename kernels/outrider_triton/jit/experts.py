"""Mixtures of experts: which experts a token goes to, and the products of those that some token goes to.

Few tokens: a program finds on the device which expert is its own, and multiplies all tokens with it; what isn't the expert's
is not stored. So each weight is read once, and nothing is sorted. Many tokens: pairs of token and expert are laid out by
expert first, by a program for each expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin, begin_late
from outrider_triton.jit.matmul import gated


@triton.jit
def route(
    logits,
    weights,
    chosen,
    experts,
    stride,
    count,
    RENORMALIZE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: softmax of ``experts`` logits, the ``count`` likeliest in descending order, of equal ones the first."""
    begin(PDL)
    token = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    there = lane < experts
    value = tl.load(logits + token.to(tl.int64) * stride + lane, mask=there, other=float("-inf")).to(tl.float32)
    value = tl.exp(value - tl.max(value, axis=0))
    left = tl.where(there, value / tl.sum(value, axis=0), -1.0)
    place = tl.arange(0, COUNT)
    shares = tl.zeros([COUNT], dtype=tl.float32)
    names = tl.zeros([COUNT], dtype=tl.int64)
    for turn in range(count):
        # Beside NaN nothing is the largest: an expert that there is, all the same.
        name = tl.minimum(tl.argmax(left, axis=0), experts - 1)
        shares = tl.where(place == turn, tl.sum(tl.where(lane == name, left, 0.0), axis=0), shares)
        names = tl.where(place == turn, name.to(tl.int64), names)
        left = tl.where(lane == name, -2.0, left)
    if RENORMALIZE:
        shares = shares / tl.sum(shares, axis=0)
    kept = place < count
    tl.store(weights + token * count + place, shares, mask=kept)
    tl.store(chosen + token * count + place, names, mask=kept)


@triton.jit(do_not_specialize=["pairs", "experts", "size", "blocks"])
def lay_out_pairs(
    chosen,
    order,
    expert_of,
    pairs,
    experts,
    size,
    blocks,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One expert's pairs of token and expert, in their order, in ``order [blocks * size]``, and ``expert_of [blocks]``.

    A block has one expert. Places without a pair are -1; of blocks that no expert has, each program fills a share, as if they
    were the last expert's. BINS: more than ``experts``.
    """
    begin(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for at in range(0, pairs, BLOCK):
        name = tl.load(chosen + at + lane, mask=at + lane < pairs, other=experts)
        counts += tl.histogram(name.to(tl.int32), BINS)
    bins = tl.arange(0, BINS)
    filled = tl.where(bins < experts, (counts + size - 1) // size, 0)  # blocks of each expert
    used = tl.sum(filled, axis=0)
    first = tl.sum(tl.where(bins < expert, filled, 0), axis=0)
    behind = first + tl.sum(tl.where(bins == expert, filled, 0), axis=0)
    place = first * size
    for at in range(0, pairs, BLOCK):
        name = tl.load(chosen + at + lane, mask=at + lane < pairs, other=experts)
        mine = name == expert
        tl.store(order + place + tl.cumsum(mine.to(tl.int32), axis=0) - 1, (at + lane).to(tl.int64), mask=mine)
        place += tl.sum(mine.to(tl.int32), axis=0)
    nothing = tl.full([BLOCK], -1, dtype=tl.int64)
    for at in range(place, behind * size, BLOCK):
        tl.store(order + at + lane, nothing, mask=at + lane < behind * size)
    for at in range(first, behind, BLOCK):
        tl.store(expert_of + at + lane, nothing + 1 + expert, mask=at + lane < behind)
    for at in range(used * size + expert * BLOCK, blocks * size, experts * BLOCK):
        tl.store(order + at + lane, nothing, mask=at + lane < blocks * size)
    for at in range(used + expert * BLOCK, blocks, experts * BLOCK):
        tl.store(expert_of + at + lane, nothing + experts, mask=at + lane < blocks)


@triton.jit
def _nth_expert(chosen, nth, pairs, PAIRS: tl.constexpr):
    """The ``nth`` of the experts that some token goes to, by the first pair; -1 where there are fewer."""
    one = tl.arange(0, PAIRS)
    name = tl.load(chosen + one, mask=one < pairs, other=-1)
    other = tl.load(chosen + one, mask=one < pairs, other=-2)
    again = (name[:, None] == other[None, :]) & (one[None, :] < one[:, None])
    first = (tl.max(again.to(tl.int32), axis=1) == 0) & (one < pairs)
    place = tl.cumsum(first.to(tl.int32), axis=0) - 1
    return tl.max(tl.where(first & (place == nth), name, -1), axis=0)


@triton.jit
def own_pairs(
    chosen,
    order,
    expert_of,
    m,
    count,
    SORTED: tl.constexpr,
    PAIRS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The expert (-1: none) of a program (tile of rows, block), and its pairs of token and expert, -1 where there is none."""
    block = tl.program_id(1)
    lane = tl.arange(0, BLOCK_M)
    if SORTED:
        pairs = tl.load(order + block * BLOCK_M + lane)
        expert = tl.load(expert_of + block)
    else:
        expert = _nth_expert(chosen, block, m * count, PAIRS) if PAIRS else block.to(tl.int64)
        slot = tl.arange(0, COUNT)
        names = tl.load(
            chosen + lane[:, None] * count + slot[None, :], mask=(lane < m)[:, None] & (slot < count)[None, :], other=-2
        )
        mine = tl.max(tl.where(names == expert, slot[None, :], -1), axis=1)
        pairs = tl.where(mine >= 0, lane * count + mine, -1).to(tl.int64)
    expert = tl.where(tl.max(pairs, axis=0) >= 0, expert, -1)
    return expert, pairs


@triton.jit(do_not_specialize=["m"])
def expert_gates(
    x,
    chosen,
    order,
    expert_of,
    weight,
    out,
    m,
    count,
    n,
    k,
    x_stride,
    SORTED: tl.constexpr,
    PAIRS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out [pairs, n]``: silu of ``x [m, k]`` times an expert's gate, times x times its up; ``weight [experts, 2 n, k]``.

    It begins late, so that what starts behind it can read which experts there are at once.
    """
    begin_late(PDL)
    expert, pairs = own_pairs(chosen, order, expert_of, m, count, SORTED, PAIRS, COUNT, BLOCK_M)
    if expert >= 0:
        hit = pairs >= 0
        known = hit[None, :]  # ahead of the loops: behind them, one release of the compiler looks for it inside
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        mine = rows < n
        lane = tl.arange(0, BLOCK_K)
        gates = weight + (expert * 2 * n + rows).to(tl.int64)[:, None] * k + lane[None, :]
        ups = gates + tl.cast(n, tl.int64) * k
        column = x + tl.where(hit, pairs // count, 0)[None, :] * x_stride + lane[:, None]
        gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for at in range(0, k, BLOCK_K):
            if EVEN:
                mask = mine[:, None]
                t = tl.load(column + at, mask=known, other=0.0)
            else:
                mask = mine[:, None] & (lane[None, :] + at < k)
                t = tl.load(column + at, mask=known & (lane[:, None] + at < k), other=0.0)
            g = tl.load(gates + at, mask=mask, other=0.0, eviction_policy="evict_first")
            u = tl.load(ups + at, mask=mask, other=0.0, eviction_policy="evict_first")
            gate = tl.dot(g, t, gate)
            up = tl.dot(u, t, up)
        there = out + tl.where(hit, pairs, 0)[None, :] * n + rows[:, None]
        tl.store(there, gated(gate, up, out.dtype.element_ty), mask=known & mine[:, None])


@triton.jit(do_not_specialize=["m"])
def expert_outputs(
    x,
    shares,
    chosen,
    order,
    expert_of,
    weight,
    out,
    m,
    count,
    n,
    k,
    SORTED: tl.constexpr,
    PAIRS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out [pairs, n]``: a pair's ``x [pairs, k]`` times its expert's ``weight [experts, n, k]``, times its share.

    Behind :func:`expert_gates`, which begins late: the pairs' experts are read while that still runs.
    """
    expert, pairs = own_pairs(chosen, order, expert_of, m, count, SORTED, PAIRS, COUNT, BLOCK_M)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin(PDL)
    if expert >= 0:
        hit = pairs >= 0
        known = hit[None, :]  # ahead of the loops: behind them, one release of the compiler looks for it inside
        mine = rows < n
        lane = tl.arange(0, BLOCK_K)
        tile = weight + (expert * n + rows).to(tl.int64)[:, None] * k + lane[None, :]
        column = x + tl.where(hit, pairs, 0)[None, :] * k + lane[:, None]
        share = tl.load(shares + tl.where(hit, pairs, 0), mask=hit, other=0.0)
        total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for at in range(0, k, BLOCK_K):
            if EVEN:
                w = tl.load(tile + at, mask=mine[:, None], other=0.0, eviction_policy="evict_first")
                t = tl.load(column + at, mask=known, other=0.0)
            else:
                inside = lane + at < k
                w = tl.load(tile + at, mask=mine[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
                t = tl.load(column + at, mask=known & inside[:, None], other=0.0)
            total = tl.dot(w, t, total)
        total *= share[None, :]
        there = out + tl.where(hit, pairs, 0)[None, :] * n + rows[:, None]
        tl.store(there, total.to(out.dtype.element_ty), mask=known & mine[:, None])


@triton.jit
def add_experts(parts, out, count, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A token's row of ``out [m, n]``: the sum of its ``count`` rows of ``parts``, in float32 and in their order."""
    begin(PDL)
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(count):
        row = (token * count + slot).to(tl.int64) * n
        total += tl.load(parts + row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * n + column, total.to(out.dtype.element_ty), mask=inside)
