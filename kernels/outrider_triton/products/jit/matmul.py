"""Skinny matrix products: few tokens, so the speed of reading the weights decides.

Weights are the wide operand of the matrix unit and tokens the narrow one, so a tile of 16 tokens wastes little. Weights are
read once and leave the cache first. A program prefetches the first columns of its weights while the preceding kernel still
runs, since weights don't depend on it. A program has ``rows_per_program`` rows of the weight, at most BLOCK_N, so that all
programs run at the same time and no multiprocessor has a tile more than another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import begin, begin_late, prefetch_rows


@triton.jit
def rows_and_tokens(rows_per_program, n, TOKENS_AXIS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a program's weight rows, the mask of the rows that are its own, and the indices of its tokens."""
    lane = tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * rows_per_program + lane
    row_mask = (lane < rows_per_program) & (rows < n)
    return rows, row_mask, tl.program_id(TOKENS_AXIS) * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def prefetch_gates(weight, rows, n, k, prefetch_columns):
    """Prefetch the first ``prefetch_columns`` of the gate ``rows`` of the weight into L2, and of the up rows, which are ``n``
    rows later.
    """
    first = weight + tl.minimum(rows, n - 1).to(tl.int64) * k
    prefetch_rows(first, prefetch_columns)
    prefetch_rows(first + tl.cast(n, tl.int64) * k, prefetch_columns)  # an n of 1 is a Python integer here


@triton.jit
def sum_of_tiles(
    tile,
    column,
    descriptor,
    row_mask,
    token_mask,
    first_row,
    begins,
    ends,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Multiply weights and tokens over columns from ``begins`` to ``ends``; return [BLOCK_N, BLOCK_M] in float32.

    ``tile`` points to weight rows [BLOCK_N, BLOCK_K], valid where ``row_mask``, and ``column`` to tokens [BLOCK_K, BLOCK_M],
    valid where ``token_mask``. With a descriptor, the copy engine loads the weight from ``first_row`` on.
    """
    lane = tl.arange(0, BLOCK_K)
    column_mask = token_mask[None, :]  # before the loop: one compiler release looks for it inside if it is used after it
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(begins, ends, BLOCK_K):
        if descriptor is not None:
            w = descriptor.load([first_row, start])
        elif EVEN:
            w = tl.load(tile + start, mask=row_mask[:, None], other=0.0, eviction_policy="evict_first")
        else:
            inside = row_mask[:, None] & (lane[None, :] + start < ends)
            w = tl.load(tile + start, mask=inside, other=0.0, eviction_policy="evict_first")
        if EVEN:
            t = tl.load(column + start, mask=column_mask, other=0.0)
        else:
            t = tl.load(column + start, mask=column_mask & (lane[:, None] + start < ends), other=0.0)
        total = tl.dot(w, t, total)
    return total


@triton.jit
def sums_of_gates(
    gates,
    ups,
    column,
    row_mask,
    token_mask,
    k,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute :func:`sum_of_tiles` over ``k`` columns for two tiles of weight rows, ``gates`` and ``ups``; return
    both sums.
    """
    lane = tl.arange(0, BLOCK_K)
    column_mask = token_mask[None, :]
    gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN:
            mask = row_mask[:, None]
            t = tl.load(column + start, mask=column_mask, other=0.0)
        else:
            mask = row_mask[:, None] & (lane[None, :] + start < k)
            t = tl.load(column + start, mask=column_mask & (lane[:, None] + start < k), other=0.0)
        g = tl.load(gates + start, mask=mask, other=0.0, eviction_policy="evict_first")
        u = tl.load(ups + start, mask=mask, other=0.0, eviction_policy="evict_first")
        gate = tl.dot(g, t, gate)
        up = tl.dot(u, t, up)
    return gate, up


@triton.jit(do_not_specialize=["m", "rows_per_program", "prefetch_columns"])
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
    rows_per_program,
    prefetch_columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ``out [m, n] = x [m, k] @ weight [n, k].T`` (+ bias).

    SPLIT: part p is ``out [p, m, n]`` in float32, over its own share of k, without bias. EVEN: k is a multiple of SPLIT *
    BLOCK_K. With a descriptor, the copy engine loads tiles of the weight.
    """
    part = tl.program_id(1)
    rows, row_mask, tokens = rows_and_tokens(rows_per_program, n, 2, BLOCK_N, BLOCK_M)
    span = tl.cdiv(tl.cdiv(k, SPLIT), BLOCK_K) * BLOCK_K
    start = part * span
    end = tl.minimum(start + span, k)
    if PDL:
        # Rows of other programs prefetch the last row again: harmless.
        prefetch_rows(weight + tl.minimum(rows, n - 1).to(tl.int64) * k + start, tl.minimum(prefetch_columns, end - start))
    begin(PDL)

    lane = tl.arange(0, BLOCK_K)
    tile = weight + rows.to(tl.int64)[:, None] * k + lane[None, :]
    column = x + tokens.to(tl.int64)[None, :] * x_stride + lane[:, None]
    first_row = tl.program_id(0) * rows_per_program
    total = sum_of_tiles(
        tile, column, descriptor, row_mask, tokens < m, first_row, start, end, BLOCK_N, BLOCK_M, BLOCK_K, EVEN
    )
    if bias is not None:
        total += tl.load(bias + rows, mask=row_mask, other=0.0).to(tl.float32)[:, None]
    address = out + part.to(tl.int64) * m * n + tokens.to(tl.int64)[None, :] * n + rows[:, None]
    tl.store(address, total.to(out.dtype.element_ty), mask=(tokens[None, :] < m) & row_mask[:, None])


@triton.jit
def swiglu(gate, up, out_type: tl.constexpr):
    """Compute ``silu(gate) * up``, rounded where the reference rounds: after each product and after the activation."""
    gate = gate.to(out_type).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(out_type).to(tl.float32)
    return (gate * up.to(out_type).to(tl.float32)).to(out_type)


@triton.jit
def load_squares(squares, tokens, shares, m, SHARES: tl.constexpr):
    """Load the partial sums of squares of each token, [SHARES, tokens]. The load overlaps with the product."""
    share = tl.arange(0, SHARES)
    mask = (share[:, None] < shares) & (tokens[None, :] < m)
    return tl.load(squares + share[:, None] * m + tokens[None, :], mask=mask, other=0.0)


@triton.jit
def inverse_rms(parts, width, eps):
    """Return each token's factor of the RMS norm: one over the root mean square of its row of ``width`` elements."""
    return tl.rsqrt(tl.sum(parts, axis=0) / width + eps)[None, :]


@triton.jit(do_not_specialize=["m", "rows_per_program", "prefetch_columns", "shares"])
def linear_silu_mul(
    x,
    squares,
    weight,
    bias,
    out,
    eps,
    m,
    n,
    k,
    x_stride,
    shares,
    rows_per_program,
    prefetch_columns,
    SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ``out [m, n] = silu(x @ gate.T) * (x @ up.T)``; the weight's first n rows are the gate's, the next n are those
    of up.

    With ``squares [shares, m]``, ``x`` is divided by the root mean square from them
    (:mod:`outrider_triton.products.jit.fused`).
    """
    rows, row_mask, tokens = rows_and_tokens(rows_per_program, n, 1, BLOCK_N, BLOCK_M)
    if PDL:
        prefetch_gates(weight, rows, n, k, prefetch_columns)
    begin_late(PDL)

    if squares is not None:
        parts = load_squares(squares, tokens, shares, m, SHARES)
    lane = tl.arange(0, BLOCK_K)
    gates = weight + rows.to(tl.int64)[:, None] * k + lane[None, :]
    ups = gates + tl.cast(n, tl.int64) * k
    column = x + tokens.to(tl.int64)[None, :] * x_stride + lane[:, None]
    gate, up = sums_of_gates(gates, ups, column, row_mask, tokens < m, k, BLOCK_N, BLOCK_M, BLOCK_K, EVEN)
    if squares is not None:
        scale = inverse_rms(parts, k, eps)
        gate *= scale
        up *= scale
    if bias is not None:
        gate += tl.load(bias + rows, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + n + rows, mask=row_mask, other=0.0).to(tl.float32)[:, None]
    activation = swiglu(gate, up, out.dtype.element_ty)
    address = out + tokens.to(tl.int64)[None, :] * n + rows[:, None]
    tl.store(address, activation, mask=(tokens[None, :] < m) & row_mask[:, None])
