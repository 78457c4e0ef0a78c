"""Matrix products of few tokens, alone and fused with neighbouring kernels, with operands loaded by a TMA pipeline
(:mod:`outrider_triton.jit.tma_pipeline`).

They correspond to the kernels of :mod:`outrider_triton.products.jit.matmul` and :mod:`outrider_triton.products.jit.fused`:
weights are the wide operand, and the speed of loading them decides.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from outrider_triton.jit.dependent import prefetch_lines, wait_for_previous_kernel
from outrider_triton.jit.tma_pipeline import (
    PAIRS,
    inverse_rms,
    load_tokens,
    load_weights,
    make_buffer,
    make_pipeline,
    multiply_halves,
    squares_of,
)
from outrider_triton.products.jit.fused import load_angles, write_rotated
from outrider_triton.products.jit.matmul import swiglu

_LAYOUT = gl.constexpr(gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1]))
"""Register layout of a tile of results [pairs, tokens]."""


@gluon.jit
def _pairs_and_tokens(BLOCK_M: gl.constexpr):
    """Return the indices of the pairs in a tile, and those of the program's tokens."""
    pairs = gl.arange(0, PAIRS, gl.SliceLayout(1, _LAYOUT))
    return pairs, gl.program_id(2) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, _LAYOUT))


@gluon.jit
def _load_factor(scales, row, mask, ROWS: gl.constexpr):
    """Load the scales of the rows ``row``, one per ROWS rows; ones if ROWS is 0."""
    if ROWS:
        return gl.load(scales + row // ROWS, mask=mask, other=0.0).to(gl.float32)
    else:
        return gl.full([PAIRS], 1.0, gl.float32, gl.SliceLayout(1, _LAYOUT))


@gluon.jit
def _store_rows(total, bias, address, out, row, token_mask, mask, previous, ADD: gl.constexpr):
    """Add the bias, and with ADD what ``address`` had before, to the sums ``total`` of the rows ``row``, and store them."""
    if bias is not None:
        total += gl.load(bias + row, mask=mask, other=0.0).to(gl.float32)[:, None]
    if ADD:  # rounded before the sum, like a separate addition kernel
        total = total.to(out.dtype.element_ty).to(gl.float32) + previous.to(gl.float32)
    gl.store(address, total.to(out.dtype.element_ty), mask=token_mask & mask[:, None])


@gluon.jit
def _store(
    operands,
    pipeline,
    buffer,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    FOLD: gl.constexpr,
    ADD: gl.constexpr,
    STEPS: gl.constexpr,
    PDL: gl.constexpr,
):
    bias, x_scales, x_groups, scales, scale_columns, out, m, n, pairs_per_program = operands
    BLOCK_M: gl.constexpr = buffer.shape[1] // (2 if FOLD else 1)
    ROW_SCALES: gl.constexpr = 0 if BLOCKS else ROWS
    lane, token = _pairs_and_tokens(BLOCK_M)
    token_mask = (token < m)[None, :]
    destination = out + gl.program_id(1).to(gl.int64) * m * n + token.to(gl.int64)[None, :] * n
    wait_for_previous_kernel(PDL)
    if ROW_SCALES:
        divisor = gl.load(x_scales + token, mask=token < m, other=0.0)
    for tile in range(gl.cdiv(pairs_per_program, PAIRS)):
        index = tile * PAIRS + lane
        row = gl.program_id(0) * pairs_per_program + index
        if not FOLD:
            row += row // PAIRS * PAIRS
        high_row = row + PAIRS  # only used if not FOLD
        mask = (index < pairs_per_program) & (row < n)
        high_mask = (index < pairs_per_program) & (high_row < n)
        # loads that overlap with the product
        factor = _load_factor(scales, row, mask, ROW_SCALES)
        address = destination + row[:, None]
        high_address = destination + high_row[:, None]
        previous = 0.0
        if ADD:
            previous = gl.load(address, mask=token_mask & mask[:, None], other=0.0)
        if BLOCKS:
            blocks = x_scales, x_groups, scales, scale_columns, m, n, pairs_per_program
            low, high = multiply_halves(pipeline, tile, buffer, FOLD, STEPS, _LAYOUT, blocks, ROWS)
        else:
            low, high = multiply_halves(pipeline, tile, buffer, FOLD, STEPS, _LAYOUT)
        if FOLD:
            low += high
        if ROW_SCALES:
            low *= factor[:, None] * divisor[None, :]
        _store_rows(low, bias, address, out, row, token_mask, mask, previous, ADD)
        if not FOLD:
            if ROW_SCALES:
                high *= _load_factor(scales, high_row, high_mask, ROW_SCALES)[:, None] * divisor[None, :]
            if ADD:
                previous = gl.load(high_address, mask=token_mask & high_mask[:, None], other=0.0)
            _store_rows(high, bias, high_address, out, high_row, token_mask, high_mask, previous, ADD)


@gluon.jit(do_not_specialize=["m", "pairs_per_program"])
def streamed_linear(
    x,
    w,
    bias,
    x_scales,
    x_groups,
    scales,
    scale_columns,
    out,
    m,
    n,
    pairs_per_program,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    FOLD: gl.constexpr,
    ADD: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute :func:`outrider_triton.products.jit.matmul.linear` with a TMA pipeline; one program per (share of rows, part of
    the columns, block of tokens).

    A product in parts isn't folded, and has no bias. ROWS: both operands are quantised, ``x`` by ``x_scales [m]``, and the
    weight by one of ``scales`` per ROWS rows; 0: neither is. BLOCKS: each piece of columns has its own scales, ``x_scales [m,
    x_groups]`` and ``scales [.., scale_columns]``. ADD: add to ``out``.
    """
    pipeline = make_pipeline(x, w, FOLD, BLOCK_M, BLOCK_K, STAGES)
    buffer = make_buffer(pipeline)
    operands = bias, x_scales, x_groups, scales, scale_columns, out, m, n, pairs_per_program
    gl.warp_specialize(
        [
            (_store, (operands, pipeline, buffer, ROWS, BLOCKS, FOLD, ADD, STEPS, PDL)),
            (load_weights, (w, pipeline, pairs_per_program, PAIRS, FOLD, STEPS)),
            (load_tokens, (x, pipeline, pairs_per_program, FOLD, STEPS, ROWS > 0, PDL)),
        ],
        [1, 1],
        [40, 40],
    )


@gluon.jit
def _add(
    operands,
    pipeline,
    buffer,
    STEPS: gl.constexpr,
    PDL: gl.constexpr,
):
    bias, residual, norm, scaled, squares, m, n, rows_per_program = operands
    BLOCK_M: gl.constexpr = buffer.shape[1] // 2
    lane, token = _pairs_and_tokens(BLOCK_M)
    row = gl.program_id(0) * rows_per_program + lane
    row_mask = (lane < rows_per_program) & (row < n)
    mask = (token < m)[None, :] & row_mask[:, None]
    offset = token.to(gl.int64)[None, :] * n + row[:, None]
    # Bias and norm weights are far away, and no kernel writes them. The prefetch brings the residual close, too.
    bias_values = gl.zeros([PAIRS], gl.float32, gl.SliceLayout(1, _LAYOUT))
    if bias is not None:
        bias_values = gl.load(bias + row, mask=row_mask, other=0.0).to(gl.float32)
    factor = gl.zeros([PAIRS], gl.float32, gl.SliceLayout(1, _LAYOUT))
    if norm is not None:
        factor = gl.load(norm + row, mask=row_mask, other=0.0).to(gl.float32)
    prefetch_lines(residual + gl.where(mask, offset, 0))
    wait_for_previous_kernel(PDL)
    residual_values = gl.load(residual + offset, mask=mask, other=0.0)
    low, high = multiply_halves(pipeline, 0, buffer, True, STEPS, _LAYOUT)
    updated = (low + high + bias_values[:, None] + residual_values.to(gl.float32)).to(residual.dtype.element_ty)
    gl.store(residual + offset, updated, mask=mask)
    if norm is not None:
        updated_wide = gl.where(mask, updated.to(gl.float32), 0.0)
        gl.store(scaled + offset, (updated_wide * factor[:, None]).to(scaled.dtype.element_ty), mask=mask)
        gl.store(squares + gl.program_id(0) * m + token, gl.sum(updated_wide * updated_wide, axis=0), mask=token < m)


@gluon.jit(do_not_specialize=["m", "rows_per_program"])
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
    rows_per_program,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute :func:`outrider_triton.products.jit.fused.linear_add` with a TMA pipeline. The product is folded, and a program
    has at most one tile.
    """
    pipeline = make_pipeline(x, w, True, BLOCK_M, BLOCK_K, STAGES)
    buffer = make_buffer(pipeline)
    operands = bias, residual, norm, scaled, squares, m, n, rows_per_program
    gl.warp_specialize(
        [
            (_add, (operands, pipeline, buffer, STEPS, PDL)),
            (load_weights, (w, pipeline, rows_per_program, PAIRS, True, STEPS)),
            (load_tokens, (x, pipeline, rows_per_program, True, STEPS, False, PDL)),
        ],
        [1, 1],
        [40, 40],
    )


@gluon.jit
def _gate(
    operands,
    pipeline,
    buffer,
    ROWS: gl.constexpr,
    SHARES: gl.constexpr,
    STEPS: gl.constexpr,
    PDL: gl.constexpr,
):
    squares, bias, out, eps, m, n, k, shares, pairs_per_program, x_scales, scales, maxima = operands
    BLOCK_M: gl.constexpr = buffer.shape[1]
    lane, token = _pairs_and_tokens(BLOCK_M)
    wait_for_previous_kernel(PDL)
    if squares is not None:
        parts = squares_of(squares, shares, m, SHARES, BLOCK_M)
    if ROWS:
        divisor = gl.load(x_scales + token, mask=token < m, other=0.0)
        largest = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(0, _LAYOUT))
    for tile in range(gl.cdiv(pairs_per_program, PAIRS)):
        index = tile * PAIRS + lane
        row = gl.program_id(0) * pairs_per_program + index
        row_mask = (index < pairs_per_program) & (row < n)
        if ROWS:  # loads that overlap with the product
            gate_factor = gl.load(scales + row // ROWS, mask=row_mask, other=0.0).to(gl.float32)
            up_factor = gl.load(scales + (n + row) // ROWS, mask=row_mask, other=0.0).to(gl.float32)
        gate, up = multiply_halves(pipeline, tile, buffer, False, STEPS, _LAYOUT)
        if ROWS:
            gate *= gate_factor[:, None] * divisor[None, :]
            up *= up_factor[:, None] * divisor[None, :]
        if squares is not None:
            scale = inverse_rms(parts, k, eps, _LAYOUT)
            gate *= scale
            up *= scale
        if bias is not None:
            gate += gl.load(bias + row, mask=row_mask, other=0.0).to(gl.float32)[:, None]
            up += gl.load(bias + n + row, mask=row_mask, other=0.0).to(gl.float32)[:, None]
        address = out + token.to(gl.int64)[None, :] * n + row[:, None]
        mask = (token < m)[None, :] & row_mask[:, None]
        activation = swiglu(gate, up, out.dtype.element_ty)
        gl.store(address, activation, mask=mask)
        if ROWS:
            magnitude = gl.abs(activation.to(gl.float32))
            magnitude = gl.where(magnitude == magnitude, magnitude, float("inf"))  # a maximum would ignore NaN
            largest = gl.maximum(largest, gl.max(gl.where(mask, magnitude, 0.0), axis=0))
    if ROWS:
        gl.store(maxima + gl.program_id(0) * m + token, largest, mask=token < m)


@gluon.jit(do_not_specialize=["m", "pairs_per_program", "shares"])
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
    pairs_per_program,
    x_scales,
    scales,
    maxima,
    ROWS: gl.constexpr,
    SHARES: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute :func:`outrider_triton.products.jit.matmul.linear_silu_mul` with a TMA pipeline.

    ROWS: as in :func:`streamed_linear`. The largest magnitudes of a program's part of each row then go to ``maxima [programs,
    m]``: infinity for NaN.
    """
    pipeline = make_pipeline(x, w, False, BLOCK_M, BLOCK_K, STAGES)
    buffer = make_buffer(pipeline)
    operands = squares, bias, out, eps, m, n, k, shares, pairs_per_program, x_scales, scales, maxima
    gl.warp_specialize(
        [
            (_gate, (operands, pipeline, buffer, ROWS, SHARES, STEPS, PDL)),
            (load_weights, (w, pipeline, pairs_per_program, n, False, STEPS)),
            (load_tokens, (x, pipeline, pairs_per_program, False, STEPS, True, PDL)),
        ],
        [1, 1],
        [40, 40],
    )


@gluon.jit
def _rotate(
    operands,
    rotary,
    pipeline,
    buffer,
    ROWS: gl.constexpr,
    SHARES: gl.constexpr,
    HALF: gl.constexpr,
    STEPS: gl.constexpr,
    PDL: gl.constexpr,
):
    squares, bias, q, eps, m, k, shares, pairs_per_program, x_scales, scales = operands
    _, _, _, _, slots, heads, kv_heads, _, _, _ = rotary
    BLOCK_M: gl.constexpr = buffer.shape[1]
    token = gl.program_id(2) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, _LAYOUT))
    token_mask = token < m
    wait_for_previous_kernel(PDL)
    if squares is not None:
        parts = squares_of(squares, shares, m, SHARES, BLOCK_M)
    if ROWS:
        divisor = gl.load(x_scales + token, mask=token_mask, other=0.0)
    slot = gl.load(slots + token, mask=token_mask, other=0)
    for tile in range(gl.cdiv(pairs_per_program, PAIRS)):
        index = tile * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(1, _LAYOUT))
        pair = gl.program_id(0) * pairs_per_program + index
        head = pair // HALF
        lane = pair % HALF
        pair_mask = (index < pairs_per_program) & (head < heads + 2 * kv_heads)
        mask = token_mask[None, :] & pair_mask[:, None]
        # Loads that the epilogue needs overlap with the product.
        rotates = mask & (head < heads + kv_heads)[:, None]
        angles = load_angles(rotary, token, lane, rotates, HALF)
        row = head * (2 * HALF) + lane
        if ROWS:
            low_factor = gl.load(scales + row // ROWS, mask=pair_mask, other=0.0).to(gl.float32)
            high_factor = gl.load(scales + (row + HALF) // ROWS, mask=pair_mask, other=0.0).to(gl.float32)
        first, second = multiply_halves(pipeline, tile, buffer, False, STEPS, _LAYOUT)
        if ROWS:
            first *= low_factor[:, None] * divisor[None, :]
            second *= high_factor[:, None] * divisor[None, :]
        if squares is not None:
            scale = inverse_rms(parts, k, eps, _LAYOUT)
            first *= scale
            second *= scale
        if bias is not None:
            first += gl.load(bias + row, mask=pair_mask, other=0.0).to(gl.float32)[:, None]
            second += gl.load(bias + row + HALF, mask=pair_mask, other=0.0).to(gl.float32)[:, None]
        # Rounded where the reference rounds: after the product and after the rotation.
        low_rows = first.to(q.dtype.element_ty)
        high_rows = second.to(q.dtype.element_ty)
        write_rotated(low_rows, high_rows, angles, q, rotary, slot, token, head, lane, mask, HALF)


@gluon.jit(do_not_specialize=["m", "pairs_per_program", "shares"])
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
    pairs_per_program,
    x_scales,
    scales,
    ROWS: gl.constexpr,
    SHARES: gl.constexpr,
    HALF: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute :func:`outrider_triton.products.jit.fused.linear_rope_write_cache` with a TMA pipeline; ROWS: as in
    :func:`streamed_linear`.
    """
    pipeline = make_pipeline(x, w, False, BLOCK_M, BLOCK_K, STAGES)
    buffer = make_buffer(pipeline)
    operands = squares, bias, q, eps, m, k, shares, pairs_per_program, x_scales, scales
    rotary = cos, sin, k_cache, v_cache, slots, heads, kv_heads, angles_token, cache_slot, cache_head
    gl.warp_specialize(
        [
            (_rotate, (operands, rotary, pipeline, buffer, ROWS, SHARES, HALF, STEPS, PDL)),
            (load_weights, (w, pipeline, pairs_per_program, HALF, False, STEPS)),
            (load_tokens, (x, pipeline, pairs_per_program, False, STEPS, ROWS > 0, PDL)),
        ],
        [1, 1],
        [40, 40],
    )
