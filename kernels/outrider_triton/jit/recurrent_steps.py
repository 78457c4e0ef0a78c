"""Kernels of recurrent layers: short convolution, gated delta rule of few tokens, and gated norm.

Letters: K kernel size, D key size, E value size of a head, R state rows. Channels are q and k of the key heads, then v.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import next_power_of_2

from outrider_triton.jit.dependent import allow_next_kernel, begin, wait_for_previous_kernel

_NORM_EPS = tl.constexpr(1e-6)


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
def load_kept(state, position, channels, row, mask, width, KERNEL: tl.constexpr):
    """Load the convolution's input at ``position`` from the row's ``state`` [R, K - 1, width]; 0 from position 0 on."""
    slot = position + (KERNEL - 1)
    kept = state + (row * (KERNEL - 1) + slot) * width + channels
    return tl.load(kept, mask=mask & (position < 0) & (slot >= 0), other=0.0)


@triton.jit
def load_input(x, state, position, channels, start, row, has_state, x_stride, width, mask, KERNEL: tl.constexpr):
    """Load the convolution's input at ``position`` of a sequence; before the first new token, from the row's state.

    ``x`` [T, width] has the new tokens, the sequence's from ``start`` on; ``state`` is [R, K - 1, width]. ``channels``
    selects columns, of which ``mask`` are valid.
    """
    fresh = tl.load(x + (start + position).to(tl.int64) * x_stride + channels, mask=mask & (position >= 0), other=0.0)
    kept = load_kept(state, position, channels, row, mask & has_state, width, KERNEL)
    return tl.where(position >= 0, fresh, kept.to(fresh.dtype))


@triton.jit
def load_window(x, state, kept, channels, start, row, has_state, x_stride, width, KERNEL: tl.constexpr):
    """Load the K - 1 inputs up to the first ``kept`` new tokens of a sequence, the oldest first: [K - 1, padded; channels].

    Operands as in :func:`load_input`.
    """
    slot = tl.arange(0, next_power_of_2(KERNEL))[:, None]
    lane = channels[None, :]
    mask = (slot < KERNEL - 1) & (lane < width)
    position = kept + slot - (KERNEL - 1)
    return load_input(x, state, position, lane, start, row, has_state, x_stride, width, mask, KERNEL)


@triton.jit
def store_window(state, values, channels, row, width, KERNEL: tl.constexpr):
    """Store the inputs ``values`` of :func:`load_window` to ``state`` [R, K - 1, width] at ``row``."""
    slot = tl.arange(0, next_power_of_2(KERNEL))[:, None]
    lane = channels[None, :]
    tl.debug_barrier()  # all threads of the program have read the state
    place = state + (row * (KERNEL - 1) + slot) * width + lane
    tl.store(place, values, mask=(slot < KERNEL - 1) & (lane < width))


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
    commit,
    out,
    x_stride,
    width,
    reads_early,
    KERNEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Convolve a block of tokens and channels of ``x`` [T, width] to ``out``; one program per (block of tokens, block of
    channels, sequence).

    The first block of tokens reads the row's state. The same program writes the state after ``commit`` tokens.
    ``reads_early``: no kernel that may still run writes the state or the lengths, so their loads precede the wait.
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
    total = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    if tl.program_id(0) == 0:
        for tap in tl.static_range(KERNEL - 1):  # the oldest first, like the reference
            kept = load_kept(state, token + (tap - (KERNEL - 1)), channels, row, mask & has_state, width, KERNEL)
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
        if commit is not None:
            if tl.program_id(0) == 0:
                kept = tl.load(commit + sequence).to(tl.int32)
                window = load_window(x, state, kept, lane, start, row, has_state, x_stride, width, KERNEL)
                store_window(state, window, lane, row, width, KERNEL)


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
def _advance(current, q, k, v, a, b, rate, bias, D: tl.constexpr):
    """Apply the gated delta rule of one token to the state ``current`` [D, E]. Return the new state and the result [E].

    ``q``, ``k``, ``v``, ``a`` and ``b`` are the results of :func:`load_token`.
    """
    q = q * tl.rsqrt(tl.sum(q * q, axis=0) + _NORM_EPS) * (D**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + _NORM_EPS)
    decay = tl.exp(log_decay(a, rate, bias))
    found = tl.sum(current * k[:, None], axis=0) * decay
    read = tl.sum(current * q[:, None], axis=0) * decay
    correction = (v - found) / (1.0 + tl.exp(-b))
    current = current * decay + k[:, None] * correction[None, :]
    return current, read + tl.sum(q * k, axis=0) * correction


@triton.jit(do_not_specialize=["writes_state", "reads_early"])
def delta_rule(
    mixed,
    gates,
    a_log,
    dt_bias,
    state,
    rows,
    query_start,
    seq_lens,
    commit,
    out,
    inputs,
    window,
    key_width,
    value_heads,
    values_per_key,
    mixed_stride,
    gates_stride,
    inputs_stride,
    writes_state,
    reads_early,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the gated delta rule for the few tokens of a sequence, to ``out`` [T, Hv, E]; one program per (value head,
    block of values, sequence).

    One warp has all keys of a few values, so no sum crosses warps. With ``writes_state``, the state after ``commit`` tokens
    is written, and later tokens aren't computed. Decoding and verification run the same machine code, so their bits are
    equal. ``reads_early``: no kernel that may still run writes the state or the lengths, so their loads precede the wait.

    With KERNEL, the kernel replays a verified window: it computes states alone, by the same operations, and also writes the
    convolution's state ``window`` [R, K - 1, width] from its ``inputs`` [T, width], BLOCK_C channels per program.
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
    if reads_early != 0:
        wait_for_previous_kernel(PDL)

    if writes_state != 0:
        count = tl.load(commit + sequence).to(tl.int32)
    if KERNEL > 0:
        width = 2 * key_width + value_heads * E
        channels = (head * tl.num_programs(1) + tl.program_id(1)) * BLOCK_C + tl.arange(0, BLOCK_C)
        latest = load_window(inputs, window, count, channels, start, row, has_state, inputs_stride, width, KERNEL)
    q_lane = head // values_per_key * D + d
    own = q_lane, key_width + q_lane, 2 * key_width + head * E + e, head, value_heads, mixed_stride, gates_stride, in_d, in_e
    q, k, v, a, b = load_token(mixed, gates, start.to(tl.int64), *own)
    for token in range(count):
        # The loads of the next token overlap with this one; after the last, they repeat it.
        following = (start + tl.minimum(token + 1, count - 1)).to(tl.int64)
        q_next, k_next, v_next, a_next, b_next = load_token(mixed, gates, following, *own)
        current, result = _advance(current, q, k, v, a, b, rate, bias, D)
        if KERNEL == 0:
            place = out + ((start + token).to(tl.int64) * value_heads + head) * E + e
            tl.store(place, result.to(out.dtype.element_ty), mask=in_e)
        q, k, v, a, b = q_next, k_next, v_next, a_next, b_next
    if writes_state != 0:
        tl.store(cells, current.to(state.dtype.element_ty), mask=inside)
    if KERNEL > 0:
        store_window(window, latest, channels, row, width, KERNEL)


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
