"""Skinny matrix products: few tokens, so what counts is how fast the weights are read.

The weights are the wide operand of the matrix unit, tokens the narrow one: a tile of 16 tokens wastes little. Weights are
read once and leave the cache first. A program asks for the first ``ahead`` columns of its weights while the kernel before it
still runs, since weights don't depend on it. A program has ``each`` rows of the weight, at most BLOCK_N: so many that all
programs run at the same time, and no multiprocessor has a tile more than another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import ask_for_rows, begin, begin_late


@triton.jit
def rows_and_tokens(each, n, TOKENS_AXIS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """A program's rows of the weight, which of them are its own, and its tokens."""
    lane = tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * each + lane
    mine = (lane < each) & (rows < n)
    return rows, mine, tl.program_id(TOKENS_AXIS) * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def ask_for_gates(weight, rows, n, k, ahead):
    """Ask for rows of the gate and for those of up, which lie ``n`` rows behind."""
    first = weight + tl.minimum(rows, n - 1).to(tl.int64) * k
    ask_for_rows(first, ahead)
    ask_for_rows(first + tl.cast(n, tl.int64) * k, ahead)  # an n of 1 is a number of Python's here


@triton.jit(do_not_specialize=["m", "each", "ahead"])
def linear(
    x,
    weight,
    descriptor,
    bias,
    out,
    m,
    n,
    k,
    x_stride,
    each,
    ahead,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """``x [m, k] @ weight [n, k].T``. Split: part p is ``out [p, m, n]`` in float32, over its own share of k, without bias.

    ``EVEN``: k is a multiple of SPLIT * BLOCK_K. ``DESCRIPTOR``: tiles of the weight come through the device's copy engine.
    """
    part = tl.program_id(1)
    rows, mine, tokens = rows_and_tokens(each, n, 2, BLOCK_N, BLOCK_M)
    span = tl.cdiv(tl.cdiv(k, SPLIT), BLOCK_K) * BLOCK_K
    start = part * span
    end = tl.minimum(start + span, k)
    if PDL:
        # Rows of others ask for the last row: harmless.
        ask_for_rows(weight + tl.minimum(rows, n - 1).to(tl.int64) * k + start, tl.minimum(ahead, end - start))
    begin(PDL)

    lane = tl.arange(0, BLOCK_K)
    tile = weight + rows.to(tl.int64)[:, None] * k + lane[None, :]
    column = x + tokens.to(tl.int64)[None, :] * x_stride + lane[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for at in range(start, end, BLOCK_K):
        if DESCRIPTOR:
            w = descriptor.load([tl.program_id(0) * each, at])
        elif EVEN:
            w = tl.load(tile + at, mask=mine[:, None], other=0.0, eviction_policy="evict_first")
        else:
            w = tl.load(tile + at, mask=mine[:, None] & (lane[None, :] + at < end), other=0.0, eviction_policy="evict_first")
        if EVEN:
            t = tl.load(column + at, mask=tokens[None, :] < m, other=0.0)
        else:
            t = tl.load(column + at, mask=(tokens[None, :] < m) & (lane[:, None] + at < end), other=0.0)
        total = tl.dot(w, t, total)
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=mine, other=0.0).to(tl.float32)[:, None]
    there = out + part.to(tl.int64) * m * n + tokens.to(tl.int64)[None, :] * n + rows[:, None]
    tl.store(there, total.to(out.dtype.element_ty), mask=(tokens[None, :] < m) & mine[:, None])


@triton.jit
def gated(gate, up, out_type: tl.constexpr):
    """``silu(gate) * up``, rounded where the reference rounds: after each product and after the activation."""
    gate = gate.to(out_type).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(out_type).to(tl.float32)
    return (gate * up.to(out_type).to(tl.float32)).to(out_type)


@triton.jit(do_not_specialize=["m", "each", "ahead"])
def linear_silu_mul(
    x,
    weight,
    bias,
    out,
    m,
    n,
    k,
    x_stride,
    each,
    ahead,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """``silu(x @ gate.T) * (x @ up.T)``: the weight's first n rows are the gate's, the next n those of up."""
    rows, mine, tokens = rows_and_tokens(each, n, 1, BLOCK_N, BLOCK_M)
    if PDL:
        ask_for_gates(weight, rows, n, k, ahead)
    begin_late(PDL)

    # As in fused._pair_of_products, whose way to find places costs AMD's compiler a tenth more instructions here.
    lane = tl.arange(0, BLOCK_K)
    gates = weight + rows.to(tl.int64)[:, None] * k + lane[None, :]
    ups = gates + tl.cast(n, tl.int64) * k
    column = x + tokens.to(tl.int64)[None, :] * x_stride + lane[:, None]
    gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for at in range(0, k, BLOCK_K):
        if EVEN:
            mask = mine[:, None]
            t = tl.load(column + at, mask=tokens[None, :] < m, other=0.0)
        else:
            mask = mine[:, None] & (lane[None, :] + at < k)
            t = tl.load(column + at, mask=(tokens[None, :] < m) & (lane[:, None] + at < k), other=0.0)
        g = tl.load(gates + at, mask=mask, other=0.0, eviction_policy="evict_first")
        u = tl.load(ups + at, mask=mask, other=0.0, eviction_policy="evict_first")
        gate = tl.dot(g, t, gate)
        up = tl.dot(u, t, up)
    if HAS_BIAS:
        gate += tl.load(bias + rows, mask=mine, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + n + rows, mask=mine, other=0.0).to(tl.float32)[:, None]
    made = gated(gate, up, out.dtype.element_ty)
    there = out + tokens.to(tl.int64)[None, :] * n + rows[:, None]
    tl.store(there, made, mask=(tokens[None, :] < m) & mine[:, None])
