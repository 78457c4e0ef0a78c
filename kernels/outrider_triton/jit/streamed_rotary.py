"""The product of queries, keys and values through a ring, which turns them and writes the cache: see
:mod:`outrider_triton.jit.streamed`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from outrider_triton.jit.dependent import wait_for_last
from outrider_triton.jit.fused import write_rotated
from outrider_triton.jit.ring import (
    PAIRS,
    bring,
    halves_of_rounded,
    make_buffer,
    make_ring,
    make_rounded,
    scale_of,
    squares_of,
)
from outrider_triton.jit.streamed import RESULTS, factors_of


@gluon.jit
def _rotate(
    squares,
    bias,
    cos,
    sin,
    q,
    k_cache,
    v_cache,
    slots,
    eps,
    m,
    k,
    shares,
    heads,
    kv_heads,
    angles_token,
    cache_slot,
    cache_head,
    each,
    x_scales,
    scales,
    ring,
    buffer,
    rounded,
    HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    SCALED: gl.constexpr,
    SHARES: gl.constexpr,
    HALF: gl.constexpr,
    STEPS: gl.constexpr,
    PDL: gl.constexpr,
):
    BLOCK_M: gl.constexpr = buffer.shape[1]
    token = gl.program_id(2) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, RESULTS))
    known = token < m
    wait_for_last(PDL)
    if SCALED and ROWS == 0:
        parts = squares_of(squares, shares, m, SHARES, BLOCK_M)
    inverse, divisor = factors_of(squares, x_scales, token, shares, m, k, eps, ring, ROWS, SCALED, SHARES, BLOCK_M)
    slot = gl.load(slots + token, mask=known, other=0)
    for tile in range(gl.cdiv(each, PAIRS)):
        own = tile * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(1, RESULTS))
        pair = gl.program_id(0) * each + own
        head = pair // HALF
        lane = pair % HALF
        mine = (own < each) & (head < heads + 2 * kv_heads)
        real = known[None, :] & mine[:, None]
        # What is needed behind the product, on its way before it.
        angle = token.to(gl.int64)[None, :] * angles_token + lane[:, None]
        turns = real & (head < heads + kv_heads)[:, None]
        cos_low = gl.load(cos + angle, mask=turns, other=1.0)
        sin_low = gl.load(sin + angle, mask=turns, other=0.0)
        cos_high = gl.load(cos + angle + HALF, mask=turns, other=1.0)
        sin_high = gl.load(sin + angle + HALF, mask=turns, other=0.0)
        row = head * (2 * HALF) + lane
        if ROWS:
            low_factor = gl.load(scales + row // ROWS, mask=mine, other=0.0).to(gl.float32)
            high_factor = gl.load(scales + (row + HALF) // ROWS, mask=mine, other=0.0).to(gl.float32)
        first, second = halves_of_rounded(ring, tile, buffer, rounded, inverse, ROWS > 0 and SCALED, False, STEPS, RESULTS)
        if ROWS:
            first *= low_factor[:, None] * divisor[None, :]
            second *= high_factor[:, None] * divisor[None, :]
        elif SCALED:
            scale = scale_of(parts, k, eps, RESULTS)
            first *= scale
            second *= scale
        if HAS_BIAS:
            first += gl.load(bias + row, mask=mine, other=0.0).to(gl.float32)[:, None]
            second += gl.load(bias + row + HALF, mask=mine, other=0.0).to(gl.float32)[:, None]
        # Rounded where the reference rounds: after the product and after the turn.
        write_rotated(
            first.to(q.dtype.element_ty),
            second.to(q.dtype.element_ty),
            cos_low,
            sin_low,
            cos_high,
            sin_high,
            q,
            k_cache,
            v_cache,
            slot,
            token,
            head,
            lane,
            heads,
            kv_heads,
            cache_slot,
            cache_head,
            real,
            HALF,
        )


@gluon.jit(do_not_specialize=["m", "each", "shares"])
def streamed_rope_write_cache(
    x,
    w,
    squares,
    bias,
    cos,
    sin,
    q,
    k_cache,
    v_cache,
    slots,
    eps,
    m,
    k,
    shares,
    heads,
    kv_heads,
    angles_token,
    cache_slot,
    cache_head,
    each,
    x_scales,
    scales,
    HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    SCALED: gl.constexpr,
    SHARES: gl.constexpr,
    HALF: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """:func:`outrider_triton.jit.fused.linear_rope_write_cache`; ROWS: as in :func:`streamed_linear`."""
    ring = make_ring(x, w, False, BLOCK_M, BLOCK_K, STAGES)
    buffer = make_buffer(ring)
    rounded = make_rounded(w, ring) if ROWS > 0 and SCALED else buffer  # of no use else
    gl.warp_specialize(
        [
            (
                _rotate,
                (
                    squares,
                    bias,
                    cos,
                    sin,
                    q,
                    k_cache,
                    v_cache,
                    slots,
                    eps,
                    m,
                    k,
                    shares,
                    heads,
                    kv_heads,
                    angles_token,
                    cache_slot,
                    cache_head,
                    each,
                    x_scales,
                    scales,
                    ring,
                    buffer,
                    rounded,
                    HAS_BIAS,
                    ROWS,
                    SCALED,
                    SHARES,
                    HALF,
                    STEPS,
                    PDL,
                ),
            ),
            (bring, (x, w, ring, each, HALF, False, STEPS, ROWS > 0, PDL)),
        ],
        [1],
        [40],
    )
