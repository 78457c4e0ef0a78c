"""Kernels of recurrent layers: short convolution, gated delta rule of few tokens, and gated norm.

Letters: K kernel size, D key size, E value size of a head, R state rows. Channels are q and k of the key heads, then v.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider_triton.jit.dependent import allow_next_kernel, begin, wait_for_previous_kernel

_NORM_EPS = tl.constexpr(1e-6)
_FACTORS = tl.constexpr(4)
"""Places for the factors of a token: the state's, the correction's, and the product of q and k."""
_TOKENS = tl.constexpr(8)
"""Tokens whose q, k and v are prepared at once: one number, so that a token's bits don't depend on how many there are."""


@triton.jit
def silu(x):
    """Return x times its sigmoid."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def log_decay(a, rate, bias):
    """Return the logarithm of the state's factor, -rate softplus(a + bias)."""
    x = a + bias
    return -rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def load_input(x, state, position, channels, start, row, has_state, x_stride, width, mask, KERNEL: tl.constexpr):
    """Load the convolution's input at ``position`` of a sequence; before the first new token, from the row's state."""
    slot = position + (KERNEL - 1)
    fresh = tl.load(x + (start + position).to(tl.int64) * x_stride + channels, mask=mask & (position >= 0), other=0.0)
    kept = tl.load(
        state + (row * (KERNEL - 1) + slot) * width + channels,
        mask=mask & (position < 0) & (slot >= 0) & has_state,
        other=0.0,
    )
    return tl.where(position >= 0, fresh, kept.to(fresh.dtype))


@triton.jit
def write_window(x, state, kept, channels, start, row, has_state, x_stride, width, KERNEL: tl.constexpr):
    """Write the last inputs of a sequence's first ``kept`` new tokens to the row's state."""
    mask = channels < width
    for slot in tl.static_range(KERNEL - 1):  # ascending: a slot takes the input of a later one
        position = kept + (slot - (KERNEL - 1))
        value = load_input(x, state, position, channels, start, row, has_state, x_stride, width, mask, KERNEL)
        tl.store(state + (row * (KERNEL - 1) + slot) * width + channels, value, mask=mask)


@triton.jit
def commit_window(
    x,
    state,
    rows,
    query_start,
    seq_lens,
    commit,
    x_stride,
    width,
    KERNEL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the convolution's state after ``commit`` tokens; program (block of channels, sequence)."""
    begin(PDL)
    sequence = tl.program_id(1)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    row = tl.load(rows + sequence)
    has_state = tl.load(seq_lens + sequence) > count
    kept = tl.load(commit + sequence).to(tl.int32)
    lane = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    write_window(x, state, kept, lane, start, row, has_state, x_stride, width, KERNEL)


@triton.jit
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
    KERNEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Convolve a block of tokens and channels; program (block of tokens, block of channels, sequence).

    The first block of tokens reads the row's state. The same program writes the state after ``commit`` tokens.
    """
    begin(PDL)
    sequence = tl.program_id(2)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    if tl.program_id(0) * BLOCK_T < tl.maximum(count, 1):
        row = tl.load(rows + sequence)
        has_state = tl.load(seq_lens + sequence) > count
        token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
        lane = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        channels = lane[None, :]
        mask = (token < count) & (channels < width)
        total = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
        for tap in tl.static_range(KERNEL):  # the oldest first, like the reference
            factor = tl.load(weight + channels * KERNEL + tap, mask=channels < width, other=0.0).to(tl.float32)
            position = token + (tap - (KERNEL - 1))
            value = load_input(x, state, position, channels, start, row, has_state, x_stride, width, mask, KERNEL)
            total += value.to(tl.float32) * factor
        place = out + (start + token).to(tl.int64) * width + channels
        tl.store(place, silu(total).to(out.dtype.element_ty), mask=mask)
        if commit is not None:
            if tl.program_id(0) == 0:
                tl.debug_barrier()  # other threads of the program have read the state
                kept = tl.load(commit + sequence).to(tl.int32)
                write_window(x, state, kept, lane, start, row, has_state, x_stride, width, KERNEL)


@triton.jit
def load_convolved(mixed, weight, inputs, token, channels, start, row, has_state, stride, width, mask, KERNEL: tl.constexpr):
    """Load ``channels`` of ``token``, both in two dimensions, in float32.

    With KERNEL > 0, return SiLU of their convolution, rounded like its result.
    """
    if KERNEL == 0:
        return tl.load(mixed + (start + token).to(tl.int64) * stride + channels, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros(mask.shape, dtype=tl.float32)
    for tap in tl.static_range(KERNEL):
        factor = tl.load(weight + channels * KERNEL + tap, mask=channels < width, other=0.0).to(tl.float32)
        position = token + (tap - (KERNEL - 1))
        value = load_input(mixed, inputs, position, channels, start, row, has_state, stride, width, mask, KERNEL)
        total += value.to(tl.float32) * factor
    return silu(total).to(mixed.dtype.element_ty).to(tl.float32)


@triton.jit
def normalized(x):
    """Divide each row by its Euclidean norm."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + _NORM_EPS)[:, None]


@triton.jit(do_not_specialize=["writes_state", "writes_out", "reads_early"])
def delta_rule(
    mixed,
    gates,
    gate,
    weight,
    a_log,
    dt_bias,
    norm,
    inputs,
    state,
    rows,
    query_start,
    seq_lens,
    commit,
    vectors,
    out,
    eps,
    key_width,
    value_heads,
    values_per_key,
    mixed_stride,
    gates_stride,
    gate_stride,
    writes_state,
    writes_out,
    reads_early,
    D: tl.constexpr,
    E: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    LANES: tl.constexpr,
    VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the gated delta rule of a sequence's few tokens; program (value head, block of values, sequence).

    KERNEL > 0: ``mixed`` are inputs of the short convolution with ``weight``, whose state ``inputs`` is only read.
    ``norm``: the result is normalised, and multiplied by SiLU of ``gate``. With ``writes_state``, the state after ``commit``
    tokens is written. Decoding, verification and replay run the same machine code, so their bits are equal.
    ``reads_early``: no kernel that may still run writes the state or the lengths, so their loads precede the wait.
    ``vectors`` [T, value heads, blocks, 2 BLOCK_D + BLOCK_E + 4] is scratch memory for q, k, v and the factors of each
    program's tokens: a vector that stays in registers through the loop would be in all of them.

    The state is a tile [keys, warps, lanes of keys, values]: a warp has all keys of its values, and sums over them alone.
    """
    allow_next_kernel(PDL)
    WARPS: tl.constexpr = BLOCK_E // VALUES
    head = tl.program_id(0)
    sequence = tl.program_id(2)
    key = (tl.arange(0, BLOCK_D // LANES) * LANES)[:, None, None, None] + tl.arange(0, LANES)[None, None, :, None]
    lane = (tl.arange(0, WARPS) * VALUES)[:, None] + tl.arange(0, VALUES)[None, :]
    e = tl.program_id(1) * BLOCK_E + lane
    in_e = e < E
    width = 2 * key_width + value_heads * E
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))  # weights, so their loads may precede the wait
    bias = tl.load(dt_bias + head).to(tl.float32)
    if norm is not None:
        scale = tl.load(norm + e, mask=in_e, other=0.0)
    if reads_early == 0:
        wait_for_previous_kernel(PDL)

    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    row = tl.load(rows + sequence)
    has_state = tl.load(seq_lens + sequence) > count
    cells = state + ((row * value_heads + head) * D + key) * E + e[None, :, None, :]
    inside = (key < D) & in_e[None, :, None, :]
    current = tl.load(cells, mask=inside & has_state, other=0.0).to(tl.float32)
    if reads_early != 0:
        wait_for_previous_kernel(PDL)

    committed = count
    if writes_state != 0:
        committed = tl.load(commit + sequence).to(tl.int32)
    limit = count
    if writes_out == 0:
        limit = tl.minimum(count, committed)

    SIZE: tl.constexpr = 2 * BLOCK_D + BLOCK_E + _FACTORS
    own = vectors + (head * tl.num_programs(1) + tl.program_id(1)) * SIZE
    stride = value_heads * tl.num_programs(1) * SIZE
    for first in range(0, limit, _TOKENS):
        index = first + tl.arange(0, _TOKENS)
        token = index[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        value = tl.arange(0, BLOCK_E)[None, :]
        keys = (token < limit) & (d < D)
        values = (token < limit) & (tl.program_id(1) * BLOCK_E + value < E)
        q_lane = head // values_per_key * D + d
        k_lane = key_width + q_lane
        v_lane = 2 * key_width + head * E + tl.program_id(1) * BLOCK_E + value
        q = load_convolved(mixed, weight, inputs, token, q_lane, start, row, has_state, mixed_stride, width, keys, KERNEL)
        k = load_convolved(mixed, weight, inputs, token, k_lane, start, row, has_state, mixed_stride, width, keys, KERNEL)
        v = load_convolved(mixed, weight, inputs, token, v_lane, start, row, has_state, mixed_stride, width, values, KERNEL)
        q = normalized(q) * (D**-0.5)
        k = normalized(k)
        gate_of = gates + (start + index).to(tl.int64) * gates_stride + head
        b = tl.load(gate_of, mask=index < limit, other=0.0).to(tl.float32)
        a = tl.load(gate_of + value_heads, mask=index < limit, other=0.0).to(tl.float32)
        place = own + (start + token).to(tl.int64) * stride
        tl.store(place + d, q, mask=token < limit)
        tl.store(place + BLOCK_D + d, k, mask=token < limit)
        tl.store(place + 2 * BLOCK_D + value, v, mask=token < limit)
        factors = own + (start + index).to(tl.int64) * stride + 2 * BLOCK_D + BLOCK_E
        tl.store(factors, tl.exp(log_decay(a, rate, bias)), mask=index < limit)
        tl.store(factors + 1, 1.0 / (1.0 + tl.exp(-b)), mask=index < limit)
        tl.store(factors + 2, tl.sum(q * k, axis=1), mask=index < limit)
    tl.debug_barrier()

    for token in range(limit):
        index = (start + token).to(tl.int64)
        place = own + index * stride
        q = tl.load(place + key, cache_modifier=".cg")
        k = tl.load(place + BLOCK_D + key, cache_modifier=".cg")
        v = tl.load(place + 2 * BLOCK_D + lane, cache_modifier=".cg")
        decay = tl.load(place + 2 * BLOCK_D + BLOCK_E, cache_modifier=".cg")
        beta = tl.load(place + 2 * BLOCK_D + BLOCK_E + 1, cache_modifier=".cg")
        product = tl.load(place + 2 * BLOCK_D + BLOCK_E + 2, cache_modifier=".cg")
        found = tl.sum(tl.sum(current * k, axis=0), axis=1) * decay
        read = tl.sum(tl.sum(current * q, axis=0), axis=1) * decay
        correction = (v - found) * beta
        current = current * decay + k * correction[None, :, None, :]
        if writes_state != 0:
            if token + 1 == committed:
                tl.store(cells, current.to(state.dtype.element_ty), mask=inside)
        if writes_out != 0:
            result = (read + product * correction).to(out.dtype.element_ty)
            if norm is not None:
                z = tl.load(gate + index * gate_stride + head * E + e, mask=in_e, other=0.0).to(tl.float32)
                wide = result.to(tl.float32)
                inverse = tl.rsqrt(tl.sum(tl.sum(wide * wide, axis=1), axis=0) / E + eps)
                result = gated_norm(wide * inverse, z, scale, out.dtype.element_ty)
            tl.store(out + (index * value_heads + head) * E + e, result, mask=in_e)


@triton.jit
def gated_norm(normed, z, scale, out_type: tl.constexpr):
    """Multiply normalised values by ``scale`` and SiLU of ``z``, rounded where the reference rounds."""
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
    """Compute the gated norm of ROWS of ``count`` rows. Row r of ``gate`` is at (r // inner, r % inner)."""
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
def sigmoid_mul(x, gate, out, size, x_stride, gate_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Multiply a chunk of a row by the sigmoid of its gate; program (row, chunk)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    z = tl.load(gate + row * gate_stride + lane, mask=inside, other=0.0).to(tl.float32)
    factor = (1.0 / (1.0 + tl.exp(-z))).to(out.dtype.element_ty).to(tl.float32)  # rounded like the reference's
    values = tl.load(x + row * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + lane, (values * factor).to(out.dtype.element_ty), mask=inside)
