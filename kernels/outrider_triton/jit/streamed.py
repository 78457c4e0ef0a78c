"""Skinny matrix products whose operands come through a ring (:mod:`outrider_triton.jit.ring`), with their neighbours.

As in :mod:`outrider_triton.jit.matmul` and :mod:`outrider_triton.jit.fused`, whose twins they are, the weights are the wide
operand, and what counts is how fast they come.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from outrider_triton.jit.dependent import fetch, wait_for_last
from outrider_triton.jit.fused import angles_of, write_rotated
from outrider_triton.jit.matmul import gated
from outrider_triton.jit.ring import (
    PAIRS,
    bring_tokens,
    bring_weights,
    halves_of,
    make_buffer,
    make_ring,
    scale_of,
    squares_of,
)

_LAYOUT = gl.constexpr(gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1]))
"""Of a tile of results [pairs, tokens]."""


@gluon.jit
def _pairs_and_tokens(BLOCK_M: gl.constexpr):
    """Places of pairs in a tile, and a program's tokens."""
    pairs = gl.arange(0, PAIRS, gl.SliceLayout(1, _LAYOUT))
    return pairs, gl.program_id(2) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, _LAYOUT))


@gluon.jit
def _store(
    own,
    ring,
    buffer,
    HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    FOLD: gl.constexpr,
    ADD: gl.constexpr,
    STEPS: gl.constexpr,
    PDL: gl.constexpr,
):
    bias, x_scales, scales, out, m, n, each = own
    BLOCK_M: gl.constexpr = buffer.shape[1] // (2 if FOLD else 1)
    lane, token = _pairs_and_tokens(BLOCK_M)
    known = (token < m)[None, :]
    place = out + gl.program_id(1).to(gl.int64) * m * n + token.to(gl.int64)[None, :] * n
    wait_for_last(PDL)
    if ROWS:
        divisor = gl.load(x_scales + token, mask=token < m, other=0.0)
    for tile in range(gl.cdiv(each, PAIRS)):
        inside = tile * PAIRS + lane
        row = gl.program_id(0) * each + inside
        mine = (inside < each) & (row < n)
        if ROWS:  # on their way before the product
            factor = gl.load(scales + row // ROWS, mask=mine, other=0.0).to(gl.float32)
        if ADD:
            old = gl.load(place + row[:, None], mask=known & mine[:, None], other=0.0).to(gl.float32)
        low, high = halves_of(ring, tile, buffer, FOLD, STEPS, _LAYOUT)
        if FOLD:
            total = low + high
            if ROWS:
                total *= factor[:, None] * divisor[None, :]
            if HAS_BIAS:
                total += gl.load(bias + row, mask=mine, other=0.0).to(gl.float32)[:, None]
            if ADD:  # rounded before the sum too, as where the product is added by a kernel of its own
                total = total.to(out.dtype.element_ty).to(gl.float32) + old
            gl.store(place + row[:, None], total.to(out.dtype.element_ty), mask=known & mine[:, None])
        else:
            row += row // PAIRS * PAIRS
            gl.store(place + row[:, None], low.to(out.dtype.element_ty), mask=known & ((inside < each) & (row < n))[:, None])
            row += PAIRS
            gl.store(place + row[:, None], high.to(out.dtype.element_ty), mask=known & ((inside < each) & (row < n))[:, None])


@gluon.jit(do_not_specialize=["m", "each"])
def streamed_linear(
    x,
    w,
    bias,
    x_scales,
    scales,
    out,
    m,
    n,
    each,
    HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    FOLD: gl.constexpr,
    ADD: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """:func:`outrider_triton.jit.matmul.linear`; program (share of rows, part of the columns, block of tokens).

    A product in parts isn't folded, and has no bias. ROWS: both operands were quantised, ``x`` by ``x_scales [m]``, and the
    weight by one of ``scales`` for so many rows; 0: neither was. Quantised ones are folded. ADD: to what is in ``out``,
    where it's folded.
    """
    ring = make_ring(x, w, FOLD, BLOCK_M, BLOCK_K, STAGES)
    buffer = make_buffer(ring)
    own = bias, x_scales, scales, out, m, n, each
    gl.warp_specialize(
        [
            (_store, (own, ring, buffer, HAS_BIAS, ROWS, FOLD, ADD, STEPS, PDL)),
            (bring_weights, (w, ring, each, PAIRS, FOLD, STEPS)),
            (bring_tokens, (x, ring, each, FOLD, STEPS, ROWS > 0, PDL)),
        ],
        [1, 1],
        [40, 40],
    )


@gluon.jit
def _add(
    own,
    ring,
    buffer,
    HAS_BIAS: gl.constexpr,
    NORM: gl.constexpr,
    STEPS: gl.constexpr,
    PDL: gl.constexpr,
):
    bias, residual, norm, scaled, squares, m, n, each = own
    BLOCK_M: gl.constexpr = buffer.shape[1] // 2
    lane, token = _pairs_and_tokens(BLOCK_M)
    row = gl.program_id(0) * each + lane
    mine = (lane < each) & (row < n)
    real = (token < m)[None, :] & mine[:, None]
    place = token.to(gl.int64)[None, :] * n + row[:, None]
    # Weights, which are far away and which no kernel writes; and where the residual is, so that it isn't far away either.
    extra = gl.zeros([PAIRS], gl.float32, gl.SliceLayout(1, _LAYOUT))
    if HAS_BIAS:
        extra = gl.load(bias + row, mask=mine, other=0.0).to(gl.float32)
    factor = gl.zeros([PAIRS], gl.float32, gl.SliceLayout(1, _LAYOUT))
    if NORM:
        factor = gl.load(norm + row, mask=mine, other=0.0).to(gl.float32)
    fetch(residual + gl.where(real, place, 0))
    wait_for_last(PDL)
    old = gl.load(residual + place, mask=real, other=0.0)
    low, high = halves_of(ring, 0, buffer, True, STEPS, _LAYOUT)
    kept = (low + high + extra[:, None] + old.to(gl.float32)).to(residual.dtype.element_ty)
    gl.store(residual + place, kept, mask=real)
    if NORM:
        numbers = gl.where(real, kept.to(gl.float32), 0.0)
        gl.store(scaled + place, (numbers * factor[:, None]).to(scaled.dtype.element_ty), mask=real)
        gl.store(squares + gl.program_id(0) * m + token, gl.sum(numbers * numbers, axis=0), mask=token < m)


@gluon.jit(do_not_specialize=["m", "each"])
def streamed_linear_add(
    x,
    w,
    bias,
    residual,
    norm,
    scaled,
    squares,
    m,
    n,
    each,
    HAS_BIAS: gl.constexpr,
    NORM: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """:func:`outrider_triton.jit.fused.linear_add`; folded, and a program has one tile at most."""
    ring = make_ring(x, w, True, BLOCK_M, BLOCK_K, STAGES)
    buffer = make_buffer(ring)
    own = bias, residual, norm, scaled, squares, m, n, each
    gl.warp_specialize(
        [
            (_add, (own, ring, buffer, HAS_BIAS, NORM, STEPS, PDL)),
            (bring_weights, (w, ring, each, PAIRS, True, STEPS)),
            (bring_tokens, (x, ring, each, True, STEPS, False, PDL)),
        ],
        [1, 1],
        [40, 40],
    )


@gluon.jit
def _gate(
    own,
    ring,
    buffer,
    HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    SCALED: gl.constexpr,
    SHARES: gl.constexpr,
    STEPS: gl.constexpr,
    PDL: gl.constexpr,
):
    squares, bias, out, eps, m, n, k, shares, each, x_scales, scales, maxima = own
    BLOCK_M: gl.constexpr = buffer.shape[1]
    lane, token = _pairs_and_tokens(BLOCK_M)
    wait_for_last(PDL)
    if SCALED:
        parts = squares_of(squares, shares, m, SHARES, BLOCK_M)
    if ROWS:
        divisor = gl.load(x_scales + token, mask=token < m, other=0.0)
        largest = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(0, _LAYOUT))
    for tile in range(gl.cdiv(each, PAIRS)):
        inside = tile * PAIRS + lane
        row = gl.program_id(0) * each + inside
        mine = (inside < each) & (row < n)
        if ROWS:  # on their way before the product
            gate_factor = gl.load(scales + row // ROWS, mask=mine, other=0.0).to(gl.float32)
            up_factor = gl.load(scales + (n + row) // ROWS, mask=mine, other=0.0).to(gl.float32)
        gate, up = halves_of(ring, tile, buffer, False, STEPS, _LAYOUT)
        if ROWS:
            gate *= gate_factor[:, None] * divisor[None, :]
            up *= up_factor[:, None] * divisor[None, :]
        if SCALED:
            scale = scale_of(parts, k, eps, _LAYOUT)
            gate *= scale
            up *= scale
        if HAS_BIAS:
            gate += gl.load(bias + row, mask=mine, other=0.0).to(gl.float32)[:, None]
            up += gl.load(bias + n + row, mask=mine, other=0.0).to(gl.float32)[:, None]
        place = out + token.to(gl.int64)[None, :] * n + row[:, None]
        real = (token < m)[None, :] & mine[:, None]
        made = gated(gate, up, out.dtype.element_ty)
        gl.store(place, made, mask=real)
        if ROWS:
            wide = gl.abs(made.to(gl.float32))
            wide = gl.where(wide == wide, wide, float("inf"))  # else the largest would be that of the others
            largest = gl.maximum(largest, gl.max(gl.where(real, wide, 0.0), axis=0))
    if ROWS:
        gl.store(maxima + gl.program_id(0) * m + token, largest, mask=token < m)


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
    x_scales,
    scales,
    maxima,
    HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    SCALED: gl.constexpr,
    SHARES: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """:func:`outrider_triton.jit.matmul.linear_silu_mul`, SCALED: :func:`outrider_triton.jit.fused.scaled_silu_mul`.

    ROWS: as in :func:`streamed_linear`. Then the largest magnitudes of a program's part of each row go to
    ``maxima [programs, m]``: infinity where there is NaN.
    """
    ring = make_ring(x, w, False, BLOCK_M, BLOCK_K, STAGES)
    buffer = make_buffer(ring)
    own = squares, bias, out, eps, m, n, k, shares, each, x_scales, scales, maxima
    gl.warp_specialize(
        [
            (_gate, (own, ring, buffer, HAS_BIAS, ROWS, SCALED, SHARES, STEPS, PDL)),
            (bring_weights, (w, ring, each, n, False, STEPS)),
            (bring_tokens, (x, ring, each, False, STEPS, True, PDL)),
        ],
        [1, 1],
        [40, 40],
    )


@gluon.jit
def _rotate(
    own,
    rotary,
    ring,
    buffer,
    HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    SCALED: gl.constexpr,
    SHARES: gl.constexpr,
    HALF: gl.constexpr,
    STEPS: gl.constexpr,
    PDL: gl.constexpr,
):
    squares, bias, q, eps, m, k, shares, each, x_scales, scales = own
    cos, sin, k_cache, v_cache, slots, heads, kv_heads, angles_token, cache_slot, cache_head = rotary
    BLOCK_M: gl.constexpr = buffer.shape[1]
    token = gl.program_id(2) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, _LAYOUT))
    known = token < m
    wait_for_last(PDL)
    if SCALED:
        parts = squares_of(squares, shares, m, SHARES, BLOCK_M)
    if ROWS:
        divisor = gl.load(x_scales + token, mask=known, other=0.0)
    slot = gl.load(slots + token, mask=known, other=0)
    for tile in range(gl.cdiv(each, PAIRS)):
        inside = tile * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(1, _LAYOUT))
        pair = gl.program_id(0) * each + inside
        head = pair // HALF
        lane = pair % HALF
        mine = (inside < each) & (head < heads + 2 * kv_heads)
        real = known[None, :] & mine[:, None]
        # What is needed behind the product, on its way before it.
        turns = real & (head < heads + kv_heads)[:, None]
        cos_low, sin_low, cos_high, sin_high = angles_of(cos, sin, token, lane, turns, angles_token, HALF)
        row = head * (2 * HALF) + lane
        if ROWS:
            low_factor = gl.load(scales + row // ROWS, mask=mine, other=0.0).to(gl.float32)
            high_factor = gl.load(scales + (row + HALF) // ROWS, mask=mine, other=0.0).to(gl.float32)
        first, second = halves_of(ring, tile, buffer, False, STEPS, _LAYOUT)
        if ROWS:
            first *= low_factor[:, None] * divisor[None, :]
            second *= high_factor[:, None] * divisor[None, :]
        if SCALED:
            scale = scale_of(parts, k, eps, _LAYOUT)
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
    own = squares, bias, q, eps, m, k, shares, each, x_scales, scales
    rotary = cos, sin, k_cache, v_cache, slots, heads, kv_heads, angles_token, cache_slot, cache_head
    gl.warp_specialize(
        [
            (_rotate, (own, rotary, ring, buffer, HAS_BIAS, ROWS, SCALED, SHARES, HALF, STEPS, PDL)),
            (bring_weights, (w, ring, each, HALF, False, STEPS)),
            (bring_tokens, (x, ring, each, False, STEPS, ROWS > 0, PDL)),
        ],
        [1, 1],
        [40, 40],
    )
