"""Kernels of recurrent layers: short convolution, gated delta rule of few tokens, and gated norm.

Letters: K kernel size, D key size, E value size of a head, R state rows. Channels are q and k of the key heads, then v.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import next_power_of_2

from outrider_triton.jit.dependent import allow_next_kernel, begin, wait_for_previous_kernel

NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def silu(x):
    """Return x times its sigmoid."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def log_decay(a, rate, bias):
    """Return the logarithm of the factor by which the state decays at a token: -rate softplus(a + bias)."""
    x = a + bias
    return -rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def load_kept(state, window, slot, channels, row, mask, width, KERNEL: tl.constexpr, TOKENS: tl.constexpr):
    """Load the convolution's earlier input at ``slot`` of the row: first those of ``state`` [R, K - 1, width], the oldest
    first, then those of ``window`` [R, TOKENS, width], if there is one.
    """
    values = tl.load(state + (row * (KERNEL - 1) + slot) * width + channels, mask=mask & (slot < KERNEL - 1), other=0.0)
    if window is not None:
        kept = window + (row * TOKENS + slot - (KERNEL - 1)) * width + channels
        values = tl.where(slot < KERNEL - 1, values, tl.load(kept, mask=mask & (slot >= KERNEL - 1), other=0.0))
    return values


@triton.jit
def load_pending(pending, row, has_state):
    """Return the number of pending tokens of a row, which half of the updates they are in, and the half of new tokens."""
    held = tl.load(pending + row)
    return tl.where(has_state, tl.abs(held), 0).to(tl.int32), (held < 0).to(tl.int64), (held > 0).to(tl.int64)


@triton.jit
def sequence_of(query_start, rows, seq_lens, sequence):
    """Return the first new token of ``sequence``, the number of its new tokens, its state row, and whether it has a state."""
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    return start, count, tl.load(rows + sequence), tl.load(seq_lens + sequence) > count


@triton.jit(do_not_specialize=["reads_early"])
def short_convolution(
    x,
    weight,
    state,
    rows,
    query_start,
    seq_lens,
    pending,
    window,
    out,
    x_stride,
    width,
    reads_early,
    KERNEL: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Convolve a block of tokens and channels of ``x`` [T, width] to ``out``; one program per (block of tokens, block of
    channels, sequence).

    The first block of tokens reads the row's state and window. The same program then writes the state: after all tokens, or
    with a ``window`` [R, TOKENS, width] after the pending ones, and the new tokens to the window. ``reads_early``: no kernel
    that may still run writes states, windows or lengths, so their loads precede the wait.
    """
    allow_next_kernel(PDL)
    sequence = tl.program_id(2)
    lane = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    channels = lane[None, :]
    factors = ()
    for tap in tl.static_range(KERNEL):
        factor = tl.load(weight + channels * KERNEL + tap, mask=channels < width, other=0.0).to(tl.float32)
        factors += (tl.broadcast_to(factor, [BLOCK_T, BLOCK_C]),)
    if reads_early == 0:
        wait_for_previous_kernel(PDL)
    start, count, row, has_state = sequence_of(query_start, rows, seq_lens, sequence)
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    mask = (token < count) & (channels < width)
    first = 0  # slot of the oldest input that a new token reads
    if window is not None:
        first, _, _ = load_pending(pending, row, has_state)
    slot = tl.arange(0, next_power_of_2(KERNEL))[:, None]
    in_state = (slot < KERNEL - 1) & (channels < width)
    total = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    if tl.program_id(0) == 0:
        for tap in tl.static_range(KERNEL - 1):  # the oldest first, like the reference
            known = mask & has_state & (token + tap < KERNEL - 1)
            kept = load_kept(state, window, token + tap + first, channels, row, known, width, KERNEL, TOKENS)
            total += kept.to(x.dtype.element_ty).to(tl.float32) * factors[tap]
    if reads_early != 0:
        wait_for_previous_kernel(PDL)

    if tl.program_id(0) * BLOCK_T < tl.maximum(count, 1):
        for tap in tl.static_range(KERNEL):
            position = token + (tap - (KERNEL - 1))
            fresh = x + (start + position).to(tl.int64) * x_stride + channels
            total += tl.load(fresh, mask=mask & (position >= 0), other=0.0).to(tl.float32) * factors[tap]
        place = out + (start + token).to(tl.int64) * width + channels
        tl.store(place, silu(total).to(out.dtype.element_ty), mask=mask)
        if tl.program_id(0) == 0:
            known = in_state & has_state
            if window is None:
                first = count
                known &= slot + first < KERNEL - 1
            latest = load_kept(state, window, slot + first, channels, row, known, width, KERNEL, TOKENS)
            if window is None:
                index = slot + first - (KERNEL - 1)
                source = x + (start + index).to(tl.int64) * x_stride + channels
                unread = tl.load(source, mask=in_state & (index >= 0), other=0.0)
                latest = tl.where(index >= 0, unread, latest.to(unread.dtype))
            tl.debug_barrier()  # all threads of the program have read the state and the window
            tl.store(state + (row * (KERNEL - 1) + slot) * width + channels, latest, mask=in_state)
            if window is not None:
                new = tl.arange(0, next_power_of_2(TOKENS))[:, None]
                is_new = (new < count) & (channels < width)
                inputs = tl.load(x + (start + new).to(tl.int64) * x_stride + channels, mask=is_new, other=0.0)
                tl.store(window + (row * TOKENS + new) * width + channels, inputs, mask=is_new)


@triton.jit
def load_token(mixed, gates, index, q_lane, k_lane, v_lane, head, value_heads, mixed_stride, gates_stride, in_d, in_e):
    """Load q [D], k [D] and v of one token and value head, and its gates a and b, in float32."""
    row = mixed + index * mixed_stride
    q = tl.load(row + q_lane, mask=in_d, other=0.0).to(tl.float32)
    k = tl.load(row + k_lane, mask=in_d, other=0.0).to(tl.float32)
    v = tl.load(row + v_lane, mask=in_e, other=0.0).to(tl.float32)
    b = tl.load(gates + index * gates_stride + head).to(tl.float32)
    a = tl.load(gates + index * gates_stride + value_heads + head).to(tl.float32)
    return q, k, v, a, b


@triton.jit
def load_update(update, k_lane, correction_lane, factor_place, in_d, in_e):
    """Load an update of one value head: k [D], correction [E] and factor of :func:`apply_update`."""
    k = tl.load(update + k_lane, mask=in_d, other=0.0)
    return k, tl.load(update + correction_lane, mask=in_e, other=0.0), tl.load(update + factor_place)


@triton.jit
def apply_update(current, k, factor, correction):
    """Return the state ``current`` [D, E] times ``factor``, plus ``k`` [D] times ``correction`` [E].

    One fused operation adds the product in every kernel: a settled state has the bits of the state that verification used.
    """
    k, correction = tl.broadcast_to(k[:, None], current.shape), tl.broadcast_to(correction[None, :], current.shape)
    return tl.fma(k, correction, current * factor)


@triton.jit
def _advance(current, q, k, v, a, b, rate, bias, D: tl.constexpr):
    """Apply the gated delta rule of one token to the state ``current`` [D, E]. Return the new state, the result [E], and the
    update: k, factor and correction of :func:`apply_update`.

    ``q``, ``k``, ``v``, ``a`` and ``b`` are the results of :func:`load_token`.
    """
    q = q * tl.rsqrt(tl.sum(q * q, axis=0) + NORM_EPS) * (D**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + NORM_EPS)
    decay = tl.exp(log_decay(a, rate, bias))
    found = tl.sum(current * k[:, None], axis=0) * decay
    read = tl.sum(current * q[:, None], axis=0) * decay
    correction = (v - found) / (1.0 + tl.exp(-b))
    current = apply_update(current, k, decay, correction)
    return current, read + tl.sum(q * k, axis=0) * correction, k, decay, correction


@triton.jit(do_not_specialize=["reads_early"])
def delta_rule(
    mixed,
    gates,
    a_log,
    dt_bias,
    state,
    rows,
    query_start,
    seq_lens,
    pending,
    updates,
    out,
    key_width,
    value_heads,
    values_per_key,
    mixed_stride,
    gates_stride,
    reads_early,
    D: tl.constexpr,
    E: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the gated delta rule for the few tokens of a sequence, to ``out`` [T, Hv, E]; one program per (value head,
    block of values, sequence). Devices with dependent launch run :mod:`outrider_triton.jit.recurrent_steps_shared` instead.

    One warp has all keys of a few values, so no sum crosses warps. Without ``updates``, the state after all tokens is
    written. With ``updates`` [R, 2, TOKENS, W], the pending ones of one half change the state first, which is written, and
    those of the new tokens go to the other half. Decoding and verification run the same operations, so their bits are equal.
    ``reads_early``: no kernel that may still run writes states, updates or lengths, so their loads precede the wait.
    """
    allow_next_kernel(PDL)
    head, sequence = tl.program_id(0), tl.program_id(2)
    d = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_E)
    e = tl.program_id(1) * BLOCK_E + column
    in_d, in_e = d < D, e < E
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))  # weights, so their loads may precede the wait
    bias = tl.load(dt_bias + head).to(tl.float32)
    if reads_early == 0:
        wait_for_previous_kernel(PDL)
    start, count, row, has_state = sequence_of(query_start, rows, seq_lens, sequence)
    # One address per thread and constant distances: addresses of every row would take 32 registers.
    first = state + (row * value_heads + head) * D * E + tl.program_id(1) * BLOCK_E
    cells = first + (d[:, None] * E + column[None, :])
    inside = in_d[:, None] & in_e[None, :]
    current = tl.load(cells, mask=inside & has_state, other=0.0).to(tl.float32)
    q_lane = head // values_per_key * D + d
    if updates is not None:
        width = key_width + value_heads * (E + 1)
        held, half, new_half = load_pending(pending, row, has_state)
        parts = q_lane, key_width + head * E + e, key_width + value_heads * E + head, in_d, in_e
        kept = updates + (row * 2 + half) * TOKENS * width
        k, correction, factor = load_update(kept, *parts)
        for token in range(held):
            # As below, the loads of the next token overlap with this one.
            k_next, correction_next, factor_next = load_update(kept + tl.minimum(token + 1, held - 1) * width, *parts)
            current = apply_update(current, k, factor, correction)
            k, correction, factor = k_next, correction_next, factor_next
        current = current.to(state.dtype.element_ty).to(tl.float32)  # as if another call had written the state
        kept = updates + (row * 2 + new_half) * TOKENS * width
    if reads_early != 0:
        wait_for_previous_kernel(PDL)

    if updates is not None:
        if held > 0:
            tl.store(cells, current.to(state.dtype.element_ty), mask=inside)
    own = q_lane, key_width + q_lane, 2 * key_width + head * E + e, head, value_heads, mixed_stride, gates_stride, in_d, in_e
    q, k, v, a, b = load_token(mixed, gates, start.to(tl.int64), *own)
    for token in range(count):
        # The loads of the next token overlap with this one; after the last, they repeat it.
        following = (start + tl.minimum(token + 1, count - 1)).to(tl.int64)
        q_next, k_next, v_next, a_next, b_next = load_token(mixed, gates, following, *own)
        current, result, k, decay, correction = _advance(current, q, k, v, a, b, rate, bias, D)
        place = out + ((start + token).to(tl.int64) * value_heads + head) * E + e
        tl.store(place, result.to(out.dtype.element_ty), mask=in_e)
        if updates is not None:
            tl.store(kept + parts[1], correction, mask=in_e)
            if tl.program_id(1) == 0:
                tl.store(kept + parts[2], decay)
                if head % values_per_key == 0:
                    tl.store(kept + parts[0], k, mask=in_d)
            kept += width
        q, k, v, a, b = q_next, k_next, v_next, a_next, b_next
    if updates is None:
        tl.store(cells, current.to(state.dtype.element_ty), mask=inside)


@triton.jit
def gated_norm(normed, z, scale, out_type: tl.constexpr):
    """Return normalised values ``normed`` times ``scale`` and SiLU of ``z``, rounded where the reference rounds."""
    scaled = normed.to(out_type).to(tl.float32) * scale.to(tl.float32)
    if scale.dtype == out_type:
        scaled = scaled.to(out_type).to(tl.float32)
    return (scaled * silu(z)).to(out_type)


@triton.jit(do_not_specialize=["count", "inner"])
def gated_rms_norm(
    x,
    gate,
    weight,
    out,
    eps,
    count,
    inner,
    gate_outer,
    gate_inner,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the gated RMS norm of ROWS of the ``count`` rows of ``x`` [count, E]; one program per ROWS rows. Row r of
    ``gate`` is at (r // inner, r % inner).
    """
    e = tl.arange(0, BLOCK_E)
    scale = tl.load(weight + e, mask=e < E, other=0.0)
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < count)[:, None] & (e < E)[None, :]
    wide = tl.load(x + row[:, None] * E + e[None, :], mask=inside, other=0.0).to(tl.float32)
    place = (row // inner * gate_outer + row % inner * gate_inner)[:, None] + e[None, :]
    z = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / E + eps)
    made = gated_norm(wide * inverse[:, None], z, scale[None, :], out.dtype.element_ty)
    tl.store(out + row[:, None] * E + e[None, :], made, mask=inside)


@triton.jit
def sigmoid_product(values, z, out_type: tl.constexpr):
    """Return ``values`` times the sigmoid of ``z``, rounded where the reference rounds."""
    factor = (1.0 / (1.0 + tl.exp(-z))).to(out_type).to(tl.float32)
    return (values * factor).to(out_type)


@triton.jit
def sigmoid_mul(x, gate, out, size, x_stride, gate_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Store a chunk of a row of ``x`` [rows, size] times the sigmoid of its gate to ``out`` [rows, size]; one program per
    (row, chunk).
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    z = tl.load(gate + row * gate_stride + lane, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + lane, sigmoid_product(values, z, out.dtype.element_ty), mask=inside)
