"""Skinny matrix products whose operands come through a ring (:mod:`outrider_triton.jit.ring`), with their neighbours.

As in :mod:`outrider_triton.jit.matmul` and :mod:`outrider_triton.jit.fused`, whose twins they are, the weights are the wide
operand, and what counts is how fast they come.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from outrider_triton.jit.dependent import fetch, wait_for_last
from outrider_triton.jit.matmul import gated
from outrider_triton.jit.ring import (
    PAIRS,
    TOKENS,
    bring,
    halves_of,
    halves_of_rounded,
    make_buffer,
    make_ring,
    make_rounded,
    root_of,
    scale_of,
    squares_of,
    steps_of,
)

RESULTS = gl.constexpr(gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1]))
"""Of a tile of results [pairs, tokens]."""


@gluon.jit
def _pairs_and_tokens(BLOCK_M: gl.constexpr):
    """Places of pairs in a tile, and a program's tokens."""
    pairs = gl.arange(0, PAIRS, gl.SliceLayout(1, RESULTS))
    return pairs, gl.program_id(2) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, RESULTS))


@gluon.jit
def factors_of(
    squares,
    x_scales,
    token,
    shares,
    m,
    k,
    eps,
    ring,
    ROWS: gl.constexpr,
    SCALED: gl.constexpr,
    SHARES: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """What tokens are multiplied by before they're rounded, [WIDTH], and what a product of them is multiplied by, [BLOCK_M].
    SCALED: ``squares`` are shares of sums of squares and, behind them, of the largest numbers; else tokens were divided by
    ``x_scales`` and are rounded.
    """
    if ROWS == 0:
        return 0.0, 0.0
    elif SCALED:
        WIDTH: gl.constexpr = ring[1].shape[1]
        columns: gl.constexpr = gl.SliceLayout(0, RESULTS)
        steps = steps_of(squares + shares * m, shares, m, SHARES, BLOCK_M, WIDTH, gl.SliceLayout(1, TOKENS))
        whole = steps_of(squares + shares * m, shares, m, SHARES, BLOCK_M, BLOCK_M, columns)
        return 1.0 / steps, whole * root_of(squares, shares, m, k, eps, SHARES, BLOCK_M, columns)
    else:
        return 0.0, gl.load(x_scales + token, mask=token < m, other=0.0)


@gluon.jit
def _store(
    bias,
    x_scales,
    scales,
    squares,
    eps,
    out,
    m,
    n,
    k,
    shares,
    each,
    ring,
    buffer,
    rounded,
    HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    SCALED: gl.constexpr,
    SHARES: gl.constexpr,
    FOLD: gl.constexpr,
    STEPS: gl.constexpr,
    PDL: gl.constexpr,
):
    BLOCK_M: gl.constexpr = buffer.shape[1] // (2 if FOLD else 1)
    lane, token = _pairs_and_tokens(BLOCK_M)
    known = (token < m)[None, :]
    place = out + gl.program_id(1).to(gl.int64) * m * n + token.to(gl.int64)[None, :] * n
    wait_for_last(PDL)
    inverse, divisor = factors_of(squares, x_scales, token, shares, m, k, eps, ring, ROWS, SCALED, SHARES, BLOCK_M)
    for tile in range(gl.cdiv(each, PAIRS)):
        own = tile * PAIRS + lane
        row = gl.program_id(0) * each + own
        mine = (own < each) & (row < n)
        if ROWS:  # on their way before the product
            factor = gl.load(scales + row // ROWS, mask=mine, other=0.0).to(gl.float32)
        low, high = halves_of_rounded(ring, tile, buffer, rounded, inverse, ROWS > 0 and SCALED, FOLD, STEPS, RESULTS)
        if FOLD:
            total = low + high
            if ROWS:
                total *= factor[:, None] * divisor[None, :]
            if HAS_BIAS:
                total += gl.load(bias + row, mask=mine, other=0.0).to(gl.float32)[:, None]
            gl.store(place + row[:, None], total.to(out.dtype.element_ty), mask=known & mine[:, None])
        else:
            row += row // PAIRS * PAIRS
            gl.store(place + row[:, None], low.to(out.dtype.element_ty), mask=known & ((own < each) & (row < n))[:, None])
            row += PAIRS
            gl.store(place + row[:, None], high.to(out.dtype.element_ty), mask=known & ((own < each) & (row < n))[:, None])


@gluon.jit(do_not_specialize=["m", "each", "shares"])
def streamed_linear(
    x,
    w,
    bias,
    x_scales,
    scales,
    squares,
    eps,
    out,
    m,
    n,
    k,
    shares,
    each,
    HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    SCALED: gl.constexpr,
    SHARES: gl.constexpr,
    FOLD: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """:func:`outrider_triton.jit.matmul.linear`; program (share of rows, part of the columns, block of tokens).

    A product in parts isn't folded, and has no bias. ROWS: both operands were quantised, ``x`` by ``x_scales [m]``, and the
    weight by one of ``scales`` for so many rows; 0: neither was. Quantised ones are folded. SCALED: ``x`` is what
    :func:`streamed_linear_add` left, with ``squares``, and is quantised here.
    """
    ring = make_ring(x, w, FOLD, BLOCK_M, BLOCK_K, STAGES)
    buffer = make_buffer(ring)
    rounded = make_rounded(w, ring) if ROWS > 0 and SCALED else buffer  # of no use else
    gl.warp_specialize(
        [
            (
                _store,
                (
                    bias,
                    x_scales,
                    scales,
                    squares,
                    eps,
                    out,
                    m,
                    n,
                    k,
                    shares,
                    each,
                    ring,
                    buffer,
                    rounded,
                    HAS_BIAS,
                    ROWS,
                    SCALED,
                    SHARES,
                    FOLD,
                    STEPS,
                    PDL,
                ),
            ),
            (bring, (x, w, ring, each, PAIRS, FOLD, STEPS, ROWS > 0, PDL)),
        ],
        [1],
        [40],
    )


@gluon.jit
def _add(
    bias,
    residual,
    norm,
    scaled,
    squares,
    x_scales,
    scales,
    m,
    n,
    each,
    ring,
    buffer,
    HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    NORM: gl.constexpr,
    STEPS: gl.constexpr,
    PDL: gl.constexpr,
):
    BLOCK_M: gl.constexpr = buffer.shape[1] // 2
    lane, token = _pairs_and_tokens(BLOCK_M)
    row = gl.program_id(0) * each + lane
    mine = (lane < each) & (row < n)
    real = (token < m)[None, :] & mine[:, None]
    place = token.to(gl.int64)[None, :] * n + row[:, None]
    # Weights, which are far away and which no kernel writes; and where the residual is, so that it isn't far away either.
    extra = gl.zeros([PAIRS], gl.float32, gl.SliceLayout(1, RESULTS))
    if HAS_BIAS:
        extra = gl.load(bias + row, mask=mine, other=0.0).to(gl.float32)
    factor = gl.zeros([PAIRS], gl.float32, gl.SliceLayout(1, RESULTS))
    if NORM:
        factor = gl.load(norm + row, mask=mine, other=0.0).to(gl.float32)
    if ROWS:
        row_scale = gl.load(scales + row // ROWS, mask=mine, other=0.0).to(gl.float32)
    fetch(residual + gl.where(real, place, 0))
    wait_for_last(PDL)
    if ROWS:
        divisor = gl.load(x_scales + token, mask=token < m, other=0.0)
    old = gl.load(residual + place, mask=real, other=0.0)
    low, high = halves_of(ring, 0, buffer, True, STEPS, RESULTS)
    total = low + high
    if ROWS:  # rounded where the reference rounds, after the product
        total = (total * row_scale[:, None] * divisor[None, :] + extra[:, None]).to(residual.dtype.element_ty).to(gl.float32)
    else:
        total += extra[:, None]
    kept = (total + old.to(gl.float32)).to(residual.dtype.element_ty)
    gl.store(residual + place, kept, mask=real)
    if NORM:
        numbers = gl.where(real, kept.to(gl.float32), 0.0)
        weighed = (numbers * factor[:, None]).to(scaled.dtype.element_ty)
        gl.store(scaled + place, weighed, mask=real)
        gl.store(squares + gl.program_id(0) * m + token, gl.sum(numbers * numbers, axis=0), mask=token < m)
        if ROWS:
            size = gl.abs(weighed.to(gl.float32))
            # What isn't finite makes it NaN: the largest of the others isn't.
            peak = gl.max(size, axis=0) + gl.sum(size, axis=0) * 0.0
            gl.store(squares + (gl.num_programs(0) + gl.program_id(0)) * m + token, peak, mask=token < m)


@gluon.jit(do_not_specialize=["m", "each"])
def streamed_linear_add(
    x,
    w,
    bias,
    residual,
    norm,
    scaled,
    squares,
    x_scales,
    scales,
    m,
    n,
    each,
    HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    NORM: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """:func:`outrider_triton.jit.fused.linear_add`; folded, and a program has one tile at most.

    ROWS: as in :func:`streamed_linear`; ``squares [2, programs, m]`` has the largest numbers of ``scaled``, too.
    """
    ring = make_ring(x, w, True, BLOCK_M, BLOCK_K, STAGES)
    buffer = make_buffer(ring)
    gl.warp_specialize(
        [
            (
                _add,
                (
                    bias,
                    residual,
                    norm,
                    scaled,
                    squares,
                    x_scales,
                    scales,
                    m,
                    n,
                    each,
                    ring,
                    buffer,
                    HAS_BIAS,
                    ROWS,
                    NORM,
                    STEPS,
                    PDL,
                ),
            ),
            (bring, (x, w, ring, each, PAIRS, True, STEPS, ROWS > 0, PDL)),
        ],
        [1],
        [40],
    )


@gluon.jit
def _gate(
    squares,
    bias,
    out,
    eps,
    m,
    n,
    k,
    shares,
    each,
    ring,
    buffer,
    HAS_BIAS: gl.constexpr,
    SCALED: gl.constexpr,
    SHARES: gl.constexpr,
    STEPS: gl.constexpr,
    PDL: gl.constexpr,
):
    BLOCK_M: gl.constexpr = buffer.shape[1]
    lane, token = _pairs_and_tokens(BLOCK_M)
    wait_for_last(PDL)
    if SCALED:
        parts = squares_of(squares, shares, m, SHARES, BLOCK_M)
    for tile in range(gl.cdiv(each, PAIRS)):
        gate, up = halves_of(ring, tile, buffer, False, STEPS, RESULTS)
        own = tile * PAIRS + lane
        row = gl.program_id(0) * each + own
        mine = (own < each) & (row < n)
        if SCALED:
            scale = scale_of(parts, k, eps, RESULTS)
            gate *= scale
            up *= scale
        if HAS_BIAS:
            gate += gl.load(bias + row, mask=mine, other=0.0).to(gl.float32)[:, None]
            up += gl.load(bias + n + row, mask=mine, other=0.0).to(gl.float32)[:, None]
        place = out + token.to(gl.int64)[None, :] * n + row[:, None]
        gl.store(place, gated(gate, up, out.dtype.element_ty), mask=(token < m)[None, :] & mine[:, None])


@gluon.jit(do_not_specialize=["m", "each", "shares"])
def streamed_silu_mul(
    x,
    w,
    squares,
    bias,
    out,
    eps,
    m,
    n,
    k,
    shares,
    each,
    HAS_BIAS: gl.constexpr,
    SCALED: gl.constexpr,
    SHARES: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """:func:`outrider_triton.jit.matmul.linear_silu_mul`, SCALED: :func:`outrider_triton.jit.fused.scaled_silu_mul`."""
    ring = make_ring(x, w, False, BLOCK_M, BLOCK_K, STAGES)
    buffer = make_buffer(ring)
    gl.warp_specialize(
        [
            (
                _gate,
                (squares, bias, out, eps, m, n, k, shares, each, ring, buffer, HAS_BIAS, SCALED, SHARES, STEPS, PDL),
            ),
            (bring, (x, w, ring, each, n, False, STEPS, True, PDL)),
        ],
        [1],
        [40],
    )
